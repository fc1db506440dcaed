"""The interface of a tier of kernels. `reference` defines the results; the other tiers give the same bits, faster.

Only the sums in `moments` and `tail` may differ between tiers, by the rounding of fp64.

Counts and flags stay on the device as zero-dimensional tensors, so that nothing waits for it. Indices count
elements of a bucket's flat buffer, which has fewer than 2**31 elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float32, Float64, Int32, Int64
from torch import Tensor

# A gradient element of this magnitude or more counts as not finite; its square overflows fp32 anyway. With smaller
# elements u, v and sums over ranks never overflow, for any momentum and number of steps: |u| stays below 2**90 and
# |v| below 2**116, because a sum rounds to its larger term if the other is less than half an ulp.
TOO_LARGE = 2.0**64


@dataclass(frozen=True, eq=False)
class Budget:
    """Number of elements that each segment of a flat buffer sends.

    Attributes:
        bounds: Segment s is bounds[s] .. bounds[s+1] - 1. Segments cover the buffer: bounds[0] = 0, bounds[S] = n.
        ks: Number of elements per segment.
        capacity: The sum of ks.
    """

    bounds: Int64[Tensor, "bounds"]
    ks: Int64[Tensor, "S"]
    capacity: int


@dataclass(frozen=True, eq=False)
class SparseVector:
    """A sparse vector in tensors of fixed size. The first `count` entries are valid, the rest are zero.

    Indices are unique and ascending.
    """

    indices: Int32[Tensor, "capacity"]
    values: Float32[Tensor, "capacity"]
    count: Int32[Tensor, ""]


@dataclass(frozen=True, eq=False)
class Merged:
    """A sum of sparse vectors. The first `count` entries are valid. All other values are zero.

    Indices are unique and ascending.
    """

    indices: Int64[Tensor, "capacity"]
    values: Float32[Tensor, "capacity"]
    count: Int32[Tensor, ""]

    @property
    def vector(self) -> SparseVector:
        valid = torch.arange(self.indices.numel(), dtype=torch.int32, device=self.indices.device) < self.count
        return SparseVector(torch.where(valid, self.indices, 0).to(torch.int32), self.values, self.count)

    def valid(self) -> tuple[Int64[Tensor, "count"], Float32[Tensor, "count"]]:
        """Return the valid entries, as (indices, values). Waits for the device."""
        count = int(self.count)
        return self.indices[:count], self.values[:count]


@dataclass(frozen=True, eq=False)
class PassInputs:
    """One pass over a gradient g of n elements, to be performed once. NaN and TOO_LARGE in g count as zero.

    sent         v_i = v_i - value; with masking u_i = 0
    plain        u = m u + g          v = v + u
    Nesterov     u = m (u + g)        v = (v + u) + g
    u is None                         v = v + g

    Every product and sum is rounded to fp32 separately (no FMA).

    Attributes:
        g: Consecutive one-dimensional contiguous pieces of one dtype.
        u: Local momentum, contiguous, or None.
        v: Velocity or residual, contiguous.
        momentum: The coefficient m.
        nesterov: Use Nesterov momentum.
        sent: Elements sent in the previous step and still contained in v. The pass removes them first.
        masking: Set u to zero at the sent elements.
    """

    g: tuple[Tensor, ...]
    u: Float32[Tensor, "n"] | None
    v: Float32[Tensor, "n"]
    momentum: float = 0.0
    nesterov: bool = False
    sent: SparseVector | None = None
    masking: bool = False


@dataclass(frozen=True, eq=False)
class TopKResult:
    """The result of a selection from v: exactly the ks[s] elements of largest magnitude of each segment s.

    Zeros are never selected. Among equal magnitudes the lowest indices are selected.

    Attributes:
        elements: The selected elements.
        thresholds: Smallest selected magnitude per segment; 0 if fewer than ks[s] elements are non-zero.
        first_nonfinite: Index of the first element of g that is NaN or TOO_LARGE; n if there is none.
        missed: Number of segments with a lower bound that was too high, or so low that too many candidates passed
            it. They need another pass. Their result is also exact.
    """

    elements: SparseVector
    thresholds: Float32[Tensor, "S"]
    first_nonfinite: Int64[Tensor, ""]
    missed: Int32[Tensor, ""]


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums of v, |v| and v**2 over each segment in fp64, and the largest |v|. An empty segment has zeros.

    The order of addition depends on the tier. It is the same in every call, for any number of threads.
    """

    sums: Float64[Tensor, "S"]
    magnitudes: Float64[Tensor, "S"]
    squares: Float64[Tensor, "S"]
    largest: Float32[Tensor, "S"]


