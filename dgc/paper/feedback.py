"""What the compressors of this folder share and no paper describes. State is fp32 and saved under parameter names.
NaN, inf and 2**64 or more in a gradient count as zero and are told to every rank; the caller drops the step."""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float32, Int64, Shaped
from torch import Tensor

from dgc.core.bucket import Bucket
from dgc.core.protocol import Compressor, MomentumCorrection
from dgc.core.results import DenseResult, first_nonfinite_message
from dgc.core.state import State, zeros


class ErrorFeedback(Compressor):
    """error: name of what waits to be sent. others: names of further vectors [n] of the state."""

    compress_ratio: float = 1.0
    correction: MomentumCorrection | None = None
    error: str = "e"
    others: tuple[str, ...] = ()

    def init(self, bucket: Bucket, size: int, rank: int) -> State:
        others = {name: zeros(bucket) for name in self.others}
        return State(size, rank, errors={self.error: zeros(bucket)}, local=others)


def parts_of(bucket: Bucket, vector: Shaped[Tensor, "n"]) -> Sequence[Tensor]:
    """Each tensor's elements, in the order of memory."""
    return vector.split([s.numel for s in bucket.segments])


def gradient_of(bucket: Bucket) -> tuple[Float32[Tensor, "n"], Int64[Tensor, "1"]]:
    """(gradient, number of the first tensor, from 1, that has NaN, inf or 2**64 or more; 0 for none)"""
    g = bucket.flat.to(torch.float32)
    bad = ~(g.abs() < 2.0**64)
    numbers = [number for number, part in enumerate(parts_of(bucket, bad), 1) if bool(part.any())]
    return g.masked_fill(bad, 0.0), torch.tensor(numbers[:1] or [0], dtype=torch.int64, device=bucket.device)


def sparse_sum(indices: Sequence[Tensor], values: Sequence[Tensor], like: Tensor) -> Float32[Tensor, "n"]:
    """Sum over ranks, in their order, of vectors [n] that are zero but for values [k] at indices [k]."""
    total = torch.zeros_like(like)
    for i, x in zip(indices, values, strict=True):
        total = total.index_add(0, i, x)
    return total


def result_of(bucket: Bucket, mean: Float32[Tensor, "n"], bad: Iterable[Tensor]) -> DenseResult:
    """bad: by rank, the second of `gradient_of`."""
    bucket.flat.copy_(mean)
    return DenseResult(first_nonfinite_message(bucket, [int(number) for number in bad]))
