"""Every config file that names a method or a graph trains: a few steps on digits, on simulated ranks."""

import math
from pathlib import Path
from typing import Any

import pytest
from simulated import CNN, summary_of, train_in

from dgc_training.config import instantiate, load

CONFIGS = Path(__file__).parents[2] / "configs"
SETTINGS = "train.num_epochs=1 train.batch_size=180 train.warmup_lr_epochs=0 train.checkpoint_every=null".split()
SETTINGS += ["data.num_threads_per_worker=1", "model.width=8"]
BEFORE = {
    "threshold/server": ["configs/threshold/2bit.py"],
    "route/matrices_only": ["configs/quant/qsgd.py"],
    "dgc/reduce_scatter": ["configs/dgc/wm0.py", "configs/dgc/int32.py"],
    "dgc/gtopk": ["configs/dgc/wm0.py", "configs/dgc/int32.py"],
    "adam/fp16": ["configs/adam/zero_one_adam.py"],
}
ZERO_ONE = ["train.local.var_freeze_step=2", "train.check_replicas_every=0"]
# the small model is less than one chunk of the default size, and an epoch has four steps
ALSO = {
    "adam/onebit_adam": ["train.optimizer.freeze_step=2"],
    "adam/zero_one_adam": ZERO_ONE,
    "adam/fp16": ZERO_ONE,
    "adam/dgc_adam": ["train.optimizer.freeze_step=2"],
    "adam/dgc": ["train.compression.warmup_epochs=0"],
}


def names(folder: str) -> list[str]:
    """The files that extend a stack, without those of which every stack has one."""
    files = sorted((CONFIGS / folder).glob("*.py"))
    return [f"{folder}/{path.stem}" for path in files if path.stem not in ("__init__", "streaming")]


FOLDERS = ("chunks", "powersgd", "threshold", "quant", "sparse", "adam", "route")
COMPRESSION = [name for folder in FOLDERS for name in names(folder)] + ["dgc/reduce_scatter", "dgc/gtopk"]
GOSSIP = [
    *(["gossip/" + name] for name in ("ar", "sgp", "osgp", "dpsgd", "choco", "powergossip")),
    *(["gossip/sgp", "gossip/" + name] for name in ("fp16", "bf16", "int8", "machines")),
    *(["gossip/osgp", name] for name in names("local")),
    ["gossip/sgp", "topology/hierarchical"],
    ["local/slowmo"],
]


@pytest.mark.parametrize("name", COMPRESSION)
@pytest.mark.usefixtures("no_type_checks")
def test_compression_trains_and_sends_less(name: str, tmp_path: Path) -> None:
    also = ["train.compression.chunk_size=200"] if name.startswith("chunks/") else ALSO.get(name, [])
    stack = [CNN, *BEFORE.get(name, []), f"configs/{name}.py"]
    train_in(tmp_path, stack, [*SETTINGS, "train.check_replicas_every=1", *also])
    summary = summary_of(tmp_path)
    assert 0 < summary["wire_over_dense"] < 1.0 and math.isfinite(summary["best"]["acc/test_top1"])


@pytest.mark.parametrize("names", GOSSIP, ids="+".join)
@pytest.mark.usefixtures("no_type_checks")
def test_gossip_trains(names: Any, tmp_path: Path) -> None:
    also = ["train.batch_size=90", "train.log_every=2"]
    also += ["train.gossip.graph.local_size=2"] if "topology/hierarchical" in names else []
    train_in(tmp_path, [CNN, *(f"configs/{name}.py" for name in names)], [*SETTINGS, *also], size=4)
    summary = summary_of(tmp_path)
    assert summary["dropped_steps"] == 0 and math.isfinite(summary["best"]["acc/test_top1"])


@pytest.mark.parametrize("name", names("topology"))
def test_every_graph_takes_the_number_of_ranks(name: str) -> None:
    words = ["--configs.train.gossip.graph.local_size=2"] if name == "topology/hierarchical" else []
    gossip = load([CNN, "configs/gossip/sgp.py", f"configs/{name}.py"], words).train.gossip
    for graph in (gossip.graph, *(gossip.graph_from_epoch or {}).values()):
        assert graph is None or instantiate(graph)(4).size == 4
