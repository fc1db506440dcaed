"""TernGrad (Wen, Xu, Yan, Wu, Wang, Chen, Li 2017, arXiv 1705.07878, Algorithm 1 and section 3.3).

    s = max |g|;  send s sign(g_i) b_i,  b_i = 1 with probability |g_i| / s, else 0

for each tensor. The result is unbiased. Gradients are first clipped to `clip` standard deviations, which lowers s.

Differences from the paper: Ranks gather all codes, and s of each tensor differs between ranks. In the paper a
parameter server lets the ranks share the largest s. Error feedback is not in the paper; with it, the clipped part
is kept as well.
"""

from jaxtyping import Int64
from torch import Tensor

from dgc.arguments import checked
from dgc.compression.quantized.uniform import UniformCompressor
from dgc.kernels import Moments


@checked
class TernGradCompressor(UniformCompressor):
    """Ternary gradients (Wen et al. 2017, arXiv 1705.07878, Algorithm 1 and section 3.3).

    Args:
        clip (float, optional): clipping limit in standard deviations, 2.5 in the paper; None for no clipping.
        error_feedback (bool): keep what a step does not send, including the clipped part; not in the paper.
        seed (int): seed of the random choice.

    Raises:
        ValueError: if clip is not positive.
    """

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
        # if the deviation is 0, all elements are equal and none is clipped
        limit = (self.clip * deviation).where(deviation > 0, moments.largest.double())
        return moments.largest.double().minimum(limit)
