"""Triton kernels of payloads with codes of indices, and with tables of values for each tensor."""

from typing import Any, no_type_check

import triton
import triton.language as tl

from dgc.kernels.launch import moves, read_and_written
from dgc.kernels.payload import CHUNK, CHUNK_BITS, LARGEST_PARAMETER, IndexKind, ValueKind
from dgc.kernels.payload.triton_plain import (
    BF16,
    BITS,
    FINISHED,
    FP32,
    HEADER,
    HEADER_WORDS,
    INFINITE,
    LARGEST,
    LOW,
    SHARES,
    cast_to,
    contribution,
    finish,
    store_cast,
)
from dgc.kernels.selection.triton import MAGNITUDE, arrive

SIGN, INT8 = (tl.constexpr(int(kind)) for kind in (ValueKind.SIGN, ValueKind.INT8))
INT64, PACKED, RICE, CHUNKS = (tl.constexpr(int(kind)) for kind in [*IndexKind][1:])
WIDEST, WITHIN, INSIDE = (tl.constexpr(i) for i in (LARGEST_PARAMETER, CHUNK_BITS, CHUNK - 1))
# What is known of a code before it is written: elements that are sent, bits of their largest magnitude, first bit
# of the unary part, and the share that is sent. Then for each share, per block: its parameter, its first bit, and
# for Rice codes the unary bits before it, both counted from the beginning of its part. Then the same sums of the
# parts before (`add_parts`).
KEPT, MOST, END, SHARE, FOUND = (tl.constexpr(i) for i in range(5))
FAN = tl.constexpr(512)  # parts, or groups of parts, whose sums one program adds


@triton.jit
@no_type_check
def element(j, count, kept):
    """Return the element of the selection that is sent as number j: `thin`."""
    which = j.to(tl.int64)
    if kept < count:
        which = which * count // tl.maximum(kept, 1)
    return which


@triton.jit
@no_type_check
def gaps_at(indices, j, count, kept):
    """Return the gaps before the elements j that are sent, 0 from `kept` on."""
    is_valid = j < kept
    index = tl.load(indices + element(j, count, kept), mask=is_valid, other=0)
    before = tl.load(indices + element(j - 1, count, kept), mask=is_valid & (j > 0), other=-1)
    return tl.where(is_valid, index - before - 1, 0)


