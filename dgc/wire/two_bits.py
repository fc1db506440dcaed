"""Values in 2 bits, with a table of 4 numbers per tensor (SparseLoCo, Sarfi et al. 2025, arXiv 2508.15706).

For the values of a tensor that are sent, with mean m and standard deviation s, and r = range_in_sigmas:

    w = r s / 4;  bins [.., m - w), [m - w, m), [m, m + w), [m + w, ..)
    a value is sent as the number of its bin and received as the mean of the bin's values

Bytes for k values of T tensors: 16 T + ceil(k / 4).

There is a table per tensor, and not one per payload, because the magnitudes of tensors differ by orders. In common
bins, all values of a tensor of small gradients would be received as those of other tensors, many times as large or
of the other sign. A table costs as much as 64 values, so the format is for tensors that send more than that.

Differences from the paper: Bins meet at the mean, so that the signs of values that exceed a threshold are kept. If
a bin were centred on the mean, it would have hardly any of these values, but both of a tensor that sends only two.
The divisor of s**2 is the number of values, so that a single one has an s.
"""

from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import ClassVar

import torch
from jaxtyping import Bool, Float32, Int32, Int64, UInt8
from torch import Tensor

from dgc.kernels.codec.mean import ValueKind
from dgc.kernels.codec.protocol import Codec, Header
from dgc.kernels.selection.protocol import SparseVector
from dgc.wire.values import CastValues, within

BINS = 4


@dataclass(frozen=True)
class TwoBitValues:
    """Two bits per element and a table of 4 fp32 means per tensor (SparseLoCo, arXiv 2508.15706).

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
        cut = SparseVector(selection.indices, within(selection.values, result, 0.0), selection.count)
        values = codec.two_bit_encode_(cut, bounds, section, self.range_in_sigmas)
        return values, torch.ones((), dtype=torch.float32, device=section.device)

    def decode(
        self,
        codec: Codec,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        header: Header,
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        return codec.two_bit_decode(section, indices, header.count, bounds)
