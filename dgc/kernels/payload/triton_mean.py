"""Triton kernels of the mean of all ranks' payloads."""

from typing import Any, no_type_check

import triton
import triton.language as tl

from dgc.kernels.launch import SECTOR, moves, of_each, read_and_written
from dgc.kernels.payload import WORDS
from dgc.kernels.payload.triton_coded import (
    FAN,
    INSIDE,
    INT8,
    RICE,
    SIGN,
    WIDEST,
    WITHIN,
    add_parts,
    counts_at,
    sum_before,
)
from dgc.kernels.payload.triton_plain import (
    BF16,
    BITS,
    FINISHED,
    FP16,
    FP32,
    HEADER,
    INFINITE,
    LOW,
    SUM,
    checksum_of,
)
from dgc.kernels.selection.triton import MAGNITUDE, interval_of

TILE = 2048  # elements of the mean per program
NUMBERS = tl.constexpr(WORDS)
SUMMED = tl.constexpr(2048)  # words of a payload that one program adds
CHECKED = 256  # entries of a payload that one program checks
# of each payload, besides its sum and the programs that have finished
WRONG, INFINITE_VALUES = (tl.constexpr(BITS.value + i) for i in range(2))


@triton.jit
@no_type_check
def sum_of_words(payload, part, n_words):
    """Return what a part of a payload adds to the sum of its checksum."""
    i = part * SUMMED + tl.arange(0, SUMMED)
    word = tl.load(payload.to(tl.pointer_type(tl.int64)) + i, mask=i < n_words, other=0)
    return tl.sum(word * (2 * i.to(tl.int64) + 1), 0)


@triton.jit
@no_type_check
def is_sealed(payload, counters):
    """Return whether the checksum is right, once all parts have added to the sum, and clear the sum."""
    # the checksum belongs to a payload with zero in its place
    stored = tl.load(payload.to(tl.pointer_type(tl.int32)) + 2).to(tl.int64) & LOW
    total = tl.atomic_xchg(counters + SUM, 0) - 3 * stored
    return (checksum_of(total) == stored).to(tl.int32)


@triton.jit
@no_type_check
def index_at(indices, j, is_valid, WIDE: tl.constexpr):
    if WIDE:
        index = tl.load(indices.to(tl.pointer_type(tl.int64)) + j, mask=is_valid, other=0)
    else:
        index = tl.load(indices.to(tl.pointer_type(tl.int32)) + j, mask=is_valid, other=0).to(tl.int64)
    return index


@triton.jit
@no_type_check
def read_field(words, at, width, is_valid):
    """Return fields of up to 31 bits, from bit `at` on. words: a pointer, and the number of words."""
    source, n_words = words
    word = at >> 5
    low = tl.load(source + word, mask=is_valid & (word < n_words), other=0).to(tl.int64) & LOW
    high = tl.load(source + word + 1, mask=is_valid & (word + 1 < n_words), other=0).to(tl.int64)
    one = tl.zeros_like(width) + 1
    return ((low | (high << 32)) >> (at & 31)) & ((one << width) - 1)


# --- coded indices ---------------------------------------------------------------------------------
#
# An index needs three sums: of the bits of all blocks before its own, of the ones before its own, and of the gaps.
# One program per rank adds them if it reads 64 kB at most. Larger payloads are divided into parts, whose sums are
# added in trees (`add_parts`), with a launch for each sum that needs the others.


SIZES_OF_PARTS = "stride capacity numel n_blocks nbytes n_sums n_groups n_parts levels n_tiles tile_levels".split()


@triton.jit
@no_type_check
def kept_of(payload, capacity):
    """Return the number of elements, within 0 and the capacity, and whether it was not."""
    count = tl.load(payload.to(tl.pointer_type(tl.int32)))
    kept = tl.minimum(tl.maximum(count, 0), capacity)
    return kept, (kept != count).to(tl.int32)


@triton.jit
@no_type_check
def counts_of_chunks(section, i, n_chunks):
    """Return the numbers of elements of chunks, and how many of them cannot be."""
    given = tl.load(section.to(tl.pointer_type(tl.int16)) + i, mask=i < n_chunks, other=0).to(tl.int64)
    own = tl.minimum(tl.maximum(given, 0), INSIDE + 1)
    return own, tl.sum((given != own).to(tl.int32), 0)


@triton.jit
@no_type_check
def index_within(words, chunk, j, is_valid, n_chunks):
    """Return the index of elements j, which are in these chunks."""
    at = 16 * tl.cast(n_chunks, tl.int64) + j * WITHIN
    return ((chunk << WITHIN) + read_field(words, at, tl.zeros_like(j) + WITHIN, is_valid)).to(tl.int32)


