"""The steps that `benchmarks.selectors` compares, with the elements that selectors read and send."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

from torch import Tensor

import dgc.kernels as kernels
from benchmarks.recordings import MOMENTUM
from benchmarks.step_methods import Layout, Ours, Stateful
from dgc.kernels import Budget, Moments, PassInputs, Prediction, SelectionKernels, SparseVector, Tail, TopKResult
from dgc.selection import Predicted, plan_selection
from dgc.wire import CastValues, PlainIndices, SparseFormat
from scripts.methods import build

WIRE = SparseFormat(CastValues("fp16"), PlainIndices("int32"))


class SelectorStep(Ours):
    """A step with a selector, by its name."""

    def __init__(self, name: str, buckets: Layout, ratio: float):
        super().__init__("auto", build(name).selector, buckets, ratio, MOMENTUM, WIRE, "cpu")
        self.name = name

    @property
    def needs_history(self) -> bool:
        """Whether a first step differs from later ones."""
        return self.selector.remembers or isinstance(self.selector, Predicted)


class SelectAlone(Stateful):
    """The exact selection from an unchanged v."""

    name = "exact, select alone"

    def __init__(self, buckets: Layout, ratio: float):
        super().__init__(buckets, "cpu")
        self.budget = [plan_selection(bucket, ratio).per_tensor for bucket in buckets]

    def step(self, gradients: list[Tensor]) -> None:
        for v, budget in zip(self.v, self.budget, strict=True):
            kernels.of(v).selection.select(v, budget)


@dataclass
class Counts:
    """Sums over buckets and steps; `reads`, in elements, beyond the update of u and v."""

    reads: float = 0.0
    sent: float = 0.0
    planned: float = 0.0
    numel: float = 0.0

    def row(self) -> dict[str, float]:
        return {"passes": self.reads / self.numel, "sent": self.sent / self.planned}


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
        return self.kernel.select(v, budget, lower_bounds)

    def radix_select(self, v: Tensor, budget: Budget) -> SparseVector:
        self.counts.reads += 5 * v.numel()  # four digits, and the selected elements
        return self.kernel.radix_select(v, budget)

    def accumulate_and_select_(
        self, inputs: PassInputs, budget: Budget, lower_bounds: Tensor | Prediction | None
    ) -> TopKResult:
        return self.kernel.accumulate_and_select_(inputs, budget, lower_bounds)


@contextmanager
def counting(v: Tensor, counts: Counts) -> Iterator[None]:
    """Within this context, all kernels are those of v's device, with counts."""
    backend = kernels.of(v)
    counted = replace(backend, selection=Counting(backend.selection, counts))
    with patch.object(kernels, "of", return_value=counted):
        yield


def count_step(method: SelectorStep, gradients: list[Tensor], counts: Counts) -> None:
    """Run `method.step` and add its counts."""
    for i, g in enumerate(gradients):
        with counting(g, counts):
            selected = method.select(i, g)
        counts.sent += int(selected.elements.count)
        counts.planned += method.plans[i].capacity
        counts.numel += g.numel()
        method.send(i, selected)
    method.steps += 1
