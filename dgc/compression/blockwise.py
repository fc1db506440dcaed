"""8 bits by blocks: the nearest of 255 levels, each block scaled by its largest magnitude, as block-wise
quantization of optimizer states does (Dettmers, Lewis, Shleifer, Zettlemoyer 2022, arXiv 2110.02861, section 2.1).

Differences from the paper: levels are evenly spaced, where its dynamic data type has finer ones near 0; error
feedback makes up for that.
"""

from jaxtyping import Int64
from torch import Tensor

from dgc.compression.uniform import Uniform
from dgc.kernels import Moments


class Blockwise(Uniform):
    """bits: 8, or 4 for 15 levels."""

    def __init__(self, bits: int = 8, block: int | None = 2048, error_feedback: bool = True):
        super().__init__(bits, 2 ** (bits - 1) - 1, block, False, error_feedback, 0)

    def scales(self, moments: Moments, numels: Int64[Tensor, "S"]) -> Tensor:
        return moments.largest
