"""The bit-level work of payloads. `bits` is plain torch and defines the bits; `native_codec` makes the same.

As in `protocol`: nothing waits for the device, and every tensor has a size that the plan alone fixes. A payload
is little-endian. The first `count` entries of a selection count, the rest are zero.

Both index codes write the gaps g_j = i_j - i_(j-1) - 1 of the ascending indices, with i_(-1) = -1, in blocks of
elements, each block with a parameter of its own. A section is one stream of bits, least significant first:

    1 byte of parameter for each block of the capacity; then
    packed   of each block in turn, its gaps in `width` bits each, width = bits of the largest
    Rice     of each block in turn, the lowest b bits of each gap; behind all of these, in unary, the rest of each
             gap: g >> b zeros and a one

so that every field's place follows from sums over what stands before it, and all are coded at once.

Where the code of all elements is longer than its section, `kept` < count of them are sent, evenly spaced in the
order of indices: number floor(j count / kept) for j = 0 .. kept - 1.
"""

import struct
import sys
from dataclasses import dataclass
from math import inf
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float32, Int32, Int64, UInt8
from torch import Tensor

from dgc.kernels.protocol import Selection

assert sys.byteorder == "little", "payloads are little-endian, and so must this machine be"

HEADER_BYTES = 24
# A payload of zeros, as a transport that lost it would give, must not pass for an empty one.
CHECKSUM_OF_ZEROS = 0x44474331

PACKED_BLOCK = 128
RICE_BLOCK = 512
LARGEST_PARAMETER = 31  # bits; indices have no more
# Of 128: the shares of the elements that are tried in turn where a packed code is too long.
PACKED_SHARES = (127, 125, 122, 117, 109, 96)


@dataclass(frozen=True)
class PackedCode:
    """`sure`: so many elements fit into nbytes, wherever they are."""

    capacity: int
    numel: int
    nbytes: int
    sure: int


@dataclass(frozen=True)
class RiceCode:
    """Each block's b is the smallest of those with the shortest code, whose length, count (b + 1) + sum of g >> b,
    is convex in b.

    `parameter` is b*: coding all blocks with it is no shorter, and there an element left out saves b* bits at
    least, its b* low bits and its one, while merging two gaps adds at most one zero. So it is enough to leave out
    ceil((length with b* - room) / b*) elements. Where b* = 0, the room is the numel bits that are always enough.
    """

    capacity: int
    numel: int
    nbytes: int
    parameter: int


@dataclass(frozen=True)
class Terms:
    """What all ranks' payloads of a step must have in common. ratio: of the elements that are sent, at the time;
    form: a number of 32 bits for the format.
    """

    ratio: float
    form: int

    @property
    def words(self) -> tuple[int, int]:
        """In a header: an fp32 and a uint32, both as int32."""
        ratio, form = struct.unpack("<ii", struct.pack("<fI", self.ratio, self.form))
        return ratio, form


@dataclass(frozen=True, eq=False)
class Header:
    """What a payload says of itself; `sealed`: the checksum is that of its bytes."""

    count: Int32[Tensor, ""]
    number: Int32[Tensor, ""]
    scale: Float32[Tensor, ""]
    terms: tuple[Int32[Tensor, ""], Int32[Tensor, ""]]
    sealed: Bool[Tensor, ""]


