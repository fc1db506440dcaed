"""The interface between compressors and selectors."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from jaxtyping import Float32, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.kernels import PassInputs, SparseVector
from dgc.selection.plan import Plan


@dataclass(frozen=True, eq=False)
class SelectorResult:
    """The result of `Selector.select`.

    first_nonfinite: index of the first element of the gradient that is NaN or TOO_LARGE, or n if there is none.
    """

    elements: SparseVector
    first_nonfinite: Int64[Tensor, ""]


class Selector(ABC):
    """Base class of selectors. A selector chooses at most `plan.capacity` elements of a bucket and never a zero.

    remembers: whether the selection depends on `plan.history`, which must then be saved in checkpoints.
    """

    remembers = False

    @abstractmethod
    def choose(self, v: Float32[Tensor, "n"], plan: Plan, seed: int) -> SparseVector:
        """Selects elements of v, which is not changed. All randomness of a selector must come from `seed`."""
        ...

    def select(self, inputs: PassInputs, plan: Plan, seed: int) -> SelectorResult:
        """Accumulates the gradient into v in one pass, then chooses from the new v."""
        first = kernels.of(inputs.v).selection.accumulate_(inputs)
        return SelectorResult(self.choose(inputs.v, plan, seed), first)

    def indices(self, v: Float32[Tensor, "n"], plan: Plan, seed: int) -> Int64[Tensor, "count"]:
        """The indices that `choose` selects, ascending."""
        selection = self.choose(v, plan, seed)
        return selection.indices[: int(selection.count)].long()
