"""Predicted bytes and seconds of an exchange from 2 to 4096 ranks, by method, with the advisor's cost model.

    python -m benchmarks.scale --model resnet50 --bandwidth 1.25e8 --latency 50e-6 --draw scale.svg

Bytes are recorded from the code of each method. Computing is measured on this machine, for one rank with 2, 4 and
8 replies, and a line through the times of decoding is extended to more ranks. The table shows milliseconds of an
exchange without overlap. --draw writes a figure, in the format that its extension names.

--work has the seconds of forward and backward of a rank. A second table then shows how many times as much all
ranks train as one, as in figures 7 and 8 of the study of LDTE-BS: ranks * work / (work + exchange). The figure
shows this number divided by the ranks. A method dgc:SELECTOR is DGC with fp16 values, packed indices and that
selector.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks._harness import Table, add_methods, options, print_json
from benchmarks.exchange import MODELS, parameters_of
from benchmarks.figures import axes_of, write
from dgc.advisor.cost import Compute, Network, fit_computing, predict, record_steps, typical
from dgc.advisor.cost.computing import Planned, evict_caches
from dgc.compression import Route, Rule
from dgc.engine.buckets import plan_buckets
from scripts.methods import COMPRESSORS, build

TAKES = "3 min"
SIZES = [2**j for j in range(1, 13)]
COUNTED = (2, 4, 8)  # ranks whose replies are decoded to measure computing
WARMUP, STEPS = 4, 9  # exchanges that fill the residual, and with those that are measured
GRADIENT_SETS = 3
SHOWN = ["dense", "fp16", "dgc", "dgc-fp16-packed", "dgc-reduce-scatter", "powersgd-2-half", "scaled-sign", "2bit"]

Rows = list[dict[str, float]]


class Work:
    """A method on a model with random gradients, as `record_steps` calls it. Others replace them in every step."""

    def __init__(self, name: str, model: str, ratio: float):
        self._name, self._ratio = name, ratio
        self._named = parameters_of(model)
        generator = torch.Generator().manual_seed(0)
        shapes = [p.shape for _, p in self._named]
        self._sets = [[torch.randn(s, generator=generator) * 1e-3 for s in shapes] for _ in range(GRADIENT_SETS)]

    def plan(self, size: int, rank: int) -> Planned:
        route = Route([Rule(build(self._name, self._ratio))])
        self._planned = plan_buckets(self._named, route.compressor_for, 25.0, "bucket")
        return [(of_bucket.bucket, of_bucket.compressor) for of_bucket in self._planned]

    def refill(self, planned: Planned, step: int) -> None:
        for (_, p), gradient in zip(self._named, self._sets[step % GRADIENT_SETS], strict=True):
            p.grad = gradient.clone()
        for of_bucket in self._planned:
            for i in range(len(of_bucket.parameters)):
                of_bucket.collect(i)
        evict_caches()


def predicted(work: Work, sizes: Sequence[int], network: Network) -> Rows:
    """One row for each number of ranks."""
    measured = {n: typical(record_steps(work.plan, n, 1, STEPS, work.refill)[WARMUP:]) for n in COUNTED}
    extended, rows = fit_computing(list(measured.values())), []
    for size in sizes:
        timed = measured.get(size)
        compute = Compute(timed.encode, timed.decode or 0.0) if timed else extended
        p = predict(record_steps(work.plan, size, 1, 1, work.refill)[-1], network, compute)
        seconds = {"communication": p.communication, "compute": p.compute, "exchange": p.exchange}
        times = {f"{what}_ms": 1e3 * of for what, of in seconds.items()}
        rows.append({"ranks": size, "payload_bytes": p.payload_bytes, "wire_bytes": p.wire_bytes, **times})
    return rows


def speed(rows: Rows, work: float) -> list[float]:
    """How many times as much the ranks train as one rank without an exchange. `work` is its seconds."""
    return [row["ranks"] * work / (work + row["exchange_ms"] / 1e3) for row in rows]


def draw(found: dict[str, Rows], title: str, file: Path, work: float | None = None) -> None:
    """Draw seconds and bytes against ranks. With the seconds of a rank's work, speed per rank and bytes."""
    figure, both = axes_of("scale", (9, 3.8), 2)
    first = "exchange, ms" if work is None else "speed per rank / speed of one rank alone"
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
        axes.set(xlabel="ranks", ylabel=label)
    both[1].legend(fontsize=7, frameon=False)
    write(figure, file, title)


def main() -> None:
    parser = options("benchmarks.scale", __doc__, ratio=0.001)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    add_methods(parser, COMPRESSORS, SHOWN)
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES)
    parser.add_argument("--latency", type=float, default=50e-6, help="seconds per message between machines")
    parser.add_argument("--bandwidth", type=float, default=1.25e8, help="bytes per second of a machine")
    parser.add_argument("--work", type=float, metavar="S", help="seconds of forward and backward of a rank")
    parser.add_argument("--draw", type=Path, metavar="FILE")
    args = parser.parse_args()
    link = f"{args.bandwidth * 8 / 1e9:g} Gbit/s, {args.latency * 1e6:g} µs per message"
    title = f"{args.model}, ratio {args.ratio:g}, {link}"
    print(f"{title}: exchange in ms", end="")
    columns = [(str(size), str(size), "9.1f") for size in args.ranks]
    table, found = Table("ranks", 19, columns), {}
    for name in args.methods:
        with torch.no_grad():
            work = Work(name, args.model, args.ratio)
            found[name] = predicted(work, args.ranks, Network(args.latency, args.bandwidth))
        table.add(name, {str(row["ranks"]): row["exchange_ms"] for row in found[name]})
    if args.work is not None:
        print(f"\ntimes the speed of one rank, whose forward and backward take {args.work:g} s", end="")
        sizes = [str(size) for size in args.ranks]
        speeds = {name: dict(zip(sizes, speed(rows, args.work), strict=True)) for name, rows in found.items()}
        Table("ranks", 19, columns, speeds)
    if args.draw is not None:
        draw(found, title, args.draw, args.work)
    print_json({"benchmark": "scale", "model": args.model, "work": args.work, "methods": found})


if __name__ == "__main__":
    main()