@runtime_checkable
class Codec(Protocol):
    """Sections are parts of a payload, contiguous; those to be written are zero before.

    Decoding takes any bytes, any count and any indices, and never reads or writes outside. It says whether what it
    returns is sound: indices ascend and are below numel, values are finite. If not, it means nothing.
    """

    name: str

    def blank(self, nbytes: int, like: Tensor) -> UInt8[Tensor, "nbytes"]:
        """Zeros for a payload, a multiple of 8 bytes, on the device of a tensor."""
        ...

    def encode_plain(
        self,
        selection: Selection,
        dtypes: tuple[torch.dtype, torch.dtype],
        limit: float,
        first_nonfinite: Int64[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
        terms: Terms,
        nbytes: int,
    ) -> tuple[UInt8[Tensor, "nbytes"], Float32[Tensor, "capacity"]]:
        """A whole payload: `plain_encode_`, behind it `cast_encode_`, `seal_`; dtypes: of indices and of values.

        Returns (payload, the values that `cast_decode` will).
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
        """Write the header, its checksum last.

        It holds int32 count; int32 number, from 1, of the range with element `first_nonfinite`, 0 where that is
        the end; uint32 checksum; fp32 scale; the terms' fp32 ratio and uint32 form. Checksum: with the payload's
        int64 words w_i and its own field zero, s = sum of w_i (2i + 1) modulo 2**64; the two halves of s and
        CHECKSUM_OF_ZEROS, combined by xor.
        """
        ...

    def unseal(self, payload: UInt8[Tensor, "nbytes"]) -> Header: ...

    def plain_encode_(
        self, indices: Int32[Tensor, "capacity"], dtype: torch.dtype, section: UInt8[Tensor, "nbytes"]
    ) -> None:
        """Indices as they are, int32 or int64."""
        ...

    def plain_decode(
        self, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""], numel: int, dtype: torch.dtype
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """(indices, sound)"""
        ...

    def packed_encode_(
        self, selection: Selection, code: PackedCode, section: UInt8[Tensor, "nbytes"]
    ) -> Selection:
        """Returns what is sent: all of it, or as much as fits."""
        ...

    def packed_decode(
        self, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""], code: PackedCode
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """(indices, sound)"""
        ...

    def rice_encode_(self, selection: Selection, code: RiceCode, section: UInt8[Tensor, "nbytes"]) -> Selection:
        """Returns what is sent: all of it, or as much as fits."""
        ...

    def rice_decode(
        self, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""], code: RiceCode
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """(indices, sound)"""
        ...

    def cast_encode_(
        self,
        values: Float32[Tensor, "capacity"],
        dtype: torch.dtype,
        section: UInt8[Tensor, "nbytes"],
        limit: float = inf,
    ) -> tuple[Float32[Tensor, "capacity"], Float32[Tensor, ""]]:
        """Section: value / scale as fp32, fp16 or bf16, rounded to nearest, ties to even. scale: 1 for fp32, else
        the power of two in 2**-126 .. 2**126 that puts the largest magnitude into [2**14, 2**15), or as near as
        it can; 1 where all are zero. Magnitudes are cut to `limit` before: rounding must not lift one above fp32's
        range. What is not finite has no part in the scale and becomes NaN, which `cast_decode` calls unsound.
        Returns (what that will, scale).
        """
        ...

    def cast_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        count: Int32[Tensor, ""],
        dtype: torch.dtype,
        scale: Float32[Tensor, ""],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """fp32, fp16 or bf16 times scale. Returns (values, sound)."""
        ...

    def sign_encode_(
        self, selection: Selection, bounds: Int64[Tensor, "bounds"], section: UInt8[Tensor, "nbytes"]
    ) -> Float32[Tensor, "capacity"]:
        """Section: fp32 mean magnitude of each range, added up in fp64 in the order of indices, 0 where nothing is
        sent; then a bit per element, set where it is negative. Returns the values that `sign_decode` will.
        """
        ...

    def sign_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        count: Int32[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """(values, sound)"""
        ...

    def int8_encode_(
        self, selection: Selection, bounds: Int64[Tensor, "bounds"], section: UInt8[Tensor, "nbytes"]
    ) -> Float32[Tensor, "capacity"]:
        """Section: fp32 scale of each range, its largest magnitude / 127 but at least 2**-149; then an int8 per
        element, value / scale rounded to nearest, ties to even. Returns the values that `int8_decode` will.
        """
        ...

    def int8_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        count: Int32[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """(values, sound)"""
        ...


def block_count(capacity: int, block: int) -> int:
    return -(-capacity // block)
