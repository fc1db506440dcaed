"""EF-signSGD: scaled signs with error feedback (Karimireddy, Rebjock, Stich, Jaggi 2019, arXiv 1901.09847,
Algorithm 1; Sign+Norm in Vogels et al. 2019).

    p = g + e;  send (|p|_1 / d) sign(p) of each tensor of d elements;  e = p - what was sent

Codes: 4 bytes of scale for each tensor, then its signs, 4 ceil(d/32) bytes.

Differences from the paper: e has the unit of gradients and is not scaled by the learning rate. An element of 0 is
sent as a negative one.
"""

from collections.abc import Sequence

from jaxtyping import Float32
from torch import Tensor

import dgc.kernels as kernels
from dgc.bucket import Bucket
from dgc.compression.all_gather import AllGatherCompressor, Codes, join, split_all


class ScaledSignCompressor(AllGatherCompressor):
    """Signs scaled by the mean magnitude, with error feedback (Karimireddy et al. 2019, arXiv 1901.09847,
    Algorithm 1).

    Args:
        error_feedback (bool): keep what a step does not send and add it to the next gradient, as in the paper.
        seed (int): not used.
    """

    bits = 1

    def nbytes(self, bucket: Bucket) -> int:
        return sum(4 + 4 * -(-s.numel // 32) for s in bucket.segments)

    def encode(self, v: Float32[Tensor, "n"], bucket: Bucket) -> tuple[Codes, Float32[Tensor, "n"]]:
        bounds = self.bounds(bucket)
        scales = (kernels.of(v).selection.moments(v, bounds).magnitudes / bounds.diff().clamp(min=1)).float()
        cuts = scales.new_zeros(scales.shape)
        codes, kept = kernels.of(v).quantize.sign_encode(v, bounds, cuts, -scales, scales)
        return join(scales, codes), kept

    def mean_(self, codes: Sequence[Codes], bucket: Bucket, mean: Float32[Tensor, "n"]) -> None:
        scales, signs = split_all(codes, len(bucket.segments))
        lows = [-own for own in scales]
        kernels.of(mean).quantize.sign_mean_(signs, self.bounds(bucket), lows, scales, None, self.size, mean)
