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
    x = torch.arange(n, dtype=torch.int64, device=device) + first & LOW
    x = (x ^ x >> 16) * 0x7FEB352D & LOW
    x = (x ^ x >> 15 ^ second) * 0x846CA68B & LOW
    return x ^ x >> 16


def natural_top(largest: Int32[Tensor, ""]) -> Int32[Tensor, ""]:
    """E, from the bits of the largest magnitude."""
    return ((largest >> 23) - 126).clamp(0, 127)


def natural_top_in(codes: Codes) -> Int32[Tensor, ""]:
    """E as codes say it, in bounds whatever they are; they may lie at any address."""
    return codes[:4].clone().view(torch.int32)[0].clamp(0, 127)
