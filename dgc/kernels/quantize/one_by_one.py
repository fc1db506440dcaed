"""Means of all ranks' codes by the `add_` operations, one rank after the other. They define every bit."""

from collections.abc import Sequence

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from dgc.kernels.quantize.protocol import WORD, Bounds, Codes, Dense, Each, Quantizers, layout_of


class OneByOne(Quantizers):
    """Base class of tiers of `Quantizers` without kernels for the `mean_` operations."""

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

    def natural_mean_(self, codes: Sequence[Codes], size: int, mean: Dense) -> None:
        mean.zero_()
        for code in codes:
            self.natural_add_(code, mean)
        _divide_(mean, size)

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
