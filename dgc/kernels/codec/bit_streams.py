"""Packed and Rice codes of ascending indices in plain torch, vectorised over all elements. `codec` defines them.

A stream is an int64 tensor with 32 bits in each word. A field of up to 31 bits then spans at most two words, and
shifting it into place cannot overflow. Fields are disjoint, so adding them to the words equals a bitwise or. Two
spare words after the section avoid special cases for the last fields.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int32, Int64, UInt8
from torch import Tensor

from dgc.kernels.codec.protocol import (
    LARGEST_PARAMETER,
    PACKED_BLOCK,
    PACKED_SHARES,
    RICE_BLOCK,
    PackedCode,
    RiceCode,
    block_count,
)
from dgc.kernels.selection.protocol import SparseVector

LOW = 0xFFFFFFFF
SPARE_WORDS = 2


@dataclass(frozen=True, eq=False)
class Gaps:
    """Gaps in rows of one block each. The last block is padded; entries without an element are zero."""

    gaps: Int64[Tensor, "blocks block"]
    counts: Int64[Tensor, "blocks"]
    live: Bool[Tensor, "blocks block"]


def numbers(like: Tensor, size: int) -> Int64[Tensor, "size"]:
    return torch.arange(size, dtype=torch.int64, device=like.device)


def thin(selection: SparseVector, kept: Int64[Tensor, ""]) -> SparseVector:
    """Return `kept` elements of the selection, evenly spaced in order."""
    j = numbers(selection.indices, selection.indices.numel())
    which = (j * selection.count // kept.clamp(min=1)).clamp(max=max(0, j.numel() - 1))
    live = j < kept
    indices = torch.where(live, selection.indices[which], 0)
    return SparseVector(indices, torch.where(live, selection.values[which], 0.0), kept.to(torch.int32))


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


def starts_of(lengths: Int64[Tensor, "blocks"]) -> Int64[Tensor, "blocks"]:
    """Return the bit position of each block's first field. The fields follow the bytes of parameters."""
    return lengths.cumsum(0) - lengths + 8 * lengths.numel()