@moves("payloads starts", "starts indices", lambda a: read_by_unpack_chunks(a.capacity, a.n_chunks))
@triton.jit(do_not_specialize=["stride", "capacity", "n_chunks", "steps", "nbytes"])
@no_type_check
def unpack_chunks(
    payloads, stride, capacity, n_chunks, steps, nbytes, starts, indices, flags, LANES: tl.constexpr
):
    """One program per rank: as `unpack`. That indices ascend is left to `check`."""
    r = tl.program_id(0).to(tl.int64)
    payload = payloads + r * stride
    count = tl.load(payload.to(tl.pointer_type(tl.int32)))
    section = payload + HEADER
    words = (section.to(tl.pointer_type(tl.int32)), nbytes // 4)
    starts += r * n_chunks
    lane = tl.arange(0, LANES)
    wrong = tl.zeros([], dtype=tl.int32)
    total = tl.zeros([], dtype=tl.int64)
    for i in range(0, n_chunks, LANES):
        own, bad = counts_of_chunks(section, i + lane, n_chunks)
        tl.store(starts + i + lane, total + tl.cumsum(own, 0) - own, mask=i + lane < n_chunks)
        wrong += bad
        total += tl.sum(own, 0)
    tl.debug_barrier()  # starts are written
    for i in range(0, tl.minimum(tl.maximum(count, 0), capacity), LANES):
        j = (i + lane).to(tl.int64)
        found = interval_of(starts, n_chunks, steps, j, (j < count) & (j < capacity))
        chunk = tl.where(j < total, found, n_chunks)
        index = index_within(words, chunk, j, j < count, n_chunks)
        tl.store(indices + r * capacity + j, index, mask=(j < count) & (j < capacity))
    tl.store(flags + r, ((wrong == 0) & (total == count)).to(tl.int32))


def read_by_unpack_chunks(capacity: int, n_chunks: int) -> int:
    """Return the most bytes that a program of `unpack_chunks` reads: numbers of chunks, the steps of searches and
    fields.
    """
    return 2 * n_chunks + capacity * (8 * n_chunks.bit_length() + 8)


@triton.jit
@no_type_check
def pair_of(a, b):
    return tl.where(tl.arange(0, 2) == 0, a.to(tl.int64), b.to(tl.int64))


@triton.jit
@no_type_check
def one_of(pair, ROW: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, 2) == ROW, pair, 0), 0)


