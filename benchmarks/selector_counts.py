"""Counts the elements that selectors read, find and send, for `benchmarks.selectors`."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import dgc.kernels as kernels
from benchmarks.selector_methods import SelectorStep
from dgc.kernels import Budget, Moments, PassInputs, SelectionKernels, SparseVector, Tail, TopKResult
from dgc.selection import Plan, Selector


@dataclass
class Counts:
    """Sums over buckets and steps; `reads`, in elements, beyond the update of u and v.

    reached: elements at or above the thresholds or lower bounds given to the kernels, before any cut.
    """

    reads: float = 0.0
    reached: float = 0.0
    sent: float = 0.0
    planned: float = 0.0
    numel: float = 0.0
    shares: list[float] = field(default_factory=list)

    def add(self, v: Tensor, plan: Plan, selection: SparseVector) -> None:
        """Add the selection from one bucket's v."""
        self.sent += int(selection.count)
        self.planned += plan.capacity
        self.numel += v.numel()
        self.shares.append(energy(selection.values) / max(energy(v), 1e-300) * v.numel())

    def row(self) -> dict[str, float]:
        return {
            "passes": self.reads / self.numel,
            "reached": self.reached / self.planned,
            "sent": self.sent / self.planned,
            "energy": sum(self.shares) / self.numel,
        }


def energy(x: Tensor) -> float:
    return float(x.norm(dtype=torch.float64)) ** 2


class Counting(SelectionKernels):
    """Kernels with the results of others, which count. A choice counts as one read, where it is not part of the
    pass over u and v. Not counted are samples, and segments that are read again because a lower bound did not fit.
    """

    def __init__(self, kernel: SelectionKernels, counts: Counts):
        self.kernel, self.counts = kernel, counts

    def moments(self, v: Tensor, bounds: Tensor) -> Moments:
        self.counts.reads += v.numel()
        return self.kernel.moments(v, bounds)

    def tail(self, v: Tensor, bounds: Tensor, lower_bounds: Tensor) -> Tail:
        self.counts.reads += int(bounds.diff()[~lower_bounds.isinf()].sum())
        return self.kernel.tail(v, bounds, lower_bounds)

    def select(self, v: Tensor, budget: Budget, lower_bounds: Tensor | None = None) -> TopKResult:
        self.counts.reads += v.numel()
        return self._reached(v, budget, lower_bounds, self.kernel.select(v, budget, lower_bounds))

    def radix_select(self, v: Tensor, budget: Budget) -> SparseVector:
        self.counts.reads += 5 * v.numel()  # four digits, and the selected elements
        chosen = self.kernel.radix_select(v, budget)
        self.counts.reached += int(chosen.count)
        return chosen

    def accumulate_and_select_(
        self, inputs: PassInputs, budget: Budget, lower_bounds: Tensor | None
    ) -> TopKResult:
        return self._reached(
            inputs.v, budget, lower_bounds, self.kernel.accumulate_and_select_(inputs, budget, lower_bounds)
        )

    def _reached(self, v: Tensor, budget: Budget, lower_bounds: Tensor | None, chosen: TopKResult) -> TopKResult:
        if lower_bounds is None:
            self.counts.reached += int(chosen.elements.count)
        else:
            self.counts.reached += int(self.kernel.tail(v, budget.bounds, lower_bounds).counts.sum())
        return chosen


def counting(v: Tensor, counts: Counts) -> AbstractContextManager[Any]:
    """Within this context, all kernels are those of v's device, with counts."""
    backend = kernels.of(v)
    return patch.object(kernels, "of", return_value=replace(backend, selection=Counting(backend.selection, counts)))


def count_step(method: SelectorStep, gradients: list[Tensor], counts: Counts) -> None:
    """Run `method.step` and add its counts."""
    for i, g in enumerate(gradients):
        with counting(g, counts):
            selected = method.select(i, g)
        counts.add(method.v[i], method.plans[i], selected.elements)
        method.send(i, selected)
    method.steps += 1


def count_choice(selector: Selector, buckets: Sequence[Tensor], plans: Sequence[Plan], steps: int) -> Counts:
    """Return the counts of a selection from these values, for the last of `steps` repetitions."""
    counts = Counts()
    for v, plan in zip(buckets, plans, strict=True):
        for step in range(steps - 1 if selector.remembers else 0):
            selector.choose(v, plan, step)
        with counting(v, counts):
            selection = selector.choose(v, plan, steps)
        counts.add(v, plan, selection)
    return counts
