"""The GPU backend of low-rank products: Triton kernels whose number of launches does not depend on the matrices.

Launches: begin_ 2, or 6 with torch's if the bucket is one square matrix; project 2; orthonormal 3; outer 1. One of
torch's copies factors that do not lie in one tensor. Nothing waits for the device.

A program handles a tile of one matrix, or of one uncompressed tensor, and takes 12 bytes of traffic per element in
the pass that begins a step. Sums over the rows or columns of a matrix are partial sums per tile, which several
programs of `gather` add in one order. No floats are added atomically, so results repeat bit for bit. They differ
from the results of plain torch by rounding, as with any order of a matrix product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import inf
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Int32, Int64
from torch import Tensor

from dgc.kernels.launch import (
    BLOCK,
    LARGEST,
    SECTOR,
    Launcher,
    blocks,
    current_stream,
    held,
    moves,
    on_device,
    pointers,
    seed_slot,
    tree_of,
    zeros_on,
)
from dgc.kernels.lowrank import (
    Batches,
    Cast,
    Factor,
    FactorMessage,
    Factors,
    LowRank,
    Places,
    Products,
    SentUpdate,
    Tensors,
    Vector,
    consecutive,
)
from dgc.kernels.selection import PassInputs
from dgc.kernels.selection.triton import (
    FLOATS,
    INTERPRETED,
    MAGNITUDE,
    TOO_LARGE,
    TritonSelection,
    arrive,
    interval_of,
    random_bits,
    rounded,
    tree_sizes,
)

HEIGHT, WIDTH = 32, 64  # of a tile
SUMMED, SUMS_WIDTH = 64, 32  # tiles, and elements of a factor, that a program of `gather` adds at a time
LANES = 2048  # elements of all rows of a matrix that a program reads for a basis
FAN = 32  # sums of inner products that one program adds
LEAST_SHARE = 2.0**-22  # of a row with a direction: what is less is the rounding of fp32, or of inner products
# Rows of the table of a batch: first element of a factor, and its distances between matrices and between rows
X, U, W = (tl.constexpr(3 * i) for i in range(3))
SENT_RANK, RANK, PARTS, FIELDS = (tl.constexpr(9 + i) for i in range(4))
NONE = tl.constexpr(0x7FFFFFFF)  # larger than every position
INFINITE = tl.constexpr(0x7F800000)


@triton.jit
@no_type_check
def tile_of(tiles, n_tiles, pieces, n_pieces, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return a program's piece, group (-1: no matrix), member, start in v, height and width, the tile's rows,
    columns, places in the piece [HEIGHT, WIDTH], and mask.
    """
    t = tl.program_id(0)
    piece = tl.load(tiles + t)
    row = tl.load(tiles + n_tiles + t) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.load(tiles + 2 * n_tiles + t) * WIDTH + tl.arange(0, WIDTH)
    n = tl.load(pieces + piece)
    m = tl.load(pieces + n_pieces + piece)
    at = tl.minimum(row, n - 1)[:, None] * m + column[None, :]  # within 32 bits, also outside of the piece
    is_valid = (row < n)[:, None] & (column < m)[None, :] & (at < tl.load(pieces + 3 * n_pieces + piece))
    start = tl.load(pieces + 2 * n_pieces + piece)
    group = tl.load(pieces + 4 * n_pieces + piece)
    member = tl.load(pieces + 5 * n_pieces + piece)
    return piece, group, member, start, n, m, row, column, at, is_valid


@triton.jit
@no_type_check
def row_at(factor, groups, group, member, k, lane, length, SIDE: tl.constexpr):
    """Return the elements `lane` of row k of a matrix's factor."""
    own = groups + group * FIELDS + SIDE
    place = tl.load(own) + member * tl.load(own + 1) + k * tl.load(own + 2)  # of 64 bits, as the table
    return tl.load(factor + place + lane, mask=lane < length, other=0.0)


@triton.jit
@no_type_check
def rank_of(groups, group, FIELD: tl.constexpr):
    return tl.load(groups + group * FIELDS + FIELD, mask=group >= 0, other=0).to(tl.int32)


def bytes_of_factors(a: Any, fields: Sequence[int]) -> int:
    """Return the bytes of factors that the programs of `refresh` or `expand` read, at the largest ranks."""
    ranks = a.groups.view(-1, FIELDS.value)[:, list(fields)].amax(0).sum()
    return int(ranks) * 4 * (a.HEIGHT + a.WIDTH) * a.programs


def bytes_of_refresh(a: Any) -> tuple[int, int]:
    """A row of a tile begins and ends within a sector."""
    n, edges = a.v.numel(), 2 * SECTOR * a.HEIGHT * a.programs
    width = 0 if a.G is None else a.G.primitive_bitwidth // 8
    read = n * width + edges * (2 if width else 1) + bytes_of_factors(a, (SENT_RANK.value, RANK.value))
    return read, n * 4 * a.STORES + edges


