"""The codec of sparse payloads in C++."""

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_double, c_float, c_int, c_int32, c_int64, c_uint32, memset
from math import inf
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float32, Int32, Int64, UInt8
from torch import Tensor

from dgc.kernels.library import EACH_U8, F32, FP32, I32, I64, INT32, INT64, U8, UINT8, Native, Signatures, address
from dgc.kernels.payload import (
    CASTS,
    HEADER_BYTES,
    PLAIN,
    TABLES,
    WORDS,
    Codec,
    Header,
    IndexCode,
    IndexKind,
    MeanDecoder,
    PayloadLayout,
    Terms,
    ValueKind,
)
from dgc.kernels.selection import Merged, SparseVector

_TERMS = (c_float, c_uint32)
_ENCODE = (c_int64, (I32, c_int64, c_int64, c_int64, U8, c_int64))
_DECODE = (c_int, (U8, c_int64, c_int64, c_int64, c_int64, I32))

_ENCODE_VALUES = (None, (I32, F32, c_int64, I64, c_int64, U8, F32))

_DECODE_VALUES = (c_int, (I32, c_int64, I64, c_int64, U8, F32))

_LAYOUT = (c_int64, c_int64, c_int64, c_int, c_int64, c_int)
_RANKS = (EACH_U8, c_int)

SIGNATURES: Signatures = {
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
}

INVALID = -1  # returned by dgc_decode_mean

_FLAGS = (torch.tensor(False, dtype=torch.bool), torch.tensor(True, dtype=torch.bool))

K = TypeVar("K")


class NativeCodec(Native, Codec):
    """The codec. The tensors of two-bit values are shared out to threads."""

    signatures = SIGNATURES

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

    def encodes(self, layout: PayloadLayout) -> bool:
        return layout.indices.kind in PLAIN and layout.values is not None and layout.values not in TABLES

    def encode(
        self,
        selection: SparseVector,
        layout: PayloadLayout,
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
    """Decodes the payloads of all ranks and adds them, in one call, if their `PayloadLayout` names both codes.

    Any bytes are safe, but payloads must have the planned size. The result has the bits of decoding each payload
    by itself and of `merge_mean`: each element is added in the order of the payloads. Each payload is decoded by
    one thread. Then each thread adds all entries of its own part of the bucket.
    """

    signatures = SIGNATURES

    def takes(self, layout: PayloadLayout) -> bool:
        return layout.values is not None

    def mean(
        self,
        payloads: Sequence[UInt8[Tensor, "nbytes"]],
        layout: PayloadLayout,
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
        layout: PayloadLayout,
        bounds: Int64[Tensor, "bounds"],
        size: int,
    ) -> Int32[Tensor, "numbers"]:
        numbers, found = self._decode(payloads, layout, bounds, size, dense, None, None)
        numbers[-1] = found == 1
        return numbers

    def _decode(
        self,
        payloads: Sequence[Tensor],
        layout: PayloadLayout,
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
