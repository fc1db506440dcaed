"""Random-k and random block with a shared seed (Stich, Cordonnier, Jaggi 2018, arXiv 1809.07599; Vogels,
Karimireddy, Jaggi 2019, arXiv 1905.13727, appendix on other compressors).

From each tensor of d elements all ranks send the values of the same k = ceil(D d) elements, with an all-reduce:

    random k      one element from each of k stretches of nearly equal length
    random block  k consecutive elements from a random start, with wrap-around

Without error feedback, sent values are divided by their probability, so that the expected value is v.
Payload of a bucket in bytes: 4 sum of k (fp16: 2), and 24 for a header.

Differences from the paper: Random k takes one element from each stretch, not any k elements.
"""

from typing import TypeAlias

import torch
from jaxtyping import Int64
from torch import Tensor

from dgc.core.arguments import checked
from dgc.core.bucket import Bucket
from dgc.core.dense import place_of_mean
from dgc.core.error_feedback import ErrorFeedbackCompressor, Mean, clone
from dgc.core.protocol import Position, Vector, check_choice, fraction_of
from dgc.core.state import State
from dgc.sparse.payloads import CastValues
from dgc.sparse.selectors.selector import share

Chosen: TypeAlias = tuple[Int64[Tensor, "k"], Int64[Tensor, "k"] | float]


@checked
class RandomKCompressor(ErrorFeedbackCompressor):
    """Random k: one element from each of k stretches of a tensor (Stich et al. 2018, arXiv 1809.07599).

    Args:
        compress_ratio (float): fraction of elements sent, D; above 1 the factor saved.
        values (str): dtype of the payload, "fp32" or "fp16".
        error_feedback, seed: as `ErrorFeedbackCompressor`.

    Raises:
        ValueError: if compress_ratio is not positive or values is another dtype.
    """

    def __init__(self, compress_ratio: float, error_feedback: bool = True, values: str = "fp32", seed: int = 0):
        check_choice(("fp32", "fp16"), values=values)
        super().__init__(error_feedback, seed)
        self._ratio = fraction_of(compress_ratio=compress_ratio)
        self._cast = CastValues(values)

    @property
    def compress_ratio(self) -> float:
        return self._ratio

    def choose(self, numel: int, k: int, generator: torch.Generator) -> Chosen:
        """Returns (ascending indices into a tensor of `numel` elements, inverse probability of each)."""
        edges = torch.arange(k + 1, dtype=torch.int64) * numel // k
        lengths = edges.diff()
        within = (torch.rand(k, generator=generator, dtype=torch.float64) * lengths).long()
        return edges[:-1] + within.minimum(lengths - 1), lengths

    def exchange(self, bucket: Bucket, state: State, v: Vector, first_nonfinite: Position) -> Mean:
        generator = torch.Generator().manual_seed(self.noise(bucket, state, same_on_all_ranks=True))
        parts, factors = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.float32)]
        for s in bucket.segments:
            if s.numel:
                k = share(s.numel, self._ratio)
                chosen, factor = self.choose(s.numel, k, generator)
                parts.append(chosen + s.offset)
                factors.append(torch.ones(k, dtype=torch.float32) * (1 if self.error_feedback else factor))
        indices, scale = torch.cat(parts).to(v.device), torch.cat(factors).to(v.device)
        values = self._cast.quantize(v[indices] * scale, state.size, bucket.dtype)
        kept = clone(v, state)
        kept[indices] -= values.float()
        received, flags = yield from self.envelope(bucket).reduce(values, first_nonfinite)
        mean = place_of_mean(bucket).zero_()
        mean[indices] = received.float()
        return mean, kept, flags


class RandomBlockCompressor(RandomKCompressor):
    """Random block: k consecutive elements from a random start (Vogels et al. 2019, arXiv 1905.13727).

    Arguments and errors are the same as for `RandomKCompressor`.
    """

    def choose(self, numel: int, k: int, generator: torch.Generator) -> Chosen:
        start = int(torch.randint(numel, (), generator=generator, dtype=torch.int64))
        wrapped = max(0, start + k - numel)
        stretches = (0, wrapped), (start, start + k - wrapped)
        return torch.cat([torch.arange(*stretch, dtype=torch.int64) for stretch in stretches]), numel / k
