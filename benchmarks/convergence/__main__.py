"""Command line of `benchmarks.convergence`, which its __init__.py describes."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import benchmarks.convergence
from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.report import draw, report, rows_of
from benchmarks.convergence.runs import simulate, start, summary_of, to_train
from benchmarks.convergence.tasks import TASKS
from scripts.launch import usable_cores


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description=benchmarks.convergence.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--folds",
        "--seeds",
        type=int,
        dest="runs",
        help="folds of digits, of 5, or seeds of the other tasks; default: 5 folds, 3 seeds",
    )
    parser.add_argument("--epochs", type=int, help="default: that of the task")
    parser.add_argument("--batch-size", type=int, help="per rank; default: that of the task")
    parser.add_argument("--simulate", action="store_true", help="ranks in one process, without Horovod")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=["dense", "dgc"],
        help="the others are compared with the first",
    )
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw quality against bytes")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs; repeat no finished one")
    parser.add_argument("overrides", nargs="*", metavar="--configs.KEY=VALUE", help="for every run, after --")
    args = parser.parse_args(argv)
    if args.simulate and "adpsgd" in args.methods:
        parser.error("adpsgd is asynchronous and cannot be simulated: leave out --simulate")
    task = TASKS[args.task]
    kind = task.varies.rpartition(".")[2]
    epochs, batch_size = args.epochs or task.epochs, args.batch_size or task.batch_size
    title = f"{args.task}, {args.ranks} ranks, {args.runs or task.runs} {kind}s, {epochs} epochs of batches of "
    title += f"{batch_size} per rank"
    print(f"{title}, python {sys.version.split()[0]}", flush=True)
    runs = [(number, method) for number in range(args.runs or task.runs) for method in args.methods]
    summaries: dict[str, list[dict[str, Any]]] = {method: [] for method in args.methods}
    jobs, train_once = (usable_cores(), simulate) if args.simulate else (1, start)
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        places = [Path(args.keep or scratch, f"{method}-{number}") for number, method in runs]
        settings: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "overrides": args.overrides}
        words = [
            to_train(task, method, number, place, **settings)
            for (number, method), place in zip(runs, places, strict=True)
        ]
        ended = pool.map(partial(summary_of, train_once, args.ranks), words, places)
        for (number, method), summary in zip(runs, ended, strict=True):
            summaries[method].append(summary)
            also = f"   {task.also[1]} {summary['final'][task.also[0]]:.2f}" if task.also else ""
            print(
                f"{kind} {number}  {method:<20} {task.quality} {summary['final'][task.metric]:6.{task.decimals}f}"
                f"{task.unit}{also}   {summary['wire_bytes'] / 1e6:8.2f} MB on the wire per rank   "
                f"{summary['seconds']:6.1f} s",
                flush=True,
            )
    rows = rows_of(task, summaries)
    report(task, rows)
    if args.figure is not None:
        draw(task, rows, title, args.figure)


if __name__ == "__main__":
    main()
