"""Runs of train.py that benchmarks compare: the tasks, the arguments of a run, and how it is started."""

import argparse
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any

import train
from benchmarks._harness import add_methods, to_json
from dgc.comm.lockstep import LockstepWorld
from dgc_training.config import load
from dgc_training.startup.arguments import parse_arguments
from dgc_training.startup.setup import require_complete
from scripts.launch import prepare
from scripts.methods import METHODS, changes_of, files_of


def changes(*settings: str) -> tuple[str, ...]:
    return tuple(f"--configs.{setting}" for setting in settings)


# Ratio warm-up counts epochs: an epoch is 25 steps. 1000 steps of 4 ranks read these characters twice.
SHORT = changes("dataset.characters=1000000", "task.steps_per_epoch=25")
LONG = changes("model.width=64", "task.steps_per_epoch=1000", "data.num_threads_per_worker=1")
TINY = changes("dataset.characters=20000", "task.context=16", "task.steps_per_epoch=3", "model.width=16")
TINY += changes("model.layers=1", "train.scheduler.warmup_steps=2")
ON_GPU = ("--devices", "gpu", *changes("deterministic=true"))  # a resumed run has the bits of an uninterrupted one
GPT = "configs/pysource/gpt.py"
WITH_ADAM = ("dense", "dgc-adam", "onebit-adam", "powersgd-4", "scaled-sign", "diloco-h20")


@dataclass(frozen=True)
class Task:
    """What is trained, for how long, and what its quality is."""

    words: tuple[str, ...]  # arguments of train.py: config files, then changes of single keys
    epochs: int
    batch_size: int  # of a rank: samples, rows or tokens
    item: str = "sample"
    metric: str = "acc/test_top1"  # the result that is the quality
    quality: str = "accuracy"  # its name in tables and figures
    also: tuple[str, str] | None = None  # a second result, in the lines of runs, with its name
    unit: str = " %"
    decimals: int = 2
    lower_is_better: bool = False  # differences are then in percent of the first method
    varies: str = "seed"  # the key of the config by which runs differ
    runs: int = 3
    first: int = 0  # number of the first fold or seed
    methods: tuple[str, ...] = ("dense", "dgc")

    @property
    def kind(self) -> str:
        return self.varies.rpartition(".")[2]


def characters(*words: str, epochs: int = 40, batch_size: int = 8, **settings: Any) -> Task:
    """A language model of the characters of Python's sources."""
    of: dict[str, Any] = {"unit": "", "decimals": 4, "lower_is_better": True, "methods": WITH_ADAM, **settings}
    return Task(words, epochs, batch_size, "token", "bits_per_character/test", "bits per character", **of)


def numwords(*words: str) -> Task:
    """A translation of numbers into words."""
    files = ("configs/numwords/tiny.py", "configs/numwords/sgd.py", *words)
    also = ("translation/test_char_bleu", "character BLEU")
    return Task(files, 3, 256, "token", "translation/test_exact_match", "exact match", also)


TASKS = {
    "digits": Task(("configs/digits/cnn.py",), 34, 8, varies="dataset.fold", runs=5),
    "numwords": numwords(),
    # the ranks of AD-PSGD have only epochs in common, so it is compared with all-reduce at a rate by epochs
    "numwords-by-epoch": numwords("configs/numwords/by_epoch.py"),
    "pysource": characters(GPT, *SHORT),
    "pysource-tiny": characters(GPT, *TINY, epochs=2, batch_size=2, runs=1),
    "pysource-124m": characters(GPT, "configs/pysource/gpt2_small.py", epochs=5, batch_size=4, runs=1),
    "pysource-long": characters(GPT, *LONG, epochs=4, first=1),
    "lstm": characters("configs/pysource/lstm.py", *SHORT),
    "lstm-sgd": characters("configs/pysource/lstm.py", "configs/pysource/sgd.py", *SHORT),
}


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
    require_complete(tree, args.devices)
    if args.devices == "gpu":  # all ranks share the first one
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    with redirect_stdout(StringIO()):
        LockstepWorld(ranks).run(lambda transport: train.run(args, tree, transport))


Train = Callable[[int, Sequence[str]], None]


def summary_of(train: Train, ranks: int, words: Sequence[str], place: Path, until: float = inf) -> Any:
    """Train with these arguments, unless `place` has the finished run, and return its summary.

    It is None if the run was stopped or not begun. With an end, a finished run keeps no checkpoints.
    """
    # Seconds of simulated ranks are not comparable with seconds of processes, so a run is only good for its own
    # mode.
    arguments = [train.__name__, str(ranks), *(word for word in words if word != str(place))]
    record = Path(f"{place}.json")
    if place.exists() and (not record.exists() or json.loads(record.read_text()) != arguments):
        cure = "remove it, or keep the runs in another folder"
        raise SystemExit(f"{place} has a run of the other mode or with other arguments: {cure}")
    done, left = place / "summary.json", until - time.time()
    if not done.exists() and left > 0:
        place.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(to_json(arguments))
        train(ranks, [*words, *([] if until == inf else ["--minutes", str(left / 60)])])
        if done.exists() and until < inf:
            shutil.rmtree(place / "checkpoints")
    return json.loads(done.read_text()) if done.exists() else None


def add_runs(parser: argparse.ArgumentParser, methods: Sequence[str]) -> None:
    """Add the options of runs, and the methods, with these as default."""
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--epochs", type=int, help="default: as the task sets it")
    parser.add_argument("--batch-size", type=int, help="per rank; default: as the task sets it")
    add_methods(parser, METHODS, methods)
    parser.add_argument("overrides", nargs="*", metavar="--configs.KEY=VALUE", help="for every run, after --")


def about(args: argparse.Namespace) -> str:
    """How long the runs are, for titles."""
    task = TASKS[args.task]
    return f"{args.epochs or task.epochs} epochs of batches of {args.batch_size or task.batch_size} per rank"


def to_train(args: argparse.Namespace, method: str, number: int, place: Path) -> list[str]:
    """Return the arguments of train.py for one run."""
    task, device = TASKS[args.task], ("--devices", "cpu") if getattr(args, "device", "cpu") == "cpu" else ON_GPU
    return [
        *("--configs", *(word for word in task.words if not word.startswith("--")), *files_of(method)),
        *("--run-dir", str(place), *device),
        f"--configs.{task.varies}={number}",
        f"--configs.train.num_epochs={args.epochs or task.epochs}",
        f"--configs.train.batch_size={args.batch_size or task.batch_size}",
        *(word for word in task.words if word.startswith("--")),
        *changes_of(method),
        *args.overrides,
    ]
