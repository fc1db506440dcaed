"""Codes of 8 or 4 bits with a scale for each block of a few hundred elements. Plain torch defines every bit.

A segment is divided into blocks from its first element on, and its last block is filled with zeros: the blocks of
all segments, one after another, are the padded vector. The blocks do not depend on the number of ranks.

    scale s     the largest magnitude of the block, rounded up to bfloat16, which has the range of fp32
    level       min(floor(|x| (L / s) + 1/2), L),  L = 127 or 7
    value       sign(x) (s / L) level

Every fp32 operation is rounded. A block is all zeros if s or L / s is zero or not finite. With `rotate`, x are the
elements after a Walsh-Hadamard transform of each 64 of the block, which spreads a large one over all 64, and the
values are transformed back.

The blocks are shared out in rows, as many blocks to each, the last ones perhaps with blocks of zeros. A row is 2
bytes of scale for each block, then its codes: the sign in the highest bit of each, the first in the lowest bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from dgc.kernels.codes import empty_residual, layout_of, level_factors, places
from dgc.kernels.selection import Bounds, Dense, PassInputs, SelectionKernels

GROUP = 64  # elements that are transformed together
SIZES = (64, 128, 256, 512)

Row = UInt8[Tensor, "nbytes"]
Rows = UInt8[Tensor, "rows nbytes"]
Padded = Float32[Tensor, "padded"]


@dataclass(frozen=True)
class BlockCode:
    """bits: 8 or 4. size: elements of a block, one of SIZES. rotate: with the transform."""

    bits: int
    size: int
    rotate: bool = False

    @property
    def levels(self) -> int:
        return int(2 ** (self.bits - 1) - 1)

    def seeded(self, seed: int) -> "BlockCode":
        """Return the code whose random numbers have this seed: this one, if it has none."""
        return self

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a block."""
        return self.size * self.bits // 8

    def blocks(self, bounds: Bounds) -> int:
        """Number of blocks of all segments. The host waits for the device once per tensor of bounds."""
        return layout_of(bounds, self.bits, self.code_bytes).nbytes // self.code_bytes

    def row_bytes(self, blocks: int) -> int:
        """Bytes of a row of so many blocks."""
        return blocks * (2 + self.code_bytes)

    def places(self, bounds: Bounds, n: int) -> Tensor:
        """Return where each element is in the padded vector: int64 [n]."""
        return places(bounds, self.bits, self.code_bytes, n)


