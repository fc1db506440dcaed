"""Quality with compression: runs of one task, all methods compared with the first, same steps and learning rate.

    python -m benchmarks.convergence --task digits --ranks 4 --folds 5 --methods dense dgc
    python -m benchmarks.convergence --simulate --task pysource --methods dense dgc-adam --figure quality.svg
    python -m benchmarks.convergence --device cuda --task pysource --model 124m --minutes 8 --keep runs/124m

digits has folds: the test images of a fold are not used to train its model, and over all folds every image is
tested once. The language tasks have one test set, and a run for each seed. Differences to the first method are
paired by fold or seed. The quality is measured after the last epoch: accuracy or exact match in percent, or bits
per character, of which fewer are better: their differences are in percent. The bytes are defined in docs/bytes.md.

--figure draws quality against wire bytes, in the format that the file's extension names. --keep FOLDER keeps the
runs: the same command, started again, trains only those that are missing. With --simulate the ranks are threads of
one process, and one run at a time uses each core: many runs on few cores take a third of the time. AD-PSGD cannot
be simulated. With --device cuda the simulated ranks share one GPU, and PyTorch's kernels are deterministic.
--minutes saves and stops after so many, with exit status 75 if runs are left: the same command continues, with the
bits of an uninterrupted run. Rates leave out evaluation and checkpoints.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from benchmarks._harness import Table, options, print_json
from benchmarks._runs import TASKS, Task, about, add_runs, simulate, start, summary_of, to_train
from benchmarks.figures import axes_of, write
from dgc_training.faults.interruption import EXIT_SAVED
from scripts.launch import usable_cores

TAKES = "15 to 60 s a run of digits, 1 to 3 min a run of a language task"
Summaries = Mapping[str, Sequence[Mapping[str, Any]]]


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean. None for a single value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def rows_of(task: Task, summaries: Summaries) -> dict[str, dict[str, Any]]:
    """One row for each method, from the summaries of its runs. Others are compared with the first."""
    quality = {m: [float(s["final"][task.metric]) for s in runs] for m, runs in summaries.items()}
    first = next(iter(quality.values()))
    payload_of_first = sum(s["payload_bytes"] for s in next(iter(summaries.values())))
    rows: dict[str, dict[str, Any]] = {}
    for method, runs in summaries.items():
        pairs = list(zip(quality[method], first, strict=True))
        differences = [100 * (a / b - 1) if task.lower_is_better else a - b for a, b in pairs]
        sent = {k: sum(s[k] for s in runs) for k in ("wire_bytes", "dense_wire_bytes", "payload_bytes")}
        wire, dense, payload = sent.values()
        rows[method] = {
            "quality": mean(quality[method]),
            "difference": mean(differences),
            "standard_error": standard_error(differences),
            **sent,
            "dense_over_wire": dense / wire if wire else math.nan,
            "first_over_payload": payload_of_first / payload if payload else math.nan,
            "wire_mb": wire / len(runs) / 1e6,
            "payload_mb": payload / len(runs) / 1e6,
            "seconds": mean(s["seconds"] for s in runs),
            "rate": mean(s[f"{task.item}s"] / s["training_seconds"] for s in runs),
            "runs": quality[method],
        }
    return rows


def report(task: Task, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a table and a line of JSON."""
    number, first = f".{task.decimals}f", next(iter(rows))
    difference = f"to {first} %" if task.lower_is_better else f"minus {first}"
    columns = [("quality", task.quality + task.unit, f"20{number}"), ("difference", difference, "21.2f")]
    columns += [("standard_error", "std. error", "11.2f"), ("dense_over_wire", "dense / wire", "13.1f")]
    columns += [("wire_mb", "MB per run", "12.2f"), ("first_over_payload", "first / payload", "16.1f")]
    columns += [("payload_mb", "MB payload", "11.2f"), ("seconds", "seconds", "9.1f")]
    table = Table("method", 21, [*columns, ("rate", f"{task.item}s/s", "12,.0f")], rows)
    print_json({"benchmark": "convergence", "metric": task.metric, "methods": table.rows})


