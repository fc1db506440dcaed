"""Operations on the flat buffers of a step. Plain torch defines the bits, which the other backends give faster.

Only the sums in `moments` and `tail` may differ between backends, by the rounding of fp64.

Counts and flags stay on the device as zero-dimensional tensors, so that nothing waits for it. Indices count
elements of a bucket's flat buffer, which has fewer than 2**31 elements.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int32, Int64
from torch import Tensor

# A gradient element of this magnitude or more counts as not finite; its square overflows fp32 anyway. With smaller
# elements u, v and sums over ranks never overflow, for any momentum and number of steps: |u| stays below 2**90 and
# |v| below 2**116, because a sum rounds to its larger term if the other is less than half an ulp.
TOO_LARGE = 2.0**64

Dense = Float32[Tensor, "n"]
Bounds = Int64[Tensor, "bounds"]
Each = Float32[Tensor, "S"]
Indices = Int64[Tensor, "k"]
Values = Float32[Tensor, "k"]


@dataclass(frozen=True, eq=False)
class Budget:
    """Number of elements that each segment of a flat buffer sends.

    Attributes:
        bounds: Segment s is bounds[s] .. bounds[s+1] - 1. Segments cover the buffer: bounds[0] = 0, bounds[S] = n.
        ks: Number of elements per segment.
        capacity: The sum of ks.
        kept: What a backend has made for its selections with this budget.
    """

    bounds: Int64[Tensor, "bounds"]
    ks: Int64[Tensor, "S"]
    capacity: int
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, eq=False)
class SparseVector:
    """A sparse vector in tensors of fixed size. The first `count` entries are valid, the rest are zero.

    Indices are unique and ascending. largest: the bits of the largest magnitude, if it is known.
    """

    indices: Int32[Tensor, "capacity"]
    values: Float32[Tensor, "capacity"]
    count: Int32[Tensor, ""]
    largest: Int32[Tensor, ""] | None = None


@dataclass(frozen=True, eq=False)
class Prediction:
    """Lower bounds that follow from the thresholds of the last two steps. See `predicted_lower_bounds`."""

    last: Each
    before: Each
    margin: float


@dataclass(frozen=True, eq=False)
class Merged:
    """A sum of sparse vectors, in the form of a `SparseVector`, whose indices beyond `count` have no meaning."""

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
    u is None                         v = d v + g

    Every product and sum is rounded to fp32 separately (no FMA).

    Attributes:
        g: Consecutive one-dimensional contiguous pieces of one dtype.
        u: Local momentum, contiguous, or None.
        v: Velocity or residual, contiguous.
        momentum: The coefficient m.
        nesterov: Use Nesterov momentum.
        sent: Elements sent in the previous step and still contained in v. The pass removes them first.
        masking: Set u to zero at the sent elements.
        decay: The factor d of v without u.
    """

    g: tuple[Tensor, ...]
    u: Float32[Tensor, "n"] | None
    v: Float32[Tensor, "n"]
    momentum: float = 0.0
    nesterov: bool = False
    sent: SparseVector | None = None
    masking: bool = False
    decay: float = 1.0


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

    The order of addition, here and in Tail, depends on the backend. It is the same for any number of threads.
    """

    sums: Float64[Tensor, "S"]
    magnitudes: Float64[Tensor, "S"]
    squares: Float64[Tensor, "S"]
    largest: Float32[Tensor, "S"]


@dataclass(frozen=True, eq=False)
class Tail:
    """Number of non-zero elements of each segment with |v| >= its lower bound, and their sum of |v| in fp64."""

    counts: Int64[Tensor, "S"]
    sums: Float64[Tensor, "S"]


class SelectionKernels:
    """The reference backend: plain torch, on any device. On a GPU its operations wait for the device.

    Operations work in place where the name ends in an underscore.
    """

    name = "reference"

    def __str__(self) -> str:
        return f"{self.name} (plain PyTorch)"

    def accumulate_(self, inputs: PassInputs) -> Int64[Tensor, ""]:
        """Do the pass. Returns the index of the first element of g that is NaN or TOO_LARGE, or n."""
        if inputs.sent is not None:
            self.remove_sent_(inputs.sent, inputs.u if inputs.masking else None, inputs.v)
        g = torch.cat(inputs.g).to(torch.float32) if len(inputs.g) > 1 else inputs.g[0].to(torch.float32)
        mask = usable(g)
        first_nonfinite = first_of(~mask)
        g = torch.where(mask, g, 0.0)
        u, v = inputs.u, inputs.v
        if u is None:
            v.mul_(inputs.decay).add_(g)
        elif inputs.nesterov:
            u.add_(g).mul_(inputs.momentum)
            v.add_(u).add_(g)
        else:
            u.mul_(inputs.momentum).add_(g)
            v.add_(u)
        return first_nonfinite

    def assign_(self, g: tuple[Tensor, ...], v: Dense) -> Int64[Tensor, ""]:
        """Compute v = g, with zeros for NaN and TOO_LARGE. Returns the index of the first of these, or n.

        g: pieces, as in `PassInputs`. A piece may be its own place in v.
        """
        v.copy_(torch.cat(g))
        return remove_nonfinite_(v)

    def predicted_lower_bounds(self, last: Each, before: Each, margin: float) -> Each:
        """Predict the next step's lower bounds from the thresholds of the last two steps.

        Returns margin * last * min(max(last / before, 0.97), 1.2), or 0 (unknown) where last is 0.
        """
        growth = torch.where(last == before, 1.0, last / before)
        return last * growth.clamp(0.97, 1.2) * margin

    def accumulate_and_select_(
        self, inputs: PassInputs, budget: Budget, lower_bounds: Each | Prediction | None
    ) -> TopKResult:
        """Do the pass and select from the new v.

        lower_bounds: Per segment, a magnitude expected to be slightly below its threshold, or 0 if unknown. None:
        unknown for all segments. Lower bounds reduce the cost and never change the result.
        """
        first_nonfinite = self.accumulate_(inputs)
        return replace(self.select(inputs.v, budget), first_nonfinite=first_nonfinite)

    def select(self, v: Dense, budget: Budget, lower_bounds: Each | None = None) -> TopKResult:
        """Select from v, which must be finite: `accumulate_and_select_` without a pass. first_nonfinite is n."""
        bounds, parts = budget.bounds.tolist(), []
        thresholds = torch.zeros(len(bounds) - 1, dtype=torch.float32, device=v.device)
        for s, k in enumerate(budget.ks.tolist()):
            indices = largest(v[bounds[s] : bounds[s + 1]], k)
            if indices.numel() == k > 0:
                thresholds[s] = v[indices + bounds[s]].abs().min()
            parts.append(indices + bounds[s])
        selection = as_selection(torch.cat(parts), v, budget.capacity)
        none = torch.zeros((), dtype=torch.int32, device=v.device)
        return TopKResult(selection, thresholds, none.long() + v.numel(), none)

    def radix_select(self, v: Dense, budget: Budget) -> SparseVector:
        """Same elements as `select`. In C++ they are found digit by digit, with no sample and no lower bound."""
        return self.select(v, budget).elements

    def moments(self, v: Dense, bounds: Bounds) -> Moments:
        """Return sums over each segment bounds[s] .. bounds[s+1] - 1. v must be finite."""
        parts = v.split(bounds.diff().tolist())
        wide = [part.double() for part in parts]
        if not parts:
            none = torch.empty(0, dtype=torch.float64, device=v.device)
            return Moments(none, none, none, none.float())
        return Moments(
            sums=torch.stack([part.sum() for part in wide]),
            magnitudes=torch.stack([part.abs().sum() for part in wide]),
            squares=torch.stack([part.square().sum() for part in wide]),
            largest=torch.stack([part.abs().max() if part.numel() else part.sum() for part in parts]),
        )

    def tail(self, v: Dense, bounds: Bounds, lower_bounds: Each) -> Tail:
        """Return count and sum of each segment's elements at or above its lower bound. v must be finite.

        A lower bound of 0 excludes only zeros. A segment with a lower bound of inf is not read.
        """
        found = [
            part[(part.abs() >= lower_bound) & (part != 0)]
            for part, lower_bound in zip(v.split(bounds.diff().tolist()), lower_bounds, strict=True)
        ]
        return Tail(
            counts=torch.tensor([part.numel() for part in found], dtype=torch.int64, device=v.device),
            sums=torch.stack([part.double().abs().sum() for part in found]),
        )

    def remove_sent_(self, sent: SparseVector, u: Dense | None, v: Dense) -> None:
        """Do only the first part of a pass: v[i] = v[i] - value, and u[i] = 0 unless u is None."""
        count, indices = _valid(sent)
        v[indices] -= sent.values[:count]
        if u is not None:
            u[indices] = 0

    def merge_mean(self, parts: Sequence[SparseVector], size: int, numel: int) -> Merged:
        """Return the mean over `size` ranks of sparse vectors of `numel` elements.

        The values of one index are added to zero in the order of the parts, then divided by `size`. Every rank
        that merges the same parts therefore gets the same bits.
        """
        entries = [(indices, part.values[:count]) for part in parts for count, indices in [_valid(part)]]
        union, where = torch.unique(torch.cat([i for i, _ in entries]), sorted=True, return_inverse=True)
        total = torch.zeros(union.numel(), dtype=torch.float32, device=union.device)
        start = 0
        for indices, values in entries:
            total.index_add_(0, where[start : start + indices.numel()], values)
            start += indices.numel()
        # divide by a tensor: for a number, a GPU multiplies by its inverse
        count = torch.full((), union.numel(), dtype=torch.int32, device=union.device)
        return Merged(union, total.div_(torch.full_like(total, size)), count)

    def subtract_at_(
        self, targets: Sequence[Tensor], bounds: Bounds, indices: Indices, values: Values, factors: Sequence[float]
    ) -> None:
        """Compute targets[s][i - bounds[s]] -= factors[s] * value for every index i of segment s.

        Targets are contiguous one-dimensional tensors, one per segment. The product is rounded to fp32, then to
        the target's dtype, before it is subtracted. Indices are unique and ascending.
        """
        offsets, ends = bounds.tolist(), torch.searchsorted(indices, bounds).tolist()
        for s, (target, factor) in enumerate(zip(targets, factors, strict=True)):
            own = slice(ends[s], ends[s + 1])
            target[indices[own] - offsets[s]] -= (values[own] * factor).to(target.dtype)

    def decay_(
        self, p: Tensor, buffer: Tensor, lr: float, weight_decay: float, momentum: float, nesterov: bool
    ) -> None:
        """Apply weight decay with its own momentum in one pass: d = wd p; b = m b + d; p = p - lr w.

        w is d + m b with Nesterov momentum, else b. p and buffer are contiguous, one-dimensional, of one dtype.
        """
        decay = p * weight_decay
        buffer.mul_(momentum).add_(decay)
        p.sub_((decay.add_(buffer * momentum) if nesterov else buffer) * lr)


def as_selection(indices: Int64[Tensor, "count"], v: Dense, capacity: int) -> SparseVector:
    """Return the elements of v at ascending indices. Requires count <= capacity."""
    count = indices.numel()
    assert count <= capacity
    padded = torch.zeros(capacity, dtype=torch.int32, device=v.device)
    padded[:count] = indices
    values = torch.zeros(capacity, dtype=torch.float32, device=v.device)
    values[:count] = v[indices]
    return SparseVector(padded, values, torch.full((), count, dtype=torch.int32, device=v.device))


def _valid(selection: SparseVector) -> tuple[int, Int64[Tensor, "count"]]:
    count = int(selection.count)
    return count, selection.indices[:count].long()


def largest(v: Float[Tensor, "n"], k: int) -> Int64[Tensor, "found"]:
    """Return ascending indices of the k largest magnitudes in v, the first of equal ones. Zeros are excluded."""
    if k == 0 or v.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device=v.device)
    magnitudes = v.abs()
    threshold = torch.topk(magnitudes, min(k, v.numel()), sorted=False).values.min()
    if threshold == 0:
        return magnitudes.nonzero().view(-1)
    greater = (magnitudes > threshold).nonzero().view(-1)
    equal = (magnitudes == threshold).nonzero().view(-1)
    return torch.cat([greater, equal[: k - greater.numel()]]).sort().values


def usable(g: Float[Tensor, "n"]) -> Bool[Tensor, "n"]:
    """Return a mask of the elements that are not NaN and below TOO_LARGE."""
    return g.abs() < TOO_LARGE


def first_of(bad: Bool[Tensor, "n"]) -> Int64[Tensor, ""]:
    """Return the index of the first True, or n."""
    n = torch.full((), bad.numel(), dtype=torch.int64, device=bad.device)
    if bad.numel() == 0:
        return n
    # bad[first] would make the host wait for the index, a zero-dimensional tensor
    marks = bad.to(torch.uint8)
    index = marks.argmax()
    return torch.where(marks.take(index) > 0, index, n)


def remove_nonfinite_(g: Float[Tensor, "n"]) -> Int64[Tensor, ""]:
    """Set unusable elements of a gradient to zero. Returns the index of the first such element, or n."""
    bad = ~usable(g)
    g.masked_fill_(bad, 0.0)
    return first_of(bad)


def first_tensor_nonfinite(g: Float[Tensor, "n"], offsets: Sequence[int]) -> int:
    """Return the number, from 1, of the first tensor in g with NaN or inf, or 0. offsets: their first elements."""
    index = int(first_of(~torch.isfinite(g)))
    return 0 if index == g.numel() else bisect_right(offsets, index)
