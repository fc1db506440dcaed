"""GPU kernels of the quantizers: encoding and decoding of codes with few bits.

A program handles a tile of one segment (see `triton_tables`). Tiles begin at whole words of the codes. Natural
codes and packed small integers have no segments: there a program handles BLOCK elements or bytes.
"""

from typing import no_type_check

import triton
import triton.language as tl

from dgc.kernels.selection.triton_passes import MAGNITUDE

SIZES = ["n", "n_tiles", "nbytes", "key", "inner_key"]
SIGN = tl.constexpr(-0x80000000)


@triton.jit
@no_type_check
def tile_of(tiles, n_tiles, bounds, starts, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """A program's segment, length, elements [TILE / p, p] with p per byte, mask of elements, bytes [TILE / p]."""
    t = tl.program_id(0)
    start = tl.load(tiles + t)
    length = tl.load(tiles + n_tiles + t)
    s = tl.load(tiles + 2 * n_tiles + t)
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
def random_bits(i, key, inner_key):
    """Return 32 bits per index, as uint32."""
    x = i.to(tl.uint32) + key.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15) ^ inner_key.to(tl.uint32, bitcast=True)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
@no_type_check
def with_sign(magnitude, negative):
    bits = magnitude.to(tl.int32, bitcast=True) | tl.where(negative, SIGN, 0)
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def sign_encode(
    tiles, n_tiles, bounds, starts, v, cuts, lows, highs, codes, residual, TILE: tl.constexpr
):  # fmt: skip
    s, length, i, live, place = tile_of(tiles, n_tiles, bounds, starts, 1, TILE)
    x = tl.load(v + i, mask=live, other=0.0)
    up = x > tl.load(cuts + s)
    tl.store(residual + i, x - tl.where(up, tl.load(highs + s), tl.load(lows + s)), mask=live)
    packed = tl.sum(tl.where(up & live, 1, 0) << shifts_of(1, True), 1)
    tl.store(codes + place, packed.to(tl.uint8), mask=live_bytes(length, 1, 4, TILE))


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def sign_add(tiles, n_tiles, bounds, starts, codes, lows, highs, total, TILE: tl.constexpr):
    s, length, i, live, place = tile_of(tiles, n_tiles, bounds, starts, 1, TILE)
    packed = tl.load(codes + place, mask=live_bytes(length, 1, 4, TILE), other=0).to(tl.int32)
    up = ((packed[:, None] >> shifts_of(1, True)) & 1) > 0
    x = tl.load(total + i, mask=live, other=0.0)
    tl.store(total + i, x + tl.where(up, tl.load(highs + s), tl.load(lows + s)), mask=live)


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def tern_encode(tiles, n_tiles, bounds, starts, v, thresholds, codes, residual, TILE: tl.constexpr):
    s, length, i, live, place = tile_of(tiles, n_tiles, bounds, starts, 2, TILE)
    x = tl.load(v + i, mask=live, other=0.0)
    t = tl.load(thresholds + s)
    up, down = (x >= t) & live, (x <= -t) & live
    tl.store(residual + i, x - tl.where(up, t, tl.where(down, -t, 0.0)), mask=live)
    packed = tl.sum(tl.where(up, 3, tl.where(down, 2, 0)) << shifts_of(2, True), 1)
    tl.store(codes + place, packed.to(tl.uint8), mask=live_bytes(length, 2, 4, TILE))


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def tern_add(tiles, n_tiles, bounds, starts, codes, thresholds, total, TILE: tl.constexpr):
    s, length, i, live, place = tile_of(tiles, n_tiles, bounds, starts, 2, TILE)
    packed = tl.load(codes + place, mask=live_bytes(length, 2, 4, TILE), other=0).to(tl.int32)
    field = (packed[:, None] >> shifts_of(2, True)) & 3
    t = tl.load(thresholds + s)
    x = tl.load(total + i, mask=live, other=0.0)
    tl.store(total + i, x + tl.where(field == 3, t, tl.where(field == 2, -t, 0.0)), mask=live)


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def uniform_encode(
    tiles, n_tiles, bounds, starts, v, inverses, steps, levels, key, inner_key, codes, residual,
    RANDOM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    s, length, i, live, place = tile_of(tiles, n_tiles, bounds, starts, WIDTH, TILE)
    x = tl.load(v + i, mask=live, other=0.0)
    scaled = tl.abs(x) * tl.load(inverses + s)
    if RANDOM:
        scaled += (random_bits(i, key, inner_key) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    else:
        scaled += 0.5
    level = tl.minimum(scaled, levels).to(tl.int32)
    level = tl.where(live, level, 0)
    negative = (x < 0) & (level > 0)
    tl.store(residual + i, x - with_sign(tl.load(steps + s) * level.to(tl.float32), negative), mask=live)
    field = level | (tl.where(negative, 1, 0) << (WIDTH - 1))
    packed = tl.sum(field << shifts_of(WIDTH, False), 1)
    tl.store(codes + place, packed.to(tl.uint8), mask=live_bytes(length, WIDTH, 1, TILE))


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def uniform_add(
    tiles, n_tiles, bounds, starts, codes, steps, total, WIDTH: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    s, length, i, live, place = tile_of(tiles, n_tiles, bounds, starts, WIDTH, TILE)
    packed = tl.load(codes + place, mask=live_bytes(length, WIDTH, 1, TILE), other=0).to(tl.int32)
    field = packed[:, None] >> shifts_of(WIDTH, False)
    level, negative = field & ((1 << (WIDTH - 1)) - 1), (field & (1 << (WIDTH - 1))) > 0
    x = tl.load(total + i, mask=live, other=0.0)
    tl.store(total + i, x + with_sign(tl.load(steps + s) * level.to(tl.float32), negative), mask=live)


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def scale(tiles, n_tiles, bounds, starts, factors, size, mean, SCALED: tl.constexpr, TILE: tl.constexpr):
    """Multiply by the segment's factor if SCALED, then divide by `size`."""
    s, _, i, live, _ = tile_of(tiles, n_tiles, bounds, starts, 8, TILE)
    x = tl.load(mean + i, mask=live, other=0.0)
    if SCALED:
        x *= tl.load(factors + s)
    # `/` would be an approximate division on GPUs
    tl.store(mean + i, tl.math.div_rn(x, tl.zeros_like(x) + tl.load(size)), mask=live)


@triton.jit(do_not_specialize=[*SIZES, "fields"])
@no_type_check
def sums(
    tiles, n_tiles, bounds, starts, codes, nbytes, fields, size, total,
    WIDTH: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Unpack the sums of all ranks' signs or ternary codes. A share has `fields` fields in `nbytes` bytes."""
    s, _, i, live, _ = tile_of(tiles, n_tiles, bounds, starts, 8, TILE)
    field = tl.load(starts + s) * (8 // WIDTH) + i - tl.load(bounds + s)
    place = field % fields * BITS
    byte, share = place // 8, field // fields * nbytes
    low = tl.load(codes + share + byte, mask=live, other=0).to(tl.int32)
    high = tl.load(codes + share + byte + 1, mask=live & (byte + 1 < nbytes), other=0).to(tl.int32)
    level = ((low | (high << 8)) >> (place % 8).to(tl.int32)) & ((1 << BITS) - 1)
    tl.store(total + i, (level * (2 // WIDTH)).to(tl.float32) - tl.load(size), mask=live)


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def natural_largest(v, n, largest, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(v + i, mask=i < n, other=0.0).to(tl.int32, bitcast=True) & MAGNITUDE
    # atomic: a maximum does not depend on the order
    tl.atomic_max(largest, tl.max(bits, 0), sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def natural_encode(
    v, n, tops, key, inner_key, codes, residual, RANDOM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(v + i, mask=i < n, other=0.0)
    bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
    if RANDOM:
        bits += (random_bits(i, key, inner_key) >> 9).to(tl.int32)
    else:
        bits += 0x400000
    exponent = tl.minimum(bits >> 23, 254)
    code = tl.maximum(exponent - tl.load(tops), 0)
    negative = (x < 0) & (code > 0)
    power = tl.where(code > 0, exponent << 23, 0).to(tl.float32, bitcast=True)
    tl.store(residual + i, x - with_sign(power, negative), mask=i < n)
    tl.store(codes + 4 + i, (code | tl.where(negative, 128, 0)).to(tl.uint8), mask=i < n)


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def natural_add(codes, n, tops, total, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(codes + 4 + i, mask=i < n, other=0).to(tl.int32)
    c = code & 127
    power = tl.where(c > 0, (c + tl.load(tops)) << 23, 0).to(tl.float32, bitcast=True)
    x = tl.load(total + i, mask=i < n, other=0.0)
    tl.store(total + i, x + with_sign(power, code > 127), mask=i < n)


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


@triton.jit(do_not_specialize=SIZES)
@no_type_check
def unpack(codes, nbytes, levels, n, BITS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    byte, shift = i * BITS // 8, (i * BITS % 8).to(tl.int32)
    low = tl.load(codes + byte, mask=byte < nbytes, other=0).to(tl.int32)
    high = tl.load(codes + byte + 1, mask=byte + 1 < nbytes, other=0).to(tl.int32)
    level = ((low | (high << 8)) >> shift) & ((1 << BITS) - 1)
    tl.store(levels + i, level.to(tl.uint8), mask=i < n)
