"""What is not finite: whose gradient, in which tensor. It is found once per step, and told on every rank."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from torch import Tensor

from dgc.bucket import Bucket
from dgc.comm.requests import AllGather, Conversation, read
from dgc.compression.protocol import DenseResult, Result
from dgc.kernels.selection import first_tensor_nonfinite
from dgc.wire.envelope import open_numbers, seal_numbers


def check_means(results: Sequence[tuple[Bucket, Result]]) -> Conversation[str | None]:
    """Why the results of a step must not be used, or None. The same on every rank.

    A mean is the same on every rank. Either all ranks or none therefore take part in the additional round that
    finds the rank whose gradient was not finite. The host waits once for the device.
    """
    for _, result in results:
        if result.nonfinite is not None:
            return result.nonfinite
    dense = [(b, r) for b, r in results if isinstance(r, DenseResult) and not r.is_finite]
    finite = yield from read([bucket.probe().isfinite() for bucket, _ in dense])
    for (bucket, result), is_finite in zip(dense, finite, strict=True):
        number = 0 if is_finite else first_tensor_nonfinite(bucket.flat, [s.offset for s in bucket.segments])
        if number and result.own is None:
            return nonfinite_message(bucket, number, [])
        if number and result.own is not None:
            (payloads,) = yield (AllGather(seal_numbers([not result.own.isfinite()], bucket.device)),)
            flags = yield from open_numbers(f"bucket {bucket.name}", payloads, 1)
            return nonfinite_message(bucket, number, [rank for rank, (flag,) in enumerate(flags) if flag])
    return None


def nonfinite_message(bucket: Bucket, number: int, ranks: list[int]) -> str:
    """The message for a non-finite tensor.

    number: the tensor's position in the bucket, from 1. ranks: those with NaN or inf in the gradient.
    """
    name = bucket.segments[number - 1].name
    if not ranks:
        return f"the mean gradient of {name} overflows the dtype that carries it (no rank has NaN or inf)"
    return f"the gradient of {name} on rank {ranks[0]} has NaN or inf, or is 2**64 or more"


def first_nonfinite_message(bucket: Bucket, nonfinite: Iterable[int]) -> str | None:
    """The message for the first rank with a non-finite gradient, or None.

    nonfinite: for each rank, the position (from 1) of its first non-finite tensor, or 0.
    """
    for rank, number in enumerate(nonfinite):
        if number:
            return nonfinite_message(bucket, number, [rank])
    return None


def number_of(bucket: Bucket, first_nonfinite: int) -> int:
    """The position, from 1, of the tensor that holds this element; 0 for n, which is past the end."""
    if first_nonfinite >= bucket.numel:
        return 0
    return bisect_right([s.offset for s in bucket.segments], first_nonfinite)


def sparse_overflow_message(bucket: Bucket, indices: Tensor, values: Tensor) -> str | None:
    """The message for a mean that is zero except for `values` [k] at `indices` [k], if it is not finite."""
    bad = indices[values.isfinite().logical_not()].tolist()
    return nonfinite_message(bucket, number_of(bucket, bad[0]), []) if bad else None
