"""The part of a codec that encodes and decodes the values of a selection. `value_reference` defines the bits."""

from math import inf
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float32, Int32, Int64, UInt8
from torch import Tensor

from dgc.kernels.selection.protocol import SparseVector


@runtime_checkable
class ValueCodec(Protocol):
    """Encodes and decodes sections of values. What holds for `Codec` holds here."""

    def cast_encode_(
        self,
        values: Float32[Tensor, "capacity"],
        dtype: torch.dtype,
        section: UInt8[Tensor, "nbytes"],
        limit: float = inf,
    ) -> tuple[Float32[Tensor, "capacity"], Float32[Tensor, ""]]:
        """Write value / scale as fp32, fp16 or bf16, rounded to nearest, ties to even.

        scale is 1 for fp32 or if all values are zero. Else it is the power of two in 2**-126 .. 2**126 that puts
        the largest magnitude into [2**14, 2**15), or as near as possible. Magnitudes are first limited to `limit`,
        so that rounding cannot exceed fp32's range. Non-finite values do not affect the scale and become NaN,
        which is not valid. Returns (the values that `cast_decode` will return, scale).
        """
        ...

    def cast_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        count: Int32[Tensor, ""],
        dtype: torch.dtype,
        scale: Float32[Tensor, ""],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """Read fp32, fp16 or bf16 times scale. Returns (values, valid)."""
        ...

    def sign_encode_(
        self, selection: SparseVector, bounds: Int64[Tensor, "bounds"], section: UInt8[Tensor, "nbytes"]
    ) -> Float32[Tensor, "capacity"]:
        """Write an fp32 mean magnitude per segment, then one bit per element, set for negative values.

        Means are summed in fp64 in the order of indices, and 0 if nothing is sent. Returns the values that
        `sign_decode` will return.
        """
        ...

    def sign_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        count: Int32[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """Return (values, valid)."""
        ...

    def int8_encode_(
        self, selection: SparseVector, bounds: Int64[Tensor, "bounds"], section: UInt8[Tensor, "nbytes"]
    ) -> Float32[Tensor, "capacity"]:
        """Write an fp32 scale per segment, then value / scale as one int8 per element, rounded to nearest even.

        A scale is the largest magnitude / 127, but at least 2**-149. Returns the values that `int8_decode` will
        return.
        """
        ...

    def int8_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        count: Int32[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """Return (values, valid)."""
        ...

    def two_bit_encode_(
        self, selection: SparseVector, bounds: Int64[Tensor, "bounds"], section: UInt8[Tensor, "nbytes"], r: float
    ) -> Float32[Tensor, "capacity"]:
        """Write a table of 4 fp32 numbers per segment, then the number of its bin, 0 to 3, in 2 bits per element.

        m and s are the mean and the standard deviation of a segment's values, with their number as divisor. With
        w = r s / 4, the bins meet at m - w, m and m + w, and each includes its lower end. A table has the mean of
        each bin, or 0. Element j is in byte j // 4, in the bits from 2 (j % 4) on. All is computed in fp64, with
        sums in the order of indices. Returns the values that `two_bit_decode` will return.
        """
        ...

    def two_bit_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        count: Int32[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """Return (values, valid)."""
        ...
