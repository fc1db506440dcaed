"""Accuracy against seconds and bytes of whole runs over a network of limited rate, for several methods.

    python -m benchmarks.time_to_accuracy --hosts 4 --rate 50mbit --epochs 20 --batch-size 16 --draw FILE.svg
    python -m benchmarks.time_to_accuracy --simulate --folds 3 --target 98.5 --methods fp16 dgc powersgd-4

Each run is train.py under mpirun in a laboratory (docs/netlab.md), one rank on each host, with the same steps,
batches and learning rate for every method, on the tasks of benchmarks.convergence. Seconds are seconds of
training, without evaluation. `to reach` are the seconds and bytes of the first evaluation that was nearly as good
as the first method at its end: at most 0.5 points below a quality in percent, or at most 2 % above bits per
character;
with --target, of the first one that was at least as good as this quality. With several folds or seeds the medians
are shown. --draw writes a figure of the first one, in the format that its extension names. With --simulate the
ranks are simulated in one process. Seconds are then the time that a link of this rate needs for the bytes.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._harness import Table, options, print_json
from benchmarks._laboratory import Laboratory, LaboratoryError, parse_rate
from benchmarks._launches import measure, start
from benchmarks._runs import TASKS, Task, about, add_runs, simulate, to_train
from benchmarks.figures import axes_of, write
from scripts.plot import read

TAKES = "7 min with 50 Mbit/s, or 20 min with pysource"
SHOWN = ["fp16", "dgc", "dgc-sign-rice", "powersgd-4", "2bit-adaptive", "scaled-sign", "sgp", "local-sgd"]
TOLERANCE = 0.5  # points below the final quality of the first method, if it is in percent
SHARE = 0.02  # of the final quality of the first method, if it is not

Curve = list[tuple[float, float, float]]  # (seconds, bytes, accuracy in % or another quality) after each epoch


def trained(args: argparse.Namespace, laboratory: Laboratory | None, number: int, method: str) -> Curve:
    """Run train.py for a fold or seed, and return its curve. laboratory: None: simulated ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        words = to_train(args, method, number, Path(scratch, "run"))
        if laboratory is None:
            simulate(args.hosts, words)
        elif status := start(laboratory, args.hosts, ["train.py", *words]):
            raise SystemExit(f"train.py {' '.join(words)}: status {status}")
        found = read(str(Path(scratch, "run"))).validation
    seconds = found.seconds if laboratory else [8 * nbytes / parse_rate(args.rate) for nbytes in found.wire]
    return list(zip(seconds, found.wire, found.y, strict=True))


def reached(curve: Curve, final: float, task: Task, target: float | None = None) -> tuple[float, float] | None:
    """Seconds and bytes after the first epoch as good as `target`, or without one, nearly as good as `final`."""
    sign = -1 if task.lower_is_better else 1
    needed = final - sign * (TOLERANCE if task.unit else SHARE * final) if target is None else target
    close = ((seconds, nbytes) for seconds, nbytes, found in curve if sign * (found - needed) >= 0)
    return next(close, None)


def row_of(curves: list[Curve], first: list[Curve], task: Task, target: float | None = None) -> dict[str, Any]:
    """The medians of a method's curves beside the first method's. What only some runs reach is left out."""
    seconds, nbytes, quality = map(median, zip(*(curve[-1] for curve in curves), strict=True))
    row: dict[str, Any] = {"quality": quality, "seconds": seconds, "wire_mb": nbytes / 1e6, "curves": curves}
    ends = [reached(curve, base[-1][2], task, target) for curve, base in zip(curves, first, strict=True)]
    found = [end for end in ends if end is not None]
    row["reached"] = f"{len(found)} of {len(ends)}"
    if len(found) == len(ends):
        seconds, nbytes = map(median, zip(*found, strict=True))
        row |= {"seconds_to_reach": seconds, "mb_to_reach": nbytes / 1e6}
    return row


def draw(rows: dict[str, dict[str, Any]], task: Task, title: str, file: Path) -> None:
    """Draw the best quality so far, against seconds and bytes."""
    figure, both = axes_of("time", (9, 3.6), 2, sharey=True)
    for number, (method, row) in enumerate(rows.items()):
        color = "black" if number == 0 else f"C{(number - 1) % 10}"
        seconds, nbytes, quality = zip(*row["curves"][0], strict=True)
        best = list(accumulate(quality, min if task.lower_is_better else max))
        for axes, x in zip(both, (seconds, [b / 1e6 for b in nbytes]), strict=True):
            axes.step(x, best, where="post", color=color, linewidth=1.2, label=method)
    for axes, label in zip(both, ("seconds of training", "MB that a rank has sent"), strict=True):
        axes.set(xscale="log", xlabel=label)
        axes.grid(alpha=0.2)
    found = [[quality for *_, quality in row["curves"][0]] for row in rows.values()]
    bits = min(map(min, found)) * 0.97, max(map(min, found)) * 1.4
    both[0].set_ylim(*((max(0.0, min(map(max, found)) - 10), 100.5) if task.unit else bits))  # a unit: percent
    both[0].set_ylabel(f"best test {task.quality} so far{',' if task.unit else ''}{task.unit}")
    both[0].legend(fontsize=7, frameon=False)
    write(figure, file, title)


def main(argv: Sequence[str] | None = None) -> int:
    parser = options("benchmarks.time_to_accuracy", __doc__)
    add_runs(parser, SHOWN)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="50mbit")
    parser.add_argument("--folds", type=int, default=1, help="number of folds or seeds to run")
    parser.add_argument("--target", type=float, metavar="QUALITY", help="what `to reach` means")
    parser.add_argument("--simulate", action="store_true", help="ranks of this process, seconds of the bytes")
    parser.add_argument("--draw", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    task = TASKS[args.task]
    numbers = range(task.first, task.first + args.folds)
    try:
        with nullcontext() if args.simulate else Laboratory(args.hosts, args.rate) as laboratory:
            nominal = parse_rate(args.rate)
            rate = measure(laboratory).bits_per_second if laboratory else nominal
            how = f"measured: {rate / 1e6:.0f}" if laboratory else "simulated"
            title = f"{args.task}, {args.hosts} hosts, links of {nominal / 1e6:g} Mbit/s ({how})"
            print(f"{title}, {about(args)}", flush=True)
            curves = [[trained(args, laboratory, n, method) for n in numbers] for method in args.methods]
    except (LaboratoryError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    columns = [("quality", task.quality + task.unit, f"19.{task.decimals}f"), ("seconds", "seconds", "9.1f")]
    columns += [("wire_mb", "MB sent", "10.2f"), ("seconds_to_reach", "to reach: seconds", "19.1f")]
    columns += [("mb_to_reach", "MB", "9.2f"), ("reached", "reached", "9")]
    rows = (row_of(own, curves[0], task, args.target) for own in curves)
    table = Table("method", 16, columns, dict(zip(args.methods, rows, strict=True)))
    if args.draw is not None:
        draw(table.rows, task, title, args.draw)
    settings = {"task": args.task, "hosts": args.hosts, "bits_per_second": rate}
    print_json({"benchmark": "time_to_accuracy", **settings, "methods": table.rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
