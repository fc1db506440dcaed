"""Preparation of a run: device, threads, seeds, agreement of the ranks, and the run directory."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer

import dgc.kernels as kernels
from dgc.comm import Transport, all_gather_object, barrier, broadcast_object
from dgc.comm.launch import LaunchError
from dgc.optim import DistributedOptimizer, GossipOptimizer, Wrapper
from dgc_training.checkpoint.files import write_atomically
from dgc_training.checkpoint.random_state import seed_everything
from dgc_training.config import ConfigError, instantiate, load, to_yaml
from dgc_training.data import check_workers
from dgc_training.faults.failure import Refused
from dgc_training.startup.code_version import code_difference, code_hashes
from dgc_training.startup.lock import RunLock, remove_temporary_files
from dgc_training.startup.runs import config_differences, move_aside

REQUIRED = {
    "dataset": "a data set",
    "model": "a model",
    "train.num_epochs": "the number of epochs",
    "train.batch_size": "samples per rank and backward pass",
}
ANOTHER_PLACE = (
    "Give this run a name of its own with --suffix or --run-dir, or move the earlier one aside with --no-resume."
)


def require_complete(tree: DictConfig, devices: str) -> None:
    """Raises ConfigError if a required setting is missing or settings contradict. Nothing is started before."""
    values = {"dataset": tree.dataset, "model": tree.model}
    values |= {f"train.{key}": tree.train[key] for key in ("num_epochs", "batch_size")}
    for key, meaning in REQUIRED.items():
        if values[key] is None:
            raise ConfigError(
                f"{key} ({meaning}) is not set. Begin with an experiment, such as configs/digits/cnn.py."
            )
    if tree.train.gossip is not None:
        if tree.train.compression._target_ != "dgc.compression.DenseCompressor":
            raise ConfigError(
                f"train.gossip exchanges models, so train.compression ({tree.train.compression._target_}) has no "
                "gradients to compress; take one of the two out of the stack"
            )
        if tree.train.check_replicas_every:
            raise ConfigError("train.check_replicas_every compares models that gossip lets differ: set it to 0")
    if not -(2**62) < tree.seed < 2**62:
        raise ConfigError(f"seed is {tree.seed}; generators take 63 bits")
    if devices == "gpu" and not torch.cuda.is_available():
        raise ConfigError("--devices gpu: torch finds no GPU here. Use --devices cpu or auto.")


def build(node: Any, *args: Any) -> Any:
    """Calls `instantiate`. Any error of the constructor becomes a ConfigError with key, cause and location."""
    try:
        return instantiate(node, *args)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{node._get_full_key(None)} ({node._target_}): {_cause(error)}") from error


def wrap_optimizer(optimizer: Optimizer, model: nn.Module, settings: DictConfig, transport: Transport) -> Wrapper:
    """The distributed optimizer: it averages gradients over all ranks, or models with a few ranks (gossip)."""
    if settings.gossip is not None:
        gossip = build(settings.gossip)
        in_steps = not settings.schedule_lr_per_epoch or settings.checkpoint_every is not None
        if in_steps and not gossip.is_synchronous:
            raise ValueError(
                f"with {type(gossip).__name__} ranks have no steps in common, only epochs: "
                "train.schedule_lr_per_epoch must be True and train.checkpoint_every null"
            )
        return GossipOptimizer(
            optimizer, model.named_parameters(), gossip, transport=transport, nonfinite=settings.nonfinite
        )
    return DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=build(settings.compression),
        backward_passes_per_step=settings.num_batches_per_step,
        op="average",
        bucket_mb=settings.bucket_mb,
        nonfinite=settings.nonfinite,
        transport=transport,
    )


@contextmanager
def building() -> Iterator[None]:
    """Context manager that turns a ValueError of any part into a ConfigError, which has no traceback."""
    try:
        yield
    except (ConfigError, LaunchError):
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"the run cannot be built from this config: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return f"{kind}{error} ({'/'.join(Path(place.filename).parts[-2:])}:{place.lineno})"


def prepare_device(tree: DictConfig, devices: str, transport: Transport) -> torch.device:
    """Sets torch's threads and determinism, seeds all ranks alike, and returns the rank's device."""
    # The ranks of a machine share its cores. More threads than cores only make them slower.
    all_cores = len(os.sched_getaffinity(0))
    cores = max(1, all_cores // transport.local_size)
    with building():
        check_workers(tree.data.num_workers, transport.local_size, all_cores)
    torch.set_num_threads(max(1, min(tree.data.num_threads_per_worker, cores)))
    if tree.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    seed_everything(tree.seed)
    if devices == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    torch.backends.cudnn.benchmark = not tree.deterministic
    device = torch.device("cuda", transport.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def choose_kernels(name: str, device: torch.device) -> str:
    """Selects a tier of `dgc.kernels` and returns its description. Raises ValueError if it is not available.

    "auto" selects by device, or by the environment variable DGC_KERNELS.
    """
    if name != "auto":
        kernels.use(name)
    return kernels.describe(device)


def check_agreement(tree: DictConfig, device: torch.device, transport: Transport) -> None:
    """Raises Refused, with the first rank that differs from rank 0 in code, config or device type."""
    own = (to_yaml(tree, resolve=True), device.type, code_hashes())
    views = all_gather_object(transport, own, name="agreement")
    config, kind, code = views[0]
    for rank, (other_config, other_kind, other_code) in enumerate(views):
        if (file := code_difference(code, other_code)) is not None:
            raise Refused(
                f"rank {rank} runs other code than rank 0: {file} differs. "
                "Every machine needs the same version of the repository."
            )
        if other_kind != kind:
            raise Refused(
                f"rank 0 uses the {kind}, rank {rank} the {other_kind}. Set --devices for all ranks."
            )
        if other_config != config:
            lines = config_differences(config, other_config) or [
                "  (settings that do not change the training)"
            ]
            raise Refused(f"rank {rank} has another config than rank 0 (0 -> {rank}):\n" + "\n".join(lines))


@contextmanager
def open_run_directory(directory: Path, tree: DictConfig, transport: Transport, *, resume: bool) -> Iterator[None]:
    """Context manager that creates the run directory, writes its config.yaml and locks it against other runs.

    Rank 0 does the work and broadcasts any problem. resume=False moves an earlier run aside. Raises Refused if
    another run uses the directory, or if it contains a run with another config.
    """
    lock: RunLock | None = None

    def prepare() -> None:
        nonlocal lock
        lock = RunLock(directory)
        if not resume and (directory / "config.yaml").exists():
            lock = _move_aside(directory, lock)
        _claim(directory, tree)

    try:
        _on_rank_0(prepare, directory, transport)
        if transport.local_rank == 0:
            remove_temporary_files(directory)
        barrier(transport, name="run_directory.clean")
        yield
    finally:
        if lock is not None:
            lock.release()


def check_run_directory(directory: Path, tree: DictConfig, transport: Transport, cure: str) -> None:
    """Raises Refused, with `cure`, if the directory contains a run with another config. Writes nothing."""
    _on_rank_0(lambda: _compare(directory / "config.yaml", tree, cure), directory, transport)


def _on_rank_0(work: Callable[[], None], directory: Path, transport: Transport) -> None:
    problem = None
    if transport.rank == 0:
        try:
            work()
        except Refused as error:
            problem = str(error)
        except OSError as error:
            problem = f"the run directory {directory} cannot be used: {error}"
    problem = broadcast_object(transport, problem, name="run_directory")
    if problem is not None:
        raise Refused(problem)


def _move_aside(directory: Path, lock: RunLock) -> RunLock:
    """Moves an earlier run aside and returns the lock of the new directory."""
    try:
        lock.directory = move_aside(directory)
        print(f"--no-resume: the earlier run is now {lock.directory}", flush=True)
        return RunLock(directory)
    finally:
        lock.release()


def _claim(directory: Path, tree: DictConfig) -> None:
    path = directory / "config.yaml"
    if path.exists():
        return _compare(path, tree, ANOTHER_PLACE)
    text = to_yaml(tree, resolve=False)
    write_atomically(path, lambda temporary: temporary.write_text(text))


def _compare(path: Path, tree: DictConfig, cure: str) -> None:
    if path.exists() and (differences := config_differences(_resolved(path), to_yaml(tree, resolve=True))):
        raise Refused(
            f"{path.parent} holds a run with another config (there -> now):\n"
            + "\n".join(differences)
            + f"\nNothing was changed. {cure}"
        )


def _resolved(path: Path) -> str:
    """The config of an earlier run with derived values filled in; unchanged if it can no longer be loaded."""
    try:
        return to_yaml(load([str(path)], []), resolve=True)
    except ConfigError as error:
        print(f"{path} does not load any more ({error}); comparing it as it stands.", file=sys.stderr)
        try:
            plain: Any = yaml.safe_load(path.read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as damage:
            raise Refused(
                f"{path} is damaged ({' '.join(str(damage).split())}), so it is not known what was trained here. "
                "Put it back from a copy, or move the run aside with --no-resume."
            ) from None
        return yaml.safe_dump(plain)
