"""Predicted bytes and seconds of an exchange from 2 to 4096 ranks, by method, with the cost model of dgc/cost/.

    python -m benchmarks.scale --model resnet50 --bandwidth 1.25e8 --latency 50e-6 --draw scale

Bytes are recorded from the code of each method. Computing is measured on this machine, for one rank with 2, 4 and
8 replies, and a line through the times of decoding is extended to more ranks, unless all replies of those could be
decoded here. The table shows milliseconds of an exchange without overlap. --draw writes FILE.png and FILE.svg. The
last line of the output is JSON. benchmarks/scale_order.py compares predictions with measurements.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import torch

from benchmarks.exchange.methods import METHODS, parameters_of
from benchmarks.results import print_json
from dgc.bucket import Bucket
from dgc.compression import Route, Rule
from dgc.compression.protocol import Compressor
from dgc.cost import Compute, Network, Traffic, fit_computing, predict, record
from dgc.optim.exchange.planning import plan_buckets

SIZES = [2**j for j in range(1, 13)]
MEASURED = (2, 4, 8)  # ranks whose replies are decoded to measure computing
SHOWN = ["dense", "fp16", "dgc", "dgc-fp16-packed", "dgc-reduce-scatter", "powersgd", "sign", "2bit"]

Plan = Callable[[int, int], Sequence[tuple[Bucket, Compressor]]]


def planner(name: str, model: str, ratio: float) -> Plan:
    """A function that plans the buckets of a model for a method, with random gradients."""
    named = parameters_of(model)
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(p.shape, generator=generator) * 1e-3 for _, p in named]

    def plan(size: int, rank: int) -> list[tuple[Bucket, Compressor]]:
        for (_, p), gradient in zip(named, made, strict=True):
            p.grad = gradient.clone()
        compressor = METHODS[name](ratio)
        compressor.begin_epoch(0)
        planned = plan_buckets(named, Route([Rule(compressor)]).compressor_for, 25.0, "bucket")
        for of_bucket in planned:
            of_bucket.compressor.plan(of_bucket.bucket, size, rank)
            for i in range(len(of_bucket.parameters)):
                of_bucket.collect(i)
        return [(of_bucket.bucket, of_bucket.compressor) for of_bucket in planned]

    return plan


def recorded(
    name: str, model: str, ratio: float, sizes: Sequence[int], ranks_per_machine: int
) -> list[tuple[Traffic, Compute]]:
    """The traffic of a method for each number of ranks, and what it computes, measured here."""
    plan = planner(name, model, ratio)
    record(plan, MEASURED[0])  # warm-up
    extended = fit_computing([record(plan, size) for size in MEASURED])
    found = []
    for size in sizes:
        traffic = record(plan, size, min(size, ranks_per_machine))
        decoded = traffic.decode is not None  # then it is measured, also where the method goes dense
        found.append((traffic, Compute(extended.encode, traffic.decode or 0.0) if decoded else extended))
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


def draw(found: dict[str, list[dict[str, float]]], title: str, file: Path) -> None:
    """Draw seconds and bytes against ranks, as PNG and SVG."""
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "scale", "svg.fonttype": "none", "font.size": 9}
    figure, both = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    columns = (("exchange_ms", "exchange, ms"), ("wire_bytes", "bytes that a rank sends"))
    for axes, (column, label) in zip(both, columns, strict=True):
        for name, rows in found.items():
            axes.plot([row["ranks"] for row in rows], [row[column] for row in rows], ".-", label=name, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("ranks")
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    both[1].legend(fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=9)
    for kind in ("png", "svg"):
        metadata = {"Date": None} if kind == "svg" else {}
        figure.savefig(file.with_suffix(f".{kind}"), dpi=120, metadata=metadata)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=("resnet18", "resnet50", "vgg16"), default="resnet50")
    parser.add_argument("--ratio", type=float, default=0.001)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=SHOWN)
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES)
    parser.add_argument("--latency", type=float, default=50e-6, help="seconds per message between machines")
    parser.add_argument("--bandwidth", type=float, default=1.25e8, help="bytes per second of a machine")
    parser.add_argument("--ranks-per-machine", type=int, default=1)
    parser.add_argument("--inner-latency", type=float, default=2e-6, help="seconds per message in a machine")
    parser.add_argument("--inner-bandwidth", type=float, default=10e9, help="bytes per second of a rank")
    parser.add_argument("--draw", type=Path, metavar="FILE")
    args = parser.parse_args()
    local = {"inner_latency": args.inner_latency, "inner_bandwidth": args.inner_bandwidth}
    network = Network(args.latency, args.bandwidth, args.ranks_per_machine, **local)
    title = f"{args.model}, ratio {args.ratio:g}, {args.bandwidth:g} B/s, {args.latency:g} s"
    print(f"{title}, {args.ranks_per_machine} ranks per machine: exchange in ms\n")
    print(f"{'ranks':<19}" + "".join(f"{size:9}" for size in args.ranks))
    found = {}
    for name in args.methods:
        with torch.no_grad():
            found[name] = predicted(args, network, name)
        print(f"{name:<19}" + "".join(f"{row['exchange_ms']:9.1f}" for row in found[name]), flush=True)
    if args.draw is not None:
        draw(found, title, args.draw)
    print_json({"benchmark": "scale", "model": args.model, "methods": found})


if __name__ == "__main__":
    main()
