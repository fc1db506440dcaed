"""The adapters to other trainers in one process: what they refuse, and that their libraries are optional."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warm

import dgc_datasets.torchvision_compat  # noqa: F401  (Lightning and transformers import torchvision)
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import PowerSGDCompressor
from dgc.integrations import rank_files


def test_a_missing_library_is_named_with_its_cure() -> None:
    lines = """
import sys
import dgc.integrations.rank_files
libraries = ("transformers", "lightning", "accelerate")
assert not set(libraries) & set(sys.modules)
class Absent:
    def find_spec(name, path=None, target=None):
        if name in libraries:
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Absent)
for library in libraries:
    try:
        __import__(f"dgc.integrations.{library}")
    except ModuleNotFoundError as error:
        assert str(error).endswith(f"pip install {library}") and error.name == library, error
    else:
        raise SystemExit(library)
"""
    done = subprocess.run([warm.python(), "-c", lines], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Saved:
    """What rank_files needs of an exchange."""

    def __init__(self, transport: Any = None, state: float = 0.0):
        self.transport, self.state = transport, state

    def compression_state_dict(self) -> Any:
        return {"errors": torch.full((3,), self.state)}

    def load_compression_state_dict(self, state: Any) -> None:
        self.state = float(state["errors"][0])


def test_each_rank_loads_its_own_file(tmp_path: Path) -> None:
    folder = tmp_path / "new"

    def loaded(transport: Any) -> float:
        exchange: Any = Saved(transport)
        rank_files.load(exchange, lambda rank: folder / f"exchange{rank}.pt")
        return float(exchange.state)

    world = LockstepWorld(2)
    with pytest.warns(UserWarning, match="nothing unsent"):
        assert world.run(loaded) == [0.0, 0.0]
    for rank in (0, 1):
        exchange: Any = Saved(state=rank + 1.0)
        rank_files.save(exchange, folder / f"exchange{rank}.pt")
    assert world.run(loaded) == [1.0, 2.0]
    assert sorted(path.name for path in folder.iterdir()) == ["exchange0.pt", "exchange1.pt"]
    (folder / "exchange0.pt").unlink()
    with pytest.raises(ValueError, match="rank 0 has no file .*exchange0.pt"):
        world.run(loaded)


def trainer(model: Any) -> Any:
    """What the callback needs of a Trainer."""
    handler, options = SimpleNamespace(callbacks=[]), {"model_wrapped": model, "train": lambda *_: None}
    return SimpleNamespace(callback_handler=handler, add_callback=handler.callbacks.append, **options)


def test_the_callback_needs_its_trainer_and_ddp() -> None:
    pytest.importorskip("transformers")
    from dgc.integrations.transformers import CompressionCallback

    compression = CompressionCallback(PowerSGDCompressor(rank=2))
    one, several = (SimpleNamespace(world_size=n, n_gpu=0) for n in (1, 2))
    with pytest.raises(RuntimeError, match=r"call attach\(trainer\) before"):
        compression.on_train_begin(several, None, None)
    attached = trainer(torch.nn.Linear(2, 2))
    compression.attach(attached)
    assert attached.callback_handler.callbacks == [compression]
    with pytest.raises(ValueError, match="has a Trainer already"):
        compression.attach(trainer(None))
    with pytest.raises(ValueError, match="into Linear, and compression needs DistributedDataParallel"):
        compression.on_train_begin(several, None, None)
    with pytest.warns(UserWarning, match="nothing is compressed"):
        compression.on_train_begin(one, None, None)
    compression.on_save(one, None, None)
    assert compression.exchange is None
