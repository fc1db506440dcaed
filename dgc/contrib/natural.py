"""Natural compression (Horvath, Ho, Horvath, Sahu, Canini, Richtarik 2019, arXiv 1905.10988, section 2).

    2**e <= |v| < 2**(e + 1):  send sign(v) 2**(e + 1) with probability |v| / 2**e - 1, else sign(v) 2**e

The result is unbiased, with a variance of at most |v|**2 / 8.

Payload of a bucket of n elements in bytes: 24 + 4 + n, rounded up to 8. The codes are an int32 E, then one byte
for each element: the sign in the highest bit, below it c = 1 .. 127 for 2**(E - 127 + c), or 0 for zero. E is
above the exponent of the bucket's largest element, and from 0 to 127, so that no power overflows.

Differences from the paper: Exponents have 7 bits in place of 8. Magnitudes at or below 2**-126 times the bucket's
largest are lost. Error feedback is not in the paper.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dgc.core.arguments import checked
from dgc.core.bucket import Bucket
from dgc.core.error_feedback import AllGatherCompressor, Codes
from dgc.core.protocol import Vector
from dgc.core.state import State

MAGNITUDE = 0x7FFFFFFF  # the bits of a float without its sign
MANTISSA = 1 << 23
LARGEST_EXPONENT = 254  # with the bias of 127


@checked
class NaturalCompressor(AllGatherCompressor):
    """Natural compression: random rounding to powers of two (Horvath et al. 2019, arXiv 1905.10988, section 2).

    Args:
        random (bool): stochastic rounding, as in the paper; False rounds to the nearest power of two.
        error_feedback, seed: as `ErrorFeedbackCompressor`.
    """

    bits = 8

    def __init__(self, random: bool = True, error_feedback: bool = False, seed: int = 0):
        super().__init__(error_feedback, seed)
        self.random = random

    def nbytes(self, bucket: Bucket) -> int:
        return 4 + bucket.numel

    def encode(self, bucket: Bucket, state: State, v: Vector) -> tuple[Codes, Vector]:
        bits = v.view(torch.int32) & MAGNITUDE
        largest = bits.amax() if bits.numel() else bits.new_zeros(())
        top = ((largest >> 23) - 126).clamp(0, 127)
        # a carry out of the mantissa increments the exponent
        exponent = (bits + self.added(bucket, state, v) >> 23).clamp(max=LARGEST_EXPONENT)
        c = (exponent - top).clamp(min=0)
        negative = (v < 0) & (c > 0)
        codes = torch.cat([top.view(1).view(torch.uint8), (c | negative.int() << 7).to(torch.uint8)])
        sent = signed(torch.where(c > 0, exponent << 23, 0), negative)
        return codes, torch.sub(v, sent, out=state.scratch.get("errors"))

    def added(self, bucket: Bucket, state: State, v: Vector) -> Tensor | int:
        """What is added to the mantissas before they are cut off."""
        if not self.random:
            return MANTISSA // 2
        generator = torch.Generator(v.device).manual_seed(self.noise(bucket, state))
        return torch.randint(MANTISSA, v.shape, generator=generator, dtype=torch.int32, device=v.device)

    def mean_(self, bucket: Bucket, state: State, codes: Sequence[Codes], mean: Vector) -> None:
        mean.zero_()
        for own in codes:
            top = own[:4].clone().view(torch.int32).clamp(0, 127)
            c = own[4:].int() & 127
            mean += signed(torch.where(c > 0, c + top << 23, 0), own[4:] > 127)
        mean /= state.size


def signed(bits: Tensor, negative: Tensor) -> Tensor:
    """The floats with these magnitudes, as int32, and signs."""
    magnitudes = bits.view(torch.float32)
    return torch.where(negative, -magnitudes, magnitudes)
