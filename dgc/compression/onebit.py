"""1-bit SGD (Seide, Fu, Droppo, Li, Yu: Interspeech 2014).

    v = g + e;  of each row of a tensor the elements above 0 are sent as their mean, the others as theirs
    e = v - what was sent

These two means are the values that leave the least squared error. A row is what belongs to one output: one index
of the outermost dimension in memory; a vector is one row.

Codes: 8 bytes of means for each row, then the signs of its d elements, 4 ceil(d/32) bytes.

Differences from the paper: its columns, whose matrices are the transposes of PyTorch's, are rows here; all ranks
gather all codes, where the paper adds up stripes and quantizes the sums again.
"""

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.bucket import Bucket, Segment
from dgc.compression.coded import Coded, Codes, join, split


class OneBit(Coded):
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
        moments = kernels.of(v).moments(v, rows)
        above = torch.cat([rows.new_zeros(1), (v > 0).cumsum(0)])[rows].diff()
        highs = (moments.magnitudes + moments.sums) / 2 / above.clamp(min=1)
        lows = (moments.sums - moments.magnitudes) / 2 / (rows.diff() - above).clamp(min=1)
        means = torch.stack([lows.float(), highs.float()])
        cuts = torch.zeros_like(means[0])
        codes, kept = kernels.quantizers_of(v).sign_encode(v, rows, cuts, means[0], means[1])
        return join(means.view(-1), codes), kept

    def add_(self, codes: Codes, bucket: Bucket, total: Float32[Tensor, "n"]) -> None:
        rows = self._rows[bucket.name]
        means, signs = split(codes, 2 * (rows.numel() - 1))
        lows, highs = means.view(2, -1)
        kernels.quantizers_of(total).sign_add_(signs, rows, lows.contiguous(), highs.contiguous(), total)


def rows_of(segment: Segment) -> int:
    """How many rows a tensor has: the length of its outermost dimension in memory, 1 for vectors and less."""
    if len(segment.shape) < 2 or segment.numel == 0:
        return 1
    return max(zip(segment.stride, segment.shape, strict=True), key=lambda pair: (pair[0], pair[1]))[1]
