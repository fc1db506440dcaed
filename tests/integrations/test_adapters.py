"""The adapters to other trainers in one process: what they set and refuse; their libraries are optional."""

import gc
import shutil
import subprocess
from collections import OrderedDict
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import warm
from integrations.titan import config_of, dims_of, parallelized
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

import dgc_datasets.torchvision_compat  # noqa: F401  (Lightning and transformers import torchvision)
from dgc.comm import TrafficMeter
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DenseCompressor, PowerSGDCompressor
from dgc.ddp import check_model
from dgc.engine.options import check_steps, unwrapped
from dgc.integrations import rank_files
from dgc.integrations.torchtitan import compressed
from dgc.optim import DGCSGD


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


class Exchange:
    """Of one rank: keeps the state that it loads. It refuses the state of another rank."""

    def __init__(self, transport: Any) -> None:
        self.transport, self.state = transport, dict[str, Any]()

    def compression_state_dict(self) -> dict[str, Any]:
        return {"rank": self.transport.rank, "errors": torch.full((3,), self.transport.rank + 1.0)}

    def load_compression_state_dict(self, state: dict[str, Any]) -> None:
        if state["rank"] != self.transport.rank:
            raise ValueError("this state belongs to another rank")
        self.state = state


def save(transport: Any, folder: Path) -> None:
    exchange: Any = Exchange(transport)
    rank_files.save(exchange, lambda rank: folder / f"exchange{rank}.pt")


def saved(folder: Path) -> LockstepWorld:
    world = LockstepWorld(2)
    world.run(partial(save, folder=folder))
    return world


def loaded(transport: Any, folder: Path) -> Any:
    """The state that a rank loads, or the error."""
    exchange: Any = Exchange(transport)
    try:
        rank_files.load(exchange, lambda rank: folder / f"exchange{rank}.pt")
    except ValueError as error:
        return str(error)
    return exchange.state


@pytest.mark.usefixtures("no_type_checks")
def test_each_rank_loads_its_own_file(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with pytest.warns(UserWarning, match="nothing unsent"):
        assert LockstepWorld(2).run(partial(loaded, folder=folder)) == [{}, {}]
    world = saved(folder)
    assert [float(state["errors"][0]) for state in world.run(partial(loaded, folder=folder))] == [1.0, 2.0]
    assert sorted(path.name for path in folder.iterdir()) == ["exchange0.pt", "exchange1.pt"]
    (folder / "exchange0.pt").unlink()
    (told,) = set(world.run(partial(loaded, folder=folder)))
    assert told.startswith(f"rank 0 has no file {folder / 'exchange0.pt'}")


def flip_a_bit(file: Path) -> None:
    """In the bytes of a tensor, [2, 2, 2] of rank 1: 2.0 becomes 2.5 in its first element."""
    content = bytearray(file.read_bytes())
    content[content.index(torch.full((3,), 2.0).numpy().tobytes()) + 2] ^= 0x20
    file.write_bytes(content)


DAMAGES: dict[str, Any] = {
    "a bit of a tensor": flip_a_bit,
    "empty": lambda file: file.write_bytes(b""),
    "text": lambda file: file.write_text("error: disk full"),
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "an object": lambda file: torch.save(Path("/"), file),
}


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_error_on_all_ranks(damage: str, tmp_path: Path) -> None:
    world = saved(tmp_path)
    DAMAGES[damage](tmp_path / "exchange1.pt")
    (told,) = set(world.run(partial(loaded, folder=tmp_path)))
    assert told.startswith(f"rank 1 cannot read {tmp_path / 'exchange1.pt'}, which is damaged (")
    assert told.endswith("): resume from an older one") and len(told) < 300


@pytest.mark.usefixtures("no_type_checks")
def test_the_file_of_another_rank_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    world = saved(tmp_path)
    shutil.copy(tmp_path / "exchange1.pt", tmp_path / "exchange0.pt")
    (told,) = set(world.run(partial(loaded, folder=tmp_path)))
    assert told == f"rank 0 cannot use {tmp_path / 'exchange0.pt'}: this state belongs to another rank"


@pytest.mark.usefixtures("no_type_checks")
def test_a_file_that_cannot_be_written_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "exchange1.pt").mkdir()

    def told(transport: Any) -> str:
        with pytest.raises(RuntimeError) as raised:
            save(transport, tmp_path)
        return str(raised.value)

    (text,) = set(LockstepWorld(2).run(told))
    assert text.startswith(
        f"rank 1 cannot save what it has not sent in {tmp_path / 'exchange1.pt'}: IsADirectoryError"
    )


