"""The GPU backend of `Blocks`: Triton kernels with the same bits as plain torch, one launch per operation.

A program handles TILE elements of the padded vector: whole blocks, perhaps of several segments and rows. A table
has the first element and the number of elements of each block, so that the grid does not depend on the device's
data.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Int32
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dgc.kernels.codes import layout_of
from dgc.kernels.codes.blocks import GROUP, BlockCode, Blocks, Padded, Row, Rows
from dgc.kernels.codes.triton import LEVELS, field_value, with_sign
from dgc.kernels.codes.triton_elements import level_factors_of
from dgc.kernels.launch import Launcher, as_rows, current_stream, groups_of_ranks, moves
from dgc.kernels.selection import Bounds, Dense, SelectionKernels
from dgc.kernels.selection.triton import INTERPRETED, MAGNITUDE, TritonSelection

HALF = tl.constexpr(GROUP // 2)
STAGES = tl.constexpr(GROUP.bit_length() - 1)
SIZES = ["n_blocks", "n_ranks", "stride", "each", "levels", "size"]


def read_of_row(bits: int, size: int, tile: int) -> int:
    """Return the bytes that a program reads of a row: codes of `tile` elements, and the scales of their blocks."""
    return tile * bits // 8 + 2 * (tile // size)


@triton.jit
@no_type_check
def blocks_of(BITS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Return a program's blocks [B], and the places in a block [1, bytes, p], with p elements per byte."""
    byte = tl.arange(0, SIZE * BITS // 8)
    inner = byte[:, None] * (8 // BITS) + tl.arange(0, 8 // BITS)[None, :]
    return tl.program_id(0) * (TILE // SIZE) + tl.arange(0, TILE // SIZE), inner[None, :, :]


@triton.jit
@no_type_check
def elements_of(table, n_blocks, block, inner):
    """Return the elements of blocks, and a mask of those that exist."""
    real = block < n_blocks
    start = tl.load(table + block, mask=real, other=0)
    length = tl.load(table + n_blocks + block, mask=real, other=0)
    return start[:, None, None] + inner, inner < length[:, None, None]


@triton.jit
@no_type_check
def bytes_of(row, block, each, BITS: tl.constexpr, SIZE: tl.constexpr):
    """Return the offsets of the scales [B] and codes [B, bytes] of blocks, counted in their rows from `row` on."""
    nbytes: tl.constexpr = SIZE * BITS // 8
    code = (row + 2 * each)[:, None] + block[:, None] * nbytes + tl.arange(0, nbytes)[None, :]
    return row + 2 * block, code


@triton.jit
@no_type_check
def turned(x, TILE: tl.constexpr):
    """Return `rotated` of x. Each stage adds pairs whose places differ in the last bit, and makes it the first."""
    y = tl.reshape(x, [TILE // (2 * HALF), HALF, 2])
    for _ in tl.static_range(STAGES):
        low, high = tl.split(y)
        y = tl.permute(tl.join(low + high, low - high), (0, 2, 1))
        y = tl.reshape(y, [TILE // (2 * HALF), HALF, 2])
    return tl.reshape(y * 0.125, x.shape)


@triton.jit
@no_type_check
def values_of(
    rows,
    row,
    block,
    real,
    each,
    levels,
    ROTATE: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the values [B, bytes, p] of blocks, zero unless they are `real`."""
    scale, code = bytes_of(row, block, each, BITS, SIZE)
    top = tl.load((rows + scale).to(tl.pointer_type(tl.int16)), mask=real, other=0).to(tl.int32)
    _, step = level_factors_of((top << 16).to(tl.float32, bitcast=True), levels)
    packed = tl.load(rows + code, mask=real[:, None], other=0).to(tl.int32)
    field = packed[:, :, None] >> (tl.arange(0, 8 // BITS) * BITS)[None, None, :]
    step = step[:, None, None]
    x = field_value(field, step, LEVELS, BITS)
    if ROTATE:
        x = turned(x, TILE)
    return x


@moves("table v", "rows residual", lambda a: 4 * a.TILE + 8 * (a.TILE // a.SIZE))
@triton.jit(do_not_specialize=SIZES)
@no_type_check
def encode_blocks(
    table,
    n_blocks,
    v,
    rows,
    stride,
    each,
    residual,
    levels,
    KEEP: tl.constexpr,
    ROTATE: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    block, inner = blocks_of(BITS, SIZE, TILE)
    i, is_valid = elements_of(table, n_blocks, block, inner)
    x = tl.load(v + i, mask=is_valid, other=0.0)
    y = x
    if ROTATE:
        y = turned(x, TILE)
    bits = y.to(tl.int32, bitcast=True) & MAGNITUDE
    top = (tl.max(tl.max(bits, 2), 1) + 0xFFFF) >> 16
    inverse, step = level_factors_of((top << 16).to(tl.float32, bitcast=True), levels)
    level = tl.minimum(tl.abs(y) * inverse[:, None, None] + 0.5, levels).to(tl.int32)
    negative = (y < 0) & (level > 0)
    if KEEP:
        value = with_sign(step[:, None, None] * level.to(tl.float32), negative)
        if ROTATE:
            value = turned(value, TILE)
        tl.store(residual + i, x - value, mask=is_valid)
    field = level | (negative.to(tl.int32) << (BITS - 1))
    packed = tl.sum(field << (tl.arange(0, 8 // BITS) * BITS)[None, None, :], 2)
    real = block < n_blocks
    scale, code = bytes_of((block // each).to(tl.int64) * stride, block % each, each, BITS, SIZE)
    tl.store((rows + scale).to(tl.pointer_type(tl.int16)), top.to(tl.int16), mask=real)
    tl.store(rows + code, packed.to(tl.uint8), mask=real[:, None])


@moves("rows total", "total", lambda a: a.n_ranks * read_of_row(a.BITS, a.SIZE, a.TILE) + 4 * a.TILE)
@triton.jit(do_not_specialize=SIZES)
@no_type_check
def add_blocks(
    rows,
    n_ranks,
    stride,
    each,
    total,
    levels,
    ROTATE: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add the values of ranks in their order."""
    block, inner = blocks_of(BITS, SIZE, TILE)
    real = block < each
    i = block.to(tl.int64)[:, None, None] * SIZE + inner
    x = tl.load(total + i, mask=real[:, None, None], other=0.0)
    row = tl.zeros_like(block).to(tl.int64)
    for _ in range(n_ranks):
        x += values_of(rows, row, block, real, each, levels, ROTATE, BITS, SIZE, TILE)
        row += stride
    tl.store(total + i, x, mask=real[:, None, None])


@moves("table rows", "out", lambda a: read_of_row(a.BITS, a.SIZE, a.TILE) + 8 * (a.TILE // a.SIZE))
@triton.jit(do_not_specialize=SIZES)
@no_type_check
def decode_blocks(
    table,
    n_blocks,
    rows,
    stride,
    each,
    out,
    levels,
    size,
    ROTATE: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    block, inner = blocks_of(BITS, SIZE, TILE)
    i, is_valid = elements_of(table, n_blocks, block, inner)
    row = (block // each).to(tl.int64) * stride
    x = values_of(rows, row, block % each, block < n_blocks, each, levels, ROTATE, BITS, SIZE, TILE)
    # `/` would be an approximate division on GPUs
    tl.store(out + i, tl.math.div_rn(x, tl.zeros_like(x) + size), mask=is_valid)


@contextmanager
def in_one_piece(out: Sequence[Dense]) -> Iterator[Dense]:
    """Give one tensor for the elements of all, which get them at the end."""
    if len(out) == 1:
        yield out[0]
        return
    sizes = list(map(Tensor.numel, out))
    whole = torch.empty(sum(sizes), dtype=torch.float32, device=out[0].device)
    yield whole
    torch._foreach_copy_(list(out), list(whole.split(sizes)))


class TritonBlocks(Blocks):
    """The kernels above. tile: elements per program, a power of two, at least the largest of SIZES."""

    def __init__(self, tile: int = 2048, selection: SelectionKernels | None = None):
        super().__init__(selection or TritonSelection())
        self.tile = tile
        self._launch = Launcher(INTERPRETED)
        self._tables = WeakTensorKeyDictionary()

    def encode_into_(self, v: Dense, bounds: Bounds, code: BlockCode, rows: Rows, kept: Dense | None) -> None:
        each = rows.shape[1] // code.row_bytes(1)
        table, residual = self._table(bounds, code, len(rows) * each), v[:0] if kept is None else kept
        made = (rows, rows.stride(0), each, residual, float(code.levels), kept is not None)
        self._each(encode_blocks, v, code, table.shape[1], table, table.shape[1], v, *made)

    def add_sum_(self, rows: Sequence[Row], code: BlockCode, total: Padded) -> None:
        whole, each = as_rows(rows, 2), total.numel() // code.size
        given = (whole.stride(0), each, total, float(code.levels))
        for first, end in groups_of_ranks(len(rows), read_of_row(code.bits, code.size, self.tile), 4 * self.tile):
            self._each(add_blocks, total, code, each, whole[first:end], end - first, *given)

    def decode(
        self, rows: Sequence[Row], bounds: Bounds, code: BlockCode, size: int, out: Sequence[Dense]
    ) -> None:
        whole, each = as_rows(rows, 2), rows[0].numel() // code.row_bytes(1)
        table = self._table(bounds, code, len(rows) * each)
        with in_one_piece(out) as values:
            given = (whole, whole.stride(0), each, values, float(code.levels), float(size))
            self._each(decode_blocks, values, code, table.shape[1], table, table.shape[1], *given)

    def _each(self, kernel: object, near: Tensor, code: BlockCode, blocks: int, *arguments: object) -> None:
        kind = (code.rotate, code.bits, code.size, self.tile)
        self._launch(kernel, near, -(-blocks * code.size // self.tile), *arguments, *kind)

    def _table(self, bounds: Bounds, code: BlockCode, blocks: int) -> Int32[Tensor, "2 blocks"]:
        """Return the first element of each block, and the number of its elements, which may be 0 at the end."""
        kept: dict[tuple[int, int, int], Tensor] = self._tables.setdefault(bounds, {})
        key = (code.size, blocks, current_stream(bounds.device))
        if key not in kept:
            first = layout_of(bounds, code.bits, code.code_bytes).starts // code.code_bytes
            block = torch.arange(blocks, dtype=torch.int64, device=bounds.device)
            segment = torch.searchsorted(first, block, right=True) - 1
            start = bounds[segment] + (block - first[segment]) * code.size
            length = (bounds[segment + 1] - start).clamp_(0, code.size)
            kept[key] = torch.stack([start, length]).int()
        return kept[key]
