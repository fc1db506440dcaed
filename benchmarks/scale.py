"""Predicted bytes and seconds of an exchange from 2 to 4096 ranks, by method, with the cost model of dgc/cost/.

    python -m benchmarks.scale --model resnet50 --bandwidth 1.25e8 --latency 50e-6 --draw scale.svg

Bytes are recorded from the code of each method. Computing is measured on this machine, for one rank with 2, 4 and
8 replies, and a line through the times of decoding is extended to more ranks. The table shows milliseconds of an
exchange without overlap. --draw writes a figure, in the format that its extension names. The last line of the
output is JSON. benchmarks/scale_order.py compares predictions with measurements.

A method dgc:SELECTOR is DGC with a selector of benchmarks.selectors. --work has the seconds of forward and
backward of a rank. A second table then shows how many times as much all ranks train as one, as in figures 7 and 8
of the study of LDTE-BS: ranks * work / (work + exchange). The figure shows this number divided by the ranks.
"""

import argparse
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path

import matplotlib
import torch

from benchmarks.exchange.methods import METHODS, dgc, parameters_of
from benchmarks.results import print_json
from benchmarks.selector_methods import SELECTORS
from dgc.compression import Route, Rule
from dgc.compression.protocol import Compressor
from dgc.cost import Compute, Network, Traffic, fit_computing, predict, record_steps, typical
from dgc.cost.computing import Planned, cache_evictor
from dgc.engine.buckets import plan_buckets
from dgc.wire import CastValues, PackedIndices

SIZES = [2**j for j in range(1, 13)]
MEASURED = (2, 4, 8)  # ranks whose replies are decoded to measure computing
WARMUP, REPEATS = 4, 5  # exchanges that fill the residual, and those that are measured
GRADIENT_SETS = 3
WITH_SELECTOR = "dgc:"
NAMES = (*METHODS, *(f"{WITH_SELECTOR}{name}" for name in SELECTORS))
SHOWN = ["dense", "fp16", "dgc", "dgc-fp16-packed", "dgc-reduce-scatter", "powersgd", "sign", "2bit"]


class Work:
    """A method on a model with random gradients, as `record_steps` calls it. Others replace them in every step."""

    def __init__(self, name: str, model: str, ratio: float):
        self._compressor = compressor_of(name, ratio)
        self._named = parameters_of(model)
        generator = torch.Generator().manual_seed(0)
        shapes = [p.shape for _, p in self._named]
        self._sets = [[torch.randn(s, generator=generator) * 1e-3 for s in shapes] for _ in range(GRADIENT_SETS)]
        self._evict = cache_evictor()

    def plan(self, size: int, rank: int) -> Planned:
        compressor = self._compressor()
        compressor.begin_epoch(0)
        self._planned = plan_buckets(self._named, Route([Rule(compressor)]).compressor_for, 25.0, "bucket")
        return [(of_bucket.bucket, of_bucket.compressor) for of_bucket in self._planned]

    def refill(self, planned: Planned, step: int) -> None:
        for (_, p), gradient in zip(self._named, self._sets[step % GRADIENT_SETS], strict=True):
            p.grad = gradient.clone()
        for of_bucket in self._planned:
            for i in range(len(of_bucket.parameters)):
                of_bucket.collect(i)
        self._evict()


def compressor_of(name: str, ratio: float) -> Callable[[], Compressor]:
    """Makes the compressor of a method."""
    if name in METHODS:
        return lambda: METHODS[name](ratio)
    selector = SELECTORS[name.removeprefix(WITH_SELECTOR)]
    return lambda: dgc(ratio, selector=deepcopy(selector), values=CastValues("fp16"), indices=PackedIndices())


def recorded(
    name: str, model: str, ratio: float, sizes: Sequence[int], ranks_per_machine: int
) -> list[tuple[Traffic, Compute]]:
    """The traffic of a method for each number of ranks, and what it computes, measured here."""
    work = Work(name, model, ratio)
    measured = {}
    for size in MEASURED:
        steps = record_steps(work.plan, size, 1, WARMUP + REPEATS, work.refill)
        measured[size] = typical(steps[WARMUP:])
    extended = fit_computing(list(measured.values()))
    found = []
    for size in sizes:
        traffic = record_steps(work.plan, size, min(size, ranks_per_machine), 1, work.refill)[-1]
        timed = measured.get(size)
        found.append((traffic, Compute(timed.encode, timed.decode or 0.0) if timed else extended))
    return found


