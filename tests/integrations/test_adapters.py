"""The adapters to other trainers in one process: what they set and refuse; their libraries are optional."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warm
from integrations.titan import config_of, dims_of, parallelized

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


def test_each_rank_loads_its_own_file(tmp_path: Path) -> None:
    folder = tmp_path / "new"

    def loaded(transport: Any) -> list[float]:
        found: list[Any] = []
        exchange: Any = SimpleNamespace(transport=transport, load_compression_state_dict=found.append)
        rank_files.load(exchange, lambda rank: folder / f"exchange{rank}.pt")
        return [float(state["errors"][0]) for state in found]

    world = LockstepWorld(2)
    with pytest.warns(UserWarning, match="nothing unsent"):
        assert world.run(loaded) == [[], []]
    for rank in (0, 1):
        state = {"errors": torch.full((3,), rank + 1.0)}
        exchange: Any = SimpleNamespace(compression_state_dict=lambda state=state: state)
        rank_files.save(exchange, folder / f"exchange{rank}.pt")
    assert world.run(loaded) == [[1.0], [2.0]]
    assert sorted(path.name for path in folder.iterdir()) == ["exchange0.pt", "exchange1.pt"]
    (folder / "exchange0.pt").unlink()
    with pytest.raises(ValueError, match="rank 0 has no file .*exchange0.pt"):
        world.run(loaded)


def test_the_callback_needs_its_trainer_and_ddp() -> None:
    pytest.importorskip("transformers")
    from dgc.integrations.transformers import CompressionCallback

    compression = CompressionCallback(PowerSGDCompressor(rank=2))
    one, several = (SimpleNamespace(world_size=n, n_gpu=0) for n in (1, 2))
    with pytest.raises(RuntimeError, match=r"call attach\(trainer\) before"):
        compression.on_train_begin(several, None, None)
    handler = SimpleNamespace(callbacks=[])
    trainer: Any = SimpleNamespace(callback_handler=handler, add_callback=handler.callbacks.append)
    trainer.model_wrapped, trainer.train = torch.nn.Linear(2, 2), lambda *_: None
    compression.attach(trainer)
    assert handler.callbacks == [compression]
    with pytest.raises(ValueError, match="has a Trainer already"):
        compression.attach(trainer)
    with pytest.raises(ValueError, match="into Linear, and compression needs DistributedDataParallel"):
        compression.on_train_begin(several, None, None)
    with pytest.warns(UserWarning, match="nothing is compressed"):
        compression.on_train_begin(one, None, None)
    compression.on_save(one, None, None)
    assert compression.exchange is None


def made() -> Any:
    """A config with compression, whose parallelize_fn returns what that of the model gets."""
    config = config_of(lambda model, *, parallel_dims, training, parallelism: (model, parallel_dims))
    assert compressed(config, DenseCompressor()) is config
    return config


def test_the_model_is_sharded_without_replicas_and_other_parallelism_is_refused() -> None:
    model, dims = parallelized(made(), "model", dims_of())
    assert model == "model" and not dims.dp_replicate_enabled and dims.dp_replicate == 2
    # settings that a command line has changed
    graphs, backend = made(), made()
    graphs.training.disable_cuda_graphs = False
    backend.parallelism.spmd_backend = "full_dtensor"
    names = {"pp": "pipeline", "tp": "tensor", "cp": "context", "ep": "expert"}
    others = [(made(), {f"{kind}_enabled": True}, f"{name} parallelism") for kind, name in names.items()]
    changed: list[Any] = [(graphs, {}, "CUDA graphs"), (backend, {}, "--parallelism.spmd_backend other")]
    for config, enabled, message in [*others, *changed]:
        with pytest.raises(ValueError, match=f"does not support {message}"):
            parallelized(config, "model", dims_of(**enabled))
