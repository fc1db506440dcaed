"""The interfaces of the payload codec and of the decoder of means. `reference` defines the bits.

No operation waits for the device. The size of every tensor depends only on the plan. A payload is little-endian.
The first `count` entries of a selection are valid, the rest are zero.

Both index codes write the gaps g_j = i_j - i_(j-1) - 1 of the ascending indices, with i_(-1) = -1, in blocks. Each
block has its own parameter. A section is one stream of bits, least significant first:

    1 byte of parameter for each block of the capacity, then
    packed   block by block, each gap in `width` bits; width = bits of the block's largest gap
    Rice     block by block, the lowest b bits of each gap; after all blocks the rest of each gap in unary:
             g >> b zeros and a one

The position of each field follows from sums over the preceding ones, so all fields can be coded in parallel.

If the code of all elements is longer than its section, only `kept` < count elements are sent. They are evenly
spaced in the order of indices: element floor(j count / kept) for j = 0 .. kept - 1.
"""

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import inf
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float32, Int32, Int64, UInt8
from torch import Tensor

from dgc.kernels.selection.protocol import Merged, SparseVector

assert sys.byteorder == "little", "payloads are little-endian, and so must this machine be"

HEADER_BYTES = 24
# A failing transport may deliver zeros. The constant makes the checksum of a payload of zeros wrong.
CHECKSUM_OF_ZEROS = 0x44474331

PACKED_BLOCK = 128
RICE_BLOCK = 512
LARGEST_PARAMETER = 31  # bits; indices have no more
# Fractions of the elements, in 128ths, tried in turn if a packed code is too long.
PACKED_SHARES = (127, 125, 122, 117, 109, 96)

# Numbers of a decoded payload: count, number, ratio, form, sealed, indices valid, values valid.
WORDS = 7


@dataclass(frozen=True)
class PackedCode:
    """Plan of a packed code. `sure` elements fit into `nbytes` bytes for any indices."""

    capacity: int
    numel: int
    nbytes: int
    sure: int


@dataclass(frozen=True)
class RiceCode:
    """Plan of a Rice code.

    A block's code has count (b + 1) + sum of g >> b bits, which is convex in b. Each block uses the smallest b of
    the shortest code. `parameter` is b*. Coding all blocks with b* is never shorter. With b*, an omitted element
    saves at least b* bits: b* low bits and a one, less at most one zero for the merged gaps. It therefore suffices
    to omit ceil((length with b* - room) / b*) elements. If b* = 0, the room is numel bits, which is always enough.
    """

    capacity: int
    numel: int
    nbytes: int
    parameter: int


@dataclass(frozen=True)
class Terms:
    """Header fields that must be equal in all ranks' payloads of a step.

    Attributes:
        ratio: Current ratio of the elements sent.
        form: 32-bit number of the format.
    """

    ratio: float
    form: int

    @cached_property
    def words(self) -> tuple[int, int]:
        """The words of the header: an fp32 and a uint32, both as int32."""
        ratio, form = struct.unpack("<ii", struct.pack("<fI", self.ratio, self.form))
        return ratio, form


@dataclass(frozen=True, eq=False)
class Header:
    """The header of a payload. `sealed`: the checksum matches the bytes."""

    count: Int32[Tensor, ""]
    number: Int32[Tensor, ""]
    scale: Float32[Tensor, ""]
    terms: tuple[Int32[Tensor, ""], Int32[Tensor, ""]]
    sealed: Bool[Tensor, ""]


