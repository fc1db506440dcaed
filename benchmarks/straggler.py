"""Iteration time of the other ranks when one rank is slow, for all methods in one run.

    python -m benchmarks.straggler --ranks 4 --slow 5

Forward and backward of each rank are replaced by a pause of --compute milliseconds, and of --slow times as many on
the last rank in the second of two phases. Each step then communicates a model of --numel parameters by the method.
A time is the median over the iterations of all ranks except the last. `to the end` is the duration of the phase
with the straggler divided by the duration of the phase without, for the same total number of steps of all ranks.
If ranks may be ahead but take equally many steps, the others wait at the end. The "network" is this machine's
memory.
"""

import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from benchmarks._harness import Table, options, print_json
from benchmarks._launches import begin, connected, run_ranks
from dgc.comm import Transport, all_gather_object, barrier
from dgc.optim import DistributedOptimizer, LocalOptimizer, Wrapper
from scripts.methods import build

TAKES = "1 min"
METHODS = ("ar", "sgp", "osgp", "osgp-4-steps", "adpsgd")
Phase = tuple[list[float], float]  # seconds of each iteration after the warm-up, and of the phase


def phase(name: str, pause: float, settings: dict[str, Any], transport: Transport) -> Phase:
    parameter = torch.nn.Parameter(torch.zeros(settings["numel"]))
    inner = torch.optim.SGD([parameter], lr=1e-3, momentum=0.9)
    wrap: Any = DistributedOptimizer if name == "ar" else LocalOptimizer
    optimizer: Wrapper = wrap(inner, [("weight", parameter)], build(name), transport=transport)
    gradient = torch.full((settings["numel"],), 1e-3)
    steps = settings["warmup"] + settings["repeats"]
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
    return [after - before for before, after in pairwise(ends)][settings["warmup"] :], whole


def work(settings: dict[str, Any]) -> list[dict[str, list[Phase]]]:
    """What each rank does. The last one is slow in the second phase."""
    transport = connected("mpirun")
    factors = (1.0, settings["slow"] if transport.rank == transport.size - 1 else 1.0)
    found = {
        name: [phase(name, settings["compute"] / 1e3 * factor, settings, transport) for factor in factors]
        for name in settings["methods"]
    }
    return all_gather_object(transport, found)


def row_of(everyone: Sequence[Sequence[Phase]]) -> dict[str, float]:
    """The row of a method, given both phases of every rank."""
    *others, (alike_of_slow, slow) = everyone
    alike, straggler = (1e3 * median(s for own in others for s in own[i][0]) for i in range(2))
    whole = slow[1] / alike_of_slow[1]
    return {"alike_ms": alike, "straggler_ms": straggler, "ratio": straggler / alike, "whole_ratio": whole}


def main() -> None:
    parser = options("benchmarks.straggler", __doc__, ranks=4, numel=1_000_000, warmup=4, repeats=16)
    parser.add_argument("--slow", type=float, default=5.0, help="how many times slower the last rank is")
    parser.add_argument("--compute", type=float, default=100.0, help="milliseconds of forward and backward")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks must be at least 2: one is slow, and the others are looked at")
    everyone = run_ranks("benchmarks.straggler", vars(args), args.ranks)
    about = f"{args.ranks} ranks, {args.numel:,} parameters, {args.compute:g} ms of computing"
    print(f"{about}, one rank {args.slow:g} times slower, {args.repeats} repeats")
    columns = [("alike_ms", "all alike ms", "13.1f"), ("straggler_ms", "one slow ms", "13.1f")]
    table = Table("method", 14, [*columns, ("ratio", "ratio", "7.2f"), ("whole_ratio", "to the end", "12.2f")])
    for name in args.methods:
        table.add(name, row_of([own[name] for own in everyone]))
    print_json({"benchmark": "straggler", **vars(args), "methods": table.rows})


if __name__ == "__main__":
    begin(work, main)
