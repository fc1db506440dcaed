"""TernGrad (Wen, Xu, Yan, Wu, Wang, Chen, Li 2017, arXiv 1705.07878, Algorithm 1 and section 3.3).

    s = max |g|;  send s sign(g_i) b_i,  b_i = 1 with probability |g_i| / s, else 0

for each tensor: unbiased. Gradients are first cut to `clip` standard deviations, which lowers s.

Differences from the paper: ranks gather all codes, and each tensor's s is its own on every rank, where a parameter
server lets them share the largest. With error feedback, which the paper does not have, what clipping cuts is kept
as well.
"""

from jaxtyping import Int64
from torch import Tensor

from dgc.compression.uniform import Uniform
from dgc.kernels import Moments


class TernGrad(Uniform):
    """clip: in standard deviations, 2.5 in the paper; None: not at all."""

    def __init__(self, clip: float | None = 2.5, error_feedback: bool = False, seed: int = 0):
        if clip is not None and not clip > 0:
            raise ValueError(f"clip is a positive number of standard deviations or None, not {clip}")
        super().__init__(2, 1, None, True, error_feedback, seed)
        self.clip = clip

    def scales(self, moments: Moments, numels: Int64[Tensor, "S"]) -> Tensor:
        if self.clip is None:
            return moments.largest
        n = numels.clamp(min=1)
        deviation = (moments.squares / n - (moments.sums / n) ** 2).clamp(min=0).sqrt()
        # a deviation of 0 is that of equal elements: nothing stands out
        limit = (self.clip * deviation).where(deviation > 0, moments.largest.double())
        return moments.largest.double().minimum(limit)
