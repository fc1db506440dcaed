"""Indices of 12 bits within chunks of 4096 elements, as of SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706).

Chunk c of the bucket has the elements 4096 c .. 4096 c + 4095. A section has

    2 bytes for each chunk     number of its elements that are sent
    12 bits for each element   its index modulo 4096, in ascending order; two in 3 bytes, the first one low

Bytes for k of n elements: 2 ceil(n / 4096) + 3 ceil(k / 2), rounded up to a multiple of 4. With 64 elements of
each chunk these are 12.25 bits per element.

A Rice code of the same indices needs 7.5 bits (`RiceIndices`). This one has a fixed length for any selection, and
every element is found without the ones before it.

Differences from the paper: Chunks are those of the bucket and not of a tensor, and their numbers of elements are
sent, 0.25 bits per element. So any selection has a code, also one of chunks that cross bounds of tensors.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int32, UInt8
from torch import Tensor

from dgc.kernels.codec.protocol import Codec
from dgc.kernels.selection.protocol import SparseVector
from dgc.wire.indices import IndexSection, or_plain

BITS = 12
CHUNK = 1 << BITS


@dataclass(frozen=True)
class ChunkSection:
    """Numbers of elements by chunk, then indices within chunks."""

    capacity: int
    numel: int

    @property
    def chunks(self) -> int:
        return -(-self.numel // CHUNK)

    @property
    def pairs(self) -> int:
        return (self.capacity + 1) // 2

    @property
    def nbytes(self) -> int:
        return -(-(2 * self.chunks + 3 * self.pairs) // 4) * 4

    def encode_(self, codec: Codec, selection: SparseVector, section: UInt8[Tensor, "nbytes"]) -> SparseVector:
        position = torch.arange(self.capacity, dtype=torch.int32, device=section.device)
        live = position < selection.count
        chunk = torch.where(live, selection.indices >> BITS, self.chunks).long()  # the last one: not sent
        counts = torch.zeros(self.chunks + 1, dtype=torch.int16, device=section.device)
        counts.index_add_(0, chunk, torch.ones_like(chunk, dtype=torch.int16))
        section[: 2 * self.chunks] = counts[: self.chunks].view(torch.uint8)
        low = torch.zeros(2 * self.pairs, dtype=torch.int32, device=section.device)
        low[: self.capacity] = torch.where(live, selection.indices & (CHUNK - 1), 0)
        pair = low[0::2] | (low[1::2] << BITS)
        within = section[2 * self.chunks :][: 3 * self.pairs].view(self.pairs, 3)
        for byte in range(3):
            within[:, byte] = ((pair >> (8 * byte)) & 255).to(torch.uint8)
        return selection

    def decode(
        self, codec: Codec, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""]
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        counts = section[: 2 * self.chunks].view(torch.int16).long()
        ends = counts.clamp(0, CHUNK).cumsum(0)
        within = section[2 * self.chunks :][: 3 * self.pairs].view(self.pairs, 3).long()
        pair = within[:, 0] | (within[:, 1] << 8) | (within[:, 2] << 16)
        low = torch.stack((pair & (CHUNK - 1), pair >> BITS), 1).view(-1)[: self.capacity]
        position = torch.arange(self.capacity, dtype=torch.int64, device=section.device)
        chunk = torch.searchsorted(ends, position, right=True)
        given, live = chunk * CHUNK + low, position < count
        ordered = given < self.numel
        ordered[1:] &= given[1:] > given[:-1]
        as_counted = (counts >= 0).all() & (counts <= CHUNK).all() & (ends[-1] == count)
        valid = (ordered | ~live).all() & as_counted & (count >= 0) & (count <= self.capacity)
        return torch.where(live & ordered, given, 0).to(torch.int32), valid


@dataclass(frozen=True)
class ChunkIndices:
    """Indices of 12 bits within chunks of 4096 elements of the bucket: a fixed length, 12.25 bits at 64 of 4096.

    Example:
        >>> memory, selector = ResidualMemory(decay=0.95), TopKPerChunk(4096)
        >>> compression = SparseCompressor(64 / 4096, memory, selector, TwoBitValues(), ChunkIndices())
    """

    def plan(self, capacity: int, numel: int) -> IndexSection:
        return or_plain(ChunkSection, capacity, numel)
