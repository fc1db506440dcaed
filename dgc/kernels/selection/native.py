"""The pass over the gradient and the selection in C++."""

from array import array
from collections.abc import Sequence
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from itertools import accumulate

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from dgc.kernels.library import (
    EACH_F32,
    EACH_I32,
    F32,
    F64,
    FP32,
    FP64,
    I32,
    I64,
    INT32,
    INT64,
    Native,
    Signatures,
)
from dgc.kernels.selection import (
    Budget,
    Merged,
    Moments,
    PassInputs,
    Prediction,
    SelectionKernels,
    SparseVector,
    Tail,
    TopKResult,
)

_SENT = (I32, F32, I32)
_PASS = (c_int, EACH_F32, c_void_p, c_int, F32, F32, c_int64, c_float, *_SENT, c_int, c_int, I64)
_CHOICE = (I64, I64, c_int64, F32, c_int64, I32, F32, I32, F32, I32)

SIGNATURES: Signatures = {
    "dgc_isa": (c_char_p, ()),
    "dgc_update": (None, _PASS),
    "dgc_update_and_choose": (None, (*_PASS, *_CHOICE)),
    "dgc_radix_select": (c_int64, (F32, I64, I64, c_int64, I32, F32, c_int)),
    "dgc_predicted_lower_bounds": (None, (F32, F32, c_int64, c_float, F32)),
    "dgc_moments": (None, (F32, I64, c_int64, F64, F64, F64, F32, c_int)),
    "dgc_assign": (c_int64, (EACH_F32, c_void_p, c_int, F32, c_int64, c_int)),
    "dgc_tail": (None, (F32, I64, c_int64, F32, I64, F64, c_int)),
    "dgc_take": (None, (*_SENT, F32, F32, c_int)),
    "dgc_merge_mean": (c_int64, (EACH_I32, EACH_F32, EACH_I32, c_int, c_float, c_int64, I64, F32, c_int)),
    "dgc_subtract_at": (None, (EACH_F32, I64, c_int64, I64, F32, c_int64, c_void_p, c_int)),
    "dgc_decay": (None, (F32, F32, c_int64, c_float, c_float, c_float, c_int, c_int)),
}

PLAIN_MOMENTUM, NESTEROV, RESIDUAL, NONE = range(4)

WORTH_A_THREAD = 65536  # elements


