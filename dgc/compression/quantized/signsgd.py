"""signSGD and Signum with majority vote (Bernstein, Wang, Azizzadenesheli, Anandkumar 2018, arXiv 1802.04434;
Bernstein, Zhao, Azizzadenesheli, Anandkumar 2019, arXiv 1810.05291).

    signSGD   send sign(g);  result = sign(sum over ranks)
    Signum    m = beta m + (1 - beta) g;  send sign(m)

The stored state is e = beta v with v = g + e: v equals m / (1 - beta) and has the signs of m. The result is -1, 0
(a tie) or 1 for every element. Learning rates must therefore be much smaller than for SGD: the papers use 1e-4.

Codes: for each tensor of d elements 4 bytes, a 1 unless all elements are 0, and its signs, 4 ceil(d/32) bytes.

Differences from the papers: An element of 0 votes as a negative one. If the whole tensor is 0 on a rank, that rank
does not vote.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float32
from torch import Tensor

import dgc.kernels as kernels
from dgc.arguments import checked
from dgc.bucket import Bucket
from dgc.compression.all_gather import AllGatherCompressor, Codes, join, split_all


@checked
class SignSGDCompressor(AllGatherCompressor):
    """signSGD and Signum with majority vote (Bernstein et al. 2018, arXiv 1802.04434; 2019, arXiv 1810.05291).

    Args:
        momentum (float): beta of Signum, in [0, 1); 0 is signSGD, which keeps no state.

    Raises:
        ValueError: if momentum is out of range.
    """

    bits = 1

    def __init__(self, momentum: float = 0.0):
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is from 0 to below 1, not {momentum}")
        super().__init__(error_feedback=momentum > 0)
        self.momentum = momentum

    def nbytes(self, bucket: Bucket) -> int:
        return sum(4 + 4 * -(-s.numel // 32) for s in bucket.segments)

    def encode(self, v: Float32[Tensor, "n"], bucket: Bucket) -> tuple[Codes, Float32[Tensor, "n"]]:
        bounds = self.bounds(bucket)
        one = (kernels.of(v).selection.moments(v, bounds).largest > 0).float()
        codes, _ = kernels.of(v).quantize.sign_encode(v, bounds, torch.zeros_like(one), -one, one)
        return join(one, codes), v * self.momentum

    def mean_(self, codes: Sequence[Codes], bucket: Bucket, mean: Float32[Tensor, "n"]) -> None:
        """Writes the majority, the sign of the sum."""
        ones, signs = split_all(codes, len(bucket.segments))
        lows = [-own for own in ones]
        kernels.of(mean).quantize.sign_mean_(signs, self.bounds(bucket), lows, ones, None, 1, mean)
        mean.sign_()