def read_by_refresh(a: Any) -> int:
    """Return the most bytes that a program reads: its tile of v and of the gradient or what remains, and of each
    row of a factor what belongs to its rows and columns.
    """
    sent, rank = a.groups.view(-1, FIELDS.value)[:, [SENT_RANK.value, RANK.value]].amax(0).tolist()
    each = 4 + (0 if a.G is None else a.G.primitive_bitwidth // 8) + (4 if a.SENT and a.errors is not None else 0)
    across = 4 * (a.HEIGHT if a.EVEN else a.WIDTH) * rank if a.MULTIPLIES else 0
    return a.HEIGHT * a.WIDTH * each + (4 * (a.HEIGHT + a.WIDTH) * sent if a.SENT else 0) + across


@moves("tiles v errors", "partial firsts", read_by_refresh, bytes_of_refresh)
@triton.jit(do_not_specialize=["n_tiles", "n_pieces", "begin"])
@no_type_check
def refresh(
    tiles,
    n_tiles,
    pieces,
    n_pieces,
    groups,
    v,
    begin,
    errors,
    sources,
    u,
    w,
    x,
    firsts,
    partial,
    G: tl.constexpr,
    SENT: tl.constexpr,
    STORES: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    EVEN: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Subtract what was sent, add the gradient, and multiply by x.

    begin: where in v the uncompressed tensors begin, of which `errors` remain. firsts[t]: position of the tile's
    first unusable element of the gradient, or NONE. Partial sums of a matrix are [tiles of the sum, rank, length].
    """
    piece, group, member, start, n, m, row, column, at, is_valid = tile_of(
        tiles, n_tiles, pieces, n_pieces, HEIGHT, WIDTH
    )
    is_matrix = group >= 0
    value = tl.load(v + start + at, mask=is_valid, other=0.0)
    if SENT:
        sent = tl.zeros([HEIGHT, WIDTH], dtype=tl.float32)
        for k in range(rank_of(groups, group, SENT_RANK)):
            along = row_at(u, groups, group, member, k, row, n, U)
            sent += along[:, None] * row_at(w, groups, group, member, k, column, m, W)[None, :]
        rest = tl.zeros([HEIGHT, WIDTH], dtype=tl.float32)
        if errors is not None:
            place = start - begin + at
            rest = tl.load(errors + place, mask=is_valid & (place >= 0), other=0.0)
        value = tl.where(is_matrix, value - sent, rest)
    if G is not None:
        source = tl.load(sources + piece).to(tl.pointer_type(G))
        g = tl.load(source + at, mask=is_valid, other=0.0).to(tl.float32)
        bad = (g.to(tl.int32, bitcast=True) & MAGNITUDE) >= TOO_LARGE
        first = tl.min(tl.min(tl.where(bad, at, NONE), 1), 0)
        tl.store(firsts + tl.program_id(0), tl.where(first < NONE, start + first, NONE))
        value += tl.where(bad, 0.0, g)
    if STORES:
        tl.store(v + start + at, value, mask=is_valid)
    if MULTIPLIES:
        rank = rank_of(groups, group, RANK)
        if EVEN:
            tile, count, length = tl.load(tiles + n_tiles + tl.program_id(0)), (n + HEIGHT - 1) // HEIGHT, m
        else:
            tile, count, length = tl.load(tiles + 2 * n_tiles + tl.program_id(0)), (m + WIDTH - 1) // WIDTH, n
        place = (member * count + tile).to(tl.int64) * rank * length
        own = partial + tl.load(groups + group * FIELDS + PARTS, mask=is_matrix, other=0) + place
        for k in range(rank):
            if EVEN:
                product = tl.sum(row_at(x, groups, group, member, k, row, n, X)[:, None] * value, 0)
                tl.store(own + k * m + column, product, mask=column < m)
            else:
                product = tl.sum(value * row_at(x, groups, group, member, k, column, m, X)[None, :], 1)
                tl.store(own + k * n + row, product, mask=row < n)


@triton.jit
@no_type_check
def sum_of_rows(source, size, first, end, column, is_valid, ROWS: tl.constexpr):
    """Sum ROWS rows from `first` on, before `end`, of [rows, size] at some columns, in one order."""
    row = first + tl.arange(0, ROWS)
    here = (row < end)[:, None] & is_valid[None, :]
    # not from this multiprocessor's cache: other programs may have written it
    place = row.to(tl.int64)[:, None] * size + column[None, :]
    return tl.sum(tl.load(source + place, mask=here, other=0.0, cache_modifier=".cg"), 0)


@triton.jit
@no_type_check
def as_sent(y, limit, P: tl.constexpr):
    """NaN remains."""
    return rounded(tl.where(y > limit, limit, tl.where(y < -limit, -limit, y)), P)


def bytes_of_gather(a: Any) -> tuple[int, int]:
    """A row of a program begins and ends within a sector."""
    programs, counts = a.first_programs.diff(), a.sizes.view(-1, 6)[:, 1]
    return 2 * SECTOR * int((programs * counts.clamp(max=a.SUMMED)).sum()), 0


def read_by_gather(a: Any) -> int:
    """Return the most bytes that a program reads: the sums of tiles, and of as many programs on each level. Others
    read the rest, and the places of unusable elements.
    """
    return max(4 * a.WIDTH * a.SUMMED * (1 + a.levels), 8 * a.BLOCK)


SIZES_OF_GATHER = "n_groups steps levels n_sums n_factors n_rest limit rest_limit n_tiles end".split()


@moves("partial slots rest firsts", "slots factors numbers errors", read_by_gather, bytes_of_gather)
@triton.jit(do_not_specialize=SIZES_OF_GATHER)
@no_type_check
def gather(
    partial,
    first_programs,
    sizes,
    n_groups,
    steps,
    levels,
    n_sums,
    slots,
    arrived,
    n_factors,
    rest,
    n_rest,
    limit,
    rest_limit,
    factors,
    numbers,
    errors,
    firsts,
    n_tiles,
    found,
    first,
    end,
    largest,
    P: tl.constexpr,
    WIDTH: tl.constexpr,
    SUMMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the partial sums, and cast them and the rest of v.

    The first n_sums programs each add SUMMED tiles of WIDTH elements of a factor. The last one to arrive adds the
    sums of SUMMED programs, and so on, `levels` times at most. `slots` and `arrived` have the sums and counters of
    each element's programs, level by level. The other programs handle BLOCK elements of the rest, and find the
    first unusable element, or `end`.

    sizes: rank x length, tiles of a sum, first partial, first slot, first counter, place in `factors`.
    found: two zeros. largest: becomes 0, for `expand`.
    """
    p = tl.program_id(0)
    if largest is not None:
        tl.store(largest, 0, mask=p == 0)
    if p < n_sums:
        group = interval_of(first_programs, n_groups, steps, p)
        own = sizes + 6 * group
        size = tl.load(own).to(tl.int32)
        count = tl.load(own + 1).to(tl.int32)
        programs = (count + SUMMED - 1) // SUMMED
        q = p - tl.load(first_programs + group).to(tl.int32)
        part = q % programs
        element = q // programs
        columns = (size + WIDTH - 1) // WIDTH
        member = (element // columns).to(tl.int64)
        lane = tl.arange(0, WIDTH)
        inner = element % columns * WIDTH + lane
        here = inner < size
        source = partial + tl.load(own + 2) + member * count * size
        y = sum_of_rows(source, size, part * SUMMED, count, inner, here, SUMMED)
        n_slots, n_counters = tree_sizes(programs, levels, SUMMED)  # of one element
        slot = slots + tl.load(own + 3) + (element * n_slots).to(tl.int64) * WIDTH
        counter = arrived + tl.load(own + 4) + element * n_counters
        is_last = part >= 0
        for _ in range(levels):
            if is_last & (programs > 1):
                tl.store(slot + part * WIDTH + lane, y)
                part = part // SUMMED
                first_part = part * SUMMED
                is_last = arrive(counter + part) == tl.minimum(programs - first_part, SUMMED) - 1
                if is_last:
                    tl.store(counter + part, 0)
                    y = sum_of_rows(slot, WIDTH, first_part, programs, lane, lane < WIDTH, SUMMED)
                    slot += programs * WIDTH
                    programs = (programs + SUMMED - 1) // SUMMED
                    counter += programs
        if is_last:
            place = tl.load(own + 5) + member * size + inner
            sent = as_sent(y, limit, P)
            tl.store(numbers + place, sent.to(P), mask=here)
            tl.store(factors + place, sent, mask=here)
    else:
        part = p - n_sums
        i = part * BLOCK + tl.arange(0, BLOCK)
        if rest is not None:
            x = tl.load(rest + i, mask=i < n_rest, other=0.0)
            cast = as_sent(x, rest_limit, P)
            tl.store(numbers + n_factors + i, cast.to(P), mask=i < n_rest)
            if errors is not None:
                tl.store(errors + i, x - cast, mask=i < n_rest)
        if firsts is not None:
            n_parts = tl.maximum((n_tiles + BLOCK - 1) // BLOCK, 1)
            if part < n_parts:
                least = tl.min(tl.load(firsts + i, mask=i < n_tiles, other=NONE), 0)
                tl.atomic_max(found, least ^ NONE)  # NONE - least: zero if there is none
                if arrive(found + 1) == n_parts - 1:
                    tl.store(found + 1, 0)
                    least = tl.atomic_xchg(found, 0) ^ NONE
                    tl.store(first, tl.minimum(least, end))


def bytes_of_expand(a: Any) -> tuple[int, int]:
    """All tiles count as whole."""
    n = a.programs * a.HEIGHT * a.WIDTH
    read = bytes_of_factors(a, (SENT_RANK.value,)) + 4 * n
    return read, n * (a.P.primitive_bitwidth // 8) + 2 * SECTOR * a.HEIGHT * a.programs


def read_by_expand(a: Any) -> int:
    """Return the most bytes that a program reads: of each row of a factor what belongs to its rows and columns, or
    its tile of the mean.
    """
    sent = int(a.groups.view(-1, FIELDS.value)[:, SENT_RANK.value].amax())
    return max(4 * (a.HEIGHT + a.WIDTH) * sent, 4 * a.HEIGHT * a.WIDTH)


@moves("tiles", "", read_by_expand, bytes_of_expand)
@triton.jit(do_not_specialize=["n_tiles", "n_pieces", "begin"])
@no_type_check
def expand(
    tiles,
    n_tiles,
    pieces,
    n_pieces,
    groups,
    begin,
    targets,
    u,
    w,
    mean,
    largest,
    P: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the products U^T W and the parts of `mean`. largest: bits of the largest magnitude of all of these."""
    piece, group, member, start, n, m, row, column, at, is_valid = tile_of(
        tiles, n_tiles, pieces, n_pieces, HEIGHT, WIDTH
    )
    value = tl.zeros([HEIGHT, WIDTH], dtype=tl.float32)
    tall = tl.zeros([HEIGHT], dtype=tl.int32)
    wide = tl.zeros([WIDTH], dtype=tl.int32)
    if group >= 0:
        for k in range(tl.load(groups + group * FIELDS + SENT_RANK).to(tl.int32)):
            along = row_at(u, groups, group, member, k, row, n, U)
            across = row_at(w, groups, group, member, k, column, m, W)
            value += along[:, None] * across[None, :]
            tall = tl.maximum(tall, along.to(tl.int32, bitcast=True) & MAGNITUDE)
            wide = tl.maximum(wide, across.to(tl.int32, bitcast=True) & MAGNITUDE)
    else:
        value = tl.load(mean + (start - begin) + at, mask=is_valid, other=0.0)
        tall = tl.max(value.to(tl.int32, bitcast=True) & MAGNITUDE, 1)
    tl.atomic_max(largest, tl.maximum(tl.max(tall, 0), tl.max(wide, 0)), sem="relaxed")
    target = tl.load(targets + piece).to(tl.pointer_type(P))
    tl.store(target + at, rounded(value, P).to(P), mask=is_valid)


# --- orthonormal bases -----------------------------------------------------------------------------
#
# The rows of a matrix X become C X, with coefficients C from the inner products X X^T of the rows: Gram-Schmidt on
# the coefficients, which is Cholesky's method. Its error grows with 1 / share**2, so it is done twice: C2 (C1 X)
# has the error of rows that are almost orthonormal. All is fp64, and C1 X is computed again in each launch. A
# program reads a part of the rows. The sums of all parts are added in one order, FAN programs at a time.


@triton.jit
@no_type_check
def finite_at(source, place, is_valid):
    """Return elements of x in fp64. What is not finite is zero."""
    y = tl.load(source + place, mask=is_valid, other=0.0)
    return tl.where((y.to(tl.int32, bitcast=True) & MAGNITUDE) < INFINITE, y, 0.0).to(tl.float64)


@triton.jit
@no_type_check
def matrix_of(sizes, group, member):
    """Return (first element in x, distance between rows, r, d, whether it is `whole`, number of the matrix)."""
    own = sizes + 9 * group
    source = tl.load(own) + member * tl.load(own + 1)
    stride = tl.load(own + 2)
    r = tl.load(own + 3).to(tl.int32)
    d = tl.load(own + 4).to(tl.int32)
    return source, stride, r, d, tl.load(own + 5) > 0, tl.load(own + 8) + member


@triton.jit
@no_type_check
def rows_of(
    source,
    stride,
    r,
    d,
    lane,
    first,
    kept,
    key,
    q,
    IS_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Return elements of the rows of X, or of C1 X with random numbers in [-1, 1) for the rows from `kept` on.

    first: the columns of C1.
    """
    row = tl.arange(0, ROWS)
    here = (row < r)[:, None] & (lane < d)[None, :]
    if IS_FIRST:
        y = finite_at(source, row.to(tl.int64)[:, None] * stride + lane[None, :], here)
    else:
        y = tl.zeros([ROWS, LANES], dtype=tl.float64)
        for k in range(r):
            x = finite_at(source, k * stride + lane, lane < d)
            y += tl.load(first + k * ROWS + row, cache_modifier=".cg")[:, None] * x[None, :]
        if kept < r:
            bits = random_bits(row[:, None] * d + lane[None, :], key, q.to(tl.int32)) >> 8
            noise = bits.to(tl.int32).to(tl.float64) * 2.0**-23 - 1.0
            y = tl.where(here & (row >= kept)[:, None], noise, y)
    return y


@triton.jit
@no_type_check
def coefficients_of(products, r, least_share, is_whole, IS_FIRST: tl.constexpr, ROWS: tl.constexpr):
    """Return (C by columns, the number of rows that determine a direction) from inner products [ROWS, ROWS]."""
    row = tl.arange(0, ROWS)
    on_diagonal = row[:, None] == row[None, :]
    g = tl.load(products + row[:, None] * ROWS + row[None, :], cache_modifier=".cg")
    norm = tl.sqrt(tl.sum(tl.where(on_diagonal, g, 0.0), 1))
    if IS_FIRST:
        norm = tl.where(is_whole, tl.maximum(norm, 1e-16), norm)
    inverse = tl.where(norm > 0, 1.0 / tl.where(norm > 0, norm, 1.0), 0.0)
    g = g * inverse[:, None] * inverse[None, :]
    c = tl.zeros([ROWS, ROWS], dtype=tl.float64)
    done = tl.zeros([], dtype=tl.int32)
    for k in range(r):
        own = tl.where(row == k, 1.0, 0.0).to(tl.float64)
        for _ in range(2):
            dots = tl.sum(c * tl.sum(g * own[None, :], 1)[None, :], 1)
            own -= tl.sum(c * dots[:, None], 0)
        share = tl.sqrt(tl.maximum(tl.sum(own * tl.sum(g * own[None, :], 1), 0), 0.0))
        has_direction = share > least_share
        scaled = own * tl.where(has_direction, 1.0 / tl.where(has_direction, share, 1.0), 0.0)
        c = tl.where((row == tl.where(has_direction, done, ROWS))[:, None], scaled[None, :], c)
        done += has_direction.to(tl.int32)
    c = c * inverse[None, :]
    if is_whole:  # divided by its length, and no more
        if IS_FIRST:
            c = tl.where(on_diagonal, inverse[:, None], 0.0)
        else:
            c = tl.where(on_diagonal, 1.0, 0.0).to(tl.float64)
        done = r
    return tl.trans(c), done


def bytes_of_bases(a: Any) -> tuple[int, int]:
    """Return what is read and written besides: rows, which begin and end within sectors, and coefficients."""
    rows = a.programs * a.ROWS * (4 * a.LANES + 2 * SECTOR)
    return rows + 2 * a.programs * a.ROWS * max(8 * a.ROWS, SECTOR), 3 * a.coefficients.nbytes


def read_by_inner_products(a: Any) -> int:
    """Return the most bytes that a program reads: rows, coefficients, sums on each level, and all products."""
    level = 8 * a.FAN * a.OWN * a.ROWS
    return 4 * a.ROWS * a.LANES + 16 * a.ROWS**2 + level * a.levels


SIZES_OF_BASES = ["n_groups", "steps", "key"]


@moves("slots", "slots products", read_by_inner_products, bytes_of_bases)
@triton.jit(do_not_specialize=[*SIZES_OF_BASES, "levels"])
@no_type_check
def inner_products(
    x,
    first_programs,
    sizes,
    n_groups,
    steps,
    levels,
    key,
    seeds,
    least_share,
    slots,
    arrived,
    products,
    first,
    coefficients,
    kept,
    ROWS: tl.constexpr,
    OWN: tl.constexpr,
    LANES: tl.constexpr,
    FAN: tl.constexpr,
    IS_FIRST: tl.constexpr,
):
    """Find the coefficients of a basis for the rows of X, or of C1 X.

    A program multiplies OWN rows with all rows, LANES elements of each. The last one to arrive adds the sums of
    FAN programs, and so on, `levels` times at most, and the last one of a matrix writes its coefficients.

    sizes: first element in x, distances between matrices and rows there, r, d, whole, first slot, first counter,
    first matrix. seeds: the key on the device, in the place of `key`, or None. least_share: largest share of a row
    without a direction. kept: the number of rows that have one.
    """
    if seeds is not None:
        key = tl.load(seeds).to(tl.int32)
    p = tl.program_id(0)
    group = interval_of(first_programs, n_groups, steps, p)
    blocks: tl.constexpr = ROWS // OWN
    own = sizes + 9 * group
    d = tl.load(own + 4).to(tl.int32)
    programs = (d + LANES - 1) // LANES
    place = p - tl.load(first_programs + group).to(tl.int32)
    part = place % programs
    block = place // programs % blocks
    member = place // programs // blocks
    source, stride, r, d, is_whole, q = matrix_of(sizes, group, member)
    lane = part * LANES + tl.arange(0, LANES)
    row = tl.arange(0, ROWS)
    known = r
    if not IS_FIRST:
        known = tl.load(kept + q)
    y = rows_of(x + source, stride, r, d, lane, first + q * ROWS * ROWS, known, key, q, IS_FIRST, ROWS, LANES)
    one = tl.arange(0, OWN)
    found = tl.zeros([OWN, ROWS], dtype=tl.float64)
    for i in tl.static_range(OWN):
        of_row = tl.sum(tl.where((row == block * OWN + i)[:, None], y, 0.0), 0)
        dots = tl.sum(y * of_row[None, :], 1)
        found = tl.where((one == i)[:, None], dots[None, :], found)
    at = one[:, None] * ROWS + row[None, :]
    n_slots, n_counters = tree_sizes(programs, levels, FAN)  # of one block of rows
    number = member * blocks + block
    slot = slots + tl.load(own + 6) + (number * n_slots).to(tl.int64) * (OWN * ROWS)
    counter = arrived + tl.load(own + 7) + member + number * n_counters
    is_last = part >= 0
    for _ in range(levels):
        if is_last & (programs > 1):
            tl.store(slot + part * (OWN * ROWS) + at, found)
            part = part // FAN
            first_part = part * FAN
            is_last = arrive(counter + part) == tl.minimum(programs - first_part, FAN) - 1
            if is_last:
                tl.store(counter + part, 0)
                found = tl.zeros([OWN, ROWS], dtype=tl.float64)
                for other in range(first_part, tl.minimum(first_part + FAN, programs)):
                    # not from this multiprocessor's cache
                    found += tl.load(slot + other * (OWN * ROWS) + at, cache_modifier=".cg")
                slot += programs * (OWN * ROWS)
                programs = (programs + FAN - 1) // FAN
                counter += programs
    if is_last:
        all_products = products + q * ROWS * ROWS
        tl.store(all_products + block * (OWN * ROWS) + at, found)
        end = arrived + tl.load(own + 7) + (member + 1) * (1 + blocks * n_counters) - 1
        if arrive(end) == blocks - 1:
            tl.store(end, 0)
            tl.debug_barrier()
            c, done = coefficients_of(all_products, r, least_share, is_whole, IS_FIRST, ROWS)
            tl.store(coefficients + q * ROWS * ROWS + row[:, None] * ROWS + row[None, :], c)
            if IS_FIRST:
                tl.store(kept + q, done)


@moves("", "out", lambda a: 4 * a.ROWS * a.LANES + 16 * a.ROWS**2, bytes_of_bases)
@triton.jit(do_not_specialize=SIZES_OF_BASES)
@no_type_check
def write_bases(
    x,
    first_programs,
    sizes,
    n_groups,
    steps,
    key,
    seeds,
    first,
    coefficients,
    kept,
    begins,
    out,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write C2 C1 X. begins: first element in out, of each group. Others as in `inner_products`."""
    if seeds is not None:
        key = tl.load(seeds).to(tl.int32)
    p = tl.program_id(0)
    group = interval_of(first_programs, n_groups, steps, p)
    d = tl.load(sizes + 9 * group + 4).to(tl.int32)
    programs = (d + LANES - 1) // LANES
    place = p - tl.load(first_programs + group).to(tl.int32)
    member = place // programs
    source, stride, r, d, is_whole, q = matrix_of(sizes, group, member)
    lane = place % programs * LANES + tl.arange(0, LANES)
    row = tl.arange(0, ROWS)
    known = tl.load(kept + q)
    y = rows_of(x + source, stride, r, d, lane, first + q * ROWS * ROWS, known, key, q, False, ROWS, LANES)
    basis = tl.zeros([ROWS, LANES], dtype=tl.float64)
    for k in range(r):
        of_row = tl.sum(tl.where((row == k)[:, None], y, 0.0), 0)
        basis += tl.load(coefficients + q * ROWS * ROWS + k * ROWS + row)[:, None] * of_row[None, :]
    target = out + tl.load(begins + group) + (member * r).to(tl.int64) * d
    here = (row < r)[:, None] & (lane < d)[None, :]
    tl.store(target + row.to(tl.int64)[:, None] * d + lane[None, :], basis.to(tl.float32), mask=here)


@dataclass(frozen=True, eq=False)
class Tiles:
    """Matrices, in groups of one shape, and uncompressed tensors, divided into tiles.

    Attributes:
        table: Rows piece, and the tile's row and column of tiles.
        pieces: Rows n, m, start, numel, group, member. An uncompressed tensor has rows of WIDTH elements, and its
            group is -1.
        begin: Where the uncompressed tensors begin.
    """

    table: Int32[Tensor, "3 tiles"]
    pieces: Int32[Tensor, "6 pieces"]
    begin: int

    @property
    def counts(self) -> tuple[int, int]:
        return self.table.shape[1], self.pieces.shape[1]


def tiles_of(
    shapes: tuple[tuple[int, int, int], ...], rest: tuple[int, ...], device: torch.device, stream: int
) -> Tiles:
    """Return the tiles of `count` matrices [n, m] for each (count, n, m), and of tensors of `rest` elements."""
    tiles = _tiles_of(shapes, rest, device, stream)
    held(tiles.table)
    held(tiles.pieces)
    return tiles


@lru_cache(maxsize=1024)
def _tiles_of(
    shapes: tuple[tuple[int, int, int], ...], rest: tuple[int, ...], device: torch.device, stream: int
) -> Tiles:
    pieces, start = [], 0
    for group, (count, n, m) in enumerate(shapes):
        for member in range(count):
            pieces.append((n, m, start, n * m, group, member))
            start += n * m
    begin = start
    for numel in rest:
        pieces.append((-(-numel // WIDTH), WIDTH, start, numel, -1, 0))
        start += numel
    if start > (largest := LARGEST - WIDTH):
        raise ValueError(
            f"a bucket of {start} elements is too large for the triton kernels: the maximum is {largest}; split "
            "the tensor, or use DGC_KERNELS=reference"
        )
    table = [
        (piece, i, j)
        for piece, (n, m, *_) in enumerate(pieces)
        for i in range(-(-n // HEIGHT))
        for j in range(-(-m // WIDTH))
    ]
    return Tiles(as_table(table, 3, torch.int32, device), as_table(pieces, 6, torch.int32, device), begin)


def as_table(rows: Sequence[tuple[int, ...]], width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the rows as columns of a tensor."""
    return on_device(tuple(row[k] for k in range(width) for row in rows), dtype, device).view(width, -1)


Place = tuple[int, int, int]  # first element, distance between matrices, distance between rows
NOWHERE: Place = (0, 0, 0)


def in_one(factors: Sequence[Factor]) -> tuple[Tensor, list[Place]]:
    """Return a tensor that holds all factors, and their places in it. They are copied if they lie in several."""
    # mostly by functions that run in C, because there may be a hundred factors
    strides = list(map(Tensor.stride, factors))
    memory = set(map(torch.UntypedStorage.data_ptr, map(Tensor.untyped_storage, factors)))
    if len(memory) > 1 or any(inner != 1 for _, _, inner in strides):
        whole, copies = consecutive([(x.shape[0], x.shape[1], x.shape[2]) for x in factors], factors[0].device)
        torch.cat([x.reshape(-1) for x in factors], out=whole)
        factors, strides = copies, list(map(Tensor.stride, copies))
    whole = factors[0].as_strided((factors[0].untyped_storage().nbytes() // 4,), (1,), 0)
    places = map(int, map(Tensor.storage_offset, factors))
    return whole, [(place, outer, row) for place, (outer, row, _) in zip(places, strides, strict=True)]


@dataclass(frozen=True)
class SumPlan:
    """How `gather` adds the sums of tiles.

    Attributes:
        first_programs: By batch, and the number of programs.
        table: `sizes` of `gather`.
        levels: How often sums of several programs are added.
        partial, slots, counters: The numbers of tiles' sums, of programs' sums, and of counters.
    """

    first_programs: tuple[int, ...]
    table: tuple[int, ...]
    levels: int
    partial: int
    slots: int
    counters: int


@lru_cache(maxsize=1024)
def plan_sums(batches: tuple[tuple[int, int, int], ...]) -> SumPlan:
    """batches: matrices, rank x length, tiles of a sum."""
    starts, table, most = [0], [], 0
    partial = slots = counters = first = 0
    for members, size, count in batches:
        elements, programs = members * -(-size // SUMS_WIDTH), -(-count // SUMMED)
        table += [size, count, partial, slots, counters, first]
        starts.append(starts[-1] + elements * programs)
        partial += members * count * size
        first += members * size
        tree = tree_of(programs, SUMMED)
        slots, counters = slots + elements * tree.sums * SUMS_WIDTH, counters + elements * tree.groups
        most = max(most, tree.levels)
    return SumPlan(tuple(starts), tuple(table), most, partial, slots, counters)


@dataclass(frozen=True)
class BasisPlan:
    """How bases are found.

    Attributes:
        first_programs, first_parts: Of `inner_products` and `write_bases`, by batch, and their numbers.
        table: `sizes` of `inner_products`.
        rows, own, lanes: Rows of a matrix, at most; rows that a program multiplies with all, and elements of each.
        levels: How often sums of several programs are added.
        slots, counters, matrices: The numbers of programs' sums, of counters and of matrices.
    """

    first_programs: tuple[int, ...]
    first_parts: tuple[int, ...]
    table: tuple[int, ...]
    rows: int
    own: int
    lanes: int
    levels: int
    slots: int
    counters: int
    matrices: int


@lru_cache(maxsize=1024)
def plan_bases(batches: tuple[tuple[int, ...], ...]) -> BasisPlan:
    """batches: matrices, r, d, place in x, whole."""
    rows = triton.next_power_of_2(max(batch[1] for batch in batches))
    own = max(1, min(rows, 32 // rows))
    lanes = max(64, min(LANES // rows, triton.next_power_of_2(max(batch[2] for batch in batches))))
    starts, parts, table, most = [0], [0], list[int](), 0
    slots = counters = matrices = 0
    for members, r, d, *place, whole in batches:
        programs = -(-d // lanes)
        table += [*place, r, d, whole, slots, counters, matrices]
        blocks_of_rows = members * rows // own
        starts.append(starts[-1] + blocks_of_rows * programs)
        parts.append(parts[-1] + members * programs)
        matrices, counters = matrices + members, counters + members
        tree = tree_of(programs, FAN)
        slots += blocks_of_rows * tree.sums * own * rows
        counters, most = counters + blocks_of_rows * tree.groups, max(most, tree.levels)
    return BasisPlan(tuple(starts), tuple(parts), tuple(table), rows, own, lanes, most, slots, counters, matrices)


@dataclass(frozen=True, eq=False)
class Partial:
    """Sums per tile, for `gather`, room for the sums of programs, and the places of unusable elements."""

    sums: Vector
    slots: Vector
    plan: SumPlan
    firsts: Int32[Tensor, "tiles"] | None


class TritonLowRank(LowRank):
    """The kernels above.

    Args:
        kernels: Adds the gradients of a bucket that is one square matrix.
    """

    fused = True

    def __init__(self, kernels: TritonSelection):
        super().__init__(kernels)
        self._triton, self._launch = kernels, Launcher(INTERPRETED)

    def remove_(self, v: Vector, batches: Batches, sent: SentUpdate) -> None:
        self._refresh(v, batches, [v.numel() - _end_of(batches)], sent, None, (), True)

    def begin_(
        self,
        v: Vector,
        batches: Batches,
        sent: SentUpdate | None,
        g: Tensors,
        X: Factors,
        even: bool,
        cast: Cast,
    ) -> FactorMessage:
        first = torch.empty((), dtype=torch.int64, device=v.device)
        if any((len(b.members), b.numel) != (b.count, b.count * b.n * b.m) for b in batches):  # no matrices
            numel = sum(map(Tensor.numel, g))
            if sent is not None:
                self.remove_(v, batches, sent)
                v[numel:].zero_()
            self._triton.accumulate_into_(PassInputs(tuple(g), None, v[:numel]), first.fill_(v.numel()))
            partial = self._refresh(v, batches, [], None, None, X, even, stores=False)
        else:
            rest = [piece.numel() for piece in g[sum(batch.count for batch in batches) :]]
            partial = self._refresh(v, batches, rest, sent, g, X, even)
        return self._gather(partial, batches, even, cast, v, first)

    def project(
        self, v: Vector, batches: Batches, products: Products, X: Factors, even: bool, cast: Cast
    ) -> FactorMessage:
        sent = SentUpdate(products) if products else None
        partial = self._refresh(v, batches, [], sent, None, X, even, stores=False)
        return self._gather(partial, batches, even, cast, None, None)

    def orthonormal(self, xs: Factors, whole: bool, epsilon: float, key: int) -> Factors:
        shapes = [(x.shape[0], x.shape[1], x.shape[2]) for x in xs]
        alone = [whole and r == 1 for _, r, _ in shapes]
        given = [x.reshape(1, 1, -1) if one else x for x, one in zip(xs, alone, strict=True)]
        x, places = in_one(given)
        out, bases = consecutive(shapes, x.device)
        begins = tuple(map(int, map(Tensor.storage_offset, bases)))
        plan = plan_bases(
            tuple((*part.shape, *place, int(one)) for part, place, one in zip(given, places, alone, strict=True))
        )
        device, rows = x.device, plan.rows
        wide = torch.empty(plan.slots + 3 * plan.matrices * rows * rows, dtype=torch.float64, device=device)
        slots, products, first, second = wide.split([plan.slots, *[plan.matrices * rows * rows] * 3])
        kept = torch.empty(plan.matrices, dtype=torch.int32, device=device)
        table = on_device(plan.table, torch.int64, device)
        slot, signed = seed_slot(key), key - (key >> 31 << 32)
        random = (signed, None) if slot is None else (0, slot)
        groups = (table, len(xs), len(xs).bit_length())
        programs = on_device(plan.first_programs, torch.int64, device)
        zeros, variant = zeros_on(device, plan.counters), (rows, plan.own, plan.lanes, FAN)
        where = (x, programs, *groups, plan.levels, *random)
        for share, found, is_first in ((max(epsilon, LEAST_SHARE), first, True), (0.0, second, False)):
            work = (share, slots, zeros, products, first, found, kept, *variant, is_first)
            self._launch(inner_products, x, plan.first_programs[-1], *where, *work)
        parts, starts = (on_device(values, torch.int64, device) for values in (plan.first_parts, begins))
        result = (first, second, kept, starts, out, rows, plan.lanes)
        self._launch(write_bases, x, plan.first_parts[-1], x, parts, *groups, *random, *result)
        return bases

    def outer(
        self,
        products: Products,
        out: Places,
        mean: Vector,
        rest: Tensors,
        largest: Int32[Tensor, "1"] | None = None,
    ) -> None:
        device, targets = mean.device, [*chain.from_iterable(out), *rest]
        if not targets:
            return
        shapes = tuple((len(places), U.shape[2], W.shape[2]) for places, (U, W) in zip(out, products, strict=True))
        lengths = tuple(map(Tensor.numel, rest))
        tiles = tiles_of(shapes, lengths, device, current_stream(device))
        u, us, w, ws = _sides(products)
        ranks = [U.shape[1] for U, _ in products]
        groups = _groups([(NOWHERE, a, b, R, 0, 0) for a, b, R in zip(us, ws, ranks, strict=True)], device)
        if largest is None:
            largest = torch.zeros(1, dtype=torch.int32, device=device)
        where = pointers(targets, targets[0].dtype, device)
        work = (groups, tiles.begin, where, u, w, mean, largest, FLOATS[targets[0].dtype], HEIGHT, WIDTH)
        self._launch(
            expand, mean, tiles.counts[0], tiles.table, tiles.counts[0], tiles.pieces, tiles.counts[1], *work
        )

    def _refresh(
        self,
        v: Vector,
        batches: Batches,
        rest: Sequence[int],
        sent: SentUpdate | None,
        g: Tensors | None,
        X: Factors,
        even: bool,
        stores: bool = True,
    ) -> Partial:
        """rest: lengths of the uncompressed tensors. X: may be empty."""
        device, stream = v.device, current_stream(v.device)
        tiles = tiles_of(tuple((b.count, b.n, b.m) for b in batches), tuple(rest), device, stream)
        x, xs = in_one(X) if X else (None, [NOWHERE] * len(batches))
        u, us, w, ws = _sides([] if sent is None else sent.products)
        rows, sizes, parts = [], [], 0
        for b, batch in enumerate(batches):
            r = X[b].shape[1] if X else 0
            summed, length = (batch.n, batch.m) if even else (batch.m, batch.n)
            count = -(-summed // (HEIGHT if even else WIDTH))
            R, a, c = (0, NOWHERE, NOWHERE) if sent is None else (sent.products[b][0].shape[1], us[b], ws[b])
            rows.append((xs[b], a, c, R, r, parts))
            sizes.append((batch.count, r * length, count))
            parts += batch.count * count * r * length
        (n_tiles, n_pieces), groups = tiles.counts, _groups(rows, device)
        plan = plan_sums(tuple(sizes) if X else ())
        sums, slots = torch.empty(plan.partial + plan.slots, dtype=torch.float32, device=device).split(
            [plan.partial, plan.slots]
        )
        firsts = None if g is None else torch.empty(n_tiles, dtype=torch.int32, device=device)
        sources, G = (None, None) if g is None else (pointers(g, g[0].dtype, device), FLOATS[g[0].dtype])
        errors = None if sent is None else sent.rounding_errors
        where = (tiles.table, n_tiles, tiles.pieces, n_pieces, groups, v, tiles.begin)
        work = (errors, sources, u, w, x, firsts, sums)
        variant = (G, sent is not None, stores, bool(X), even, HEIGHT, WIDTH)
        self._launch(refresh, v, n_tiles, *where, *work, *variant)
        return Partial(sums, slots, plan, firsts)

    def _gather(
        self,
        partial: Partial,
        batches: Batches,
        even: bool,
        cast: Cast,
        v: Vector | None,
        first: Int64[Tensor, ""] | None,
    ) -> FactorMessage:
        """v: the rest of it is sent too."""
        device = partial.sums.device
        flat, Y = consecutive([batch.factor_shape("Q" if even else "P") for batch in batches], device)
        numel, rest, errors, largest = flat.numel(), None, None, None
        if v is not None:
            rest, largest = v[_end_of(batches) :], torch.empty(1, dtype=torch.int32, device=device)
            errors = None if cast.rest_limit is None else torch.empty_like(rest)
        dtype, plan, firsts = torch.float32 if cast.limit is None else cast.dtype, partial.plan, partial.firsts
        n_rest = 0 if rest is None else rest.numel()
        numbers = torch.empty(numel + n_rest, dtype=dtype, device=device)
        tables = (on_device(values, torch.int64, device) for values in (plan.first_programs, plan.table or (0,)))
        zeros, n_sums = zeros_on(device, plan.counters + 2), plan.first_programs[-1]
        given = (
            *tables,
            len(Y),
            len(Y).bit_length(),
            plan.levels,
            n_sums,
            partial.slots,
            zeros[2:],
            numel,
            rest,
            n_rest,
        )
        limits = (inf if limit is None else limit for limit in (cast.limit, cast.rest_limit))
        n_tiles, n_parts = (0, 0) if firsts is None else (firsts.numel(), max(1, blocks(firsts.numel())))
        ends = (firsts, n_tiles, zeros, first, 0 if v is None else v.numel(), largest)
        programs = max(1, n_sums + max(blocks(n_rest), n_parts))
        variant = (FLOATS[dtype], SUMS_WIDTH, SUMMED, BLOCK)
        self._launch(gather, flat, programs, partial.sums, *given, *limits, flat, numbers, errors, *ends, *variant)
        return FactorMessage(Y, numbers, errors, first, largest)


def _sides(products: Products) -> tuple[Tensor | None, list[Place], Tensor | None, list[Place]]:
    """Return U and W of all products, each in one tensor, and their places."""
    if not products:
        return None, [], None, []
    us, ws = zip(*products, strict=True)
    return *in_one(us), *in_one(ws)


def _groups(rows: Sequence[tuple[Place, Place, Place, int, int, int]], device: torch.device) -> Int64[Tensor, "_"]:
    """Return the table of batches: places in x, u and w, ranks of u and of x, and the first partial sum."""
    table = [(*x, *u, *w, *others) for x, u, w, *others in rows]
    return on_device(tuple(chain.from_iterable(table)) or (0,) * FIELDS.value, torch.int64, device)


def _end_of(batches: Batches) -> int:
    """Where in v the uncompressed tensors begin."""
    return batches[-1].offset + batches[-1].count * batches[-1].n * batches[-1].m if batches else 0
