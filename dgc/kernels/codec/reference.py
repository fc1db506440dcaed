"""The payload codec in plain PyTorch, on any device. It defines every bit and does not wait for the device.

Packed and Rice codes are vectorised over all elements. A stream is an int64 tensor with 32 bits in each word. A
field of up to 31 bits then spans at most two words, and shifting it into place cannot overflow. Fields are
disjoint, so adding them to the words equals a bitwise or. Two spare words after the section avoid special cases
for the last fields.
"""

from dataclasses import dataclass
from math import inf, nan

import torch
from jaxtyping import Bool, Float32, Float64, Int32, Int64, UInt8
from torch import Tensor

from dgc.kernels.codec.protocol import (
    CHECKSUM_OF_ZEROS,
    HEADER_BYTES,
    LARGEST_PARAMETER,
    PACKED_BLOCK,
    PACKED_SHARES,
    RICE_BLOCK,
    Header,
    PackedCode,
    RiceCode,
    Terms,
    block_count,
)
from dgc.kernels.selection.protocol import SparseVector

LOW = 0xFFFFFFFF
SPARE_WORDS = 2
SMALLEST = 2.0**-149  # of fp32
LARGEST_EXPONENT = 15  # scaled values stay below 2**15, half of fp16's range


class TorchCodec:
    """Implements `dgc.kernels.codec.protocol.Codec`."""

    name = "reference"

    def blank(self, nbytes: int, like: Tensor) -> UInt8[Tensor, "nbytes"]:
        return torch.zeros(nbytes, dtype=torch.uint8, device=like.device)

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
        payload, (plain, cast) = self.blank(nbytes, selection.values), dtypes
        sizes = [selection.indices.numel() * dtype.itemsize for dtype in dtypes]
        self.plain_encode_(selection.indices, plain, payload[HEADER_BYTES:][: sizes[0]])
        values = payload[HEADER_BYTES + sizes[0] :][: sizes[1]]
        decoded, scale = self.cast_encode_(selection.values, cast, values, limit)
        self.seal_(payload, selection.count, first_nonfinite, bounds, scale, terms)
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
        header = payload[:HEADER_BYTES].view(torch.int32)
        header[0] = count
        header[1] = torch.searchsorted(bounds, first_nonfinite, right=True) % bounds.numel()
        header[2] = 0
        header[3] = scale.view(torch.int32)
        header[4], header[5] = terms.words
        header[2] = checksum(payload).view(1).view(torch.int32)[0]

    def unseal(self, payload: UInt8[Tensor, "nbytes"]) -> Header:
        count, number, stored, scale, *terms = payload[:HEADER_BYTES].view(torch.int32).clone().unbind()
        stored = stored.long() & LOW
        sealed = checksum(payload, stored) == stored
        return Header(count, number, scale.view(torch.float32), (terms[0], terms[1]), sealed)

    def plain_encode_(
        self, indices: Int32[Tensor, "capacity"], dtype: torch.dtype, section: UInt8[Tensor, "nbytes"]
    ) -> None:
        section.view(dtype).copy_(indices)

    def plain_decode(
        self, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""], numel: int, dtype: torch.dtype
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        given = section.view(dtype)
        live = numbers(given, given.numel()) < count
        ordered = (given >= 0) & (given < numel)
        ordered[1:] &= given[1:] > given[:-1]
        valid = (ordered | ~live).all() & (count >= 0) & (count <= given.numel())
        return torch.where(live & ordered, given, 0).to(torch.int32), valid

    def packed_encode_(
        self, selection: SparseVector, code: PackedCode, section: UInt8[Tensor, "nbytes"]
    ) -> SparseVector:
        sent = thin(selection, packed_kept(selection, code))
        found = gaps_of(sent.indices, sent.count, PACKED_BLOCK)
        widths, words = bit_length(found.gaps.amax(1)), words_for(section)
        add_low_bits_(words, found, widths)
        write_(section, words, widths)
        return sent

    def packed_decode(
        self, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""], code: PackedCode
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        m = count.long().clamp(0, code.capacity)
        gaps, _, end, valid = read_low_bits(section, m, code.capacity, PACKED_BLOCK)
        return add_up(gaps, m, code.numel, valid & (end <= 8 * code.nbytes) & (m == count))

    def rice_encode_(
        self, selection: SparseVector, code: RiceCode, section: UInt8[Tensor, "nbytes"]
    ) -> SparseVector:
        sent = thin(selection, rice_kept(selection, code))
        found = gaps_of(sent.indices, sent.count, RICE_BLOCK)
        b, words = rice_parameters(found), words_for(section)
        unary = add_low_bits_(words, found, b)
        ones = unary + ((found.gaps >> b.unsqueeze(1)) + 1).view(-1).cumsum(0) - 1
        live = found.live.view(-1)
        add_fields_(words, torch.where(live, ones, 0), live.long())
        write_(section, words, b)
        return sent

    def rice_decode(
        self, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""], code: RiceCode
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        m = count.long().clamp(0, code.capacity)
        low, b, unary, valid = read_low_bits(section, m, code.capacity, RICE_BLOCK)
        places, found = ones_of(section, unary, code.capacity)
        zeros = torch.diff(places, prepend=(unary - 1).view(1)) - 1
        high = zeros << b.repeat_interleave(RICE_BLOCK)[: code.capacity]
        # a valid sum of gaps is at most numel: add_up rejects larger gaps, and clamps them before they overflow
        return add_up(high | low, m, code.numel, valid & (found >= m) & (m == count))

    def cast_encode_(
        self,
        values: Float32[Tensor, "capacity"],
        dtype: torch.dtype,
        section: UInt8[Tensor, "nbytes"],
        limit: float = inf,
    ) -> tuple[Float32[Tensor, "capacity"], Float32[Tensor, ""]]:
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
        given = section.view(dtype)
        return first(given.float() * scale, count)

    def sign_encode_(
        self, selection: SparseVector, bounds: Int64[Tensor, "bounds"], section: UInt8[Tensor, "nbytes"]
    ) -> Float32[Tensor, "capacity"]:
        segments, capacity = bounds.numel() - 1, selection.values.numel()
        owner = owners(selection.indices, bounds)
        live = numbers(bounds, capacity) < selection.count
        means = means_of(selection.values.abs().double(), live, owner, segments).float()
        table, codes = parts_of(section, segments, capacity, 1)
        table.copy_(means)
        codes.copy_(packed((selection.values < 0).to(torch.uint8), 1))
        return self.sign_decode(section, selection.indices, selection.count, bounds)[0]

    def sign_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        count: Int32[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        table, codes = parts_of(section, bounds.numel() - 1, indices.numel(), 1)
        magnitudes, negative = table[owners(indices, bounds)], unpacked(codes, 1, indices.numel())
        return first(torch.where(negative > 0, -magnitudes, magnitudes), count)

    def int8_encode_(
        self, selection: SparseVector, bounds: Int64[Tensor, "bounds"], section: UInt8[Tensor, "nbytes"]
    ) -> Float32[Tensor, "capacity"]:
        segments, owner = bounds.numel() - 1, owners(selection.indices, bounds)
        largest = torch.zeros(segments, dtype=torch.float32, device=section.device)
        largest.scatter_reduce_(0, owner, selection.values.abs(), "amax")
        # divide by a tensor: for a number, a GPU multiplies by its inverse
        scales = (largest / torch.full_like(largest, 127)).clamp(min=SMALLEST)
        scales = torch.where(largest > 0, scales, 0.0)
        steps = torch.where(scales > 0, scales, 1.0)[owner]
        table, codes = parts_of(section, segments, selection.values.numel(), 8)
        table.copy_(scales)
        codes.view(torch.int8).copy_((selection.values / steps).round().clamp(-127, 127))
        return self.int8_decode(section, selection.indices, selection.count, bounds)[0]

    def int8_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        count: Int32[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        table, codes = parts_of(section, bounds.numel() - 1, indices.numel(), 8)
        return first(codes.view(torch.int8) * table[owners(indices, bounds)], count)

    def two_bit_encode_(
        self, selection: SparseVector, bounds: Int64[Tensor, "bounds"], section: UInt8[Tensor, "nbytes"], r: float
    ) -> Float32[Tensor, "capacity"]:
        segments, capacity = bounds.numel() - 1, selection.values.numel()
        owner = owners(selection.indices, bounds)
        live = numbers(bounds, capacity) < selection.count
        values = selection.values.double()
        above = values - means_of(values, live, owner, segments)[owner]
        deviations = means_of(torch.where(live, above * above, 0.0), live, owner, segments).sqrt()
        width = (deviations * (r / 4))[owner]
        bins = (above >= -width).long() + (above >= 0).long() + (above >= width).long()
        bins = torch.where(live, bins, 0)
        table, codes = parts_of(section, 4 * segments, capacity, 2)
        table.copy_(means_of(values, live, 4 * owner + bins, 4 * segments).float())
        codes.copy_(packed(bins.to(torch.uint8), 2))
        return self.two_bit_decode(section, selection.indices, selection.count, bounds)[0]

    def two_bit_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        count: Int32[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        table, codes = parts_of(section, 4 * (bounds.numel() - 1), indices.numel(), 2)
        bins = unpacked(codes, 2, indices.numel())
        return first(table[4 * owners(indices, bounds) + bins], count)


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
    live: Bool[Tensor, "blocks block"]


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


def words_for(section: UInt8[Tensor, "nbytes"]) -> Int64[Tensor, "words"]:
    return torch.zeros(section.numel() // 4 + SPARE_WORDS, dtype=torch.int64, device=section.device)


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


def add_low_bits_(
    words: Int64[Tensor, "words"], found: Gaps, widths: Int64[Tensor, "blocks"]
) -> Int64[Tensor, ""]:
    """Write the lowest bits of all gaps, `widths` of each block's. Returns the first bit after them."""
    at, end = places_of(widths, found.counts, found.gaps.shape[1])
    low = found.gaps & (1 << widths.unsqueeze(1)) - 1
    add_fields_(words, torch.where(found.live, at, 0).view(-1), low.view(-1))
    return end


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


def read_low_bits(
    section: UInt8[Tensor, "nbytes"], count: Int64[Tensor, ""], capacity: int, block: int
) -> tuple[Int64[Tensor, "capacity"], Int64[Tensor, "blocks"], Int64[Tensor, ""], Bool[Tensor, ""]]:
    """Read what `add_low_bits_` has written. Fields beyond the count have arbitrary content.

    Returns (fields, widths, first bit after the fields, whether the widths are valid).
    """
    blocks = block_count(capacity, block)
    given = section[:blocks].long()
    widths = given.clamp(max=LARGEST_PARAMETER)
    at, end = places_of(widths, counts_of(count, blocks, block), block)
    fields = read_fields(section, at, widths.unsqueeze(1)).view(-1)[:capacity]
    return fields, widths, end, (given <= LARGEST_PARAMETER).all()


def add_up(
    gaps: Int64[Tensor, "capacity"], count: Int64[Tensor, ""], numel: int, valid: Bool[Tensor, ""]
) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
    """Return indices from gaps, zero beyond the count, and whether they are below numel."""
    indices = (gaps.clamp(0, numel) + 1).cumsum(0) - 1
    live = numbers(gaps, gaps.numel()) < count
    in_range = ((gaps >= 0) & (gaps <= numel) & (indices < numel)) | ~live
    return torch.where(live, indices.clamp(0, max(0, numel - 1)), 0).to(torch.int32), valid & in_range.all()


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
    section: UInt8[Tensor, "nbytes"], length: int, capacity: int, width: int
) -> tuple[Float32[Tensor, "length"], UInt8[Tensor, "codes"]]:
    """Return views of a section of values: a table of fp32 numbers, and codes of `width` bits per element."""
    nbytes = (capacity * width + 7) // 8
    return section[: 4 * length].view(torch.float32), section[4 * length :][:nbytes]


def packed(codes: UInt8[Tensor, "n"], width: int) -> UInt8[Tensor, "nbytes"]:
    """Pack codes of 1 or 2 bits, the first in the lowest bits."""
    each = 8 // width
    rows = torch.nn.functional.pad(codes, (0, -codes.numel() % each)).view(-1, each)
    return (rows << width * numbers(codes, each).to(torch.uint8)).sum(1, dtype=torch.uint8)


def unpacked(packed: UInt8[Tensor, "nbytes"], width: int, n: int) -> UInt8[Tensor, "n"]:
    shifts = width * numbers(packed, 8 // width).to(torch.uint8)
    return (packed.unsqueeze(1) >> shifts & 2**width - 1).view(-1)[:n]


def means_of(
    values: Float64[Tensor, "capacity"],
    live: Bool[Tensor, "capacity"],
    group: Int64[Tensor, "capacity"],
    groups: int,
) -> Float64[Tensor, "groups"]:
    """Return the mean of each group's values, added up in their order, or 0. Values that are not live are zero."""
    counts = torch.zeros(groups, dtype=torch.int64, device=values.device).index_add_(0, group, live.long())
    sums = torch.zeros(groups, dtype=torch.float64, device=values.device)
    # not index_add_, which adds in a varying order on a GPU
    sums.index_put_((group,), values, accumulate=True)
    return sums / counts.clamp(min=1)


def first(
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
