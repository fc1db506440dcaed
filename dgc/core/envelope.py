"""The envelope: a header of 24 bytes before each payload that a rank sends. It is written and checked here alone.

    bytes 0-3    int32   number of elements of a sparse payload; else 0
    bytes 4-7    int32   number, from 1, of the first tensor with a non-finite gradient; 0 if all are finite
    bytes 8-11   uint32  checksum of all other bytes (dgc.kernels.payload)
    bytes 12-15  fp32    scale of the values of a sparse payload; else 1
    bytes 16-19  fp32    ratio of the elements sent in this step, or the nominal ratio
    bytes 20-23  uint32  number of the form: crc32 of what must be the same on every rank
    then                 the payload, padded with zeros to a multiple of 8 bytes

A payload that differs from what was sent gives an error that names the rank and the bucket. A sum of an all-reduce
is formed on the way, so it has no checksum: an envelope without a payload travels beside it. Sparse payloads have
their header written and checked in one call with their encoding (`dgc.sparse.payloads.payload`).
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic, NoReturn, TypeVar
from zlib import crc32

import torch
from jaxtyping import Float32, Int32, Int64, UInt8
from torch import Tensor

import dgc.kernels as kernels
from dgc.comm.requests import AllGather, AllReduce, AllToAll, Conversation, Op, on_host, read, together
from dgc.core.bucket import Bucket
from dgc.kernels.payload import HEADER_BYTES, Terms

T = TypeVar("T")


class PayloadError(RuntimeError):
    """A payload is damaged, or was encoded with other settings."""


@dataclass(frozen=True, eq=False)
class Unchecked(Generic[T]):
    """The contents of payloads, which are not checked yet: the device need not have finished.

    Attributes:
        contents: In the order of the payloads.
        scalars: Numbers of the headers, for `check`: int, scalars, or one tensor.
        check: Given the values of `scalars`, returns for each payload the position, from 1, of its rank's first
            tensor with a non-finite gradient, or 0. Raises PayloadError if a payload is damaged, or was encoded
            with other settings. The message names the rank.
    """

    contents: list[T]
    scalars: Sequence[Any] | Tensor
    check: Callable[[Sequence[int]], list[int]]

    def wait(self) -> tuple[list[T], list[int]]:
        """Wait for the device, and return the contents and what `check` does."""
        known = on_host(self.scalars)
        return self.contents, self.check(together(self.scalars).tolist() if known is None else known)

    @property
    def flags(self) -> "Flags":
        """What `check` returns, now or when the host has read `scalars`. On a CPU it raises as `check`."""
        known = on_host(self.scalars)
        if known is not None:
            return Flags(values=self.check(known))
        return Flags((together(self.scalars),), self.check)


@dataclass(frozen=True, eq=False)
class Flags:
    """For each rank, the number, from 1, of its first tensor with a non-finite gradient, or 0.

    The host reads the headers on a device at the end of the step, all together: nothing waits before.

    Attributes:
        numbers: What the host has to read, int32 [n] each. Empty: nothing.
        check: Given the values of all `numbers`, returns `values`. Raises PayloadError as `Unchecked.check`.
        values: The numbers of the tensors. None: not known yet.
    """

    numbers: tuple[Tensor, ...] = ()
    check: Callable[[Sequence[int]], list[int]] = list
    values: list[int] | None = None

    def read(self) -> Conversation[list[int]]:
        """Return `values`. For a method that cannot continue without them."""
        if self.values is not None:
            return self.values
        return self.check((yield from read(torch.cat(self.numbers))))

    def with_checks_of(self, later: "Flags") -> "Flags":
        """Return these flags, to be read together with the headers of a later round, which has no flags."""
        if not self.numbers:
            return self
        own = count_of(self.numbers)

        def check(numbers: Sequence[int]) -> list[int]:
            values = self.check(numbers[:own])
            later.check(numbers[own:])
            return values

        return Flags(self.numbers + later.numbers, check)


def count_of(tensors: Sequence[Tensor]) -> int:
    """Return how many numbers the tensors have."""
    return sum(map(Tensor.numel, tensors))


def values_of(flags: Sequence[Flags]) -> list[list[int]]:
    """Return the values of all flags. The host waits once for the device."""
    pending = [numbers for own in flags for numbers in own.numbers]
    numbers = torch.cat(pending).tolist() if pending else []
    found = []
    for own in flags:
        if own.values is None:
            count = count_of(own.numbers)
            found.append(own.check(numbers[:count]))
            numbers = numbers[count:]
        else:
            found.append(own.values)
    return found


@dataclass(frozen=True, eq=False)
class Written:
    """A mean that kernels have decoded into its place from payloads that are not checked yet.

    Attributes:
        numbers: Numbers of the headers, int32 [n], and after them whether the mean is finite.
        check_words: Given the numbers of the headers, what `Unchecked.check` returns.
    """

    numbers: Int32[Tensor, "numbers"]
    check_words: Callable[[Sequence[int]], list[int]]

    def check(self, numbers: Sequence[int]) -> tuple[bool, list[int]]:
        """Given the values of `numbers`, return whether the mean is finite, and what `check_words` does."""
        nonfinite = self.check_words(numbers[:-1])
        return bool(numbers[-1]), nonfinite

    def wait(self) -> tuple[bool, list[int]]:
        """Wait for the device, and return what `check` does."""
        return self.check(self.numbers.tolist())


@dataclass(frozen=True, eq=False)
class Envelope:
    """Seals the payloads of a bucket.

    Attributes:
        what: Name of the payloads in errors.
        bounds: First element of each tensor, in the order that `first_nonfinite` counts, and the end.
        terms: Ratio and form, which must be the same on every rank.

    The methods return, besides what arrives, the `Flags` of all ranks, which belong into the result of the step
    (`dgc.core.results.reported`). A payload that is damaged, or was sealed with other terms, is a PayloadError:
    at once on a CPU, and at the end of the step on a device.

    `first_nonfinite` is the index of the gradient's first non-finite element, or bounds[-1] if there is none.
    """

    what: str
    bounds: Int64[Tensor, "bounds"]
    terms: Terms

    def gather(
        self, codes: UInt8[Tensor, "nbytes"], first_nonfinite: Int64[Tensor, ""]
    ) -> Conversation[tuple[list[Tensor], Flags]]:
        """Gather the codes of all ranks."""
        (payloads,) = yield (AllGather(self.seal(codes, first_nonfinite)),)
        opened = self.open(payloads, codes.numel())
        return opened.contents, opened.flags

    def gather_filled(
        self, payload: UInt8[Tensor, "total"], nbytes: int, first_nonfinite: Int64[Tensor, ""]
    ) -> Conversation[tuple[list[Tensor], Flags]]:
        """As `gather`, given a payload of `blank` with `nbytes` bytes of codes."""
        self.seal_(payload, first_nonfinite)
        (payloads,) = yield (AllGather(payload),)
        opened = self.open(payloads, nbytes)
        return opened.contents, opened.flags

    def gather_sealed(
        self, payload: UInt8[Tensor, "total"], decode: Callable[[list[Tensor]], Int32[Tensor, "numbers"]]
    ) -> Conversation[Written]:
        """Gather payloads with headers, and decode them in one call.

        decode: Writes the mean. Returns five numbers per payload, as `Codec.words`, and after them whether the
            mean is finite.
        """
        (payloads,) = yield (AllGather(payload),)
        ranks = range(len(payloads))
        check_sizes(payloads, payload.numel(), self.terms, self.what, ranks)
        numbers = decode(list(map(Tensor.contiguous, payloads)))
        return Written(numbers, partial(self._check, ranks=ranks))

    def scatter(
        self, codes: UInt8[Tensor, "ranks nbytes"], first_nonfinite: Int64[Tensor, ""]
    ) -> Conversation[tuple[list[Tensor], Flags]]:
        """Send row r to rank r. Returns the rows that all ranks have sent to this one."""
        ranks, nbytes = codes.shape
        rows, room = blank(ranks, nbytes, codes)
        room.copy_(codes)
        return (yield from self.scatter_filled(rows, nbytes, first_nonfinite))

    def scatter_filled(
        self, rows: UInt8[Tensor, "ranks total"], nbytes: int, first_nonfinite: Int64[Tensor, ""]
    ) -> Conversation[tuple[list[Tensor], Flags]]:
        """As `scatter`, given rows of `blank` with `nbytes` bytes of codes each."""
        self.seal_rows_(rows, first_nonfinite)
        (payloads,) = yield (AllToAll(rows.view(-1), (rows.shape[1],) * len(rows)),)
        opened = self.open(payloads, nbytes)
        return opened.contents, opened.flags

    def reduce(
        self, values: Tensor, first_nonfinite: Int64[Tensor, ""], op: Op = "mean"
    ) -> Conversation[tuple[Tensor, Flags]]:
        """All-reduce values, which are not protected, and gather what every rank reports. `values` may change."""
        nothing = torch.empty(0, dtype=torch.uint8, device=values.device)
        payloads, reduced = yield (AllGather(self.seal(nothing, first_nonfinite)), AllReduce(values, op))
        return reduced, self.open(payloads, 0).flags

    def seal(self, codes: UInt8[Tensor, "nbytes"], first_nonfinite: Int64[Tensor, ""]) -> UInt8[Tensor, "total"]:
        """Return the payload for `codes`."""
        nbytes, codec, (none, one) = codes.numel(), kernels.of(codes).codec, _count_and_scale(codes.device)
        payload = codec.blank(sealed_bytes(nbytes), codes)
        if nbytes:
            payload[HEADER_BYTES : HEADER_BYTES + nbytes] = codes
        codec.seal_(payload, none, first_nonfinite, self.bounds, one, self.terms)
        return payload

    def seal_(self, payload: UInt8[Tensor, "total"], first_nonfinite: Int64[Tensor, ""]) -> None:
        """Write the header into a payload that has the codes and is zero elsewhere."""
        none, one = _count_and_scale(payload.device)
        kernels.of(payload).codec.seal_(payload, none, first_nonfinite, self.bounds, one, self.terms)

    def seal_rows_(self, rows: UInt8[Tensor, "rows total"], first_nonfinite: Int64[Tensor, ""]) -> None:
        """Write the header into each of several payloads."""
        none, one = _count_and_scale(rows.device)
        kernels.of(rows).codec.seal_rows_(rows, none, first_nonfinite, self.bounds, one, self.terms)

    def open(
        self, payloads: Sequence[UInt8[Tensor, "total"]], nbytes: int, ranks: Sequence[int] | None = None
    ) -> Unchecked[UInt8[Tensor, "nbytes"]]:
        """Return the codes in payloads, without waiting for the device.

        Args:
            payloads: One per rank.
            nbytes: Bytes of codes.
            ranks: The senders. Default: all ranks.

        Raises:
            PayloadError: A payload has another size. The message names the rank.
        """
        ranks = range(len(payloads)) if ranks is None else ranks
        check_sizes(payloads, sealed_bytes(nbytes), self.terms, self.what, ranks)
        whole = [p if p.is_contiguous() and p.storage_offset() % 8 == 0 else p.clone() for p in payloads]
        codes = [payload[HEADER_BYTES : HEADER_BYTES + nbytes] for payload in whole]
        words = kernels.of(whole[0]).codec.words_of(whole)
        return Unchecked(codes, words, partial(self._check, ranks=ranks))

    def _check(self, words: Sequence[int], ranks: Sequence[int]) -> list[int]:
        """Return the number of each rank's first tensor with a non-finite gradient. words: five per payload."""
        segments = self.bounds.numel() - 1
        for i, rank in enumerate(ranks):
            number, sealed, count, ratio, form = words[5 * i : 5 * i + 5]
            if not sealed or count or not 0 <= number <= segments:
                refuse_changed(rank, self.what)
            if (ratio, form) != self.terms.words:
                refuse_other_terms(rank, (ratio, form), self.terms, self.what)
        return list(words[::5])


