"""GPU kernels of the exact selection, by radix digits.

The bits of |v| as an integer have the same order as |v|. The threshold of a segment is therefore the largest
31-bit number that at least k magnitudes reach. It is found in three digits of 11, 10 and 10 bits:

    count_digits   per tile: histogram of the next digit of the magnitudes that begin with the digits found so far
    pick_digits    per segment: the digit that contains rank k; k is reduced by the counts of higher digits

Then `tally` counts per tile the magnitudes greater than and equal to the threshold. `offsets` turns the counts
into positions in the output. `write` writes all greater elements, and as many of the first equal ones as needed.
Only integers are added atomically, so results do not depend on the order in which programs run.

A segment is stocked if it has enough candidates (see `triton_passes`), at least k or all non-zero elements, and no
tile had more than its slots. The kernels then read its slots instead of v. This is decided on the device, so no
launch waits for it.
"""

from typing import no_type_check

import triton
import triton.language as tl

from dgc.kernels.selection.triton_passes import MAGNITUDE, SIZES

BINS = tl.constexpr(2048)
# Special values in place of a threshold's digits. ALL: fewer than k elements are non-zero. NONE: k is 0.
ALL = tl.constexpr(-1)
NONE = tl.constexpr(-2)


@triton.jit
@no_type_check
def stocked(s, ks, counts, n_segments):
    """Whether the candidates suffice for segment s. counts: candidates, then non-zero elements, per segment."""
    count = tl.load(counts + s)
    return (count >= tl.load(ks + s)) | (count == tl.load(counts + n_segments + s))