class FakeAccelerator:
    """The parts of an Accelerator that its adapter uses."""

    scaler, num_processes = None, 1

    def __init__(self) -> None:
        self.saves: dict[int, Any] = OrderedDict()
        self.loads: dict[int, Any] = OrderedDict()

    def register_save_state_pre_hook(self, hook: Any) -> RemovableHandle:
        handle = RemovableHandle(self.saves)
        self.saves[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Any) -> RemovableHandle:
        handle = RemovableHandle(self.loads)
        self.loads[handle.id] = hook
        return handle


@pytest.mark.usefixtures("no_type_checks")
def test_two_models_of_one_accelerator_need_two_names(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("accelerate")
    from dgc.integrations.accelerate import compress

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    request.addfinalizer(dist.destroy_process_group)

    def model() -> Any:
        return DistributedDataParallel(torch.nn.Linear(2, 2))

    accelerator, another = cast(Any, FakeAccelerator()), cast(Any, FakeAccelerator())
    actor, critic = model(), model()
    compress(accelerator, actor, DenseCompressor())
    with pytest.raises(
        ValueError, match=r"is saved in exchange0\.pt, which this one would replace: give each its own"
    ):
        compress(accelerator, critic, DenseCompressor())
    assert not critic._comm_hooks and len(accelerator.saves) == 1
    compress(another, model(), DenseCompressor())
    compress(accelerator, critic, DenseCompressor(), name="critic")
    for save in accelerator.saves.values():
        save([], [], str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["critic0.pt", "exchange0.pt"]
    del actor
    gc.collect()
    compress(accelerator, model(), DenseCompressor())  # in place of the first
    assert len(accelerator.saves) == len(accelerator.loads) == 2


def optimizer_of_fabric(optimizer: Any) -> Any:
    pytest.importorskip("lightning.fabric")
    from lightning.fabric.wrappers import _FabricOptimizer

    return _FabricOptimizer(optimizer, Mock())


def optimizer_of_lightning(optimizer: Any) -> Any:
    pytest.importorskip("lightning.fabric")
    from lightning.pytorch.core.optimizer import LightningOptimizer

    return LightningOptimizer(optimizer)


def optimizer_of_accelerate(optimizer: Any) -> Any:
    pytest.importorskip("accelerate")
    from accelerate.optimizer import AcceleratedOptimizer

    accelerated = AcceleratedOptimizer.__new__(AcceleratedOptimizer)  # its constructor needs an Accelerator
    accelerated.optimizer = optimizer
    return accelerated


@pytest.mark.parametrize("wrap", [optimizer_of_fabric, optimizer_of_lightning, optimizer_of_accelerate])
def test_the_optimizer_of_a_trainer_is_known_by_the_one_that_it_wraps(wrap: Any) -> None:
    sgd = DGCSGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer = wrap(sgd)
    assert unwrapped(optimizer) is sgd
    with pytest.raises(ValueError, match="steps another optimizer, DGCSGD"):
        check_steps(optimizer, "DistributedOptimizer")


def test_the_model_of_fabric_is_known_by_the_one_that_it_wraps() -> None:
    pytest.importorskip("lightning.fabric")
    from lightning.fabric.wrappers import _FabricModule

    with pytest.raises(ValueError, match="needs a model in DistributedDataParallel, not Linear"):
        check_model(_FabricModule(torch.nn.Linear(2, 2), Mock()))


ONE_PROCESS, TWO_PROCESSES = (SimpleNamespace(world_size=n, n_gpu=0) for n in (1, 2))


def callback_of_transformers() -> Any:
    pytest.importorskip("transformers")
    from dgc.integrations.transformers import CompressionCallback

    return CompressionCallback(PowerSGDCompressor(rank=2))


def trainer_of_transformers() -> Any:
    """The parts of a Trainer that the callback uses. Its model is in no DistributedDataParallel."""
    handler = SimpleNamespace(callbacks=[])
    trainer: Any = SimpleNamespace(callback_handler=handler, add_callback=handler.callbacks.append)
    trainer.model_wrapped, trainer.train = torch.nn.Linear(2, 2), lambda *_: None
    return trainer


def test_the_callback_needs_its_trainer() -> None:
    with pytest.raises(RuntimeError, match=r"call attach\(trainer\) before"):
        callback_of_transformers().on_train_begin(TWO_PROCESSES, None, None)


def test_the_callback_is_attached_to_one_trainer() -> None:
    compression, trainer = callback_of_transformers(), trainer_of_transformers()
    compression.attach(trainer)
    assert trainer.callback_handler.callbacks == [compression]
    with pytest.raises(ValueError, match="has a Trainer already"):
        compression.attach(trainer)


def test_the_callback_needs_a_model_in_ddp() -> None:
    compression = callback_of_transformers()
    compression.attach(trainer_of_transformers())
    with pytest.raises(ValueError, match="into Linear, and compression needs DistributedDataParallel"):
        compression.on_train_begin(TWO_PROCESSES, None, None)


def test_the_callback_does_nothing_in_a_single_process() -> None:
    compression = callback_of_transformers()
    compression.attach(trainer_of_transformers())
    with pytest.warns(UserWarning, match="nothing is compressed"):
        compression.on_train_begin(ONE_PROCESS, None, None)
    compression.on_save(ONE_PROCESS, None, None)
    assert compression.exchange is None


def made() -> Any:
    """A config with compression, whose parallelize_fn returns a model and what the model's own one gets."""

    def parallelize(model: Any, **parts: Any) -> Any:
        model.parts = parts
        return model

    config = config_of(parallelize)
    assert compressed(config, DenseCompressor()) is config
    return config


def test_torchtitan_shards_the_model_as_without_compression() -> None:
    config, dims, parallelism = (
        made(),
        dims_of(ep_enabled=True, tp_enabled=True),
        SimpleNamespace(spmd_backend="spmd_types"),
    )
    model = parallelized(config, torch.nn.Linear(2, 2), dims, parallelism=parallelism)
    parts = {"parallel_dims": dims, "training": config.training, "parallelism": parallelism}
    assert model.parts == parts and parallelism.spmd_backend == "spmd_types"


PARALLELISM = {"pp": "pipeline", "cp": "context"}


@pytest.mark.parametrize(("kind", "name"), PARALLELISM.items())
def test_other_parallelism_is_refused(kind: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"does not support {name} parallelism"):
        parallelized(made(), torch.nn.Linear(2, 2), dims_of(**{f"{kind}_enabled": True}))


def test_a_single_replica_is_refused() -> None:
    with pytest.raises(ValueError, match=r"does not support one replica \(--parallelism.data_parallel_replicate"):
        parallelized(made(), torch.nn.Linear(2, 2), dims_of(dp_replicate_enabled=False, dp_replicate=1))


def test_cuda_graphs_of_the_command_line_are_refused() -> None:
    config = made()
    config.training.disable_cuda_graphs = False
    with pytest.raises(ValueError, match="does not support CUDA graphs"):
        parallelized(config, torch.nn.Linear(2, 2), dims_of())


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_the_callbacks_say_at_the_end_what_was_sent(
    library: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip(library)
    callback = import_module(f"dgc.integrations.{library}").CompressionCallback(DenseCompressor())
    callback.exchange = cast(Any, SimpleNamespace(meter=TrafficMeter(wire_bytes=5e6, dense_wire_bytes=2e7)))
    with caplog.at_level("INFO"):
        for is_first in (True, False) if library == "transformers" else (True,):
            state = SimpleNamespace(is_world_process_zero=is_first)
            callback.on_train_end(*((None, state, None) if library == "transformers" else (None, None)))
    said = capsys.readouterr().out if library == "transformers" else caplog.text
    assert said.count("compression: sent 5.00 MB, 4 times fewer than a dense fp32 all-reduce") == 1
