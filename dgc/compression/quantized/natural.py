"""Natural compression (Horvath, Ho, Horvath, Sahu, Canini, Richtarik 2019, arXiv 1905.10988, section 2).

    2**e <= |v| < 2**(e + 1):  send sign(v) 2**(e + 1) with probability |v| / 2**e - 1, else sign(v) 2**e

The result is unbiased, with a variance of at most |v|**2 / 8. Each element takes one byte: its sign, and its
exponent relative to the bucket's largest. The largest exponent takes 4 bytes per bucket.

Differences from the paper: Exponents have 7 bits in place of 8. Magnitudes at or below 2**-126 times the bucket's
largest are lost.
"""

from collections.abc import Sequence

from jaxtyping import Float32
from torch import Tensor

import dgc.kernels as kernels
from dgc.arguments import checked
from dgc.bucket import Bucket
from dgc.compression.all_gather import AllGatherCompressor, Codes


@checked
class NaturalCompressor(AllGatherCompressor):
    """Natural compression: rounding to powers of two (Horvath et al. 2019, arXiv 1905.10988, section 2).

    Args:
        random (bool): stochastic rounding, as in the paper; False rounds to the nearest power of two.
        error_feedback (bool): keep what a step does not send; not in the paper.
        seed (int): seed of the rounding.
    """

    bits = 8

    def __init__(self, random: bool = True, error_feedback: bool = False, seed: int = 0):
        super().__init__(error_feedback, seed)
        self.random = random

    def nbytes(self, bucket: Bucket) -> int:
        return 4 + bucket.numel

    def encode(self, v: Float32[Tensor, "n"], bucket: Bucket) -> tuple[Codes, Float32[Tensor, "n"]]:
        return kernels.of(v).quantize.natural_encode(v, self.noise(bucket) if self.random else None)

    def mean_(self, codes: Sequence[Codes], bucket: Bucket, mean: Float32[Tensor, "n"]) -> None:
        kernels.of(mean).quantize.natural_mean_(codes, self.size, mean)
