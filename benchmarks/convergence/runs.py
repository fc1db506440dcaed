"""Runs of train.py: their arguments, and how they are started."""

import subprocess
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import train
from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.tasks import Task
from dgc.comm.lockstep import LockstepWorld
from dgc_training.config import load
from dgc_training.startup.arguments import parse_arguments
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
    with redirect_stdout(StringIO()):
        LockstepWorld(ranks).run(lambda transport: train.run(args, tree, transport))


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
