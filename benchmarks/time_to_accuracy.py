"""Accuracy against seconds and bytes of whole runs over a network of limited rate, for several methods.

    python -m benchmarks.time_to_accuracy --hosts 4 --rate 50mbit --draw docs/time_to_accuracy.svg

Each run is train.py under mpirun in a laboratory (benchmarks/netlab), one rank on each host, with the same steps,
batches and learning rate for every method. Seconds are those of training, without evaluation. A rank sends the
bytes. `to reach` are the seconds and bytes after which the accuracy was, for the first time, at most 0.5 points
below the final accuracy of the first method. With several folds the medians are shown. All ranks share the cores
of this machine. The output is a table and a last line of JSON. --draw writes a figure, in the format that its
extension names.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import mean, median
from typing import Any

import matplotlib

from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.runs import to_train
from benchmarks.convergence.tasks import TASKS
from benchmarks.netlab import Laboratory, LaboratoryError
from benchmarks.netlab.ranks import measure, start
from benchmarks.results import print_json
from scripts.plot import read

SHOWN = ["dense", "fp16", "dgc", "dgc-sign-rice", "powersgd-4", "2bit-adaptive", "scaled-sign", "sgp", "local-sgd"]
TOLERANCE = 0.5  # points below the final accuracy of the first method

Curve = list[tuple[float, float, float]]  # (seconds, bytes, accuracy in %) after each epoch


def trained(args: argparse.Namespace, laboratory: Laboratory, fold: int, method: str) -> Curve:
    """Run train.py and return its curve."""
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
        status = start(laboratory, args.hosts, ["train.py", *words])
        if status:
            raise SystemExit(f"train.py {' '.join(words)}: status {status}")
        error = read(str(Path(scratch, "run"))).validation_error
    return [(s, b, 100.0 - y) for s, b, y in zip(error.seconds, error.wire, error.y, strict=True)]


def reached(curve: Curve, accuracy: float) -> tuple[float, float] | None:
    """Seconds and bytes after the first epoch with this accuracy. None: it was not reached."""
    return next(((seconds, nbytes) for seconds, nbytes, found in curve if found >= accuracy), None)


def summarized(curves: dict[str, list[Curve]]) -> dict[str, dict[str, Any]]:
    """One row for each method."""
    first = next(iter(curves.values()))
    rows: dict[str, dict[str, Any]] = {}
    for method, of in curves.items():
        ends = [curve[-1] for curve in of]
        found = [reached(curve, base[-1][2] - TOLERANCE) for curve, base in zip(of, first, strict=True)]
        known = [pair for pair in found if pair is not None]
        rows[method] = {
            "accuracy": mean(end[2] for end in ends),
            "seconds": median(end[0] for end in ends),
            "wire_bytes": median(end[1] for end in ends),
            "reached": len(known),
            "seconds_to_reach": median(pair[0] for pair in known) if len(known) == len(found) else None,
            "bytes_to_reach": median(pair[1] for pair in known) if len(known) == len(found) else None,
            "curves": of,
        }
    return rows


def report(rows: dict[str, dict[str, Any]]) -> None:
    print(f"\n{'method':<16} {'accuracy %':>10} {'seconds':>8} {'MB sent':>9}", end="")
    print(f"   to reach: {'seconds':>8} {'MB':>8}")
    for method, row in rows.items():
        line = f"{method:<16} {row['accuracy']:10.2f} {row['seconds']:8.1f} {row['wire_bytes'] / 1e6:9.2f}"
        if row["seconds_to_reach"] is None:
            print(f"{line}   in {row['reached']} of {len(row['curves'])} runs")
        else:
            print(f"{line}             {row['seconds_to_reach']:8.1f} {row['bytes_to_reach'] / 1e6:8.2f}")


def draw(rows: dict[str, dict[str, Any]], title: str, file: Path) -> None:
    """Draw the best accuracy of the first fold so far, against seconds and bytes."""
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "time", "svg.fonttype": "none", "font.size": 9}
    figure, both = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    colors = plt.get_cmap("tab10")
    for number, (method, row) in enumerate(rows.items()):
        color = "black" if number == 0 else colors(number - 1)
        seconds, nbytes, accuracy = zip(*row["curves"][0], strict=True)
        best = list(accumulate(accuracy, max))
        for axes, x in zip(both, (seconds, [b / 1e6 for b in nbytes]), strict=True):
            axes.step(x, best, where="post", color=color, linewidth=1.2, label=method)
    for axes, label in zip(both, ("seconds of training", "MB that a rank has sent"), strict=True):
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    lowest = min(max(accuracy for *_, accuracy in row["curves"][0]) for row in rows.values())
    both[0].set_ylim(max(0.0, lowest - 10), 100.5)
    both[0].set_ylabel("best test accuracy so far, %")
    both[0].legend(fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=9)
    metadata = {"Date": None} if file.suffix == ".svg" else {}
    figure.savefig(file, dpi=120, metadata=metadata)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    with_accuracy = [name for name, task in TASKS.items() if task.quality == "accuracy"]
    parser.add_argument("--task", choices=with_accuracy, default="digits")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="50mbit")
    parser.add_argument("--folds", type=int, default=1, help="folds to run, of 5")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=SHOWN)
    parser.add_argument("--draw", type=Path, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="--configs.KEY=VALUE", help="for every run, after --")
    args = parser.parse_args(argv)
    curves: dict[str, list[Curve]] = {method: [] for method in args.methods}
    try:
        with Laboratory(args.hosts, args.rate) as laboratory:
            link = measure(laboratory)
            title = f"{args.task}, {args.hosts} hosts, {link.bits_per_second / 1e6:.0f} Mbit/s each way"
            print(f"{title}, {args.epochs} epochs of batches of {args.batch_size} per rank", flush=True)
            for fold in range(args.folds):
                for method in args.methods:
                    curves[method].append(trained(args, laboratory, fold, method))
                    seconds, nbytes, accuracy = curves[method][-1][-1]
                    print(f"fold {fold}  {method:<16} {accuracy:6.2f} % {seconds:8.1f} s {nbytes / 1e6:9.2f} MB")
                    sys.stdout.flush()
    except (LaboratoryError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    rows = summarized(curves)
    report(rows)
    if args.draw is not None:
        draw(rows, title, args.draw)
    settings = {"task": args.task, "hosts": args.hosts, "bits_per_second": link.bits_per_second}
    print_json({"benchmark": "time_to_accuracy", **settings, "methods": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