@dataclass(frozen=True, eq=False)
class Tail:
    """Number of non-zero elements of each segment with |v| >= its lower bound, and their sum of |v| in fp64.

    The order of addition is as for Moments.
    """

    counts: Int64[Tensor, "S"]
    sums: Float64[Tensor, "S"]


@runtime_checkable
class SelectionKernels(Protocol):
    """Operations on flat buffers. They work in place where the name ends in an underscore."""

    name: str

    def accumulate_(self, inputs: PassInputs) -> Int64[Tensor, ""]:
        """Do the pass. Returns the index of the first element of g that is NaN or TOO_LARGE, or n."""
        ...

    def predicted_lower_bounds(
        self, last: Float32[Tensor, "S"], before: Float32[Tensor, "S"], margin: float
    ) -> Float32[Tensor, "S"]:
        """Predict the next step's lower bounds from the thresholds of the last two steps.

        Returns margin * last * min(max(last / before, 0.97), 1.2), or 0 (unknown) where last is 0.
        """
        ...

    def accumulate_and_select_(
        self, inputs: PassInputs, budget: Budget, lower_bounds: Float32[Tensor, "S"] | None
    ) -> TopKResult:
        """Do the pass and select from the new v.

        Args:
            inputs: What the pass reads and writes.
            budget: Number of elements to select per segment.
            lower_bounds: Per segment, a magnitude expected to be slightly below its threshold, or 0 if unknown.
                None: unknown for all segments. Lower bounds reduce the cost and never change the result.
        """
        ...

    def select(
        self, v: Float32[Tensor, "n"], budget: Budget, lower_bounds: Float32[Tensor, "S"] | None = None
    ) -> TopKResult:
        """Select from v, which must be finite. first_nonfinite of the result is n.

        `lower_bounds` are as in accumulate_and_select_. They may reduce the cost and never change the result.
        """
        ...

    def radix_select(self, v: Float32[Tensor, "n"], budget: Budget) -> SparseVector:
        """Same elements as `select`, found digit by digit, with no sample and no lower bound."""
        ...

    def moments(self, v: Float32[Tensor, "n"], bounds: Int64[Tensor, "bounds"]) -> Moments:
        """Return sums over each segment bounds[s] .. bounds[s+1] - 1. v must be finite."""
        ...

    def tail(
        self, v: Float32[Tensor, "n"], bounds: Int64[Tensor, "bounds"], lower_bounds: Float32[Tensor, "S"]
    ) -> Tail:
        """Return count and sum of each segment's elements at or above its lower bound. v must be finite.

        A lower bound of 0 excludes only zeros. A segment with a lower bound of inf is not read.
        """
        ...

    def remove_sent_(self, sent: SparseVector, u: Float32[Tensor, "n"] | None, v: Float32[Tensor, "n"]) -> None:
        """Do only the first part of a pass: v[i] = v[i] - value, and u[i] = 0 unless u is None."""
        ...

    def merge_mean(self, parts: Sequence[SparseVector], size: int, numel: int) -> Merged:
        """Return the mean over `size` ranks of sparse vectors of `numel` elements.

        The values of one index are added to zero in the order of the parts, then
        divided by `size`. Every rank that merges the same parts therefore gets the same bits.
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
        """Compute targets[s][i - bounds[s]] -= factors[s] * value for every index i of segment s.

        Targets are contiguous one-dimensional tensors, one per segment. The product is rounded to fp32, then to
        the target's dtype, before it is subtracted. Indices are unique and ascending.
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
        """Apply weight decay with its own momentum in one pass: d = wd p; b = m b + d; p = p - lr w.

        w is d + m b with Nesterov momentum, else b. p and buffer are contiguous, one-dimensional, of one dtype.
        """
        ...
