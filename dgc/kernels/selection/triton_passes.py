"""GPU kernel of the dense pass: momentum correction, and candidates for the selection.

A program handles a tile: at most TILE adjacent elements of one segment and one gradient piece (see
`triton_tables`). With lower_bounds, a tile's elements at or above its segment's lower bound are written, in order,
to the tile's slots. The following selection then does not read v again.
"""

from typing import no_type_check

import triton
import triton.language as tl

# Arguments that differ between buckets. Specialization for 1 or multiples of 16 would only add compilations.
SIZES = ["n_tiles", "n_segments"]
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
TOO_LARGE = tl.constexpr(0x5F800000)  # the bits of protocol.TOO_LARGE
# Added to a segment's count of candidates when a tile has too many. No sum of real counts can cancel it.
OVERFULL = tl.constexpr(-(1 << 40))


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def accumulate(
    tiles, n_tiles, sources, u, v, momentum, first, lower_bounds, counts, n_segments, held, slot_values,
    slot_lanes, TILE: tl.constexpr, SLOTS: tl.constexpr, G: tl.constexpr, FORM: tl.constexpr,
    LOWER_BOUNDS: tl.constexpr,
):  # fmt: skip
    """Do the pass. FORM: 0 without u, 1 plain momentum, 2 Nesterov."""
    t = tl.program_id(0)
    start = tl.load(tiles + t)
    length = tl.load(tiles + n_tiles + t)
    piece = tl.load(tiles + 3 * n_tiles + t)
    inner = tl.load(tiles + 4 * n_tiles + t)
    if LOWER_BOUNDS:
        s = tl.load(tiles + 2 * n_tiles + t)
        lower_bound = tl.load(lower_bounds + s).to(tl.int32, bitcast=True) & MAGNITUDE
    lane = tl.arange(0, TILE)
    live = lane < length
    source = tl.load(sources + piece).to(tl.pointer_type(G)) + inner
    # all loads before the first reduction, which is a barrier
    g = tl.load(source + lane, mask=live, other=0.0).to(tl.float32)
    x = tl.load(v + start + lane, mask=live, other=0.0)
    if FORM > 0:
        m = tl.load(u + start + lane, mask=live, other=0.0)
    bad = (g.to(tl.int32, bitcast=True) & MAGNITUDE) >= TOO_LARGE
    first_bad = tl.min(tl.where(bad, lane, TILE), 0)
    if first_bad < TILE:
        tl.atomic_min(first, start.to(tl.int64) + first_bad, sem="relaxed")
    g = tl.where(bad, 0.0, g)
    if FORM == 0:
        x = x + g
    else:
        if FORM == 1:
            m = momentum * m + g
            x = x + m
        else:
            m = momentum * (m + g)
            x = (x + m) + g
        tl.store(u + start + lane, m, mask=live)
    tl.store(v + start + lane, x, mask=live)
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
        tl.atomic_add(counts + s, tl.where(count > SLOTS, OVERFULL, count.to(tl.int64)), sem="relaxed")
        tl.atomic_add(counts + n_segments + s, tl.sum((bits > 0).to(tl.int64), 0), sem="relaxed")
