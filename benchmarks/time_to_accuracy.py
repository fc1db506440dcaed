"""Accuracy against seconds and bytes of whole runs over a network of limited rate, for several methods.

    python -m benchmarks.time_to_accuracy --hosts 4 --rate 50mbit --epochs 20 --batch-size 16 --draw FILE.svg
    python -m benchmarks.time_to_accuracy --task pysource --hosts 4 --rate 50mbit --methods fp16 onebit-adam
    python -m benchmarks.time_to_accuracy --simulate --folds 3 --target 98.5 --methods fp16 dgc powersgd-4

Each run is train.py under mpirun in a laboratory (benchmarks/netlab), one rank on each host, with the same
steps, batches and learning rate for every method. The tasks are those of benchmarks.convergence, where `ar` and
`adpsgd` have a learning rate by epochs on number words. Seconds are those of training, without evaluation. A rank
sends the bytes. `to reach` are the seconds and bytes of the first evaluation that was nearly as good as the first
method at its end: at most 0.5 points below a quality in percent, or at most 2 % above bits per character; with
--target, of the first one that was at least as good as this quality. With several folds or seeds the medians are
shown. All ranks share the cores of this machine. The output is a table and a last line of JSON. --draw writes a
figure, in the format that its extension names.

With --simulate the ranks are those of one process, without a laboratory. Seconds are then those that a link of
this rate needs for the bytes; computing is not in them.
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

import matplotlib

from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.runs import simulate, to_train
from benchmarks.convergence.tasks import TASKS, Task
from benchmarks.netlab import Laboratory, LaboratoryError
from benchmarks.netlab.ranks import measure, start
from benchmarks.netlab.rates import parse_rate
from benchmarks.results import print_json
from scripts.plot import read

SHOWN = ["fp16", "dgc", "dgc-sign-rice", "powersgd-4", "2bit-adaptive", "scaled-sign", "sgp", "local-sgd"]
TOLERANCE = 0.5  # points below the final quality of the first method, if it is in percent
SHARE = 0.02  # of the final quality of the first method, if it is not

Curve = list[tuple[float, float, float]]  # (seconds, bytes, accuracy in % or another quality) after each epoch


def trained(args: argparse.Namespace, laboratory: Laboratory | None, fold: int, method: str) -> Curve:
    """Run train.py and return its curve. laboratory: None: simulated ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        words = to_train(
            TASKS[args.task],
            method,
            fold,
            Path(scratch, "run"),
            epochs=args.epochs,
            batch_size=args.batch_size,
            overrides=args.overrides,
        )
        if laboratory is None:
            simulate(args.hosts, words)
        elif status := start(laboratory, args.hosts, ["train.py", *words]):
            raise SystemExit(f"train.py {' '.join(words)}: status {status}")
        found = read(str(Path(scratch, "run"))).validation
    seconds = found.seconds if laboratory else [8 * nbytes / parse_rate(args.rate) for nbytes in found.wire]
    return list(zip(seconds, found.wire, found.y, strict=True))


def reached(curve: Curve, final: float, task: Task, target: float | None = None) -> tuple[float, float] | None:
    """Seconds and bytes after the first epoch that was as good as `target`, or if that is None, nearly as good as
    `final`. None: there is none.
    """
    sign = -1 if task.lower_is_better else 1
    needed = final - sign * (TOLERANCE if task.unit else SHARE * final) if target is None else target
    close = ((seconds, nbytes) for seconds, nbytes, found in curve if sign * (found - needed) >= 0)
    return next(close, None)


def summarized(
    curves: dict[str, list[Curve]], task: Task, target: float | None = None
) -> dict[str, dict[str, Any]]:
    """One row for each method."""
    first = next(iter(curves.values()))
    rows: dict[str, dict[str, Any]] = {}
    for method, of in curves.items():
        ends = [curve[-1] for curve in of]
        found = [reached(curve, base[-1][2], task, target) for curve, base in zip(of, first, strict=True)]
        known = [pair for pair in found if pair is not None]
        rows[method] = {
            "quality": median(end[2] for end in ends),
            "seconds": median(end[0] for end in ends),
            "wire_bytes": median(end[1] for end in ends),
            "reached": len(known),
            "seconds_to_reach": median(pair[0] for pair in known) if len(known) == len(found) else None,
            "bytes_to_reach": median(pair[1] for pair in known) if len(known) == len(found) else None,
            "range_to_reach": [bound(pair[1] for pair in known) for bound in (min, max)] if known else None,
            "curves": of,
        }
    return rows


