"""Triton kernels of payloads with codes of indices, and with tables of values for each tensor."""

from typing import Any, no_type_check

import triton
import triton.language as tl

from dgc.kernels.launch import moves, of_each, read_and_written
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
# What is known of a segment's values: bits of the largest magnitude, number of elements, sum, and of bins these
MOST_IN, MEMBERS, SUM_OF, SQUARES_OF, BIN_MEMBERS = (tl.constexpr(i) for i in range(5))
BIN_SUMS, FIELDS = tl.constexpr(8), tl.constexpr(12)
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
    lambda a: read_by_measure(a, 12 if a.SCALED else 8),
    bytes_of_measure_packed,
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


@moves("indices indices", "payload", of_each(8, "LANES"))
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
    lambda a: read_by_measure(a, 16, 2),
    lambda a: read_and_written(a.found.nbytes),
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
def limited(x, limit):
    """NaN stays NaN."""
    return tl.where(x == x, tl.minimum(tl.maximum(x, -limit), limit), x)


@triton.jit
@no_type_check
def segment_of(index, bounds, n_segments):
    """Return the segment of an index. Indices outside all segments belong to the first or the last one."""
    low = tl.zeros([], dtype=tl.int32)
    high = low + (n_segments - 1)
    while low < high:
        middle = (low + high + 1) // 2
        begins = tl.load(bounds + middle) <= index
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle - 1)
    return low


@triton.jit
@no_type_check
def segments_in(indices, first, count, kept, bounds, n_segments, LANES: tl.constexpr):
    """Return the first segment of elements first .. first + LANES - 1, and the one after their last segment."""
    last = tl.maximum(tl.minimum(first + LANES, kept), 1) - 1
    begin = segment_of(tl.load(indices + element(tl.minimum(first, last), count, kept)), bounds, n_segments)
    end = segment_of(tl.load(indices + element(last, count, kept)), bounds, n_segments) + 1
    return begin, tl.where(first < kept, end, begin)


@triton.jit
@no_type_check
def is_in(index, segment, bounds, n_segments):
    above = (index >= tl.load(bounds + segment)) | (segment == 0)
    return above & ((index < tl.load(bounds + segment + 1)) | (segment == n_segments - 1))


