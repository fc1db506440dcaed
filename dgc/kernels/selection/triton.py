"""The GPU backend of the selection: Triton kernels with the same results and bits as `SelectionKernels`.

Each operation takes a fixed number of launches per bucket, independent of the number of tensors: accumulate_ 1,
assign_ 1, select 5, accumulate_and_select_ 6, moments 2, tail 2, remove_sent_ 1, merge_mean 3, subtract_at_ 1 per
dtype of the targets, decay_ 1, and 1 more for a pass that removes sent elements.
Torch adds a few of its own: 1 for the results of a selection, if its pass removes nothing; in merge_mean a stable
sort and a cumulative sum. Nothing waits for the device.

The bits are equal because kernels are compiled without contraction to FMA, which would skip the rounding of a
product, floats are never added atomically, and division is correctly rounded. Without a GPU the kernels run in
Triton's interpreter if TRITON_INTERPRET=1 is set before Triton is first imported.

Kernels are not specialised for sizes that change from step to step, because each variant would be compiled during
training.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate as running_sums
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Int32, Int64
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dgc.kernels.launch import (
    BLOCK,
    SECTOR,
    Launcher,
    Tiling,
    Tilings,
    blocks,
    current_stream,
    divided,
    moves,
    of_each,
    on_device,
    pointers,
    read_and_written,
    scratch_on,
    zeros_on,
)
from dgc.kernels.selection import (
    Bounds,
    Budget,
    Dense,
    Each,
    Indices,
    Merged,
    Moments,
    PassInputs,
    Prediction,
    SelectionKernels,
    SparseVector,
    Tail,
    TopKResult,
    Values,
)

if not hasattr(triton, "knobs"):
    raise ImportError(f"Triton {triton.__version__} is too old: these kernels need Triton 3.4 or later")

INTERPRETED = triton.knobs.runtime.interpret
FLOATS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# Arguments that differ between buckets. Specialization for 1 or multiples of 16 would only add compilations.
SIZES = ["n_tiles", "n_segments"]
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SUMS = 1024  # tiles that are summed at a time


@triton.jit
@no_type_check
def random_bits(i, key, inner_key):
    """Return 32 bits per index, as uint32."""
    x = i.to(tl.uint32) + key.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15) ^ inner_key.to(tl.uint32, bitcast=True)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
@no_type_check
def tile_at(tiles, n_tiles):
    """Return a program's tile: at most TILE adjacent elements of one segment and one piece (see `blocks`).

    Returns (its number, its first element, the number of elements, its segment).
    """
    t = tl.program_id(0)
    return t, tl.load(tiles + t), tl.load(tiles + n_tiles + t), tl.load(tiles + 2 * n_tiles + t)


@triton.jit
@no_type_check
def read(source, length, LANES: tl.constexpr):
    """Return (lanes, elements, bits of their magnitudes). The elements from `length` on are zero."""
    lane = tl.arange(0, LANES)
    x = tl.load(source + lane, mask=lane < length, other=0.0)
    return lane, x, x.to(tl.int32, bitcast=True) & MAGNITUDE


# --- the dense pass --------------------------------------------------------------------------------

TOO_LARGE = tl.constexpr(0x5F800000)  # the bits of selection.TOO_LARGE
# Added to a segment's count of candidates when a tile has too many. No sum of real counts can cancel it.
OVERFULL = tl.constexpr(-(1 << 40))
ASSIGN = tl.constexpr(3)


def bytes_of_gradients(a: Any) -> int:
    """Return the bytes of g that `accumulate` reads, less the bytes of v where it does not read v."""
    width: int = a.G.primitive_bitwidth // 8
    return a.n * (width - (4 if a.FORM == ASSIGN.value else 0))


@triton.jit
@no_type_check
def predicted(last, before, margin, s):
    """Return the lower bound of segment s: `SelectionKernels.predicted_lower_bounds`."""
    now = tl.load(last + s)
    then = tl.load(before + s)
    ratio = tl.math.div_rn(now, tl.where((then == 0) | (now == then), 1.0, then))
    ratio = tl.where(now == then, 1.0, tl.where(then == 0, float("inf"), ratio))
    growth = tl.minimum(tl.maximum(ratio, 0.97), 1.2)
    return (now * growth) * margin


@triton.jit
@no_type_check
def load_tile(source, u, v, start, length, TILE: tl.constexpr, FORM: tl.constexpr):
    """Return g, v and u of a tile, and g in the place of what the FORM does not read."""
    lane = tl.arange(0, TILE)
    is_valid = lane < length
    g = tl.load(source + lane, mask=is_valid, other=0.0).to(tl.float32)
    x = g
    m = g
    if FORM < ASSIGN:
        x = tl.load(v + start + lane, mask=is_valid, other=0.0)
    if (FORM == 1) | (FORM == 2):
        m = tl.load(u + start + lane, mask=is_valid, other=0.0)
    return g, x, m


@triton.jit
@no_type_check
def store_tile(u, v, start, length, m, x, TILE: tl.constexpr, FORM: tl.constexpr):
    lane = tl.arange(0, TILE)
    is_valid = lane < length
    if (FORM == 1) | (FORM == 2):
        tl.store(u + start + lane, m, mask=is_valid)
    tl.store(v + start + lane, x, mask=is_valid)


@moves(
    "tiles u v",
    "u v held slot_values slot_lanes gathered",
    lambda a: a.TILE * (a.G.primitive_bitwidth // 8 + 8),
    lambda a: (bytes_of_gradients(a), 0),
)
@triton.jit(do_not_specialize=[*SIZES, "n"])
@no_type_check
def accumulate(
    tiles,
    n_tiles,
    n,
    sources,
    u,
    v,
    factor,
    first_unusable,
    last,
    before,
    margin,
    counts,
    fill,
    n_segments,
    rooms,
    gathered,
    held,
    slot_values,
    slot_lanes,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    G: tl.constexpr,
    FORM: tl.constexpr,
    SELECTS: tl.constexpr,
    LOWER_BOUNDS: tl.constexpr,
):
    """Do the pass. FORM: 0 without u, 1 plain momentum, 2 Nesterov, 3 (ASSIGN) v = g. factor: decay or momentum.

    first_unusable: if a selection follows, the distance from the end, which is 0 if all of g is usable.

    With LOWER_BOUNDS, a tile's elements at or above its segment's lower bound are written, in order, to the tile's
    slots. The following selection then does not read v again. They are also gathered by segment, in any order.
    """
    t, start, length, s = tile_at(tiles, n_tiles)
    piece = tl.load(tiles + 3 * n_tiles + t)
    inner = tl.load(tiles + 4 * n_tiles + t)
    if LOWER_BOUNDS:
        lower_bound = predicted(last, before, margin, s).to(tl.int32, bitcast=True) & MAGNITUDE
    lane = tl.arange(0, TILE)
    address = tl.load(sources + piece)
    # Multiples of a constant show the compiler that it can load and store 128 bits at a time. `tl.multiple_of`
    # marks the operation that made its argument, so `start` would be marked in both branches.
    aligned = ((start | length | inner) % 8 == 0) & (address % 16 == 0)
    start8 = start // 8 * 8
    length8 = length // 8 * 8
    # all loads before the first reduction, which is a barrier
    if aligned:
        source = tl.multiple_of(address.to(tl.pointer_type(G)), 16) + inner // 8 * 8
        g, x, m = load_tile(source, u, v, start8, length8, TILE, FORM)
    else:
        g, x, m = load_tile(address.to(tl.pointer_type(G)) + inner, u, v, start, length, TILE, FORM)
    bad = (g.to(tl.int32, bitcast=True) & MAGNITUDE) >= TOO_LARGE
    first_bad = tl.min(tl.where(bad, lane, TILE), 0)
    if first_bad < TILE:
        if SELECTS:
            tl.atomic_max(first_unusable, n - (start.to(tl.int64) + first_bad), sem="relaxed")
        else:
            tl.atomic_min(first_unusable, start.to(tl.int64) + first_bad, sem="relaxed")
    g = tl.where(bad, 0.0, g)
    if FORM == ASSIGN:
        x = g
    elif FORM == 0:
        x = factor * x + g
    else:
        if FORM == 1:
            m = factor * m + g
            x = x + m
        else:
            m = factor * (m + g)
            x = (x + m) + g
    if aligned:
        store_tile(u, v, start8, length8, m, x, TILE, FORM)
    else:
        store_tile(u, v, start, length, m, x, TILE, FORM)
    if LOWER_BOUNDS:
        bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
        passes = (bits > 0) & (bits >= lower_bound)
        count = tl.sum(passes.to(tl.int32), 0)
        place = tl.cumsum(passes.to(tl.int32), 0) - 1
        kept = passes & (place < SLOTS)
        row = t.to(tl.int64) * SLOTS
        tl.store(slot_values + row + place, x, mask=kept)
        tl.store(slot_lanes + row + place, lane, mask=kept)
        tl.store(held + t, tl.minimum(count, SLOTS))
        if count > 0:
            spot = tl.load(rooms + s) + tl.atomic_add(fill + s, count, sem="relaxed") + place
            tl.store(gathered + spot, x, mask=passes & (spot < tl.load(rooms + s + 1)))
        tl.atomic_add(counts + s, tl.where(count > SLOTS, OVERFULL, count.to(tl.int64)), sem="relaxed")
        tl.atomic_add(counts + n_segments + s, tl.sum((bits > 0).to(tl.int64), 0), sem="relaxed")


# --- the exact selection, by radix digits ----------------------------------------------------------
#
# The bits of |v| as an integer have the same order as |v|. The threshold of a segment is therefore the largest
# 31-bit number that at least k magnitudes reach. It is found in three digits of 11, 10 and 10 bits, each the digit
# that contains rank k among the magnitudes with the digits found so far. k is then reduced by the counts of higher
# digits.
#
# A segment is searched in parts of PART elements, one program for each. A segment of one part is read once, and
# its program finds all digits. Of a larger segment each launch of `choose` finds one digit: its programs add their
# counts in a histogram of the segment, and the last one to arrive picks the digit. If lower bounds are known and
# enough candidates were gathered, the candidates are searched and not v. The grid has programs for both, and those
# that are not needed return at once. This is decided on the device, so no launch waits for it.
#
# Then `tally` counts per tile the magnitudes greater than and equal to the threshold, and turns the counts into
# positions: the last program of each group of tiles sums the group, and the last group sums all groups. `write`
# writes all greater elements, and as many of the first equal ones as needed. Only integers are added atomically,
# so results do not depend on the order in which programs run.
#
# A segment is stocked if it has enough candidates, at least k or all non-zero elements, and no tile had more than
# its slots. `tally` and `write` then read its slots instead of v.

BINS = tl.constexpr(2048)


@triton.jit
@no_type_check
def arrive(counter):
    """Return the number of programs that have arrived before this one, whose writes they and all others then see.

    The barrier is for the writes of this program's other threads.
    """
    tl.debug_barrier()
    return tl.atomic_add(counter, 1)


@triton.jit
@no_type_check
def tree_sizes(programs, levels, FAN: tl.constexpr):
    """Return (sums, groups) of `dgc.kernels.launch.tree_of`. levels: as many as it has, or more."""
    n_sums, n_groups = 0, 0
    for _ in range(levels):
        if programs > 1:
            n_sums += programs
            programs = (programs + FAN - 1) // FAN
            n_groups += programs
    return n_sums, n_groups


@triton.jit
@no_type_check
def stocked(s, ks, counts, n_segments):
    """Whether the candidates suffice for segment s. counts: candidates, then non-zero elements, per segment."""
    count = tl.load(counts + s)
    return (count >= tl.load(ks + s)) | (count == tl.load(counts + n_segments + s))


@triton.jit
@no_type_check
def histogram_of(bits, prefix, SHIFT: tl.constexpr, BITS: tl.constexpr):
    """Count the next digit of the non-zero magnitudes that begin with `prefix`."""
    counted = (bits > 0) & ((bits >> SHIFT >> BITS) == prefix)
    return tl.histogram((bits >> SHIFT) & ((1 << BITS) - 1), 1 << BITS, mask=counted)


@triton.jit
@no_type_check
def pick(count, k, BITS: tl.constexpr):
    """Return (the digit with rank k, k less the counts of higher digits, the number of members)."""
    digit = tl.arange(0, 1 << BITS)
    higher = tl.cumsum(count, 0, reverse=True) - count
    holds = (higher < k) & (higher + count >= k)
    found = tl.sum(tl.where(holds, digit, 0), 0)
    return found, k - tl.sum(tl.where(holds, higher, 0), 0), tl.sum(count, 0)


@triton.jit
@no_type_check
def settle(s, k, some, threshold, rank, limits, wanted, thresholds):
    """Store limits for comparison: if k = 0, no magnitude exceeds it; if few, every non-zero one does."""
    threshold = tl.where(some, threshold, 0)
    tl.store(limits + s, tl.where(k == 0, MAGNITUDE, threshold))
    tl.store(wanted + s, tl.where(some, rank, 0))
    tl.store(thresholds + s, threshold.to(tl.float32, bitcast=True))


def read_by_choose(a: Any) -> int:
    """Return the most bytes that a program of `choose` reads: its part, and the last one the histogram."""
    return 4 * a.PART + (4 << a.BITS)


def bytes_of_choose(a: Any) -> tuple[int, int]:
    searched = a.gathered if a.CANDIDATES else a.v
    parts = searched.numel() // a.PART  # at most twice as many belong to segments of more than one
    histograms = 3 * parts * (4 << a.BITS)
    return (searched.nbytes if parts or a.SHIFT == 20 else 0) + histograms, histograms


@moves("parts", "", read_by_choose, bytes_of_choose)
@triton.jit(do_not_specialize=["n_parts", "n_rooms", "n_segments", "n_rows"])
@no_type_check
def choose(
    parts,
    n_parts,
    n_rooms,
    v,
    bounds,
    ks,
    counts,
    fill,
    n_segments,
    rooms,
    gathered,
    histograms,
    n_rows,
    prefixes,
    missed,
    limits,
    wanted,
    thresholds,
    largest,
    PART: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Find the digit at SHIFT, and at the first one all of them where a segment is one part.

    parts: rows segment, number of the part in it; `n_rooms` of candidates, then the parts of v. histograms: zeros,
    which they are again afterwards, and the counters of programs by segment. largest: bits of the largest of all
    selections.
    """
    p = tl.program_id(0)
    s = tl.load(parts + p)
    part = tl.load(parts + n_parts + p)
    k = tl.load(ks + s)
    begin = tl.load(bounds + s)
    place = s
    if n_segments > n_rows:
        place = (begin // PART).to(tl.int32)  # only one segment of more than a part begins in each part of v
    row = histograms + place.to(tl.int64) * BINS
    arrived = histograms + n_rows.to(tl.int64) * BINS + s
    source = v + begin
    length = (tl.load(bounds + s + 1) - begin).to(tl.int32)
    is_mine = p >= n_rooms
    if CANDIDATES:
        found = tl.load(fill + s)
        room = tl.load(rooms + s)
        fits = found <= tl.load(rooms + s + 1) - room
        enough = fits & ((found >= k) | (found == tl.load(counts + n_segments + s)))
        is_mine = enough == (p < n_rooms)
        if SHIFT == 20:
            if (p < n_rooms) & (part == 0):
                if not (fits & stocked(s, ks, counts, n_segments)):
                    tl.atomic_add(missed, 1, sem="relaxed")
        if enough:
            source = gathered + room
            length = found
    length = tl.where(k == 0, 0, length)
    n_active = tl.maximum(length // PART + (length % PART > 0).to(tl.int32), 1)
    rank = k.to(tl.int32)
    prefix = tl.zeros([], dtype=tl.int32)
    is_active = is_mine & (part < n_active) & ((SHIFT == 20) | (n_active > 1))
    if SHIFT < 20:
        if is_active:
            prefix = tl.load(prefixes + s)
            rank = tl.load(wanted + s)
            is_active = prefix >= 0  # else all of its non-zero elements are chosen
    if is_active:
        offset = part.to(tl.int64) * PART
        lane, x, bits = read(source + offset, length - offset.to(tl.int32), PART)
        if SHIFT == 20:
            tl.atomic_max(largest, tl.max(bits, 0), sem="relaxed")
        count = histogram_of(bits, prefix, SHIFT, BITS)
        if n_active == 1:
            high, rank, members = pick(count, rank, BITS)
            middle, rank, inner = pick(histogram_of(bits, high, 10, 10), rank, 10)
            upper = (high << 10) | middle
            low, rank, inner = pick(histogram_of(bits, upper, 0, 10), rank, 10)
            some = (k > 0) & (members >= k)
            settle(s, k, some, (upper << 10) | low, rank, limits, wanted, thresholds)
        else:
            digit = tl.arange(0, 1 << BITS)
            # the counts of a part first: most magnitudes share a few digits, and atomics on one address are slow
            tl.atomic_add(row + digit, count, mask=count > 0, sem="relaxed")
            if arrive(arrived) == n_active - 1:
                tl.store(arrived, 0)
                # not from this multiprocessor's cache, which other programs do not write
                count = tl.load(row + digit, cache_modifier=".cg")
                tl.store(row + digit, tl.zeros_like(count))
                found, rank, members = pick(count, rank, BITS)
                prefix = (prefix << BITS) | found
                if SHIFT == 20:
                    some = members >= k  # else all that are not zero are chosen
                    tl.store(prefixes + s, tl.where(some, prefix, -1))
                    settle(s, k, some, prefix, rank, limits, wanted, thresholds)
                else:
                    tl.store(prefixes + s, prefix)
                    settle(s, k, True, prefix, rank, limits, wanted, thresholds)


@triton.jit
@no_type_check
def tally_tile(source, length, limit, LANES: tl.constexpr):
    _, _, bits = read(source, length, LANES)
    greater = tl.sum((bits > limit).to(tl.int64), 0)
    return (greater << 32) + tl.sum(((bits == limit) & (bits > 0)).to(tl.int64), 0)


def read_by_tally(a: Any) -> int:
    """Return the most bytes that a program of `tally` reads: its tile, its group, and the sums of the groups."""
    return 4 * max(a.TILE, a.SLOTS) + 8 * (min(a.GROUP, a.n_tiles) + a.n_groups)


@moves(
    "tiles held slot_values tallies groups",
    "tallies tallies groups",
    read_by_tally,
    lambda a: (0 if a.LOWER_BOUNDS else a.v.nbytes, 0),
)
@triton.jit(do_not_specialize=[*SIZES, "n_groups", "n"])
@no_type_check
def tally(
    tiles,
    n_tiles,
    first_tiles,
    v,
    ks,
    counts,
    n_segments,
    held,
    slot_values,
    limits,
    wanted,
    tallies,
    groups,
    n_groups,
    arrived,
    count,
    first_unusable,
    n,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    LOWER_BOUNDS: tl.constexpr,
):
    """Count in each tile, and sum the counts: tallies[t] + groups[t // GROUP] is the sum before tile t.

    The high 32 bits count magnitudes above the threshold and, in a segment's first tile, the equal ones that are
    chosen in the segment. The low 32 bits count equal ones. groups has one entry more, the sum of all.

    It also makes the position of the first unusable element from its distance to the end.
    """
    t, start, length, s = tile_at(tiles, n_tiles)
    limit = tl.load(limits + s)
    found = tl.zeros([], dtype=tl.int64)
    if LOWER_BOUNDS:
        if stocked(s, ks, counts, n_segments):
            length = 0
            found = tally_tile(slot_values + t.to(tl.int64) * SLOTS, tl.load(held + t), limit, SLOTS)
    if length > 0:
        found = tally_tile(v + start, length, limit, TILE)
    if t == tl.load(first_tiles + s):
        found += tl.load(wanted + s).to(tl.int64) << 32
    tl.store(tallies + t, found)
    group = t // GROUP
    begin = group * GROUP
    members = tl.minimum(n_tiles - begin, GROUP)
    if arrive(arrived + group) == members - 1:
        tl.store(arrived + group, 0)
        lane = tl.arange(0, GROUP)
        row = tallies + begin + lane
        own = tl.load(row, mask=lane < members, other=0, cache_modifier=".cg")
        tl.store(row, tl.cumsum(own, 0) - own, mask=lane < members)
        tl.store(groups + group, tl.sum(own, 0))
        if arrive(arrived + n_groups) == n_groups - 1:
            tl.store(arrived + n_groups, 0)
            tl.store(first_unusable, n - tl.load(first_unusable))
            before = tl.zeros([], dtype=tl.int64)
            for i in range(0, n_groups, GROUP):
                own = tl.load(groups + i + lane, mask=lane < n_groups - i, other=0, cache_modifier=".cg")
                tl.store(groups + i + lane, before + tl.cumsum(own, 0) - own, mask=lane < n_groups - i)
                before += tl.sum(own, 0)
            tl.store(groups + n_groups, before)
            tl.store(count, (before >> 32).to(tl.int32))


@triton.jit
@no_type_check
def write_tile(
    source, lanes, length, start, limit, room, place, indices, values, SLOTTED: tl.constexpr, LANES: tl.constexpr
):
    lane, x, bits = read(source, length, LANES)
    equal = ((bits == limit) & (bits > 0)).to(tl.int32)
    chosen = (bits > limit) | ((equal > 0) & (tl.cumsum(equal, 0) <= room))
    where = place + tl.cumsum(chosen.to(tl.int32), 0) - 1
    if SLOTTED:
        lane = tl.load(lanes + lane, mask=chosen, other=0)
    tl.store(indices + where, start + lane, mask=chosen)
    tl.store(values + where, x, mask=chosen)


@moves(
    "tiles tallies tallies held slot_values slot_lanes",
    "indices values",
    lambda a: max(4 * a.TILE, 8 * a.SLOTS),
    lambda a: (0 if a.LOWER_BOUNDS else a.v.nbytes, 2 * SECTOR * a.programs),
)
@triton.jit(do_not_specialize=[*SIZES, "n_groups"])
@no_type_check
def write(
    tiles,
    n_tiles,
    first_tiles,
    v,
    ks,
    counts,
    n_segments,
    held,
    slot_values,
    slot_lanes,
    limits,
    wanted,
    tallies,
    groups,
    n_groups,
    indices,
    values,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    LOWER_BOUNDS: tl.constexpr,
):
    t = tl.program_id(0)
    before = tl.load(tallies + t) + tl.load(groups + t // GROUP)
    after = tl.load(groups + tl.where(t + 1 < n_tiles, (t + 1) // GROUP, n_groups))
    after += tl.load(tallies + t + 1, mask=t + 1 < n_tiles, other=0)
    if after > before:
        _, start, length, s = tile_at(tiles, n_tiles)
        limit = tl.load(limits + s)
        room = tl.load(wanted + s)
        first = tl.load(first_tiles + s).to(tl.int32)
        place = (before >> 32).to(tl.int32) - tl.where(t > first, room, 0)
        # within the segment; low halves never carry into high ones: a bucket has fewer than 2**31 elements
        before -= tl.load(tallies + first) + tl.load(groups + first // GROUP)
        equal = (before & 0xFFFFFFFF).to(tl.int32)
        place += tl.minimum(equal, room)
        room -= equal
        if LOWER_BOUNDS:
            if stocked(s, ks, counts, n_segments):
                length = 0
                row = t.to(tl.int64) * SLOTS
                write_tile(
                    slot_values + row,
                    slot_lanes + row,
                    tl.load(held + t),
                    start,
                    limit,
                    room,
                    place,
                    indices,
                    values,
                    True,
                    SLOTS,
                )
        if length > 0:
            write_tile(v + start, slot_lanes, length, start, limit, room, place, indices, values, False, TILE)


# --- sums over segments ----------------------------------------------------------------------------
#
# A tile is summed in one tree, and so is each group of SUMS tiles of a segment, and the groups of a segment. No
# float is added atomically, so the results do not depend on the order in which programs run.


@moves("tiles v", "sums largest", of_each(4))
@triton.jit(do_not_specialize=SIZES)
@no_type_check
def moments_of_tiles(tiles, n_tiles, v, sums, largest, TILE: tl.constexpr):
    """Sum each tile. The rows of sums are sums of v, |v| and v**2."""
    t, start, length, _ = tile_at(tiles, n_tiles)
    _, x, bits = read(v + start, length, TILE)
    wide = x.to(tl.float64)
    tl.store(sums + t, tl.sum(wide, 0))
    tl.store(sums + n_tiles + t, tl.sum(bits.to(tl.float32, bitcast=True).to(tl.float64), 0))
    tl.store(sums + 2 * n_tiles + t, tl.sum(wide * wide, 0))
    tl.store(largest + t, tl.max(bits, 0))


@moves("tiles v", "sums counts", of_each(4))
@triton.jit(do_not_specialize=SIZES)
@no_type_check
def tail_of_tiles(tiles, n_tiles, v, lower_bounds, sums, counts, TILE: tl.constexpr):
    t, start, length, s = tile_at(tiles, n_tiles)
    lower_bound = tl.load(lower_bounds + s)
    _, _, bits = read(v + start, tl.where(lower_bound < float("inf"), length, 0), TILE)
    passes = (bits > 0) & (bits >= lower_bound.to(tl.int32, bitcast=True))
    magnitude = tl.where(passes, bits, 0).to(tl.float32, bitcast=True)
    tl.store(sums + t, tl.sum(magnitude.to(tl.float64), 0))
    tl.store(counts + t, tl.sum(passes.to(tl.int32), 0))


@triton.jit
@no_type_check
def tiles_of(groups, n_groups, first_tiles, n_tiles, n_segments, BLOCK: tl.constexpr):
    """Return a program's segment, the number of its group in it, the group's first tile, the tile after its last,
    and the number of groups of the segment. groups: `Tiling.groups`.
    """
    p = tl.program_id(0)
    s = tl.load(groups + p)
    group = tl.load(groups + n_groups + p)
    first = tl.load(first_tiles + s).to(tl.int32)
    # the empty tiles at the end belong to the last segment and add nothing
    end = tl.load(first_tiles + s + 1, mask=s + 1 < n_segments, other=n_tiles).to(tl.int32)
    begin = first + group * BLOCK
    return s, group, begin, tl.minimum(begin + BLOCK, end), tl.maximum((end - first + BLOCK - 1) // BLOCK, 1)


@triton.jit
@no_type_check
def sum_of(row, first, last, BLOCK: tl.constexpr):
    """Sum what other programs may have written."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for i in range(first, last, BLOCK):
        # not from this multiprocessor's cache
        total += tl.load(row + i + lane, mask=lane < last - i, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
@no_type_check
def most_of(row, first, last, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], dtype=tl.int32)
    for i in range(first, last, BLOCK):
        most = tl.maximum(most, tl.load(row + i + lane, mask=lane < last - i, other=0, cache_modifier=".cg"))
    return tl.max(most, 0)


@triton.jit
@no_type_check
def count_of(row, first, last, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], dtype=tl.int32)
    for i in range(first, last, BLOCK):
        count += tl.load(row + i + lane, mask=lane < last - i, other=0, cache_modifier=".cg")
    return tl.sum(count, 0)


def read_of_ranges(each: int) -> Callable[[Any], int]:
    """Return a function for the most bytes that a program reads: its group of tiles, and the last one the groups
    of its segment. each: bytes of a tile and of a group.
    """
    return lambda a: each * (min(a.BLOCK, a.n_tiles) + a.n_tiles // a.BLOCK + 1)


@moves(
    "groups tile_sums tile_largest",
    "sums largest",
    read_of_ranges(28),
    lambda a: read_and_written(28 * a.n_groups),
)
@triton.jit(do_not_specialize=[*SIZES, "n_groups"])
@no_type_check
def moments_of_ranges(
    groups,
    n_groups,
    first_tiles,
    n_tiles,
    tile_sums,
    tile_largest,
    n_segments,
    group_sums,
    group_largest,
    arrived,
    sums,
    largest,
    BLOCK: tl.constexpr,
):
    """Sum the tiles of each group, and then, in the last program of a segment to arrive, its groups."""
    s, group, begin, end, count = tiles_of(groups, n_groups, first_tiles, n_tiles, n_segments, BLOCK)
    if group < count:
        p = tl.program_id(0)
        for row in tl.static_range(3):
            tl.store(group_sums + row * n_groups + p, sum_of(tile_sums + row * n_tiles, begin, end, BLOCK))
        tl.store(group_largest + p, most_of(tile_largest, begin, end, BLOCK))
        if arrive(arrived + s) == count - 1:
            tl.store(arrived + s, 0)
            first = p - group
            for row in tl.static_range(3):
                found = sum_of(group_sums + row * n_groups, first, first + count, BLOCK)
                tl.store(sums + row * n_segments + s, found)
            most = most_of(group_largest, first, first + count, BLOCK)
            tl.store(largest + s, most.to(tl.float32, bitcast=True))


@moves(
    "groups tile_sums tile_counts", "sums counts", read_of_ranges(12), lambda a: read_and_written(12 * a.n_groups)
)
@triton.jit(do_not_specialize=[*SIZES, "n_groups"])
@no_type_check
def tail_of_ranges(
    groups,
    n_groups,
    first_tiles,
    n_tiles,
    tile_sums,
    tile_counts,
    n_segments,
    group_sums,
    group_counts,
    arrived,
    sums,
    counts,
    BLOCK: tl.constexpr,
):
    """As `moments_of_ranges`. A segment has fewer than 2**31 elements, so counts do not need 64 bits."""
    s, group, begin, end, count = tiles_of(groups, n_groups, first_tiles, n_tiles, n_segments, BLOCK)
    if group < count:
        p = tl.program_id(0)
        tl.store(group_sums + p, sum_of(tile_sums, begin, end, BLOCK))
        tl.store(group_counts + p, count_of(tile_counts, begin, end, BLOCK))
        if arrive(arrived + s) == count - 1:
            tl.store(arrived + s, 0)
            first = p - group
            tl.store(sums + s, sum_of(group_sums, first, first + count, BLOCK))
            tl.store(counts + s, count_of(group_counts, first, first + count, BLOCK).to(tl.int64))


# --- sparse vectors, and weight decay --------------------------------------------------------------

# Larger than every index of a bucket: marks invalid entries.
NOWHERE = tl.constexpr(0x7FFFFFFF)


@triton.jit
@no_type_check
def interval_of(bounds, n, steps, i, is_valid=None):
    """Return the interval s of each i, with bounds[s] <= i < bounds[s+1]. steps: bit length of n, their number.

    is_valid: None if all are.
    """
    low = tl.zeros_like(i)
    high = low + n
    for _ in range(steps):
        middle = (low + high) // 2
        right = tl.load(bounds + middle, mask=is_valid) <= i
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return low


@triton.jit
@no_type_check
def rounded(x, P: tl.constexpr):
    """Return x rounded to P, to nearest even, in its own dtype."""
    if P == tl.bfloat16:
        # explicit: Triton's interpreter truncates, GPUs round
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        y = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        y = x.to(P).to(x.dtype)
    return y


@moves(
    "indices values",
    "words",
    of_each(8 + SECTOR, "BLOCK"),
    lambda a: (SECTOR * a.indices.numel(), SECTOR * a.indices.numel() * (1 + a.MASK_U)),
)
@triton.jit(do_not_specialize=["n_words", "n_programs"])
@no_type_check
def take(
    indices,
    values,
    count,
    u,
    v,
    words,
    n_words,
    n_programs,
    MASK_U: tl.constexpr,
    CLEARS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Remove what was sent. CLEARS: also set `words`, which the next kernels add to, to zero."""
    lane = tl.arange(0, BLOCK)
    if CLEARS:
        for first in range(tl.program_id(0) * BLOCK, n_words, n_programs * BLOCK):
            tl.store(words + first + lane, tl.zeros([BLOCK], dtype=tl.int32), mask=first + lane < n_words)
    i = tl.program_id(0).to(tl.int64) * BLOCK + lane
    held = i < tl.load(count)
    index = tl.load(indices + i, mask=held, other=0)
    x = tl.load(v + index, mask=held, other=0.0)
    tl.store(v + index, x - tl.load(values + i, mask=held, other=0.0), mask=held)
    if MASK_U:
        tl.store(u + index, tl.zeros_like(x), mask=held)


@moves("", "keys", lambda a: a.BLOCK * (8 * a.steps + 12))  # the search for the part, its start and its count
@triton.jit(do_not_specialize=["total", "n_parts", "steps"])
@no_type_check
def hide_tails(keys, total, starts, counts, n_parts, steps, BLOCK: tl.constexpr):
    """Set entries of each part beyond its count to NOWHERE."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    part = interval_of(starts, n_parts, steps, i)
    tail = (i < total) & (i - tl.load(starts + part) >= tl.load(counts + part))
    tl.store(keys + i, tl.full([BLOCK], NOWHERE, tl.int32), mask=tail)


@moves("keys keys", "heads", of_each(8, "BLOCK"))
@triton.jit(do_not_specialize=["total"])
@no_type_check
def mark_heads(keys, heads, total, BLOCK: tl.constexpr):
    """Set heads[i] = 1 where a run of equal keys begins."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + i, mask=i < total, other=NOWHERE)
    before = tl.load(keys + i - 1, mask=(i > 0) & (i < total), other=-1)
    tl.store(heads + i, ((key != before) & (key != NOWHERE)).to(tl.int32), mask=i < total)


def read_by_sum_runs(a: Any) -> int:
    """Return the most bytes that a program reads: keys, those before them and places, and the entries of runs that
    begin among its keys, each with its key, its place and its value, and the key after the run.
    """
    return a.BLOCK * 12 + 16 * (a.BLOCK + a.n_parts) + 4 * a.BLOCK


@moves(
    "keys keys order places",
    "indices means",
    read_by_sum_runs,
    lambda a: (8 * a.total + 2 * SECTOR * a.total, 0),
)
@triton.jit(do_not_specialize=["total", "n_parts", "size"])
@no_type_check
def sum_runs(keys, order, values, places, total, n_parts, size, indices, means, BLOCK: tl.constexpr):
    """Average the values of each run. A run has at most one value of each part, in the order of the parts."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + i, mask=i < total, other=NOWHERE)
    before = tl.load(keys + i - 1, mask=(i > 0) & (i < total), other=-1)
    head = (key != before) & (key != NOWHERE)
    mean = tl.zeros([BLOCK], dtype=tl.float32)
    same = head
    for ahead in range(n_parts):
        j = i + ahead
        same = same & (j < total)  # as long as the run lasts
        same = same & (tl.load(keys + j, mask=same, other=NOWHERE) == key)
        x = tl.load(values + tl.load(order + j, mask=same, other=0), mask=same, other=0.0)
        mean = tl.where(same, mean + x, mean)
    place = tl.load(places + i, mask=head, other=1) - 1
    tl.store(indices + place, key.to(tl.int64), mask=head)
    # `/` would be an approximate division on GPUs
    tl.store(means + place, tl.math.div_rn(mean, tl.zeros_like(mean) + size), mask=head)


def read_by_subtract_at(a: Any) -> int:
    """Return the most bytes that a program reads: index, value and target, and the search for the target's
    segment, its address, first element and factor.
    """
    return a.BLOCK * (8 + 4 + a.P.primitive_bitwidth // 8 + 8 * a.steps + 8 + 8 + 4)


@moves("indices values", "", read_by_subtract_at, lambda a: read_and_written(SECTOR * a.k))
@triton.jit(do_not_specialize=["n_segments", "steps", "k"])
@no_type_check
def subtract_at(
    targets,
    bounds,
    factors,
    n_segments,
    steps,
    indices,
    values,
    k,
    P: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Subtract where the target's pointer is not 0. There is one launch per dtype."""
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i = tl.load(indices + j, mask=j < k, other=0)
    s = interval_of(bounds, n_segments, steps, i)
    address = tl.load(targets + s)
    ours = (j < k) & (address != 0)
    target = address.to(tl.pointer_type(P)) + (i - tl.load(bounds + s))
    change = tl.load(values + j, mask=ours, other=0.0) * tl.load(factors + s)
    p = tl.load(target, mask=ours, other=0.0).to(WIDE)
    tl.store(target, rounded(p - rounded(change, P).to(WIDE), P).to(P), mask=ours)


@moves("p buffer", "p buffer", lambda a: 2 * a.BLOCK * (a.P.primitive_bitwidth // 8))
@triton.jit
@no_type_check
def decay(
    p, buffer, n, settings, NESTEROV: tl.constexpr, P: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """Apply weight decay. settings: weight decay, momentum, learning rate. Each operation is rounded to P."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    weight_decay = tl.load(settings).to(WIDE)
    momentum = tl.load(settings + 1).to(WIDE)
    lr = tl.load(settings + 2).to(WIDE)
    x = tl.load(p + i, mask=i < n, other=0.0).to(WIDE)
    d = rounded(x * weight_decay, P)
    b = tl.load(buffer + i, mask=i < n, other=0.0).to(WIDE)
    b = rounded(rounded(b * momentum, P) + d, P)
    tl.store(buffer + i, b.to(P), mask=i < n)
    step = b
    if NESTEROV:
        step = rounded(d + rounded(b * momentum, P), P)
    tl.store(p + i, rounded(x - rounded(step * lr, P), P).to(P), mask=i < n)


# --- the backend --------------------------------------------------------------------------------------

# (shift, bits) of each digit, the most significant first
DIGITS = ((20, 11), (10, 10), (0, 10))
GROUP = 1024  # tiles whose counts one program sums
# If more than one in this many elements is selected, candidates cost more traffic than they save.
SPARSE = 8


SEARCHED = 256  # elements of a program that searches for the segment of each
ROOM = 256  # candidates of a segment that are gathered, besides four times those that it selects


@dataclass(frozen=True, eq=False)
class Parts:
    """What the programs of `choose` search: parts of the candidates of each segment, and then of its elements.

    Attributes:
        table: The argument `parts` of the kernel.
        of_candidates: Number of parts of candidates.
        rooms: Where the gathered candidates of each segment begin, and where the last ones end. None: without
            candidates.
    """

    table: Int32[Tensor, "2 parts"]
    of_candidates: int = 0
    rooms: Int64[Tensor, "bounds"] | None = None


@dataclass(frozen=True, eq=False)
class Common:
    """What the selections of one budget have in common, so that a step looks up nothing else.

    Attributes:
        slots: Candidates that a tile can hold: eight times the selected elements. 0 without candidates.
        zeros: Histograms, and counters of programs by segment.
        arrived: Counters of programs by group of tiles.
        n_rows: Number of histograms.
        results: Sizes of the parts of `Results`, and of all together.
        scratch: What a selection needs until its end. All selections of a stream share the memory.
    """

    tiling: Tiling
    n_tiles: int
    parts: Parts
    n_parts: int
    n_segments: int
    n_groups: int
    slots: int
    zeros: Int32[Tensor, "zeros"]
    arrived: Int32[Tensor, "groups"]
    n_rows: int
    results: tuple[tuple[int, ...], int]
    scratch: "Scratch"


class Scratch:
    """Parts of one tensor, which begin at multiples of 16 bytes.

    Attributes:
        values, lanes: Slots of the tiles for the elements at or above their lower bound. held: how many they have.
        gathered: The same elements by segment.
        prefixes, wanted, limits: By segment.
        tallies, groups: By tile, and by group of tiles.
    """

    def __init__(self, sizes: tuple[int, ...], device: torch.device):
        words = scratch_on(device, sum(sizes))
        values, self.lanes, gathered, tallies, groups, *rest = words.split_with_sizes(sizes)
        self.held, self.prefixes, self.wanted, self.limits = rest
        self.values, self.gathered = values.view(torch.float32), gathered.view(torch.float32)
        self.tallies, self.groups = tallies.view(torch.int64), groups.view(torch.int64)

    @staticmethod
    def sizes(n_slots: int, room: int, n_tiles: int, n_groups: int, n_segments: int) -> tuple[int, ...]:
        """Return the number of words of each part."""
        held = n_tiles if n_slots else 0
        each = n_slots, n_slots, room, 2 * n_tiles, 2 * (n_groups + 1), held, *[n_segments] * 3
        return tuple(-(-size // 4) * 4 for size in each)


class Results:
    """What a selection writes, in one tensor of zeros. It is empty if `take` clears it.

    Attributes:
        counts: Candidates, then non-zero elements, by segment.
        first_unusable: The distance of the first unusable element from the end, then its position.
        fill: Gathered candidates, by segment.
        largest: The bits of the largest selected magnitude.
    """

    def __init__(self, sizes: tuple[tuple[int, ...], int], device: torch.device, cleared: bool = True):
        words = (torch.zeros if cleared else torch.empty)(sizes[1], dtype=torch.int32, device=device)
        self.words = None if cleared else words
        counts, first, _, values, _, self.indices, _, self.fill, _, last = words.split_with_sizes(sizes[0])
        self.counts = counts.view(torch.int64)
        self.first_unusable = first.view(torch.int64)[0]
        self.values = values.view(torch.float32)
        self.missed, self.count, self.largest = last.unbind()

    @staticmethod
    def sizes(segments: int, capacity: int) -> tuple[tuple[int, ...], int]:
        """Return the number of words of each part, and of what is between, so that it begins at 16 bytes; and
        their sum.
        """
        each = 4 * segments, 2, 2, *(capacity, -capacity % 4) * 2, segments, -segments % 4, 3
        return each, sum(each)


class TritonSelection(SelectionKernels):
    """The kernels above.

    Args:
        tile: Elements per program in passes over a bucket, a power of two.
        slots: Least number of candidates that a tile can hold, a power of two.
        part: Elements per program in the search for thresholds, a power of two.

    Raises:
        ValueError: There is no GPU, and Triton's interpreter is off.
    """

    name = "triton"

    def __init__(self, tile: int = 2048, slots: int = 256, part: int = 8192):
        if not (INTERPRETED or torch.cuda.is_available()):
            raise ValueError("the triton kernels need a GPU, or TRITON_INTERPRET=1 set before Triton is imported")
        self.tile, self.slots, self.part = tile, slots, part
        self._launch = Launcher(INTERPRETED)
        self._tilings = Tilings(tile)
        self._parts = WeakTensorKeyDictionary()

    def __str__(self) -> str:
        return f"{self.name} (interpreted)" if INTERPRETED else self.name

    def accumulate_(self, inputs: PassInputs) -> Int64[Tensor, ""]:
        first_unusable = torch.full((), inputs.v.numel(), dtype=torch.int64, device=inputs.v.device)
        self.accumulate_into_(inputs, first_unusable)
        return first_unusable

    def accumulate_into_(self, inputs: PassInputs, first_unusable: Int64[Tensor, ""]) -> None:
        """Do `accumulate_`, and lower `first_unusable` to the position of the first unusable element, if any."""
        whole = on_device((0, inputs.v.numel()), torch.int64, inputs.v.device)
        self._accumulate(inputs, self._tilings.of(whole, _lengths(inputs)), first_unusable)

    def assign_(self, g: tuple[Tensor, ...], v: Dense) -> Int64[Tensor, ""]:
        inputs, whole = PassInputs(g, None, v), on_device((0, v.numel()), torch.int64, v.device)
        first_unusable = torch.full((), v.numel(), dtype=torch.int64, device=v.device)
        self._accumulate(inputs, self._tilings.of(whole, _lengths(inputs)), first_unusable, ASSIGN.value)
        return first_unusable

    def accumulate_and_select_(
        self, inputs: PassInputs, budget: Budget, lower_bounds: Each | Prediction | None
    ) -> TopKResult:
        v, sent = inputs.v, inputs.sent
        known: Prediction | None = None
        if lower_bounds is not None and budget.capacity * SPARSE <= v.numel():
            if isinstance(lower_bounds, Prediction):
                known = lower_bounds
            else:
                known = Prediction(lower_bounds, lower_bounds, 1.0)
        common = self._common(budget, _lengths(inputs), v, known is not None)
        takes = sent is not None and sent.values.numel() > 0
        results = Results(common.results, v.device, cleared=not takes)
        self._accumulate(inputs, common.tiling, results.first_unusable, known=known, to=(common, results))
        return self._choose(v, budget, common, results)

    def select(self, v: Dense, budget: Budget, lower_bounds: Each | None = None) -> TopKResult:
        # Lower bounds never change the result and are ignored: collecting candidates would read v once more, which
        # only pays in a pass that reads it anyway.
        common, device = self._common(budget, (v.numel(),), v, False), v.device
        return self._choose(v, budget, common, Results(common.results, device))

    def moments(self, v: Dense, bounds: Bounds) -> Moments:
        tiling, device = self._tilings.of(bounds, (v.numel(),)), v.device
        tiles, segments, groups = tiling.count, tiling.n_segments, tiling.groups(SUMS)
        n_groups = groups.shape[1]
        parts = torch.empty(3 * (tiles + n_groups), dtype=torch.float64, device=device).split(
            [3 * tiles, 3 * n_groups]
        )
        most = torch.empty(tiles + n_groups, dtype=torch.int32, device=device).split([tiles, n_groups])
        sums = torch.empty(3, segments, dtype=torch.float64, device=device)
        largest = torch.empty(segments, dtype=torch.float32, device=device)
        self._launch(moments_of_tiles, v, tiles, tiling.table, tiles, v, parts[0], most[0], self.tile)
        where = (groups, n_groups, tiling.first_tiles, tiles, parts[0], most[0], segments, parts[1], most[1])
        result = (zeros_on(device, segments), sums, largest)
        self._launch(moments_of_ranges, v, n_groups, *where, *result, SUMS)
        return Moments(sums[0], sums[1], sums[2], largest)

    def tail(self, v: Dense, bounds: Bounds, lower_bounds: Each) -> Tail:
        tiling, device = self._tilings.of(bounds, (v.numel(),)), v.device
        tiles, segments, groups = tiling.count, tiling.n_segments, tiling.groups(SUMS)
        n_groups = groups.shape[1]
        parts = torch.empty(tiles + n_groups, dtype=torch.float64, device=device).split([tiles, n_groups])
        passed = torch.empty(tiles + n_groups, dtype=torch.int32, device=device).split([tiles, n_groups])
        sums = torch.empty(segments, dtype=torch.float64, device=device)
        counts = torch.empty(segments, dtype=torch.int64, device=device)
        self._launch(tail_of_tiles, v, tiles, tiling.table, tiles, v, lower_bounds, parts[0], passed[0], self.tile)
        where = (groups, n_groups, tiling.first_tiles, tiles, parts[0], passed[0], segments, parts[1], passed[1])
        result = (zeros_on(device, segments), sums, counts)
        self._launch(tail_of_ranges, v, n_groups, *where, *result, SUMS)
        return Tail(counts, sums)

    def remove_sent_(self, sent: SparseVector, u: Dense | None, v: Dense) -> None:
        self._take(sent, u, v, None)

    def _take(self, sent: SparseVector, u: Dense | None, v: Dense, words: Int32[Tensor, "words"] | None) -> None:
        programs, n_words = blocks(sent.values.numel()), 0 if words is None else words.numel()
        what = (sent.indices, sent.values, sent.count, u, v, words, n_words, programs)
        self._launch(take, v, programs, *what, u is not None, words is not None, BLOCK)

    def merge_mean(self, parts: Sequence[SparseVector], size: int, numel: int) -> Merged:
        keys, values = torch.cat([p.indices for p in parts]), torch.cat([p.values for p in parts])
        total, device = keys.numel(), keys.device
        indices = torch.empty(total, dtype=torch.int64, device=device)
        means = torch.zeros(total, dtype=torch.float32, device=device)
        if total == 0:
            return Merged(indices, means, torch.zeros((), dtype=torch.int32, device=device))
        starts = on_device((0, *running_sums(p.indices.numel() for p in parts)), torch.int64, device)
        counts = torch.stack([p.count for p in parts])
        ends = (starts, counts, len(parts), len(parts).bit_length())
        self._launch(hide_tails, keys, -(-total // SEARCHED), keys, total, *ends, SEARCHED)
        # stable: equal keys stay in the order of the parts
        keys, order = torch.sort(keys, stable=True)
        heads = torch.empty_like(keys)
        self._launch(mark_heads, keys, blocks(total), keys, heads, total, BLOCK)
        places = heads.cumsum(0, dtype=torch.int32)
        runs = (keys, order, values, places, total, len(parts), float(size))
        self._launch(sum_runs, keys, blocks(total), *runs, indices, means, BLOCK)
        return Merged(indices, means, places[-1])

    def subtract_at_(
        self, targets: Sequence[Tensor], bounds: Bounds, indices: Indices, values: Values, factors: Sequence[float]
    ) -> None:
        scale = on_device(tuple(factors), torch.float32, values.device)
        k, segments = indices.numel(), len(targets)
        for dtype in dict.fromkeys(t.dtype for t in targets):
            own = pointers([t if t.dtype == dtype else None for t in targets], dtype, values.device)
            sought = (own, bounds, scale, segments, segments.bit_length(), indices, values, k)
            variant = (FLOATS[dtype], _wide(dtype), SEARCHED)
            self._launch(subtract_at, values, -(-k // SEARCHED), *sought, *variant)

    def decay_(
        self, p: Tensor, buffer: Tensor, lr: float, weight_decay: float, momentum: float, nesterov: bool
    ) -> None:
        settings = on_device((weight_decay, momentum, lr), torch.float64, p.device)
        n = p.numel()
        types = (FLOATS[p.dtype], _wide(p.dtype))
        self._launch(decay, p, blocks(n), p, buffer, n, settings, nesterov, *types, BLOCK)

    def _accumulate(
        self,
        inputs: PassInputs,
        tiling: Tiling,
        first_unusable: Int64[Tensor, ""],
        form: int | None = None,
        known: Prediction | None = None,
        to: tuple[Common, Results] | None = None,
    ) -> None:
        """form: of the kernel. None: as in `inputs`. to: if a selection follows, what it uses."""
        u, v, launch = inputs.u, inputs.v, self._launch
        if inputs.sent is not None:
            self._take(inputs.sent, u if inputs.masking else None, v, None if to is None else to[1].words)
        factor = inputs.decay if u is None else inputs.momentum
        if form is None:
            form = 0 if u is None else 2 if inputs.nesterov else 1
        dtype, n_tiles = inputs.g[0].dtype, tiling.count
        sources = pointers(inputs.g, dtype, v.device)
        work = (tiling.table, n_tiles, v.numel(), sources, u, v, float(factor), first_unusable)
        variant = (FLOATS[dtype], form, to is not None)
        if known is None or to is None:
            nothing = (None, None, 1.0, None, None, tiling.n_segments, None, None, None, None, None)
            launch(accumulate, v, n_tiles, *work, *nothing, self.tile, 1, *variant, False)
            return
        common, results = to
        own = common.scratch
        bounds = (known.last, known.before, known.margin, results.counts, results.fill, common.n_segments)
        kept = (common.parts.rooms, own.gathered, own.held, own.values, own.lanes)
        launch(accumulate, v, n_tiles, *work, *bounds, *kept, self.tile, common.slots, *variant, True)

    def _common(self, budget: Budget, lengths: tuple[int, ...], v: Dense, with_candidates: bool) -> Common:
        """Return what is kept for a budget, gradients of these lengths, and the current stream."""
        key = (self, lengths, with_candidates, current_stream(v.device))
        common: Common | None = budget.kept.get(key)
        if common is None:
            common = budget.kept[key] = self._make_common(budget, lengths, v, with_candidates)
        return common

    def _make_common(self, budget: Budget, lengths: tuple[int, ...], v: Dense, with_candidates: bool) -> Common:
        n, n_segments, capacity, least = v.numel(), budget.ks.numel(), budget.capacity, self.slots
        tiling, parts = self._tilings.of(budget.bounds, lengths), self._parts_of(budget, n, with_candidates)
        n_groups, n_rows = -(-tiling.count // GROUP), min(n_segments, n // self.part + 1)
        expected = 1 << (8 * capacity * self.tile // max(n, 1)).bit_length()
        slots = min(max(expected, least), max(self.tile // 4, least)) if with_candidates else 0
        rows = n_rows * BINS.value + n_segments
        zeros, room = zeros_on(v.device, rows + n_groups + 1), room_of(budget) if with_candidates else 0
        return Common(
            tiling,
            tiling.count,
            parts,
            parts.table.shape[1],
            n_segments,
            n_groups,
            slots,
            zeros,
            zeros[rows:],
            n_rows,
            Results.sizes(n_segments, capacity),
            Scratch(Scratch.sizes(tiling.count * slots, room, tiling.count, n_groups, n_segments), v.device),
        )

    def _parts_of(self, budget: Budget, n: int, with_candidates: bool) -> Parts:
        """The parts of a budget's segments, of n elements. They are kept, for budgets with equal bounds as one."""
        key = budget.ks if with_candidates else budget.bounds
        kept: dict[tuple[int, bool], Parts] = self._parts.setdefault(key, {})
        place = (current_stream(key.device), with_candidates)
        if place not in kept:
            table = divided(budget.bounds, n, self.part)
            kept[place] = Parts(table)
            if with_candidates:
                ends = (4 * budget.ks + ROOM).cumsum(0)
                rooms = torch.cat([ends.new_zeros(1), ends])
                first = divided(rooms, room_of(budget), self.part)
                kept[place] = Parts(torch.cat([first, table], 1), first.shape[1], rooms)
        return kept[place]

    def _choose(self, v: Dense, budget: Budget, common: Common, results: Results) -> TopKResult:
        """Select from v in five launches."""
        segments, n, launch, own = common.n_segments, v.numel(), self._launch, common.scratch
        n_tiles, n_groups, n_parts, parts = common.n_tiles, common.n_groups, common.n_parts, common.parts
        thresholds = torch.empty(segments, dtype=torch.float32, device=v.device)
        has_candidates = common.slots > 0
        held: tuple[Tensor | None, ...] = (None, None)
        lanes, gathered, slots = None, None, 1
        if has_candidates:
            held, lanes, gathered, slots = (own.held, own.values), own.lanes, own.gathered, common.slots
        where = (parts.table, n_parts, parts.of_candidates, v, budget.bounds, budget.ks, results.counts)
        stock = (results.fill, segments, parts.rooms, gathered, common.zeros, common.n_rows, own.prefixes)
        found = (results.missed, own.limits, own.wanted, thresholds, results.largest, self.part)
        for shift, bits in DIGITS:
            launch(choose, v, n_parts, *where, *stock, *found, shift, bits, has_candidates)
        tiling = common.tiling
        work = (tiling.table, n_tiles, tiling.first_tiles, v, budget.ks, results.counts, segments, *held)
        sizes = (self.tile, slots, GROUP, has_candidates)
        summed = (own.limits, own.wanted, own.tallies, own.groups, n_groups)
        ends = (common.arrived, results.count, results.first_unusable, n)
        launch(tally, v, n_tiles, *work, *summed, *ends, *sizes)
        launch(write, v, n_tiles, *work, lanes, *summed, results.indices, results.values, *sizes)
        elements = SparseVector(results.indices, results.values, results.count, results.largest)
        return TopKResult(elements, thresholds, results.first_unusable, results.missed)


def room_of(budget: Budget) -> int:
    """Return the number of candidates that are gathered at most."""
    return 4 * budget.capacity + ROOM * budget.ks.numel()


def _lengths(inputs: PassInputs) -> tuple[int, ...]:
    return tuple(map(Tensor.numel, inputs.g))


def _wide(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32
