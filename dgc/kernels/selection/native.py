"""The hot path in C++, for CPU tensors: one pass over memory per step, with the same bits as the reference.

The pass of DGC reads g, u, v and writes u, v: 20 bytes per parameter, which is the minimum. It also collects
candidates, the elements at or above a lower bound, and the exact selection is made among these. If no lower bound
is known, it is estimated from a sample of the buffer. A segment with a wrong lower bound is processed again: lower
bounds only affect time.
"""

from array import array
from collections.abc import Sequence
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from itertools import accumulate

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from dgc.kernels.library import (
    FP32,
    FP64,
    INT32,
    INT64,
    Signatures,
    declare,
    load,
    pointer,
    pointers,
)
from dgc.kernels.selection.protocol import Budget, Merged, Moments, PassInputs, SparseVector, Tail, TopKResult
from dgc.kernels.selection.reference import Reference

PLAIN, NESTEROV, RESIDUAL, NONE = range(4)
WORTH_A_THREAD = 65536  # elements

_SENT = (c_void_p, c_void_p, c_void_p)
_PASS = (c_int, c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int64, c_float, *_SENT, c_int, c_int, c_void_p)
_CHOICE = (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)
_SIGNATURES: Signatures = {
    "dgc_isa": (c_char_p, ()),
    "dgc_update": (None, _PASS),
    "dgc_update_and_choose": (None, (*_PASS, *_CHOICE)),
    "dgc_radix_select": (c_int64, (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int)),
    "dgc_predicted_lower_bounds": (None, (c_void_p, c_void_p, c_int64, c_float, c_void_p)),
    "dgc_moments": (None, (c_void_p, c_void_p, c_int64, *(c_void_p,) * 4, c_int)),
    "dgc_tail": (None, (c_void_p, c_void_p, c_int64, *(c_void_p,) * 3, c_int)),
    "dgc_take": (None, (*_SENT, c_void_p, c_void_p, c_int)),
    "dgc_merge_mean": (c_int64, (*(c_void_p,) * 3, c_int, c_float, c_int64, c_void_p, c_void_p, c_int)),
    "dgc_subtract_at": (None, (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int)),
    "dgc_decay": (None, (c_void_p, c_void_p, c_int64, c_float, c_float, c_float, c_int, c_int)),
}