@moves("payloads sums", "starts sums", lambda a: 2 * a.LANES + 16 * FAN.value * a.levels)
@triton.jit(do_not_specialize=[*SIZES_OF_PARTS, "n_chunks"])
@no_type_check
def sum_chunks(
    payloads,
    stride,
    n_chunks,
    starts,
    sums,
    n_sums,
    arrived,
    n_groups,
    n_parts,
    levels,
    flags,
    LANES: tl.constexpr,
):
    """The first elements of chunks, from their part of LANES chunks on, and of parts; whether they are valid."""
    r = (tl.program_id(0) // n_parts).to(tl.int64)
    part = tl.program_id(0) % n_parts
    payload = payloads + r * stride
    i = part * LANES + tl.arange(0, LANES)
    own, bad = counts_of_chunks(payload + HEADER, i, n_chunks)
    tl.store(starts + r * n_chunks + i, tl.cumsum(own, 0) - own, mask=i < n_chunks)
    found = pair_of(tl.sum(own, 0), bad)
    is_last, found = add_parts(found, sums + r * n_sums, arrived + r * n_groups, part, n_parts, levels, 2)
    if is_last:
        count = tl.load(payload.to(tl.pointer_type(tl.int32)))
        tl.store(flags + r, ((one_of(found, 1) == 0) & (one_of(found, 0) == count)).to(tl.int32))


def bytes_of_searches(a: Any) -> tuple[int, int]:
    """Return what is read besides: in each step of a search a program reads a few numbers."""
    return SECTOR * a.programs * (a.steps + a.LANE_STEPS), 0


@moves(
    "payloads starts sums",
    "indices",
    lambda a: (8 * (a.steps + a.LANE_STEPS) + 16) * a.BLOCK,
    bytes_of_searches,
)
@triton.jit(do_not_specialize=[*SIZES_OF_PARTS, "n_chunks", "steps", "n_programs"])
@no_type_check
def place_in_chunks(
    payloads,
    stride,
    capacity,
    n_chunks,
    nbytes,
    starts,
    sums,
    n_sums,
    n_parts,
    steps,
    indices,
    n_programs,
    LANES: tl.constexpr,
    LANE_STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The indices of BLOCK elements: the search for the part of their chunks, and for the chunk within it."""
    r = (tl.program_id(0) // n_programs).to(tl.int64)
    payload = payloads + r * stride
    section = payload + HEADER
    words = (section.to(tl.pointer_type(tl.int32)), nbytes // 4)
    starts += r * n_chunks
    sums += r * n_sums
    kept, _ = kept_of(payload, capacity)
    first = tl.program_id(0) % n_programs * BLOCK
    if first < kept:
        j = (first + tl.arange(0, BLOCK)).to(tl.int64)
        part = tl.zeros_like(j)
        before = tl.zeros_like(j)
        if n_parts > 1:
            high = part + n_parts
            for _ in range(steps):
                middle = (part + high) // 2
                right = tl.load(sums + 2 * middle) <= j
                part = tl.where(right, middle, part)
                high = tl.where(right, high, middle)
            before = tl.load(sums + 2 * part)
        inside = tl.minimum(n_chunks - part * LANES, LANES)
        chunk = part * LANES + interval_of(starts + part * LANES, inside, LANE_STEPS, j - before)
        index = index_within(words, chunk, j, j < kept, n_chunks)
        tl.store(indices + r * capacity + j, index, mask=j < kept)


@triton.jit
@no_type_check
def bits_of_blocks(section, block, n_blocks, kept, SIZE: tl.constexpr):
    """Return the bits of the fields of blocks, and how many have a parameter that is too large."""
    width = tl.load(section + block, mask=block < n_blocks, other=0).to(tl.int32)
    bits = (tl.minimum(width, WIDEST) * counts_at(block, kept, SIZE)).to(tl.int64)
    return bits, tl.sum((width > WIDEST).to(tl.int32), 0)


@triton.jit
@no_type_check
def ones_at(section, at, first, end):
    """Return the bits at these places, from bit `first` and before `end`, as 0 or 1."""
    byte = tl.load(section + (at >> 3), mask=at < end, other=0).to(tl.int64)
    return tl.where(at >= first, (byte >> (at & 7)) & 1, 0)


@triton.jit
@no_type_check
def steps_at(
    section, words, first_bits, ones, found, end, j, kept, numel, INDEX: tl.constexpr, SIZE: tl.constexpr
):
    """Return the gaps before elements j plus 1, at most numel + 1 and 0 from `kept` on, and how many were larger.

    first_bits: of their blocks. ones: the places of `found` ones from bit `end` on.
    """
    is_valid = j < kept
    width = tl.load(section + j // SIZE, mask=is_valid, other=0).to(tl.int64)
    width = tl.minimum(width, WIDEST)
    gap = read_field(words, first_bits + (j % SIZE) * width, width, is_valid)
    if INDEX == RICE:
        place = tl.load(ones + j, mask=is_valid & (j < found), other=0)
        former = tl.load(ones + j - 1, mask=is_valid & (j > 0) & (j <= found), other=0)
        zeros = place - tl.where(j > 0, former, end - 1) - 1
        gap = gap | (zeros << width)
    outside = (gap < 0) | (gap > numel)
    step = tl.where(is_valid, tl.minimum(tl.maximum(gap, 0), numel) + 1, 0)
    return step, tl.sum((is_valid & outside).to(tl.int32), 0)


def read_by_unpack(rice: bool, capacity: int, n_blocks: int, nbytes: int) -> int:
    """Return the most bytes that a program of `unpack` reads: parameters, and for each element its parameter,
    first bit and field; of a Rice code also a byte for each bit, and the places of two ones.
    """
    return n_blocks + capacity * (33 if rice else 17) + (8 * nbytes if rice else 0)


@moves(
    "payloads payloads starts ones",
    "starts ones indices",
    lambda a: read_by_unpack(a.INDEX == RICE.value, a.capacity, a.n_blocks, a.nbytes),
)
@triton.jit(do_not_specialize=["stride", "capacity", "numel", "n_blocks", "nbytes"])
@no_type_check
def unpack(
    payloads,
    stride,
    capacity,
    numel,
    n_blocks,
    nbytes,
    starts,
    ones,
    indices,
    flags,
    INDEX: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per rank: indices from a code of nbytes bytes, and whether they are valid.

    starts, ones: rows for the first bits of blocks, and the places of ones in the unary part.
    """
    r = tl.program_id(0).to(tl.int64)
    payload = payloads + r * stride
    kept, wrong = kept_of(payload, capacity)
    section = payload + HEADER
    words = (section.to(tl.pointer_type(tl.int32)), nbytes // 4)
    starts += r * n_blocks
    ones += r * capacity
    indices += r * capacity
    lane = tl.arange(0, LANES)
    end = tl.zeros([], dtype=tl.int64) + 8 * n_blocks
    for i in range(0, n_blocks, LANES):
        block = i + lane
        bits, bad = bits_of_blocks(section, block, n_blocks, kept, SIZE)
        tl.store(starts + block, end + tl.cumsum(bits, 0) - bits, mask=block < n_blocks)
        wrong += bad
        end += tl.sum(bits, 0)
    total = 8 * tl.cast(nbytes, tl.int64)
    found = tl.zeros([], dtype=tl.int64)
    if INDEX == RICE:
        for i in range(end // 8, nbytes, LANES // 8):
            at = 8 * tl.cast(i, tl.int64) + lane
            one = ones_at(section, at, end, total)
            rank = found + tl.cumsum(one, 0) - 1
            tl.store(ones + rank, at, mask=(one > 0) & (rank < capacity))
            found += tl.sum(one, 0)
        wrong += (found < kept).to(tl.int32)
    else:
        wrong += (end > total).to(tl.int32)
    tl.debug_barrier()  # starts and ones are written
    before = tl.zeros([], dtype=tl.int64) - 1
    for i in range(0, kept, LANES):
        j = i + lane
        first_bits = tl.load(starts + j // SIZE, mask=j < kept, other=0)
        step, bad = steps_at(section, words, first_bits, ones, found, end, j, kept, numel, INDEX, SIZE)
        index = before + tl.cumsum(step, 0)
        tl.store(indices + j, tl.minimum(index, tl.maximum(numel - 1, 0)).to(tl.int32), mask=j < kept)
        wrong += bad
        before += tl.sum(step, 0)
    tl.store(flags + r, ((wrong == 0) & (before < numel)).to(tl.int32))


# What is known of the code of a rank: the first bit after the fields of all blocks, parameters that are too large,
# ones in all of the code, ones after the fields.
FIELDS_END, TOO_WIDE, ALL_ONES, UNARY_ONES, KNOWN = (tl.constexpr(i) for i in range(5))


def read_by_sum_fields(a: Any) -> int:
    """Return the most bytes that a program reads: parameters, or a byte for each bit, and the sums of parts."""
    return max(a.LANES, a.BLOCK) + 16 * FAN.value * max(a.levels, a.tile_levels)


@moves("payloads sums tile_sums", "known starts sums tile_sums", read_by_sum_fields)
@triton.jit(do_not_specialize=[*SIZES_OF_PARTS, "n_tile_sums", "n_tile_groups"])
@no_type_check
def sum_fields(
    payloads,
    stride,
    capacity,
    n_blocks,
    nbytes,
    known,
    starts,
    sums,
    n_sums,
    arrived,
    n_groups,
    n_parts,
    levels,
    tile_sums,
    n_tile_sums,
    tiles_arrived,
    n_tile_groups,
    n_tiles,
    tile_levels,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first bits of blocks, from their part of LANES blocks on, and of parts. Further programs find the ones
    before each tile of BLOCK bits.
    """
    r = (tl.program_id(0) // (n_parts + n_tiles)).to(tl.int64)
    part = tl.program_id(0) % (n_parts + n_tiles)
    payload = payloads + r * stride
    section = payload + HEADER
    known += r * KNOWN
    if part < n_parts:
        kept, _ = kept_of(payload, capacity)
        block = part * LANES + tl.arange(0, LANES)
        bits, bad = bits_of_blocks(section, block, n_blocks, kept, SIZE)
        tl.store(starts + r * n_blocks + block, tl.cumsum(bits, 0) - bits, mask=block < n_blocks)
        found = pair_of(tl.sum(bits, 0), bad)
        is_last, found = add_parts(found, sums + r * n_sums, arrived + r * n_groups, part, n_parts, levels, 2)
        if is_last:
            tl.store(known + FIELDS_END, 8 * n_blocks + one_of(found, 0))
            tl.store(known + TOO_WIDE, one_of(found, 1))
    else:
        tile = part - n_parts
        at = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        one = ones_at(section, at, 0, 8 * tl.cast(nbytes, tl.int64))
        count = tl.zeros([1], dtype=tl.int64) + tl.sum(one, 0)
        own, groups = tile_sums + r * n_tile_sums, tiles_arrived + r * n_tile_groups
        is_last, count = add_parts(count, own, groups, tile, n_tiles, tile_levels, 1)
        if is_last:
            tl.store(known + ALL_ONES + tl.arange(0, 1), count)


@moves("payloads known tile_sums", "known ones", of_each(2, "BLOCK"))
@triton.jit(do_not_specialize=[*SIZES_OF_PARTS, "n_tile_sums"])
@no_type_check
def place_ones(
    payloads,
    stride,
    capacity,
    nbytes,
    known,
    tile_sums,
    n_tile_sums,
    n_tiles,
    tile_levels,
    ones,
    BLOCK: tl.constexpr,
):
    """The places of the ones after the fields of all blocks, in the order of elements."""
    r = (tl.program_id(0) // n_tiles).to(tl.int64)
    tile = tl.program_id(0) % n_tiles
    section = payloads + r * stride + HEADER
    known += r * KNOWN
    tile_sums += r * n_tile_sums
    total = 8 * tl.cast(nbytes, tl.int64)
    lane = tl.arange(0, BLOCK)
    end = tl.load(known + FIELDS_END)
    last = tl.minimum(end // BLOCK, n_tiles - 1)
    of_fields = sum_before(tile_sums, last, n_tiles, tile_levels, 1, 0)
    of_fields += tl.sum(ones_at(section, last * BLOCK + lane, 0, tl.minimum(end, total)), 0)
    if tile == 0:
        tl.store(known + UNARY_ONES, tl.load(known + ALL_ONES) - of_fields)
    at = tile.to(tl.int64) * BLOCK + lane
    one = ones_at(section, at, end, total)
    before = tl.maximum(sum_before(tile_sums, tile, n_tiles, tile_levels, 1, 0) - of_fields, 0)
    rank = before + tl.cumsum(one, 0) - 1
    tl.store(ones + r * capacity + rank, at, mask=(one > 0) & (rank < capacity))


def read_by_sum_gaps(a: Any) -> int:
    """Return the most bytes that a program reads: for each element its parameter, first bits on each level, field
    and the places of two ones; and the sums of parts.
    """
    return a.BLOCK * (33 + 8 * a.field_levels) + 16 * FAN.value * a.levels


@moves("payloads known starts field_sums ones sums", "sums indices", read_by_sum_gaps)
@triton.jit(do_not_specialize=[*SIZES_OF_PARTS, "n_field_sums", "n_fields", "field_levels"])
@no_type_check
def sum_gaps(
    payloads,
    stride,
    capacity,
    numel,
    n_blocks,
    nbytes,
    known,
    starts,
    field_sums,
    n_field_sums,
    n_fields,
    field_levels,
    ones,
    sums,
    n_sums,
    arrived,
    n_groups,
    n_parts,
    levels,
    indices,
    flags,
    INDEX: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Indices, from their part of BLOCK elements on, the sums of parts, and whether all are valid."""
    r = (tl.program_id(0) // n_parts).to(tl.int64)
    part = tl.program_id(0) % n_parts
    payload = payloads + r * stride
    section = payload + HEADER
    words = (section.to(tl.pointer_type(tl.int32)), nbytes // 4)
    known += r * KNOWN
    kept, wrong = kept_of(payload, capacity)
    end = tl.load(known + FIELDS_END)
    unary = tl.zeros([], dtype=tl.int64)
    if INDEX == RICE:
        unary = tl.load(known + UNARY_ONES)
    j = part * BLOCK + tl.arange(0, BLOCK)
    block = tl.minimum(j // SIZE, n_blocks - 1)
    first_bits = 8 * n_blocks + tl.load(starts + r * n_blocks + block)
    first_bits += sum_before(field_sums + r * n_field_sums, block // LANES, n_fields, field_levels, 2, 0)
    own = ones + r * capacity
    step, bad = steps_at(section, words, first_bits, own, unary, end, j, kept, numel, INDEX, SIZE)
    index = tl.minimum(tl.cumsum(step, 0) - 1, numel)
    tl.store(indices + r * capacity + j, index.to(tl.int32), mask=j < kept)
    found = pair_of(tl.sum(step, 0), bad)
    is_last, found = add_parts(found, sums + r * n_sums, arrived + r * n_groups, part, n_parts, levels, 2)
    if is_last:
        total = 8 * tl.cast(nbytes, tl.int64)
        fits = unary >= kept if INDEX == RICE else end <= total
        right = fits & (wrong == 0) & (tl.load(known + TOO_WIDE) == 0)
        right = right & (one_of(found, 1) == 0) & (one_of(found, 0) <= numel)
        tl.store(flags + r, right.to(tl.int32))


@moves("payloads sums indices", "indices", of_each(4, "BLOCK"))
@triton.jit(do_not_specialize=SIZES_OF_PARTS)
@no_type_check
def place_indices(payloads, stride, capacity, numel, sums, n_sums, n_parts, levels, indices, BLOCK: tl.constexpr):
    """Add the indices before each part of `sum_gaps`."""
    r = (tl.program_id(0) // n_parts).to(tl.int64)
    part = tl.program_id(0) % n_parts
    kept, _ = kept_of(payloads + r * stride, capacity)
    j = part * BLOCK + tl.arange(0, BLOCK)
    own = indices + r * capacity + j
    index = tl.load(own, mask=j < kept, other=0) + sum_before(sums + r * n_sums, part, n_parts, levels, 2, 0)
    tl.store(own, tl.minimum(index, tl.maximum(numel - 1, 0)).to(tl.int32), mask=j < kept)


@triton.jit
@no_type_check
def cast_at(section, j, is_valid, KIND: tl.constexpr):
    """Return the values j, before they are scaled. section: where the first one is."""
    if KIND == FP32:
        x = tl.load(section.to(tl.pointer_type(tl.float32)) + j, mask=is_valid, other=0.0)
    elif KIND == FP16:
        x = tl.load(section.to(tl.pointer_type(tl.float16)) + j, mask=is_valid, other=0.0).to(tl.float32)
    else:
        bits = tl.load(section.to(tl.pointer_type(tl.int16)) + j, mask=is_valid, other=0).to(tl.int32)
        x = (bits << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
@no_type_check
def value_at(payload, begin, codes, scale, bounds, n_segments, steps, j, index, is_valid, KIND: tl.constexpr):
    """Return the values j of a payload, at `index`. begin, codes: first byte of the values, and of the codes."""
    section = payload + begin
    if (KIND == FP32) | (KIND == FP16) | (KIND == BF16):
        x = cast_at(section, j, is_valid, KIND) * scale
    else:
        owner = interval_of(bounds, n_segments, steps, index)
        table = section.to(tl.pointer_type(tl.float32))
        if KIND == SIGN:
            x = tl.load(table + owner, mask=is_valid, other=0.0)
            negative = (tl.load(payload + codes + j // 8, mask=is_valid, other=0).to(tl.int32) >> (j % 8)) & 1
            x = tl.where(negative > 0, -x, x)
        elif KIND == INT8:
            code = tl.load((payload + codes).to(tl.pointer_type(tl.int8)) + j, mask=is_valid, other=0)
            x = code.to(tl.float32) * tl.load(table + owner, mask=is_valid, other=0.0)
        else:
            bin = (tl.load(payload + codes + j // 4, mask=is_valid, other=0).to(tl.int32) >> (j % 4 * 2)) & 3
            x = tl.load(table + 4 * owner + bin, mask=is_valid, other=0.0)
    return x


SIZES_OF_CHECK = "n_ranks stride index_stride nbytes capacity numel begin codes n_segments steps".split()


def bytes_of_check(a: Any) -> tuple[int, int]:
    """Return what is read and written besides: the entries before others, and the counters."""
    return 8 * a.n_ranks * a.capacity + SECTOR * a.programs, SECTOR * a.programs


def read_by_check(a: Any) -> int:
    """Return the most bytes that a program reads: words, its entries with those before them, and for each entry
    its value, or the steps of the search for its segment and a number of its table.
    """
    each: int = (16 if a.WIDE else 8) + 4 + 8 * a.steps + 4
    return 8 * SUMMED.value + a.BLOCK * each


@moves("payloads payloads indices", "numbers decoded", read_by_check, bytes_of_check)
@triton.jit(do_not_specialize=[*SIZES_OF_CHECK, "n_parts"])
@no_type_check
def check(
    payloads,
    n_ranks,
    stride,
    indices,
    index_stride,
    nbytes,
    capacity,
    numel,
    flags,
    begin,
    codes,
    bounds,
    n_segments,
    steps,
    numbers,
    decoded,
    counters,
    n_parts,
    WIDE: tl.constexpr,
    KIND: tl.constexpr,
    CODED: tl.constexpr,
    BLOCK: tl.constexpr,
    LINE: tl.constexpr,
):
    """Check each payload with `n_parts` programs, of which the last one writes its numbers (`codec.WORDS`). The
    last number of all is set for `merge`.

    indices: rows of bytes. flags: whether they are valid, if they were coded. decoded: rows for values that have
    codes, or None. counters: LINE zeros for each payload, which they are again afterwards.
    """
    r = tl.program_id(0) // n_parts
    part = tl.program_id(0) % n_parts
    indices += r.to(tl.int64) * index_stride
    payload = payloads + r.to(tl.int64) * stride
    counters += r * LINE
    header = payload.to(tl.pointer_type(tl.int32))
    tl.atomic_add(counters + SUM, sum_of_words(payload, part, nbytes // 8))
    count = tl.load(header)
    first = part * BLOCK
    if first < tl.minimum(count, capacity):
        scale = tl.load(header + 3).to(tl.float32, bitcast=True)
        j = first + tl.arange(0, BLOCK)
        is_valid = (j < count) & (j < capacity)
        index = index_at(indices, j, is_valid, WIDE)
        before = index_at(indices, j - 1, is_valid & (j > 0), WIDE)
        outside = (index < 0) | (index >= numel) | ((j > 0) & (index <= before))
        wrong = tl.sum((is_valid & outside).to(tl.int64), 0)
        x = value_at(payload, begin, codes, scale, bounds, n_segments, steps, j, index, is_valid, KIND)
        if decoded is not None:
            tl.store(decoded + r.to(tl.int64) * capacity + j, x, mask=is_valid)
        unusable = (x.to(tl.int32, bitcast=True) & MAGNITUDE) >= INFINITE
        infinite = tl.sum((is_valid & unusable).to(tl.int64), 0)
        if (wrong > 0) | (infinite > 0):
            tl.atomic_add(counters + WRONG, wrong)
            tl.atomic_add(counters + INFINITE_VALUES, infinite)
    if tl.atomic_add(counters + FINISHED, 1) == n_parts - 1:
        tl.store(counters + FINISHED, 0)
        wrong = tl.atomic_xchg(counters + WRONG, 0) + ((count < 0) | (count > capacity)).to(tl.int64)
        if CODED:
            wrong += (tl.load(flags + r) == 0).to(tl.int64)
        own = numbers + r * NUMBERS
        tl.store(own, count)
        tl.store(own + 1, tl.load(header + 1))
        tl.store(own + 2, tl.load(header + 4))
        tl.store(own + 3, tl.load(header + 5))
        tl.store(own + 4, is_sealed(payload, counters))
        tl.store(own + 5, (wrong == 0).to(tl.int32))
        tl.store(own + 6, (tl.atomic_xchg(counters + INFINITE_VALUES, 0) == 0).to(tl.int32))
    if tl.program_id(0) == 0:
        tl.store(numbers + n_ranks * NUMBERS, 1)


@moves("payloads", "words", lambda _: 8 * SUMMED.value, lambda a: read_and_written(SECTOR * a.programs))
@triton.jit(do_not_specialize=["stride", "nbytes", "n_parts"])
@no_type_check
def open_headers(payloads, stride, nbytes, words, counters, n_parts, LINE: tl.constexpr):
    """Add SUMMED words of a payload in each of `n_parts` programs. The last one writes the words of
    `Codec.words`. counters: as in `check`.
    """
    r = tl.program_id(0) // n_parts
    payload = payloads + r.to(tl.int64) * stride
    counters += r * LINE
    tl.atomic_add(counters + SUM, sum_of_words(payload, tl.program_id(0) % n_parts, nbytes // 8))
    if tl.atomic_add(counters + FINISHED, 1) == n_parts - 1:
        tl.store(counters + FINISHED, 0)
        header = payload.to(tl.pointer_type(tl.int32))
        own = words + 5 * r
        tl.store(own, tl.load(header + 1))
        tl.store(own + 1, is_sealed(payload, counters))
        tl.store(own + 2, tl.load(header))
        tl.store(own + 3, tl.load(header + 4))
        tl.store(own + 4, tl.load(header + 5))


SIZES_OF_MERGE = "n_ranks stride index_stride value_stride size numel steps room".split()


def read_of_entry(wide: bool, kind: int) -> int:
    """Return the bytes that a program reads of an entry: index, value, and the sum so far."""
    return (8 if wide else 4) + (4 if kind == FP32.value else 2) + 4


def read_of_ranges(wide: bool, ranks: int, steps: int) -> int:
    """Return the bytes that a program reads besides: numbers and steps of the searches of ranks, and its tile."""
    return ranks * (12 + 2 * steps * (8 if wide else 4)) + 4 * TILE


def bytes_of_merge(a: Any) -> tuple[int, int]:
    """Return what is read and written besides: by the searches, and the ranks that are done."""
    progress = 0 if a.done is None else a.done.nbytes
    return SECTOR * a.programs * 2 * a.RANKS * a.steps + progress, progress


@moves(
    "payloads indices values mean mean",
    "mean mean mean",
    lambda a: a.room * read_of_entry(a.WIDE, a.KIND) + read_of_ranges(a.WIDE, a.RANKS, a.steps),
    bytes_of_merge,
)
@triton.jit(do_not_specialize=SIZES_OF_MERGE)
@no_type_check
def merge(
    payloads,
    n_ranks,
    stride,
    indices,
    index_stride,
    values,
    value_stride,
    size,
    numel,
    steps,
    numbers,
    mean,
    done,
    room,
    WIDE: tl.constexpr,
    KIND: tl.constexpr,
    SCALED: tl.constexpr,
    BEGINS: tl.constexpr,
    RANKS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per tile of the mean, which stays in the cache: it adds the entries of each rank in turn.

    All of RANKS ranks are searched at once. done: of each tile the ranks that launches have added, because none
    adds more than `room` entries of a tile, of whole ranks. The next one continues. None: one launch adds all.

    Payloads that are not valid are not read. The last number becomes 0 if the mean is not finite. values: rows of
    bytes. SCALED: the header has their scale.
    """
    tile = tl.program_id(0)
    start = tile.to(tl.int64) * TILE
    lane = tl.arange(0, TILE)
    here = start + lane < numel
    begin = tl.zeros([], dtype=tl.int32)
    if BEGINS:
        tl.store(mean + start + lane, tl.zeros([TILE], dtype=tl.float32), mask=here)
    else:
        begin = tl.load(done + tile)
    if begin < n_ranks:
        each = tl.arange(0, RANKS)
        rank = begin + each
        own = numbers + rank * NUMBERS
        valid = tl.load(own + 5, mask=rank < n_ranks, other=0) > 0
        valid = valid & (tl.load(own + 4, mask=rank < n_ranks, other=0) > 0)
        high = tl.load(own, mask=valid, other=0)[:, None] + tl.zeros([RANKS, 2], dtype=tl.int32)
        low = tl.zeros([RANKS, 2], dtype=tl.int32)
        rows = indices + rank.to(tl.int64)[:, None] * index_stride
        bound = start + tl.arange(0, 2)[None, :] * TILE
        for _ in range(steps):
            middle = (low + high) // 2
            below = (index_at(rows, middle, low < high, WIDE) < bound) & (low < high)
            low = tl.where(below, middle + 1, low)
            high = tl.where(below, high, middle)
        firsts, lasts = tl.split(low)
        n_own = n_ranks
        if done is not None:
            fits = (rank < n_ranks) & (tl.cumsum(lasts - firsts, 0) <= room)
            n_own = tl.sum(fits.to(tl.int32), 0)
        small = tl.arange(0, BLOCK)
        for k in range(n_own):
            r = tl.cast(begin + k, tl.int64)
            scale = 1.0
            if SCALED:
                scale = tl.load((payloads + r * stride).to(tl.pointer_type(tl.int32)) + 3)
                scale = scale.to(tl.float32, bitcast=True)
            first = tl.sum(tl.where(each == k, firsts, 0), 0)
            last = tl.sum(tl.where(each == k, lasts, 0), 0)
            tl.debug_barrier()  # the sums so far are written
            for i in range(first, last, BLOCK):
                j = i + small
                is_valid = j < last
                index = index_at(indices + r * index_stride, j, is_valid, WIDE)
                x = cast_at(values + r * value_stride, j, is_valid, KIND) * scale
                total = tl.load(mean + index, mask=is_valid, other=0.0)
                tl.store(mean + index, total + x, mask=is_valid)
        if done is not None:
            tl.store(done + tile, begin + n_own)
        if begin + n_own >= n_ranks:
            tl.debug_barrier()
            total = tl.load(mean + start + lane, mask=here, other=0.0)
            # `/` would be an approximate division on GPUs
            y = tl.math.div_rn(total, tl.zeros_like(total) + size)
            tl.store(mean + start + lane, y, mask=here)
            infinite = here & ((y.to(tl.int32, bitcast=True) & MAGNITUDE) >= INFINITE)
            if tl.max(infinite.to(tl.int32), 0) > 0:
                tl.atomic_min(numbers + n_ranks * NUMBERS, 0)
