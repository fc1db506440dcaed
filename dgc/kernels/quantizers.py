"""The bit-level work of compressors that send every element in few bits. Plain torch defines every bit of it.

As in `protocol`: v is finite and bounds cut it into ranges, which may be empty. Encoding leaves v alone and
returns (codes, residual), residual = v - what the codes decode to, one subtraction in fp32. The `add_` operations
add what is decoded to `total`, one addition in fp32 per element. Codes are little-endian.

Random numbers are a function of (seed, index of the element), with 0 <= seed < 2**32: every tier and any number of
threads draws the same, and torch's generators stay as they are. No seed means rounding to the nearest.

The size of the codes depends on the bounds, which only the device knows: it is waited for once per tensor of
bounds, which must not be changed in place.
"""

import sys
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float32, Int32, Int64, UInt8
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

assert sys.byteorder == "little", "codes are little-endian, and so must this machine be"

LOW = 0xFFFFFFFF
MAGNITUDE = 0x7FFFFFFF
TOP_EXPONENT = 254  # of what fp32 holds, as its bits say it
WORD = 4  # bytes; the ranges of signs and ternary codes begin at words, as in MXNet

Codes = UInt8[Tensor, "nbytes"]
Bounds = Int64[Tensor, "bounds"]
Each = Float32[Tensor, "S"]
Dense = Float32[Tensor, "n"]


