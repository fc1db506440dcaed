"""Runs of train.py: their arguments, and how they are started."""

import json
import subprocess
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import train
from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.tasks import Task
from benchmarks.results import to_json
from dgc.comm.lockstep import LockstepWorld
from dgc_training.config import load
from dgc_training.startup.arguments import parse_arguments
from dgc_training.startup.setup import require_complete
from scripts.launch import prepare


def start(ranks: int, words: Sequence[str]) -> None:
    """Run train.py with these arguments under mpirun."""
    command, environment = prepare(ranks, ["train.py", *words])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def simulate(ranks: int, words: Sequence[str]) -> None:
    """Run train.py with these arguments, with its ranks in this process."""
    args, overrides = parse_arguments(words)
    tree = load(args.configs, overrides)
    require_complete(tree, "cpu")
    with redirect_stdout(StringIO()):
        LockstepWorld(ranks).run(lambda transport: train.run(args, tree, transport))


def summary_of(train: Callable[[int, Sequence[str]], None], ranks: int, words: Sequence[str], place: Path) -> Any:
    """Train with these arguments, unless `place` has the finished run, and return its summary.

    Args:
        train: `start` or `simulate`.
        ranks: number of ranks.
        words: arguments of train.py, with `place` as the directory of the run.
        place: the directory. The mode and the arguments are stored beside it.

    Raises:
        SystemExit: the directory has a run of the other mode or with other arguments.
    """
    # Seconds of simulated ranks are not those of processes, so a run is only good for its own mode.
    arguments = [train.__name__, str(ranks), *(word for word in words if word != str(place))]
    record = Path(f"{place}.json")
    if place.exists() and (not record.exists() or json.loads(record.read_text()) != arguments):
        raise SystemExit(
            f"{place} has a run of the other mode or with other arguments: remove it, or keep the runs in another "
            "folder"
        )
    if not (place / "summary.json").exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(to_json(arguments))
        train(ranks, words)
    return json.loads((place / "summary.json").read_text())


def to_train(
    task: Task,
    method: str,
    number: int,
    place: Path,
    *,
    epochs: int | None = None,
    batch_size: int | None = None,
    overrides: Sequence[str] = (),
) -> list[str]:
    """Return the arguments of train.py for one run.

    Args:
        task: what is trained.
        method: a name of METHODS.
        number: of the fold or seed, from 0.
        place: the directory of the run.
        epochs: None: those of the task.
        batch_size: per rank. None: that of the task.
        overrides: changes of single keys, after all others.
    """
    words = [*task.words, *task.methods.get(method, METHODS[method])]
    return [
        *("--configs", *(word for word in words if not word.startswith("--"))),
        *("--run-dir", str(place), "--devices", "cpu"),
        f"--configs.{task.varies}={number}",
        f"--configs.train.num_epochs={epochs or task.epochs}",
        f"--configs.train.batch_size={batch_size or task.batch_size}",
        *(word for word in words if word.startswith("--")),
        *overrides,
    ]
