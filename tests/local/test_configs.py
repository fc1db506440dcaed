"""Every file of configs/local: what it builds, and when it exchanges."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gossip.networks import Trained, on

from dgc.gossip import HierarchicalGossip
from dgc.local import OuterSteps
from dgc.memory import ResidualMemory
from dgc.selection import TopKPerChunk
from dgc.wire import RiceIndices, TwoBitValues
from dgc_training.config import ConfigError, instantiate, load

CNN = "configs/digits/cnn.py"
FOLDER = Path(__file__).parents[2] / "configs" / "local"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "machines"))
pytestmark = pytest.mark.usefixtures("no_type_checks")


def tree_of(*stack: str, **settings: Any) -> Any:
    words = [word for key, value in settings.items() for word in (f"--configs.train.local.{key}", str(value))]
    return load([CNN, *stack], words)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("before", [[], ["configs/local/diloco.py"]], ids=["alone", "after diloco"])
def test_a_file_exchanges_after_its_steps(name: str, before: list[str]) -> None:
    tree = tree_of(*before, f"configs/local/{name}.py", average_every=4)

    def body(transport: Any) -> Any:
        own = Trained(transport, instantiate(tree.train.local))
        own.steps(4 + own.algorithm.delay)
        sent = own.optimizer.meter.payload_bytes
        own.optimizer.synchronize_messages()
        with own.optimizer.consensus():
            pass
        return sent, own.optimizer.consensus_distance

    for sent, distance in on(2, body):
        assert 0 < sent <= 4 * 93 + 64 and (name == "streaming" or distance == 0.0)


def test_sparseloco_is_the_published_one_and_gossip_between_exchanges_and_islands() -> None:
    algorithm = instantiate(tree_of("configs/local/sparseloco.py").train.local)
    (rule,) = algorithm.compression.rules
    assert algorithm.average_every == 30 and rule.compressor.compress_ratio == 64 / 4096
    assert isinstance(rule.compressor.memory, ResidualMemory) and rule.compressor.memory.decay == 0.95
    assert rule.compressor.selector == TopKPerChunk(4096)
    assert (rule.compressor.format.values, rule.compressor.format.indices) == (TwoBitValues(6.0), RiceIndices())
    optimizer = algorithm.outer([torch.zeros(1)])
    assert optimizer.defaults["lr"] == 1.0 and optimizer.defaults["momentum"] == 0
    gossiping = instantiate(tree_of("configs/gossip/sgp.py", "configs/local/sign.py").train.local)
    assert type(gossiping.base).__name__ == "SGP"
    islands = instantiate(load([CNN, "configs/local/sparseloco.py", "configs/local/machines.py"]).train.local)
    assert isinstance(islands, HierarchicalGossip) and isinstance(islands.base, OuterSteps)
    assert islands.base.average_every == 30
    with pytest.raises(ConfigError, match="train.compression._target_"):
        load([CNN, "configs/powersgd/rank2.py", "configs/local/diloco.py"])
