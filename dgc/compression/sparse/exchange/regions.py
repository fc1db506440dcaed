"""The division of a bucket into regions, one per rank, of equal size whatever the tensors look like.

Blocks of B elements are dealt to the N ranks in turn. Element i belongs to the region

    r = (i // B) mod N      at the place      p = (i // (B N)) B + i mod B

B is a prime number that divides the dimensions of few layers. If B N divided the length of a tensor's rows, a
region would hold the same columns of every row, and columns differ in their magnitudes. B is small, because large
elements are close together, in filters and rows: of 149 elements selected from 14,664 on 16 ranks, 21 % find their
region's payload full with B = 61 and 5 % with B = 13. The map keeps the order of elements within a region, and so
the tensors of a bucket are adjacent in each region.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from dgc.compression.sparse.exchange.vectors import BEYOND, live
from dgc.kernels import SparseVector

BLOCK = 13


@dataclass(frozen=True, eq=False)
class Regions:
    """Regions of a bucket.

    Attributes:
        size: Number of regions.
        numel: Number of elements of the largest region, the first.
        bounds: For each region, the bounds of the tensors within it.
    """

    size: int
    numel: int
    bounds: Int64[Tensor, "regions bounds"]

    def index_of(self, place: Int64[Tensor, "..."], region: Int64[Tensor, "..."] | int) -> Int64[Tensor, "..."]:
        """The index within the bucket."""
        return place // BLOCK * (BLOCK * self.size) + region * BLOCK + place % BLOCK

    def deal(self, elements: SparseVector, capacity: int) -> list[SparseVector]:
        """The elements of each region by place: at most `capacity` ones, the largest, of equal ones the first."""
        index, values = elements.indices.long(), elements.values
        numbers = torch.arange(index.numel(), dtype=torch.int64, device=index.device)
        region = torch.where(live(elements), index // BLOCK % self.size, self.size)
        # floats of one sign have the order of their bits
        by_magnitude = (region << 32) - values.abs().view(torch.int32)
        order = by_magnitude.argsort(stable=True)
        slots = torch.empty_like(numbers)
        slots[order] = numbers - self._starts(region)[region[order]]
        region = torch.where(slots < capacity, region, self.size)
        order = region.argsort(stable=True)  # within a region by index, and so by place
        region, index = region[order], index[order]
        slots = numbers - self._starts(region)[region]
        # one more slot, at the end, takes what is left out
        at = torch.where(region < self.size, region * capacity + slots, self.size * capacity)
        places = torch.zeros(self.size * capacity + 1, dtype=torch.int32, device=index.device)
        places[at] = (index // (BLOCK * self.size) * BLOCK + index % BLOCK).to(torch.int32)
        dealt = torch.zeros(self.size * capacity + 1, dtype=torch.float32, device=index.device)
        dealt[at] = values[order]
        rows = (table[:-1].view(self.size, capacity) for table in (places, dealt))
        counts = self._counts(region)[:-1].to(torch.int32)
        return [SparseVector(*part) for part in zip(*rows, counts, strict=True)]

    def join(self, parts: Sequence[SparseVector]) -> SparseVector:
        """One vector of the bucket from one of each region. It does not wait for the device."""
        index, values = self._of_bucket(parts)
        index, order = index.view(-1).sort()
        indices = torch.where(index < BEYOND, index, 0).to(torch.int32)
        count = torch.stack([p.count for p in parts]).sum(dtype=torch.int32)
        return SparseVector(indices, values.view(-1)[order], count)

    def _of_bucket(
        self, parts: Sequence[SparseVector]
    ) -> tuple[Int64[Tensor, "regions capacity"], Float32[Tensor, "regions capacity"]]:
        """(indices within the bucket, values) of each region's vector; BEYOND and 0 past its end."""
        places, counts = torch.stack([p.indices for p in parts]).long(), torch.stack([p.count for p in parts])
        region = torch.arange(self.size, dtype=torch.int64, device=places.device).unsqueeze(1)
        numbers = torch.arange(places.shape[1], dtype=torch.int64, device=places.device)
        valid, values = numbers < counts.unsqueeze(1), torch.stack([p.values for p in parts])
        return torch.where(valid, self.index_of(places, region), BEYOND), torch.where(valid, values, 0.0)

    def _counts(self, region: Int64[Tensor, "k"]) -> Int64[Tensor, "regions"]:
        """Number of elements of each region, and of those that are left out."""
        counts = torch.zeros(self.size + 1, dtype=torch.int64, device=region.device)
        return counts.index_add_(0, region, torch.ones_like(region))

    def _starts(self, region: Int64[Tensor, "k"]) -> Int64[Tensor, "regions"]:
        counts = self._counts(region)
        return counts.cumsum(0) - counts


def largest_region(numel: int, size: int) -> int:
    """Number of elements of the largest of `size` regions."""
    turns, rest = divmod(numel, BLOCK * size)
    return turns * BLOCK + min(rest, BLOCK)


def divide_into_regions(bounds: Int64[Tensor, "bounds"], numel: int, size: int) -> Regions:
    """Divide a bucket. bounds: those of its tensors."""
    first = BLOCK * torch.arange(size, dtype=torch.int64, device=bounds.device).unsqueeze(1)
    turns, rest = bounds // (BLOCK * size), bounds % (BLOCK * size)
    return Regions(size, largest_region(numel, size), turns * BLOCK + (rest - first).clamp(0, BLOCK))
