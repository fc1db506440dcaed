"""TernGrad (Wen, Xu, Yan, Wu, Wang, Chen, Li 2017, arXiv 1705.07878, Algorithm 1 and section 3.3).

    s = max |g|;  send s sign(g_i) b_i,  b_i = 1 with probability |g_i| / s, else 0

for each tensor, unbiased. Gradients are first clipped to `clip` standard deviations, which lowers s.

Payload of a bucket in bytes: 24, and for each tensor of d elements 4 for s and ceil(d / 4) for the elements; in
sum rounded up to 8. An element has 2 bits: 0 for zero, 1 for s, 3 for -s, the first element in the lowest bits.

Differences from the paper: s of each tensor differs between ranks. In the paper a parameter server lets the ranks
share the largest s. With error feedback, which is not in the paper, the clipped part is kept as well.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dgc.core.arguments import checked
from dgc.core.bucket import Bucket
from dgc.core.error_feedback import AllGatherCompressor, Codes, clone
from dgc.core.protocol import Vector
from dgc.core.state import State


@checked
class TernGradCompressor(AllGatherCompressor):
    """TernGrad: random rounding to -s, 0 and s of each tensor (Wen et al. 2017, arXiv 1705.07878, Algorithm 1).

    Args:
        clip (float, optional): a positive limit in standard deviations, 2.5 in the paper; None for no clipping.
        error_feedback, seed: as `ErrorFeedbackCompressor`.

    Raises:
        ValueError: if clip is not positive.
    """

    bits = 2

    def __init__(self, clip: float | None = 2.5, error_feedback: bool = False, seed: int = 0):
        if clip is not None and not clip > 0:
            raise ValueError(f"clip is a positive number of standard deviations or None, not {clip}")
        super().__init__(error_feedback, seed)
        self.clip = clip

    def nbytes(self, bucket: Bucket) -> int:
        return sum(4 + -(-s.numel // 4) for s in bucket.segments if s.numel)

    def scale(self, x: Vector) -> Tensor:
        """s [1] of a tensor, to which larger magnitudes are clipped."""
        largest = x.abs().amax(0, keepdim=True)
        if self.clip is None:
            return largest
        limit = self.clip * x.double().std(correction=0)
        # if the deviation is 0, all elements are equal and none is clipped
        return torch.where(limit > 0, largest.double().minimum(limit), largest.double()).float()

    def encode(self, bucket: Bucket, state: State, v: Vector) -> tuple[Codes, Vector]:
        generator = torch.Generator(v.device).manual_seed(self.noise(bucket, state))
        kept, codes = clone(v, state), [torch.empty(0, dtype=torch.uint8, device=v.device)]
        for x, rest in zip(parts_of(bucket, v), parts_of(bucket, kept), strict=True):
            scale = self.scale(x)
            r = torch.rand(x.shape, generator=generator, dtype=torch.float32, device=v.device)
            chosen = x.abs() / scale + r >= 1  # 0 / 0 is not
            fields = torch.where(chosen, torch.where(x < 0, 3, 1), 0)
            codes += [scale.view(torch.uint8), packed(fields)]
            rest -= torch.where(chosen, torch.copysign(scale, x), 0.0)
        return torch.cat(codes), kept

    def mean_(self, bucket: Bucket, state: State, codes: Sequence[Codes], mean: Vector) -> None:
        mean.zero_()
        for own in codes:
            at = 0
            for x in parts_of(bucket, mean):
                begin, end = at + 4, at + 4 + -(-x.numel() // 4)
                scale, fields = own[at:begin].clone().view(torch.float32), unpacked(own[begin:end], x.numel())
                x += torch.where(fields == 1, scale, torch.where(fields == 3, -scale, 0.0))
                at = end
        mean /= state.size


def parts_of(bucket: Bucket, v: Vector) -> Iterator[Vector]:
    """The elements of each tensor, but for empty tensors."""
    return (v[s.offset : s.offset + s.numel] for s in bucket.segments if s.numel)


def packed(fields: Tensor) -> Codes:
    """Four fields of 2 bits in each byte."""
    four = fields.new_zeros(-(-fields.numel() // 4), 4)
    four.view(-1)[: fields.numel()] = fields
    return (four << shifts(fields)).sum(1, dtype=torch.uint8)


def unpacked(codes: Codes, n: int) -> Tensor:
    return (codes[:, None] >> shifts(codes) & 3).view(-1)[:n]


def shifts(near: Tensor) -> Tensor:
    return torch.arange(0, 8, 2, dtype=torch.int64, device=near.device)
