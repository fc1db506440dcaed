"""1-bit SGD (Seide, Fu, Droppo, Li, Yu: Interspeech 2014).

    v = g + e;  of each row of a tensor, the elements above 0 are sent as their mean, the others as their mean
    e = v - what was sent

These two means minimize the squared error. A row holds the weights of one output, that is, one index of the
outermost dimension in memory. A vector is one row.

Codes: 8 bytes of means for each row, then the signs of its d elements, 4 ceil(d/32) bytes.

Differences from the paper: The paper uses columns, because its matrices are the transposes of PyTorch's. All ranks
gather all codes, where the paper sums stripes and quantizes the sums again.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.arguments import checked
from dgc.bucket import Bucket, Segment
from dgc.compression.all_gather import AllGatherCompressor, Codes, join, split_all


@checked
class OneBitCompressor(AllGatherCompressor):
    """1-bit SGD: each row is quantized to two means (Seide et al., Interspeech 2014).

    Args:
        error_feedback (bool): keep what a step does not send and add it to the next gradient, as in the paper.
    """

    bits = 1

    def __init__(self, error_feedback: bool = True):
        super().__init__(error_feedback)
        self._rows: dict[str, Int64[Tensor, "rows"]] = {}

    def plan(self, bucket: Bucket, size: int, rank: int) -> None:
        super().plan(bucket, size, rank)
        edges = [s.offset + i * (s.numel // rows_of(s)) for s in bucket.segments for i in range(rows_of(s))]
        self._rows[bucket.name] = torch.tensor([*edges, bucket.numel], dtype=torch.int64, device=bucket.device)

    def nbytes(self, bucket: Bucket) -> int:
        return sum(rows_of(s) * (8 + 4 * -(-(s.numel // rows_of(s)) // 32)) for s in bucket.segments)

    def encode(self, v: Float32[Tensor, "n"], bucket: Bucket) -> tuple[Codes, Float32[Tensor, "n"]]:
        rows = self._rows[bucket.name]
        moments = kernels.of(v).selection.moments(v, rows)
        above = torch.cat([rows.new_zeros(1), (v > 0).cumsum(0)])[rows].diff()
        highs = (moments.magnitudes + moments.sums) / 2 / above.clamp(min=1)
        lows = (moments.sums - moments.magnitudes) / 2 / (rows.diff() - above).clamp(min=1)
        means = torch.stack([lows.float(), highs.float()])
        cuts = torch.zeros_like(means[0])
        codes, kept = kernels.of(v).quantize.sign_encode(v, rows, cuts, means[0], means[1])
        return join(means.view(-1), codes), kept

    def mean_(self, codes: Sequence[Codes], bucket: Bucket, mean: Float32[Tensor, "n"]) -> None:
        rows = self._rows[bucket.name]
        means, signs = split_all(codes, 2 * (rows.numel() - 1))
        lows, highs = zip(*(own.view(2, -1).unbind() for own in means), strict=True)
        kernels.of(mean).quantize.sign_mean_(signs, rows, lows, highs, None, self.size, mean)


def rows_of(segment: Segment) -> int:
    """Number of rows of a tensor: the length of its outermost dimension in memory, or 1 below two dimensions."""
    if len(segment.shape) < 2 or segment.numel == 0:
        return 1
    return max(zip(segment.stride, segment.shape, strict=True), key=lambda pair: (pair[0], pair[1]))[1]
