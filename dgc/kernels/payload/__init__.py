"""The payload codec. Plain torch defines every bit on any device, and does not wait for it.

The size of every tensor depends only on the plan. A payload is little-endian. The first `count` entries of a
selection are valid, the rest are zero.

Packed and Rice codes write the gaps g_j = i_j - i_(j-1) - 1 of the ascending indices, with i_(-1) = -1, in blocks.
Each block has its own parameter. A section is one stream of bits, least significant first:

    1 byte of parameter for each block of the capacity, then
    packed   block by block, each gap in `width` bits; width = bits of the block's largest gap
    Rice     block by block, the lowest b bits of each gap; after all blocks the rest of each gap in unary:
             g >> b zeros and a one

The position of each field follows from sums over the preceding ones, so all fields can be coded in parallel. In
torch a stream is an int64 tensor with 32 bits in each word. A field of up to 31 bits then spans at most two words,
and shifting it into place cannot overflow. Fields are disjoint, so adding them to the words equals a bitwise or.
Two spare words after the section avoid special cases for the last fields.

If the code of all elements is longer than its section, only `kept` < count elements are sent. They are evenly
spaced in the order of indices: element floor(j count / kept) for j = 0 .. kept - 1.
"""

import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from math import inf, nan
from typing import Any

import torch
from jaxtyping import Bool, Float32, Float64, Int32, Int64, UInt8
from torch import Tensor

from dgc.kernels.selection import SparseVector

assert sys.byteorder == "little", "payloads are little-endian, and so must this machine be"

HEADER_BYTES = 24
# A failing transport may deliver zeros. The constant makes the checksum of a payload of zeros wrong.
CHECKSUM_OF_ZEROS = 0x44474331

LARGEST_PARAMETER = 31  # bits; indices have no more
# Fractions of the elements, in 128ths, tried in turn if a packed code is too long.
PACKED_SHARES = (127, 125, 122, 117, 109, 96)

# Numbers of a decoded payload, as int32: count, number, ratio, form, sealed, indices valid, values valid.
WORDS = 7

CHUNK_BITS = 12
CHUNK = 1 << CHUNK_BITS

LOW = 0xFFFFFFFF
SPARE_WORDS = 2
SMALLEST = 2.0**-149  # of fp32
INFINITE = 0x7F800000  # bits of the smallest magnitude that is not finite
LARGEST_EXPONENT = 15  # scaled values stay below 2**15, half of fp16's range


class IndexKind(IntEnum):
    """Codes of indices, with the numbers of cpp/decode/decode.cpp."""

    INT32, INT64, PACKED, RICE, CHUNKS = range(5)


class ValueKind(IntEnum):
    """Codes of values, with the numbers of cpp/decode/decode.cpp and cpp/codec/values.cpp."""

    FP32, FP16, BF16, SIGN, INT8, TWO_BITS = range(6)


PLAIN = {IndexKind.INT32: torch.int32, IndexKind.INT64: torch.int64}
BLOCKS = {IndexKind.PACKED: 128, IndexKind.RICE: 512}  # gaps
CASTS = (torch.float32, torch.float16, torch.bfloat16)  # by ValueKind
# (fp32 numbers per segment, bits per element)
TABLES = {ValueKind.SIGN: (1, 1), ValueKind.INT8: (1, 8), ValueKind.TWO_BITS: (4, 2)}


@dataclass(frozen=True)
class IndexCode:
    """A section of `nbytes` bytes, a multiple of 4, for the indices of `capacity` of `numel` elements.

    A block's Rice code has count (b + 1) + sum of g >> b bits, which is convex in b. Each block uses the smallest
    b of the shortest code. Coding all blocks with the planned parameter b* is never shorter. With b*, an omitted
    element saves at least b* bits: b* low bits and a one, less at most one zero for the merged gaps. It therefore
    suffices to omit ceil((length with b* - room) / b*) elements. If b* = 0, the room is numel bits, which is
    always enough.

    Attributes:
        kind: The code.
        parameter: PACKED: number of elements that fit for any indices. RICE: b*. CHUNKS: number of chunks.
    """

    kind: IndexKind
    capacity: int
    numel: int
    nbytes: int
    parameter: int = 0


