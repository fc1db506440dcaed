"""Quantizers, which send every element in a few bits. Plain torch defines every bit.

v is finite, and bounds divide it into segments, which may be empty. Encoding does not change v and returns
(codes, residual). The residual is v minus the decoded values, one fp32 subtraction per element, or an empty tensor
unless `keep`. `into`, another tensor like v, takes the residual in place of new memory. The `add_` operations add
decoded values to `total`, one fp32 addition per element. Codes are little-endian.

The `mean_` operations overwrite `mean` with the mean of all ranks, in one call: the sum of what `add_` adds to
zeros, in the order of ranks, times the factor of the segment, if there are factors, divided by `size`. All of
these operations are rounded. Codes, and the values per segment that belong to them, are sequences, by rank.

Random numbers are a function of (seed, index of the element), with 0 <= seed < 2**32. Every backend gives the same
with any number of threads, and torch's generators are not used. Without a seed, values are rounded to nearest.

The size of the codes depends on the bounds, which are on the device. The host waits for them once per tensor of
bounds. That tensor must not be changed in place.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dgc.kernels.selection import Bounds, Dense, Each

assert sys.byteorder == "little", "codes are little-endian, and so must this machine be"

LOW = 0xFFFFFFFF
WORD = 4  # bytes; segments of sign and ternary codes are aligned to words, as in MXNet

Codes = UInt8[Tensor, "nbytes"]
Residual = Float32[Tensor, "kept"]
AllCodes: TypeAlias = Sequence[Codes]  # by rank
AllEach: TypeAlias = Sequence[Each]


class Quantizers:
    """Encoders, and decoders that add to a total, in plain torch on any device."""

    def largest(self, v: Dense, bounds: Bounds) -> Each:
        """Return the largest magnitude of each segment, or 0 if it is empty."""
        each = range_of_each(bounds, v.numel())
        return v.new_zeros(bounds.numel() - 1).scatter_reduce_(0, each, v.abs(), "amax")

    def sign_encode(
        self,
        v: Dense,
        bounds: Bounds,
        cuts: Each,
        scales: Each,
        keep: bool = True,
        into: Dense | None = None,
    ) -> tuple[Codes, Residual]:
        """Encode 1 bit per element: v > cut of its segment. A 1 decodes to the segment's scale, a 0 to minus it.

        The layout is the same as in MXNet's 1-bit compression: element i of a segment is in its byte i / 8, the
        first in the highest bit. A segment takes whole words of 4 bytes, padded with zeros.
        """
        each = range_of_each(bounds, v.numel())
        fields = v > cuts[each]
        codes = _packed(fields, bounds, 1, WORD, highest_first=True)
        return codes, _residual(v, torch.where(fields, scales[each], -scales[each]), keep, into)

    def sign_add_(self, codes: Codes, bounds: Bounds, scales: Each, total: Dense) -> None:
        each = range_of_each(bounds, total.numel())
        fields = _unpacked(codes, bounds, 1, WORD, highest_first=True, n=total.numel())
        total += torch.where(fields > 0, scales[each], -scales[each])

    def sign_mean_(
        self, codes: AllCodes, bounds: Bounds, scales: AllEach, factors: Each | None, size: int, mean: Dense
    ) -> None:
        mean.zero_()
        for code, own in zip(codes, scales, strict=True):
            self.sign_add_(code, bounds, own, mean)
        self._scale_(mean, bounds, factors, size)

    def tern_encode(
        self, v: Dense, bounds: Bounds, thresholds: Each, keep: bool = True, into: Dense | None = None
    ) -> tuple[Codes, Residual]:
        """Encode 2 bits per element: 11 for v >= t decodes to t, 10 for v <= -t decodes to -t, else 00, zero.

        The layout is the same as in MXNet's 2-bit compression: element i of a segment is in its byte i / 4, the
        first in the highest bits, with words as for signs. A segment with a threshold of zero or inf is all zeros.
        01 decodes to zero.
        """
        t = thresholds_or(torch.inf, thresholds)[range_of_each(bounds, v.numel())]
        up, down = v >= t, v <= -t
        codes = _packed(3 * up.byte() + 2 * down.byte(), bounds, 2, WORD, highest_first=True)
        return codes, _residual(v, torch.where(up, t, torch.where(down, -t, 0.0)), keep, into)

    def tern_add_(self, codes: Codes, bounds: Bounds, thresholds: Each, total: Dense) -> None:
        t = thresholds_or(0.0, thresholds)[range_of_each(bounds, total.numel())]
        fields = _unpacked(codes, bounds, 2, WORD, highest_first=True, n=total.numel())
        total += torch.where(fields == 3, t, torch.where(fields == 2, -t, 0.0))

    def tern_mean_(
        self, codes: AllCodes, bounds: Bounds, thresholds: AllEach, factors: Each | None, size: int, mean: Dense
    ) -> None:
        mean.zero_()
        for code, own in zip(codes, thresholds, strict=True):
            self.tern_add_(code, bounds, own, mean)
        self._scale_(mean, bounds, factors, size)

    def uniform_encode(
        self,
        v: Dense,
        bounds: Bounds,
        scales: Each,
        levels: int,
        bits: int,
        seed: int | None,
        keep: bool = True,
        into: Dense | None = None,
    ) -> tuple[Codes, Residual]:
        """Encode a level and a sign per element in 2, 4 or 8 bits, with levels < 2**(bits - 1).

            level = floor(min(|v| (levels / scale) + r, levels)), which decodes to (scale / levels) level

        r is random in [0, 1), or 0.5 without a seed. Every fp32 operation is rounded; the quotients are computed
        once per segment. The sign is the highest bit of the code, zero at level 0. Element i of a segment is in
        its byte i bits / 8, the first in the lowest bits. A segment takes whole bytes. It is all zeros if scale or
        levels / scale is zero or not finite.
        """
        n = v.numel()
        each = range_of_each(bounds, n)
        inverses, steps = level_factors(scales, levels, bits)
        r = 0.5 if seed is None else (random_bits(n, seed, v.device) >> 8).float() * 2.0**-24
        level = (v.abs() * inverses[each] + r).clamp(max=levels).floor()
        negative = (v < 0) & (level > 0)
        codes = _packed(level.byte() + (negative.byte() << bits - 1), bounds, bits, 1)
        return codes, _residual(v, _signed(steps[each] * level, negative), keep, into)

    def uniform_add_(
        self, codes: Codes, bounds: Bounds, scales: Each, levels: int, bits: int, total: Dense
    ) -> None:
        _, steps = level_factors(scales, levels, bits)
        fields = _unpacked(codes, bounds, bits, 1, n=total.numel())
        level, negative = (fields & 2 ** (bits - 1) - 1).float(), fields >> bits - 1 > 0
        total += _signed(steps[range_of_each(bounds, total.numel())] * level, negative)

    def uniform_mean_(
        self, codes: AllCodes, bounds: Bounds, scales: AllEach, levels: int, bits: int, size: int, mean: Dense
    ) -> None:
        mean.zero_()
        for code, own in zip(codes, scales, strict=True):
            self.uniform_add_(code, bounds, own, levels, bits, mean)
        _divide_(mean, size)

    def round_(self, g: tuple[Tensor, ...], halves: Tensor) -> Tensor:
        """Write a gradient into `halves` [n], of any 16-bit floating point type, rounded to nearest, ties to even.

        g: pieces, as in `PassInputs`. Returns a number that is not finite if an element is not.
        """
        whole = torch.cat(g) if len(g) > 1 else g[0]
        halves.copy_(whole)
        return whole.sum(dtype=torch.promote_types(whole.dtype, torch.float32))

    def halves_mean_(self, codes: AllCodes, dtype: torch.dtype, size: int, mean: Dense) -> None:
        """Overwrite `mean` with the mean of numbers of this 16-bit type."""
        mean.zero_()
        for code in codes:
            mean += code.view(dtype)
        _divide_(mean, size)

    def pack(self, levels: UInt8[Tensor, "n"], bits: int) -> Codes:
        """Pack the lowest `bits` (1 .. 8) bits of each element into one stream, least significant first."""
        each = levels[:, None] >> torch.arange(bits, dtype=torch.int64, device=levels.device) & 1
        stream = each.new_zeros(-(-levels.numel() * bits // 8), 8, dtype=torch.uint8)
        stream.view(-1)[: each.numel()] = each.view(-1)
        return _bytes_of(stream, range(8))

    def unpack(self, codes: Codes, bits: int, n: int) -> UInt8[Tensor, "n"]:
        stream = codes[:, None] >> torch.arange(8, dtype=torch.int64, device=codes.device) & 1
        return _bytes_of(stream.view(-1)[: n * bits].view(n, bits), range(bits))

    def units_mean_(
        self, codes: AllCodes, bounds: Bounds, width: int, factors: Each | None, size: int, mean: Dense
    ) -> None:
        """Overwrite `mean` with the mean of ternary codes with thresholds of 1, or with `width` 1 of signs."""
        ones = torch.ones(bounds.numel() - 1, dtype=torch.float32, device=mean.device)
        each = [ones] * len(codes)
        if width == 2:
            self.tern_mean_(codes, bounds, each, factors, size, mean)
        else:
            self.sign_mean_(codes, bounds, each, factors, size, mean)

    def pack_sums(self, codes: AllCodes, whole: Bounds, width: int, bits: int) -> UInt8[Tensor, "packed"]:
        """Sum the fields of all ranks' codes as integers, and pack the sums into `bits` bits, at most 8.

        With `width` 2 the fields are ternary codes with thresholds of 1, and a sum S over N ranks is sent
        as N + S. With `width` 1 they are signs, 1 and -1, and it is sent as (N + S) / 2. whole: One segment of all
        fields, whole words of them.
        """
        size = len(codes)
        sums = torch.empty(codes[0].numel() * 8 // width, dtype=torch.float32, device=codes[0].device)
        self.units_mean_(codes, whole, width, None, 1, sums)
        levels = sums + size if width == 2 else (sums + size) / 2
        return self.pack(levels.to(torch.uint8), bits)

    def sums_mean_(
        self, packed: AllCodes, fields: int, width: int, bits: int, bounds: Bounds, factors: Each, mean: Dense
    ) -> None:
        """Overwrite `mean` with S times the factor of the segment, divided by N, both rounded.

        packed: Of N equal shares of all fields, what `pack_sums` returned. fields: Number of fields of a share.
        """
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


@dataclass(frozen=True, eq=False)
class CodeLayout:
    """The first byte of each segment's codes, and their total size in bytes."""

    starts: Int64[Tensor, "S"]
    nbytes: int


