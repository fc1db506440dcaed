"""The envelope: a header of 24 bytes before each payload that a rank sends, written and checked here alone.

It has a checksum, the terms of its rank, and the rank's first tensor with a non-finite gradient. A payload that
differs from what was sent gives an error that names the rank and the bucket.

A sum of an all-reduce is formed on the way, so it has no checksum. An empty envelope travels beside it.
`dgc.wire.payload` writes the same header before sparse payloads, in one call with their encoding.

`check_means` checks once per step whether the means are finite, and finds the rank that caused it.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

import dgc.kernels as kernels
from dgc.bucket import Bucket
from dgc.comm.requests import AllGather, AllReduce, AllToAll, Conversation, Op, read
from dgc.compression.protocol import DenseResult, Result
from dgc.kernels.codec.protocol import Terms
from dgc.kernels.selection.reference import first_tensor_nonfinite
from dgc.wire.payload import no_segments, open_sealed, seal, seal_each


@dataclass(frozen=True, eq=False)
class Envelope:
    """Seals the payloads of a bucket.

    Attributes:
        what: Name of the payloads in errors.
        bounds: First element of each tensor, in the order that `first_nonfinite` counts, and the end.
        terms: Ratio and form, which must be the same on every rank.

    The methods return, besides what arrives, for each rank the number, from 1, of its first tensor with a
    non-finite gradient, or 0. They raise PayloadError if a payload is damaged or was sealed with other terms.
    `first_nonfinite` is the index of the gradient's first non-finite element, or bounds[-1] if there is none.
    """

    what: str
    bounds: Int64[Tensor, "bounds"]
    terms: Terms

    def gather(
        self, codes: UInt8[Tensor, "nbytes"], first_nonfinite: Int64[Tensor, ""]
    ) -> Conversation[tuple[list[Tensor], list[int]]]:
        """Gather the codes of all ranks."""
        (payloads,) = yield (AllGather(self.seal(codes, first_nonfinite)),)
        return (yield from self.open(payloads, codes.numel()))

    def scatter(
        self, codes: UInt8[Tensor, "ranks nbytes"], first_nonfinite: Int64[Tensor, ""]
    ) -> Conversation[tuple[list[Tensor], list[int]]]:
        """Send row r to rank r. Returns the rows that all ranks have sent to this one."""
        sealed = seal_each(kernels.of(codes).codec, codes, first_nonfinite, self.bounds, self.terms)
        rows, total = sealed.shape
        (payloads,) = yield (AllToAll(sealed.view(-1), (total,) * rows),)
        return (yield from self.open(payloads, codes.shape[1]))

    def reduce(
        self, values: Tensor, first_nonfinite: Int64[Tensor, ""], op: Op = "mean"
    ) -> Conversation[tuple[Tensor, list[int]]]:
        """All-reduce values, which are not protected, and gather what every rank reports. `values` may change."""
        nothing = torch.empty(0, dtype=torch.uint8, device=values.device)
        payloads, reduced = yield (AllGather(self.seal(nothing, first_nonfinite)), AllReduce(values, op))
        _, nonfinite = yield from self.open(payloads, 0)
        return reduced, nonfinite

    def seal(self, codes: UInt8[Tensor, "nbytes"], first_nonfinite: Int64[Tensor, ""]) -> UInt8[Tensor, "total"]:
        """Return the payload for `codes`."""
        return seal(kernels.of(codes).codec, codes, first_nonfinite, self.bounds, self.terms)

    def open(self, payloads: Sequence[Tensor], nbytes: int) -> Conversation[tuple[list[Tensor], list[int]]]:
        """Return the codes in the payloads of all ranks, each of `nbytes` bytes."""
        codec, segments = kernels.of(payloads[0]).codec, self.bounds.numel() - 1
        opened = open_sealed(codec, payloads, nbytes, segments, self.terms, self.what)
        return opened.checked((yield from read(opened.scalars)))


def envelope_of(bucket: Bucket, bounds: Int64[Tensor, "bounds"], ratio: float, settings: str) -> Envelope:
    """Return the envelope of a bucket's payloads, with terms from what must be the same on every rank."""
    return Envelope(f"bucket {bucket.name}", bounds, Terms(ratio, crc32(settings.encode())))


def seal_numbers(numbers: Sequence[int], device: torch.device) -> UInt8[Tensor, "total"]:
    """Return a sealed payload of a few whole numbers."""
    envelope = _envelope_of_numbers("numbers", len(numbers), device)
    codes = torch.tensor(numbers, dtype=torch.int64, device=device).view(torch.uint8)
    return envelope.seal(codes, no_segments(device)[0])


def open_numbers(what: str, payloads: Sequence[Tensor], count: int) -> Conversation[list[list[int]]]:
    """Return the `count` numbers of each rank. Raises PayloadError as an Envelope does."""
    parts, _ = yield from _envelope_of_numbers(what, count, payloads[0].device).open(payloads, 8 * count)
    return [part.clone().view(torch.int64).tolist() for part in parts]


def _envelope_of_numbers(what: str, count: int, device: torch.device) -> Envelope:
    return Envelope(what, no_segments(device)[1], Terms(1.0, count))


def probe(flat: Tensor) -> Tensor:
    """A number that is NaN or inf if flat [n] has any. On a GPU, the host does not wait for it.

    It may also be inf for very large finite elements.
    """
    return flat.detach().sum(dtype=torch.promote_types(flat.dtype, torch.float32))


def check_means(results: Sequence[tuple[Bucket, Result]]) -> Conversation[str | None]:
    """Why the results of a step must not be used, or None. The same on every rank.

    A mean is the same on every rank. Either all ranks or none therefore take part in the additional round that
    finds the rank whose gradient was not finite. The host waits once for the device.
    """
    for _, result in results:
        if result.nonfinite is not None:
            return result.nonfinite
    dense = [(b, r) for b, r in results if isinstance(r, DenseResult) and not r.is_finite]
    finite = yield from read([probe(bucket.flat).isfinite() for bucket, _ in dense])
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
