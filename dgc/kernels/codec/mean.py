"""Decoding of the payloads of all ranks together with their mean, in one native call per bucket.

The result has the bits of decoding each payload by itself and of `merge_mean`: each element is added in the order
of the payloads. Each payload is decoded by one thread. Then each thread adds all entries of its own part of the
bucket, so the bits do not depend on the number of threads.
"""

from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float32, Int32, Int64, UInt8
from torch import Tensor

from dgc.kernels.library import (
    FP32,
    INT32,
    INT64,
    UINT8,
    Signatures,
    declare,
    load,
    pointer,
    pointer_or_none,
    pointers,
)
from dgc.kernels.selection.protocol import Merged

WORDS = 7  # per payload: count, number, ratio, form, sealed, indices valid, values valid
INVALID = -1
_SIGNATURES: Signatures = {
    "dgc_decode_mean": (
        c_int64,
        (
            *(c_void_p, c_int, c_int64, c_int64, c_int64, c_int, c_int64, c_int, c_void_p, c_int64, c_float),
            *(c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_int),
        ),
    ),
}


class IndexKind(IntEnum):
    """The numbers of cpp/decode/decode.cpp."""

    INT32, INT64, PACKED, RICE = range(4)


class ValueKind(IntEnum):
    """The numbers of cpp/decode/decode.cpp."""

    FP32, FP16, BF16, SIGN, INT8, TWO_BITS = range(6)


@dataclass(frozen=True)
class Sections:
    """The sections of a payload of `nbytes` bytes for `capacity` of `numel` elements."""

    indices: IndexKind
    index_bytes: int
    values: ValueKind
    capacity: int
    numel: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Decoded:
    """What a decoder has found.

    Attributes:
        words: WORDS numbers per payload, as int32: its count, the number of its first tensor that is not finite,
            the two words of its terms, and whether its checksum, indices and values are valid.
        valid: Whether checksums, indices and values of all payloads are valid. If not, there is no mean.
        finite: Whether the mean is finite. A sparse mean is not checked.
    """

    words: Int32[Tensor, "words"]
    valid: bool
    finite: bool


@runtime_checkable
class MeanDecoder(Protocol):
    """Decodes payloads that have `Sections`. Any bytes are safe. Payloads must have the planned size."""

    def mean(
        self,
        payloads: Sequence[UInt8[Tensor, "nbytes"]],
        sections: Sections,
        bounds: Int64[Tensor, "bounds"],
        size: int,
    ) -> tuple[Decoded, Merged]:
        """Return the mean over `size` ranks, as `merge_mean` does."""
        ...

    def mean_into_(
        self,
        dense: Float32[Tensor, "n"],
        payloads: Sequence[UInt8[Tensor, "nbytes"]],
        sections: Sections,
        bounds: Int64[Tensor, "bounds"],
        size: int,
    ) -> Decoded:
        """Write the mean over `size` ranks, with zeros where no rank has sent an element."""
        ...


class NativeMeanDecoder:
    """Implements `MeanDecoder` for CPU tensors on torch.get_num_threads() threads.

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
            pointer_or_none(dense, FP32),
            pointer_or_none(indices, INT64),
            pointer_or_none(values, FP32),
            torch.get_num_threads(),
        )
        return words, found
