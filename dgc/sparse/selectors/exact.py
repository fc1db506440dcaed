"""Exact top-k by magnitude, of whole tensors or buckets, or of chunks of tensors.

The first three selectors differ only in their passes over the n elements of a bucket: all choose the same
elements. History changes only the time, so a resumed run does not need it.
"""

from dataclasses import dataclass

from jaxtyping import Float32
from torch import Tensor

import dgc.kernels as kernels
from dgc.core.arguments import checked
from dgc.kernels import Budget, PassInputs, Prediction, SparseVector
from dgc.sparse.selectors.selector import Quota, Selector, SelectorResult


@checked
@dataclass(frozen=True)
class Exact(Selector):
    """Exact top-k by magnitude, in a separate pass after u and v are updated.

    A sample of v suggests a lower bound for one more read. All of v is counted only if the lower bound is wrong.

    Args:
        per_bucket (bool): use one threshold for the whole bucket. By default each tensor has its own threshold, as
            in the paper (Lin et al. 2018, arXiv 1712.01887).
    """

    per_bucket: bool = False
    repeats = True

    def budget(self, quota: Quota) -> Budget:
        return quota.per_bucket if self.per_bucket else quota.per_tensor

    def choose(self, v: Float32[Tensor, "n"], quota: Quota, seed: int) -> SparseVector:
        return kernels.of(v).selection.select(v, self.budget(quota)).elements


@checked
@dataclass(frozen=True)
class Radix(Exact):
    """Exact top-k by magnitude, by radix digits: `radixSelect`, the baseline of studies of selection.

    It updates u and v, then finds the k-th largest element digit by digit: the bits of |v| as floats have the
    order of the numbers. Each of four reads counts 8 bits of the elements that share the digits found so far, and
    a fifth collects. `Exact` chooses the same in less time.

    Args:
        per_bucket (bool): see `Exact`.
    """

    def choose(self, v: Float32[Tensor, "n"], quota: Quota, seed: int) -> SparseVector:
        return kernels.of(v).selection.radix_select(v, self.budget(quota))


@checked
@dataclass(frozen=True)
class Predicted(Exact):
    """Exact top-k by magnitude, with a lower bound predicted from the last two thresholds. The default of
    DGCCompressor.

    The lower bound is known before the pass that updates u and v, and the pass collects the elements above it. The
    memory traffic is the same as for updating u and v alone: 20 bytes per element. With t1, t2 the last two exact
    thresholds:

        lower bound = margin * t1 * min(max(t1 / t2, 0.97), 1.2)

    If the lower bound is too high, or there is no history yet, the tensor is searched by a histogram of the upper
    bits of |v|, then of the lower bits of the elements with equal upper bits. On a CPU a sample of cache lines is
    counted first: its k-th largest element, less five deviations, is the lower bound of the pass.

    Args:
        per_bucket (bool): see `Exact`.
        margin (float): ratio of the lower bound to the predicted threshold, in (0, 1]. Error feedback without
            momentum varies more from step to step; 0.95 fails less often there.

    Raises:
        ValueError: if margin is out of range.

    Example:
        >>> compressor = DGCCompressor(0.001, DGCSGDMemory(0.9), selector=Predicted(margin=0.95))
    """

    margin: float = 0.98

    def __post_init__(self) -> None:
        if not 0 < self.margin <= 1:
            raise ValueError(f"margin is a fraction in (0, 1], not {self.margin}")

    def select(self, inputs: PassInputs, quota: Quota, seed: int) -> SelectorResult:
        kernel, budget, history = kernels.of(inputs.v).selection, self.budget(quota), quota.history
        lower_bounds = Prediction(history["t1"], history["t2"], self.margin) if history else None
        chosen = kernel.accumulate_and_select_(inputs, budget, lower_bounds)
        quota.history.update(t1=chosen.thresholds, t2=history.get("t1", chosen.thresholds))
        return SelectorResult(chosen.elements, chosen.first_nonfinite)


@checked
@dataclass(frozen=True)
class TopKPerChunk(Selector):
    """Exact top-k by magnitude of each chunk of a tensor (SparseLoCo, Sarfi et al. 2025, arXiv 2508.15706).

    A tensor of n elements, of which k are sent, has c = min(ceil(n / C), k) chunks of consecutive elements. With
    K_i = i k / c and E_i = K_i n / k, both rounded down, chunk i has the elements E_i .. E_(i+1) - 1, and its
    K_(i+1) - K_i largest are chosen. At a ratio of 1/64 these are 64 of each 4096.

    Every part of a tensor is then sent as often as every other, though its elements may be much smaller. The
    indices are spread evenly, and a chunk fits the fast memory of a GPU or the cache of a CPU. There the native
    kernels find a lower bound of its threshold: it is divided into 256 groups, and the largest magnitudes of k
    groups reach the bound.

    Differences from the paper: k / c need not be a whole number. Each chunk sends at least one element, so that
    none waits forever. A chunk has consecutive elements in memory, not a tile of a matrix.

    Args:
        chunk_size (int): elements of a chunk, C. Chunks are a little shorter if C does not divide the tensor, and
            longer where C elements would send less than one.

    Raises:
        ValueError: if chunk_size is less than 1.

    Example:
        >>> compression = SparseCompressor(64 / 4096, ResidualMemory(decay=0.95), selector=TopKPerChunk(4096))
    """

    chunk_size: int = 4096
    repeats = True

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be 1 element or more, not {self.chunk_size}")

    def choose(self, v: Float32[Tensor, "n"], quota: Quota, seed: int) -> SparseVector:
        return kernels.of(v).selection.select(v, quota.per_chunk(self.chunk_size)).elements

    def select(self, inputs: PassInputs, quota: Quota, seed: int) -> SelectorResult:
        budget = quota.per_chunk(self.chunk_size)
        chosen = kernels.of(inputs.v).selection.accumulate_and_select_(inputs, budget, None)
        return SelectorResult(chosen.elements, chosen.first_nonfinite)
