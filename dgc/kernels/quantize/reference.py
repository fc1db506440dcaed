"""Quantizers in plain torch, on any device. The other tiers must match them bit for bit."""

import torch
from jaxtyping import UInt8
from torch import Tensor

from dgc.kernels.quantize.one_by_one import OneByOne, places, range_of_each
from dgc.kernels.quantize.protocol import (
    WORD,
    Bounds,
    Codes,
    Dense,
    Each,
    layout_of,
    level_factors,
    natural_top,
    natural_top_in,
    random_bits,
    thresholds_or,
)

MAGNITUDE = 0x7FFFFFFF
TOP_EXPONENT = 254  # the largest biased exponent of a finite fp32


class TorchQuantizers(OneByOne):
    """Implements `dgc.kernels.quantize.protocol.Quantizers`."""

    name = "reference"

    def sign_encode(self, v: Dense, bounds: Bounds, cuts: Each, lows: Each, highs: Each) -> tuple[Codes, Dense]:
        each = range_of_each(bounds, v.numel())
        fields = v > cuts[each]
        codes = _packed(fields, bounds, 1, WORD, highest_first=True)
        return codes, v - torch.where(fields, highs[each], lows[each])

    def sign_add_(self, codes: Codes, bounds: Bounds, lows: Each, highs: Each, total: Dense) -> None:
        each = range_of_each(bounds, total.numel())
        fields = _unpacked(codes, bounds, 1, WORD, highest_first=True, n=total.numel())
        total += torch.where(fields > 0, highs[each], lows[each])

    def tern_encode(self, v: Dense, bounds: Bounds, thresholds: Each) -> tuple[Codes, Dense]:
        t = thresholds_or(torch.inf, thresholds)[range_of_each(bounds, v.numel())]
        up, down = v >= t, v <= -t
        codes = _packed(3 * up.byte() + 2 * down.byte(), bounds, 2, WORD, highest_first=True)
        return codes, v - torch.where(up, t, torch.where(down, -t, 0.0))

    def tern_add_(self, codes: Codes, bounds: Bounds, thresholds: Each, total: Dense) -> None:
        t = thresholds_or(0.0, thresholds)[range_of_each(bounds, total.numel())]
        fields = _unpacked(codes, bounds, 2, WORD, highest_first=True, n=total.numel())
        total += torch.where(fields == 3, t, torch.where(fields == 2, -t, 0.0))

    def uniform_encode(
        self, v: Dense, bounds: Bounds, scales: Each, levels: int, bits: int, seed: int | None
    ) -> tuple[Codes, Dense]:
        n = v.numel()
        each = range_of_each(bounds, n)
        inverses, steps = level_factors(scales, levels, bits)
        r = 0.5 if seed is None else (random_bits(n, seed, v.device) >> 8).float() * 2.0**-24
        level = (v.abs() * inverses[each] + r).clamp(max=levels).floor()
        negative = (v < 0) & (level > 0)
        codes = _packed(level.byte() + (negative.byte() << bits - 1), bounds, bits, 1)
        return codes, v - _signed(steps[each] * level, negative)

    def uniform_add_(
        self, codes: Codes, bounds: Bounds, scales: Each, levels: int, bits: int, total: Dense
    ) -> None:
        _, steps = level_factors(scales, levels, bits)
        fields = _unpacked(codes, bounds, bits, 1, n=total.numel())
        level, negative = (fields & 2 ** (bits - 1) - 1).float(), fields >> bits - 1 > 0
        total += _signed(steps[range_of_each(bounds, total.numel())] * level, negative)

    def natural_encode(self, v: Dense, seed: int | None) -> tuple[Codes, Dense]:
        n = v.numel()
        magnitude = v.view(torch.int32) & MAGNITUDE
        top = natural_top(magnitude.amax() if n else magnitude.sum(dtype=torch.int32))
        # a carry out of the mantissa increments the exponent
        r = 1 << 22 if seed is None else random_bits(n, seed, v.device) >> 9
        exponent = (magnitude + r >> 23).clamp(max=TOP_EXPONENT).int()
        c = (exponent - top).clamp(min=0)
        negative = (v < 0) & (c > 0)
        codes = torch.empty(4 + n, dtype=torch.uint8, device=v.device)
        codes[:4] = top.view(1).view(torch.uint8)
        codes[4:] = c.byte() + (negative.byte() << 7)
        return codes, v - _signed(torch.where(c > 0, exponent << 23, 0).view(torch.float32), negative)

    def natural_add_(self, codes: Codes, total: Dense) -> None:
        c = codes[4:].int() & 127
        powers = torch.where(c > 0, c + natural_top_in(codes) << 23, 0)
        total += _signed(powers.view(torch.float32), codes[4:] >= 128)

    def pack(self, levels: UInt8[Tensor, "n"], bits: int) -> Codes:
        each = levels[:, None] >> torch.arange(bits, dtype=torch.int64, device=levels.device) & 1
        stream = each.new_zeros(-(-levels.numel() * bits // 8), 8, dtype=torch.uint8)
        stream.view(-1)[: each.numel()] = each.view(-1)
        return _bytes_of(stream, range(8))

    def unpack(self, codes: Codes, bits: int, n: int) -> UInt8[Tensor, "n"]:
        stream = codes[:, None] >> torch.arange(8, dtype=torch.int64, device=codes.device) & 1
        return _bytes_of(stream.view(-1)[: n * bits].view(n, bits), range(bits))


def _signed(magnitude: Tensor, negative: Tensor) -> Tensor:
    return torch.where(negative, -magnitude, magnitude)


def _shifts(width: int, highest_first: bool) -> range:
    return range(8 - width, -1, -width) if highest_first else range(0, 8, width)


def _packed(fields: Tensor, bounds: Bounds, width: int, unit: int, highest_first: bool = False) -> Codes:
    stream = fields.new_zeros(layout_of(bounds, width, unit).nbytes, 8 // width, dtype=torch.uint8)
    stream.view(-1)[places(bounds, width, unit, fields.numel())] = fields.byte()
    return _bytes_of(stream, _shifts(width, highest_first))


def _unpacked(
    codes: Codes, bounds: Bounds, width: int, unit: int, *, n: int, highest_first: bool = False
) -> UInt8[Tensor, "n"]:
    shifts = torch.tensor(_shifts(width, highest_first), dtype=torch.int64, device=codes.device)
    fields = codes[:, None] >> shifts & 2**width - 1
    return fields.view(-1)[places(bounds, width, unit, n)].byte()


def _bytes_of(fields: UInt8[Tensor, "n each"], shifts: range) -> UInt8[Tensor, "n"]:
    weights = torch.tensor([1 << shift for shift in shifts], dtype=torch.int32, device=fields.device)
    return (fields * weights).sum(1, dtype=torch.uint8)
