"""Checks whether a mean is finite, and finds the rank that caused it. A finite mean costs one read of the data."""

from bisect import bisect_right
from collections.abc import Iterable

import torch
from torch import Tensor

from dgc.bucket import Bucket
from dgc.comm.requests import AllGather, Conversation, read
from dgc.compression.envelope import open_numbers, seal_numbers
from dgc.kernels.selection.reference import first_tensor_nonfinite


def probe(flat: Tensor) -> Tensor:
    """A number that is NaN or inf if flat [n] has any. On a GPU, the host does not wait for it.

    It may also be inf for very large finite elements.
    """
    return flat.detach().sum(dtype=torch.promote_types(flat.dtype, torch.float32))


def check_mean(bucket: Bucket, own: Tensor) -> Conversation[str | None]:
    """None if the mean in `bucket.flat` is finite, else a message.

    own: the probe of this rank's gradient before the exchange. The mean is the same on every rank. Therefore
    either all ranks or none take part in the additional round that finds the rank.
    """
    (finite,) = yield from read([probe(bucket.flat).isfinite()])
    if finite:
        return None
    number = first_tensor_nonfinite(bucket.flat, [s.offset for s in bucket.segments])
    if number == 0:
        return None
    (payloads,) = yield (AllGather(seal_numbers([not own.isfinite()], bucket.device)),)
    flags = yield from open_numbers(f"bucket {bucket.name}", payloads, 1)
    return nonfinite_message(bucket, number, [rank for rank, (flag,) in enumerate(flags) if flag])


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
    messages = (nonfinite_message(bucket, number, [rank]) for rank, number in enumerate(nonfinite) if number)
    return next(messages, None)


def number_of(bucket: Bucket, first_nonfinite: int) -> int:
    """The position, from 1, of the tensor that holds this element; 0 for n, which is past the end."""
    if first_nonfinite >= bucket.numel:
        return 0
    return bisect_right([s.offset for s in bucket.segments], first_nonfinite)


def overflow(bucket: Bucket) -> Conversation[str | None]:
    """A message if the mean in `bucket.flat` is not finite although every gradient was."""
    (finite,) = yield from read([probe(bucket.flat).isfinite()])
    return None if finite else overflow_message(bucket)


def overflow_message(bucket: Bucket) -> str | None:
    """Same as `overflow`. Reads all elements, and waits for the device."""
    number = first_tensor_nonfinite(bucket.flat, [s.offset for s in bucket.segments])
    return nonfinite_message(bucket, number, []) if number else None


def sparse_overflow_message(bucket: Bucket, indices: Tensor, values: Tensor) -> str | None:
    """Same as `overflow_message`, for a mean that is zero except for `values` [k] at `indices` [k]."""
    bad = indices[values.isfinite().logical_not()].tolist()
    return nonfinite_message(bucket, number_of(bucket, bad[0]), []) if bad else None
