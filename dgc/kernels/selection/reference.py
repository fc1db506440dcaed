"""The operations of the hot path in plain torch. Faster tiers must match them bit for bit."""

from bisect import bisect_right
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from dgc.kernels.selection.protocol import (
    TOO_LARGE,
    Budget,
    Merged,
    Moments,
    PassInputs,
    SparseVector,
    Tail,
    TopKResult,
)


class Reference:
    """Implements `SelectionKernels` of `protocol` on any device. On a GPU its operations wait for the device."""

    name = "reference"

    def __str__(self) -> str:
        return f"{self.name} (plain PyTorch)"

    def accumulate_(self, inputs: PassInputs) -> Int64[Tensor, ""]:
        if inputs.sent is not None:
            self.remove_sent_(inputs.sent, inputs.u if inputs.masking else None, inputs.v)
        g = torch.cat(inputs.g).to(torch.float32) if len(inputs.g) > 1 else inputs.g[0].to(torch.float32)
        mask = usable(g)
        first = first_of(~mask)
        g = torch.where(mask, g, 0.0)
        u, v = inputs.u, inputs.v
        if u is None:
            v.add_(g)
        elif inputs.nesterov:
            u.add_(g).mul_(inputs.momentum)
            v.add_(u).add_(g)
        else:
            u.mul_(inputs.momentum).add_(g)
            v.add_(u)
        return first

    def predicted_lower_bounds(
        self, last: Float32[Tensor, "S"], before: Float32[Tensor, "S"], margin: float
    ) -> Float32[Tensor, "S"]:
        return predicted_lower_bounds(last, before, margin)

    def accumulate_and_select_(
        self, inputs: PassInputs, budget: Budget, lower_bounds: Float32[Tensor, "S"] | None
    ) -> TopKResult:
        first = self.accumulate_(inputs)
        chosen = self.select(inputs.v, budget)
        return TopKResult(chosen.elements, chosen.thresholds, first, chosen.missed)

    def select(
        self, v: Float32[Tensor, "n"], budget: Budget, lower_bounds: Float32[Tensor, "S"] | None = None
    ) -> TopKResult:
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

    def radix_select(self, v: Float32[Tensor, "n"], budget: Budget) -> SparseVector:
        bounds = budget.bounds.tolist()
        parts = [
            radix_largest(v[start:end], k) + start
            for start, end, k in zip(bounds, bounds[1:], budget.ks.tolist(), strict=False)
        ]
        return as_selection(torch.cat(parts), v, budget.capacity)

    def moments(self, v: Float32[Tensor, "n"], bounds: Int64[Tensor, "bounds"]) -> Moments:
        parts = segments_of(v, bounds)
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

    def tail(
        self, v: Float32[Tensor, "n"], bounds: Int64[Tensor, "bounds"], lower_bounds: Float32[Tensor, "S"]
    ) -> Tail:
        found = [
            part[above(part, lower_bound)]
            for part, lower_bound in zip(segments_of(v, bounds), lower_bounds, strict=True)
        ]
        return Tail(
            counts=torch.tensor([part.numel() for part in found], dtype=torch.int64, device=v.device),
            sums=torch.stack([part.double().abs().sum() for part in found]),
        )

    def remove_sent_(self, sent: SparseVector, u: Float32[Tensor, "n"] | None, v: Float32[Tensor, "n"]) -> None:
        count, indices = _valid(sent)
        v[indices] -= sent.values[:count]
        if u is not None:
            u[indices] = 0

    def merge_mean(self, parts: Sequence[SparseVector], size: int, numel: int) -> Merged:
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
        self,
        targets: Sequence[Tensor],
        bounds: Int64[Tensor, "bounds"],
        indices: Int64[Tensor, "k"],
        values: Float32[Tensor, "k"],
        factors: Sequence[float],
    ) -> None:
        offsets, ends = bounds.tolist(), torch.searchsorted(indices, bounds).tolist()
        for s, (target, factor) in enumerate(zip(targets, factors, strict=True)):
            own = slice(ends[s], ends[s + 1])
            target[indices[own] - offsets[s]] -= (values[own] * factor).to(target.dtype)

    def decay_(
        self,
        p: Tensor,
        buffer: Tensor,
        lr: float,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
    ) -> None:
        decay = p * weight_decay
        buffer.mul_(momentum).add_(decay)
        p.sub_((decay.add_(buffer * momentum) if nesterov else buffer) * lr)


def predicted_lower_bounds(
    last: Float32[Tensor, "S"], before: Float32[Tensor, "S"], margin: float
) -> Float32[Tensor, "S"]:
    growth = torch.where(last == before, 1.0, last / before)
    return last * growth.clamp(0.97, 1.2) * margin


def segments_of(v: Float[Tensor, "n"], bounds: Int64[Tensor, "bounds"]) -> tuple[Float[Tensor, "_"], ...]:
    """Return views of the segments, which cover v."""
    return v.split(bounds.diff().tolist())


def as_selection(indices: Int64[Tensor, "count"], v: Float32[Tensor, "n"], capacity: int) -> SparseVector:
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


def radix_largest(v: Float32[Tensor, "n"], k: int) -> Int64[Tensor, "found"]:
    """Same as `largest`. The bits of |v|, as an integer, have the order of |v|: 8 bits at a time, most significant
    first, the digit is found in which the k-th largest number lies."""
    bits = v.view(torch.int32) & 0x7FFFFFFF
    prefix, rank = 0, min(k, v.numel())
    if rank == 0:
        return torch.empty(0, dtype=torch.int64, device=v.device)
    for shift in (24, 16, 8, 0):
        alike = bits[bits >> shift >> 8 == prefix] >> shift & 255
        reached = torch.bincount(alike, minlength=256).flip(0).cumsum(0)  # numbers with this digit or a larger one
        digit = int(torch.searchsorted(reached, rank))
        rank -= int(reached[digit - 1]) if digit else 0
        prefix = prefix << 8 | 255 - digit
    equal = (bits == prefix).nonzero().view(-1)[:rank]
    chosen = torch.cat([(bits > prefix).nonzero().view(-1), equal]).sort().values
    return chosen if prefix else (bits > 0).nonzero().view(-1)


def above(v: Float[Tensor, "n"], threshold: Float[Tensor, ""]) -> Int64[Tensor, "found"]:
    """Return ascending indices of the non-zero elements of v with |v| >= threshold."""
    magnitudes = v.abs()
    return ((magnitudes >= threshold) & (magnitudes > 0)).nonzero().view(-1)


def first_nonfinite(g: Float[Tensor, "n"]) -> Int64[Tensor, ""]:
    """Return the index of the first NaN or inf in g, or n."""
    return first_of(~torch.isfinite(g))


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
    first = marks.argmax()
    return torch.where(marks.take(first) > 0, first, n)


def remove_nonfinite_(g: Float[Tensor, "n"]) -> Int64[Tensor, ""]:
    """Set unusable elements of a gradient to zero. Returns the index of the first such element, or n."""
    bad = ~usable(g)
    g.masked_fill_(bad, 0.0)
    return first_of(bad)


def first_tensor_nonfinite(g: Float[Tensor, "n"], offsets: Sequence[int]) -> int:
    """Return the number, from 1, of the first tensor in g with NaN or inf, or 0.

    Args:
        g: The tensors' elements.
        offsets: Index of each tensor's first element.
    """
    first = int(first_nonfinite(g))
    return 0 if first == g.numel() else bisect_right(offsets, first)
