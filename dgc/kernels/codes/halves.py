"""Numbers of bfloat16, in the rows of `dgc.kernels.codes.blocks`. Plain torch defines every bit.

A block is one number of 2 bytes, without a scale, so that the padded vector is the vector itself.

    nearest    the upper 16 bits of the fp32 number + 0x7FFF + its bit 16: to nearest, ties to even
    random     the upper 16 bits of the fp32 number + r, with the upper 16 of 32 random bits as r

A random number is rounded away from zero with the probability that makes the number the expected value. Random
bits are a function of (seed, index of the element), as in `dgc.kernels.codes`. Numbers are finite.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dgc.kernels.codes import random_bits
from dgc.kernels.codes.blocks import BlockCode, Blocks, Padded, Row, Rows
from dgc.kernels.selection import Bounds, Dense


@dataclass(frozen=True)
class HalfCode(BlockCode):
    """random: Round stochastically. seed: Of the random numbers, 0 <= seed < 2**32."""

    bits: int = 16
    size: int = 1
    random: bool = False
    seed: int = 0

    def seeded(self, seed: int) -> "HalfCode":
        return replace(self, seed=seed)

    def row_bytes(self, blocks: int) -> int:
        return 2 * blocks

    def places(self, bounds: Bounds, n: int) -> Tensor:
        return torch.arange(n, dtype=torch.int64, device=bounds.device)


class Halves(Blocks):
    """Encoder and decoders of `HalfCode`, in plain torch on any device."""

    def encode_into_(self, v: Dense, bounds: Bounds, code: BlockCode, rows: Rows, kept: Dense | None) -> None:
        assert isinstance(code, HalfCode), code
        bits = v.view(torch.int32)
        if code.random:
            rounding = (random_bits(v.numel(), code.seed, v.device) >> 16).int()
        else:
            rounding = 0x7FFF + (bits >> 16 & 1)
        fields = bits + rounding >> 16
        halves = fields.new_zeros(len(rows) * (rows.shape[1] // 2), dtype=torch.int16)
        halves[: v.numel()] = fields.to(torch.int16)
        rows.copy_(halves.view(torch.uint8).view(rows.shape))
        if kept is not None:
            torch.sub(v, (fields << 16).view(torch.float32), out=kept)

    def values(self, row: Row, code: BlockCode) -> Padded:
        return (row.clone().view(torch.int16).int() << 16).view(torch.float32)


def code_of(bits: int, size: int | None = None, rotate: bool = False, random: bool = False) -> BlockCode:
    """Return the code of 16, 8 or 4 bits. size: Of a block, None: 256 with 8 bits, 128 with 4."""
    if bits == 16:
        return HalfCode(random=random)
    return BlockCode(bits, {8: 256, 4: 128}[bits] if size is None else size, rotate)
