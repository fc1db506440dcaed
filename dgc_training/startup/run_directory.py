"""The run directory: its lock, its config.yaml, and comparison with the config of an earlier run."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from dgc.comm import Transport, barrier, broadcast_object
from dgc_training.atomic_write import write_atomically
from dgc_training.config import ConfigError, load, to_yaml
from dgc_training.faults.failure import UsageError
from dgc_training.launcher import may_restart
from dgc_training.startup.agreement import config_differences
from dgc_training.startup.lock import RunLock, remove_temporary_files

# Seconds that a restarted run waits for the lock. A rank of the previous attempt may still be ending, and a file
# server keeps the locks of a machine that is down for a while (NFSv4: 90 seconds by default).
LOCK_WAIT = 120.0
USE_ANOTHER_DIRECTORY = (
    "Give this run a name of its own with --suffix or --run-dir, or move the earlier one aside with --no-resume."
)


@contextmanager
def open_run_directory(directory: Path, tree: DictConfig, transport: Transport, *, resume: bool) -> Iterator[None]:
    """Context manager that creates the run directory, writes its config.yaml and locks it against other runs.

    Rank 0 does the work and broadcasts any problem. resume=False moves an earlier run aside. Raises UsageError if
    another run uses the directory, or if it contains a run with another config.
    """
    lock: RunLock | None = None

    def prepare() -> None:
        nonlocal lock
        lock = RunLock(directory, LOCK_WAIT if may_restart() else 0.0)
        if not resume and (directory / "config.yaml").exists():
            lock = _move_aside(directory, lock)
        _write_config(directory, tree)

    try:
        _run_on_rank_0(prepare, directory, transport)
        if transport.local_rank == 0:
            remove_temporary_files(directory)
        barrier(transport, name="run_directory.clean")
        yield
    finally:
        if lock is not None:
            lock.release()


def check_run_directory(directory: Path, tree: DictConfig, transport: Transport, cure: str) -> None:
    """Raises UsageError, with `cure`, if the directory contains a run with another config. Writes nothing."""
    _run_on_rank_0(lambda: _check_same_config(directory / "config.yaml", tree, cure), directory, transport)


def _run_on_rank_0(work: Callable[[], None], directory: Path, transport: Transport) -> None:
    problem = None
    if transport.rank == 0:
        try:
            work()
        except UsageError as error:
            problem = str(error)
        except OSError as error:
            problem = f"the run directory {directory} cannot be used: {error}"
    problem = broadcast_object(transport, problem, name="run_directory")
    if problem is not None:
        raise UsageError(problem)


def _move_aside(directory: Path, lock: RunLock) -> RunLock:
    """Moves an earlier run aside. Returns the lock of the new directory."""
    try:
        lock.directory = move_aside(directory)
        print(f"--no-resume: the earlier run is now {lock.directory}", flush=True)
        return RunLock(directory)
    finally:
        lock.release()


def move_aside(directory: Path) -> Path:
    """Renames an earlier run's directory to the first free NAME.1, NAME.2, ... Returns the new name."""
    number = 1
    while (aside := directory.with_name(f"{directory.name}.{number}")).exists():
        number += 1
    directory.rename(aside)
    return aside


def _write_config(directory: Path, tree: DictConfig) -> None:
    path = directory / "config.yaml"
    if path.exists():
        return _check_same_config(path, tree, USE_ANOTHER_DIRECTORY)
    text = to_yaml(tree, resolve=False)
    write_atomically(path, lambda file: file.write(text.encode()))


def _check_same_config(path: Path, tree: DictConfig, cure: str) -> None:
    if path.exists() and (differences := config_differences(_resolved_config(path), to_yaml(tree, resolve=True))):
        raise UsageError(
            f"{path.parent} holds a run with another config (there -> now):\n"
            + "\n".join(differences)
            + f"\nNothing was changed. {cure}"
        )


def _resolved_config(path: Path) -> str:
    """The config of an earlier run with derived values filled in; unchanged if it can no longer be loaded."""
    try:
        return to_yaml(load([str(path)], []), resolve=True)
    except ConfigError as error:
        print(f"{path} can no longer be loaded ({error}). Its values are compared as written.", file=sys.stderr)
        try:
            plain: Any = yaml.safe_load(path.read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as damage:
            raise UsageError(
                f"{path} is damaged ({' '.join(str(damage).split())}), so the config of this run is unknown. "
                "Restore the file from a copy, or move the run aside with --no-resume."
            ) from None
        return yaml.safe_dump(plain)
