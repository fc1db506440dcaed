"""What a compressor returns of a bucket (`Compressor.reduce`), and whether the ranks may use it.

A result is a mean gradient, dense or sparse, with reports: numbers on the device that the host reads once, at the
end of the step (`check_means`). They tell every rank whose gradient is not finite, and in which tensor."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from dgc.comm.requests import AllGather, Conversation, on_host, read
from dgc.core.bucket import Bucket
from dgc.core.envelope import Flags, Written, count_of, open_numbers, seal_numbers
from dgc.core.state import State
from dgc.kernels.selection import first_tensor_nonfinite


@dataclass(frozen=True, eq=False)
class Report:
    """Numbers on a device that say whether the ranks may use the result of a step.

    The host reads the numbers of all buckets and rounds together, once, at the end of the step.

    Attributes:
        numbers: int32 [n] each.
        explain: Given the values of all, returns why every rank drops the step, the same on every rank, or None.
            Raises PayloadError if a payload is damaged, or was sealed with other terms.
    """

    numbers: tuple[Tensor, ...]
    explain: Callable[[list[int]], str | None]


@dataclass(frozen=True, eq=False)
class DenseResult:
    """The mean gradient, stored in `bucket.flat`.

    Attributes:
        nonfinite: A message that names the parameter and the rank if a rank's gradient has NaN or inf. No part of
            such a result may be applied. It is the same on every rank.
        reports: What the host must read from the device before it knows `nonfinite`.
        own: A number that is not finite if this rank's gradient is not (`probe`), where the ranks have not told
            each other about their gradients.
        is_finite: Whether the mean is known to be finite. Otherwise `check_means` finds out, once per step.
        is_delivered: Whether the mean is in `bucket.destinations` instead. It must then be finite.
    """

    nonfinite: str | None = None
    own: Tensor | None = None
    is_finite: bool = False
    is_delivered: bool = False
    reports: tuple[Report, ...] = ()

    def write_to(self, bucket: Bucket) -> None:
        """Store the mean in `bucket.flat`."""


@dataclass(frozen=True, eq=False)
class SparseResult:
    """A mean gradient that is zero except for `values` [k] fp32 at the unique ascending `indices` [k] int64.

    nonfinite: as in DenseResult, and also if the mean is not finite.
    """

    indices: Tensor
    values: Tensor
    nonfinite: str | None = None
    reports: ClassVar[tuple[Report, ...]] = ()

    def write_to(self, bucket: Bucket) -> None:
        """Store the mean in `bucket.flat`."""
        bucket.release()
        bucket.flat.zero_()
        bucket.flat[self.indices] = self.values.to(bucket.dtype)


class NonFiniteGradientError(RuntimeError):
    """NaN or inf in a gradient. It is raised on every rank, and the value is not kept in any residual."""


Result: TypeAlias = DenseResult | SparseResult


@dataclass(frozen=True, eq=False)
class Reduced:
    """The end of `Compressor.reduce`.

    Attributes:
        result: The mean.
        state: The state after the step.
        dropped: That if every rank drops the step: what this rank has sent is unsent again. None: as before it.
    """

    result: Result
    state: State
    dropped: State | None = None


def check_means(results: Sequence[tuple[Bucket, Result]]) -> Conversation[str | None]:
    """Why the results of a step must not be used, or None. The host waits once for the device.

    A mean is the same on every rank. Either all ranks or none therefore take part in the additional round that
    finds the rank whose gradient was not finite.
    """
    dense = [(b, r) for b, r in results if isinstance(r, DenseResult) and not r.is_finite]
    reports = [report for _, result in results for report in result.reports]
    probes = [bucket.probe().isfinite() for bucket, _ in dense]
    together = joined(reports, probes) if reports else probes
    numbers = yield from read(together)
    said, finite = explained(reports, numbers), numbers[len(numbers) - len(dense) :]
    for message in (said, *(result.nonfinite for _, result in results)):
        if message is not None:
            return message
    for (bucket, result), is_finite in zip(dense, finite, strict=True):
        number = 0 if is_finite else first_tensor_nonfinite(bucket.flat, [s.offset for s in bucket.segments])
        if number and result.own is None:
            return nonfinite_message(bucket, number, [])
        if number and result.own is not None:
            (payloads,) = yield (AllGather(seal_numbers([not result.own.isfinite()], bucket.device)),)
            flags = yield from open_numbers(f"bucket {bucket.name}", payloads, 1)
            return nonfinite_message(bucket, number, [rank for rank, (flag,) in enumerate(flags) if flag])
    return None


def joined(reports: Sequence[Report], finite: Sequence[Tensor]) -> Tensor:
    """Return the numbers of reports, and after them whether each mean is finite, as one tensor, for one read."""
    parts = [numbers for report in reports for numbers in report.numbers]
    parts += [flag.int().view(1) for flag in finite]
    return torch.cat([part.to(parts[0].device) for part in parts])


def explained(reports: Sequence[Report], numbers: Sequence[int]) -> str | None:
    """Return the first reason of reports, given the values of all their numbers. Raises as `Report.explain`."""
    reasons, at = list[str](), 0
    for report in reports:
        count = count_of(report.numbers)
        reason = report.explain(list(numbers[at : at + count]))
        reasons += [] if reason is None else [reason]
        at += count
    return reasons[0] if reasons else None


def reported(
    bucket: Bucket, flags: Flags, own: Tensor | None = None, is_finite: bool = False, is_delivered: bool = False
) -> DenseResult:
    """Return the result of a bucket whose mean is in place, given what all ranks have reported of their gradients.

    own, is_finite, is_delivered: As in DenseResult.
    """
    if flags.values is not None:
        return DenseResult(first_nonfinite_message(bucket, flags.values), own, is_finite, is_delivered)

    def explain(numbers: list[int]) -> str | None:
        return first_nonfinite_message(bucket, flags.check(numbers))

    return DenseResult(None, own, is_finite, is_delivered, (Report(flags.numbers, explain),))


def reported_mean(bucket: Bucket, written: Written) -> DenseResult:
    """Return the result of a bucket whose mean kernels have decoded into it."""
    known = on_host(written.numbers)
    if known is not None:
        is_finite, nonfinite = written.check(known)
        return DenseResult(first_nonfinite_message(bucket, nonfinite), is_finite=is_finite)

    def explain(numbers: list[int]) -> str | None:
        is_finite, nonfinite = written.check(numbers)
        message = first_nonfinite_message(bucket, nonfinite)
        return overflow_message(bucket) if message is None and not is_finite else message

    return DenseResult(is_finite=True, reports=(Report((written.numbers,), explain),))


def overflow_message(bucket: Bucket) -> str | None:
    """The message for a mean in the bucket with NaN or inf, though no rank has any; None if it is finite."""
    number = first_tensor_nonfinite(bucket.flat, [s.offset for s in bucket.segments])
    return nonfinite_message(bucket, number, []) if number else None


def nonfinite_message(bucket: Bucket, number: int, ranks: list[int]) -> str:
    """The message for tensor `number` of the bucket, from 1. ranks: those with NaN or inf in the gradient."""
    name = bucket.segments[number - 1].name
    if not ranks:
        return f"the mean gradient of {name} overflows the dtype that carries it (no rank has NaN or inf)"
    return f"the gradient of {name} on rank {ranks[0]} has NaN or inf, or is 2**64 or more"


def first_nonfinite_message(bucket: Bucket, nonfinite: Iterable[int]) -> str | None:
    """The message for the first rank with a non-finite tensor: its number by rank, from 1, or 0. None without."""
    for rank, number in enumerate(nonfinite):
        if number:
            return nonfinite_message(bucket, number, [rank])
    return None


def sparse_overflow_message(bucket: Bucket, indices: Tensor, values: Tensor) -> str | None:
    """The message for a mean that is zero except for `values` [k] at `indices` [k], if it is not finite."""
    bad = indices[values.isfinite().logical_not()].tolist()
    if not bad:
        return None
    return nonfinite_message(bucket, bisect_right([s.offset for s in bucket.segments], bad[0]), [])
