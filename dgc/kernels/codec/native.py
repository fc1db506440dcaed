"""The payload codec in C++ for CPU tensors, on one thread, and the decoder of means, on all threads.

The codec gives the same bits as `reference`. The decoder takes one call for the payloads of all ranks.
"""

from collections.abc import Sequence
from ctypes import c_double, c_float, c_int, c_int64, c_uint32, c_void_p, memset
from math import inf
from typing import Any

import torch
from jaxtyping import Bool, Float32, Int32, Int64, UInt8
from torch import Tensor

from dgc.kernels.codec.protocol import HEADER_BYTES, WORDS, Decoded, Header, PackedCode, RiceCode, Sections, Terms
from dgc.kernels.library import (
    FP32,
    INT32,
    INT64,
    UINT8,
    Signatures,
    declare,
    load,
    pointer,
    pointers,
)
from dgc.kernels.selection.protocol import Merged, SparseVector

_SPARSE = (c_void_p, c_void_p, c_int64, c_void_p)
_TERMS = (c_float, c_uint32)
_ENCODE = (c_int64, (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64))
_DECODE = (c_int, (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p))
_ENCODE_VALUES = (None, (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p))
_DECODE_VALUES = (c_int, (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p))
_SIGNATURES: Signatures = {
    "dgc_encode_plain": (
        None,
        (*_SPARSE, c_int64, c_int, c_float, c_void_p, c_void_p, c_int64, *_TERMS, c_void_p, c_int64, c_void_p),
    ),
    "dgc_seal": (None, (c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, *_TERMS)),
    "dgc_sealed": (c_int, (c_void_p, c_int64)),
    "dgc_thin": (None, (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p)),
    "dgc_plain_encode": (None, (c_void_p, c_int64, c_int64, c_void_p)),
    "dgc_plain_decode": _DECODE,
    "dgc_packed_encode": _ENCODE,
    "dgc_packed_decode": _DECODE,
    "dgc_rice_encode": _ENCODE,
    "dgc_rice_decode": _DECODE,
    "dgc_cast_encode": (None, (c_void_p, c_int64, c_int, c_float, c_void_p, c_void_p, c_void_p)),
    "dgc_cast_decode": (c_int, (c_void_p, c_int64, c_int, c_float, c_void_p)),
    "dgc_sign_encode": _ENCODE_VALUES,
    "dgc_sign_decode": _DECODE_VALUES,
    "dgc_int8_encode": _ENCODE_VALUES,
    "dgc_int8_decode": _DECODE_VALUES,
    "dgc_two_bit_encode": (None, (*_ENCODE_VALUES[1], c_double)),
    "dgc_two_bit_decode": _DECODE_VALUES,
    "dgc_decode_mean": (
        c_int64,
        (
            *(c_void_p, c_int, c_int64, c_int64, c_int64, c_int, c_int64, c_int, c_void_p, c_int64, c_float),
            *(c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_int),
        ),
    ),
}

INVALID = -1  # returned by dgc_decode_mean

