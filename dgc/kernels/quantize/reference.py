"""Quantizers in plain torch, on any device. The other tiers must match them bit for bit."""

from collections.abc import Sequence

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

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


class TorchQuantizers:
    """Implements `dgc.kernels.quantize.protocol.Quantizers`. A mean is the sum of one `add_` after the other."""

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

    def sign_mean_(
        self,
        codes: Sequence[Codes],
        bounds: Bounds,
        lows: Sequence[Each],
        highs: Sequence[Each],
        factors: Each | None,
        size: int,
        mean: Dense,
    ) -> None:
        mean.zero_()
        for code, low, high in zip(codes, lows, highs, strict=True):
            self.sign_add_(code, bounds, low, high, mean)
        self._scale_(mean, bounds, factors, size)

    def tern_encode(self, v: Dense, bounds: Bounds, thresholds: Each) -> tuple[Codes, Dense]:
        t = thresholds_or(torch.inf, thresholds)[range_of_each(bounds, v.numel())]
        up, down = v >= t, v <= -t
        codes = _packed(3 * up.byte() + 2 * down.byte(), bounds, 2, WORD, highest_first=True)
        return codes, v - torch.where(up, t, torch.where(down, -t, 0.0))

    def tern_add_(self, codes: Codes, bounds: Bounds, thresholds: Each, total: Dense) -> None:
        t = thresholds_or(0.0, thresholds)[range_of_each(bounds, total.numel())]
        fields = _unpacked(codes, bounds, 2, WORD, highest_first=True, n=total.numel())
        total += torch.where(fields == 3, t, torch.where(fields == 2, -t, 0.0))

    def tern_mean_(
        self,
        codes: Sequence[Codes],
        bounds: Bounds,
        thresholds: Sequence[Each],
        factors: Each | None,
        size: int,
        mean: Dense,
    ) -> None:
        mean.zero_()
        for code, own in zip(codes, thresholds, strict=True):
            self.tern_add_(code, bounds, own, mean)
        self._scale_(mean, bounds, factors, size)

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

    def uniform_mean_(
        self,
        codes: Sequence[Codes],
        bounds: Bounds,
        scales: Sequence[Each],
        levels: int,
        bits: int,
        size: int,
        mean: Dense,
    ) -> None:
        mean.zero_()
        for code, own in zip(codes, scales, strict=True):
            self.uniform_add_(code, bounds, own, levels, bits, mean)
        _divide_(mean, size)

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

    def natural_mean_(self, codes: Sequence[Codes], size: int, mean: Dense) -> None:
        mean.zero_()
        for code in codes:
            self.natural_add_(code, mean)
        _divide_(mean, size)

    def pack(self, levels: UInt8[Tensor, "n"], bits: int) -> Codes:
        each = levels[:, None] >> torch.arange(bits, dtype=torch.int64, device=levels.device) & 1
        stream = each.new_zeros(-(-levels.numel() * bits // 8), 8, dtype=torch.uint8)
        stream.view(-1)[: each.numel()] = each.view(-1)
        return _bytes_of(stream, range(8))

    def unpack(self, codes: Codes, bits: int, n: int) -> UInt8[Tensor, "n"]:
        stream = codes[:, None] >> torch.arange(8, dtype=torch.int64, device=codes.device) & 1
        return _bytes_of(stream.view(-1)[: n * bits].view(n, bits), range(bits))

    def pack_sums(self, codes: Sequence[Codes], whole: Bounds, width: int, bits: int) -> UInt8[Tensor, "packed"]:
        size, device = len(codes), codes[0].device
        one = torch.ones(1, dtype=torch.float32, device=device)
        sums = torch.empty(codes[0].numel() * 8 // width, dtype=torch.float32, device=device)
        if width == 2:
            self.tern_mean_(codes, whole, [one] * size, None, 1, sums)
        else:
            self.sign_mean_(codes, whole, [-one] * size, [one] * size, None, 1, sums)
        levels = sums + size if width == 2 else (sums + size) / 2
        return self.pack(levels.to(torch.uint8), bits)

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
        size, n = len(packed), mean.numel()
        together = torch.cat([self.unpack(own, bits, fields) for own in packed])
        levels = together[places(bounds, width, WORD, n)].float()
        torch.sub(levels if width == 2 else levels * 2, size, out=mean)
        self._scale_(mean, bounds, factors, size)

    def _scale_(self, mean: Dense, bounds: Bounds, factors: Each | None, size: int) -> None:
        """Multiply by the factors of the segments, then divide by `size`."""
        if factors is not None:
            mean *= factors[range_of_each(bounds, mean.numel())]
        _divide_(mean, size)


def range_of_each(bounds: Bounds, n: int) -> Int64[Tensor, "n"]:
    """Return the segment of each element."""
    segments = torch.arange(bounds.numel() - 1, dtype=torch.int64, device=bounds.device)
    return torch.repeat_interleave(segments, bounds.diff(), output_size=n)


def places(bounds: Bounds, width: int, unit: int, n: int) -> Int64[Tensor, "n"]:
    """Return the field number of each element. Empty fields count."""
    first = layout_of(bounds, width, unit).starts * (8 // width) - bounds[:-1]
    return torch.arange(n, dtype=torch.int64, device=bounds.device) + first[range_of_each(bounds, n)]


def _divide_(mean: Dense, size: int) -> None:
    # by a tensor: for a number, a GPU multiplies by its inverse
    mean.div_(torch.full((), size, dtype=torch.float32, device=mean.device))


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