@runtime_checkable
class Quantizers(Protocol):
    name: str

    def sign_encode(self, v: Dense, bounds: Bounds, cuts: Each, lows: Each, highs: Each) -> tuple[Codes, Dense]:
        """1 bit each: v > cut of its range. It stands for high, or else for low.

        Layout of MXNet's 1-bit compression: element i of a range is in its byte i / 8, the first in the highest
        bit; a range takes whole words of 4 bytes, zeros behind the last element.
        """
        ...

    def sign_add_(self, codes: Codes, bounds: Bounds, lows: Each, highs: Each, total: Dense) -> None: ...

    def tern_encode(self, v: Dense, bounds: Bounds, thresholds: Each) -> tuple[Codes, Dense]:
        """2 bits each: 11 for v >= t, which stands for t; 10 for v <= -t, which stands for -t; else 00, for zero.

        Layout of MXNet's 2-bit compression: element i of a range is in its byte i / 4, the first in the highest
        bits; words as for signs. Of a range whose threshold is zero or inf, nothing is sent. 01 means zero.
        """
        ...

    def tern_add_(self, codes: Codes, bounds: Bounds, thresholds: Each, total: Dense) -> None: ...

    def uniform_encode(
        self, v: Dense, bounds: Bounds, scales: Each, levels: int, bits: int, seed: int | None
    ) -> tuple[Codes, Dense]:
        """A level and a sign each, in 2, 4 or 8 bits; levels < 2**(bits - 1). With r in [0, 1) random or 0.5,

            level = floor(min(|v| (levels / scale) + r, levels)), which stands for (scale / levels) level

        in fp32, every operation rounded, the quotients once per range. The sign is the highest bit of the code,
        zero at level 0. Element i of a range is in its byte i bits / 8, the first in the lowest bits; a range
        takes whole bytes. Of a range whose scale, or levels / scale, is zero or not finite, nothing is sent.
        """
        ...

    def uniform_add_(
        self, codes: Codes, bounds: Bounds, scales: Each, levels: int, bits: int, total: Dense
    ) -> None: ...

    def natural_encode(self, v: Dense, seed: int | None) -> tuple[Codes, Dense]:
        """Powers of two: |v| in [2^e, 2^(e+1)) goes up with probability |v| / 2^e - 1, else down.

        int32 E, then a byte each: the sign in its highest bit, below it c = 1 .. 127 for 2^(E - 127 + c), 0 for
        zero. E is at least 0 and above the exponent of the largest |v|, but at most 127: so nothing overflows, and
        fp32's denormals lie between the powers zero and 2^-126. What is below 2^(E - 126) when rounded is zero.
        """
        ...

    def natural_add_(self, codes: Codes, total: Dense) -> None: ...

    def pack(self, levels: UInt8[Tensor, "n"], bits: int) -> Codes:
        """The lowest bits (1 .. 8) of each, in one stream of bits, least significant first."""
        ...

    def unpack(self, codes: Codes, bits: int, n: int) -> UInt8[Tensor, "n"]: ...


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the codes of each range begin, and their length together, in bytes."""

    starts: Int64[Tensor, "S"]
    nbytes: int


_layouts = WeakTensorKeyDictionary()


def layout_of(bounds: Bounds, width: int, unit: int) -> Layout:
    """Of codes of `width` bits where each range takes a multiple of `unit` bytes."""
    kept: dict[tuple[int, int], Layout] = _layouts.setdefault(bounds, {})
    if (width, unit) not in kept:
        ends = ((bounds.diff() * width + 8 * unit - 1) // (8 * unit) * unit).cumsum(0)
        kept[width, unit] = Layout(torch.cat([ends.new_zeros(1), ends])[:-1], int(ends[-1]) if len(ends) else 0)
    return kept[width, unit]


def thresholds_or(instead: float, thresholds: Each) -> Each:
    """The thresholds, `instead` of those with which nothing is sent."""
    return torch.where((thresholds > 0) & torch.isfinite(thresholds), thresholds, instead)


def level_factors(scales: Each, levels: int, bits: int) -> tuple[Each, Each]:
    """(levels / scale, scale / levels), zeros where nothing is sent."""
    assert bits in (2, 4, 8) and 1 <= levels < 2 ** (bits - 1), (levels, bits)
    # a tensor, since division by a number is a product with its inverse on some devices
    most = torch.full_like(scales, levels)
    inverses, steps = most / scales, scales / most
    # rounded up, the step of a scale near the largest float would give inf
    steps = torch.where(torch.isfinite(steps * most), steps, torch.nextafter(steps, torch.zeros_like(steps)))
    sent = (scales > 0) & torch.isfinite(scales) & torch.isfinite(inverses)
    return torch.where(sent, inverses, 0.0), torch.where(sent, steps, 0.0)


def keys_of(seed: int) -> tuple[int, int]:
    """Two keys, so that no seed's numbers are another's, moved along."""
    assert 0 <= seed <= LOW, seed
    first = _mixed(seed ^ 0x9E3779B9)
    return first, _mixed(first ^ seed ^ 0x85EBCA6B)


def _mixed(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D & LOW
    x = (x ^ x >> 15) * 0x846CA68B & LOW
    return x ^ x >> 16


def random_bits(n: int, seed: int, device: torch.device) -> Int64[Tensor, "n"]:
    """32 bits for each index: the hash lowbias32 of C. Wellons, of index + first key, the second key inside it."""
    first, second = keys_of(seed)
    x = torch.arange(n, device=device) + first & LOW
    x = (x ^ x >> 16) * 0x7FEB352D & LOW
    x = (x ^ x >> 15 ^ second) * 0x846CA68B & LOW
    return x ^ x >> 16


class TorchQuantizers:
    """Implements `Quantizers`."""

    name = "reference"

    def sign_encode(self, v: Dense, bounds: Bounds, cuts: Each, lows: Each, highs: Each) -> tuple[Codes, Dense]:
        each = _range_of_each(bounds, v.numel())
        fields = v > cuts[each]
        codes = _packed(fields, bounds, 1, WORD, highest_first=True)
        return codes, v - torch.where(fields, highs[each], lows[each])

    def sign_add_(self, codes: Codes, bounds: Bounds, lows: Each, highs: Each, total: Dense) -> None:
        each = _range_of_each(bounds, total.numel())
        fields = _unpacked(codes, bounds, 1, WORD, highest_first=True, n=total.numel())
        total += torch.where(fields > 0, highs[each], lows[each])

    def tern_encode(self, v: Dense, bounds: Bounds, thresholds: Each) -> tuple[Codes, Dense]:
        t = thresholds_or(torch.inf, thresholds)[_range_of_each(bounds, v.numel())]
        up, down = v >= t, v <= -t
        codes = _packed(3 * up.byte() + 2 * down.byte(), bounds, 2, WORD, highest_first=True)
        return codes, v - torch.where(up, t, torch.where(down, -t, 0.0))

    def tern_add_(self, codes: Codes, bounds: Bounds, thresholds: Each, total: Dense) -> None:
        t = thresholds_or(0.0, thresholds)[_range_of_each(bounds, total.numel())]
        fields = _unpacked(codes, bounds, 2, WORD, highest_first=True, n=total.numel())
        total += torch.where(fields == 3, t, torch.where(fields == 2, -t, 0.0))

    def uniform_encode(
        self, v: Dense, bounds: Bounds, scales: Each, levels: int, bits: int, seed: int | None
    ) -> tuple[Codes, Dense]:
        n = v.numel()
        each = _range_of_each(bounds, n)
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
        total += _signed(steps[_range_of_each(bounds, total.numel())] * level, negative)

    def natural_encode(self, v: Dense, seed: int | None) -> tuple[Codes, Dense]:
        n = v.numel()
        magnitude = v.view(torch.int32) & MAGNITUDE
        top = natural_top(magnitude.amax() if n else magnitude.sum(dtype=torch.int32))
        # a carry out of the mantissa is the step up
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
        each = levels[:, None] >> torch.arange(bits, device=levels.device) & 1
        stream = each.new_zeros(-(-levels.numel() * bits // 8), 8, dtype=torch.uint8)
        stream.view(-1)[: each.numel()] = each.view(-1)
        return _bytes_of(stream, range(8))

    def unpack(self, codes: Codes, bits: int, n: int) -> UInt8[Tensor, "n"]:
        stream = codes[:, None] >> torch.arange(8, device=codes.device) & 1
        return _bytes_of(stream.view(-1)[: n * bits].view(n, bits), range(bits))


def natural_top(largest: Int32[Tensor, ""]) -> Int32[Tensor, ""]:
    """E, from the bits of the largest magnitude."""
    return ((largest >> 23) - 126).clamp(0, 127)


def natural_top_in(codes: Codes) -> Int32[Tensor, ""]:
    """E as codes say it, in bounds whatever they are; they may lie at any address."""
    return codes[:4].clone().view(torch.int32)[0].clamp(0, 127)


def _signed(magnitude: Tensor, negative: Tensor) -> Tensor:
    return torch.where(negative, -magnitude, magnitude)


def _range_of_each(bounds: Bounds, n: int) -> Int64[Tensor, "n"]:
    ranges = torch.arange(bounds.numel() - 1, device=bounds.device)
    return torch.repeat_interleave(ranges, bounds.diff(), output_size=n)


def _places(bounds: Bounds, width: int, unit: int, n: int) -> Int64[Tensor, "n"]:
    """Of each element the number of its field, counting what is left empty."""
    first = layout_of(bounds, width, unit).starts * (8 // width) - bounds[:-1]
    return torch.arange(n, device=bounds.device) + first[_range_of_each(bounds, n)]


def _shifts(width: int, highest_first: bool) -> range:
    return range(8 - width, -1, -width) if highest_first else range(0, 8, width)


def _packed(fields: Tensor, bounds: Bounds, width: int, unit: int, highest_first: bool = False) -> Codes:
    stream = fields.new_zeros(layout_of(bounds, width, unit).nbytes, 8 // width, dtype=torch.uint8)
    stream.view(-1)[_places(bounds, width, unit, fields.numel())] = fields.byte()
    return _bytes_of(stream, _shifts(width, highest_first))


def _unpacked(
    codes: Codes, bounds: Bounds, width: int, unit: int, *, n: int, highest_first: bool = False
) -> UInt8[Tensor, "n"]:
    shifts = torch.tensor(_shifts(width, highest_first), device=codes.device)
    fields = codes[:, None] >> shifts & 2**width - 1
    return fields.view(-1)[_places(bounds, width, unit, n)].byte()


def _bytes_of(fields: UInt8[Tensor, "n each"], shifts: range) -> UInt8[Tensor, "n"]:
    weights = torch.tensor([1 << shift for shift in shifts], dtype=torch.int32, device=fields.device)
    return (fields * weights).sum(1, dtype=torch.uint8)