def report(rows: dict[str, dict[str, Any]], task: Task) -> None:
    print(f"\n{'method':<16} {task.quality + task.unit:>18} {'seconds':>8} {'MB sent':>9}", end="")
    print(f"   to reach: {'seconds':>8} {'MB':>8}")
    for method, row in rows.items():
        line = f"{method:<16} {row['quality']:18.{task.decimals}f} {row['seconds']:8.1f}"
        line += f" {row['wire_bytes'] / 1e6:9.2f}"
        if row["seconds_to_reach"] is None:
            print(f"{line}   in {row['reached']} of {len(row['curves'])} runs")
        else:
            low, high = (nbytes / 1e6 for nbytes in row["range_to_reach"])
            line += f"             {row['seconds_to_reach']:8.1f} {row['bytes_to_reach'] / 1e6:8.2f}"
            print(line + (f"   ({low:.2f} to {high:.2f})" if len(row["curves"]) > 1 else ""))


def draw(rows: dict[str, dict[str, Any]], task: Task, title: str, file: Path) -> None:
    """Draw the best quality of the first fold so far, against seconds and bytes."""
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "time", "svg.fonttype": "none", "font.size": 9}
    figure, both = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    colors = plt.get_cmap("tab10")
    for number, (method, row) in enumerate(rows.items()):
        color = "black" if number == 0 else colors(number - 1)
        seconds, nbytes, quality = zip(*row["curves"][0], strict=True)
        best = list(accumulate(quality, min if task.lower_is_better else max))
        for axes, x in zip(both, (seconds, [b / 1e6 for b in nbytes]), strict=True):
            axes.step(x, best, where="post", color=color, linewidth=1.2, label=method)
    for axes, label in zip(both, ("seconds of training", "MB that a rank has sent"), strict=True):
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    found = [[quality for *_, quality in row["curves"][0]] for row in rows.values()]
    if task.unit:  # percent
        both[0].set_ylim(max(0.0, min(map(max, found)) - 10), 100.5)
    else:
        both[0].set_ylim(min(map(min, found)) * 0.97, max(map(min, found)) * 1.4)
    both[0].set_ylabel(f"best test {task.quality} so far{',' if task.unit else ''}{task.unit}")
    both[0].legend(fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=9)
    metadata = {"Date": None} if file.suffix == ".svg" else {}
    figure.savefig(file, dpi=120, metadata=metadata)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="50mbit")
    parser.add_argument("--folds", type=int, default=1, help="folds to run, of 5, or seeds")
    parser.add_argument("--epochs", type=int, help="those of the task by default")
    parser.add_argument("--batch-size", type=int, help="per rank; that of the task by default")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=SHOWN)
    parser.add_argument("--target", type=float, metavar="QUALITY", help="what `to reach` means")
    parser.add_argument(
        "--simulate", action="store_true", help="ranks of this process; seconds of the bytes alone"
    )
    parser.add_argument("--draw", type=Path, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="--configs.KEY=VALUE", help="for every run, after --")
    args = parser.parse_args(argv)
    task = TASKS[args.task]
    kind = task.varies.rpartition(".")[2]
    epochs, batch_size = args.epochs or task.epochs, args.batch_size or task.batch_size
    curves: dict[str, list[Curve]] = {method: [] for method in args.methods}
    try:
        with nullcontext() if args.simulate else Laboratory(args.hosts, args.rate) as laboratory:
            nominal = parse_rate(args.rate)
            rate = measure(laboratory).bits_per_second if laboratory else nominal
            how = f"measured: {rate / 1e6:.0f}" if laboratory else "simulated"
            title = f"{args.task}, {args.hosts} hosts, links of {nominal / 1e6:g} Mbit/s ({how})"
            print(f"{title}, {epochs} epochs of batches of {batch_size} per rank", flush=True)
            for fold in range(args.folds):
                for method in args.methods:
                    curves[method].append(trained(args, laboratory, fold, method))
                    seconds, nbytes, quality = curves[method][-1][-1]
                    shown = f"{quality:8.{task.decimals}f}{task.unit}"
                    print(f"{kind} {fold}  {method:<16} {shown} {seconds:8.1f} s {nbytes / 1e6:9.2f} MB")
                    sys.stdout.flush()
    except (LaboratoryError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    rows = summarized(curves, task, args.target)
    report(rows, task)
    if args.draw is not None:
        draw(rows, task, title, args.draw)
    settings = {"task": args.task, "hosts": args.hosts, "bits_per_second": rate}
    print_json({"benchmark": "time_to_accuracy", **settings, "methods": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
