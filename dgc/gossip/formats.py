"""Encodings of a vector of n elements for messages between ranks.

Exact    fp32, 4 bytes per element
Half     fp16 or bf16, scaled by a power of two to avoid overflow: 2 bytes per element, and 4
Int8     round(x / scale) with scale = the block's largest magnitude / 127: a byte per element, 4 per block

The sender keeps the rounding errors of a message (`dgc.gossip.pushsum.sgp`), so the sum over ranks is preserved.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

import dgc.kernels as kernels
from dgc.comm.requests import as_bytes

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LEVELS = 127
FP32 = 4  # bytes

Vector = Float32[Tensor, "n"]
Bytes = UInt8[Tensor, "nbytes"]


@runtime_checkable
class Message(Protocol):
    """An encoding of vectors with a fixed size."""

    @property
    def exact(self) -> bool:
        """Whether nothing is rounded."""
        ...

    def nbytes(self, n: int) -> int: ...

    def encode_(self, z: Vector, factor: float, section: Bytes) -> Vector:
        """Writes factor * z into a section of `nbytes(n)` bytes. Returns the result of `decode`."""
        ...

    def decode(self, section: Bytes, n: int) -> Vector:
        """Decodes a section, in its own memory if possible."""
        ...


@dataclass(frozen=True)
class Exact:
    """fp32 messages, without rounding."""

    exact = True

    def nbytes(self, n: int) -> int:
        return FP32 * n

    def encode_(self, z: Vector, factor: float, section: Bytes) -> Vector:
        return torch.mul(z, factor, out=section.view(torch.float32))

    def decode(self, section: Bytes, n: int) -> Vector:
        return section.view(torch.float32)


@dataclass(frozen=True)
class Half:
    """16-bit messages with one scale.

    Args:
        dtype (str): "fp16" or "bf16".

    Raises:
        ValueError: if dtype is another one.
    """

    dtype: str = "fp16"
    exact = False

    def __post_init__(self) -> None:
        if self.dtype not in HALVES:
            raise ValueError(f"Half is one of {', '.join(HALVES)}, not {self.dtype!r}")

    def nbytes(self, n: int) -> int:
        return 2 * n + FP32

    def encode_(self, z: Vector, factor: float, section: Bytes) -> Vector:
        values, scale = kernels.of(z).codec.cast_encode_(z * factor, HALVES[self.dtype], section[FP32:])
        section[:FP32].copy_(as_bytes(scale.view(1)))
        return values

    def decode(self, section: Bytes, n: int) -> Vector:
        scale = section[:FP32].clone().view(torch.float32)
        return section[FP32:].clone().view(HALVES[self.dtype]).float() * scale


@dataclass(frozen=True)
class Int8:
    """8-bit messages with one scale per block.

    Args:
        block (int): elements that share a scale.

    Raises:
        ValueError: if block is less than 1.
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
        scaled = FP32 * scales.numel()
        section[:scaled].copy_(as_bytes(scales))
        section[scaled:].copy_(codes)
        return x - residual

    def decode(self, section: Bytes, n: int) -> Vector:
        scaled = FP32 * self._blocks(n)
        scales = section[:scaled].clone().view(torch.float32)
        total = torch.zeros(n, dtype=torch.float32, device=section.device)
        bounds = self._bounds(section, n)
        kernels.of(total).quantize.uniform_add_(section[scaled:].clone(), bounds, scales, LEVELS, 8, total)
        return total
