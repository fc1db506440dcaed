"""What every tier of kernels does. `reference` defines the meaning; the others give the same bits, faster.

Only the sums in `moments` and `tail` may differ between tiers, by the rounding of fp64.

What is only known on the device (a count, a flag) stays a tensor of no dimensions there. No operation waits for it
but `merge_mean`, whose result is as long as the union it finds.
Indices count elements of a bucket's flat buffer, which has fewer than 2**31 of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float32, Float64, Int32, Int64
from torch import Tensor

# A gradient element of this magnitude or more counts as not finite; its square is beyond fp32 in any case. With
# smaller elements u and v never overflow, for any momentum and any number of steps, and so neither do sums over
# ranks: |u| stays below 2**90 and |v| below 2**116, since a sum rounds back to its larger term where the other is
# less than half an ulp.
TOO_LARGE = 2.0**64


@dataclass(frozen=True, eq=False)
class Quotas:
    """How many elements each range of a flat buffer sends. Range s is bounds[s] .. bounds[s+1] - 1.

    The ranges cover the buffer: bounds[0] = 0, bounds[S] = n. capacity is the sum of ks.
    """

    bounds: Int64[Tensor, "bounds"]
    ks: Int64[Tensor, "S"]
    capacity: int


@dataclass(frozen=True, eq=False)
class Selection:
    """A sparse vector in tensors of fixed size: the first `count` entries hold, the rest are zero.

    indices are unique and ascending.
    """

    indices: Int32[Tensor, "capacity"]
    values: Float32[Tensor, "capacity"]
    count: Int32[Tensor, ""]


@dataclass(frozen=True, eq=False)
class Accumulation:
    """One pass that is due over a gradient g of n elements, of which NaN and TOO_LARGE count as zero:

    sent         v_i = v_i - value; with masking u_i = 0
    plain        u = m u + g          v = v + u
    Nesterov     u = m (u + g)        v = (v + u) + g
    u is None                         v = v + g

    Every product and sum is rounded to fp32 on its own (no FMA). g: one-dimensional contiguous pieces of one
    dtype that follow one another. u, v: fp32 [n], contiguous. sent: what the step before sent and v still holds,
    which goes first: the pass has its memory at hand.
    """

    g: tuple[Tensor, ...]
    u: Float32[Tensor, "n"] | None
    v: Float32[Tensor, "n"]
    momentum: float = 0.0
    nesterov: bool = False
    sent: Selection | None = None
    masking: bool = False


@dataclass(frozen=True, eq=False)
class Chosen:
    """What a pass over v chose: of each range s the ks[s] elements of largest magnitude, exactly.

    Zeros are never chosen; of equal magnitudes the lowest index goes first. thresholds: the smallest magnitude
    chosen in each range, 0 where fewer than ks[s] elements are not zero. first_nonfinite: index of the first
    element of g that is NaN or TOO_LARGE, n where there is none. missed: ranges whose floor was too high or so low
    that too many candidates passed it; they cost another pass and are as exact as the others.
    """

    selection: Selection
    thresholds: Float32[Tensor, "S"]
    first_nonfinite: Int64[Tensor, ""]
    missed: Int32[Tensor, ""]


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over the elements of each range, in fp64: of v, of |v| and of its square; and the largest |v|.

    The order of addition is each tier's own, but the same in every call, whatever the number of threads. An empty
    range has zeros.
    """

    sums: Float64[Tensor, "S"]
    magnitudes: Float64[Tensor, "S"]
    squares: Float64[Tensor, "S"]
    largest: Float32[Tensor, "S"]


@dataclass(frozen=True, eq=False)
class Tail:
    """Of each range the elements with |v| at or above a floor, zeros left out: how many, and the sum of |v|.

    In fp64; the order of addition is as for Moments.
    """

    counts: Int64[Tensor, "S"]
    sums: Float64[Tensor, "S"]


@runtime_checkable
class Kernels(Protocol):
    name: str

    def accumulate_(self, due: Accumulation) -> Int64[Tensor, ""]:
        """Do the pass. Returns the index of the first element of g that is NaN or TOO_LARGE; n where none is."""
        ...

    def predicted_floors(
        self, last: Float32[Tensor, "S"], before: Float32[Tensor, "S"], margin: float
    ) -> Float32[Tensor, "S"]:
        """margin * last * min(max(last / before, 0.97), 1.2), from the thresholds of the last step and of the one
        before: floors for the next. 0, no expectation, where the last was 0.
        """
        ...

    def accumulate_and_select_(
        self, due: Accumulation, quotas: Quotas, floors: Float32[Tensor, "S"] | None
    ) -> Chosen:
        """Do the pass and choose from the new v.

        floors: a magnitude per range that is expected to lie a little below its threshold, 0 for no expectation;
        None for none at all. They make the choice cheaper and never change it.
        """
        ...

    def select(
        self, v: Float32[Tensor, "n"], quotas: Quotas, floors: Float32[Tensor, "S"] | None = None
    ) -> Chosen:
        """Choose from v as it is. v has no NaN or inf; first_nonfinite is n.

        floors: as in accumulate_and_select_. They may make the choice cheaper and never change it.
        """
        ...

    def moments(self, v: Float32[Tensor, "n"], bounds: Int64[Tensor, "bounds"]) -> Moments:
        """Sums over each range bounds[s] .. bounds[s+1] - 1. v has no NaN or inf."""
        ...

    def tail(
        self, v: Float32[Tensor, "n"], bounds: Int64[Tensor, "bounds"], floors: Float32[Tensor, "S"]
    ) -> Tail:
        """What of each range is at or above its floor. v has no NaN or inf.

        A floor of 0 leaves out nothing but zeros. A range whose floor is inf is not read.
        """
        ...

    def take_(self, sent: Selection, u: Float32[Tensor, "n"] | None, v: Float32[Tensor, "n"]) -> None:
        """v[i] = v[i] - value and, unless u is None, u[i] = 0: a pass's first part alone."""
        ...

    def merge_mean(
        self, parts: Sequence[Selection], size: int, numel: int
    ) -> tuple[Int64[Tensor, "union"], Float32[Tensor, "union"]]:
        """The mean over `size` ranks of sparse vectors of `numel` elements: unique ascending indices, and values.

        Values of one index are added to zero in the order of the parts, then divided by `size`, so that every
        rank that merges the same parts gets the same bits.
        """
        ...

    def subtract_at_(
        self,
        targets: Sequence[Tensor],
        bounds: Int64[Tensor, "bounds"],
        indices: Int64[Tensor, "k"],
        values: Float32[Tensor, "k"],
        factors: Sequence[float],
    ) -> None:
        """targets[s][i - bounds[s]] -= factors[s] * value, for every index i of range s.

        targets: contiguous one-dimensional tensors, one per range. The product is rounded to fp32, then to the
        target's dtype, before it is subtracted. Indices are unique and ascending.
        """
        ...

    def decay_(
        self,
        p: Tensor,
        buffer: Tensor,
        lr: float,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
    ) -> None:
        """Weight decay with momentum of its own, in one pass: d = wd p; b = m b + d; p = p - lr (d + m b or b).

        The first form in the parentheses is Nesterov's. p and buffer: contiguous, one-dimensional, one dtype.
        """
        ...