@dataclass(frozen=True)
class PayloadLayout:
    """The sections of a payload of `nbytes` bytes. values: their code, or None if only their format knows it."""

    indices: IndexCode
    values: ValueKind | None
    index_bytes: slice
    value_bytes: slice
    nbytes: int


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


class Codec:
    """Encodes and decodes sections, which are contiguous parts of a payload. Sections are zero before encoding.

    Decoding accepts any bytes, count and indices, and never accesses memory outside its tensors. It also returns
    `valid`: indices ascend and are below numel, values are finite. If it is False, the content is meaningless.
    """

    def blank(self, nbytes: int, like: Tensor) -> UInt8[Tensor, "nbytes"]:
        """Return a payload of zeros on the device of `like`. nbytes must be a multiple of 8."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=like.device)

    def encodes(self, layout: PayloadLayout) -> bool:
        """Whether `encode` takes such payloads."""
        return False

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
        """Encode a whole payload, as the methods below do one after the other.

        Args:
            limit: The limit of `cast_encode_`, or of the magnitudes that `table_encode_` is given.
            r: Parameter of `table_encode_`.
            first_nonfinite: Of `seal_`, with `tensors` as its bounds.
            bounds: Bounds of the segments of `table_encode_`.

        Returns:
            (payload, the part that is sent with the values that a receiver decodes, its own values).
        """
        raise NotImplementedError(f"{type(self).__name__} encodes section by section")

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
        header = payload[:HEADER_BYTES].view(torch.int32)
        header[0] = count
        header[1] = torch.searchsorted(bounds, first_nonfinite, right=True) % bounds.numel()
        header[2] = 0
        header[3] = scale.view(torch.int32)
        header[4], header[5] = terms.words
        header[2] = checksum(payload).view(1).view(torch.int32)[0]

    def seal_rows_(
        self,
        payloads: UInt8[Tensor, "rows nbytes"],
        count: Int32[Tensor, ""],
        first_nonfinite: Int64[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
        scale: Float32[Tensor, ""],
        terms: Terms,
    ) -> None:
        """`seal_` each row."""
        for payload in payloads:
            self.seal_(payload, count, first_nonfinite, bounds, scale, terms)

    def words(self, payload: UInt8[Tensor, "nbytes"]) -> Sequence[Any]:
        """Return number, sealed, count and terms of the header: numbers, or scalars on the payload's device."""
        header = self.unseal(payload)
        return header.number, header.sealed, header.count, *header.terms

    def words_of(self, payloads: Sequence[UInt8[Tensor, "nbytes"]]) -> Sequence[Any] | Int32[Tensor, "words"]:
        """Return the `words` of several payloads, one after the other."""
        return [word for payload in payloads for word in self.words(payload)]

    def unseal(self, payload: UInt8[Tensor, "nbytes"]) -> Header:
        """Read the header."""
        count, number, stored, scale, *terms = payload[:HEADER_BYTES].view(torch.int32).clone().unbind()
        stored = stored.long() & LOW
        sealed = checksum(payload, stored) == stored
        return Header(count, number, scale.view(torch.float32), (terms[0], terms[1]), sealed)

    def indices_encode_(
        self, selection: SparseVector, code: IndexCode, section: UInt8[Tensor, "nbytes"]
    ) -> SparseVector:
        """Write the indices. Returns the sent part of the selection: all of it, or as much as fits."""
        if code.kind == IndexKind.CHUNKS:
            return chunks_encode_(selection, code, section)
        if code.kind in PLAIN:
            section.view(PLAIN[code.kind]).copy_(selection.indices)
            return selection
        is_rice = code.kind == IndexKind.RICE
        sent = thin(selection, rice_kept(selection, code) if is_rice else packed_kept(selection, code))
        found = gaps_of(sent.indices, sent.count, BLOCKS[code.kind])
        parameters = rice_parameters(found) if is_rice else bit_length(found.gaps.amax(1))
        words = torch.zeros(section.numel() // 4 + SPARE_WORDS, dtype=torch.int64, device=section.device)
        at, end = places_of(parameters, found.counts, BLOCKS[code.kind])
        low = found.gaps & (1 << parameters.unsqueeze(1)) - 1
        add_fields_(words, torch.where(found.is_valid, at, 0).view(-1), low.view(-1))
        if is_rice:
            ones = end + ((found.gaps >> parameters.unsqueeze(1)) + 1).view(-1).cumsum(0) - 1
            is_valid = found.is_valid.view(-1)
            add_fields_(words, torch.where(is_valid, ones, 0), is_valid.long())
        section.view(torch.int32).copy_(words.view(torch.int32)[: section.numel() // 2 : 2])  # the low halves
        section[: parameters.numel()] = parameters
        return sent

    def indices_decode(
        self, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""], code: IndexCode
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """Return (indices, valid)."""
        if code.kind == IndexKind.CHUNKS:
            return chunks_decode(section, count, code)
        if code.kind in PLAIN:
            return ascending(section.view(PLAIN[code.kind]), count, code.numel)
        m = count.long().clamp(0, code.capacity)
        block = BLOCKS[code.kind]
        given = section[: block_count(code.capacity, block)].long()
        b = given.clamp(max=LARGEST_PARAMETER)
        at, end = places_of(b, counts_of(m, b.numel(), block), block)
        low = read_fields(section, at, b.unsqueeze(1)).view(-1)[: code.capacity]
        valid = (given <= LARGEST_PARAMETER).all() & (m == count)
        if code.kind == IndexKind.PACKED:
            return add_up(low, m, code.numel, valid & (end <= 8 * code.nbytes))
        places, found = ones_of(section, end, code.capacity)
        zeros = torch.diff(places, prepend=(end - 1).view(1)) - 1
        high = zeros << b.repeat_interleave(block)[: code.capacity]
        # a valid sum of gaps is at most numel: add_up rejects larger gaps, and clamps them before they overflow
        return add_up(high | low, m, code.numel, valid & (found >= m))

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
        values = torch.where(values.isfinite(), values.clamp(-limit, limit), nan)
        wire = section.view(dtype)
        if dtype == torch.float32:
            wire.copy_(values)
            return values, values.new_ones(())
        scale, inverse = power_of_two(values)
        wire.copy_(values * inverse)
        return wire.float() * scale, scale

    def cast_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        count: Int32[Tensor, ""],
        dtype: torch.dtype,
        scale: Float32[Tensor, ""],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """Read fp32, fp16 or bf16 times scale. Returns (values, valid)."""
        given = section.view(dtype)
        return first_values(given.float() * scale, count)

    def table_encode_(
        self,
        kind: ValueKind,
        selection: SparseVector,
        bounds: Int64[Tensor, "bounds"],
        section: UInt8[Tensor, "nbytes"],
        r: float = 0.0,
    ) -> Float32[Tensor, "capacity"]:
        """Write a table of fp32 numbers per segment, then a code per element. See TABLES for their sizes.

        SIGN: the mean magnitude, or 0 if nothing is sent; the code is 1 for negative values.

        INT8: a scale, the largest magnitude / 127 but at least 2**-149; the code is value / scale, rounded to
        nearest even.

        TWO_BITS: m and s are the mean and the standard deviation of a segment's values, with their number as
        divisor. With w = r s / 4, the bins meet at m - w, m and m + w, and each includes its lower end. The code
        is the number of the bin, the first in the lowest bits. The table has the mean of each bin, or 0.

        Sums are those of `FixedPoint`, and means are divided in fp64. Returns the values that `table_decode` will
        return.
        """
        segments, capacity = bounds.numel() - 1, selection.values.numel()
        owner, values = owners(selection.indices, bounds), selection.values
        table, codes = parts_of(kind, section, segments, capacity)
        is_valid = numbers(bounds, capacity) < selection.count
        if kind == ValueKind.SIGN:
            fixed = FixedPoint.of(values, is_valid, owner, segments)
            table.copy_((fixed.sums(values.abs().double()) / fixed.members).float())
            codes.copy_(packed((values < 0).to(torch.uint8), 1))
        elif kind == ValueKind.INT8:
            largest = torch.zeros(segments, dtype=torch.float32, device=section.device)
            largest.scatter_reduce_(0, owner, values.abs(), "amax")
            # divide by a tensor: for a number, a GPU multiplies by its inverse
            scales = (largest / torch.full_like(largest, 127)).clamp(min=SMALLEST)
            scales = torch.where(largest > 0, scales, 0.0)
            steps = torch.where(scales > 0, scales, 1.0)[owner]
            table.copy_(scales)
            codes.view(torch.int8).copy_((values / steps).round().clamp(-127, 127))
        else:
            wide, fixed = values.double(), FixedPoint.of(values, is_valid, owner, segments)
            above = wide - (fixed.sums(wide) / fixed.members)[owner]
            deviations = (fixed.of_squares().sums(above * above) / fixed.members).sqrt()
            width = (deviations * (r / 4))[owner]
            bins = (above >= -width).long() + (above >= 0).long() + (above >= width).long()
            bins = torch.where(is_valid, bins, 0)
            means = [fixed.sums(wide, bins == b) / fixed.count(bins == b) for b in range(4)]
            table.copy_(torch.stack(means, 1).float().flatten())
            codes.copy_(packed(bins.to(torch.uint8), 2))
        return self.table_decode(kind, section, selection.indices, selection.count, bounds)[0]

    def table_decode(
        self,
        kind: ValueKind,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        count: Int32[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """Return (values, valid)."""
        table, codes = parts_of(kind, section, bounds.numel() - 1, indices.numel())
        owner = owners(indices, bounds)
        if kind == ValueKind.SIGN:
            magnitudes, negative = table[owner], unpacked(codes, 1, indices.numel())
            return first_values(torch.where(negative > 0, -magnitudes, magnitudes), count)
        if kind == ValueKind.INT8:
            return first_values(codes.view(torch.int8) * table[owner], count)
        return first_values(table[4 * owner + unpacked(codes, 2, indices.numel())], count)


class MeanDecoder(ABC):
    """Decodes the payloads of all ranks and adds them in one call, with the bits of doing that one by one."""

    @abstractmethod
    def takes(self, layout: PayloadLayout) -> bool:
        """Whether it can decode these payloads."""

    @abstractmethod
    def mean_into_(
        self,
        dense: Float32[Tensor, "n"],
        payloads: Sequence[UInt8[Tensor, "nbytes"]],
        layout: PayloadLayout,
        bounds: Int64[Tensor, "bounds"],
        size: int,
    ) -> Int32[Tensor, "numbers"]:
        """Write the mean over `size` ranks, with zeros where no rank has sent an element.

        Returns WORDS numbers per payload, and whether the mean is finite. If a payload is not valid, the mean is
        undefined.
        """


def numbers(like: Tensor, size: int) -> Int64[Tensor, "size"]:
    return torch.arange(size, dtype=torch.int64, device=like.device)


def checksum(payload: UInt8[Tensor, "nbytes"], stored: Int64[Tensor, ""] | int = 0) -> Int64[Tensor, ""]:
    """Return the checksum of a payload, with its checksum field, now `stored`, taken as zero."""
    words = payload.view(torch.int64)
    total = (words * (2 * numbers(payload, words.numel()) + 1)).sum() - 3 * stored
    return (total ^ total >> 32) & LOW ^ CHECKSUM_OF_ZEROS


@dataclass(frozen=True, eq=False)
class Gaps:
    """Gaps in rows of one block each. The last block is padded; entries without an element are zero."""

    gaps: Int64[Tensor, "blocks block"]
    counts: Int64[Tensor, "blocks"]
    is_valid: Bool[Tensor, "blocks block"]


def thin(selection: SparseVector, kept: Int64[Tensor, ""]) -> SparseVector:
    """Return `kept` elements of the selection, evenly spaced in order."""
    j = numbers(selection.indices, selection.indices.numel())
    which = (j * selection.count // kept.clamp(min=1)).clamp(max=max(0, j.numel() - 1))
    is_valid = j < kept
    indices = torch.where(is_valid, selection.indices[which], 0)
    return SparseVector(indices, torch.where(is_valid, selection.values[which], 0.0), kept.to(torch.int32))


def gaps_of(indices: Int32[Tensor, "capacity"], count: Int64[Tensor, ""] | Int32[Tensor, ""], block: int) -> Gaps:
    j = numbers(indices, indices.numel())
    before = torch.nn.functional.pad(indices[:-1], (1, 0), value=-1)
    gaps = torch.where(j < count, indices.long() - before - 1, 0)
    blocks = block_count(indices.numel(), block)
    gaps = torch.nn.functional.pad(gaps, (0, blocks * block - indices.numel())).view(blocks, block)
    counts = counts_of(count, blocks, block)
    return Gaps(gaps, counts, numbers(indices, block) < counts.unsqueeze(1))


def counts_of(count: Tensor, blocks: int, block: int) -> Int64[Tensor, "blocks"]:
    """Return the number of elements of each block."""
    return (count.long() - numbers(count, blocks) * block).clamp(0, block)


def bit_length(x: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Return the bit length of integers from 0 to 2**53."""
    return torch.frexp(x.double()).exponent.long()


def add_fields_(words: Int64[Tensor, "words"], at: Int64[Tensor, "n"], fields: Int64[Tensor, "n"]) -> None:
    wide = fields << (at & 31)
    words.index_add_(0, at >> 5, wide & LOW)
    words.index_add_(0, (at >> 5) + 1, wide >> 32)


def places_of(
    widths: Int64[Tensor, "blocks"], counts: Int64[Tensor, "blocks"], block: int
) -> tuple[Int64[Tensor, "blocks block"], Int64[Tensor, ""]]:
    """Return (the first bit of each field, the first bit after all). The fields follow the bytes of parameters."""
    lengths, parameters = widths * counts, 8 * widths.numel()
    starts = lengths.cumsum(0) - lengths + parameters
    at = starts.unsqueeze(1) + numbers(widths, block) * widths.unsqueeze(1)
    return at, lengths.sum() + parameters


def read_fields(
    section: UInt8[Tensor, "nbytes"], at: Int64[Tensor, "*shape"], widths: Int64[Tensor, "*#shape"]
) -> Int64[Tensor, "*shape"]:
    """Read fields of up to 31 bits. Fields beyond the section have arbitrary content."""
    words = torch.nn.functional.pad(section.view(torch.int32).long() & LOW, (0, SPARE_WORDS))
    word = (at >> 5).clamp(max=words.numel() - SPARE_WORDS)
    both = words[word] | words[word + 1] << 32
    return both >> (at & 31) & (1 << widths) - 1


def ascending(
    given: Int32[Tensor, "capacity"] | Int64[Tensor, "capacity"], count: Int32[Tensor, ""], numel: int
) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
    """Return the first `count` indices, then zeros, and whether there are so many, ascending and below numel."""
    is_valid = numbers(given, given.numel()) < count
    ordered = (given >= 0) & (given < numel)
    ordered[1:] &= given[1:] > given[:-1]
    valid = (ordered | ~is_valid).all() & (count >= 0) & (count <= given.numel())
    return torch.where(is_valid & ordered, given, 0).to(torch.int32), valid


def chunk_parts_of(
    section: UInt8[Tensor, "nbytes"], code: IndexCode
) -> tuple[UInt8[Tensor, "counts"], UInt8[Tensor, "pairs 3"]]:
    """Return views of a code in chunks: numbers of elements by chunk, and indices within chunks."""
    middle, pairs = 2 * code.parameter, (code.capacity + 1) // 2
    return section[:middle], section[middle : middle + 3 * pairs].view(pairs, 3)


def chunks_encode_(selection: SparseVector, code: IndexCode, section: UInt8[Tensor, "nbytes"]) -> SparseVector:
    sizes, within = chunk_parts_of(section, code)
    is_valid = numbers(section, code.capacity) < selection.count
    chunk = torch.where(is_valid, selection.indices >> CHUNK_BITS, code.parameter).long()  # the last one: not sent
    counts = torch.zeros(code.parameter + 1, dtype=torch.int16, device=section.device)
    counts.index_add_(0, chunk, torch.ones_like(chunk, dtype=torch.int16))
    sizes.copy_(counts[: code.parameter].view(torch.uint8))
    low = torch.zeros(2 * within.shape[0], dtype=torch.int32, device=section.device)
    low[: code.capacity] = torch.where(is_valid, selection.indices & (CHUNK - 1), 0)
    pair = low[0::2] | (low[1::2] << CHUNK_BITS)
    for byte in range(3):
        within[:, byte] = ((pair >> (8 * byte)) & 255).to(torch.uint8)
    return selection


def chunks_decode(
    section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""], code: IndexCode
) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
    sizes, within = chunk_parts_of(section, code)
    counts, within = sizes.view(torch.int16).long(), within.long()
    ends = counts.clamp(0, CHUNK).cumsum(0)
    pair = within[:, 0] | (within[:, 1] << 8) | (within[:, 2] << 16)
    low = torch.stack((pair & (CHUNK - 1), pair >> CHUNK_BITS), 1).view(-1)[: code.capacity]
    position = numbers(section, code.capacity)
    chunk = torch.searchsorted(ends, position, right=True)
    indices, valid = ascending(chunk * CHUNK + low, count, code.numel)
    return indices, valid & (counts >= 0).all() & (counts <= CHUNK).all() & (ends[-1] == count)


def add_up(
    gaps: Int64[Tensor, "capacity"], count: Int64[Tensor, ""], numel: int, valid: Bool[Tensor, ""]
) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
    """Return indices from gaps, zero beyond the count, and whether they are below numel."""
    indices = (gaps.clamp(0, numel) + 1).cumsum(0) - 1
    is_valid = numbers(gaps, gaps.numel()) < count
    in_range = ((gaps >= 0) & (gaps <= numel) & (indices < numel)) | ~is_valid
    return torch.where(is_valid, indices.clamp(0, max(0, numel - 1)), 0).to(torch.int32), valid & in_range.all()


def packed_bits(indices: Int32[Tensor, "capacity"], count: Tensor) -> Int64[Tensor, ""]:
    found = gaps_of(indices, count, BLOCKS[IndexKind.PACKED])
    return (bit_length(found.gaps.amax(1)) * found.counts).sum() + 8 * found.counts.numel()


def packed_kept(selection: SparseVector, code: IndexCode) -> Int64[Tensor, ""]:
    count = selection.count.long()
    shares = [count, *(count * share // 128 for share in PACKED_SHARES)]
    fits = [packed_bits(thin(selection, m).indices, m) <= 8 * code.nbytes for m in shares]
    kept = count.clamp(max=code.parameter)
    for m, fit in zip(reversed(shares), reversed(fits), strict=True):
        kept = torch.where(fit, m, kept)
    return kept


def rice_parameters(found: Gaps) -> Int64[Tensor, "blocks"]:
    """Find, by bisection, the smallest b for which b + 1 is no better."""
    b = torch.zeros_like(found.counts)
    for step in (16, 8, 4, 2, 1):
        better = rice_bits(found, b + step) < rice_bits(found, b + step - 1)
        b = torch.where(better, b + step, b)
    return b


def rice_bits(found: Gaps, b: Int64[Tensor, "blocks"]) -> Int64[Tensor, "blocks"]:
    return found.counts * (b + 1) + (found.gaps >> b.unsqueeze(1)).sum(1)


def rice_kept(selection: SparseVector, code: IndexCode) -> Int64[Tensor, ""]:
    found = gaps_of(selection.indices, selection.count, BLOCKS[IndexKind.RICE])
    room = 8 * code.nbytes - 8 * found.counts.numel()
    fixed = rice_bits(found, torch.full_like(found.counts, code.parameter)).sum()
    each = max(1, code.parameter)
    left_out = (fixed - room + each - 1) // each
    fits = rice_bits(found, rice_parameters(found)).sum() <= room
    return selection.count - torch.where(fits, 0, left_out)


def ones_of(
    section: UInt8[Tensor, "nbytes"], start: Int64[Tensor, ""], capacity: int
) -> tuple[Int64[Tensor, "capacity"], Int64[Tensor, ""]]:
    """Return (positions of the first `capacity` ones from bit `start` on, number of ones).

    Entries beyond the last one are arbitrary.
    """
    bits = unpacked(section, 1, 8 * section.numel()).long()
    at = numbers(section, bits.numel())
    bits = torch.where(at >= start, bits, 0)
    rank = bits.cumsum(0)
    places = torch.zeros(capacity + 1, dtype=torch.int64, device=section.device)
    slot = torch.where((bits > 0) & (rank <= capacity), rank - 1, capacity)
    places.scatter_(0, slot, at)
    return places[:capacity], rank[-1]


def parts_of(
    kind: ValueKind, section: UInt8[Tensor, "nbytes"], segments: int, capacity: int
) -> tuple[Float32[Tensor, "length"], UInt8[Tensor, "codes"]]:
    """Return the table of a section of values, and the bytes of its codes."""
    length, width = TABLES[kind]
    end, nbytes = 4 * length * segments, (capacity * width + 7) // 8
    return section[:end].view(torch.float32), section[end:][:nbytes]


def packed(codes: UInt8[Tensor, "n"], width: int) -> UInt8[Tensor, "nbytes"]:
    """Pack codes of 1 or 2 bits, the first in the lowest bits."""
    each = 8 // width
    rows = torch.nn.functional.pad(codes, (0, -codes.numel() % each)).view(-1, each)
    return (rows << width * numbers(codes, each).to(torch.uint8)).sum(1, dtype=torch.uint8)


def unpacked(packed: UInt8[Tensor, "nbytes"], width: int, n: int) -> UInt8[Tensor, "n"]:
    shifts = width * numbers(packed, 8 // width).to(torch.uint8)
    return (packed.unsqueeze(1) >> shifts & 2**width - 1).view(-1)[:n]


@dataclass(frozen=True)
class FixedPoint:
    """Sums of each segment's values that are the same in any order, since they are sums of integers.

    A value becomes the integer value * scale, rounded towards zero. The scale of a segment is the power of two
    that puts the magnitudes below 2**(62 - b), where b is the number of bits of the number of members, so that no
    sum of so many overflows. A segment with a value that is not finite has NaN as its sums.

    Attributes:
        is_valid, owner: Of each element, whether it is one, and its segment.
        largest: Bits of the largest magnitude of each segment.
        members: Number of its elements, at least 1.
        exponent: The magnitudes of a segment are at most 2**exponent.
    """

    is_valid: Bool[Tensor, "capacity"]
    owner: Int64[Tensor, "capacity"]
    largest: Int32[Tensor, "segments"]
    members: Int64[Tensor, "segments"]
    exponent: Int64[Tensor, "segments"]

    @classmethod
    def of(
        cls,
        values: Float32[Tensor, "capacity"],
        is_valid: Bool[Tensor, "capacity"],
        owner: Int64[Tensor, "capacity"],
        segments: int,
    ) -> "FixedPoint":
        largest = torch.zeros(segments, dtype=torch.int32, device=values.device)
        largest.scatter_reduce_(0, owner, torch.where(is_valid, values.abs(), 0.0).view(torch.int32), "amax")
        members = largest.new_zeros(segments, dtype=torch.int64).index_add_(0, owner, is_valid.long())
        return cls(is_valid, owner, largest, members.clamp(min=1), (largest.long() >> 23).clamp(min=1) - 126)

    def of_squares(self) -> "FixedPoint":
        """For the squares of differences from the mean: these are at most twice the largest magnitude."""
        return replace(self, exponent=2 * self.exponent + 2)

    def sums(
        self, values: Float64[Tensor, "capacity"], chosen: Bool[Tensor, "capacity"] | bool = True
    ) -> Float64[Tensor, "segments"]:
        """Return the sum of the chosen values of each segment."""
        shift = 62 - bit_length(self.members) - self.exponent
        is_finite = self.largest < INFINITE
        counts = self.is_valid & chosen & is_finite[self.owner]
        integers = torch.where(counts, values * power_of(shift)[self.owner], 0.0).long()
        # index_add_ adds in a varying order on a GPU, which changes no sum of integers
        sums = torch.zeros_like(self.members).index_add_(0, self.owner, integers)
        return torch.where(is_finite, sums.double() * power_of(-shift), nan)

    def count(self, chosen: Bool[Tensor, "capacity"]) -> Int64[Tensor, "segments"]:
        """Return the number of chosen elements of each segment, at least 1."""
        own = (self.is_valid & chosen).long()
        return torch.zeros_like(self.members).index_add_(0, self.owner, own).clamp(min=1)


def power_of(exponent: Int64[Tensor, "n"]) -> Float64[Tensor, "n"]:
    """Return 2**exponent, exact on every device."""
    return (exponent + 1023 << 52).view(torch.float64)


def first_values(
    values: Float32[Tensor, "capacity"], count: Int32[Tensor, ""]
) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
    """Return (values with zeros after the first `count`, whether they are finite)."""
    values = torch.where(numbers(values, values.numel()) < count, values, 0.0)
    return values, values.isfinite().all()


def owners(indices: Int32[Tensor, "capacity"], bounds: Int64[Tensor, "bounds"]) -> Int64[Tensor, "capacity"]:
    """Return the segment of each element. For indices outside all segments the result is arbitrary but valid."""
    owner = torch.searchsorted(bounds, indices.long(), right=True) - 1
    return owner.clamp(0, max(0, bounds.numel() - 2))


def power_of_two(values: Float32[Tensor, "n"]) -> tuple[Float32[Tensor, ""], Float32[Tensor, ""]]:
    """Return (scale, 1 / scale), both exact. NaN values are ignored."""
    if not values.numel():
        one = torch.ones((), dtype=torch.float32, device=values.device)
        return one, one.clone()
    largest = values.abs().nan_to_num(0.0).amax()
    # the exponent from the bits: exact on every device, and 0 for denormals
    exponent = (largest.view(torch.int32) >> 23) - 126 - LARGEST_EXPONENT
    exponent = torch.where(largest > 0, exponent.clamp(-126, 126), 0)
    return ((127 + exponent) << 23).view(torch.float32), ((127 - exponent) << 23).view(torch.float32)


def block_count(capacity: int, block: int) -> int:
    return -(-capacity // block)
