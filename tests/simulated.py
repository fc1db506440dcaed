"""train.py on simulated ranks of this process, and what its runs leave in their directories."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from states import assert_equal

import train
from dgc.comm.lockstep import LockstepWorld
from dgc_training.checkpoint.reading import read_tensors
from dgc_training.config import load
from dgc_training.startup.arguments import parse_arguments
from dgc_training.startup.setup import require_complete

CNN = "configs/digits/cnn.py"


def train_on(size: int, words: Sequence[str], local_size: int | None = None) -> list[int]:
    """The exit status of each rank of a run with these words of the command line."""
    args, overrides = parse_arguments(words)
    tree = load(args.configs, overrides)
    require_complete(tree, args.devices)
    return LockstepWorld(size, local_size).run(lambda transport: train.run(args, tree, transport))


def train_in(
    directory: Path,
    stack: Sequence[str | Path],
    settings: Sequence[str] = (),
    size: int = 2,
    local_size: int | None = None,
    options: Sequence[str] = (),
) -> list[int]:
    """The same for a run in this directory. settings: `train.num_epochs=2`, for example."""
    words = ["--configs", *map(str, stack), "--devices", "cpu", "--run-dir", str(directory), *options]
    return train_on(size, [*words, *(f"--configs.{setting}" for setting in settings)], local_size)


def summary_of(directory: Path) -> Any:
    return json.loads((directory / "summary.json").read_text())


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def events_of(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(directory)).Reload()


def latest_of(directory: Path) -> str:
    name: str = json.loads((directory / "checkpoints" / "latest.json").read_text())["checkpoint"]
    return name


def saved(directory: Path, checkpoint: str = "") -> dict[str, Any]:
    """The content of each file of a checkpoint, or of the latest one: "shared", "rank0" and so on."""
    files = (directory / "checkpoints" / (checkpoint or latest_of(directory))).glob("*.pt")
    return {file.stem: read_tensors(file) for file in sorted(files)}


def rewind(directory: Path, checkpoint: str) -> None:
    """Makes a run that has ended what it was after this checkpoint."""
    for path in (directory / "checkpoints").iterdir():
        if path.name > checkpoint and path.is_dir():
            shutil.rmtree(path)
    (directory / "summary.json").unlink()
    (directory / "checkpoints" / "best.json").unlink(missing_ok=True)
    (directory / "checkpoints" / "latest.json").write_text(json.dumps({"checkpoint": checkpoint}))


def rewound(run: Path, to: Path, checkpoint: str) -> Path:
    """A copy of the run in `to`, as it was after this checkpoint."""
    shutil.copytree(run, to)
    rewind(to, checkpoint)
    return to


def assert_same_end(run: Path, again: Path) -> None:
    """Both have the same latest checkpoint, bit for bit."""
    assert latest_of(run) == latest_of(again)
    expected, found = saved(run), saved(again)
    if "rank1" in expected:
        for state in (*expected.values(), *found.values()):
            state.pop("random", None)  # simulated ranks share the generators
    assert_equal(expected, found)