@triton.jit
@no_type_check
def add_digits(source, length, histogram, prefix, SHIFT: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    x = tl.load(source + lane, mask=lane < length, other=0.0)
    bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
    counted = (bits > 0) & ((bits >> SHIFT >> BITS) == prefix)
    if tl.max(counted.to(tl.int32), 0) > 0:
        # count in shared memory first: most gradients share a few digits, and atomics on one address are slow
        inside = tl.histogram((bits >> SHIFT) & ((1 << BITS) - 1), 1 << BITS, mask=counted)
        tl.atomic_add(histogram + tl.arange(0, 1 << BITS), inside, mask=inside > 0, sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def count_digits(
    tiles, n_tiles, v, ks, counts, n_segments, held, slot_values, histograms, prefixes,
    TILE: tl.constexpr, SLOTS: tl.constexpr, LOWER_BOUNDS: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    start = tl.load(tiles + t)
    length = tl.load(tiles + n_tiles + t)
    s = tl.load(tiles + 2 * n_tiles + t)
    prefix = 0
    if SHIFT < 20:
        prefix = tl.load(prefixes + s)
    histogram = histograms + s.to(tl.int64) * BINS
    if LOWER_BOUNDS:
        if stocked(s, ks, counts, n_segments):
            length = 0
            row = slot_values + t.to(tl.int64) * SLOTS
            add_digits(row, tl.load(held + t), histogram, prefix, SHIFT, BITS, SLOTS)
    if length > 0:
        add_digits(v + start, length, histogram, prefix, SHIFT, BITS, TILE)


@triton.jit(do_not_specialize=["n_segments"])
@no_type_check
def pick_digits(
    histograms, ks, counts, n_segments, missed, prefixes, wanted, chosen, thresholds,
    LOWER_BOUNDS: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One program per segment. It clears the histogram for the next digit."""
    s = tl.program_id(0)
    digit = tl.arange(0, 1 << BITS)
    row = histograms + s.to(tl.int64) * BINS + digit
    count = tl.load(row)
    tl.store(row, tl.zeros_like(count))
    higher = tl.cumsum(count, 0, reverse=True) - count
    if SHIFT == 20:
        k = tl.load(ks + s)
        nonzero = tl.sum(count, 0).to(tl.int64)
        tl.store(chosen + s, tl.minimum(k, nonzero).to(tl.int32))
        before = tl.where(k == 0, NONE, tl.where(nonzero < k, ALL, 0))
        if LOWER_BOUNDS:
            if not stocked(s, ks, counts, n_segments):
                tl.atomic_add(missed, 1, sem="relaxed")
    else:
        k = tl.load(wanted + s).to(tl.int64)
        before = tl.load(prefixes + s)
    holds = (higher < k) & (higher + count >= k)
    found = tl.sum(tl.where(holds, digit, 0), 0)
    remaining = tl.where(before < 0, 0, k.to(tl.int32) - tl.sum(tl.where(holds, higher, 0), 0))
    prefix = tl.where(before < 0, before, (before << BITS) | found)
    tl.store(wanted + s, remaining)
    if SHIFT > 0:
        tl.store(prefixes + s, prefix)
    else:
        # limits for comparison: no magnitude exceeds NONE's, every non-zero magnitude exceeds ALL's
        tl.store(prefixes + s, tl.where(prefix == NONE, MAGNITUDE, tl.maximum(prefix, 0)))
        tl.store(thresholds + s, tl.maximum(prefix, 0).to(tl.float32, bitcast=True))


@triton.jit
@no_type_check
def tally_tile(source, length, limit, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    x = tl.load(source + lane, mask=lane < length, other=0.0)
    bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
    greater = tl.sum((bits > limit).to(tl.int64), 0)
    return (greater << 32) + tl.sum(((bits == limit) & (bits > 0)).to(tl.int64), 0)


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def tally(
    tiles, n_tiles, v, ks, counts, n_segments, held, slot_values, limits, tallies,
    TILE: tl.constexpr, SLOTS: tl.constexpr, LOWER_BOUNDS: tl.constexpr,
):  # fmt: skip
    """tallies[t]: number of magnitudes above the threshold in the high 32 bits, equal ones in the low 32 bits."""
    t = tl.program_id(0)
    start = tl.load(tiles + t)
    length = tl.load(tiles + n_tiles + t)
    s = tl.load(tiles + 2 * n_tiles + t)
    limit = tl.load(limits + s)
    found = tl.zeros([], dtype=tl.int64)
    if LOWER_BOUNDS:
        if stocked(s, ks, counts, n_segments):
            length = 0
            found = tally_tile(slot_values + t.to(tl.int64) * SLOTS, tl.load(held + t), limit, SLOTS)
    if length > 0:
        found = tally_tile(v + start, length, limit, TILE)
    tl.store(tallies + t, found)


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def offsets(tallies, n_tiles, chosen, n_segments, count, BLOCK: tl.constexpr):
    """One program: exclusive sums, in place, over tiles and over segments. tallies has n_tiles + 1 entries."""
    lane = tl.arange(0, BLOCK)
    before = tl.zeros([], dtype=tl.int64)
    for i in range(0, n_tiles, BLOCK):
        own = tl.load(tallies + i + lane, mask=lane < n_tiles - i, other=0)
        tl.store(tallies + i + lane, before + tl.cumsum(own, 0) - own, mask=lane < n_tiles - i)
        before += tl.sum(own, 0)
    tl.store(tallies + n_tiles, before)
    total = tl.zeros([], dtype=tl.int32)
    for i in range(0, n_segments, BLOCK):
        ours = tl.load(chosen + i + lane, mask=lane < n_segments - i, other=0)
        tl.store(chosen + i + lane, total + tl.cumsum(ours, 0) - ours, mask=lane < n_segments - i)
        total += tl.sum(ours, 0)
    tl.store(count, total)


@triton.jit
@no_type_check
def write_tile(
    source, lanes, length, start, limit, room, place, indices, values, SLOTTED: tl.constexpr, LANES: tl.constexpr
):
    lane = tl.arange(0, LANES)
    x = tl.load(source + lane, mask=lane < length, other=0.0)
    bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
    equal = ((bits == limit) & (bits > 0)).to(tl.int32)
    chosen = (bits > limit) | ((equal > 0) & (tl.cumsum(equal, 0) <= room))
    where = place + tl.cumsum(chosen.to(tl.int32), 0) - 1
    if SLOTTED:
        lane = tl.load(lanes + lane, mask=chosen, other=0)
    tl.store(indices + where, start + lane, mask=chosen)
    tl.store(values + where, x, mask=chosen)


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def write(
    tiles, n_tiles, first_tiles, v, ks, counts, n_segments, held, slot_values, slot_lanes, limits, wanted, tallies,
    places, indices, values, TILE: tl.constexpr, SLOTS: tl.constexpr, LOWER_BOUNDS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    before = tl.load(tallies + t)
    if tl.load(tallies + t + 1) > before:
        start = tl.load(tiles + t)
        length = tl.load(tiles + n_tiles + t)
        s = tl.load(tiles + 2 * n_tiles + t)
        limit = tl.load(limits + s)
        # within the segment; low halves never carry into high ones: a bucket has fewer than 2**31 elements
        before -= tl.load(tallies + tl.load(first_tiles + s))
        equal = (before & 0xFFFFFFFF).to(tl.int32)
        room = tl.load(wanted + s)
        place = tl.load(places + s) + (before >> 32).to(tl.int32) + tl.minimum(equal, room)
        room -= equal
        if LOWER_BOUNDS:
            if stocked(s, ks, counts, n_segments):
                length = 0
                row = t.to(tl.int64) * SLOTS
                write_tile(
                    slot_values + row, slot_lanes + row, tl.load(held + t), start, limit, room, place,
                    indices, values, True, SLOTS,
                )  # fmt: skip
        if length > 0:
            write_tile(v + start, slot_lanes, length, start, limit, room, place, indices, values, False, TILE)
