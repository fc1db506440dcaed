"""Exact top-k by magnitude within chunks of each tensor (SparseLoCo: Sarfi et al. 2025, arXiv 2508.15706).

A tensor of n elements, of which k are sent, has c = min(ceil(n / C), k) chunks of consecutive elements. With
K_i = i k / c and E_i = K_i n / k, both rounded down, chunk i has the elements E_i .. E_(i+1) - 1, and its
K_(i+1) - K_i largest are chosen. At a ratio of 1/64 these are 64 of each 4096.

Every part of a tensor is then sent as often as every other, though its elements may be much smaller. The indices
are spread evenly, and a chunk fits the fast memory of a GPU.

Differences from the paper: k / c need not be a whole number. Each chunk sends at least one element, so that none
waits forever. A chunk has consecutive elements in memory, not a tile of a matrix.
"""

from dataclasses import dataclass

from jaxtyping import Float32
from torch import Tensor

import dgc.kernels as kernels
from dgc.arguments import checked
from dgc.kernels import PassInputs, SparseVector
from dgc.selection.selector import Plan, Selector, SelectorResult


@checked
@dataclass(frozen=True)
class TopKPerChunk(Selector):
    """Exact top-k by magnitude of each chunk of a tensor (SparseLoCo, Sarfi et al. 2025, arXiv 2508.15706).

    Args:
        chunk_size (int): elements of a chunk, C. Chunks are a little shorter if C does not divide the tensor, and
            longer where C elements would send less than one.

    Raises:
        ValueError: if chunk_size is less than 1.

    Example:
        >>> compression = SparseCompressor(64 / 4096, ResidualMemory(decay=0.95), selector=TopKPerChunk(4096))
    """

    chunk_size: int = 4096

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be 1 element or more, not {self.chunk_size}")

    def choose(self, v: Float32[Tensor, "n"], plan: Plan, seed: int) -> SparseVector:
        return kernels.of(v).selection.select(v, plan.per_chunk(self.chunk_size)).elements

    def select(self, inputs: PassInputs, plan: Plan, seed: int) -> SelectorResult:
        budget = plan.per_chunk(self.chunk_size)
        chosen = kernels.of(inputs.v).selection.accumulate_and_select_(inputs, budget, None)
        return SelectorResult(chosen.elements, chosen.first_nonfinite)
