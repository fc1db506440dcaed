"""GPU kernels of sums over segments: first over each tile, then over the tiles of each segment.

A tile is summed in one tree, and the tiles of a segment in a fixed order. Nothing is added atomically, so results
do not depend on the order in which programs run. There are two launches for any number of segments.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor

from dgc.kernels.selection.protocol import Moments, Tail
from dgc.kernels.selection.triton_passes import MAGNITUDE, SIZES
from dgc.kernels.triton_tables import Launcher, Tiling

BLOCK = 1024


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def moments_of_tiles(tiles, n_tiles, v, sums, largest, TILE: tl.constexpr):
    """Sum each tile. The rows of sums are those of v, |v| and v**2."""
    t = tl.program_id(0)
    start = tl.load(tiles + t)
    length = tl.load(tiles + n_tiles + t)
    lane = tl.arange(0, TILE)
    x = tl.load(v + start + lane, mask=lane < length, other=0.0)
    bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
    wide = x.to(tl.float64)
    tl.store(sums + t, tl.sum(wide, 0))
    tl.store(sums + n_tiles + t, tl.sum(bits.to(tl.float32, bitcast=True).to(tl.float64), 0))
    tl.store(sums + 2 * n_tiles + t, tl.sum(wide * wide, 0))
    tl.store(largest + t, tl.max(bits, 0))


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def tail_of_tiles(tiles, n_tiles, v, lower_bounds, sums, counts, TILE: tl.constexpr):
    t = tl.program_id(0)
    start = tl.load(tiles + t)
    length = tl.load(tiles + n_tiles + t)
    lower_bound = tl.load(lower_bounds + tl.load(tiles + 2 * n_tiles + t))
    length = tl.where(lower_bound < float("inf"), length, 0)
    lane = tl.arange(0, TILE)
    x = tl.load(v + start + lane, mask=lane < length, other=0.0)
    bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
    passes = (bits > 0) & (bits >= lower_bound.to(tl.int32, bitcast=True))
    magnitude = tl.where(passes, bits, 0).to(tl.float32, bitcast=True)
    tl.store(sums + t, tl.sum(magnitude.to(tl.float64), 0))
    tl.store(counts + t, tl.sum(passes.to(tl.int32), 0))


@triton.jit
@no_type_check
def sum_of(row, first, last, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for i in range(first, last, BLOCK):
        total += tl.load(row + i + lane, mask=lane < last - i, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def moments_of_ranges(
    first_tiles, n_tiles, tile_sums, tile_largest, n_segments, sums, largest, BLOCK: tl.constexpr
):
    """One program per segment. The empty tiles at the end belong to the last segment and add nothing."""
    s = tl.program_id(0)
    first = tl.load(first_tiles + s).to(tl.int32)
    last = tl.load(first_tiles + s + 1, mask=s + 1 < n_segments, other=n_tiles).to(tl.int32)
    for row in tl.static_range(3):
        tl.store(sums + row * n_segments + s, sum_of(tile_sums + row * n_tiles, first, last, BLOCK))
    lane = tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], dtype=tl.int32)
    for i in range(first, last, BLOCK):
        most = tl.maximum(most, tl.load(tile_largest + i + lane, mask=lane < last - i, other=0))
    tl.store(largest + s, tl.max(most, 0).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def tail_of_ranges(first_tiles, n_tiles, tile_sums, tile_counts, n_segments, sums, counts, BLOCK: tl.constexpr):
    s = tl.program_id(0)
    first = tl.load(first_tiles + s).to(tl.int32)
    last = tl.load(first_tiles + s + 1, mask=s + 1 < n_segments, other=n_tiles).to(tl.int32)
    tl.store(sums + s, sum_of(tile_sums, first, last, BLOCK))
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], dtype=tl.int64)
    for i in range(first, last, BLOCK):
        count += tl.load(tile_counts + i + lane, mask=lane < last - i, other=0)
    tl.store(counts + s, tl.sum(count, 0))


def moments(launch: Launcher, v: Float32[Tensor, "n"], tiling: Tiling, tile: int) -> Moments:
    device, tiles, segments = v.device, tiling.count, tiling.first.numel()
    tile_sums = torch.empty(3, tiles, dtype=torch.float64, device=device)
    tile_largest = torch.empty(tiles, dtype=torch.int32, device=device)
    sums = torch.empty(3, segments, dtype=torch.float64, device=device)
    largest = torch.empty(segments, dtype=torch.float32, device=device)
    launch(moments_of_tiles, v, tiles, tiling.table, tiles, v, tile_sums, tile_largest, tile)
    state = (tile_sums, tile_largest, segments, sums, largest)
    launch(moments_of_ranges, v, segments, tiling.first, tiles, *state, BLOCK)
    return Moments(sums[0], sums[1], sums[2], largest)


def tail(
    launch: Launcher, v: Float32[Tensor, "n"], tiling: Tiling, lower_bounds: Float32[Tensor, "S"], tile: int
) -> Tail:
    device, tiles, segments = v.device, tiling.count, tiling.first.numel()
    tile_sums = torch.empty(tiles, dtype=torch.float64, device=device)
    tile_counts = torch.empty(tiles, dtype=torch.int32, device=device)
    sums = torch.empty(segments, dtype=torch.float64, device=device)
    counts = torch.empty(segments, dtype=torch.int64, device=device)
    launch(tail_of_tiles, v, tiles, tiling.table, tiles, v, lower_bounds, tile_sums, tile_counts, tile)
    state = (tile_sums, tile_counts, segments, sums, counts)
    launch(tail_of_ranges, v, segments, tiling.first, tiles, *state, BLOCK)
    return Tail(counts, sums)
