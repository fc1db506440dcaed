"""Base class of compressors that round to evenly spaced levels.

    level = floor(L |v| / s + r),  value = sign(v) s level / L

s is a scale of each block. r is random in [0, 1), which makes the expected value v, or 1/2, which rounds to
nearest.

Codes: 4 bytes of scale for each block of d elements, then ceil(bits d / 8) bytes, bits = 2, 4 or 8 with the sign.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.bucket import Bucket
from dgc.compression.all_gather import AllGatherCompressor, Codes, join, split_all
from dgc.kernels import Moments


class UniformCompressor(AllGatherCompressor):
    """Base class of compressors that round to evenly spaced levels.

    Args:
        bits (int): bits per element with the sign: 2, 4 or 8.
        levels (int): number of positive levels, L.
        block (int, optional): elements that share a scale; None for one scale per tensor. A tensor's last block
            may be shorter.
        random (bool): stochastic rounding; False rounds to nearest.
        error_feedback (bool): keep what a step does not send and add it to the next gradient.
        seed (int): seed of the rounding.

    Raises:
        ValueError: if bits or block is out of range.
    """

    bits = 8

    def __init__(self, bits: int, levels: int, block: int | None, random: bool, error_feedback: bool, seed: int):
        if bits not in (2, 4, 8):
            raise ValueError(f"bits must be 2, 4 or 8, not {bits}")
        if block is not None and block < 1:
            raise ValueError(f"block must be at least 1, not {block}")
        super().__init__(error_feedback, seed)
        self.bits, self.levels, self.block, self.random = bits, levels, block, random
        self._blocks: dict[str, Int64[Tensor, "blocks"]] = {}

    @abstractmethod
    def scales(self, moments: Moments, numels: Int64[Tensor, "S"]) -> Tensor:
        """The scale of each block. Larger magnitudes are clipped to it."""
        ...

    def plan(self, bucket: Bucket, size: int, rank: int) -> None:
        super().plan(bucket, size, rank)
        edges: list[int] = []
        for s in bucket.segments:
            edges += range(s.offset, s.offset + s.numel, self.block or max(1, s.numel))
        self._blocks[bucket.name] = torch.tensor([*edges, bucket.numel], dtype=torch.int64, device=bucket.device)

    def nbytes(self, bucket: Bucket) -> int:
        total = 0
        for s in bucket.segments:
            block = self.block or max(1, s.numel)
            whole, rest = divmod(s.numel, block)
            total += whole * (4 + -(-block * self.bits // 8)) + (4 + -(-rest * self.bits // 8) if rest else 0)
        return total

    def encode(self, v: Float32[Tensor, "n"], bucket: Bucket) -> tuple[Codes, Float32[Tensor, "n"]]:
        blocks = self._blocks[bucket.name]
        scales = self.scales(kernels.of(v).selection.moments(v, blocks), blocks.diff()).float()
        seed = self.noise(bucket) if self.random else None
        quantizers = kernels.of(v).quantize
        codes, kept = quantizers.uniform_encode(v, blocks, scales, self.levels, self.bits, seed)
        return join(scales, codes), kept

    def mean_(self, codes: Sequence[Codes], bucket: Bucket, mean: Float32[Tensor, "n"]) -> None:
        blocks = self._blocks[bucket.name]
        scales, fields = split_all(codes, blocks.numel() - 1)
        quantizers = kernels.of(mean).quantize
        quantizers.uniform_mean_(fields, blocks, scales, self.levels, self.bits, self.size, mean)
