"""Times of the selection only, without the pass over u and v, by the size of one tensor (figure 5)."""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor

import dgc.kernels as kernels
from benchmarks.selector_methods import SELECTORS
from benchmarks.selector_timing import TOPK, Options
from dgc.bucket import lay_out
from dgc.selection import Histogram, Plan, Predicted, plan_selection

KNOWN = "exact, floor known"
ENOUGH = 0.02  # seconds of one measurement


def by_size(v: Tensor, sizes: Sequence[int], rounds: int, options: Options) -> dict[str, dict[int, float]]:
    """Return milliseconds by method and size, for a selection from that many values drawn from v.

    Without a pass over u and v, `histogram` and `predicted` equal `exact`. An accurate lower bound replaces the
    predicted one. Selectors with a history first select a few times.
    """
    selectors = {name: s for name, s in SELECTORS.items() if not isinstance(s, Histogram | Predicted)}
    times: dict[str, dict[int, float]] = {name: {} for name in (*selectors, KNOWN, TOPK)}
    stages: dict[str, dict[str, Tensor]] = {name: {} for name in selectors}
    for size in sizes:
        generator = torch.Generator(v.device).manual_seed(size)
        drawn = v[torch.randint(v.numel(), (size,), generator=generator, device=v.device)]
        works: dict[str, Callable[[], object]] = {}
        for name, selector in selectors.items():
            plan = one_tensor(size, options)
            plan.history.update(stages[name])
            if selector.remembers:
                for step in range(5 if stages[name] else options.settle):
                    selector.choose(drawn, plan, step)
            stages[name] = plan.history
            works[name] = partial(selector.choose, drawn, plan, 1)
        budget = one_tensor(size, options).per_tensor
        floor = kernels.of(drawn).selection.select(drawn, budget).thresholds * Predicted().margin
        works[KNOWN] = partial(kernels.of(drawn).selection.select, drawn, budget, floor)
        works[TOPK] = partial(torch_topk, drawn, budget.capacity)
        for name, found in in_turns(works, rounds, options.wait).items():
            times[name][size] = found
    return times


def torch_topk(v: Tensor, k: int) -> None:
    torch.topk(v.abs(), k, sorted=False)


def one_tensor(size: int, options: Options) -> Plan:
    segments = lay_out([("tensor", torch.empty(1, size, device="meta"))])
    return plan_selection(segments, options.ratio, torch.device(options.device))


def in_turns(works: dict[str, Callable[[], object]], rounds: int, wait: Callable[[], object]) -> dict[str, float]:
    """Return the median milliseconds of each. Short ones are repeated within a measurement."""
    repeats: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(-2, rounds):
        for name in random.Random(number).sample(list(works), len(works)):
            wait()
            start = time.perf_counter()
            for _ in range(repeats.get(name, 1)):
                works[name]()
            wait()
            seconds = (time.perf_counter() - start) / repeats.get(name, 1)
            if number >= 0:
                times[name].append(seconds * 1e3)
            else:
                repeats[name] = max(1, min(50, int(ENOUGH / max(seconds, 1e-6))))
    return {name: median(row) for name, row in times.items()}


def print_sizes(times: dict[str, dict[int, float]]) -> None:
    sizes = list(times["exact"])
    print("\nmilliseconds of the selection alone, by number of elements of one tensor")
    print(f"{'':<24}" + "".join(f"{size:>11,}" for size in sizes))
    for name, row in times.items():
        print(f"{name:<24}" + "".join(f"{row[size]:11.3f}" for size in sizes))
