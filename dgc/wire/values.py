"""Value formats of a payload. The rounding error of a format stays in the sender's error state."""

from dataclasses import dataclass
from functools import cache
from math import inf
from numbers import Real
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Float32, Int32, Int64, UInt8
from torch import Tensor

from dgc.arguments import checked
from dgc.kernels.codec.protocol import Codec, Header, ValueKind
from dgc.kernels.selection.protocol import SparseVector

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
KINDS = {"fp32": ValueKind.FP32, "fp16": ValueKind.FP16, "bf16": ValueKind.BF16}
FP32 = torch.finfo(torch.float32)
BINS = 4  # of TwoBitValues


@runtime_checkable
class ValueFormat(Protocol):
    """A format of values."""

    @property
    def dense(self) -> "CastValues":
        """Format for a dense all-reduce of all values. Never bf16, which no transport can add."""
        ...

    def nbytes(self, capacity: int, segments: int) -> int:
        """Return the size in bytes of the section for `capacity` elements from `segments` tensors."""
        ...

    def encode_(
        self,
        codec: Codec,
        selection: SparseVector,
        bounds: Int64[Tensor, "bounds"],
        section: UInt8[Tensor, "nbytes"],
        result: torch.dtype,
    ) -> tuple[Float32[Tensor, "capacity"], Float32[Tensor, ""]]:
        """Write the values into a section of zeros.

        Decoded values stay within the range of `result`, the type of the gradients.

        Returns:
            (the values that `decode` will return, the scale for the header).
        """
        ...

    def decode(
        self,
        codec: Codec,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        header: Header,
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """Return (the values of these indices, followed by zeros; whether they are finite)."""
        ...


@checked
@dataclass(frozen=True)
class CastValues:
    """Values cast to a floating-point type.

    The 16-bit types are scaled by a power of two, per bucket and step, that puts the largest magnitude just below
    2**15. Nothing overflows, and in fp16 only magnitudes below 2**-29 of the largest underflow.

    Args:
        dtype: "fp32", "fp16" or "bf16".

    Raises:
        ValueError: `dtype` is none of these.
    """

    dtype: str = "fp32"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"values are cast to one of {', '.join(DTYPES)}, not {self.dtype!r}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def itemsize(self) -> int:
        return self.torch_dtype.itemsize

    @property
    def kind(self) -> ValueKind:
        return KINDS[self.dtype]

    @property
    def dense(self) -> "CastValues":
        return self if self.dtype != "bf16" else CastValues()

    def nbytes(self, capacity: int, segments: int) -> int:
        return capacity * self.itemsize

    def largest(self, result: torch.dtype) -> float:
        """Return the limit of magnitudes for gradients of type `result`."""
        return largest_cast(self.dtype, result)

    def quantize(
        self, values: Float32[Tensor, "n"], summands: int = 1, result: torch.dtype = torch.float32
    ) -> Float[Tensor, "n"]:
        """Cast values, unscaled, for an all-reduce of `summands` ranks.

        Magnitudes are limited so that the sum stays in range, with a factor of 2 for rounding, and to the range of
        `result`, the type of the mean.
        """
        wire, home = torch.finfo(self.torch_dtype), torch.finfo(result)
        limit = wire.max / (1 if summands == 1 else 2 * summands)
        if home.max < wire.max:
            # slightly less, so that rounding to the wire type does not exceed home.max
            limit = min(limit, home.max * (1 - wire.eps))
        elif self.torch_dtype == torch.float32:
            return values
        return values.clamp(-limit, limit).to(self.torch_dtype)

    def encode_(
        self,
        codec: Codec,
        selection: SparseVector,
        bounds: Int64[Tensor, "bounds"],
        section: UInt8[Tensor, "nbytes"],
        result: torch.dtype,
    ) -> tuple[Float32[Tensor, "capacity"], Float32[Tensor, ""]]:
        return codec.cast_encode_(selection.values, self.torch_dtype, section, self.largest(result))

    def decode(
        self,
        codec: Codec,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        header: Header,
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        return codec.cast_decode(section, header.count, self.torch_dtype, header.scale)


@dataclass(frozen=True)
class Int8Values:
    """One byte per element: round(value / scale), with one fp32 scale per tensor = largest magnitude / 127."""

    kind: ClassVar[ValueKind] = ValueKind.INT8

    @property
    def dense(self) -> CastValues:
        return CastValues()

    def nbytes(self, capacity: int, segments: int) -> int:
        return 4 * segments + capacity

    def encode_(
        self,
        codec: Codec,
        selection: SparseVector,
        bounds: Int64[Tensor, "bounds"],
        section: UInt8[Tensor, "nbytes"],
        result: torch.dtype,
    ) -> tuple[Float32[Tensor, "capacity"], Float32[Tensor, ""]]:
        # 127 * (largest / 127) may exceed the largest magnitude by rounding
        return codec.int8_encode_(within(selection, result, 2.0**-20), bounds, section), one(section)

    def decode(
        self,
        codec: Codec,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        header: Header,
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        return codec.int8_decode(section, indices, header.count, bounds)


@dataclass(frozen=True)
class SignValues:
    """One bit per element and one fp32 mean magnitude per tensor.

    With error feedback the sent magnitudes are nearly equal, because they have just passed the threshold. The rest
    is sent later.
    """

    kind: ClassVar[ValueKind] = ValueKind.SIGN

    @property
    def dense(self) -> CastValues:
        return CastValues()

    def nbytes(self, capacity: int, segments: int) -> int:
        return 4 * segments + (capacity + 7) // 8

    def encode_(
        self,
        codec: Codec,
        selection: SparseVector,
        bounds: Int64[Tensor, "bounds"],
        section: UInt8[Tensor, "nbytes"],
        result: torch.dtype,
    ) -> tuple[Float32[Tensor, "capacity"], Float32[Tensor, ""]]:
        return codec.sign_encode_(within(selection, result), bounds, section), one(section)

    def decode(
        self,
        codec: Codec,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        header: Header,
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        return codec.sign_decode(section, indices, header.count, bounds)


@dataclass(frozen=True)
class TwoBitValues:
    """Two bits per element and a table of 4 fp32 means per tensor (SparseLoCo, Sarfi et al. 2025,
    arXiv 2508.15706).

    For the values of a tensor that are sent, with mean m and standard deviation s, and r = range_in_sigmas:

        w = r s / 4;  bins [.., m - w), [m - w, m), [m, m + w), [m + w, ..)
        a value is sent as the number of its bin and received as the mean of the bin's values

    Bytes for k values of T tensors: 16 T + ceil(k / 4).

    There is a table per tensor, and not one per payload, because the magnitudes of tensors differ by orders. In
    common bins, all values of a tensor of small gradients would be received as those of other tensors, many times
    as large or of the other sign. A table costs as much as 64 values, so the format is for tensors that send more
    than that.

    Differences from the paper: Bins meet at the mean, so that the signs of values that exceed a threshold are
    kept. If a bin were centred on the mean, it would have hardly any of these values, but both of a tensor that
    sends only two. The divisor of s**2 is the number of values, so that a single one has an s.

    Args:
        range_in_sigmas: Width of the 4 bins together, in standard deviations of a tensor's sent values. The outer
            bins also have all values beyond. 6 is the paper's, for values of several thresholds; 4 loses least of
            the largest values of a tensor, which exceed one threshold.

    Raises:
        ValueError: `range_in_sigmas` is not a positive number.

    Example:
        >>> compression = SparseCompressor(0.01, ResidualMemory(), values=TwoBitValues(), indices=RiceIndices())
    """

    range_in_sigmas: float = 6.0
    kind: ClassVar[ValueKind] = ValueKind.TWO_BITS

    def __post_init__(self) -> None:
        given = self.range_in_sigmas
        if isinstance(given, bool) or not isinstance(given, Real) or not 0 < given < inf:
            raise ValueError(f"range_in_sigmas must be a positive number of standard deviations, not {given!r}")

    @property
    def dense(self) -> CastValues:
        return CastValues()

    def nbytes(self, capacity: int, segments: int) -> int:
        return 4 * BINS * segments + (capacity + 3) // 4

    def encode_(
        self,
        codec: Codec,
        selection: SparseVector,
        bounds: Int64[Tensor, "bounds"],
        section: UInt8[Tensor, "nbytes"],
        result: torch.dtype,
    ) -> tuple[Float32[Tensor, "capacity"], Float32[Tensor, ""]]:
        values = codec.two_bit_encode_(within(selection, result), bounds, section, self.range_in_sigmas)
        return values, one(section)

    def decode(
        self,
        codec: Codec,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        header: Header,
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        return codec.two_bit_decode(section, indices, header.count, bounds)


def one(section: UInt8[Tensor, "nbytes"]) -> Float32[Tensor, ""]:
    """Return the scale of a payload whose values have scales of their own."""
    return torch.ones((), dtype=torch.float32, device=section.device)


def within(selection: SparseVector, result: torch.dtype, rounding: float = 0.0) -> SparseVector:
    """Return the selection with values clamped to `largest_within`."""
    limit = largest_within(result, rounding)
    values = selection.values if limit == inf else selection.values.clamp(-limit, limit)
    return SparseVector(selection.indices, values, selection.count)


@cache
def largest_cast(dtype: str, result: torch.dtype) -> float:
    """Return `largest_within` for values cast to `dtype`."""
    return largest_within(result, 0.0 if dtype == "fp32" else torch.finfo(DTYPES[dtype]).eps)


@cache
def largest_within(result: torch.dtype, rounding: float) -> float:
    """Return the largest magnitude that stays in range of `result` and fp32 when rounding enlarges it.

    `rounding` is the largest relative rounding error. Returns inf if no fp32 number exceeds the limit.
    """
    limit = min(torch.finfo(result).max, FP32.max) * (1 - rounding)
    return limit if limit < FP32.max else inf