class Native:
    """Implements `SelectionKernels` of `protocol` for CPU tensors on torch.get_num_threads() threads.

    Raises:
        KernelsMissing: See `dgc.kernels.library.load`.
    """

    name = "native"

    def __init__(self) -> None:
        self._library = load()
        declare(self._library, _SIGNATURES)
        self.isa: str = self._library.dgc_isa().decode()
        self._plain = Reference()

    def __str__(self) -> str:
        return f"{self.name} ({self.isa})"

    def accumulate_(self, inputs: PassInputs) -> Int64[Tensor, ""]:
        pieces, first = list(map(Tensor.float, inputs.g)), torch.empty((), dtype=INT64)
        self._library.dgc_update(*_pass_arguments(None, pieces, inputs), pointer(first, INT64))
        return first

    def predicted_lower_bounds(
        self, last: Float32[Tensor, "S"], before: Float32[Tensor, "S"], margin: float
    ) -> Float32[Tensor, "S"]:
        lower_bounds = torch.empty(last.numel(), dtype=FP32)
        thresholds = (pointer(last, FP32), pointer(before, FP32))
        self._library.dgc_predicted_lower_bounds(*thresholds, last.numel(), margin, pointer(lower_bounds, FP32))
        return lower_bounds

    def accumulate_and_select_(
        self, inputs: PassInputs, budget: Budget, lower_bounds: Float32[Tensor, "S"] | None
    ) -> TopKResult:
        return self._choose(None, inputs, budget, lower_bounds)

    def select(
        self, v: Float32[Tensor, "n"], budget: Budget, lower_bounds: Float32[Tensor, "S"] | None = None
    ) -> TopKResult:
        return self._choose(NONE, PassInputs((), None, v), budget, lower_bounds)

    def radix_select(self, v: Float32[Tensor, "n"], budget: Budget) -> SparseVector:
        indices = torch.zeros(budget.capacity, dtype=INT32)
        values = torch.zeros(budget.capacity, dtype=FP32)
        count = self._library.dgc_radix_select(
            pointer(v, FP32),
            pointer(budget.bounds, INT64),
            pointer(budget.ks, INT64),
            budget.ks.numel(),
            pointer(indices, INT32),
            pointer(values, FP32),
            torch.get_num_threads(),
        )
        indices[count:], values[count:] = 0, 0.0  # segments with fewer elements have moved forward
        return SparseVector(indices, values, torch.full((), count, dtype=INT32))

    def _choose(
        self, form: int | None, inputs: PassInputs, budget: Budget, lower_bounds: Tensor | None
    ) -> TopKResult:
        segments, pieces = budget.ks.numel(), list(map(Tensor.float, inputs.g))
        indices = torch.empty(budget.capacity, dtype=INT32)
        values = torch.empty(budget.capacity, dtype=FP32)
        count, missed = torch.empty((), dtype=INT32), torch.empty((), dtype=INT32)
        thresholds, first = torch.empty(segments, dtype=FP32), torch.empty((), dtype=INT64)
        self._library.dgc_update_and_choose(
            *_pass_arguments(form, pieces, inputs),
            pointer(first, INT64),
            pointer(budget.bounds, INT64),
            pointer(budget.ks, INT64),
            segments,
            pointer(lower_bounds, FP32),
            budget.capacity,
            pointer(indices, INT32),
            pointer(values, FP32),
            pointer(count, INT32),
            pointer(thresholds, FP32),
            pointer(missed, INT32),
        )
        return TopKResult(SparseVector(indices, values, count), thresholds, first, missed)

    def moments(self, v: Float32[Tensor, "n"], bounds: Int64[Tensor, "bounds"]) -> Moments:
        segments = bounds.numel() - 1
        sums, magnitudes, squares = torch.empty(3, segments, dtype=FP64)
        largest = torch.empty(segments, dtype=FP32)
        self._library.dgc_moments(
            pointer(v, FP32),
            pointer(bounds, INT64),
            segments,
            pointer(sums, FP64),
            pointer(magnitudes, FP64),
            pointer(squares, FP64),
            pointer(largest, FP32),
            torch.get_num_threads(),
        )
        return Moments(sums, magnitudes, squares, largest)

    def tail(
        self, v: Float32[Tensor, "n"], bounds: Int64[Tensor, "bounds"], lower_bounds: Float32[Tensor, "S"]
    ) -> Tail:
        segments = lower_bounds.numel()
        counts, sums = torch.empty(segments, dtype=INT64), torch.empty(segments, dtype=FP64)
        self._library.dgc_tail(
            pointer(v, FP32),
            pointer(bounds, INT64),
            segments,
            pointer(lower_bounds, FP32),
            pointer(counts, INT64),
            pointer(sums, FP64),
            torch.get_num_threads(),
        )
        return Tail(counts, sums)

    def remove_sent_(self, sent: SparseVector, u: Float32[Tensor, "n"] | None, v: Float32[Tensor, "n"]) -> None:
        places = (pointer(u, FP32), pointer(v, FP32))
        self._library.dgc_take(*_entries(sent), *places, torch.get_num_threads())

    def merge_mean(self, parts: Sequence[SparseVector], size: int, numel: int) -> Merged:
        most = sum(part.indices.numel() for part in parts)
        indices, values = torch.empty(most, dtype=INT64), torch.empty(most, dtype=FP32)
        found = self._library.dgc_merge_mean(
            pointers([part.indices for part in parts], INT32),
            pointers([part.values for part in parts], FP32),
            pointers([part.count for part in parts], INT32),
            len(parts),
            size,
            numel,
            pointer(indices, INT64),
            pointer(values, FP32),
            torch.get_num_threads(),
        )
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
            self._plain.subtract_at_(targets, bounds, indices, values, factors)
            return
        self._library.dgc_subtract_at(
            pointers(targets, FP32),
            pointer(bounds, INT64),
            len(targets),
            pointer(indices, INT64),
            pointer(values, FP32),
            indices.numel(),
            (c_float * len(factors))(*factors),
            torch.get_num_threads(),
        )

    def decay_(
        self,
        p: Tensor,
        buffer: Tensor,
        lr: float,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
    ) -> None:
        if p.dtype != torch.float32:
            self._plain.decay_(p, buffer, lr, weight_decay, momentum, nesterov)
            return
        threads = torch.get_num_threads()
        self._library.dgc_decay(
            pointer(p, FP32), pointer(buffer, FP32), p.numel(), lr, weight_decay, momentum, nesterov, threads
        )


def _entries(sent: SparseVector | None) -> tuple[int | None, int | None, int | None]:
    if sent is None:
        return None, None, None
    return pointer(sent.indices, INT32), pointer(sent.values, FP32), pointer(sent.count, INT32)


def _pass_arguments(form: int | None, pieces: Sequence[Tensor], inputs: PassInputs) -> tuple[object, ...]:
    """Return the first arguments of the library's functions for the pass.

    Args:
        form: That of the update. None: the one of `inputs`.
        pieces: inputs.g in fp32. It must stay alive until the call returns.
        inputs: The pass.
    """
    if form is None:
        form = RESIDUAL if inputs.u is None else NESTEROV if inputs.nesterov else PLAIN
    begins = array("q", accumulate(map(Tensor.numel, pieces), initial=0))
    n = inputs.v.numel()
    assert form == NONE or begins[-1] == n
    return (
        form,
        pointers(pieces, FP32),
        begins.tobytes(),
        len(pieces),
        pointer(inputs.u, FP32),
        pointer(inputs.v, FP32),
        n,
        inputs.momentum,
        *_entries(inputs.sent),
        inputs.masking,
        min(torch.get_num_threads(), 1 + n // WORTH_A_THREAD),  # to wake a thread costs time too
    )
