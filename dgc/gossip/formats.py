"""Encodings of a vector of n elements for messages between ranks.

FP32Message             fp32: 4 bytes per element
HalfPrecisionMessage    fp16 or bf16, scaled by a power of two to avoid overflow: 2 bytes per element, and 4
Int8Message             round(x / scale), scale = largest magnitude of the block / 127: 1 byte per element, and 4
                        per block

The sender keeps the rounding errors of a message (`dgc.gossip.pushsum.sgp`), so the sum over ranks is preserved.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

import dgc.kernels as kernels
from dgc.arguments import checked
from dgc.comm.requests import as_bytes

HALF_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LEVELS = 127
FP32 = 4  # bytes

Vector = Float32[Tensor, "n"]
Bytes = UInt8[Tensor, "nbytes"]


@runtime_checkable
class Message(Protocol):
    """An encoding of vectors with a fixed size."""

    @property
    def exact(self) -> bool:
        """Whether decoding returns exactly the encoded values."""
        ...

    def nbytes(self, n: int) -> int: ...

    def encode_(self, z: Vector, factor: float, section: Bytes) -> Vector:
        """Writes factor * z into `section`, which has `nbytes(n)` bytes. Returns what `decode` will return."""
        ...

    def decode(self, section: Bytes, n: int) -> Vector:
        """Decodes n elements. The result may share the memory of `section`."""
        ...


@dataclass(frozen=True)
class FP32Message:
    """fp32 messages, without rounding.

    Example:
        >>> FP32Message().nbytes(1000)
        4000
    """

    exact = True

    def nbytes(self, n: int) -> int:
        return FP32 * n

    def encode_(self, z: Vector, factor: float, section: Bytes) -> Vector:
        return torch.mul(z, factor, out=section.view(torch.float32))

    def decode(self, section: Bytes, n: int) -> Vector:
        return section.view(torch.float32)


@checked
@dataclass(frozen=True)
class HalfPrecisionMessage:
    """16-bit messages with one scale.

    Args:
        dtype (str): "fp16", or "bf16", which has a larger range and three bits less.

    Raises:
        ValueError: if dtype is neither.

    Example:
        >>> HalfPrecisionMessage("bf16").nbytes(1000)
        2004
    """

    dtype: str = "fp16"
    exact = False

    def __post_init__(self) -> None:
        if self.dtype not in HALF_DTYPES:
            raise ValueError(f"dtype must be {' or '.join(HALF_DTYPES)}, not {self.dtype!r}")

    def nbytes(self, n: int) -> int:
        return 2 * n + FP32

    def encode_(self, z: Vector, factor: float, section: Bytes) -> Vector:
        values, scale = kernels.of(z).codec.cast_encode_(z * factor, HALF_DTYPES[self.dtype], section[FP32:])
        section[:FP32].copy_(as_bytes(scale.view(1)))
        return values

    def decode(self, section: Bytes, n: int) -> Vector:
        scale = section[:FP32].clone().view(torch.float32)
        return section[FP32:].clone().view(HALF_DTYPES[self.dtype]).float() * scale


@checked
@dataclass(frozen=True)
class Int8Message:
    """8-bit messages with one scale per block.

    Args:
        block (int): number of elements that share a scale. With 2048, scales add 0.2 % to the bytes.

    Raises:
        ValueError: if block is less than 1.

    Example:
        >>> Int8Message().nbytes(4096)
        4104
    """

    block: int = 2048
    exact = False

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block must be at least 1, not {self.block}")

    def nbytes(self, n: int) -> int:
        return n + FP32 * self._blocks(n)

    def _blocks(self, n: int) -> int:
        return -(-n // self.block)

    def _bounds(self, z: Tensor, n: int) -> Tensor:
        starts = torch.arange(0, n, self.block, dtype=torch.int64, device=z.device)
        return torch.cat([starts, torch.tensor([n], dtype=torch.int64, device=z.device)])

    def encode_(self, z: Vector, factor: float, section: Bytes) -> Vector:
        x, bounds = z * factor, self._bounds(z, z.numel())
        scales = kernels.of(z).selection.moments(x, bounds).largest
        codes, residual = kernels.of(z).quantize.uniform_encode(x, bounds, scales, LEVELS, 8, None)
        end = FP32 * scales.numel()
        section[:end].copy_(as_bytes(scales))
        section[end:].copy_(codes)
        return x - residual

    def decode(self, section: Bytes, n: int) -> Vector:
        end = FP32 * self._blocks(n)
        scales = section[:end].clone().view(torch.float32)
        total = torch.zeros(n, dtype=torch.float32, device=section.device)
        bounds = self._bounds(section, n)
        kernels.of(total).quantize.uniform_add_(section[end:].clone(), bounds, scales, LEVELS, 8, total)
        return total
