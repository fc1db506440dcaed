"""Triton kernels of the mean of all ranks' payloads."""

from typing import Any, no_type_check

import triton
import triton.language as tl

from dgc.kernels.launch import SECTOR, moves, read_and_written
from dgc.kernels.payload import WORDS
from dgc.kernels.payload.triton_coded import INSIDE, INT8, RICE, SIGN, WIDEST, WITHIN, counts_at
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


@moves("payloads starts", "starts indices")
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
        inside = i + lane < n_chunks
        given = tl.load(section.to(tl.pointer_type(tl.int16)) + i + lane, mask=inside, other=0).to(tl.int64)
        own = tl.minimum(tl.maximum(given, 0), INSIDE + 1)
        wrong += tl.sum((given != own).to(tl.int32), 0)
        tl.store(starts + i + lane, total + tl.cumsum(own, 0) - own, mask=inside)
        total += tl.sum(own, 0)
    tl.debug_barrier()  # starts are written
    for i in range(0, tl.minimum(tl.maximum(count, 0), capacity), LANES):
        j = (i + lane).to(tl.int64)
        chunk = tl.where(j < total, interval_of(starts, n_chunks, steps, j), n_chunks)
        width = tl.zeros_like(j) + WITHIN
        index = (chunk << WITHIN) + read_field(
            words, 16 * tl.cast(n_chunks, tl.int64) + j * WITHIN, width, j < count
        )
        tl.store(indices + r * capacity + j, index.to(tl.int32), mask=(j < count) & (j < capacity))
    tl.store(flags + r, ((wrong == 0) & (total == count)).to(tl.int32))