def envelope_of(bucket: Bucket, bounds: Int64[Tensor, "bounds"], ratio: float, settings: str) -> Envelope:
    """Return the envelope of a bucket's payloads, with terms from what must be the same on every rank."""
    return envelope(f"bucket {bucket.name}", bounds, ratio, settings)


def envelope(what: str, bounds: Int64[Tensor, "bounds"], ratio: float, settings: str) -> Envelope:
    """Return an envelope. what, bounds: as its attributes. settings: what must be the same on every rank."""
    return Envelope(what, bounds, Terms(ratio, crc32(settings.encode())))


def blank(
    rows: int, nbytes: int, like: Tensor, used: UInt8[Tensor, "rows total"] | None = None
) -> tuple[UInt8[Tensor, "rows total"], UInt8[Tensor, "rows nbytes"]]:
    """Return payloads of zeros on the device of `like`, and the parts of them that are for the codes.

    used: Such payloads of an earlier step, which are returned as they are. They must have been sent.
    """
    payloads = used
    if payloads is None:
        payloads = kernels.of(like).codec.blank(rows * sealed_bytes(nbytes), like).view(rows, -1)
    return payloads, payloads[:, HEADER_BYTES : HEADER_BYTES + nbytes]


def seal_numbers(numbers: Sequence[int], device: torch.device) -> UInt8[Tensor, "total"]:
    """Return a sealed payload of a few whole numbers."""
    envelope = _envelope_of_numbers("numbers", len(numbers), device)
    codes = torch.tensor(numbers, dtype=torch.int64, device=device).view(torch.uint8)
    return envelope.seal(codes, no_segments(device)[0])


