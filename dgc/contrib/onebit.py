"""1-bit SGD (Seide, Fu, Droppo, Li, Yu: Interspeech 2014).

    v = g + e;  of each row of a tensor, the elements above 0 are sent as their mean, the others as their mean
    e = v - what was sent

These two means minimize the squared error. A row holds the weights of one output, that is, one index of the
outermost dimension in memory. A vector is one row.

Payload of a bucket in bytes: 24, and for each row of d elements 8 for the means and 4 ceil(d / 32) for the signs;
in sum rounded up to 8. The first element of a row is in the lowest bit.

Differences from the paper: The paper uses columns, because its matrices are the transposes of PyTorch's. All ranks
gather all codes, where the paper sums stripes and quantizes the sums again.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dgc.core.arguments import checked
from dgc.core.bucket import Bucket, Segment
from dgc.core.error_feedback import AllGatherCompressor, Codes, clone
from dgc.core.protocol import Vector
from dgc.core.state import State


@checked
class OneBitCompressor(AllGatherCompressor):
    """1-bit SGD: signs, and the means of both sides of each row, with error feedback (Seide et al. 2014).

    Args: as `ErrorFeedbackCompressor`.
    """

    bits = 1

    def __init__(self, error_feedback: bool = True):
        super().__init__(error_feedback)

    def nbytes(self, bucket: Bucket) -> int:
        return sum(rows_of(s) * (8 + sign_bytes(s.numel // rows_of(s))) for s in bucket.segments if s.numel)

    def encode(self, bucket: Bucket, state: State, v: Vector) -> tuple[Codes, Vector]:
        kept, codes = clone(v, state), [torch.empty(0, dtype=torch.uint8, device=v.device)]
        for x, rest in zip(matrices(bucket, v), matrices(bucket, kept), strict=True):
            up = x > 0
            means = torch.stack([mean_where(up.logical_not(), x), mean_where(up, x)])  # [2, rows]
            codes += [means.view(-1).view(torch.uint8), packed(up).view(-1)]
            rest -= torch.where(up, means[1, :, None], means[0, :, None])
        return torch.cat(codes), kept

    def mean_(self, bucket: Bucket, state: State, codes: Sequence[Codes], mean: Vector) -> None:
        mean.zero_()
        for own in codes:
            at = 0
            for x in matrices(bucket, mean):
                rows, d = x.shape
                begin, end = at + 8 * rows, at + rows * (8 + sign_bytes(d))
                lows, highs = own[at:begin].clone().view(torch.float32).view(2, rows, 1)
                x += torch.where(unpacked(own[begin:end].view(rows, -1), d), highs, lows)
                at = end
        mean /= state.size


def rows_of(segment: Segment) -> int:
    """Number of rows of a tensor: the length of its outermost dimension in memory, or 1 below two dimensions."""
    if len(segment.shape) < 2 or segment.numel == 0:
        return 1
    return max(zip(segment.stride, segment.shape, strict=True), key=lambda pair: (pair[0], pair[1]))[1]


def sign_bytes(d: int) -> int:
    """Bytes of the signs of a row."""
    return 4 * -(-d // 32)


def matrices(bucket: Bucket, v: Vector) -> Iterator[Tensor]:
    """The elements of each tensor, by row, but for empty tensors."""
    return (v[s.offset : s.offset + s.numel].view(rows_of(s), -1) for s in bucket.segments if s.numel)


def mean_where(chosen: Tensor, x: Tensor) -> Tensor:
    """The mean of the chosen elements of each row, or 0 without any, computed in fp64."""
    return (torch.where(chosen, x, 0.0).sum(1, dtype=torch.float64) / chosen.sum(1).clamp(min=1)).float()


def packed(bits: Tensor) -> Codes:
    """Eight elements of a row in each byte."""
    rows, d = bits.shape
    eight = bits.new_zeros(rows, 8 * sign_bytes(d))
    eight[:, :d] = bits
    return (eight.view(rows, -1, 8).int() << places(bits)).sum(2, dtype=torch.uint8)


def unpacked(codes: Codes, d: int) -> Tensor:
    return (codes[:, :, None] >> places(codes) & 1).flatten(1)[:, :d] > 0


def places(near: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.int64, device=near.device)
