"""Is a mean finite, and if not, whose gradient is to blame? One read of the data while all is well."""

from bisect import bisect_right
from collections.abc import Iterable

import torch
from torch import Tensor

from dgc.bucket import Bucket
from dgc.comm.requests import AllGather, Conversation
from dgc.kernels.reference import first_tensor_nonfinite


def probe(flat: Tensor) -> Tensor:
    """A number that is NaN or inf where flat [n] has any of them. Nobody waits for it on a GPU.

    It may be inf for enormous finite elements as well.
    """
    return flat.detach().sum(dtype=torch.promote_types(flat.dtype, torch.float32))


def check_mean(bucket: Bucket, own: Tensor) -> Conversation[str | None]:
    """None where the mean in `bucket.flat` is finite, else what is wrong with it.

    own: the probe of this rank's gradient before the exchange. The mean is the same on every rank, so that
    either all ranks or none speak the round in which they learn from whom it comes.
    """
    if bool(probe(bucket.flat).isfinite()):
        return None
    number = first_tensor_nonfinite(bucket.flat, [s.offset for s in bucket.segments])
    if number == 0:
        return None
    bad = ~own.isfinite().view(1)
    (flags,) = yield (AllGather(bad.to(torch.uint8)),)
    return blame(bucket, number, [rank for rank, flag in enumerate(flags) if flag.item()])


def blame(bucket: Bucket, number: int, ranks: list[int]) -> str:
    """number: which tensor of the bucket, from 1. ranks: whose gradient has NaN or inf."""
    name = bucket.segments[number - 1].name
    if not ranks:
        return f"the mean gradient of {name} is beyond the range of what carries it (no rank has NaN or inf)"
    return f"the gradient of {name} on rank {ranks[0]} has NaN or inf, or is 2**64 or more"


def first_blame(bucket: Bucket, numbers: Iterable[int]) -> str | None:
    """numbers: by rank, the first tensor (from 1) that was not finite, or 0."""
    return next((blame(bucket, number, [rank]) for rank, number in enumerate(numbers) if number), None)


def number_of(bucket: Bucket, first_nonfinite: int) -> int:
    """The tensor, from 1, that holds this element; 0 for n, which is behind the last."""
    if first_nonfinite >= bucket.numel:
        return 0
    return bisect_right([s.offset for s in bucket.segments], first_nonfinite)


def overflow(bucket: Bucket) -> str | None:
    """What is wrong with a mean in `bucket.flat` that is not finite though every gradient was."""
    if bool(probe(bucket.flat).isfinite()):
        return None
    number = first_tensor_nonfinite(bucket.flat, [s.offset for s in bucket.segments])
    return blame(bucket, number, []) if number else None


def sparse_overflow(bucket: Bucket, indices: Tensor, values: Tensor) -> str | None:
    """The same of a mean that is zero but for `values` [k] at `indices` [k]."""
    if bool(probe(values).isfinite()):
        return None
    bad = indices[values.isfinite().logical_not()].tolist()
    return blame(bucket, number_of(bucket, bad[0]), []) if bad else None
