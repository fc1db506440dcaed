"""What a compressor needs of a selector."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from jaxtyping import Float32, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.kernels import Accumulation, Selection
from dgc.selection.plan import Plan


@dataclass(frozen=True, eq=False)
class Selected:
    """first_nonfinite: index of the first element of the gradient that is NaN or TOO_LARGE; n where none is."""

    selection: Selection
    first_nonfinite: Int64[Tensor, ""]


class Selector(ABC):
    """Chooses what a bucket sends: at most `plan.capacity` elements, never a zero.

    remembers: whether what the selector leaves in `plan.history` has a part in what it chooses, so that it must
    outlive the run's end.
    """

    remembers = False

    @abstractmethod
    def choose(self, v: Float32[Tensor, "n"], plan: Plan, seed: int) -> Selection:
        """Elements of v as it is. `seed` is all the randomness that a selector may use."""
        ...

    def select(self, due: Accumulation, plan: Plan, seed: int) -> Selected:
        """Do the pass over the gradient that is due, then choose from the new v."""
        first = kernels.of(due.v).accumulate_(due)
        return Selected(self.choose(due.v, plan, seed), first)

    def indices(self, v: Float32[Tensor, "n"], plan: Plan, seed: int) -> Int64[Tensor, "count"]:
        """Those of `choose`, ascending."""
        selection = self.choose(v, plan, seed)
        return selection.indices[: int(selection.count)].long()
