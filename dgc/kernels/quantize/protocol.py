"""The interface of quantizers, which send every element in a few bits. `reference` defines every bit.

v is finite, and bounds divide it into segments, which may be empty. Encoding does not change v
and returns (codes, residual). The residual is v minus the decoded values, one fp32 subtraction per element. The
`add_` operations add decoded values to `total`, one fp32 addition per element. Codes are little-endian.

The `mean_` operations overwrite `mean` with that of all ranks, in one call: the sum of what `add_` adds to zeros,
in the order of ranks, times the factor of the segment, if there are factors, divided by `size`. All of these
operations are rounded. Codes, and the values per segment that belong to them, are sequences, by rank.

Random numbers are a function of (seed, index of the element), with 0 <= seed < 2**32. Every tier and any number of
threads give the same, and torch's generators are not used. Without a seed, values are rounded to nearest.

The size of the codes depends on the bounds, which are on the device. The host waits for them once per tensor of
bounds. That tensor must not be changed in place.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float32, Int32, Int64, UInt8
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

assert sys.byteorder == "little", "codes are little-endian, and so must this machine be"

LOW = 0xFFFFFFFF
WORD = 4  # bytes; segments of sign and ternary codes are aligned to words, as in MXNet

Codes = UInt8[Tensor, "nbytes"]
Bounds = Int64[Tensor, "bounds"]
Each = Float32[Tensor, "S"]
Dense = Float32[Tensor, "n"]


@runtime_checkable
class Quantizers(Protocol):
    """Encoders, and decoders that add to a total."""

    name: str

    def sign_encode(self, v: Dense, bounds: Bounds, cuts: Each, lows: Each, highs: Each) -> tuple[Codes, Dense]:
        """Encode 1 bit per element: v > cut of its segment. A 1 decodes to high, a 0 to low.

        The layout is that of MXNet's 1-bit compression: element i of a segment is in its byte i / 8, the first in
        the highest bit. A segment takes whole words of 4 bytes, padded with zeros.
        """
        ...

    def sign_add_(self, codes: Codes, bounds: Bounds, lows: Each, highs: Each, total: Dense) -> None: ...

    def sign_mean_(
        self,
        codes: Sequence[Codes],
        bounds: Bounds,
        lows: Sequence[Each],
        highs: Sequence[Each],
        factors: Each | None,
        size: int,
        mean: Dense,
    ) -> None: ...

    def tern_encode(self, v: Dense, bounds: Bounds, thresholds: Each) -> tuple[Codes, Dense]:
        """Encode 2 bits per element: 11 for v >= t decodes to t, 10 for v <= -t decodes to -t, else 00, zero.

        The layout is that of MXNet's 2-bit compression: element i of a segment is in its byte i / 4, the first in
        the highest bits, with words as for signs. A segment with a threshold of zero or inf is all zeros. 01
        decodes to zero.
        """
        ...

    def tern_add_(self, codes: Codes, bounds: Bounds, thresholds: Each, total: Dense) -> None: ...

    def tern_mean_(
        self,
        codes: Sequence[Codes],
        bounds: Bounds,
        thresholds: Sequence[Each],
        factors: Each | None,
        size: int,
        mean: Dense,
    ) -> None: ...

    def uniform_encode(
        self, v: Dense, bounds: Bounds, scales: Each, levels: int, bits: int, seed: int | None
    ) -> tuple[Codes, Dense]:
        """Encode a level and a sign per element in 2, 4 or 8 bits, with levels < 2**(bits - 1).

            level = floor(min(|v| (levels / scale) + r, levels)), which decodes to (scale / levels) level

        r is random in [0, 1), or 0.5 without a seed. Every fp32 operation is rounded; the quotients are computed
        once per segment. The sign is the highest bit of the code, zero at level 0. Element i of a segment is in
        its byte i bits / 8, the first in the lowest bits. A segment takes whole bytes. It is all zeros if scale or
        levels / scale is zero or not finite.
        """
        ...

    def uniform_add_(
        self, codes: Codes, bounds: Bounds, scales: Each, levels: int, bits: int, total: Dense
    ) -> None: ...

    def uniform_mean_(
        self,
        codes: Sequence[Codes],
        bounds: Bounds,
        scales: Sequence[Each],
        levels: int,
        bits: int,
        size: int,
        mean: Dense,
    ) -> None: ...

    def natural_encode(self, v: Dense, seed: int | None) -> tuple[Codes, Dense]:
        """Encode powers of two: |v| in [2^e, 2^(e+1)) is rounded up with probability |v| / 2^e - 1, else down.

        The codes are int32 E, then one byte per element: the sign in the highest bit, below it c = 1 .. 127 for
        2^(E - 127 + c), or 0 for zero. E is at least 0 and above the exponent of the largest |v|, but at most 127.
        Nothing therefore overflows, and fp32's denormals lie between the powers zero and 2^-126. Rounded values
        below 2^(E - 126) become zero.
        """
        ...

    def natural_add_(self, codes: Codes, total: Dense) -> None: ...

    def natural_mean_(self, codes: Sequence[Codes], size: int, mean: Dense) -> None: ...

    def pack(self, levels: UInt8[Tensor, "n"], bits: int) -> Codes:
        """Pack the lowest `bits` (1 .. 8) bits of each element into one stream, least significant first."""
        ...

    def unpack(self, codes: Codes, bits: int, n: int) -> UInt8[Tensor, "n"]: ...

    def pack_sums(self, codes: Sequence[Codes], whole: Bounds, width: int, bits: int) -> UInt8[Tensor, "packed"]:
        """Sum the fields of all ranks' codes as integers, and pack the sums into `bits` bits, at most 8.

        With `width` 2 the fields are those of ternary codes with thresholds of 1, and a sum S over N ranks is sent
        as N + S. With `width` 1 they are signs, 1 and -1, and it is sent as (N + S) / 2. whole: One segment of all
        fields, whole words of them.
        """
        ...

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
        """Overwrite `mean` with S times the factor of the segment, divided by N, both rounded.

        packed: Of N equal shares of all fields, what `pack_sums` returned. fields: Number of fields of a share.
        """
        ...


@dataclass(frozen=True, eq=False)
class Layout:
    """The first byte of each segment's codes, and their total size in bytes."""

    starts: Int64[Tensor, "S"]
    nbytes: int


