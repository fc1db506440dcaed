"""What a compressor needs of a selector."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from jaxtyping import Float32, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.kernels import Accumulation, Selection
from dgc.kernels.reference import as_selection
from dgc.selection.plan import Plan


@dataclass(frozen=True, eq=False)
class Selected:
    """first_nonfinite: index of the first element of the gradient that is NaN or inf; n where there is none."""

    selection: Selection
    first_nonfinite: Int64[Tensor, ""]


class Selector(ABC):
    """Chooses what a bucket sends. A selector that keeps history keeps it apart for every plan."""

    @abstractmethod
    def indices(self, v: Float32[Tensor, "n"], plan: Plan, seed: int) -> Int64[Tensor, "count"]:
        """Indices into v, ascending, at most `plan.capacity`, never of a zero.

        `seed` is all the randomness that a selector may use.
        """
        ...

    def select(self, due: Accumulation, plan: Plan, seed: int) -> Selected:
        """Do the pass over the gradient that is due, then choose from the new v."""
        first = kernels.of(due.v).accumulate_(due)
        return Selected(as_selection(self.indices(due.v, plan, seed), due.v, plan.capacity), first)
