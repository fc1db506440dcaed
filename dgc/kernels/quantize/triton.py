"""Quantizers on GPUs, with the same bits as `TorchQuantizers`.

One launch per operation, natural_encode two. A mean takes one for each rank, and one to scale it.
"""

from collections.abc import Sequence

import torch
from jaxtyping import UInt8
from torch import Tensor

from dgc.kernels.quantize.protocol import (
    WORD,
    Bounds,
    Codes,
    Dense,
    Each,
    empty_codes,
    keys_of,
    layout_of,
    level_factors,
    natural_top,
    natural_top_in,
    thresholds_or,
)
from dgc.kernels.quantize.reference import TorchQuantizers
from dgc.kernels.quantize.triton_codes import (
    natural_add,
    natural_encode,
    natural_largest,
    pack,
    scale,
    sign_add,
    sign_encode,
    sums,
    tern_add,
    tern_encode,
    uniform_add,
    uniform_encode,
    unpack,
)
from dgc.kernels.selection.triton import INTERPRETED
from dgc.kernels.triton_tables import BLOCK, Launcher, Tilings, blocks, on_device


class TritonQuantizers(TorchQuantizers):
    """Implements `dgc.kernels.quantize.protocol.Quantizers`, with the means of `TorchQuantizers`.

    Args:
        tile: Elements per program, a power of two, at least 32.
    """

    name = "triton"

    def __init__(self, tile: int = 2048):
        self.tile = tile
        self._launch = Launcher(INTERPRETED)
        self._tilings = Tilings(tile)

    @property
    def launches(self) -> int:
        return self._launch.launches

    def sign_encode(self, v: Dense, bounds: Bounds, cuts: Each, lows: Each, highs: Each) -> tuple[Codes, Dense]:
        codes, residual = empty_codes(bounds, 1, WORD), torch.empty_like(v)
        self._each(sign_encode, v, bounds, 1, WORD, v, cuts, lows, highs, codes, residual)
        return codes, residual

    def sign_add_(self, codes: Codes, bounds: Bounds, lows: Each, highs: Each, total: Dense) -> None:
        self._each(sign_add, total, bounds, 1, WORD, codes, lows, highs, total)

    def tern_encode(self, v: Dense, bounds: Bounds, thresholds: Each) -> tuple[Codes, Dense]:
        codes, residual = empty_codes(bounds, 2, WORD), torch.empty_like(v)
        self._each(tern_encode, v, bounds, 2, WORD, v, thresholds_or(torch.inf, thresholds), codes, residual)
        return codes, residual

    def tern_add_(self, codes: Codes, bounds: Bounds, thresholds: Each, total: Dense) -> None:
        self._each(tern_add, total, bounds, 2, WORD, codes, thresholds_or(0.0, thresholds), total)

    def uniform_encode(
        self, v: Dense, bounds: Bounds, scales: Each, levels: int, bits: int, seed: int | None
    ) -> tuple[Codes, Dense]:
        codes, residual = empty_codes(bounds, bits, 1), torch.empty_like(v)
        values = (*level_factors(scales, levels, bits), float(levels), *_keys(seed))
        made = (codes, residual, seed is not None, bits)
        self._each(uniform_encode, v, bounds, bits, 1, v, *values, *made)
        return codes, residual

    def uniform_add_(
        self, codes: Codes, bounds: Bounds, scales: Each, levels: int, bits: int, total: Dense
    ) -> None:
        _, steps = level_factors(scales, levels, bits)
        self._each(uniform_add, total, bounds, bits, 1, codes, steps, total, bits)

    def natural_encode(self, v: Dense, seed: int | None) -> tuple[Codes, Dense]:
        n, device = v.numel(), v.device
        codes = torch.empty(4 + n, dtype=torch.uint8, device=device)
        residual, largest = torch.empty_like(v), torch.zeros((), dtype=torch.int32, device=device)
        self._launch(natural_largest, v, blocks(n), v, n, largest, BLOCK)
        top = natural_top(largest)
        codes[:4] = top.view(1).view(torch.uint8)
        made = (codes, residual, seed is not None, BLOCK)
        self._launch(natural_encode, v, blocks(n), v, n, top, *_keys(seed), *made)
        return codes, residual

    def natural_add_(self, codes: Codes, total: Dense) -> None:
        n = total.numel()
        self._launch(natural_add, total, blocks(n), codes, n, natural_top_in(codes), total, BLOCK)

    def pack(self, levels: UInt8[Tensor, "n"], bits: int) -> Codes:
        n, nbytes = levels.numel(), -(-levels.numel() * bits // 8)
        codes = torch.empty(nbytes, dtype=torch.uint8, device=levels.device)
        self._launch(pack, levels, blocks(nbytes), levels, n, codes, nbytes, bits, BLOCK)
        return codes

    def unpack(self, codes: Codes, bits: int, n: int) -> UInt8[Tensor, "n"]:
        levels = torch.empty(n, dtype=torch.uint8, device=codes.device)
        self._launch(unpack, codes, blocks(n), codes, codes.numel(), levels, n, bits, BLOCK)
        return levels

    def sums_mean_(
        self,
        packed: Sequence[Codes],
        fields: int,
        width: int,
        bits: int,
        bounds: Bounds,
        factors: Each,
        mean: Dense,
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


def _keys(seed: int | None) -> tuple[int, int]:
    """Return the keys as int32. Triton would give larger numbers another argument type."""
    first, second = (0, 0) if seed is None else keys_of(seed)
    return first - (first >> 31 << 32), second - (second >> 31 << 32)