@moves("payloads payloads starts ones", "starts ones indices")
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
    count = tl.load(payload.to(tl.pointer_type(tl.int32)))
    kept = tl.minimum(tl.maximum(count, 0), capacity)
    section = payload + HEADER
    words = (section.to(tl.pointer_type(tl.int32)), nbytes // 4)
    starts += r * n_blocks
    ones += r * capacity
    indices += r * capacity
    lane = tl.arange(0, LANES)
    wrong = (kept != count).to(tl.int32)
    end = tl.zeros([], dtype=tl.int64) + 8 * n_blocks
    for i in range(0, n_blocks, LANES):
        block = i + lane
        width = tl.load(section + block, mask=block < n_blocks, other=0).to(tl.int32)
        wrong += tl.sum((width > WIDEST).to(tl.int32), 0)
        bits = (tl.minimum(width, WIDEST) * counts_at(block, kept, SIZE)).to(tl.int64)
        tl.store(starts + block, end + tl.cumsum(bits, 0) - bits, mask=block < n_blocks)
        end += tl.sum(bits, 0)
    total = 8 * tl.cast(nbytes, tl.int64)
    if INDEX == RICE:
        found = tl.zeros([], dtype=tl.int64)
        for i in range(end // 8, nbytes, LANES // 8):
            at = 8 * tl.cast(i, tl.int64) + lane
            byte = tl.load(section + (at >> 3), mask=at < total, other=0).to(tl.int64)
            one = tl.where(at >= end, (byte >> (at & 7)) & 1, 0)
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
        is_valid = j < kept
        block = j // SIZE
        width = tl.load(section + block, mask=is_valid, other=0).to(tl.int64)
        width = tl.minimum(width, WIDEST)
        at = tl.load(starts + block, mask=is_valid, other=0) + (j % SIZE) * width
        gap = read_field(words, at, width, is_valid)
        if INDEX == RICE:
            place = tl.load(ones + j, mask=is_valid & (j < found), other=0)
            former = tl.load(ones + j - 1, mask=is_valid & (j > 0) & (j <= found), other=0)
            zeros = place - tl.where(j > 0, former, end - 1) - 1
            gap = gap | (zeros << width)
        outside = (gap < 0) | (gap > numel)
        step = tl.where(is_valid, tl.minimum(tl.maximum(gap, 0), numel) + 1, 0)
        index = before + tl.cumsum(step, 0)
        wrong += tl.sum((is_valid & (outside | (index >= numel))).to(tl.int32), 0)
        tl.store(indices + j, tl.minimum(index, tl.maximum(numel - 1, 0)).to(tl.int32), mask=is_valid)
        before += tl.sum(step, 0)
    tl.store(flags + r, (wrong == 0).to(tl.int32))


@triton.jit
@no_type_check
def value_at(payload, begin, codes, scale, bounds, n_segments, steps, j, index, is_valid, KIND: tl.constexpr):
    """Return the values j of a payload, at `index`. begin, codes: first byte of the values, and of the codes."""
    section = payload + begin
    if KIND == FP32:
        x = tl.load(section.to(tl.pointer_type(tl.float32)) + j, mask=is_valid, other=0.0) * scale
    elif KIND == FP16:
        x = tl.load(section.to(tl.pointer_type(tl.float16)) + j, mask=is_valid, other=0.0).to(tl.float32) * scale
    elif KIND == BF16:
        bits = tl.load(section.to(tl.pointer_type(tl.int16)) + j, mask=is_valid, other=0).to(tl.int32)
        x = (bits << 16).to(tl.float32, bitcast=True) * scale
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


MEAN_SIZES = "n_ranks stride index_stride size nbytes capacity numel begin codes n_segments steps".split()


def bytes_of_check(a: Any) -> tuple[int, int]:
    """Return what is read and written besides: the entries before others, and the counters."""
    return 8 * a.n_ranks * a.capacity + SECTOR * a.programs, SECTOR * a.programs


def read_by_check(a: Any) -> int:
    """Return the most bytes that a program reads: words, its entries with those before them, and for each entry
    its value, or the steps of the search for its segment and a number of its table.
    """
    each: int = (16 if a.WIDE else 8) + 4 + 8 * a.steps + 4
    return 8 * SUMMED.value + a.BLOCK * each


@moves("payloads payloads indices", "numbers", bytes_of_check, read_by_check)
@triton.jit(do_not_specialize=[*(size for size in MEAN_SIZES if size != "size"), "n_parts"])
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

    indices: rows of bytes. flags: whether they are valid, if they were coded. counters: LINE zeros for each
    payload, which they are again afterwards.
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


@moves("payloads", "words", lambda a: read_and_written(SECTOR * a.programs), lambda a: 8 * SUMMED.value)
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


@triton.jit
@no_type_check
def entries_below(indices, count, index, WIDE: tl.constexpr):
    """Return the number of a payload's indices below `index`."""
    low = tl.zeros([], dtype=tl.int32)
    high = count
    while low < high:
        middle = (low + high) // 2
        below = index_at(indices, middle, middle < count, WIDE) < index
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@moves("payloads indices mean mean", "mean mean mean")
@triton.jit(do_not_specialize=[size for size in MEAN_SIZES if size not in ("nbytes", "capacity")])
@no_type_check
def merge(
    payloads,
    n_ranks,
    stride,
    indices,
    index_stride,
    size,
    numel,
    begin,
    codes,
    bounds,
    n_segments,
    steps,
    numbers,
    mean,
    WIDE: tl.constexpr,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per tile of the mean, which stays in the cache: it adds the entries of each rank in turn.

    Payloads that are not valid are not read. The last number becomes 0 if the mean is not finite.
    """
    start = tl.program_id(0).to(tl.int64) * TILE
    lane = tl.arange(0, TILE)
    here = start + lane < numel
    tl.store(mean + start + lane, tl.zeros([TILE], dtype=tl.float32), mask=here)
    small = tl.arange(0, BLOCK)
    for r in range(n_ranks):
        own = numbers + r * NUMBERS
        valid = (tl.load(own + 5) > 0) & (tl.load(own + 4) > 0)
        count = tl.where(valid, tl.load(own), 0)
        payload = payloads + tl.cast(r, tl.int64) * stride
        scale = tl.load(payload.to(tl.pointer_type(tl.int32)) + 3).to(tl.float32, bitcast=True)
        chosen = indices + tl.cast(r, tl.int64) * index_stride
        first = entries_below(chosen, count, start, WIDE)
        last = entries_below(chosen, count, start + TILE, WIDE)
        tl.debug_barrier()  # the sums so far are written
        for i in range(first, last, BLOCK):
            j = i + small
            is_valid = j < last
            index = index_at(chosen, j, is_valid, WIDE)
            x = value_at(payload, begin, codes, scale, bounds, n_segments, steps, j, index, is_valid, KIND)
            total = tl.load(mean + index, mask=is_valid, other=0.0)
            tl.store(mean + index, total + x, mask=is_valid)
    tl.debug_barrier()
    total = tl.load(mean + start + lane, mask=here, other=0.0)
    # `/` would be an approximate division on GPUs
    y = tl.math.div_rn(total, tl.zeros_like(total) + size)
    tl.store(mean + start + lane, y, mask=here)
    infinite = here & ((y.to(tl.int32, bitcast=True) & MAGNITUDE) >= INFINITE)
    if tl.max(infinite.to(tl.int32), 0) > 0:
        tl.atomic_min(numbers + n_ranks * NUMBERS, 0)