def predicted(args: argparse.Namespace, network: Network, name: str) -> list[dict[str, float]]:
    """One row for each number of ranks."""
    rows = []
    for traffic, compute in recorded(name, args.model, args.ratio, args.ranks, args.ranks_per_machine):
        p = predict(traffic, network, compute)
        rows.append(
            {
                "ranks": traffic.size,
                "payload_bytes": p.payload_bytes,
                "wire_bytes": p.wire_bytes,
                "cross_wire_bytes": p.cross_wire_bytes,
                "communication_ms": 1e3 * p.communication,
                "compute_ms": 1e3 * p.compute,
                "exchange_ms": 1e3 * p.exchange,
            }
        )
    return rows


def speed(rows: list[dict[str, float]], work: float) -> list[float]:
    """How many times as much the ranks train as one rank without an exchange. `work` is its seconds."""
    return [row["ranks"] * work / (work + row["exchange_ms"] / 1e3) for row in rows]


def draw(found: dict[str, list[dict[str, float]]], title: str, file: Path, work: float | None = None) -> None:
    """Draw seconds and bytes against ranks. With the seconds of a rank's work, speed per rank and bytes."""
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "scale", "svg.fonttype": "none", "font.size": 9}
    figure, both = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    first = "exchange, ms" if work is None else "speed per rank / that of one rank alone"
    for axes, label in zip(both, (first, "bytes that a rank sends"), strict=True):
        for name, rows in found.items():
            y = [row["exchange_ms" if axes is both[0] else "wire_bytes"] for row in rows]
            if axes is both[0] and work is not None:
                y = [times / row["ranks"] for times, row in zip(speed(rows, work), rows, strict=True)]
            axes.plot([row["ranks"] for row in rows], y, ".-", label=name, linewidth=1)
        axes.set_xscale("log", base=2)
        if axes is both[1] or work is None:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1)
        axes.set_xlabel("ranks")
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    both[1].legend(fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=9)
    figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else {})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=("resnet18", "resnet50", "vgg16"), default="resnet50")
    parser.add_argument("--ratio", type=float, default=0.001)
    parser.add_argument("--methods", nargs="+", choices=NAMES, metavar="NAME", default=SHOWN)
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES)
    parser.add_argument("--latency", type=float, default=50e-6, help="seconds per message between machines")
    parser.add_argument("--bandwidth", type=float, default=1.25e8, help="bytes per second of a machine")
    parser.add_argument("--ranks-per-machine", type=int, default=1)
    parser.add_argument("--inner-latency", type=float, default=2e-6, help="seconds per message in a machine")
    parser.add_argument("--inner-bandwidth", type=float, default=10e9, help="bytes per second of a rank")
    parser.add_argument("--work", type=float, metavar="S", help="seconds of forward and backward of a rank")
    parser.add_argument("--draw", type=Path, metavar="FILE")
    args = parser.parse_args()
    local = {"inner_latency": args.inner_latency, "inner_bandwidth": args.inner_bandwidth}
    network = Network(args.latency, args.bandwidth, args.ranks_per_machine, **local)
    link = f"{args.bandwidth * 8 / 1e9:g} Gbit/s, {args.latency * 1e6:g} µs per message"
    title = f"{args.model}, ratio {args.ratio:g}, {link}"
    print(f"{title}, {args.ranks_per_machine} ranks per machine: exchange in ms\n")
    print(f"{'ranks':<19}" + "".join(f"{size:9}" for size in args.ranks))
    found = {}
    for name in args.methods:
        with torch.no_grad():
            found[name] = predicted(args, network, name)
        print(f"{name:<19}" + "".join(f"{row['exchange_ms']:9.1f}" for row in found[name]), flush=True)
    if args.work is not None:
        print(f"\ntimes the speed of one rank, whose forward and backward take {args.work:g} s\n")
        for name, rows in found.items():
            print(f"{name:<19}" + "".join(f"{times:9.1f}" for times in speed(rows, args.work)))
    if args.draw is not None:
        draw(found, title, args.draw, args.work)
    print_json({"benchmark": "scale", "model": args.model, "work": args.work, "methods": found})


if __name__ == "__main__":
    main()
