"""The adapters to other trainers in one process: what they set and refuse; their libraries are optional."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warm

import dgc_datasets.torchvision_compat  # noqa: F401  (Lightning and transformers import torchvision)
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DenseCompressor, PowerSGDCompressor
from dgc.integrations import rank_files
from dgc.integrations.torchtitan import compressed


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


@dataclass
class Spec:
    parallelize_fn: Any
    post_optimizer_build_fn: Any = None


def parallelized(config: Any, **dims: bool) -> Any:
    """What the config's parallelize_fn returns. That of the model returns its ParallelDims."""
    off = dict.fromkeys(("pp_enabled", "tp_enabled", "cp_enabled", "ep_enabled"), False)
    own = SimpleNamespace(**{"dp_replicate_enabled": True, "dp_replicate": 2, **off, **dims})
    parts = {"training": config.training, "parallelism": config.parallelism}
    return config.model_spec.parallelize_fn("model", parallel_dims=own, **parts)


def made() -> Any:
    def parallelize(model: str, *, parallel_dims: Any, training: Any, parallelism: Any) -> Any:
        assert model == "model"
        return parallel_dims

    training, parallelism = SimpleNamespace(disable_cuda_graphs=False), SimpleNamespace(spmd_backend="spmd_types")
    config = SimpleNamespace(model_spec=Spec(parallelize), training=training, parallelism=parallelism)
    assert compressed(config, DenseCompressor()) is config
    return config


def test_the_model_is_sharded_without_replicas_and_other_parallelism_is_refused() -> None:
    dims = parallelized(made())
    assert not dims.dp_replicate_enabled and dims.dp_replicate == 2
    for kind, name in {"pp": "pipeline", "tp": "tensor", "cp": "context", "ep": "expert"}.items():
        with pytest.raises(ValueError, match=f"does not support {name} parallelism"):
            parallelized(made(), **{f"{kind}_enabled": True})
    # settings that a command line has changed
    graphs, backend = made(), made()
    graphs.training.disable_cuda_graphs = False
    backend.parallelism.spmd_backend = "full_dtensor"
    for config, message in ((graphs, "CUDA graphs"), (backend, "--parallelism.spmd_backend other")):
        with pytest.raises(ValueError, match=f"does not support {message}"):
            parallelized(config)