def words_for(section: UInt8[Tensor, "nbytes"]) -> Int64[Tensor, "words"]:
    return torch.zeros(section.numel() // 4 + SPARE_WORDS, dtype=torch.int64, device=section.device)


def add_fields_(words: Int64[Tensor, "words"], at: Int64[Tensor, "n"], fields: Int64[Tensor, "n"]) -> None:
    wide = fields << (at & 31)
    words.index_add_(0, at >> 5, wide & LOW)
    words.index_add_(0, (at >> 5) + 1, wide >> 32)


def write_(section: UInt8[Tensor, "nbytes"], words: Int64[Tensor, "words"], parameters: Tensor) -> None:
    low_halves = words.view(torch.int32)[: section.numel() // 2 : 2]
    section.view(torch.int32).copy_(low_halves)
    section[: parameters.numel()] = parameters


def read_fields(
    section: UInt8[Tensor, "nbytes"], at: Int64[Tensor, "*shape"], widths: Int64[Tensor, "*#shape"]
) -> Int64[Tensor, "*shape"]:
    """Read fields of up to 31 bits. Fields beyond the section have arbitrary content."""
    words = torch.nn.functional.pad(section.view(torch.int32).long() & LOW, (0, SPARE_WORDS))
    word = (at >> 5).clamp(max=words.numel() - SPARE_WORDS)
    both = words[word] | words[word + 1] << 32
    return both >> (at & 31) & (1 << widths) - 1


def add_up(
    gaps: Int64[Tensor, "capacity"], count: Int64[Tensor, ""], numel: int, valid: Bool[Tensor, ""]
) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
    """Return indices from gaps, zero beyond the count, and whether they are below numel."""
    indices = (gaps.clamp(0, numel) + 1).cumsum(0) - 1
    live = numbers(gaps, gaps.numel()) < count
    in_range = ((gaps >= 0) & (gaps <= numel) & (indices < numel)) | ~live
    return torch.where(live, indices.clamp(0, max(0, numel - 1)), 0).to(torch.int32), valid & in_range.all()


# --- packed ----------------------------------------------------------------------------------------


def packed_bits(indices: Int32[Tensor, "capacity"], count: Tensor) -> Int64[Tensor, ""]:
    found = gaps_of(indices, count, PACKED_BLOCK)
    return (bit_length(found.gaps.amax(1)) * found.counts).sum() + 8 * found.counts.numel()


def packed_kept(selection: SparseVector, code: PackedCode) -> Int64[Tensor, ""]:
    count = selection.count.long()
    shares = [count, *(count * share // 128 for share in PACKED_SHARES)]
    fits = [packed_bits(thin(selection, m).indices, m) <= 8 * code.nbytes for m in shares]
    kept = count.clamp(max=code.sure)
    for m, fit in zip(reversed(shares), reversed(fits), strict=True):
        kept = torch.where(fit, m, kept)
    return kept


def packed_encode_(selection: SparseVector, code: PackedCode, section: UInt8[Tensor, "nbytes"]) -> SparseVector:
    sent = thin(selection, packed_kept(selection, code))
    found = gaps_of(sent.indices, sent.count, PACKED_BLOCK)
    widths = bit_length(found.gaps.amax(1))
    words = words_for(section)
    at = starts_of(widths * found.counts).unsqueeze(1) + numbers(section, PACKED_BLOCK) * widths.unsqueeze(1)
    add_fields_(words, torch.where(found.live, at, 0).view(-1), found.gaps.view(-1))
    write_(section, words, widths)
    return sent


def packed_decode(
    section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""], code: PackedCode
) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
    m = count.long().clamp(0, code.capacity)
    blocks = block_count(code.capacity, PACKED_BLOCK)
    counts = counts_of(m, blocks, PACKED_BLOCK)
    given = section[:blocks].long()
    widths = given.clamp(max=LARGEST_PARAMETER)
    lengths = widths * counts
    at = starts_of(lengths).unsqueeze(1) + numbers(section, PACKED_BLOCK) * widths.unsqueeze(1)
    gaps = read_fields(section, at, widths.unsqueeze(1)).view(-1)[: code.capacity]
    valid = (given <= LARGEST_PARAMETER).all() & (lengths.sum() + 8 * blocks <= 8 * code.nbytes) & (m == count)
    return add_up(gaps, m, code.numel, valid)


# --- Rice ------------------------------------------------------------------------------------------


def rice_parameters(found: Gaps) -> Int64[Tensor, "blocks"]:
    """Find, by bisection, the smallest b for which b + 1 is no better."""
    b = torch.zeros_like(found.counts)
    for step in (16, 8, 4, 2, 1):
        better = rice_bits(found, b + step) < rice_bits(found, b + step - 1)
        b = torch.where(better, b + step, b)
    return b


def rice_bits(found: Gaps, b: Int64[Tensor, "blocks"]) -> Int64[Tensor, "blocks"]:
    return found.counts * (b + 1) + (found.gaps >> b.unsqueeze(1)).sum(1)


def rice_kept(selection: SparseVector, code: RiceCode) -> Int64[Tensor, ""]:
    found = gaps_of(selection.indices, selection.count, RICE_BLOCK)
    room = 8 * code.nbytes - 8 * found.counts.numel()
    fixed = rice_bits(found, torch.full_like(found.counts, code.parameter)).sum()
    each = max(1, code.parameter)
    left_out = (fixed - room + each - 1) // each
    fits = rice_bits(found, rice_parameters(found)).sum() <= room
    return selection.count - torch.where(fits, 0, left_out)


def rice_encode_(selection: SparseVector, code: RiceCode, section: UInt8[Tensor, "nbytes"]) -> SparseVector:
    sent = thin(selection, rice_kept(selection, code))
    found = gaps_of(sent.indices, sent.count, RICE_BLOCK)
    b = rice_parameters(found)
    column, lengths = b.unsqueeze(1), b * found.counts
    words = words_for(section)
    at = starts_of(lengths).unsqueeze(1) + numbers(section, RICE_BLOCK) * column
    live = found.live.view(-1)
    add_fields_(words, torch.where(live, at.view(-1), 0), (found.gaps & (1 << column) - 1).view(-1))
    unary = 8 * b.numel() + lengths.sum()
    ones = unary + ((found.gaps >> column) + 1).view(-1).cumsum(0) - 1
    add_fields_(words, torch.where(live, ones, 0), live.long())
    write_(section, words, b)
    return sent


def rice_decode(
    section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""], code: RiceCode
) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
    m = count.long().clamp(0, code.capacity)
    blocks = block_count(code.capacity, RICE_BLOCK)
    counts = counts_of(m, blocks, RICE_BLOCK)
    given = section[:blocks].long()
    b = given.clamp(max=LARGEST_PARAMETER)
    lengths, column = b * counts, b.unsqueeze(1)
    at = starts_of(lengths).unsqueeze(1) + numbers(section, RICE_BLOCK) * column
    low = read_fields(section, at, column).view(-1)[: code.capacity]
    unary = 8 * blocks + lengths.sum()
    places, found = ones_of(section, unary, code.capacity)
    zeros = torch.diff(places, prepend=(unary - 1).view(1)) - 1
    high = zeros << column.expand(blocks, RICE_BLOCK).reshape(-1)[: code.capacity]
    # a valid sum of gaps is at most numel: add_up rejects larger gaps, and clamps them before they overflow
    valid = (given <= LARGEST_PARAMETER).all() & (found >= m) & (m == count)
    return add_up((high | low), m, code.numel, valid)


def ones_of(
    section: UInt8[Tensor, "nbytes"], start: Int64[Tensor, ""], capacity: int
) -> tuple[Int64[Tensor, "capacity"], Int64[Tensor, ""]]:
    """Return (positions of the first `capacity` ones from bit `start` on, number of ones).

    Entries beyond the last one are arbitrary.
    """
    bits = (section.unsqueeze(1) >> numbers(section, 8).to(torch.uint8) & 1).view(-1).long()
    at = numbers(section, bits.numel())
    bits = torch.where(at >= start, bits, 0)
    rank = bits.cumsum(0)
    places = torch.zeros(capacity + 1, dtype=torch.int64, device=section.device)
    slot = torch.where((bits > 0) & (rank <= capacity), rank - 1, capacity)
    places.scatter_(0, slot, at)
    return places[:capacity], rank[-1]