_FLAGS = (torch.tensor(False, dtype=torch.bool), torch.tensor(True, dtype=torch.bool))
# The numbers of cpp/codec/values.cpp.
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class NativeCodec:
    """Implements `dgc.kernels.codec.protocol.Codec` for contiguous CPU tensors.

    Raises:
        KernelsMissing: See `dgc.kernels.library.load`.
    """

    name = "native"

    def __init__(self) -> None:
        self._library = load()
        declare(self._library, _SIGNATURES)

    def blank(self, nbytes: int, like: Tensor) -> UInt8[Tensor, "nbytes"]:
        payload = torch.empty(nbytes, dtype=UINT8)
        memset(pointer(payload, UINT8), 0, nbytes)
        return payload

    def encode_plain(
        self,
        selection: SparseVector,
        dtypes: tuple[torch.dtype, torch.dtype],
        limit: float,
        first_nonfinite: Int64[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
        terms: Terms,
        nbytes: int,
    ) -> tuple[UInt8[Tensor, "nbytes"], Float32[Tensor, "capacity"]]:
        capacity = selection.values.numel()
        payload, decoded = torch.empty(nbytes, dtype=UINT8), torch.empty(capacity, dtype=FP32)
        self._library.dgc_encode_plain(
            pointer(selection.indices, INT32),
            pointer(selection.values, FP32),
            capacity,
            pointer(selection.count, INT32),
            dtypes[0].itemsize,
            _DTYPES[dtypes[1]],
            limit,
            pointer(first_nonfinite, INT64),
            pointer(bounds, INT64),
            bounds.numel(),
            terms.ratio,
            terms.form,
            pointer(payload, UINT8),
            nbytes,
            pointer(decoded, FP32),
        )
        return payload, decoded

    def seal_(
        self,
        payload: UInt8[Tensor, "nbytes"],
        count: Int32[Tensor, ""],
        first_nonfinite: Int64[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
        scale: Float32[Tensor, ""],
        terms: Terms,
    ) -> None:
        found = (pointer(count, INT32), pointer(first_nonfinite, INT64))
        arguments = (*found, pointer(bounds, INT64), bounds.numel(), pointer(scale, FP32))
        self._library.dgc_seal(pointer(payload, UINT8), payload.numel(), *arguments, terms.ratio, terms.form)

    def unseal(self, payload: UInt8[Tensor, "nbytes"]) -> Header:
        count, number, _, scale, ratio, form = payload[:HEADER_BYTES].view(torch.int32).clone().unbind()
        sealed = self._library.dgc_sealed(pointer(payload, UINT8), payload.numel())
        return Header(count, number, scale.view(torch.float32), (ratio, form), _FLAGS[sealed])

    def plain_encode_(
        self, indices: Int32[Tensor, "capacity"], dtype: torch.dtype, section: UInt8[Tensor, "nbytes"]
    ) -> None:
        place = (indices.numel(), dtype.itemsize, pointer(section, UINT8))
        self._library.dgc_plain_encode(pointer(indices, INT32), *place)

    def plain_decode(
        self, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""], numel: int, dtype: torch.dtype
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        capacity = section.numel() // dtype.itemsize
        return self._decode(self._library.dgc_plain_decode, section, count, capacity, numel)

    def packed_encode_(
        self, selection: SparseVector, code: PackedCode, section: UInt8[Tensor, "nbytes"]
    ) -> SparseVector:
        return self._encode_(self._library.dgc_packed_encode, selection, code.sure, section)

    def packed_decode(
        self, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""], code: PackedCode
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        return self._decode(self._library.dgc_packed_decode, section, count, code.capacity, code.numel)

    def rice_encode_(
        self, selection: SparseVector, code: RiceCode, section: UInt8[Tensor, "nbytes"]
    ) -> SparseVector:
        return self._encode_(self._library.dgc_rice_encode, selection, code.parameter, section)

    def rice_decode(
        self, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""], code: RiceCode
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        return self._decode(self._library.dgc_rice_decode, section, count, code.capacity, code.numel)

    def cast_encode_(
        self,
        values: Float32[Tensor, "capacity"],
        dtype: torch.dtype,
        section: UInt8[Tensor, "nbytes"],
        limit: float = inf,
    ) -> tuple[Float32[Tensor, "capacity"], Float32[Tensor, ""]]:
        decoded, scale = torch.empty(values.numel(), dtype=FP32), torch.empty((), dtype=FP32)
        places = (pointer(section, UINT8), pointer(decoded, FP32), pointer(scale, FP32))
        self._library.dgc_cast_encode(pointer(values, FP32), values.numel(), _DTYPES[dtype], limit, *places)
        return decoded, scale

    def cast_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        count: Int32[Tensor, ""],
        dtype: torch.dtype,
        scale: Float32[Tensor, ""],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        decoded = torch.zeros(section.numel() // dtype.itemsize, dtype=FP32)
        place = (_within(count, decoded), _DTYPES[dtype], scale.item(), pointer(decoded, FP32))
        return decoded, _FLAGS[self._library.dgc_cast_decode(pointer(section, UINT8), *place)]

    def sign_encode_(
        self, selection: SparseVector, bounds: Int64[Tensor, "bounds"], section: UInt8[Tensor, "nbytes"]
    ) -> Float32[Tensor, "capacity"]:
        return self._encode_values_(self._library.dgc_sign_encode, selection, bounds, section)

    def sign_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        count: Int32[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        return self._decode_values(self._library.dgc_sign_decode, section, indices, count, bounds)

    def int8_encode_(
        self, selection: SparseVector, bounds: Int64[Tensor, "bounds"], section: UInt8[Tensor, "nbytes"]
    ) -> Float32[Tensor, "capacity"]:
        return self._encode_values_(self._library.dgc_int8_encode, selection, bounds, section)

    def int8_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        count: Int32[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        return self._decode_values(self._library.dgc_int8_decode, section, indices, count, bounds)

    def two_bit_encode_(
        self, selection: SparseVector, bounds: Int64[Tensor, "bounds"], section: UInt8[Tensor, "nbytes"], r: float
    ) -> Float32[Tensor, "capacity"]:
        return self._encode_values_(self._library.dgc_two_bit_encode, selection, bounds, section, r)

    def two_bit_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        count: Int32[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        return self._decode_values(self._library.dgc_two_bit_decode, section, indices, count, bounds)

    def _encode_(self, encode: Any, selection: SparseVector, limit: int, section: Tensor) -> SparseVector:
        """Encode indices. `limit` is the code's rule for a selection that does not fit: `sure` or `parameter`."""
        place = (selection.indices.numel(), limit, pointer(section, UINT8), section.numel())
        count = int(selection.count)
        kept = encode(pointer(selection.indices, INT32), count, *place)
        if kept == count:
            return selection
        sent = self._thin(selection, count, kept)
        again = encode(pointer(sent.indices, INT32), kept, *place)
        assert again == kept, "fewer elements fit as well"
        return sent

    def _thin(self, selection: SparseVector, count: int, kept: int) -> SparseVector:
        indices, values = torch.zeros_like(selection.indices), torch.zeros_like(selection.values)
        old = (pointer(selection.indices, INT32), pointer(selection.values, FP32), count)
        self._library.dgc_thin(*old, kept, pointer(indices, INT32), pointer(values, FP32))
        return SparseVector(indices, values, torch.tensor(kept, dtype=INT32))

    def _decode(
        self, decode: Any, section: Tensor, count: Tensor, capacity: int, numel: int
    ) -> tuple[Tensor, Tensor]:
        indices = torch.zeros(capacity, dtype=INT32)
        place = (pointer(section, UINT8), section.numel(), count.item(), capacity, numel, pointer(indices, INT32))
        return indices, _FLAGS[decode(*place)]

    def _encode_values_(
        self, encode: Any, selection: SparseVector, bounds: Tensor, section: Tensor, *settings: float
    ) -> Tensor:
        decoded = torch.zeros_like(selection.values)
        entries = (pointer(selection.indices, INT32), pointer(selection.values, FP32), selection.count.item())
        places = (pointer(section, UINT8), pointer(decoded, FP32))
        encode(*entries, pointer(bounds, INT64), bounds.numel() - 1, *places, *settings)
        return decoded

    def _decode_values(
        self, decode: Any, section: Tensor, indices: Tensor, count: Tensor, bounds: Tensor
    ) -> tuple[Tensor, Tensor]:
        decoded = torch.zeros(indices.numel(), dtype=FP32)
        entries = (pointer(indices, INT32), _within(count, decoded), pointer(bounds, INT64), bounds.numel() - 1)
        return decoded, _FLAGS[decode(*entries, pointer(section, UINT8), pointer(decoded, FP32))]


def _within(count: Tensor, entries: Tensor) -> int:
    """Return the count, clamped to a safe value. Decoding the indices reports an invalid count."""
    return min(max(0, int(count)), entries.numel())


class NativeMeanDecoder:
    """Implements `dgc.kernels.codec.protocol.MeanDecoder` for CPU tensors on torch.get_num_threads() threads.

    The result has the bits of decoding each payload by itself and of `merge_mean`: each element is added in the
    order of the payloads. Each payload is decoded by one thread. Then each thread adds all entries of its own part
    of the bucket, so the bits do not depend on the number of threads.

    Raises:
        KernelsMissing: See `dgc.kernels.library.load`.
    """

    def __init__(self) -> None:
        self._library = load()
        declare(self._library, _SIGNATURES)

    def mean(
        self,
        payloads: Sequence[UInt8[Tensor, "nbytes"]],
        sections: Sections,
        bounds: Int64[Tensor, "bounds"],
        size: int,
    ) -> tuple[Decoded, Merged]:
        most = len(payloads) * sections.capacity
        indices, values = torch.empty(most, dtype=INT64), torch.empty(most, dtype=FP32)
        words, found = self._decode(payloads, sections, bounds, size, None, indices, values)
        count = max(0, found)
        merged = Merged(indices[:count], values[:count], torch.tensor(count, dtype=INT32))
        return Decoded(words, found != INVALID, True), merged

    def mean_into_(
        self,
        dense: Float32[Tensor, "n"],
        payloads: Sequence[UInt8[Tensor, "nbytes"]],
        sections: Sections,
        bounds: Int64[Tensor, "bounds"],
        size: int,
    ) -> Decoded:
        words, found = self._decode(payloads, sections, bounds, size, dense, None, None)
        return Decoded(words, found != INVALID, found == 1)

    def _decode(
        self,
        payloads: Sequence[Tensor],
        sections: Sections,
        bounds: Tensor,
        size: int,
        dense: Tensor | None,
        indices: Tensor | None,
        values: Tensor | None,
    ) -> tuple[Tensor, int]:
        assert dense is None or dense.numel() == sections.numel
        words = torch.empty(WORDS * len(payloads), dtype=INT32)
        found: int = self._library.dgc_decode_mean(
            pointers(payloads, UINT8),
            len(payloads),
            sections.nbytes,
            sections.capacity,
            sections.numel,
            sections.indices,
            sections.index_bytes,
            sections.values,
            pointer(bounds, INT64),
            bounds.numel() - 1,
            size,
            pointer(words, INT32),
            dense is not None,  # the address of an empty tensor is null
            pointer(dense, FP32),
            pointer(indices, INT64),
            pointer(values, FP32),
            torch.get_num_threads(),
        )
        return words, found