class Blocks:
    """Encoder and decoders, in plain torch on any device. selection: the same backend's pass over gradients."""

    def __init__(self, selection: SelectionKernels | None = None):
        self.selection = selection or SelectionKernels()

    def encode_(self, v: Dense, bounds: Bounds, code: BlockCode, rows: Rows, keep: bool = True) -> Dense:
        """Encode v into rows of `BlockCode.row_bytes` each, which may be parts of others.

        What does not belong to a block of v remains: zeros, as a rule. Returns v minus the values, one fp32
        subtraction per element, or nothing unless `keep`.
        """
        kept = empty_residual(v, keep)
        self.encode_into_(v, bounds, code, rows, kept if keep else None)
        return kept

    def encode_into_(self, v: Dense, bounds: Bounds, code: BlockCode, rows: Rows, kept: Dense | None) -> None:
        """`encode_`, which overwrites `kept`, unless it is None, with v minus the values."""
        count, where = len(rows), code.places(bounds, v.numel())
        each = rows.shape[1] // code.row_bytes(1)
        x = v.new_zeros(count * each * code.size)
        x[where] = v
        x = x.view(-1, code.size)
        if code.rotate:
            x = rotated(x)
        tops = x.abs().amax(1).view(torch.int32) + 0xFFFF >> 16
        inverses, steps = level_factors((tops << 16).view(torch.float32), code.levels, code.bits)
        levels = (x.abs() * inverses[:, None] + 0.5).clamp(max=code.levels).floor()
        negative = (x < 0) & (levels > 0)
        fields = (levels.byte() + (negative.byte() << code.bits - 1)).view(count, each * code.size)
        if code.bits == 4:
            fields = fields[:, ::2] + (fields[:, 1::2] << 4)
        rows[:, : 2 * each] = tops.to(torch.int16).view(torch.uint8).view(count, 2 * each)
        rows[:, 2 * each :] = fields
        if kept is None:
            return
        values = torch.where(negative, -steps[:, None] * levels, steps[:, None] * levels)
        if code.rotate:
            values = rotated(values)
        torch.sub(v, values.view(-1)[where], out=kept)

    def add_encode_(
        self, g: Sequence[Tensor], v: Dense, bounds: Bounds, code: BlockCode, rows: Rows, kept: Dense | None
    ) -> Int64[Tensor, ""]:
        """Add a gradient to v, and `encode_into_`. Returns the index of its first unusable element, or n.

        g: one piece, or one for each segment. NaN and TOO_LARGE count as zero.
        """
        first_nonfinite = self.selection.accumulate_(PassInputs(tuple(g), None, v))
        self.encode_into_(v, bounds, code, rows, kept)
        return first_nonfinite

    def encode_gradient_(
        self, g: Sequence[Tensor], room: Dense, bounds: Bounds, code: BlockCode, rows: Rows
    ) -> Int64[Tensor, ""]:
        """As `add_encode_` to zeros, with nothing kept. room: Memory for n elements, which it may overwrite."""
        first_nonfinite = self.selection.assign_(tuple(g), room)
        self.encode_into_(room, bounds, code, rows, None)
        return first_nonfinite

    def add_sum_(self, rows: Sequence[Row], code: BlockCode, total: Padded) -> None:
        """Add to `total` the values of all rows, which are of the same blocks, in their order."""
        for row in rows:
            total += self.values(row, code)

    def second_phase_(
        self,
        rows: Sequence[Row],
        code: BlockCode,
        errors: Padded | None,
        real: Padded | None,
        chunk: Bounds,
        second_code: BlockCode,
        row: Rows,
        kept: Padded | None,
    ) -> None:
        """Encode the second phase: z = errors + the values of all rows, in their order, times `real`, as one row.

        errors: The residual of the second phase. second_code: The code of the second phase. It differs from
        `code`, the code of the first phase, in its bits alone. chunk: The bounds of z, one segment. kept: As for
        `encode_into_`, of z. None: nothing is added, nothing multiplied, nothing kept.
        """
        blocks = rows[0].numel() // code.row_bytes(1)
        zeros = torch.zeros(blocks * code.size, dtype=torch.float32, device=row.device)
        total = zeros if errors is None else errors.clone()
        self.add_sum_(rows, code, total)
        if real is not None:
            total *= real
        self.encode_into_(total, chunk, second_code, row, kept)

    def decode(
        self, rows: Sequence[Row], bounds: Bounds, code: BlockCode, size: int, out: Sequence[Dense]
    ) -> None:
        """Overwrite `out` with the values of the rows, which are of consecutive blocks, divided by `size`.

        out: one piece, or one for each segment. Values are finite if there is no transform.
        """
        n = sum(map(Tensor.numel, out))
        padded = torch.cat([self.values(row, code) for row in rows])[code.places(bounds, n)]
        # by a tensor: for a number, a GPU multiplies by its inverse
        padded.div_(torch.full((), size, dtype=torch.float32, device=padded.device))
        torch._foreach_copy_(list(out), list(padded.split(list(map(Tensor.numel, out)))))

    def values(self, row: Row, code: BlockCode) -> Padded:
        """Return the values of the blocks of a row."""
        blocks = row.numel() // code.row_bytes(1)
        scales = row[: 2 * blocks].clone().view(torch.int16).int() << 16
        _, steps = level_factors(scales.view(torch.float32), code.levels, code.bits)
        fields = row[2 * blocks :].view(blocks, code.code_bytes)
        if code.bits == 4:
            fields = torch.stack([fields & 15, fields >> 4], 2).view(blocks, code.size)
        magnitudes = steps[:, None] * (fields & code.levels).float()
        values = torch.where(fields > code.levels, -magnitudes, magnitudes)
        return (rotated(values) if code.rotate else values).view(-1)


def rotated(x: Float32[Tensor, "*n"]) -> Float32[Tensor, "*n"]:
    """Return the Walsh-Hadamard transform of each GROUP elements, which is its own inverse but for rounding."""
    h, groups = 1, x.reshape(-1, GROUP)
    while h < GROUP:
        low, high = groups.view(-1, GROUP // (2 * h), 2, h).unbind(2)
        groups = torch.stack([low + high, low - high], 2)
        h *= 2
    return (groups * GROUP**-0.5).view(x.shape)
