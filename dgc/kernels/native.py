"""The native backend: C++ behind a C interface, for contiguous CPU tensors. The bits are those of plain torch.

Kernels run on torch.get_num_threads() threads; the codec runs on one, but for the encoding of two-bit values. The
number of threads does not change the result. The construction of a class raises `library.KernelsUnavailable` if
the library cannot be used.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p, memset
from itertools import accumulate, chain
from math import inf, prod
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float32, Int32, Int64, UInt8
from torch import Tensor

from dgc.kernels.blocks import BlockCode, Blocks, Padded, Row, Rows
from dgc.kernels.codec import (
    CASTS,
    HEADER_BYTES,
    PLAIN,
    TABLES,
    WORDS,
    Codec,
    Header,
    IndexCode,
    IndexKind,
    Layout,
    MeanDecoder,
    Terms,
    ValueKind,
)
from dgc.kernels.elements import ElementCode, ElementCoder, Form, Measured, Scale
from dgc.kernels.library import Address, Addresses, address, load
from dgc.kernels.lowrank import (
    Batches,
    Cast,
    Factor,
    Factors,
    Left,
    LowRank,
    Matrices,
    Message,
    Places,
    Products,
    Right,
    SentUpdate,
    Tensors,
    Vector,
)
from dgc.kernels.quantize import (
    WORD,
    Bounds,
    Codes,
    Dense,
    Each,
    Quantizers,
    Residual,
    empty_codes,
    empty_residual,
    keys_of,
    layout_of,
    level_factors,
    thresholds_or,
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

FP32, FP64, INT32, INT64, UINT8 = torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8
F32, F64, I32, I64, U8 = map(Address, (FP32, FP64, INT32, INT64, UINT8))
EACH_F32, EACH_I32, EACH_U8 = map(Addresses, (FP32, INT32, UINT8))

_SENT = (I32, F32, I32)
_PASS = (c_int, EACH_F32, c_void_p, c_int, F32, F32, c_int64, c_float, *_SENT, c_int, c_int, I64)
_CHOICE = (I64, I64, c_int64, F32, c_int64, I32, F32, I32, F32, I32)
_TERMS = (c_float, c_uint32)
_ENCODE = (c_int64, (I32, c_int64, c_int64, c_int64, U8, c_int64))
_DECODE = (c_int, (U8, c_int64, c_int64, c_int64, c_int64, I32))
_ENCODE_VALUES = (None, (I32, F32, c_int64, I64, c_int64, U8, F32))
_DECODE_VALUES = (c_int, (I32, c_int64, I64, c_int64, U8, F32))
_LAYOUT = (c_int64, c_int64, c_int64, c_int, c_int64, c_int)
_RANGES = (I64, I64, c_int64)
_RANDOM = (c_int, c_uint32, c_uint32)
_MADE = (U8, F32, c_int)
_RANKS = (EACH_U8, c_int)
_SIZES = (c_int64, c_int64, c_int64)
_TABLE = (c_void_p, c_int64)
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
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
    "dgc_encode_plain": (
        None,
        (I32, F32, c_int64, I32, c_int64, c_int, c_float, I64, I64, c_int64, *_TERMS, U8, c_int64, F32),
    ),
    "dgc_seal": (None, (U8, c_int64, I32, I64, I64, c_int64, F32, *_TERMS)),
    "dgc_sealed": (c_int, (U8, c_int64)),
    "dgc_thin": (None, (I32, F32, c_int64, c_int64, I32, F32)),
    "dgc_plain_encode": (None, (I32, c_int64, c_int64, U8)),
    "dgc_plain_decode": _DECODE,
    "dgc_packed_encode": _ENCODE,
    "dgc_packed_decode": _DECODE,
    "dgc_rice_encode": _ENCODE,
    "dgc_rice_decode": _DECODE,
    "dgc_chunks_encode": _ENCODE,
    "dgc_chunks_decode": _DECODE,
    "dgc_cast_encode": (None, (F32, c_int64, c_int, c_float, U8, F32, F32)),
    "dgc_cast_decode": (c_int, (U8, c_int64, c_int, c_float, F32)),
    "dgc_sign_encode": _ENCODE_VALUES,
    "dgc_sign_decode": _DECODE_VALUES,
    "dgc_int8_encode": _ENCODE_VALUES,
    "dgc_int8_decode": _DECODE_VALUES,
    "dgc_two_bit_encode": (None, (*_ENCODE_VALUES[1], c_double, c_int)),
    "dgc_two_bit_decode": _DECODE_VALUES,
    "dgc_decode_mean": (
        c_int64,
        (*_RANKS, *_LAYOUT, I64, c_int64, c_float, I32, c_int, F32, I64, F32, c_int),
    ),
    "dgc_largest": (None, (F32, I64, c_int64, F32, c_int)),
    "dgc_quantize_signs": (None, (F32, *_RANGES, F32, F32, F32, *_MADE)),
    "dgc_add_signs": (None, (U8, *_RANGES, F32, F32, F32, c_int)),
    "dgc_quantize_ternary": (None, (F32, *_RANGES, F32, *_MADE)),
    "dgc_quantize_levels": (None, (F32, *_RANGES, F32, F32, c_int, c_int, *_RANDOM, *_MADE)),
    "dgc_add_levels": (None, (U8, *_RANGES, F32, c_int, F32, c_int)),
    "dgc_blocks_encode": (None, (F32, *_RANGES, c_int64, c_int, c_int, c_int64, U8, c_int64, F32, c_int)),
    "dgc_blocks_add_sum": (None, (*_RANKS, c_int64, c_int, c_int, c_int64, F32, c_int)),
    "dgc_blocks_add_encode": (
        c_int64,
        (EACH_F32, c_int, F32, *_RANGES, c_int64, c_int, c_int, c_int64, U8, c_int64, F32, c_int),
    ),
    "dgc_blocks_answer": (None, (*_RANKS, c_int64, c_int, c_int, c_int64, F32, F32, c_int, U8, F32, c_int)),
    "dgc_blocks_decode": (
        None,
        (EACH_U8, *_RANGES, c_int64, c_int, c_int, c_int64, c_float, EACH_F32, c_int, c_int),
    ),
    "dgc_measure": (
        c_int64,
        (EACH_F32, c_void_p, c_int, F32, c_int, I64, c_int64, c_int, F64, c_int),
    ),
    "dgc_mean_signs": (c_int, (*_RANKS, *_RANGES, EACH_F32, EACH_F32, F32, c_float, c_int, F32, c_int)),
    "dgc_mean_ternary": (c_int, (*_RANKS, *_RANGES, EACH_F32, F32, c_float, F32, c_int)),
    "dgc_mean_levels": (c_int, (*_RANKS, *_RANGES, EACH_F32, c_int, c_float, F32, c_int)),
    "dgc_mean_bf16": (None, (*_RANKS, c_int64, c_float, F32, c_int)),
    "dgc_round": (c_int, (EACH_F32, c_void_p, c_int, c_int, U8, c_int64, c_int)),
    "dgc_pack_sums": (None, (*_RANKS, c_int64, c_int, c_int, U8, c_int)),
    "dgc_mean_sums": (None, (*_RANKS, c_int64, c_int, *_RANGES, c_int, F32, F32, c_int)),
    "dgc_lowrank": (None, (F32, *_SIZES, F32, F32, c_int64, F32, c_int64, c_int, F32, c_int)),
    "dgc_lowrank_first": (
        c_int64,
        (F32, c_int64, *_TABLE, EACH_F32, c_int, EACH_F32, c_void_p, c_int, c_int, F32, c_int),
    ),
    "dgc_unit_rows": (c_int, (F32, c_int64, c_int64, F32)),
    "dgc_outer": (None, (EACH_F32, *_TABLE, EACH_F32, F32, *_TABLE, c_int)),
}

PLAIN_MOMENTUM, NESTEROV, RESIDUAL, NONE = range(4)
WORTH_A_THREAD = 65536  # elements
INVALID = -1  # returned by dgc_decode_mean

# of a payload that is not sparse
_NO_COUNT, _NO_SCALE = torch.tensor(0, dtype=INT32), torch.tensor(1.0, dtype=FP32)
# what `round_` returns: an element is not finite, or all are
_PROBES = (torch.tensor(inf, dtype=FP32), torch.tensor(0.0, dtype=FP32))
_FLAGS = (torch.tensor(False, dtype=torch.bool), torch.tensor(True, dtype=torch.bool))


K = TypeVar("K")


class Native:
    """Base of the native classes: loads the library."""

    def __init__(self) -> None:
        self._library = load(SIGNATURES)


class NativeSelection(Native, SelectionKernels):
    """One pass over memory per step.

    The pass of DGC reads g, u, v and writes u, v: 20 bytes per parameter, which is the minimum. It also collects
    candidates, the elements at or above a lower bound, and the exact selection is made among these. If no lower
    bound is known, it is estimated from a sample of the buffer, or found while a small segment is in the cache. A
    segment with a wrong lower bound is processed again: lower bounds only affect time.
    """

    name = "native"

    def __init__(self) -> None:
        super().__init__()
        self.isa: str = self._library.dgc_isa().decode()

    def __str__(self) -> str:
        return f"{self.name} ({self.isa})"

    def accumulate_(self, inputs: PassInputs) -> Int64[Tensor, ""]:
        first = torch.empty((), dtype=INT64)
        self._library.dgc_update(*_pass_arguments(None, inputs), first)
        return first

    def assign_(self, g: tuple[Tensor, ...], v: Float32[Tensor, "n"]) -> Int64[Tensor, ""]:
        first = self._library.dgc_assign(*_pieces(g, v), v, v.numel(), torch.get_num_threads())
        return torch.full((), first, dtype=INT64)

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
        thresholds, first = torch.empty(segments, dtype=FP32), torch.empty((), dtype=INT64)
        sought = (budget.bounds, budget.ks, segments, lower_bounds, capacity)
        made = (indices, values, count, thresholds, missed)
        self._library.dgc_update_and_choose(*_pass_arguments(form, inputs), first, *sought, *made)
        return TopKResult(SparseVector(indices, values, count), thresholds, first, missed)

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


def _pieces(g: Sequence[Tensor], v: Tensor) -> tuple[list[Tensor], bytes, int]:
    """Return the pieces of a gradient of v's length, or none, and the first element of each."""
    pieces = list(map(Tensor.float, g))
    begins = array("q", accumulate(map(Tensor.numel, pieces), initial=0))
    assert not pieces or begins[-1] == v.numel()
    return pieces, begins.tobytes(), len(pieces)