@runtime_checkable
class Codec(Protocol):
    """Encodes and decodes sections, which are contiguous parts of a payload. Sections are zero before encoding.

    Decoding accepts any bytes, count and indices, and never accesses memory outside its tensors. It also returns
    `valid`: indices ascend and are below numel, values are finite. If it is False, the content is meaningless.
    """

    name: str

    def blank(self, nbytes: int, like: Tensor) -> UInt8[Tensor, "nbytes"]:
        """Return a payload of zeros on the device of `like`. nbytes must be a multiple of 8."""
        ...

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
        """Encode a whole payload by `plain_encode_`, `cast_encode_` and `seal_`. dtypes: of indices, of values.

        Returns (payload, the values that `cast_decode` will return).
        """
        ...

    def seal_(
        self,
        payload: UInt8[Tensor, "nbytes"],
        count: Int32[Tensor, ""],
        first_nonfinite: Int64[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
        scale: Float32[Tensor, ""],
        terms: Terms,
    ) -> None:
        """Write the header, with the checksum last.

        Fields: int32 count; int32 number, from 1, of the segment with element `first_nonfinite`, or 0 if that is
        the end; uint32 checksum; fp32 scale; the terms' fp32 ratio and uint32 form. The checksum is the xor of the
        two halves of s and CHECKSUM_OF_ZEROS, where s is the sum of w_i (2i + 1) modulo 2**64 over the payload's
        int64 words w_i, with the checksum field zero.
        """
        ...

    def unseal(self, payload: UInt8[Tensor, "nbytes"]) -> Header: ...

    def plain_encode_(
        self, indices: Int32[Tensor, "capacity"], dtype: torch.dtype, section: UInt8[Tensor, "nbytes"]
    ) -> None:
        """Write the indices uncompressed, as int32 or int64."""
        ...

    def plain_decode(
        self, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""], numel: int, dtype: torch.dtype
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """Return (indices, valid)."""
        ...

    def packed_encode_(
        self, selection: SparseVector, code: PackedCode, section: UInt8[Tensor, "nbytes"]
    ) -> SparseVector:
        """Encode the indices. Returns the sent part of the selection: all of it, or as much as fits."""
        ...

    def packed_decode(
        self, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""], code: PackedCode
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """Return (indices, valid)."""
        ...

    def rice_encode_(
        self, selection: SparseVector, code: RiceCode, section: UInt8[Tensor, "nbytes"]
    ) -> SparseVector:
        """Encode the indices. Returns the sent part of the selection: all of it, or as much as fits."""
        ...

    def rice_decode(
        self, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""], code: RiceCode
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """Return (indices, valid)."""
        ...

    def cast_encode_(
        self,
        values: Float32[Tensor, "capacity"],
        dtype: torch.dtype,
        section: UInt8[Tensor, "nbytes"],
        limit: float = inf,
    ) -> tuple[Float32[Tensor, "capacity"], Float32[Tensor, ""]]:
        """Write value / scale as fp32, fp16 or bf16, rounded to nearest, ties to even.

        scale is 1 for fp32 or if all values are zero. Else it is the power of two in 2**-126 .. 2**126 that puts
        the largest magnitude into [2**14, 2**15), or as near as possible. Magnitudes are first limited to `limit`,
        so that rounding cannot exceed fp32's range. Non-finite values do not affect the scale and become NaN,
        which is not valid. Returns (the values that `cast_decode` will return, scale).
        """
        ...

    def cast_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        count: Int32[Tensor, ""],
        dtype: torch.dtype,
        scale: Float32[Tensor, ""],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """Read fp32, fp16 or bf16 times scale. Returns (values, valid)."""
        ...

    def sign_encode_(
        self, selection: SparseVector, bounds: Int64[Tensor, "bounds"], section: UInt8[Tensor, "nbytes"]
    ) -> Float32[Tensor, "capacity"]:
        """Write an fp32 mean magnitude per segment, then one bit per element, set for negative values.

        Means are summed in fp64 in the order of indices, and 0 if nothing is sent. Returns the values that
        `sign_decode` will return.
        """
        ...

    def sign_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        count: Int32[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """Return (values, valid)."""
        ...

    def int8_encode_(
        self, selection: SparseVector, bounds: Int64[Tensor, "bounds"], section: UInt8[Tensor, "nbytes"]
    ) -> Float32[Tensor, "capacity"]:
        """Write an fp32 scale per segment, then value / scale as one int8 per element, rounded to nearest even.

        A scale is the largest magnitude / 127, but at least 2**-149. Returns the values that `int8_decode` will
        return.
        """
        ...

    def int8_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        count: Int32[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """Return (values, valid)."""
        ...

    def two_bit_encode_(
        self, selection: SparseVector, bounds: Int64[Tensor, "bounds"], section: UInt8[Tensor, "nbytes"], r: float
    ) -> Float32[Tensor, "capacity"]:
        """Write a table of 4 fp32 numbers per segment, then the number of its bin, 0 to 3, in 2 bits per element.

        m and s are the mean and the standard deviation of a segment's values, with their number as divisor. With
        w = r s / 4, the bins meet at m - w, m and m + w, and each includes its lower end. A table has the mean of
        each bin, or 0. Element j is in byte j // 4, in the bits from 2 (j % 4) on. All is computed in fp64, with
        sums in the order of indices. Returns the values that `two_bit_decode` will return.
        """
        ...

    def two_bit_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        count: Int32[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """Return (values, valid)."""
        ...


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


def block_count(capacity: int, block: int) -> int:
    return -(-capacity // block)