_layouts = WeakTensorKeyDictionary()


def layout_of(bounds: Bounds, width: int, unit: int) -> Layout:
    """Return the layout of codes of `width` bits, where each segment takes a multiple of `unit` bytes."""
    kept: dict[tuple[int, int], Layout] = _layouts.setdefault(bounds, {})
    if (width, unit) not in kept:
        ends = ((bounds.diff() * width + 8 * unit - 1) // (8 * unit) * unit).cumsum(0)
        kept[width, unit] = Layout(torch.cat([ends.new_zeros(1), ends])[:-1], int(ends[-1]) if len(ends) else 0)
    return kept[width, unit]


def empty_codes(bounds: Bounds, width: int, unit: int) -> Codes:
    return torch.empty(layout_of(bounds, width, unit).nbytes, dtype=torch.uint8, device=bounds.device)


def thresholds_or(instead: float, thresholds: Each) -> Each:
    """Return the thresholds, with those that send nothing replaced by `instead`."""
    return torch.where((thresholds > 0) & torch.isfinite(thresholds), thresholds, instead)


def level_factors(scales: Each, levels: int, bits: int) -> tuple[Each, Each]:
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


def natural_top(largest: Int32[Tensor, ""]) -> Int32[Tensor, ""]:
    """Return E for the bits of the largest magnitude."""
    return ((largest >> 23) - 126).clamp(0, 127)


def natural_top_in(codes: Codes) -> Int32[Tensor, ""]:
    """Read E from codes, clamped to its range. The codes may be unaligned."""
    return codes[:4].clone().view(torch.int32)[0].clamp(0, 127)
