"""The GPU backend of `Halves`: Triton kernels with the same bits as plain torch, one launch per operation."""

from collections.abc import Sequence
from typing import no_type_check

import triton
import triton.language as tl

from dgc.kernels.codes.blocks import BlockCode, Padded, Row, Rows
from dgc.kernels.codes.halves import HalfCode, Halves
from dgc.kernels.codes.triton import keys_as_int32
from dgc.kernels.codes.triton_blocks import in_one_piece
from dgc.kernels.launch import BLOCK, Launcher, as_rows, blocks, groups_of_ranks, moves, of_each
from dgc.kernels.selection import Bounds, Dense, SelectionKernels
from dgc.kernels.selection.triton import INTERPRETED, TritonSelection, random_bits

SIZES = ["n", "first", "end", "stride", "each", "key", "inner_key", "size"]


@triton.jit
@no_type_check
def halves_at(rows, i, stride, each):
    """Return pointers to the numbers of elements i."""
    offset = (i // each).to(tl.int64) * stride + i % each * 2
    return (rows + offset).to(tl.pointer_type(tl.int16))


@triton.jit
@no_type_check
def value_of(half):
    return (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@moves("v", "rows residual", of_each(4, "BLOCK"))
@triton.jit(do_not_specialize=SIZES)
@no_type_check
def encode_halves(
    v,
    n,
    rows,
    stride,
    each,
    residual,
    key,
    inner_key,
    RANDOM: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_valid = i < n
    x = tl.load(v + i, mask=is_valid, other=0.0)
    bits = x.to(tl.int32, bitcast=True)
    if RANDOM:
        bits += (random_bits(i, key, inner_key) >> 16).to(tl.int32)
    else:
        bits += 0x7FFF + ((bits >> 16) & 1)
    half = (bits >> 16).to(tl.int16)
    tl.store(halves_at(rows, i, stride, each), half, mask=is_valid)
    if KEEP:
        tl.store(residual + i, x - value_of(half), mask=is_valid)


@moves("rows total", "total", lambda a: (2 * (a.end - a.first) + 4) * a.BLOCK)
@triton.jit(do_not_specialize=SIZES)
@no_type_check
def add_halves(rows, first, end, stride, total, n, BLOCK: tl.constexpr):
    """Add the values of ranks in their order, from `first` on and before `end`."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_valid = i < n
    x = tl.load(total + i, mask=is_valid, other=0.0)
    for r in range(first, end):
        row = rows + tl.cast(r, tl.int64) * stride
        x += value_of(tl.load((row + i.to(tl.int64) * 2).to(tl.pointer_type(tl.int16)), mask=is_valid, other=0))
    tl.store(total + i, x, mask=is_valid)


@moves("rows", "out", of_each(2, "BLOCK"))
@triton.jit(do_not_specialize=SIZES)
@no_type_check
def decode_halves(rows, stride, each, out, n, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_valid = i < n
    x = value_of(tl.load(halves_at(rows, i, stride, each), mask=is_valid, other=0))
    # `/` would be an approximate division on GPUs
    tl.store(out + i, tl.math.div_rn(x, tl.zeros_like(x) + size), mask=is_valid)


class TritonHalves(Halves):
    """The kernels above."""

    def __init__(self, selection: SelectionKernels | None = None):
        super().__init__(selection or TritonSelection())
        self._launch = Launcher(INTERPRETED)

    def encode_into_(self, v: Dense, bounds: Bounds, code: BlockCode, rows: Rows, kept: Dense | None) -> None:
        assert isinstance(code, HalfCode), code
        n, residual = v.numel(), v[:0] if kept is None else kept
        where = (v, n, rows, rows.stride(0), rows.shape[1] // 2, residual)
        how = (*keys_as_int32(code.seed if code.random else None), code.random, kept is not None, BLOCK)
        self._launch(encode_halves, v, blocks(n), *where, *how)

    def add_sum_(self, rows: Sequence[Row], code: BlockCode, total: Padded) -> None:
        whole, n = as_rows(rows, 2), total.numel()
        for first, end in groups_of_ranks(len(rows), 2 * BLOCK, 4 * BLOCK):
            self._launch(add_halves, total, blocks(n), whole, first, end, whole.stride(0), total, n, BLOCK)

    def decode(
        self, rows: Sequence[Row], bounds: Bounds, code: BlockCode, size: int, out: Sequence[Dense]
    ) -> None:
        whole, each = as_rows(rows, 2), rows[0].numel() // 2
        with in_one_piece(out) as values:
            n = values.numel()
            given = (whole, whole.stride(0), each, values, n, float(size), BLOCK)
            self._launch(decode_halves, values, blocks(n), *given)