_layouts = WeakTensorKeyDictionary()


def layout_of(bounds: Bounds, width: int, unit: int) -> CodeLayout:
    """Return the layout of codes of `width` bits, where each segment takes a multiple of `unit` bytes."""
    kept: dict[tuple[int, int], CodeLayout] = _layouts.setdefault(bounds, {})
    if (width, unit) not in kept:
        ends = ((bounds.diff() * width + 8 * unit - 1) // (8 * unit) * unit).cumsum(0)
        starts = torch.cat([ends.new_zeros(1), ends])[:-1]
        kept[width, unit] = CodeLayout(starts, int(ends[-1]) if len(ends) else 0)
    return kept[width, unit]


def empty_codes(bounds: Bounds, width: int, unit: int) -> Codes:
    return torch.empty(layout_of(bounds, width, unit).nbytes, dtype=torch.uint8, device=bounds.device)


def empty_residual(v: Dense, keep: bool, into: Dense | None = None) -> Residual:
    """Return memory for the residual: `into`, if there is any, or new. Nothing unless `keep`."""
    if not keep:
        return v[:0]
    return torch.empty_like(v) if into is None else into


def _residual(v: Dense, values: Dense, keep: bool, into: Dense | None) -> Residual:
    return torch.sub(v, values, out=empty_residual(v, keep, into)) if keep else v[:0]


def thresholds_or(instead: float, thresholds: Float32[Tensor, "*S"]) -> Float32[Tensor, "*S"]:
    """Return the thresholds, with those that send nothing replaced by `instead`."""
    return torch.where((thresholds > 0) & torch.isfinite(thresholds), thresholds, instead)


def level_factors(
    scales: Float32[Tensor, "*S"], levels: int, bits: int
) -> tuple[Float32[Tensor, "*S"], Float32[Tensor, "*S"]]:
    """Return (levels / scale, scale / levels), zero for segments that send nothing."""
    assert bits in (2, 4, 8) and 1 <= levels < 2 ** (bits - 1), (levels, bits)
    # a tensor: some devices divide by a number by multiplying with its inverse
    most = torch.full_like(scales, levels)
    inverses, steps = most / scales, scales / most
    # if the step of a scale near the largest float is rounded up, step * levels is inf: take the next smaller one
    steps = torch.where(torch.isfinite(steps * most), steps, torch.nextafter(steps, torch.zeros_like(steps)))
    sent = (scales > 0) & torch.isfinite(scales) & torch.isfinite(inverses)
    return torch.where(sent, inverses, 0.0), torch.where(sent, steps, 0.0)


def keys_of(seed: int) -> tuple[int, int]:
    """Return two keys. With one key, two seeds could give shifted copies of the same sequence."""
    assert 0 <= seed <= LOW, seed
    first = _mixed(seed ^ 0x9E3779B9)
    return first, _mixed(first ^ seed ^ 0x85EBCA6B)


def seed_word(seed: int) -> int:
    """Return both keys as one number of 64 bits with a sign, the second one above the first."""
    first, second = keys_of(seed)
    word = second << 32 | first
    return word - (word >> 63 << 64)


def _mixed(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D & LOW
    x = (x ^ x >> 15) * 0x846CA68B & LOW
    return x ^ x >> 16


def random_bits(n: int, seed: int, device: torch.device) -> Int64[Tensor, "n"]:
    """Return 32 bits per index: C. Wellons's hash lowbias32 of index + first key, with the second key inside."""
    first, second = keys_of(seed)
    x = torch.arange(n, dtype=torch.int64, device=device) + first & LOW
    x = (x ^ x >> 16) * 0x7FEB352D & LOW
    x = (x ^ x >> 15 ^ second) * 0x846CA68B & LOW
    return x ^ x >> 16


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
    steps = _shifts(width, highest_first)
    shifts = torch.arange(steps.start, steps.stop, steps.step, dtype=torch.int64, device=codes.device)
    fields = codes[:, None] >> shifts & 2**width - 1
    return fields.view(-1)[places(bounds, width, unit, n)].byte()


def _bytes_of(fields: UInt8[Tensor, "n each"], shifts: range) -> UInt8[Tensor, "n"]:
    at = torch.arange(shifts.start, shifts.stop, shifts.step, dtype=torch.int32, device=fields.device)
    return (fields * (1 << at)).sum(1, dtype=torch.uint8)
