"""Quantization to 8 bits by blocks: the nearest of 255 levels, with each block scaled by its largest magnitude, as
in block-wise quantization of optimizer states (Dettmers, Lewis, Shleifer, Zettlemoyer 2022, arXiv 2110.02861,
section 2.1).

Differences from the paper: Levels are evenly spaced. The paper's dynamic data type has finer levels near 0. Error
feedback compensates for the difference.
"""

from jaxtyping import Int64
from torch import Tensor

from dgc.arguments import checked
from dgc.compression.quantized.uniform import UniformCompressor
from dgc.kernels import Moments


@checked
class BlockwiseCompressor(UniformCompressor):
    """Block-wise quantization (Dettmers et al. 2022, arXiv 2110.02861, section 2.1).

    Args:
        bits (int): 8 for 255 levels, 4 for 15, or 2 for 3.
        block (int, optional): elements that share a scale; None for one scale per tensor.
        error_feedback (bool): keep what a step does not send and add it to the next gradient.

    Raises:
        ValueError: if bits or block is out of range.
    """

    def __init__(self, bits: int = 8, block: int | None = 2048, error_feedback: bool = True):
        super().__init__(bits, 2 ** (bits - 1) - 1, block, False, error_feedback, 0)

    def scales(self, moments: Moments, numels: Int64[Tensor, "S"]) -> Tensor:
        return moments.largest