def open_numbers(what: str, payloads: Sequence[Tensor], count: int) -> Conversation[list[list[int]]]:
    """Return the `count` numbers of each rank. Raises PayloadError as an Envelope does."""
    opened = _envelope_of_numbers(what, count, payloads[0].device).open(payloads, 8 * count)
    opened.check((yield from read(opened.scalars)))
    return [part.clone().view(torch.int64).tolist() for part in opened.contents]


def _envelope_of_numbers(what: str, count: int, device: torch.device) -> Envelope:
    return Envelope(what, no_segments(device)[1], Terms(1.0, count))


def sealed_bytes(nbytes: int) -> int:
    """Return the size of the buffer for `nbytes` bytes of codes."""
    return HEADER_BYTES + -(-nbytes // 8) * 8


# A copy of a number from the host waits for a GPU. These are copied once.
@cache
def no_segments(device: torch.device) -> tuple[Int64[Tensor, ""], Int64[Tensor, "2"]]:
    """Return `first_nonfinite` and `bounds` of what has no gradient. Do not change them in place."""
    bounds = torch.tensor([0, 1], dtype=torch.int64, device=device)
    return bounds[1], bounds


@cache
def _count_and_scale(device: torch.device) -> tuple[Int32[Tensor, ""], Float32[Tensor, ""]]:
    none = torch.tensor(0, dtype=torch.int32, device=device)
    return none, torch.tensor(1.0, dtype=torch.float32, device=device)


def check_sizes(
    payloads: Sequence[UInt8[Tensor, "nbytes"]],
    nbytes: int,
    terms: Terms,
    what: str,
    ranks: Sequence[int],
) -> None:
    """Check that all payloads have the planned size. ranks: the senders.

    A rank with other terms plans another size. Some transports then split the gathered bytes into parts of equal
    size, which are not the ranks' payloads. All payloads before the first differing one have the planned size, so
    its header is found in the concatenated bytes.

    Raises:
        PayloadError: A size differs. The message names the rank.
    """
    sizes = list(map(Tensor.numel, payloads))
    if sizes == [nbytes] * len(sizes):
        return
    whole = torch.cat(list(payloads))
    if sizes == [part.numel() for part in whole.chunk(len(payloads))]:
        payloads = [whole[i * nbytes :] for i in range(len(payloads))]
    for rank, payload in zip(ranks, payloads, strict=True):
        header = payload[:HEADER_BYTES].cpu().clone()
        if header.numel() == HEADER_BYTES:
            refuse_other_terms(rank, header.view(torch.int32).tolist()[4:], terms, what)
    rank, size = next((rank, size) for rank, size in zip(ranks, sizes, strict=True) if size != nbytes)
    raise PayloadError(f"rank {rank} sent {size} bytes of {what} instead of the planned {nbytes}")


def refuse_changed(rank: int, what: str) -> NoReturn:
    """Raise PayloadError for a payload whose checksum is wrong."""
    raise PayloadError(f"rank {rank} sent {what} with a wrong checksum: it changed in transit")


def refuse_other_terms(rank: int, words: Sequence[int], terms: Terms, what: str) -> None:
    """Raise PayloadError if the terms of `rank` differ from this rank's. words: the terms in its header."""
    ratio, form = words
    own_ratio, own_form = terms.words
    if ratio != own_ratio:
        (theirs,) = struct.unpack("<f", struct.pack("<i", ratio))
        raise PayloadError(
            f"rank {rank} encoded {what} at compress_ratio {theirs:.6g}, this rank at {terms.ratio:.6g}: call "
            "begin_epoch(epoch) on every rank, with the same epoch"
        )
    if form != own_form:
        raise PayloadError(
            f"rank {rank} encoded {what} in another format than this rank: every rank needs the same settings"
        )
