"""Iteration time of the other ranks when one rank is slow, for all methods in one run.

    python -m benchmarks.straggler --ranks 4 --slow 5

Forward and backward of each rank are replaced by a pause of --compute milliseconds, and of --slow times as many on
the last rank in the second of two phases. Each step then communicates a model of --numel parameters by the method.
A time is the median over the iterations of all ranks except the last. `to the end` is the duration of the phase
with the straggler divided by that of the phase without, for the same total number of steps of all ranks. If ranks
may be ahead but take equally many steps, the others wait at the end. `steps` is the number of steps of the slow
rank divided by that of another rank. The "network" is this machine's memory. The output is a table and a last line
of JSON.
"""

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.results import print_json
from dgc.comm import Transport, all_gather_object, barrier
from dgc.compression import DenseCompressor
from dgc.gossip import ADPSGD, OSGP, SGP, Gossip
from dgc.optim import DistributedOptimizer, LocalOptimizer, Wrapper
from scripts.launch import replace_process

Method = Callable[[], Gossip] | None
METHODS: dict[str, Method] = {
    "ar": None,
    "sgp": SGP,
    "osgp": OSGP,
    "osgp, 4 steps": lambda: OSGP(synch_freq=4),
    "adpsgd": ADPSGD,
}


class Phase(NamedTuple):
    """One rank's measurements: seconds of each iteration after the warm-up and of the phase, and its steps."""

    iterations: list[float]
    whole: float
    steps: int


def make(method: Method, numel: int, transport: Transport) -> Wrapper:
    named = [("weight", torch.nn.Parameter(torch.zeros(numel)))]
    inner = torch.optim.SGD([p for _, p in named], lr=1e-3, momentum=0.9)
    if method is None:
        return DistributedOptimizer(inner, named, DenseCompressor(), transport=transport)
    return LocalOptimizer(inner, named, method(), transport=transport)


def phase(method: Method, pause: float, args: argparse.Namespace, transport: Transport) -> Phase:
    optimizer = make(method, args.numel, transport)
    gradient = torch.full((args.numel,), 1e-3)
    (parameter,) = optimizer.param_groups[0]["params"]
    steps = args.warmup + args.repeats
    more_steps = optimizer.more_steps(transport.size * steps)
    barrier(transport)
    start = time.perf_counter()
    ends = [start]
    while more_steps() if more_steps is not None else len(ends) <= steps:
        optimizer.zero_grad()
        parameter.grad = gradient.clone()
        time.sleep(pause)
        optimizer.step()
        ends.append(time.perf_counter())
    optimizer.synchronize_messages()
    barrier(transport)
    whole = time.perf_counter() - start
    optimizer.close()
    iterations = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    return Phase(iterations[args.warmup :], whole, len(iterations))


def work(args: argparse.Namespace) -> None:
    from dgc.comm.horovod import connect

    transport = connect(point_to_point=True)
    found: dict[str, list[Phase]] = {}
    for name in args.methods:
        factors = (1.0, args.slow if transport.rank == transport.size - 1 else 1.0)
        found[name] = [phase(METHODS[name], args.compute / 1e3 * factor, args, transport) for factor in factors]
    everyone = all_gather_object(transport, found)
    if transport.rank == 0:
        report(args, everyone)


def report(args: argparse.Namespace, everyone: list[dict[str, list[Phase]]]) -> None:
    print(
        f"{args.ranks} ranks, {args.numel:,} parameters, {args.compute:g} ms of computing, one rank {args.slow:g} "
        f"times slower, {args.repeats} repeats\n"
    )
    print(f"{'method':<14} {'all alike ms':>12} {'one slow ms':>12} {'ratio':>6} {'to the end':>11} {'steps':>6}")
    rows: dict[str, Any] = {}
    *others, slow = everyone
    for name in args.methods:
        alike, straggler = (
            1e3 * median(seconds for own in others for seconds in own[name][i].iterations) for i in range(2)
        )
        row = {
            "alike_ms": alike,
            "straggler_ms": straggler,
            "ratio": straggler / alike,
            "whole_ratio": slow[name][1].whole / slow[name][0].whole,
            "slow_steps": slow[name][1].steps / median(own[name][1].steps for own in others),
        }
        rows[name] = row
        print(
            f"{name:<14} {alike:12.1f} {straggler:12.1f} {row['ratio']:6.2f} {row['whole_ratio']:11.2f} "
            f"{row['slow_steps']:6.2f}"
        )
    settings = {"ranks": args.ranks, "slow": args.slow, "compute_ms": args.compute, "numel": args.numel}
    print_json({"benchmark": "straggler", **settings, "methods": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--slow", type=float, default=5.0, help="how many times slower the last rank is")
    parser.add_argument("--compute", type=float, default=100.0, help="milliseconds of forward and backward")
    parser.add_argument("--numel", type=int, default=1_000_000)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=16)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks must be at least 2: one is slow, and the others are looked at")
    if args.worker:
        work(args)
        return
    replace_process(args.ranks, ["-m", "benchmarks.straggler", *sys.argv[1:], "--worker"])


if __name__ == "__main__":
    main()