@triton.jit
@no_type_check
def rows_of(first, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return ROWS blocks and their elements [ROWS, SIZE], from element `first` on."""
    row = tl.arange(0, ROWS)
    return first // SIZE + row, first + row[:, None] * SIZE + tl.arange(0, SIZE)[None, :]


@triton.jit
@no_type_check
def counts_at(block, kept, SIZE: tl.constexpr):
    return tl.minimum(tl.maximum(kept - block * SIZE, 0), SIZE)


@triton.jit
@no_type_check
def clear(payload, n_words, n_programs, LANES: tl.constexpr):
    """Set the words of a payload to zero, each program a part of them."""
    lane = tl.arange(0, LANES)
    words = payload.to(tl.pointer_type(tl.int64))
    for i in range(tl.program_id(0) * LANES, n_words, n_programs * LANES):
        tl.store(words + i + lane, tl.zeros([LANES], dtype=tl.int64), mask=i + lane < n_words)


@triton.jit
@no_type_check
def largest_in(x):
    """Return the bits of the largest finite magnitude of x [rows, columns]."""
    bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
    return tl.max(tl.max(tl.where(bits < INFINITE, bits, 0), 1), 0).to(tl.int64)


@triton.jit
@no_type_check
def add_parts(own, sums, arrived, part, n_parts, levels, ROWS: tl.constexpr):
    """Add up ROWS numbers of all parts, in a tree of their programs. Returns (whether this is the last one, sums).

    sums: ROWS numbers for each part, then for each group of FAN parts, and so on. Each becomes the sum of those
    before in the same group. arrived: zeros for the groups, which they are again afterwards.
    """
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, FAN)
    is_last = part >= 0
    for _ in range(levels):
        if is_last:
            tl.store(sums + part * ROWS + row, own)
            part = part // FAN
            first = part * FAN
            is_last = arrive(arrived + part) == tl.minimum(n_parts - first, FAN) - 1
            if is_last:
                tl.store(arrived + part, 0)
                place = sums + (first + lane)[:, None] * ROWS + row[None, :]
                here = (first + lane < n_parts)[:, None]
                # not from this multiprocessor's cache: other programs may have written it
                each = tl.load(place, mask=here, other=0, cache_modifier=".cg")
                tl.debug_barrier()
                tl.store(place, tl.cumsum(each, 0) - each, mask=here)
                own = tl.sum(each, 0)
                sums += n_parts * ROWS
                n_parts = (n_parts + FAN - 1) // FAN
                arrived += n_parts
    return is_last, own


@triton.jit
@no_type_check
def sum_before(sums, part, n_parts, levels, ROWS: tl.constexpr, ROW: tl.constexpr):
    """Return one of the numbers that `add_parts` has added up, of all parts before some."""
    total = tl.zeros_like(part).to(tl.int64)
    for _ in range(levels):
        total += tl.load(sums + part * ROWS + ROW)
        part = part // FAN
        sums += n_parts * ROWS
        n_parts = (n_parts + FAN - 1) // FAN
    return total


def read_by_measure(a: Any, nbytes: int, rows: int = 1) -> int:
    """Return the most bytes that a program reads: nbytes per element, and the sums of parts on each level."""
    return nbytes * a.LANES + 8 * rows * FAN.value * a.levels


def bytes_of_measure_packed(a: Any) -> tuple[int, int]:
    return SHARES.value * (2 * a.indices.nbytes + a.values.nbytes) + a.found.nbytes, 0


@moves(
    "",
    "payload found found",
    bytes_of_measure_packed,
    lambda a: read_by_measure(a, 12 if a.SCALED else 8),
)
@triton.jit(do_not_specialize=["n_blocks", "room", "sure", "n_words", "stride", "n_groups", "n_parts", "levels"])
@no_type_check
def measure_packed(
    indices,
    values,
    count,
    shares,
    n_blocks,
    room,
    sure,
    payload,
    n_words,
    found,
    stride,
    counters,
    arrived,
    n_groups,
    n_parts,
    levels,
    SCALED: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Each program measures LANES elements, a part, of one share of the selection. room: bits for the gaps.

    stride: what a share takes of `found`. sure: number of elements that fit for any indices. n_groups: of a share.
    """
    clear(payload, n_words, n_parts * SHARES, LANES)
    share = tl.program_id(0) % SHARES
    part = tl.program_id(0) // SHARES
    n = tl.load(count)
    kept = (n.to(tl.int64) * tl.load(shares + share) // 128).to(tl.int32)
    kept = tl.where(share == SHARES - 1, tl.minimum(n, sure), kept)
    block, j = rows_of(part * LANES, LANES // SIZE, SIZE)
    most = tl.max(gaps_at(indices, j, n, kept), 1)
    # the bit length, from the exponent
    width = tl.maximum((most.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1022, 0)
    bits = width * counts_at(block, kept, SIZE)
    own = found + FOUND + share.to(tl.int64) * stride
    tl.store(own + block, width, mask=block < n_blocks)
    tl.store(own + n_blocks + block, tl.cumsum(bits, 0) - bits, mask=block < n_blocks)
    if SCALED:
        x = tl.load(values + element(j, n, kept), mask=j < kept, other=0.0)
        tl.atomic_max(counters + LARGEST + share, largest_in(x))
    total = tl.zeros([1], dtype=tl.int64) + tl.sum(bits, 0)
    is_last, total = add_parts(total, own + 2 * n_blocks, arrived + share * n_groups, part, n_parts, levels, 1)
    if is_last:
        tl.store(counters + BITS + share + tl.arange(0, 1), total)
        if arrive(counters + FINISHED) == SHARES - 1:
            chosen = tl.zeros([], dtype=tl.int32) + (SHARES - 1)
            for i in tl.static_range(SHARES - 1):
                fits = tl.atomic_add(counters + BITS + (SHARES - 2 - i), 0) <= room
                chosen = tl.where(fits, SHARES - 2 - i, chosen)
            final = (n.to(tl.int64) * tl.load(shares + chosen) // 128).to(tl.int32)
            final = tl.where(chosen == SHARES - 1, tl.minimum(n, sure), final)
            tl.store(found + KEPT, final.to(tl.int64))
            tl.store(found + MOST, tl.atomic_add(counters + LARGEST + chosen, 0))
            tl.store(found + SHARE, chosen.to(tl.int64))
            tl.debug_barrier()
            lane = tl.arange(0, LANES)
            tl.store(counters + lane, tl.zeros([LANES], dtype=tl.int64), mask=lane < LARGEST + SHARES)


@triton.jit
@no_type_check
def rice_parameters(gaps, counts):
    """Return the parameter of each row: `codec.rice_parameters`."""
    b = tl.zeros_like(counts)
    for i in tl.static_range(5):
        further = b + (16 >> i)
        # the shortening of all unary parts by the last bit, which costs one bit per element
        saved = tl.sum((gaps >> (further - 1)[:, None]) - (gaps >> further[:, None]), 1)
        b = tl.where(saved > counts, further, b)
    return b


@moves("indices indices", "payload", most=lambda a: 8 * a.LANES)
@triton.jit(do_not_specialize=["n_blocks", "room", "parameter", "n_words", "n_programs"])
@no_type_check
def measure_rice(
    indices,
    count,
    n_blocks,
    room,
    parameter,
    payload,
    n_words,
    found,
    counters,
    n_programs,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Find how many elements fit: `codec.rice_kept`. room: bits for the gaps."""
    clear(payload, n_words, n_programs, LANES)
    n = tl.load(count)
    block, j = rows_of(tl.program_id(0) * LANES, LANES // SIZE, SIZE)
    gaps, counts = gaps_at(indices, j, n, n), counts_at(block, n, SIZE)
    b = rice_parameters(gaps, counts)
    best = tl.sum((gaps >> b[:, None]).to(tl.int64), 1) + counts * (b + 1)
    fixed = tl.sum((gaps >> parameter).to(tl.int64), 1) + counts * (parameter + 1)
    tl.atomic_add(counters + BITS, tl.sum(best, 0))
    tl.atomic_add(counters + BITS + 1, tl.sum(fixed, 0))
    if tl.atomic_add(counters + FINISHED, 1) == n_programs - 1:
        beyond = tl.atomic_add(counters + BITS + 1, 0) - room
        each = tl.maximum(parameter, 1)
        fits = tl.atomic_add(counters + BITS, 0) <= room
        tl.store(found + KEPT, n - tl.where(fits, 0, (beyond + each - 1) // each))
        for i in tl.static_range(3):
            tl.store(counters + FINISHED + i, 0)


@moves(
    "indices indices indices values",
    "own_indices own_values found",
    lambda a: read_and_written(a.found.nbytes),
    lambda a: read_by_measure(a, 16, 2),
)
@triton.jit(do_not_specialize=["capacity", "n_blocks", "n_parts", "levels"])
@no_type_check
def place_rice(
    indices,
    values,
    count,
    capacity,
    n_blocks,
    found,
    own_indices,
    own_values,
    own_count,
    counters,
    arrived,
    n_parts,
    levels,
    SCALED: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Copy the elements that are sent, and find the parameters and the first bits of their blocks."""
    n, kept = tl.load(count), tl.load(found + KEPT).to(tl.int32)
    block, j = rows_of(tl.program_id(0) * LANES, LANES // SIZE, SIZE)
    which = element(j, n, kept)
    tl.store(own_indices + j, tl.load(indices + which, mask=j < kept, other=0), mask=j < capacity)
    x = tl.load(values + which, mask=j < kept, other=0.0)
    tl.store(own_values + j, x, mask=j < capacity)
    gaps, counts = gaps_at(indices, j, n, kept), counts_at(block, kept, SIZE)
    b = rice_parameters(gaps, counts)
    own = found + FOUND + block
    tl.store(own, b.to(tl.int64), mask=block < n_blocks)
    low = (b * counts).to(tl.int64)
    unary = tl.sum((gaps >> b[:, None]).to(tl.int64), 1) + counts
    tl.store(own + n_blocks, tl.cumsum(low, 0) - low, mask=block < n_blocks)
    tl.store(own + 2 * n_blocks, tl.cumsum(unary, 0) - unary, mask=block < n_blocks)
    if SCALED:
        tl.atomic_max(counters + LARGEST, largest_in(x))
    row = tl.arange(0, 2)
    both = tl.where(row == 0, tl.sum(low, 0), tl.sum(unary, 0))
    is_last, both = add_parts(both, found + FOUND + 3 * n_blocks, arrived, tl.program_id(0), n_parts, levels, 2)
    if is_last:
        tl.store(own_count, kept)
        tl.store(found + END, tl.sum(tl.where(row == 0, both, 0), 0))
        tl.store(found + MOST, tl.atomic_xchg(counters + LARGEST, 0))


@triton.jit
@no_type_check
def add_field(payload, at, field, is_valid):
    """Add fields of up to 31 bits, from bit `at` of the payload on. Returns their part of the checksum's sum."""
    word = at >> 5
    wide = tl.where(is_valid, field.to(tl.int64) << (at & 31), 0)
    low, high = wide & LOW, wide >> 32
    words = payload.to(tl.pointer_type(tl.int32)) + word
    tl.atomic_add(words, low.to(tl.int32), mask=low > 0, sem="relaxed")
    tl.atomic_add(words + 1, high.to(tl.int32), mask=high > 0, sem="relaxed")
    return contribution(low, 4 * word) + contribution(high, 4 * word + 4)


@triton.jit
@no_type_check
def write_gaps(
    indices,
    j,
    count,
    kept,
    n_blocks,
    stride,
    n_parts,
    levels,
    found,
    payload,
    INDEX: tl.constexpr,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the parameters and fields of the elements j, LANES of one part of PART elements. Returns what they add
    to the checksum's sum.
    """
    is_valid = j < kept
    gap = gaps_at(indices, j, count, kept)
    block = j // SIZE
    inside = block < n_blocks
    own = found + FOUND
    sums = own + 3 * n_blocks
    if INDEX == PACKED:
        own += tl.load(found + SHARE) * stride
        sums = own + 2 * n_blocks
    own += block
    part = tl.program_id(0) * LANES // PART
    ROWS: tl.constexpr = 2 if INDEX == RICE else 1
    width = tl.load(own, mask=inside, other=0)
    begin = tl.zeros_like(width) + 8 * HEADER
    total = add_field(payload, begin + 8 * block, width, inside & (j % SIZE == 0))
    begin += 8 * n_blocks
    at = begin + sum_before(sums, part, n_parts, levels, ROWS, 0)
    at += tl.load(own + n_blocks, mask=inside, other=0) + (j % SIZE) * width
    total += add_field(payload, at, gap & ((1 << width) - 1), is_valid)
    if INDEX == RICE:
        unary = tl.where(is_valid, (gap >> width) + 1, 0)
        before = tl.load(found + FOUND + 2 * n_blocks + tl.program_id(0) * (LANES // SIZE))
        before += sum_before(sums, part, n_parts, levels, ROWS, 1)
        at = begin + (tl.load(found + END) + before) + tl.cumsum(unary, 0) - 1
        total += add_field(payload, at, tl.zeros_like(at) + 1, is_valid)
    return total


@triton.jit
@no_type_check
def write_within(index, j, is_valid, n_chunks, payload):
    """As `write_gaps`: count the elements of their chunks, and write their indices within them."""
    begin = tl.zeros_like(index).to(tl.int64) + 8 * HEADER
    part = add_field(payload, begin + 16 * (index >> WITHIN), tl.zeros_like(index) + 1, is_valid)
    within = index & INSIDE
    return part + add_field(payload, begin + 16 * n_chunks + j.to(tl.int64) * WITHIN, within, is_valid)


@triton.jit
@no_type_check
def values_at(values, j, is_valid, count, kept, limit):
    x = tl.load(values + element(j, count, kept), mask=is_valid, other=0.0)
    return tl.minimum(tl.maximum(x, -limit), limit)


@triton.jit
@no_type_check
def sent_below(indices, count, kept, index):
    """Return the number of elements that are sent of lower indices."""
    low = tl.zeros([], dtype=tl.int32)
    high = kept
    while low < high:
        middle = (low + high) // 2
        below = tl.load(indices + element(middle, count, kept)) < index
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
@no_type_check
def store_number(payload, place, x):
    """Write an fp32 number. Returns what it adds to the sum of the checksum."""
    tl.store((payload + place).to(tl.pointer_type(tl.float32)), x)
    return contribution(x.to(tl.int32, bitcast=True).to(tl.int64) & LOW, place)


@triton.jit
@no_type_check
def int8_segment(values, first, last, count, kept, limit, payload, place, codes, decoded, LANES: tl.constexpr):
    """Write the scale and codes of elements first .. last - 1. Returns what they add to the checksum's sum."""
    lane = tl.arange(0, LANES)
    most = tl.zeros([], dtype=tl.float32)
    for i in range(first, last, LANES):
        x = values_at(values, i + lane, i + lane < last, count, kept, limit)
        most = tl.maximum(most, tl.max(tl.abs(x), 0))
    smallest = (tl.zeros([], dtype=tl.int32) + 1).to(tl.float32, bitcast=True)
    scale = tl.where(most > 0, tl.maximum(tl.math.div_rn(most, tl.zeros_like(most) + 127.0), smallest), 0.0)
    step = tl.where(most > 0, scale, 1.0)
    part = store_number(payload, place, scale)
    for i in range(first, last, LANES):
        j = i + lane
        is_valid = j < last
        y = tl.math.div_rn(
            values_at(values, j, is_valid, count, kept, limit), tl.zeros([LANES], tl.float32) + step
        )
        # to nearest even: at 2**23 and above there are no fractions
        y = tl.minimum(tl.maximum((y + 12582912.0) - 12582912.0, -127.0), 127.0)
        code = y.to(tl.int8)
        tl.store((payload + codes).to(tl.pointer_type(tl.int8)) + j, code, mask=is_valid)
        tl.store(decoded + j, code.to(tl.float32) * scale, mask=is_valid)
        part += tl.sum(tl.where(is_valid, contribution(code.to(tl.int64) & 0xFF, codes + j.to(tl.int64)), 0), 0)
    return part


@triton.jit
@no_type_check
def sums_of(values, first, last, count, kept, limit, SIGNED: tl.constexpr, LANES: tl.constexpr):
    """Return (the sum of elements first .. last - 1, or of their magnitudes; whether any order gives it)."""
    lane = tl.arange(0, LANES)
    total = tl.zeros([], dtype=tl.float64)
    lowest = tl.zeros([], dtype=tl.int32) + 255
    highest = tl.zeros([], dtype=tl.int32)
    for i in range(first, last, LANES):
        x = values_at(values, i + lane, i + lane < last, count, kept, limit)
        bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
        exponent = tl.maximum(bits >> 23, 1)
        lowest = tl.minimum(lowest, tl.min(tl.where(bits > 0, exponent, 255), 0))
        highest = tl.maximum(highest, tl.max(tl.where(bits > 0, exponent, 0), 0))
        total += tl.sum((x if SIGNED else tl.abs(x)).to(tl.float64), 0)
    spread = tl.maximum(highest - lowest, 0)
    exact = (spread < 30) & (last - first <= (1 << tl.maximum(29 - spread, 0)))
    if not exact:
        total = tl.zeros([], dtype=tl.float64)
        for j in range(first, last):
            x = values_at(values, tl.cast(j, tl.int32), j < last, count, kept, limit)
            total += (x if SIGNED else tl.abs(x)).to(tl.float64)
    return total, exact


@triton.jit
@no_type_check
def sign_segment(values, first, last, count, kept, limit, payload, place, codes, decoded, LANES: tl.constexpr):
    """As `int8_segment`: the mean magnitude, and signs."""
    total, _ = sums_of(values, first, last, count, kept, limit, False, LANES)
    mean = (total / tl.maximum(last - first, 1).to(tl.float64)).to(tl.float32)
    part = store_number(payload, place, mean)
    lane = tl.arange(0, LANES)
    for i in range(first, last, LANES):
        j = i + lane
        is_valid = j < last
        negative = is_valid & (values_at(values, j, is_valid, count, kept, limit) < 0)
        at = 8 * tl.cast(codes, tl.int64) + j
        part += tl.sum(add_field(payload, at, tl.zeros_like(at) + 1, negative), 0)
        tl.store(decoded + j, tl.where(negative, -mean, mean), mask=is_valid)
    return part


@triton.jit
@no_type_check
def bin_of(above, width):
    return (above >= -width).to(tl.int32) + (above >= 0).to(tl.int32) + (above >= width).to(tl.int32)


@triton.jit
@no_type_check
def two_bit_segment(
    values, first, last, count, kept, limit, widths, payload, place, codes, decoded, LANES: tl.constexpr
):
    """As `int8_segment`: the means of 4 bins, and the numbers of bins. widths: width of a bin, in deviations."""
    lane = tl.arange(0, LANES)
    total, exact = sums_of(values, first, last, count, kept, limit, True, LANES)
    n = tl.maximum(last - first, 1).to(tl.float64)
    mean = total / n
    squares = tl.zeros([], dtype=tl.float64)
    for i in range(first, last, LANES):
        is_valid = i + lane < last
        above = values_at(values, i + lane, is_valid, count, kept, limit).to(tl.float64) - mean
        squares += tl.sum(tl.where(is_valid, above * above, 0.0), 0)
    width = tl.sqrt(squares / n) * tl.load(widths)
    # sums of n squares in two orders differ by less than 2 n roundings
    slack = width * ((4 * n + 32) * 1.1102230246251565e-16)
    near = tl.zeros([], dtype=tl.int32)
    for i in range(first, last, LANES):
        is_valid = i + lane < last
        above = values_at(values, i + lane, is_valid, count, kept, limit).to(tl.float64) - mean
        near += tl.sum((is_valid & (tl.abs(tl.abs(above) - width) <= slack)).to(tl.int32), 0)
    if (near > 0) & (squares > 0):
        squares = tl.zeros([], dtype=tl.float64)
        for j in range(first, last):
            x = values_at(values, tl.cast(j, tl.int32), j < last, count, kept, limit)
            above = x.to(tl.float64) - mean
            squares += above * above
        width = tl.sqrt(squares / n) * tl.load(widths)
    number = tl.arange(0, 4)
    sums, counts = tl.zeros([4], dtype=tl.float64), tl.zeros([4], dtype=tl.int32)
    part = tl.zeros([], dtype=tl.int64)
    for i in range(first, last, LANES):
        j = i + lane
        is_valid = j < last
        x = values_at(values, j, is_valid, count, kept, limit).to(tl.float64)
        bin = bin_of(x - mean, width)
        part += tl.sum(add_field(payload, 8 * tl.cast(codes, tl.int64) + 2 * j, bin, is_valid), 0)
        for b in tl.static_range(4):
            own = is_valid & (bin == b)
            sums += tl.where(number == b, tl.sum(tl.where(own, x, 0.0), 0), 0.0)
            counts += tl.where(number == b, tl.sum(own.to(tl.int32), 0), 0)
    if not exact:
        sums = tl.zeros([4], dtype=tl.float64)
        for j in range(first, last):
            x = values_at(values, tl.cast(j, tl.int32), j < last, count, kept, limit).to(tl.float64)
            sums += tl.where(number == bin_of(x - mean, width), x, 0.0)
    means = (sums / tl.maximum(counts, 1).to(tl.float64)).to(tl.float32)
    part += tl.sum(store_number(payload, place + 4 * number, means), 0)
    for i in range(first, last, LANES):
        j = i + lane
        bin = bin_of(values_at(values, j, j < last, count, kept, limit).to(tl.float64) - mean, width)
        y = tl.zeros([LANES], dtype=tl.float32)
        for b in tl.static_range(4):
            y = tl.where(bin == b, tl.sum(tl.where(number == b, means, 0.0), 0), y)
        tl.store(decoded + j, y, mask=j < last)
    return part


CODED_SIZES = "capacity n_blocks stride n_found levels n_segments begin codes".split()


def read_by_write_coded(a: Any) -> int:
    """Return the most bytes that a program reads: for each element its index, value and gap, and the parameter and
    first bit of its block; or all sent elements of a tensor, for signs and int8 twice, for 2 bits five times, and
    where sums must be added one by one once or three times more.
    """
    passes = {SIGN.value: 3, INT8.value: 2}.get(a.KIND, 8) if a.KIND > BF16.value else 0
    return max(32 * a.LANES, 4 * passes * a.capacity)


@moves(
    "indices indices indices values values values values bounds widths tensors payload",
    "payload decoded own_indices own_values",
    most=read_by_write_coded,
)
@triton.jit(do_not_specialize=[*CODED_SIZES, "ratio", "form", "n_programs", "n_bounds"])
@no_type_check
def write_coded(
    indices,
    values,
    count,
    first,
    tensors,
    n_bounds,
    capacity,
    limit,
    largest,
    found,
    n_blocks,
    stride,
    n_found,
    levels,
    bounds,
    n_segments,
    widths,
    payload,
    begin,
    codes,
    decoded,
    own_indices,
    own_values,
    own_count,
    ratio,
    form,
    counters,
    n_programs,
    INDEX: tl.constexpr,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    PART: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write a payload of coded indices, or tables, or both, into zeros.

    A program writes LANES elements, or the table and the codes of a segment. stride, n_found, levels: what a share
    takes of `found`, its parts of PART elements, and the levels of their sums. begin, codes: first byte of the
    values, and of the codes. own_*: written if indices are packed: the part of the selection that is sent. If not,
    the selection is that part.
    """
    p = tl.program_id(0)
    n_parts = (capacity + LANES - 1) // LANES
    n = tl.load(count)
    kept = n
    scale = tl.zeros([], dtype=tl.float32) + 1.0
    part = tl.zeros([], dtype=tl.int64)
    if INDEX == PACKED:
        kept = tl.load(found + KEPT).to(tl.int32)
    if p < n_parts:
        j = p * LANES + tl.arange(0, LANES)
        inside, is_valid = j < capacity, j < kept
        which = element(j, n, kept)
        index = tl.load(indices + which, mask=is_valid, other=0)
        x = tl.load(values + which, mask=is_valid, other=0.0)
        if INDEX == CHUNKS:
            sums = write_within(index, j, is_valid, n_blocks, payload)
        elif INDEX > INT64:
            sums = write_gaps(
                indices, j, n, kept, n_blocks, stride, n_found, levels, found, payload, INDEX, SIZE, PART, LANES
            )
            if INDEX == PACKED:
                tl.store(own_indices + j, index, mask=inside)
                tl.store(own_values + j, x, mask=inside)
                tl.store(own_count, kept, mask=p == 0)
        elif INDEX == INT64:
            tl.store((payload + HEADER).to(tl.pointer_type(tl.int64)) + j, index.to(tl.int64), mask=inside)
            sums = index.to(tl.int64) * (2 * (j + HEADER_WORDS) + 1)
        else:
            tl.store((payload + HEADER).to(tl.pointer_type(tl.int32)) + j, index, mask=inside)
            sums = contribution(index.to(tl.int64), 4 * j.to(tl.int64) + HEADER)
        if KIND <= BF16:
            most = tl.zeros([], dtype=tl.int32)
            if KIND != FP32:
                most = tl.load(largest).to(tl.int32)
            bits, y, scale = cast_to(x, limit, most, KIND, LANES)
            sums += store_cast(payload, begin, j, bits, is_valid, KIND)
            tl.store(decoded + j, tl.where(is_valid, y, 0.0), mask=inside)
        else:
            tl.store(decoded + j, tl.zeros([LANES], dtype=tl.float32), mask=inside & (j >= kept))
        part = tl.sum(tl.where(inside, sums, 0), 0)
    if KIND > BF16:
        s = p - n_parts
        if (s >= 0) & (s < n_segments):
            # elements outside all segments belong to the first or last
            low = tl.zeros([], dtype=tl.int32)
            if s > 0:
                low = sent_below(indices, n, kept, tl.load(bounds + s))
            high = kept
            if s < n_segments - 1:
                high = sent_below(indices, n, kept, tl.load(bounds + s + 1))
            if KIND == INT8:
                place = begin + 4 * s.to(tl.int64)
                part = int8_segment(values, low, high, n, kept, limit, payload, place, codes, decoded, LANES)
            elif KIND == SIGN:
                place = begin + 4 * s.to(tl.int64)
                part = sign_segment(values, low, high, n, kept, limit, payload, place, codes, decoded, LANES)
            else:
                place = begin + 16 * s.to(tl.int64)
                part = two_bit_segment(
                    values, low, high, n, kept, limit, widths, payload, place, codes, decoded, LANES
                )
    number = found if INDEX == PACKED else count
    finish(payload, part, counters, n_programs, number, first, tensors, n_bounds, scale, ratio, form, LANES)
