"""The GPU backend of the quantizers: Triton kernels with the same bits as `Quantizers`.

They are for what is not a whole step of `triton_elements`: thresholds whose sums are scattered, the two rounds of
1-bit Adam, and messages of gossip in int8. One launch per operation, and one for a mean of signs or ternary codes,
or several for more than 100 ranks. Means of levels are as in `Quantizers`.

A program handles a tile of one segment (see `dgc.kernels.launch`). Tiles begin at whole words of the codes. Packed
small integers have no segments: there a program handles BLOCK bytes.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float32, UInt8
from torch import Tensor

from dgc.kernels.codes import (
    WORD,
    AllCodes,
    AllEach,
    Bounds,
    Codes,
    Dense,
    Each,
    Quantizers,
    Residual,
    empty_codes,
    empty_residual,
    keys_of,
    layout_of,
    level_factors,
    thresholds_or,
)
from dgc.kernels.launch import (
    BLOCK,
    Launcher,
    Tilings,
    as_rows,
    blocks,
    groups_of_ranks,
    moves,
    of_each,
    on_device,
)
from dgc.kernels.selection.triton import INTERPRETED, random_bits, read, tile_at

SIZES = ["n", "n_tiles", "nbytes", "key", "inner_key"]
SIGN = tl.constexpr(-0x80000000)
SIGNS, TERNARY, LEVELS = (tl.constexpr(i) for i in range(3))


@triton.jit
@no_type_check
def tile_of(tiles, n_tiles, bounds, starts, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """A program's segment, length, elements [TILE / p, p] with p per byte, mask of elements, bytes [TILE / p]."""
    _, start, length, s = tile_at(tiles, n_tiles)
    row = tl.arange(0, TILE * WIDTH // 8)
    lane = row[:, None] * (8 // WIDTH) + tl.arange(0, 8 // WIDTH)[None, :]
    place = tl.load(starts + s) + (start - tl.load(bounds + s)) * WIDTH // 8 + row
    return s, length, start + lane, lane < length, place


@triton.jit
@no_type_check
def live_bytes(length, WIDTH: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr):
    nbytes = (length * WIDTH + 8 * UNIT - 1) // (8 * UNIT) * UNIT
    return tl.arange(0, TILE * WIDTH // 8) < nbytes


@triton.jit
@no_type_check
def shifts_of(WIDTH: tl.constexpr, HIGHEST_FIRST: tl.constexpr):
    shift = tl.arange(0, 8 // WIDTH) * WIDTH
    return (8 - WIDTH - shift if HIGHEST_FIRST else shift)[None, :]


@triton.jit
@no_type_check
def with_sign(magnitude, negative):
    bits = magnitude.to(tl.int32, bitcast=True) | tl.where(negative, SIGN, 0)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def sign_of(x, is_valid, cut, scale):
    """Return the field of an element, and what it stands for."""
    up = (x > cut) & is_valid
    return up.to(tl.int32), tl.where(up, scale, scale * -1.0)  # Triton's minus loses the sign of zero


@triton.jit
@no_type_check
def ternary_of(x, is_valid, threshold):
    """As `sign_of`, for a threshold with a sign, or zero."""
    up, down = (x >= threshold) & is_valid, (x <= -threshold) & is_valid
    sent = tl.where(up, threshold, tl.where(down, -threshold, 0.0))
    return tl.where(up, 3, tl.where(down, 2, 0)), sent


@triton.jit
@no_type_check
def level_of(x, i, is_valid, inverse, step, levels, key, inner_key, RANDOM: tl.constexpr, WIDTH: tl.constexpr):
    """As `sign_of`, for a level with a sign."""
    scaled = tl.abs(x) * inverse
    if RANDOM:
        scaled += (random_bits(i, key, inner_key) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    else:
        scaled += 0.5
    level = tl.where(is_valid, tl.minimum(scaled, levels).to(tl.int32), 0)
    negative = (x < 0) & (level > 0)
    return level | (negative.to(tl.int32) << (WIDTH - 1)), with_sign(step * level.to(tl.float32), negative)


@triton.jit
@no_type_check
def field_value(field, scale, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """Return what a field of WIDTH bits stands for: -scale or scale; -scale, 0 or scale; or levels of a step."""
    if KIND == SIGNS:
        x = tl.where((field & 1) > 0, scale, scale * -1.0)
    elif KIND == TERNARY:
        x = tl.where((field & 3) == 3, scale, tl.where((field & 3) == 2, -scale, 0.0))
    else:
        level = field & ((1 << (WIDTH - 1)) - 1)
        x = with_sign(scale * level.to(tl.float32), (field & (1 << (WIDTH - 1))) > 0)
    return x


@moves("tiles v", "codes residual", of_each(4))
@triton.jit(do_not_specialize=SIZES)
@no_type_check
def sign_encode(
    tiles, n_tiles, bounds, starts, v, cuts, scales, codes, residual, KEEP: tl.constexpr, TILE: tl.constexpr
):
    s, length, i, is_valid, place = tile_of(tiles, n_tiles, bounds, starts, 1, TILE)
    x = tl.load(v + i, mask=is_valid, other=0.0)
    field, sent = sign_of(x, is_valid, tl.load(cuts + s), tl.load(scales + s))
    if KEEP:
        tl.store(residual + i, x - sent, mask=is_valid)
    packed = tl.sum(field << shifts_of(1, True), 1)
    tl.store(codes + place, packed.to(tl.uint8), mask=live_bytes(length, 1, 4, TILE))


@moves("tiles codes total", "total", lambda a: (4 * 8 + 1) * a.TILE // 8)
@triton.jit(do_not_specialize=SIZES)
@no_type_check
def sign_add(tiles, n_tiles, bounds, starts, codes, scales, total, TILE: tl.constexpr):
    s, length, i, is_valid, place = tile_of(tiles, n_tiles, bounds, starts, 1, TILE)
    packed = tl.load(codes + place, mask=live_bytes(length, 1, 4, TILE), other=0).to(tl.int32)
    scale = tl.load(scales + s)
    x = tl.load(total + i, mask=is_valid, other=0.0)
    tl.store(total + i, x + field_value(packed[:, None] >> shifts_of(1, True), scale, SIGNS, 1), mask=is_valid)


@moves("tiles v", "codes residual", of_each(4))
@triton.jit(do_not_specialize=SIZES)
@no_type_check
def tern_encode(
    tiles, n_tiles, bounds, starts, v, thresholds, codes, residual, KEEP: tl.constexpr, TILE: tl.constexpr
):
    s, length, i, is_valid, place = tile_of(tiles, n_tiles, bounds, starts, 2, TILE)
    x = tl.load(v + i, mask=is_valid, other=0.0)
    field, sent = ternary_of(x, is_valid, tl.load(thresholds + s))
    if KEEP:
        tl.store(residual + i, x - sent, mask=is_valid)
    packed = tl.sum(field << shifts_of(2, True), 1)
    tl.store(codes + place, packed.to(tl.uint8), mask=live_bytes(length, 2, 4, TILE))


@moves("tiles codes total", "total", lambda a: (4 * 8 + 2) * a.TILE // 8)
@triton.jit(do_not_specialize=SIZES)
@no_type_check
def tern_add(tiles, n_tiles, bounds, starts, codes, thresholds, total, TILE: tl.constexpr):
    s, length, i, is_valid, place = tile_of(tiles, n_tiles, bounds, starts, 2, TILE)
    packed = tl.load(codes + place, mask=live_bytes(length, 2, 4, TILE), other=0).to(tl.int32)
    t = tl.load(thresholds + s)
    x = tl.load(total + i, mask=is_valid, other=0.0)
    tl.store(total + i, x + field_value(packed[:, None] >> shifts_of(2, True), t, TERNARY, 2), mask=is_valid)


@moves("tiles v", "codes residual", of_each(4))
@triton.jit(do_not_specialize=SIZES)
@no_type_check
def uniform_encode(
    tiles,
    n_tiles,
    bounds,
    starts,
    v,
    inverses,
    steps,
    levels,
    key,
    inner_key,
    codes,
    residual,
    KEEP: tl.constexpr,
    RANDOM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    s, length, i, is_valid, place = tile_of(tiles, n_tiles, bounds, starts, WIDTH, TILE)
    x = tl.load(v + i, mask=is_valid, other=0.0)
    inverse, step = tl.load(inverses + s), tl.load(steps + s)
    field, sent = level_of(x, i, is_valid, inverse, step, levels, key, inner_key, RANDOM, WIDTH)
    if KEEP:
        tl.store(residual + i, x - sent, mask=is_valid)
    packed = tl.sum(field << shifts_of(WIDTH, False), 1)
    tl.store(codes + place, packed.to(tl.uint8), mask=live_bytes(length, WIDTH, 1, TILE))


@moves("tiles codes total", "total", lambda a: (4 * 8 + a.WIDTH) * a.TILE // 8)
@triton.jit(do_not_specialize=SIZES)
@no_type_check
def uniform_add(tiles, n_tiles, bounds, starts, codes, steps, total, WIDTH: tl.constexpr, TILE: tl.constexpr):
    s, length, i, is_valid, place = tile_of(tiles, n_tiles, bounds, starts, WIDTH, TILE)
    packed = tl.load(codes + place, mask=live_bytes(length, WIDTH, 1, TILE), other=0).to(tl.int32)
    step = tl.load(steps + s)
    x = tl.load(total + i, mask=is_valid, other=0.0)
    value = field_value(packed[:, None] >> shifts_of(WIDTH, False), step, LEVELS, WIDTH)
    tl.store(total + i, x + value, mask=is_valid)


@moves("tiles mean", "mean", of_each(4))
@triton.jit(do_not_specialize=SIZES)
@no_type_check
def scale(tiles, n_tiles, bounds, starts, factors, size, mean, SCALED: tl.constexpr, TILE: tl.constexpr):
    """Multiply by the segment's factor if SCALED, then divide by `size`."""
    s, _, i, is_valid, _ = tile_of(tiles, n_tiles, bounds, starts, 8, TILE)
    x = tl.load(mean + i, mask=is_valid, other=0.0)
    if SCALED:
        x *= tl.load(factors + s)
    # `/` would be an approximate division on GPUs
    tl.store(mean + i, tl.math.div_rn(x, tl.zeros_like(x) + tl.load(size)), mask=is_valid)


def read_by_mean(a: Any) -> int:
    """Return the most bytes that a program reads: fields of all its ranks, and sums."""
    continued: int = 0 if a.BEGINS else 4 * a.TILE
    return (a.end - a.first) * (a.TILE * a.WIDTH // 8) + continued


@moves("tiles codes", "mean", read_by_mean, lambda a: (0 if a.BEGINS else a.mean.nbytes, 0))
@triton.jit(do_not_specialize=[*SIZES, "first", "end", "stride", "scale_stride"])
@no_type_check
def mean_of_fields(
    tiles,
    n_tiles,
    bounds,
    starts,
    codes,
    first,
    end,
    stride,
    scales,
    scale_stride,
    factors,
    size,
    mean,
    BEGINS: tl.constexpr,
    ENDS: tl.constexpr,
    SCALED: tl.constexpr,
    UNIT: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add the fields of ranks in their order, from `first` on and before `end`, to the sums in `mean` unless
    BEGINS. If ENDS, multiply by the segment's factor if SCALED, and divide by `size`.
    """
    s, length, i, is_valid, place = tile_of(tiles, n_tiles, bounds, starts, WIDTH, TILE)
    total = tl.zeros([TILE * WIDTH // 8, 8 // WIDTH], dtype=tl.float32)
    if not BEGINS:
        total = tl.load(mean + i, mask=is_valid, other=0.0)
    read_here = live_bytes(length, WIDTH, UNIT, TILE)
    for r in range(first, end):
        row = tl.cast(r, tl.int64)
        packed = tl.load(codes + row * stride + place, mask=read_here, other=0).to(tl.int32)
        scale = tl.load(scales + row * scale_stride + s)
        total += field_value(packed[:, None] >> shifts_of(WIDTH, KIND < LEVELS), scale, KIND, WIDTH)
    if ENDS:
        if SCALED:
            total *= tl.load(factors + s)
        # `/` would be an approximate division on GPUs
        total = tl.math.div_rn(total, tl.zeros_like(total) + tl.load(size))
    tl.store(mean + i, total, mask=is_valid)


@moves("tiles", "total", of_each(2), lambda a: (2 * a.total.numel(), 0))
@triton.jit(do_not_specialize=[*SIZES, "fields"])
@no_type_check
def sums(
    tiles,
    n_tiles,
    bounds,
    starts,
    codes,
    nbytes,
    fields,
    size,
    total,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Unpack the sums of all ranks' signs or ternary codes. A share has `fields` fields in `nbytes` bytes."""
    s, _, i, is_valid, _ = tile_of(tiles, n_tiles, bounds, starts, 8, TILE)
    field = tl.load(starts + s) * (8 // WIDTH) + i - tl.load(bounds + s)
    place = field % fields * BITS
    byte, share = place // 8, field // fields * nbytes
    low = tl.load(codes + share + byte, mask=is_valid, other=0).to(tl.int32)
    high = tl.load(codes + share + byte + 1, mask=is_valid & (byte + 1 < nbytes), other=0).to(tl.int32)
    level = ((low | (high << 8)) >> (place % 8).to(tl.int32)) & ((1 << BITS) - 1)
    tl.store(total + i, (level * (2 // WIDTH)).to(tl.float32) - tl.load(size), mask=is_valid)


@moves("tiles v", "", of_each(4))
@triton.jit(do_not_specialize=SIZES)
@no_type_check
def largest(tiles, n_tiles, bounds, starts, v, found, TILE: tl.constexpr):
    """The bits of the largest magnitude of each segment."""
    _, start, length, s = tile_at(tiles, n_tiles)
    _, _, bits = read(v + start, length, TILE)
    # atomic: a maximum does not depend on the order
    tl.atomic_max(found + s, tl.max(bits, 0), sem="relaxed")


@moves("", "codes", of_each(8, "BLOCK"), lambda a: (8 * a.levels.numel(), 0))
@triton.jit(do_not_specialize=SIZES)
@no_type_check
def pack(levels, n, codes, nbytes, BITS: tl.constexpr, BLOCK: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    packed = tl.zeros([BLOCK], dtype=tl.int32)
    for k in tl.static_range(8):
        place = byte * 8 + k
        level = tl.load(levels + place // BITS, mask=place // BITS < n, other=0).to(tl.int32)
        packed |= ((level >> (place % BITS).to(tl.int32)) & 1) << k
    tl.store(codes + byte, packed.to(tl.uint8), mask=byte < nbytes)


class TritonQuantizers(Quantizers):
    """The kernels above, and the inherited means. tile: elements per program, a power of two, at least 32."""

    def __init__(self, tile: int = 2048):
        self.tile = tile
        self._launch = Launcher(INTERPRETED)
        self._tilings = Tilings(tile)

    def largest(self, v: Dense, bounds: Bounds) -> Each:
        found = torch.zeros(bounds.numel() - 1, dtype=torch.int32, device=v.device)
        self._each(largest, v, bounds, 8, 1, v, found)
        return found.view(torch.float32)

    def sign_encode(
        self,
        v: Dense,
        bounds: Bounds,
        cuts: Each,
        scales: Each,
        keep: bool = True,
        into: Dense | None = None,
    ) -> tuple[Codes, Residual]:
        codes, residual = empty_codes(bounds, 1, WORD), empty_residual(v, keep, into)
        self._each(sign_encode, v, bounds, 1, WORD, v, cuts, scales, codes, residual, keep)
        return codes, residual

    def sign_add_(self, codes: Codes, bounds: Bounds, scales: Each, total: Dense) -> None:
        self._each(sign_add, total, bounds, 1, WORD, codes, scales, total)

    def tern_encode(
        self, v: Dense, bounds: Bounds, thresholds: Each, keep: bool = True, into: Dense | None = None
    ) -> tuple[Codes, Residual]:
        codes, residual = empty_codes(bounds, 2, WORD), empty_residual(v, keep, into)
        given = (thresholds_or(torch.inf, thresholds), codes, residual, keep)
        self._each(tern_encode, v, bounds, 2, WORD, v, *given)
        return codes, residual

    def tern_add_(self, codes: Codes, bounds: Bounds, thresholds: Each, total: Dense) -> None:
        self._each(tern_add, total, bounds, 2, WORD, codes, thresholds_or(0.0, thresholds), total)

    def uniform_encode(
        self,
        v: Dense,
        bounds: Bounds,
        scales: Each,
        levels: int,
        bits: int,
        seed: int | None,
        keep: bool = True,
        into: Dense | None = None,
    ) -> tuple[Codes, Residual]:
        codes, residual = empty_codes(bounds, bits, 1), empty_residual(v, keep, into)
        values = (*level_factors(scales, levels, bits), float(levels), *keys_as_int32(seed))
        made = (codes, residual, keep, seed is not None, bits)
        self._each(uniform_encode, v, bounds, bits, 1, v, *values, *made)
        return codes, residual

    def uniform_add_(
        self, codes: Codes, bounds: Bounds, scales: Each, levels: int, bits: int, total: Dense
    ) -> None:
        _, steps = level_factors(scales, levels, bits)
        self._each(uniform_add, total, bounds, bits, 1, codes, steps, total, bits)

    def sign_mean_(
        self, codes: AllCodes, bounds: Bounds, scales: AllEach, factors: Each | None, size: int, mean: Dense
    ) -> None:
        self._mean(codes, bounds, as_rows(scales), factors, size, mean, WORD, SIGNS.value, 1)

    def tern_mean_(
        self, codes: AllCodes, bounds: Bounds, thresholds: AllEach, factors: Each | None, size: int, mean: Dense
    ) -> None:
        values = thresholds_or(0.0, as_rows(thresholds))
        self._mean(codes, bounds, values, factors, size, mean, WORD, TERNARY.value, 2)

    def _mean(
        self,
        codes: AllCodes,
        bounds: Bounds,
        scales: Float32[Tensor, "ranks S"],
        factors: Each | None,
        size: int,
        mean: Dense,
        unit: int,
        kind: int,
        width: int,
    ) -> None:
        rows, divisor = as_rows(codes), on_device((float(size),), torch.float32, mean.device)
        given = (rows.stride(0), scales, scales.stride(0), factors, divisor, mean)
        for first, end in groups_of_ranks(len(codes), self.tile * width // 8, continued=4 * self.tile):
            made = (first == 0, end == len(codes), factors is not None, unit, kind, width)
            self._each(mean_of_fields, mean, bounds, width, unit, rows, first, end, *given, *made)

    def pack(self, levels: UInt8[Tensor, "n"], bits: int) -> Codes:
        n, nbytes = levels.numel(), -(-levels.numel() * bits // 8)
        codes = torch.empty(nbytes, dtype=torch.uint8, device=levels.device)
        self._launch(pack, levels, blocks(nbytes), levels, n, codes, nbytes, bits, BLOCK)
        return codes

    def sums_mean_(
        self, packed: AllCodes, fields: int, width: int, bits: int, bounds: Bounds, factors: Each, mean: Dense
    ) -> None:
        size, codes = len(packed), torch.cat(list(packed))
        ranks = on_device((float(size),), torch.float32, mean.device)
        shares = (codes, packed[0].numel(), fields, ranks)
        self._each(sums, mean, bounds, width, WORD, *shares, mean, width, bits)
        self._scale_(mean, bounds, factors, size)

    def _scale_(self, mean: Dense, bounds: Bounds, factors: Each | None, size: int) -> None:
        divisor = on_device((float(size),), torch.float32, mean.device)
        self._each(scale, mean, bounds, 8, 1, factors, divisor, mean, factors is not None)

    def _each(
        self, kernel: object, near: Dense, bounds: Bounds, width: int, unit: int, *arguments: object
    ) -> None:
        """Launch one program per tile of the segments."""
        tiling = self._tilings.of(bounds, (near.numel(),))
        places = (tiling.table, tiling.count, bounds, layout_of(bounds, width, unit).starts)
        self._launch(kernel, near, tiling.count, *places, *arguments, self.tile)


def keys_as_int32(seed: int | None) -> tuple[int, int]:
    """Return the keys as int32. Triton would give larger numbers another argument type."""
    first, second = (0, 0) if seed is None else keys_of(seed)
    return first - (first >> 31 << 32), second - (second >> 31 << 32)
