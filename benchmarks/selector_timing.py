"""Times and counts of selectors in DGC steps on recorded state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

import dgc.kernels as kernels
from benchmarks.recordings import MOMENTUM, Gradients, Recording
from benchmarks.selector_counts import Counts, count_choice, count_step
from benchmarks.selector_methods import SELECTORS, SelectAlone, SelectorStep, needs_history, published
from benchmarks.step_methods import Step, TopK, floors
from benchmarks.step_overhead import measure, nothing, ratio, tiers_on
from dgc.selection import Plan, plan_selection

FLOOR = "plain update of u and v"
TOPK, SELECT = TopK.name, SelectAlone.name
COUNTED = 5  # steps


@dataclass(frozen=True)
class Options:
    ratio: float
    rounds: int
    settle: int
    device: str

    @property
    def wait(self) -> Callable[[], object]:
        return torch.cuda.synchronize if self.device == "cuda" else nothing


@dataclass(frozen=True)
class Compared:
    """times: milliseconds by method and round. rows: `Counts.row` by kind of values and method.

    walls: exact threshold / mean magnitude, weighted by tensor size, for several kinds of values.
    """

    model: str
    times: dict[str, dict[int, float]]
    rows: dict[str, dict[str, dict[str, float]]]
    walls: dict[str, float]

    def ms(self, name: str) -> float:
        return median(self.times[name].values())

    def over(self, above: str, below: str) -> float:
        return ratio(self.times[above], self.times[below])

    def added(self, name: str) -> float:
        """Milliseconds beyond the update of u and v, at least 0."""
        return max(0.0, self.ms(name) - self.ms(FLOOR))

    @property
    def best(self) -> str:
        return min(SELECTORS, key=self.ms)

    def summary(self) -> dict[str, Any]:
        best = self.best
        return {
            "floor_ms": self.ms(FLOOR),
            "exact_ms": self.ms("exact"),
            "topk_ms": self.ms(TOPK),
            "topk_over_exact": self.over(TOPK, SELECT),
            "best": best,
            "best_ms": self.ms(best),
            "exact_over_best": self.over("exact", best),
            "exact_over_best_beyond_update": self.added("exact") / max(self.added(best), 1e-3),
            "radix_over_best": self.over("radix", best) if "radix" in self.times else None,
            "sampled_over_best": self.over("sampled", best),
            "laplace_over_best": self.over("laplace", best),
            "best_over_floor": self.over(best, FLOOR),
            "best_count": self.rows["v"][best]["sent"],
            "exact_over": {name: self.over("exact", name) for name in SELECTORS},
            "walls": self.walls,
        }


def wall(buckets: Sequence[Tensor], plans: Sequence[Plan]) -> float:
    total = 0.0
    for v, plan in zip(buckets, plans, strict=True):
        budget = plan.per_tensor
        thresholds = kernels.of(v).selection.select(v, budget).thresholds
        sizes = budget.bounds.diff()
        means = kernels.of(v).selection.moments(v, budget.bounds).magnitudes / sizes.clamp(min=1)
        total += float((sizes * (thresholds / means).nan_to_num(0.0)).sum())
    return total / sum(v.numel() for v in buckets)


def compare(recording: Recording, options: Options) -> Compared:
    """Time all selectors in DGC steps from the recorded state, then count."""
    device, buckets, gradients = options.device, recording.segments, Gradients(recording)
    methods = {name: SelectorStep(name, buckets, options.ratio, device) for name in SELECTORS}
    first = methods["predicted"]
    historic = [method for method in methods.values() if needs_history(method.selector)]
    for method in historic:
        method.start_from(recording.u, recording.v)
    for _ in range(options.settle):
        fresh = gradients.next()
        for method in historic:
            method.step(fresh)
    first.settle()
    others: list[Step] = [m for m in methods.values() if m not in historic]
    alone: list[Step] = [TopK(buckets, options.ratio, device), SelectAlone(buckets, options.ratio, device)]
    plain = floors(tiers_on(device)[0], buckets, MOMENTUM, device)
    for step in (*others, *alone, *plain):
        step.start_from(first.u, first.v)
    times = measure([*methods.values(), *alone, *plain], gradients, options.rounds, options.wait)
    kernels.use("auto")
    floor = min((step.name for step in plain), key=lambda name: median(times[name].values()))
    times[FLOOR] = times[floor]

    counted = {name: Counts() for name in SELECTORS}
    for _ in range(COUNTED):
        fresh = gradients.next()
        for name, method in methods.items():
            count_step(method, fresh, counted[name])
    raw = {name: count_raw(name, recording, options) for name in SELECTORS}
    plans = first.plans
    rows = {
        "v": {name: counts.row() for name, counts in counted.items()},
        "gradient": {name: counts.row() for name, counts in raw.items()},
    }
    first.settle()
    walls = {
        "gradient": wall(recording.gradient, plans),
        "v recorded": wall(recording.accumulated, plans),
        "v settled": wall(first.v, plans),
    }
    return Compared(recording.model, times, rows, walls)


def count_raw(name: str, recording: Recording, options: Options) -> Counts:
    plans = [plan_selection(s, options.ratio, torch.device(options.device)) for s in recording.segments]
    return count_choice(SELECTORS[name], recording.gradient, plans, options.settle)


def print_counts(compared: Compared) -> None:
    words = ", ".join(f"{value:.2f} of {name}" for name, value in compared.walls.items())
    print(f"\n{compared.model}: exact threshold / mean magnitude: {words}")
    print(f"{'':<17}{'accumulated v':^38}{'raw gradient':^38}")
    heads = "".join(f"{head:>9}" for head in ("passes", "reached", "sent", "energy"))
    print(f"{'':<17}{heads}{heads}")
    for name in SELECTORS:
        cells = "".join(
            f"{row['passes']:9.2f}{row['reached']:9.3f}{row['sent']:9.3f}{row['energy']:9.2%}"
            for row in (compared.rows["v"][name], compared.rows["gradient"][name])
        )
        print(f"{name:<17}{cells}")


def print_steps(compared: Compared) -> None:
    heads = f"{'radix /':>10}{'published':>11}{'exact /':>10}{'/ floor':>10}{'sent / k':>10}"
    print(f"\n{compared.model + ':':<20}{'median ms':>13}{heads}")
    for name in (*SELECTORS, FLOOR, TOPK, SELECT):
        known = published(compared.model, name)
        alpha = f"{compared.over('radix', name):10.2f}" if {"radix", name} <= SELECTORS.keys() else " " * 10
        faster = f"{compared.over('exact', name):10.2f}" if name in SELECTORS else " " * 10
        line = f"{name:<24}{compared.ms(name):9.2f}{alpha}{'' if known is None else f'{known:.2f}':>11}{faster}"
        sent = f"{compared.rows['v'][name]['sent']:10.3f}" if name in SELECTORS else ""
        print(f"{line}{compared.over(name, FLOOR):10.2f}{sent}")