def draw(task: Task, rows: Mapping[str, Mapping[str, Any]], title: str, file: Path) -> None:
    """Draw the quality of each method against how many times fewer bytes it sends. Better is higher."""
    figure, axes = axes_of("convergence", (7.2, 3.6))
    axes.axhline(next(iter(rows.values()))["quality"], color="black", linewidth=0.8, linestyle=":")
    for number, (method, row) in enumerate(rows.items()):
        color = "black" if number == 0 else f"C{(number - 1) % 10}"
        error = row["standard_error"]
        if error is not None and task.lower_is_better:
            error *= next(iter(rows.values()))["quality"] / 100
        at = row["dense_over_wire"], row["quality"]
        axes.errorbar(*at, error, fmt="o", color=color, markersize=5, elinewidth=0.6)
        axes.annotate(method, at, xytext=(5, 4), textcoords="offset points", fontsize=8, color=color)
    axes.set_xscale("log")
    axes.margins(x=0.2, y=0.15)
    if task.lower_is_better:
        axes.invert_yaxis()
    saved = "times fewer wire bytes than dense fp32, whole run"
    axes.set(xlabel=saved, ylabel=f"test {task.quality}{', %' if task.unit else ''}")
    write(figure, file, title)


def train_all(args: argparse.Namespace, folder: Path, until: float) -> dict[str, list[dict[str, Any]]]:
    """The summaries of all runs, by method and in the order of the folds or seeds.

    Raises SystemExit if some are not finished at `until`, by `time.time`.
    """
    task = TASKS[args.task]
    numbers = range(task.first, task.first + (args.runs or task.runs))
    runs = [(number, method) for number in numbers for method in args.methods]
    summaries: dict[str, list[dict[str, Any]]] = {method: [] for method in args.methods}
    jobs, train_once = (usable_cores() if args.device == "cpu" else 1, simulate) if args.simulate else (1, start)
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        places = [folder / f"{method}-{number}" for number, method in runs]
        words = [to_train(args, method, n, place) for (n, method), place in zip(runs, places, strict=True)]
        ended = pool.map(partial(summary_of, train_once, args.ranks, until=until), words, places)
        for (number, method), summary in zip(runs, ended, strict=True):
            if summary is None:
                continue
            summaries[method].append(summary)
            final, sent = summary["final"], summary["wire_bytes"] / 1e6
            also = f"   {task.also[1]} {final[task.also[0]]:.2f}" if task.also else ""
            quality = f"{task.quality} {final[task.metric]:6.{task.decimals}f}{task.unit}{also}"
            cost = f"{sent:8.2f} MB on the wire per rank   {summary['seconds']:6.1f} s"
            print(f"{task.kind} {number}  {method:<20} {quality}   {cost}", flush=True)
    if left := len(runs) - sum(map(len, summaries.values())):
        print(f"{left} of {len(runs)} runs are not finished: the same command continues")
        raise SystemExit(EXIT_SAVED)
    return summaries


def main(argv: Sequence[str] | None = None) -> None:
    parser = options("benchmarks.convergence", __doc__)
    add_runs(parser, ["dense", "dgc"])
    parser.set_defaults(methods=None)  # the methods of the task
    parser.add_argument("--model", choices=("tiny", "124m"), help="of pysource; default: 0.4 million parameters")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: simulated, on one GPU")
    parser.add_argument("--minutes", type=float, help="stop after so many; the same command continues")
    parser.add_argument("--ranks", type=int, default=4)
    what = "folds of digits, of 5, or seeds of the other tasks; default: 5 folds, 3 seeds"
    parser.add_argument("--folds", "--seeds", type=int, dest="runs", help=what)
    parser.add_argument("--simulate", action="store_true", help="ranks in one process, without Horovod")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw quality against bytes")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs; repeat no finished one")
    args = parser.parse_args(argv)
    until = math.inf if args.minutes is None else time.time() + 60 * args.minutes
    if args.model is not None:
        args.task += f"-{args.model}"
    if args.task not in TASKS:
        parser.error(f"--model {args.model} belongs to another task: add --task pysource")
    task = TASKS[args.task]
    args.simulate |= args.device == "cuda"
    args.methods = args.methods or list(task.methods)
    if args.simulate and "adpsgd" in args.methods:
        parser.error("adpsgd is asynchronous and cannot be simulated: leave out --simulate and --device cuda")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here")
    if args.minutes is not None and not (args.keep and args.simulate):
        parser.error("--minutes needs --keep FOLDER, where the next start finds the runs, and simulated ranks")
    title = f"{args.task}, {args.ranks} ranks, {args.runs or task.runs} {task.kind}s, {about(args)}"
    print(f"{title}, python {sys.version.split()[0]}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        rows = rows_of(task, train_all(args, args.keep or Path(scratch), until))
    report(task, rows)
    if args.figure is not None:
        draw(task, rows, title, args.figure)


if __name__ == "__main__":
    main()
