"""Compares the order of methods that the cost model predicts with the order that was measured.

    python -m benchmarks.exchange --ranks 2 --methods noop dense fp16 dgc powersgd ... | tail -1 >> measured.jsonl
    python -m benchmarks.exchange --ranks 4 --methods noop dense fp16 dgc powersgd ... | tail -1 >> measured.jsonl
    python -m benchmarks.scale_order measured.jsonl

Several runs with the same number of ranks are taken together, method by method, by their median.
All ranks were on one machine, so its memory is their network. Latency, the bandwidth of memory and the times to
add are fitted to the times of `dense` and `fp16`, which compute next to nothing. The other methods are predicted
from these: their requests as recorded, and computing as measured here in as many processes at once as there are
cores, since these share the memory, times the ranks per core. The time of `noop` at the same number of ranks is
added to each prediction: it is that of the exchange's own code.

For each pair of methods whose measured times differ by more than 15 %, the order of the predictions is compared.
The pair of `dense` and `fp16`, which the fit has seen, is left out. The last line is JSON.
"""

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from scipy.optimize import least_squares  # type: ignore[import-untyped]

from benchmarks.results import print_json
from benchmarks.scale import recorded
from dgc.cost import Compute, Network, Traffic, predict
from scripts.launch import usable_cores

FITTED = ("dense", "fp16")
START = (1e-5, 5e-11, 1e-10, 3e-10)  # latency in s, s per byte moved, s per byte added: fp32, 16-bit
APART = 1.15

Work = dict[str, dict[int, tuple[Traffic, Compute]]]
Times = dict[str, dict[int, float]]


def medians(lines: Sequence[Any], names: Iterable[str]) -> Times:
    """Seconds of an exchange, by method and number of ranks: medians over the runs."""
    sizes = sorted({line["ranks"] for line in lines})
    return {
        name: {
            size: median(line["methods"][name]["exchange_ms"] / 1e3 for line in lines if line["ranks"] == size)
            for size in sizes
        }
        for name in names
    }


def record_alone(name: str, model: str, ratio: float, sizes: Sequence[int]) -> list[tuple[Traffic, Compute]]:
    """What one of several processes that measure at the same time records. All ranks are on one machine."""
    torch.set_num_threads(1)  # as the ranks of benchmarks.exchange
    with torch.no_grad():
        return recorded(name, model, ratio, sizes, max(sizes))


def record_together(pool: ProcessPoolExecutor, cores: int, *work: Any) -> list[tuple[Traffic, Compute]]:
    """The same with the seconds of the slowest process."""
    everyone = [future.result() for future in [pool.submit(record_alone, *work) for _ in range(cores)]]
    return [
        (found[0][0], max((compute for _, compute in found), key=lambda c: c.seconds(found[0][0].size)))
        for found in zip(*everyone, strict=True)
    ]


def network_of(parameters: Iterable[float], ranks: int, cores: int) -> Network:
    latency, move, add, add_half = parameters
    rates = {"machine_bandwidth": 1 / move, "reduction": add, "half_reduction": add_half}
    return Network(latency, 1 / move, ranks, latency, 1 / move, **rates, cores=cores)


def predictions(work: Work, network: Network, noop: dict[int, float]) -> Times:
    """Seconds of an exchange, by method and number of ranks."""
    return {
        name: {size: noop[size] + predict(pair[0], network, pair[1]).exchange for size, pair in of.items()}
        for name, of in work.items()
    }


def fitted(work: Work, measured: Times, noop: dict[int, float], ranks: int, cores: int) -> Network:
    """The network with which the fitted methods take the measured times, as nearly as possible."""
    start = [math.log(number) for number in START]

    def residuals(logarithms: Any) -> list[float]:
        network = network_of(map(math.exp, logarithms), ranks, cores)
        found = predictions({name: work[name] for name in FITTED}, network, noop)
        return [
            math.log(found[name][size] / seconds) for name in FITTED for size, seconds in measured[name].items()
        ]

    bounds = [number - 7 for number in start], [number + 7 for number in start]
    solution = least_squares(residuals, start, bounds=bounds)
    return network_of(map(math.exp, solution.x), ranks, cores)


def wrong_pairs(measured: Times, predicted: Times) -> tuple[int, list[tuple[int, str, str]]]:
    """The number of pairs that were measured apart, and those that are predicted in the other order."""
    apart, wrong = 0, []
    for size in next(iter(measured.values())):
        for one, other in combinations(sorted(measured, key=lambda name: measured[name][size]), 2):
            if {one, other} == set(FITTED) or measured[other][size] <= APART * measured[one][size]:
                continue
            apart += 1
            if predicted[one][size] >= predicted[other][size]:
                wrong.append((size, one, other))
    return apart, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("measured", type=Path, help="last lines of benchmarks.exchange")
    parser.add_argument("--cores", type=int, default=usable_cores(), help="of the machine that was measured")
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.measured.read_text().splitlines()]
    if len({(line["model"], line["ratio"]) for line in lines}) != 1 or len({line["ranks"] for line in lines}) < 2:
        parser.error("it needs the lines of 2 or more numbers of ranks, with one model and one ratio")
    names = [name for name in lines[0]["methods"] if name != "noop"]
    if "noop" not in lines[0]["methods"] or not set(FITTED) <= set(names):
        parser.error("it needs the methods noop, dense and fp16")
    measured = medians(lines, ["noop", *names])
    noop = measured.pop("noop")
    sizes, most = sorted(noop), max(noop)
    settings = (lines[0]["model"], lines[0]["ratio"], sizes)
    with ProcessPoolExecutor(args.cores, get_context("spawn")) as pool:
        work = {
            name: dict(zip(sizes, record_together(pool, args.cores, name, *settings), strict=True))
            for name in names
        }
    network = fitted(work, measured, noop, most, args.cores)
    predicted = predictions(work, network, noop)
    print(f"fitted to dense and fp16: {network}\n")
    print(f"{'measured / predicted ms':<24}" + "".join(f"{size:>17} ranks" for size in sizes))
    for name in names:
        row = "".join(f"{1e3 * measured[name][s]:11.1f} /{1e3 * predicted[name][s]:10.1f}" for s in sizes)
        print(f"{name:<24}{row}")
    apart, wrong = wrong_pairs(measured, predicted)
    for size, one, other in wrong:
        print(f"{size} ranks: {one} was faster than {other}, and is predicted slower")
    print(f"{apart - len(wrong)} of {apart} pairs that were measured more than 15 % apart are ordered right")
    result = {"pairs": apart, "wrong": wrong, "measured": measured, "predicted": predicted}
    print_json({"benchmark": "scale_order", **result})


if __name__ == "__main__":
    main()
