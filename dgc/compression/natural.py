"""Natural compression (Horvath, Ho, Horvath, Sahu, Canini, Richtarik 2019, arXiv 1905.10988, section 2).

    2**e <= |v| < 2**(e + 1):  send sign(v) 2**(e + 1) with probability |v| / 2**e - 1, else sign(v) 2**e

Unbiased, with a variance of at most |v|**2 / 8. A byte for each element: its sign, and the exponent below the
bucket's largest; 4 bytes for that one.

Differences from the paper: exponents have 7 bits in place of 8, so that magnitudes 2**-126 times the bucket's
largest, and less, are lost.
"""

from jaxtyping import Float32
from torch import Tensor

import dgc.kernels as kernels
from dgc.bucket import Bucket
from dgc.compression.coded import Coded, Codes


class Natural(Coded):
    """random: round at random, as the paper does; False: to the nearer power of two."""

    bits = 8

    def __init__(self, random: bool = True, error_feedback: bool = False, seed: int = 0):
        super().__init__(error_feedback, seed)
        self.random = random

    def nbytes(self, bucket: Bucket) -> int:
        return 4 + bucket.numel

    def encode(self, v: Float32[Tensor, "n"], bucket: Bucket) -> tuple[Codes, Float32[Tensor, "n"]]:
        return kernels.quantizers_of(v).natural_encode(v, self.noise(bucket) if self.random else None)

    def add_(self, codes: Codes, bucket: Bucket, total: Float32[Tensor, "n"]) -> None:
        kernels.quantizers_of(total).natural_add_(codes, total)
