"""Value formats of a payload. The rounding error of a format stays in the sender's residual."""

from dataclasses import dataclass
from functools import cache
from math import inf
from numbers import Real

import torch
from jaxtyping import Bool, Float, Float32, Int32, Int64, UInt8
from torch import Tensor

from dgc.core.arguments import checked
from dgc.kernels.payload import CASTS, TABLES, Codec, Header, ValueKind
from dgc.kernels.selection import SparseVector

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ROUNDING = {"fp32": 0.0, "fp16": torch.finfo(torch.float16).eps, "bf16": torch.finfo(torch.bfloat16).eps}
FP32 = torch.finfo(torch.float32)

Bounds = Int64[Tensor, "bounds"]
Section = UInt8[Tensor, "nbytes"]
Indices = Int32[Tensor, "capacity"]
Values = Float32[Tensor, "capacity"]


class ValueFormat:
    """A format of values. These methods are for the codes with a table of fp32 numbers per tensor.

    A format of another kind has a `kind` of None, and its own `nbytes`, `encode_` and `decode`.
    """

    rounding = 0.0  # largest relative error by which a decoded value may exceed the largest magnitude

    @property
    def kind(self) -> ValueKind | None:
        """The code."""
        return None

    @property
    def dense(self) -> "CastValues":
        """Format for a dense all-reduce of all values. Never bf16, which no transport can add."""
        return CastValues()

    @property
    def r(self) -> float:
        """Parameter of `Codec.table_encode_`."""
        return 0.0

    def limit(self, result: torch.dtype) -> float:
        """Return the limit of magnitudes for gradients of type `result`."""
        return largest_within(result, self.rounding)

    def nbytes(self, capacity: int, segments: int) -> int:
        """Return the size in bytes of the section for `capacity` elements from `segments` tensors."""
        assert self.kind is not None
        numbers, bits = TABLES[self.kind]
        return 4 * numbers * segments + (capacity * bits + 7) // 8

    def encode_(
        self, codec: Codec, selection: SparseVector, bounds: Bounds, section: Section, result: torch.dtype
    ) -> tuple[Values, Float32[Tensor, ""]]:
        """Write the values into a section of zeros.

        Decoded values stay within the range of `result`, the type of the gradients.

        Returns:
            (the values that `decode` will return, the scale for the header).
        """
        assert self.kind is not None
        limit = self.limit(result)
        values = selection.values if limit == inf else selection.values.clamp(-limit, limit)
        limited = SparseVector(selection.indices, values, selection.count)
        decoded = codec.table_encode_(self.kind, limited, bounds, section, self.r)
        return decoded, torch.ones((), dtype=torch.float32, device=section.device)

    def decode(
        self, codec: Codec, section: Section, indices: Indices, header: Header, bounds: Bounds
    ) -> tuple[Values, Bool[Tensor, ""]]:
        """Return (the values of these indices, followed by zeros; whether they are finite)."""
        assert self.kind is not None
        return codec.table_decode(self.kind, section, indices, header.count, bounds)


@checked
@dataclass(frozen=True)
class CastValues(ValueFormat):
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
        return ValueKind(CASTS.index(self.torch_dtype))

    @property
    def dense(self) -> "CastValues":
        return self if self.dtype != "bf16" else CastValues()

    def nbytes(self, capacity: int, segments: int) -> int:
        return capacity * self.itemsize

    def limit(self, result: torch.dtype) -> float:
        return largest_within(result, ROUNDING[self.dtype])

    def limit_of_summands(self, summands: int = 1, result: torch.dtype = torch.float32) -> float | None:
        """Return the limit of magnitudes in an all-reduce of `summands` ranks. None: they are sent as they are.

        The sum stays in range, with a factor of 2 for rounding, and in the range of `result`, the type of the
        mean.
        """
        wire, home = torch.finfo(self.torch_dtype), torch.finfo(result)
        limit = wire.max / (1 if summands == 1 else 2 * summands)
        if home.max < wire.max:
            # slightly less, so that rounding to the wire type does not exceed home.max
            return float(min(limit, home.max * (1 - wire.eps)))
        return None if self.torch_dtype == torch.float32 else float(limit)

    def quantize(
        self, values: Float32[Tensor, "n"], summands: int = 1, result: torch.dtype = torch.float32
    ) -> Float[Tensor, "n"]:
        """Cast values, unscaled and within `limit`."""
        limit = self.limit_of_summands(summands, result)
        return values if limit is None else values.clamp(-limit, limit).to(self.torch_dtype)

    def encode_(
        self, codec: Codec, selection: SparseVector, bounds: Bounds, section: Section, result: torch.dtype
    ) -> tuple[Values, Float32[Tensor, ""]]:
        return codec.cast_encode_(selection.values, self.torch_dtype, section, self.limit(result))

    def decode(
        self, codec: Codec, section: Section, indices: Indices, header: Header, bounds: Bounds
    ) -> tuple[Values, Bool[Tensor, ""]]:
        return codec.cast_decode(section, header.count, self.torch_dtype, header.scale)


@dataclass(frozen=True)
class Int8Values(ValueFormat):
    """One byte per element: round(value / scale), with one fp32 scale per tensor = largest magnitude / 127."""

    kind = ValueKind.INT8
    rounding = 2.0**-20  # of 127 * (largest / 127)


@dataclass(frozen=True)
class SignValues(ValueFormat):
    """One bit per element and one fp32 mean magnitude per tensor.

    With error feedback the sent magnitudes are nearly equal, because they have just passed the threshold. The rest
    is sent later.
    """

    kind = ValueKind.SIGN


@dataclass(frozen=True)
class TwoBitValues(ValueFormat):
    """Two bits per element and a table of 4 fp32 means per tensor (SparseLoCo, Sarfi et al. 2025,
    arXiv 2508.15706).

    For the values of a tensor that are sent, with mean m and standard deviation s, and r = range_in_sigmas:

        w = r s / 4;  bins [.., m - w), [m - w, m), [m, m + w), [m + w, ..)
        a value is sent as the number of its bin and received as the mean of the bin's values

    Bytes for k values of T tensors: 16 T + ceil(k / 4).

    There is a table per tensor, and not one per payload, because the magnitudes of tensors differ by orders. In
    common bins, all values of a tensor of small gradients would be received as the values of other tensors, many
    times as large or of the other sign. A table costs as much as 64 values, so the format is for tensors that send
    more than that.

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
    kind = ValueKind.TWO_BITS

    def __post_init__(self) -> None:
        given = self.range_in_sigmas
        if isinstance(given, bool) or not isinstance(given, Real) or not 0 < given < inf:
            raise ValueError(f"range_in_sigmas must be a positive number of standard deviations, not {given!r}")

    @property
    def r(self) -> float:
        return self.range_in_sigmas


@cache
def largest_within(result: torch.dtype, rounding: float) -> float:
    """Return the largest magnitude that stays in range of `result` and fp32 when rounding enlarges it.

    `rounding` is the largest relative rounding error. Returns inf if no fp32 number exceeds the limit.
    """
    limit = min(torch.finfo(result).max, FP32.max) * (1 - rounding)
    return limit if limit < FP32.max else inf
