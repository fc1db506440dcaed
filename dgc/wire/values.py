"""Value formats of a payload. What a format rounds away stays in the sender's error state.

CastValues   fp32, fp16 or bf16. The halves are scaled by a power of two s, for each bucket and step, that puts
             the largest magnitude just below 2**15: nothing overflows, and nothing underflows that is not
             2**-29 (fp16) of it.
Int8Values   round(value / scale), scale = largest magnitude / 127 of each tensor
SignValues   sign * mean magnitude of each tensor: with error feedback, the magnitudes that are sent are nearly
             equal (they have just passed the threshold), and the rest follows later
"""

from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Float32, Int32, Int64, UInt8
from torch import Tensor

from dgc.kernels.codec import Codec, Header
from dgc.kernels.protocol import Selection

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FP32 = torch.finfo(torch.float32)


@runtime_checkable
class ValueFormat(Protocol):
    @property
    def dense(self) -> "CastValues":
        """How values travel where all of them do and the wire adds them: never bf16, which no transport adds."""
        ...

    def nbytes(self, capacity: int, ranges: int) -> int:
        """Size of the section for `capacity` elements from `ranges` tensors."""
        ...

    def encode_(
        self,
        codec: Codec,
        selection: Selection,
        bounds: Int64[Tensor, "bounds"],
        section: UInt8[Tensor, "nbytes"],
        result: torch.dtype,
    ) -> tuple[Float32[Tensor, "capacity"], Float32[Tensor, ""]]:
        """Write into a section of zeros. Returns (the values that `decode` will give, the scale for the header).

        result: the gradients' dtype, in whose range decoded values stay.
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
        """(the values of these indices, zeros behind the last; whether they are finite)"""
        ...


@dataclass(frozen=True)
class CastValues:
    """dtype: fp32, fp16 or bf16."""

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
    def dense(self) -> "CastValues":
        return self if self.dtype != "bf16" else CastValues()

    def nbytes(self, capacity: int, ranges: int) -> int:
        return capacity * self.itemsize

    def largest(self, result: torch.dtype) -> float:
        """Magnitudes are cut to this, for gradients of dtype `result`."""
        return largest_cast(self.dtype, result)

    def quantize(
        self, values: Float32[Tensor, "n"], summands: int = 1, result: torch.dtype = torch.float32
    ) -> Float[Tensor, "n"]:
        """Values of the wire's dtype, unscaled, for a wire that adds `summands` of them.

        They are cut so far that the sum stays in range, with a factor of 2 for its rounding, and to the range of
        `result`, where the mean ends up.
        """
        wire, home = torch.finfo(self.torch_dtype), torch.finfo(result)
        limit = wire.max / (1 if summands == 1 else 2 * summands)
        if home.max < wire.max:
            # a little less, so that rounding to the wire does not lift it above home.max
            limit = min(limit, home.max * (1 - wire.eps))
        elif self.torch_dtype == torch.float32:
            return values
        return values.clamp(-limit, limit).to(self.torch_dtype)

    def encode_(
        self,
        codec: Codec,
        selection: Selection,
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
    """A byte per element and a scale per tensor."""

    @property
    def dense(self) -> CastValues:
        return CastValues()

    def nbytes(self, capacity: int, ranges: int) -> int:
        return 4 * ranges + capacity

    def encode_(
        self,
        codec: Codec,
        selection: Selection,
        bounds: Int64[Tensor, "bounds"],
        section: UInt8[Tensor, "nbytes"],
        result: torch.dtype,
    ) -> tuple[Float32[Tensor, "capacity"], Float32[Tensor, ""]]:
        # 127 * (largest / 127) may be a rounding larger than the largest
        cut = Selection(selection.indices, within(selection.values, result, 2.0**-20), selection.count)
        return codec.int8_encode_(cut, bounds, section), torch.ones((), dtype=torch.float32, device=section.device)

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
    """A bit per element and a mean magnitude per tensor."""

    @property
    def dense(self) -> CastValues:
        return CastValues()

    def nbytes(self, capacity: int, ranges: int) -> int:
        return 4 * ranges + (capacity + 7) // 8

    def encode_(
        self,
        codec: Codec,
        selection: Selection,
        bounds: Int64[Tensor, "bounds"],
        section: UInt8[Tensor, "nbytes"],
        result: torch.dtype,
    ) -> tuple[Float32[Tensor, "capacity"], Float32[Tensor, ""]]:
        cut = Selection(selection.indices, within(selection.values, result, 0.0), selection.count)
        return codec.sign_encode_(cut, bounds, section), torch.ones((), dtype=torch.float32, device=section.device)

    def decode(
        self,
        codec: Codec,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        header: Header,
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        return codec.sign_decode(section, indices, header.count, bounds)


def within(values: Float32[Tensor, "n"], result: torch.dtype, rounding: float) -> Float32[Tensor, "n"]:
    """Values cut to `largest_within`."""
    limit = largest_within(result, rounding)
    return values if limit == inf else values.clamp(-limit, limit)


@cache
def largest_cast(dtype: str, result: torch.dtype) -> float:
    """`largest_within` for values cast to this dtype."""
    return largest_within(result, 0.0 if dtype == "fp32" else torch.finfo(DTYPES[dtype]).eps)


@cache
def largest_within(result: torch.dtype, rounding: float) -> float:
    """The end of the range of `result` and of fp32, less what rounding up by `rounding` of itself takes; inf where
    no fp32 lies beyond it.
    """
    limit = min(torch.finfo(result).max, FP32.max) * (1 - rounding)
    return limit if limit < FP32.max else inf