def _pass_arguments(form: int | None, inputs: PassInputs) -> tuple[object, ...]:
    """Return the first arguments of the functions for the pass. form: that of the update, or that of `inputs`."""
    if form is None:
        form = RESIDUAL if inputs.u is None else NESTEROV if inputs.nesterov else PLAIN_MOMENTUM
    n, sent = inputs.v.numel(), inputs.sent
    return (
        form,
        *_pieces(inputs.g, inputs.v),
        inputs.u,
        inputs.v,
        n,
        inputs.decay if inputs.u is None else inputs.momentum,
        *((None, None, None) if sent is None else (sent.indices, sent.values, sent.count)),
        inputs.masking,
        min(torch.get_num_threads(), 1 + n // WORTH_A_THREAD),  # to wake a thread costs time too
    )


class NativeCodec(Native, Codec):
    """The codec. The tensors of two-bit values are shared out to threads."""

    def __init__(self) -> None:
        super().__init__()
        codes = {kind: "plain" if kind in PLAIN else kind.name.lower() for kind in IndexKind}
        tables = {ValueKind.SIGN: "sign", ValueKind.INT8: "int8", ValueKind.TWO_BITS: "two_bit"}
        self._code_encoders, self._code_decoders = self._functions(codes)
        self._table_encoders, self._table_decoders = self._functions(tables)

    def _functions(self, names: Mapping[K, str]) -> list[dict[K, Callable[..., int]]]:
        """Return the library's encoders and decoders."""
        ways = ("encode", "decode")
        return [
            {kind: getattr(self._library, f"dgc_{name}_{way}") for kind, name in names.items()} for way in ways
        ]

    def blank(self, nbytes: int, like: Tensor) -> UInt8[Tensor, "nbytes"]:
        payload = torch.empty(nbytes, dtype=UINT8)
        memset(U8.from_param(payload), 0, nbytes)
        return payload

    def encodes(self, layout: Layout) -> bool:
        return layout.indices.kind in PLAIN and layout.values is not None and layout.values not in TABLES

    def encode(
        self,
        selection: SparseVector,
        layout: Layout,
        limit: float,
        r: float,
        first_nonfinite: Int64[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
        tensors: Int64[Tensor, "tensors"],
        terms: Terms,
    ) -> tuple[UInt8[Tensor, "nbytes"], SparseVector, Float32[Tensor, "capacity"]]:
        capacity, nbytes = selection.values.numel(), layout.nbytes
        payload, decoded = torch.empty(nbytes, dtype=UINT8), torch.empty(capacity, dtype=FP32)
        given = (selection.indices, selection.values, capacity, selection.count)
        types = (PLAIN[layout.indices.kind].itemsize, layout.values)
        header = (first_nonfinite, tensors, tensors.numel(), terms.ratio, terms.form)
        self._library.dgc_encode_plain(*given, *types, limit, *header, payload, nbytes, decoded)
        return payload, SparseVector(selection.indices, decoded, selection.count), selection.values

    def seal_(
        self,
        payload: UInt8[Tensor, "nbytes"],
        count: Int32[Tensor, ""],
        first_nonfinite: Int64[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
        scale: Float32[Tensor, ""],
        terms: Terms,
    ) -> None:
        header = (count, first_nonfinite, bounds, bounds.numel(), scale, terms.ratio, terms.form)
        self._library.dgc_seal(payload, payload.numel(), *header)

    def words(self, payload: UInt8[Tensor, "nbytes"]) -> Sequence[Any]:
        sealed = self._library.dgc_sealed(payload, payload.numel())
        count, number, _, _, ratio, form = (c_int32 * 6).from_address(address(payload, UINT8))
        return number, sealed, count, ratio, form

    def unseal(self, payload: UInt8[Tensor, "nbytes"]) -> Header:
        count, number, _, scale, ratio, form = payload[:HEADER_BYTES].view(torch.int32).clone().unbind()
        sealed = self._library.dgc_sealed(payload, payload.numel())
        return Header(count, number, scale.view(torch.float32), (ratio, form), _FLAGS[sealed])

    def indices_encode_(
        self, selection: SparseVector, code: IndexCode, section: UInt8[Tensor, "nbytes"]
    ) -> SparseVector:
        encode, indices = self._code_encoders[code.kind], selection.indices
        if code.kind in PLAIN:
            encode(indices, code.capacity, PLAIN[code.kind].itemsize, section)
            return selection
        place = (code.capacity, code.parameter, section, section.numel())
        count = int(selection.count)
        kept = encode(indices, count, *place)
        if kept == count:
            return selection
        fewer, values = torch.zeros_like(indices), torch.zeros_like(selection.values)
        self._library.dgc_thin(indices, selection.values, count, kept, fewer, values)
        again = encode(fewer, kept, *place)
        assert again == kept, "fewer elements fit as well"
        return SparseVector(fewer, values, torch.tensor(kept, dtype=INT32))

    def indices_decode(
        self, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""], code: IndexCode
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        indices = torch.zeros(code.capacity, dtype=INT32)
        sizes = (section.numel(), count.item(), code.capacity, code.numel)
        return indices, _FLAGS[self._code_decoders[code.kind](section, *sizes, indices)]

    def cast_encode_(
        self,
        values: Float32[Tensor, "capacity"],
        dtype: torch.dtype,
        section: UInt8[Tensor, "nbytes"],
        limit: float = inf,
    ) -> tuple[Float32[Tensor, "capacity"], Float32[Tensor, ""]]:
        decoded, scale = torch.empty(values.numel(), dtype=FP32), torch.empty((), dtype=FP32)
        self._library.dgc_cast_encode(values, values.numel(), CASTS.index(dtype), limit, section, decoded, scale)
        return decoded, scale

    def cast_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        count: Int32[Tensor, ""],
        dtype: torch.dtype,
        scale: Float32[Tensor, ""],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        decoded = torch.zeros(section.numel() // dtype.itemsize, dtype=FP32)
        how = (_within(count, decoded), CASTS.index(dtype), scale.item())
        return decoded, _FLAGS[self._library.dgc_cast_decode(section, *how, decoded)]

    def table_encode_(
        self,
        kind: ValueKind,
        selection: SparseVector,
        bounds: Int64[Tensor, "bounds"],
        section: UInt8[Tensor, "nbytes"],
        r: float = 0.0,
    ) -> Float32[Tensor, "capacity"]:
        decoded = torch.zeros_like(selection.values)
        given = (selection.indices, selection.values, selection.count.item(), bounds, bounds.numel() - 1)
        settings = (r, torch.get_num_threads()) if kind == ValueKind.TWO_BITS else ()
        self._table_encoders[kind](*given, section, decoded, *settings)
        return decoded

    def table_decode(
        self,
        kind: ValueKind,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        count: Int32[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        decoded = torch.zeros(indices.numel(), dtype=FP32)
        entries = (indices, _within(count, decoded), bounds, bounds.numel() - 1)
        return decoded, _FLAGS[self._table_decoders[kind](*entries, section, decoded)]


def _within(count: Tensor, entries: Tensor) -> int:
    """Return the count, clamped to a safe value. Decoding the indices reports an invalid count."""
    return min(max(0, int(count)), entries.numel())


class NativeMeanDecoder(Native, MeanDecoder):
    """Decodes the payloads of all ranks and adds them, in one call, if their `Layout` names both codes.

    Any bytes are safe, but payloads must have the planned size. The result has the bits of decoding each payload
    by itself and of `merge_mean`: each element is added in the order of the payloads. Each payload is decoded by
    one thread. Then each thread adds all entries of its own part of the bucket.
    """

    def takes(self, layout: Layout) -> bool:
        return layout.values is not None

    def mean(
        self,
        payloads: Sequence[UInt8[Tensor, "nbytes"]],
        layout: Layout,
        bounds: Int64[Tensor, "bounds"],
        size: int,
    ) -> tuple[Int32[Tensor, "words"], Merged | None]:
        """Return (WORDS numbers per payload, the mean over `size` ranks, or None if a payload is not valid)."""
        most = len(payloads) * layout.indices.capacity
        indices, values = torch.empty(most, dtype=INT64), torch.empty(most, dtype=FP32)
        numbers, found = self._decode(payloads, layout, bounds, size, None, indices, values)
        words = numbers[:-1]
        if found == INVALID:
            return words, None
        return words, Merged(indices[:found], values[:found], torch.tensor(found, dtype=INT32))

    def mean_into_(
        self,
        dense: Float32[Tensor, "n"],
        payloads: Sequence[UInt8[Tensor, "nbytes"]],
        layout: Layout,
        bounds: Int64[Tensor, "bounds"],
        size: int,
    ) -> Int32[Tensor, "numbers"]:
        numbers, found = self._decode(payloads, layout, bounds, size, dense, None, None)
        numbers[-1] = found == 1
        return numbers

    def _decode(
        self,
        payloads: Sequence[Tensor],
        layout: Layout,
        bounds: Tensor,
        size: int,
        dense: Tensor | None,
        indices: Tensor | None,
        values: Tensor | None,
    ) -> tuple[Tensor, int]:
        code, ranks = layout.indices, len(payloads)
        assert dense is None or dense.numel() == code.numel
        words = torch.empty(WORDS * ranks + 1, dtype=INT32)
        how = (layout.nbytes, code.capacity, code.numel, code.kind, code.nbytes, layout.values)
        made = (words, dense is not None, dense, indices, values)  # the address of an empty tensor is null
        where, threads = (bounds, bounds.numel() - 1), torch.get_num_threads()
        found: int = self._library.dgc_decode_mean(payloads, ranks, *how, *where, size, *made, threads)
        return words, found


class NativeQuantizers(Native, Quantizers):
    """Quantizers at the speed of memory. Ternary codes of a single rank are added in torch."""

    def largest(self, v: Dense, bounds: Bounds) -> Each:
        found = torch.empty(bounds.numel() - 1, dtype=FP32)
        self._library.dgc_largest(v, bounds, found.numel(), found, torch.get_num_threads())
        return found

    def sign_encode(
        self,
        v: Dense,
        bounds: Bounds,
        cuts: Each,
        lows: Each,
        highs: Each,
        keep: bool = True,
        into: Dense | None = None,
    ) -> tuple[Codes, Residual]:
        codes, residual = empty_codes(bounds, 1, WORD), empty_residual(v, keep, into)
        values, threads = (cuts, lows, highs), torch.get_num_threads()
        self._library.dgc_quantize_signs(v, *_ranges(bounds, 1, WORD), *values, codes, residual, threads)
        return codes, residual

    def sign_add_(self, codes: Codes, bounds: Bounds, lows: Each, highs: Each, total: Dense) -> None:
        where = _ranges(bounds, 1, WORD)
        self._library.dgc_add_signs(codes, *where, lows, highs, total, torch.get_num_threads())

    def sign_mean_(
        self,
        codes: Sequence[Codes],
        bounds: Bounds,
        lows: Sequence[Each],
        highs: Sequence[Each],
        factors: Each | None,
        size: int,
        mean: Dense,
    ) -> None:
        given, threads = (*_by_rank(codes, lows, highs), *_ranges(bounds, 1, WORD)), torch.get_num_threads()
        self._library.dgc_mean_signs(*given, lows, highs, factors, size, False, mean, threads)

    def tern_encode(
        self, v: Dense, bounds: Bounds, thresholds: Each, keep: bool = True, into: Dense | None = None
    ) -> tuple[Codes, Residual]:
        codes, residual = empty_codes(bounds, 2, WORD), empty_residual(v, keep, into)
        sent, threads = thresholds_or(torch.inf, thresholds), torch.get_num_threads()
        self._library.dgc_quantize_ternary(v, *_ranges(bounds, 2, WORD), sent, codes, residual, threads)
        return codes, residual

    def tern_mean_(
        self,
        codes: Sequence[Codes],
        bounds: Bounds,
        thresholds: Sequence[Each],
        factors: Each | None,
        size: int,
        mean: Dense,
    ) -> None:
        sent, threads = [thresholds_or(0.0, own) for own in thresholds], torch.get_num_threads()
        given = (*_by_rank(codes, sent), *_ranges(bounds, 2, WORD))
        self._library.dgc_mean_ternary(*given, sent, factors, size, mean, threads)

    def uniform_encode(
        self,
        v: Dense,
        bounds: Bounds,
        scales: Each,
        levels: int,
        bits: int,
        seed: int | None,
        keep: bool = True,
        into: Dense | None = None,
    ) -> tuple[Codes, Residual]:
        codes, residual = empty_codes(bounds, bits, 1), empty_residual(v, keep, into)
        how = (*level_factors(scales, levels, bits), levels, bits, *_random(seed))
        made = (codes, residual, torch.get_num_threads())
        self._library.dgc_quantize_levels(v, *_ranges(bounds, bits, 1), *how, *made)
        return codes, residual

    def uniform_add_(
        self, codes: Codes, bounds: Bounds, scales: Each, levels: int, bits: int, total: Dense
    ) -> None:
        (_, steps), where = level_factors(scales, levels, bits), _ranges(bounds, bits, 1)
        self._library.dgc_add_levels(codes, *where, steps, bits, total, torch.get_num_threads())

    def uniform_mean_(
        self,
        codes: Sequence[Codes],
        bounds: Bounds,
        scales: Sequence[Each],
        levels: int,
        bits: int,
        size: int,
        mean: Dense,
    ) -> None:
        steps, threads = [level_factors(own, levels, bits)[1] for own in scales], torch.get_num_threads()
        given = (*_by_rank(codes, steps), *_ranges(bounds, bits, 1))
        self._library.dgc_mean_levels(*given, steps, bits, size, mean, threads)

    def round_(self, g: tuple[Tensor, ...], halves: Tensor) -> Tensor:
        if halves.dtype not in CASTS or any(piece.dtype != FP32 for piece in g):
            return super().round_(g, halves)
        how = (halves.dtype == torch.bfloat16, halves.view(UINT8), halves.numel(), torch.get_num_threads())
        return _PROBES[self._library.dgc_round(*_pieces(g, halves), *how)]

    def halves_mean_(self, codes: Sequence[Codes], dtype: torch.dtype, size: int, mean: Dense) -> None:
        if dtype != torch.bfloat16:
            super().halves_mean_(codes, dtype, size, mean)
            return
        self._library.dgc_mean_bf16(*_by_rank(codes), mean.numel(), size, mean, torch.get_num_threads())

    def pack_sums(self, codes: Sequence[Codes], whole: Bounds, width: int, bits: int) -> UInt8[Tensor, "packed"]:
        fields = codes[0].numel() * 8 // width
        packed = torch.empty(-(-fields * bits // 8), dtype=UINT8)
        self._library.dgc_pack_sums(*_by_rank(codes), fields, width, bits, packed, torch.get_num_threads())
        return packed

    def sums_mean_(
        self,
        packed: Sequence[Codes],
        fields: int,
        width: int,
        bits: int,
        bounds: Bounds,
        factors: Each,
        mean: Dense,
    ) -> None:
        given = (*_by_rank(packed), fields, bits, *_ranges(bounds, width, WORD), width)
        self._library.dgc_mean_sums(*given, factors, mean, torch.get_num_threads())


# what dgc_measure finds for a scale
NOTHING, LARGEST, MAGNITUDES, SQUARES = range(4)
FOUND = {
    Scale.NONE: NOTHING,
    Scale.NONZERO: LARGEST,
    Scale.LARGEST: LARGEST,
    Scale.MEAN: MAGNITUDES,
    Scale.NORM: SQUARES,
    Scale.SPREAD: SQUARES,
}


class NativeElementCoder(Native, ElementCoder):
    """Steps of codes whose scale is in FOUND.

    The scale is found while the elements are in the cache, and codes are written to their place in the payload.
    """

    def __init__(self) -> None:
        super().__init__()
        self._codec = NativeCodec()

    def takes(self, code: ElementCode) -> bool:
        return code.scale in FOUND

    def measure_(self, code: ElementCode, g: tuple[Tensor, ...], v: Dense, adds: bool) -> Measured:
        bounds, found = code.bounds, torch.empty(code.bounds.numel() - 1, dtype=FP64)
        how = (v, adds, bounds, found.numel(), FOUND[code.scale], found, torch.get_num_threads())
        first = self._library.dgc_measure(*_pieces(g, v), *how)
        match code.scale:
            case Scale.NONZERO:
                found = found > 0
            case Scale.MEAN:
                found = found / bounds.diff().clamp(min=1)
            case Scale.NORM:
                found = found.sqrt()
            case Scale.SPREAD:
                found = code.factor * (found / bounds.diff().clamp(min=1)).sqrt()
        values = found.float()
        return Measured(values[None], torch.full((1,), first, dtype=INT32))

    def encode(
        self,
        code: ElementCode,
        v: Dense,
        measured: Measured,
        given: Each | None,
        seed: int | None,
        keep: bool,
        tensors: Int64[Tensor, "bounds"],
        terms: Terms,
        into: Dense | None = None,
    ) -> tuple[UInt8[Tensor, "nbytes"], Residual]:
        payload, residual = torch.empty(code.nbytes, dtype=UINT8), empty_residual(v, keep, into)
        payload[-8:] = 0  # the codes need not fill the last word
        values = measured.values[0]
        payload[HEADER_BYTES : code.begin] = values[: code.rows * values.numel()].view(UINT8)
        scaling = code.momentum is not None
        made = (payload[code.begin :], residual[:0] if scaling else residual, torch.get_num_threads())
        where = (v, *_ranges(code.bounds, code.bits, code.unit))
        match code.form:
            case Form.TERNARY:
                assert given is not None
                self._library.dgc_quantize_ternary(*where, thresholds_or(inf, given), *made)
            case Form.LEVELS:
                how = (*level_factors(values, code.levels, code.bits), code.levels, code.bits, *_random(seed))
                self._library.dgc_quantize_levels(*where, *how, *made)
            case _:
                ends = values if given is None else torch.ones_like(given)
                cuts = torch.zeros_like(ends) if given is None else given
                self._library.dgc_quantize_signs(*where, cuts, -ends, ends, *made)
        if keep and code.momentum is not None:
            torch.mul(v, code.momentum, out=residual)
        self._codec.seal_(payload, _NO_COUNT, measured.unusable.long().view(()), tensors, _NO_SCALE, terms)
        return payload, residual

    def mean_into_(
        self, flat: Tensor, code: ElementCode, payloads: Sequence[UInt8[Tensor, "nbytes"]], given: Each | None
    ) -> Int32[Tensor, "numbers"]:
        segments, ranks, threads = code.bounds.numel() - 1, len(payloads), torch.get_num_threads()
        words = self._codec.words_of(payloads)
        mean = flat if flat.dtype == FP32 else torch.empty(flat.numel(), dtype=FP32)
        codes = [payload[code.begin :] for payload in payloads]
        table = [payload[HEADER_BYTES : code.begin].clone().view(FP32) for payload in payloads]
        where = (codes, ranks, *_ranges(code.bounds, code.bits, code.unit))
        match code.form:
            case Form.TERNARY:
                assert given is not None
                unit = torch.ones(segments, dtype=FP32)
                how = ([unit] * ranks, thresholds_or(0.0, given), ranks, mean, threads)
                is_finite = self._library.dgc_mean_ternary(*where, *how)
            case Form.LEVELS:
                steps = [level_factors(own, code.levels, code.bits)[1] for own in table]
                is_finite = self._library.dgc_mean_levels(*where, steps, code.bits, ranks, mean, threads)
            case _:
                highs = table if given is None else [torch.ones_like(given)] * ranks
                lows = list(map(Tensor.neg, highs))
                options = (ranks, code.majority, mean, threads)
                is_finite = self._library.dgc_mean_signs(*where, lows, highs, None, *options)
        if mean is not flat:
            flat.copy_(mean)
            is_finite = bool(flat.isfinite().all())
        return torch.tensor([*words, is_finite], dtype=INT32)


class NativeBlocks(Native, Blocks):
    """Each is one pass: the scale of a block is found while the block is in the cache."""

    def encode_into_(self, v: Dense, bounds: Bounds, code: BlockCode, rows: Rows, kept: Dense | None) -> None:
        self._library.dgc_blocks_encode(v, *_in_rows(bounds, code, rows), kept, torch.get_num_threads())

    def add_encode_(
        self, g: Sequence[Tensor], v: Dense, bounds: Bounds, code: BlockCode, rows: Rows, kept: Dense | None
    ) -> Int64[Tensor, ""]:
        pieces = list(map(Tensor.float, g))
        made = (*_in_rows(bounds, code, rows), kept, torch.get_num_threads())
        first = self._library.dgc_blocks_add_encode(pieces, _checked(pieces, bounds), v, *made)
        return torch.full((), first, dtype=INT64)

    def add_sum_(self, rows: Sequence[Row], code: BlockCode, total: Padded) -> None:
        blocks, threads = total.numel() // code.size, torch.get_num_threads()
        self._library.dgc_blocks_add_sum(rows, len(rows), *_how(code), blocks, total, threads)

    def answer_(
        self,
        rows: Sequence[Row],
        code: BlockCode,
        served: Padded | None,
        real: Padded | None,
        chunk: Bounds,
        answer: BlockCode,
        row: Rows,
        kept: Padded | None,
    ) -> None:
        blocks = rows[0].numel() // code.row_bytes(1)
        assert (answer.size, answer.rotate, len(row)) == (code.size, code.rotate, 1), (answer, code, len(row))
        made = (answer.bits, row[0], kept, torch.get_num_threads())
        self._library.dgc_blocks_answer(rows, len(rows), *_how(code), blocks, served, real, *made)

    def decode(
        self, rows: Sequence[Row], bounds: Bounds, code: BlockCode, size: int, out: Sequence[Dense]
    ) -> None:
        each, where = rows[0].numel() // code.row_bytes(1), _ranges(bounds, code.bits, code.code_bytes)
        made = (out, _checked(out, bounds), torch.get_num_threads())
        self._library.dgc_blocks_decode(rows, *where, *_how(code), each, size, *made)


def _in_rows(bounds: Bounds, code: BlockCode, rows: Rows) -> tuple[Any, ...]:
    """Return where each segment's blocks are in rows, whose first is contiguous, as the library requires."""
    each = rows.shape[1] // code.row_bytes(1)
    return *_ranges(bounds, code.bits, code.code_bytes), *_how(code), each, rows[0], rows.stride(0)


def _checked(pieces: Sequence[Tensor], bounds: Bounds) -> int:
    """Return the number of pieces: one, or one for each segment."""
    assert len(pieces) in (1, bounds.numel() - 1), (len(pieces), bounds.numel())
    return len(pieces)


def _how(code: BlockCode) -> tuple[int, int, bool]:
    return code.size, code.bits, code.rotate


def _ranges(bounds: Bounds, width: int, unit: int) -> tuple[Tensor, Tensor, int]:
    return bounds, layout_of(bounds, width, unit).starts, bounds.numel() - 1


def _by_rank(codes: Sequence[Codes], *values: Sequence[Each]) -> tuple[Sequence[Codes], int]:
    assert all(len(each) == len(codes) for each in values), (len(codes), [*map(len, values)])
    return codes, len(codes)


def _random(seed: int | None) -> tuple[int, int, int]:
    return (0, 0, 0) if seed is None else (1, *keys_of(seed))


class NativeLowRank(Native, LowRank):
    """PowerSGD's work on its matrices before the first message is one pass: 12 bytes per element at any rank."""

    def __init__(self, kernels: NativeSelection) -> None:
        Native.__init__(self)
        LowRank.__init__(self, kernels)

    def subtract_(self, M: Matrices, U: Left, W: Right) -> None:
        sizes, threads = (*M.shape, U.contiguous(), W.contiguous(), U.shape[1]), torch.get_num_threads()
        self._library.dgc_lowrank(M, *sizes, None, 0, False, None, threads)

    def multiply(self, M: Matrices, X: Factor, even: bool, Y: Factor) -> None:
        product = (X.contiguous(), X.shape[1], even, Y)
        self._library.dgc_lowrank(M, *M.shape, None, None, 0, *product, torch.get_num_threads())

    def refresh_(
        self,
        v: Vector,
        batches: Batches,
        sent: SentUpdate | None,
        g: Tensors,
        X: Factors,
        even: bool,
        Y: Factors,
    ) -> Int64[Tensor, ""]:
        sizes, members = array("q"), 0
        factors: list[Tensor | None] = []
        for b, batch in enumerate(batches):
            if (len(batch.members), batch.numel) != (batch.count, batch.count * batch.n * batch.m):  # no matrices
                return super().refresh_(v, batches, sent, g, X, even, Y)
            U, W = (None, None) if sent is None else map(Tensor.contiguous, sent.products[b])
            R = 0 if U is None else U.shape[1]
            sizes.extend((batch.offset, batch.count, batch.n, batch.m, R, X[b].shape[1]))
            factors += (U, W, X[b].contiguous(), Y[b])
            members += batch.count
        begins = array("q", accumulate(map(Tensor.numel, g[members:]), initial=0))
        pieces, table = list(map(Tensor.float, g)), (sizes.tobytes(), len(batches), factors, even)
        errors = (False, None) if sent is None else (True, sent.rounding_errors)
        rests = (begins.tobytes(), len(begins) - 1, *errors, torch.get_num_threads())
        first = self._library.dgc_lowrank_first(v, v.numel(), *table, pieces, *rests)
        return torch.full((), first, dtype=torch.int64)

    def begin_(
        self,
        v: Vector,
        batches: Batches,
        sent: SentUpdate | None,
        g: Tensors,
        X: Factors,
        even: bool,
        cast: Cast,
    ) -> Message:
        if cast.limit is not None or cast.rest_limit is not None:
            return super().begin_(v, batches, sent, g, X, even, cast)
        shapes = [(batch.count, batch.rank, batch.m if even else batch.n) for batch in batches]
        sizes, last = list(map(prod, shapes)), batches[-1] if batches else None
        end = 0 if last is None else last.offset + last.count * last.n * last.m
        flat = torch.empty(sum(sizes), dtype=FP32)
        Y = list(map(Tensor.view, flat.split_with_sizes(sizes), shapes))
        first = self.refresh_(v, batches, sent, g, X, even, Y)
        return Message(Y, torch.cat([flat, v[end:]]), None, first)

    def unit_rows(self, xs: Factors) -> tuple[list[Tensor], list[bool]]:
        units, usable = list(map(torch.empty_like, xs)), []
        for x, unit in zip(xs, units, strict=True):
            B, r, d = x.shape
            usable.append(bool(self._library.dgc_unit_rows(x.contiguous(), B * r, d, unit)))
        return units, usable

    def outer(
        self,
        products: Products,
        out: Places,
        mean: Vector,
        rest: Tensors,
        largest: Int32[Tensor, "1"] | None = None,
    ) -> None:
        if rest and rest[0].dtype != FP32:
            super().outer([], [], mean, rest)
            rest = ()
        sizes = array("q")
        factors: list[Tensor] = []
        for U, W in products:
            factors += (U.contiguous(), W.contiguous())
            sizes.extend((*U.shape, W.shape[2]))
        places = [*chain.from_iterable(out), *rest]
        rests = (mean, array("q", map(Tensor.numel, rest)).tobytes(), len(rest))
        table = (factors, sizes.tobytes(), len(products), places)
        self._library.dgc_outer(*table, *rests, torch.get_num_threads())