@triton.jit
@no_type_check
def power_of(exponent):
    return (tl.cast(exponent + 1023, tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
@no_type_check
def shift_of(most, members, SQUARED: tl.constexpr):
    """Return the exponent of the scale of a segment's values, or of the squares: `FixedPoint`."""
    exponent = tl.maximum(most >> 23, 1) - 126
    length = (tl.maximum(members, 1).to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1022
    return 62 - length - (2 * exponent + 2 if SQUARED else exponent)


@triton.jit
@no_type_check
def fixed_sum(x, chosen, shift):
    """Return the sum of the chosen values, as integers."""
    return tl.sum(tl.where(chosen, x * power_of(shift), 0.0).to(tl.int64), 0)


@triton.jit
@no_type_check
def mean_in(total, count, shift, most):
    """Return the mean of values whose sum as integers is `total`, NaN if a value of the segment is not finite."""
    mean = total.to(tl.float64) * power_of(-shift) / tl.maximum(count, 1).to(tl.float64)
    nan = (tl.zeros_like(count) + 0x7FF8000000000000).to(tl.float64, bitcast=True)
    return tl.where(most >= INFINITE, nan, mean)


@triton.jit
@no_type_check
def mean_of(fields, most, members):
    return mean_in(tl.load(fields + SUM_OF), members, shift_of(most, members, False), most)


@triton.jit
@no_type_check
def bins_of(x, fields, most, members, widths):
    """Return the bin of each value of a segment. widths: width of a bin, in deviations."""
    squares = mean_in(tl.load(fields + SQUARES_OF), members, shift_of(most, members, True), most)
    width = tl.sqrt(squares) * tl.load(widths)
    above = x.to(tl.float64) - mean_of(fields, most, members)
    return (above >= -width).to(tl.int32) + (above >= 0).to(tl.int32) + (above >= width).to(tl.int32)


@triton.jit
@no_type_check
def number_of(fields, b, most, members, KIND: tl.constexpr):
    """Return number b of a segment's table."""
    if KIND == SIGN:
        number = mean_of(fields, most, members).to(tl.float32)
    elif KIND == INT8:
        largest = most.to(tl.int32).to(tl.float32, bitcast=True)
        smallest = (tl.zeros_like(largest).to(tl.int32) + 1).to(tl.float32, bitcast=True)
        scale = tl.maximum(tl.math.div_rn(largest, tl.zeros_like(largest) + 127.0), smallest)
        number = tl.where(largest == 0, 0.0, tl.where(largest > 0, scale, largest))
    else:
        total, count = tl.load(fields + BIN_SUMS + b), tl.load(fields + BIN_MEMBERS + b)
        number = mean_in(total, count, shift_of(most, members, False), most).to(tl.float32)
    return number


@moves("indices values", "", of_each(8, "LANES"), lambda a: read_and_written(8 * FIELDS.value * a.programs))
@triton.jit(do_not_specialize=["n_segments"])
@no_type_check
def add_up(
    indices,
    values,
    count,
    found,
    limit,
    bounds,
    n_segments,
    fields,
    widths,
    INDEX: tl.constexpr,
    KIND: tl.constexpr,
    FIELD: tl.constexpr,
    LANES: tl.constexpr,
):
    """Each program adds LANES of the elements that are sent to one field of their segments, or to those of bins.

    fields: FIELDS of each segment, zeros but for those before this one. `write_coded` makes them zeros again.
    """
    n = tl.load(count)
    kept = n
    if INDEX == PACKED:
        kept = tl.load(found + KEPT).to(tl.int32)
    first = tl.program_id(0) * LANES
    if first < kept:
        j = first + tl.arange(0, LANES)
        which = element(j, n, kept)
        index = tl.load(indices + which, mask=j < kept, other=0)
        x = limited(tl.load(values + which, mask=j < kept, other=0.0), limit)
        begin, end = segments_in(indices, first, n, kept, bounds, n_segments, LANES)
        for segment in range(begin, end):
            own = (j < kept) & is_in(index, segment, bounds, n_segments)
            here = fields + tl.cast(segment, tl.int64) * FIELDS
            if FIELD == MOST_IN:
                bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
                tl.atomic_max(here + MOST_IN, tl.max(tl.where(own, bits, 0), 0).to(tl.int64))
                tl.atomic_add(here + MEMBERS, tl.sum(own.to(tl.int64), 0))
            else:
                most, members = tl.load(here + MOST_IN), tl.load(here + MEMBERS)
                shift = shift_of(most, members, FIELD == SQUARES_OF)
                # nothing is added where a value is not finite
                own = own & (most < INFINITE)
                wide = x.to(tl.float64)
                if FIELD == SUM_OF:
                    tl.atomic_add(here + SUM_OF, fixed_sum(tl.abs(wide) if KIND == SIGN else wide, own, shift))
                elif FIELD == SQUARES_OF:
                    above = wide - mean_of(here, most, members)
                    tl.atomic_add(here + SQUARES_OF, fixed_sum(above * above, own, shift))
                else:
                    bins = bins_of(x, here, most, members, widths)
                    for b in tl.static_range(4):
                        chosen = own & (bins == b)
                        tl.atomic_add(here + BIN_MEMBERS + b, tl.sum(chosen.to(tl.int64), 0))
                        tl.atomic_add(here + BIN_SUMS + b, fixed_sum(wide, chosen, shift))


@triton.jit
@no_type_check
def write_table(segment, fields, payload, begin, KIND: tl.constexpr):
    """Write the numbers of a segment. Returns what they add to the checksum's sum."""
    NUMBERS: tl.constexpr = 1 if KIND <= INT8 else 4
    total = tl.zeros([], dtype=tl.int64)
    fields += tl.cast(segment, tl.int64) * FIELDS
    most, members = tl.load(fields + MOST_IN), tl.load(fields + MEMBERS)
    for b in tl.static_range(NUMBERS):
        number = number_of(fields, b, most, members, KIND)
        place = begin + 4 * (NUMBERS * tl.cast(segment, tl.int64) + b)
        tl.store((payload + place).to(tl.pointer_type(tl.float32)), number)
        total += contribution(number.to(tl.int32, bitcast=True).to(tl.int64) & LOW, place)
    return total


@triton.jit
@no_type_check
def write_codes(
    indices,
    index,
    x,
    j,
    first,
    count,
    kept,
    bounds,
    n_segments,
    fields,
    widths,
    payload,
    codes,
    decoded,
    capacity,
    KIND: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the codes of the elements j, whose values are x, and what they decode to. Returns what the codes add
    to the checksum's sum.
    """
    is_valid = j < kept
    begin, end = segments_in(indices, first, count, kept, bounds, n_segments, LANES)
    code, y = tl.zeros([LANES], dtype=tl.int32), tl.zeros([LANES], dtype=tl.float32)
    for segment in range(begin, end):
        own = is_valid & is_in(index, segment, bounds, n_segments)
        here = fields + tl.cast(segment, tl.int64) * FIELDS
        most, members = tl.load(here + MOST_IN), tl.load(here + MEMBERS)
        if KIND == SIGN:
            mean = number_of(here, 0, most, members, KIND)
            y = tl.where(own, tl.where(x < 0, -mean, mean), y)
            code = tl.where(own, (x < 0).to(tl.int32), code)
        elif KIND == INT8:
            y = tl.where(own, number_of(here, 0, most, members, KIND), y)
        else:
            bins = bins_of(x, here, most, members, widths)
            for b in tl.static_range(4):
                y = tl.where(own & (bins == b), number_of(here, b, most, members, KIND), y)
            code = tl.where(own, bins, code)
    if KIND == INT8:
        z = tl.math.div_rn(x, tl.where(y > 0, y, 1.0))
        # to nearest even: at 2**23 and above there are no fractions
        z = tl.minimum(tl.maximum((z + 12582912.0) - 12582912.0, -127.0), 127.0)
        code = z.to(tl.int32)
        y *= z
    tl.store(decoded + j, y, mask=j < capacity)
    if KIND == INT8:
        tl.store((payload + codes).to(tl.pointer_type(tl.int8)) + j, code.to(tl.int8), mask=is_valid)
        sums = tl.where(is_valid, contribution((code & 0xFF).to(tl.int64), codes + j.to(tl.int64)), 0)
    else:
        WIDTH: tl.constexpr = 1 if KIND == SIGN else 2
        sums = add_field(payload, 8 * tl.cast(codes, tl.int64) + WIDTH * j, code, is_valid)
    return sums


CODED_SIZES = "capacity n_blocks stride n_found levels n_segments begin codes".split()


@moves(
    "indices indices values payload",
    "payload decoded own_indices own_values",
    of_each(32, "LANES"),  # index, value and gap, and the parameter and first bit of the block
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
    fields,
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

    A program writes LANES elements, or the table of a segment. stride, n_found, levels: what a share takes
    of `found`, its parts of PART elements, and the levels of their sums. fields: of segments (`add_up`). begin,
    codes: first byte of the values, and of the codes. own_*: written if indices are packed: the part of the
    selection that is sent. If not, the selection is that part.
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
            sums += write_codes(
                indices,
                index,
                limited(x, limit),
                j,
                p * LANES,
                n,
                kept,
                bounds,
                n_segments,
                fields,
                widths,
                payload,
                codes,
                decoded,
                capacity,
                KIND,
                LANES,
            )
        part = tl.sum(tl.where(inside, sums, 0), 0)
    elif KIND > BF16:
        if p - n_parts < n_segments:
            part = write_table(p - n_parts, fields, payload, begin, KIND)
    number = found if INDEX == PACKED else count
    is_last = finish(payload, part, counters, n_programs, number, first, tensors, n_bounds, scale, ratio, form)
    if KIND > BF16:
        if is_last:
            lane = tl.arange(0, LANES)
            for i in range(0, n_segments * FIELDS, LANES):
                tl.store(fields + i + lane, tl.zeros([LANES], tl.int64), mask=i + lane < n_segments * FIELDS)