class NativeSelection(Native, SelectionKernels):
    """One pass over memory per step.

    The pass of DGC reads g, u, v and writes u, v: 20 bytes per parameter, which is the minimum. It also collects
    candidates, the elements at or above a lower bound, and the exact selection is made among these. If no lower
    bound is known, it is estimated from a sample of the buffer, or found while a small segment is in the cache. A
    segment with a wrong lower bound is processed again: lower bounds only affect time.
    """

    signatures = SIGNATURES
    name = "native"

    def __init__(self) -> None:
        super().__init__()
        self.isa: str = self._library.dgc_isa().decode()

    def __str__(self) -> str:
        return f"{self.name} ({self.isa})"

    def accumulate_(self, inputs: PassInputs) -> Int64[Tensor, ""]:
        first_nonfinite = torch.empty((), dtype=INT64)
        self._library.dgc_update(*_pass_arguments(None, inputs), first_nonfinite)
        return first_nonfinite

    def assign_(self, g: tuple[Tensor, ...], v: Float32[Tensor, "n"]) -> Int64[Tensor, ""]:
        first_nonfinite = self._library.dgc_assign(*pieces_of(g, v.numel()), v, v.numel(), torch.get_num_threads())
        return torch.full((), first_nonfinite, dtype=INT64)

    def predicted_lower_bounds(
        self, last: Float32[Tensor, "S"], before: Float32[Tensor, "S"], margin: float
    ) -> Float32[Tensor, "S"]:
        lower_bounds = torch.empty(last.numel(), dtype=FP32)
        self._library.dgc_predicted_lower_bounds(last, before, last.numel(), margin, lower_bounds)
        return lower_bounds

    def accumulate_and_select_(
        self, inputs: PassInputs, budget: Budget, lower_bounds: Float32[Tensor, "S"] | Prediction | None
    ) -> TopKResult:
        if isinstance(lower_bounds, Prediction):
            known = lower_bounds
            lower_bounds = self.predicted_lower_bounds(known.last, known.before, known.margin)
        return self._choose(None, inputs, budget, lower_bounds)

    def select(
        self, v: Float32[Tensor, "n"], budget: Budget, lower_bounds: Float32[Tensor, "S"] | None = None
    ) -> TopKResult:
        return self._choose(NONE, PassInputs((), None, v), budget, lower_bounds)

    def _choose(
        self, form: int | None, inputs: PassInputs, budget: Budget, lower_bounds: Tensor | None
    ) -> TopKResult:
        segments, capacity = budget.ks.numel(), budget.capacity
        indices, values = torch.empty(capacity, dtype=INT32), torch.empty(capacity, dtype=FP32)
        count, missed = torch.empty((), dtype=INT32), torch.empty((), dtype=INT32)
        thresholds, first_nonfinite = torch.empty(segments, dtype=FP32), torch.empty((), dtype=INT64)
        sought = (budget.bounds, budget.ks, segments, lower_bounds, capacity)
        made = (indices, values, count, thresholds, missed)
        self._library.dgc_update_and_choose(*_pass_arguments(form, inputs), first_nonfinite, *sought, *made)
        return TopKResult(SparseVector(indices, values, count), thresholds, first_nonfinite, missed)

    def radix_select(self, v: Float32[Tensor, "n"], budget: Budget) -> SparseVector:
        indices = torch.zeros(budget.capacity, dtype=INT32)
        values = torch.zeros(budget.capacity, dtype=FP32)
        where, threads = (budget.bounds, budget.ks, budget.ks.numel()), torch.get_num_threads()
        count = self._library.dgc_radix_select(v, *where, indices, values, threads)
        indices[count:], values[count:] = 0, 0.0  # segments with fewer elements have moved forward
        return SparseVector(indices, values, torch.full((), count, dtype=INT32))

    def moments(self, v: Float32[Tensor, "n"], bounds: Int64[Tensor, "bounds"]) -> Moments:
        segments, threads = bounds.numel() - 1, torch.get_num_threads()
        sums, magnitudes, squares = torch.empty(3, segments, dtype=FP64)
        largest = torch.empty(segments, dtype=FP32)
        self._library.dgc_moments(v, bounds, segments, sums, magnitudes, squares, largest, threads)
        return Moments(sums, magnitudes, squares, largest)

    def tail(
        self, v: Float32[Tensor, "n"], bounds: Int64[Tensor, "bounds"], lower_bounds: Float32[Tensor, "S"]
    ) -> Tail:
        segments = lower_bounds.numel()
        counts, sums = torch.empty(segments, dtype=INT64), torch.empty(segments, dtype=FP64)
        self._library.dgc_tail(v, bounds, segments, lower_bounds, counts, sums, torch.get_num_threads())
        return Tail(counts, sums)

    def remove_sent_(self, sent: SparseVector, u: Float32[Tensor, "n"] | None, v: Float32[Tensor, "n"]) -> None:
        self._library.dgc_take(sent.indices, sent.values, sent.count, u, v, torch.get_num_threads())

    def merge_mean(self, parts: Sequence[SparseVector], size: int, numel: int) -> Merged:
        each = [[p.indices for p in parts], [p.values for p in parts], [p.count for p in parts]]
        most = sum(part.indices.numel() for part in parts)
        indices, values = torch.empty(most, dtype=INT64), torch.empty(most, dtype=FP32)
        sizes, threads = (len(parts), size, numel), torch.get_num_threads()
        found = self._library.dgc_merge_mean(*each, *sizes, indices, values, threads)
        return Merged(indices[:found], values[:found], torch.tensor(found, dtype=INT32))

    def subtract_at_(
        self,
        targets: Sequence[Tensor],
        bounds: Int64[Tensor, "bounds"],
        indices: Int64[Tensor, "k"],
        values: Float32[Tensor, "k"],
        factors: Sequence[float],
    ) -> None:
        if any(target.dtype != torch.float32 for target in targets):
            super().subtract_at_(targets, bounds, indices, values, factors)
            return
        entries, rates = (indices, values, indices.numel()), (c_float * len(factors))(*factors)
        self._library.dgc_subtract_at(targets, bounds, len(targets), *entries, rates, torch.get_num_threads())

    def decay_(
        self, p: Tensor, buffer: Tensor, lr: float, weight_decay: float, momentum: float, nesterov: bool
    ) -> None:
        if p.dtype != torch.float32:
            super().decay_(p, buffer, lr, weight_decay, momentum, nesterov)
            return
        settings = (lr, weight_decay, momentum, nesterov)
        self._library.dgc_decay(p, buffer, p.numel(), *settings, torch.get_num_threads())


def pieces_of(g: Sequence[Tensor], n: int) -> tuple[list[Tensor], bytes, int]:
    """Return the pieces of n elements in fp32, or none, the first element of each, and their number."""
    pieces = list(map(Tensor.float, g))
    begins = array("q", accumulate(map(Tensor.numel, pieces), initial=0))
    assert not pieces or begins[-1] == n, (begins[-1], n)
    return pieces, begins.tobytes(), len(pieces)


def _pass_arguments(form: int | None, inputs: PassInputs) -> tuple[object, ...]:
    """Return the first arguments of the functions for the pass. form: of the update. None: as in `inputs`."""
    if form is None:
        form = RESIDUAL if inputs.u is None else NESTEROV if inputs.nesterov else PLAIN_MOMENTUM
    n, sent = inputs.v.numel(), inputs.sent
    return (
        form,
        *pieces_of(inputs.g, inputs.v.numel()),
        inputs.u,
        inputs.v,
        n,
        inputs.decay if inputs.u is None else inputs.momentum,
        *((None, None, None) if sent is None else (sent.indices, sent.values, sent.count)),
        inputs.masking,
        min(torch.get_num_threads(), 1 + n // WORTH_A_THREAD),  # to wake a thread costs time too
    )
