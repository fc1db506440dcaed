"""Payloads: buffers of planned size that one rank sends to others, and the checks of received ones.

    bytes 0-3    int32   number of elements, at most the planned capacity
    bytes 4-7    int32   number, from 1, of the first tensor with a non-finite gradient; 0 if all are finite
    bytes 8-11   uint32  checksum of all other bytes (dgc.kernels.codec.protocol)
    bytes 12-15  fp32    scale of the values
    bytes 16-19  fp32    ratio of the elements sent in this step
    bytes 20-23  uint32  crc32 of the formats of indices and values
    then                 indices, a multiple of 4 bytes
    then                 values, padded with zeros to a multiple of 8 bytes

`SparseFormat` encodes and decodes a selection in this way. `seal` puts codes of any kind behind the same header,
with count 0, scale 1, the nominal ratio, and the crc32 of the compressor's name.

The size depends only on the plan. A collective with a size that changes from step to step would miss Horovod's
response cache every time. Encoding does not wait for the device. A receiver reads from it once, for all checks.
Every error names the rank whose payload is not valid.
"""

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Generic, NoReturn, TypeVar
from zlib import crc32

import torch
from jaxtyping import Float32, Int32, Int64, UInt8
from torch import Tensor

from dgc.arguments import checked
from dgc.kernels.codec.protocol import HEADER_BYTES, WORDS, Codec, Decoded, MeanDecoder, Sections, Terms
from dgc.kernels.selection.protocol import Budget, Merged, SparseVector
from dgc.wire.indices import IndexFormat, IndexSection, PlainIndices, PlainSection
from dgc.wire.values import CastValues, ValueFormat

T = TypeVar("T")


class PayloadError(RuntimeError):
    """A payload is damaged, or was encoded with other settings."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """An encoded selection.

    Attributes:
        payload: The bytes to send.
        sent: The elements in the payload, with the values that receivers decode.
        own: Their values before encoding.
    """

    payload: UInt8[Tensor, "nbytes"]
    sent: SparseVector
    own: Float32[Tensor, "capacity"]


@dataclass(frozen=True, eq=False)
class Unchecked(Generic[T]):
    """The contents of payloads, which are not checked yet: the device need not have finished.

    Attributes:
        scalars: Numbers of the headers, for `checked`.
    """

    scalars: Sequence[Tensor]
    _contents: list[T]
    _check: Callable[[Sequence[int]], list[int]]

    def checked(self, words: Sequence[int]) -> tuple[list[T], list[int]]:
        """Return (contents, nonfinite), in the order of the payloads.

        `nonfinite` has the position, from 1, of each rank's first tensor with a non-finite gradient, or 0.

        Args:
            words: The values of `scalars`.

        Raises:
            PayloadError: A payload is damaged, or was encoded with other settings. The message names the rank.
        """
        return self._contents, self._check(words)

    def wait(self) -> tuple[list[T], list[int]]:
        """Wait for the device, and return what `checked` does."""
        return self.checked(read_scalars(self.scalars))


@dataclass(frozen=True)
class Layout:
    """The positions of a payload's sections."""

    indices: IndexSection
    index_bytes: slice
    value_bytes: slice
    nbytes: int


@checked
@dataclass(frozen=True)
class SparseFormat:
    """Payload format of a sparse selection.

    Args:
        values: Format of the values. Default: fp32.
        indices: Format of the indices. Default: int64.

    Example:
        wire = SparseFormat(Int8Values(), RiceIndices())
    """

    values: ValueFormat = field(default_factory=CastValues)
    indices: IndexFormat = field(default_factory=PlainIndices)

    def nbytes(self, budget: Budget, numel: int) -> int:
        """Return the size of a payload: 24 bytes plus the two sections, rounded up to a multiple of 8."""
        return self.layout(budget, numel).nbytes

    def encode(
        self,
        codec: Codec,
        selection: SparseVector,
        budget: Budget,
        numel: int,
        first_nonfinite: Int64[Tensor, ""],
        result: torch.dtype = torch.float32,
        ratio: float = 1.0,
        tensors: Int64[Tensor, "bounds"] | None = None,
    ) -> Encoded:
        """Encode a selection.

        Args:
            codec: Codec for the selection's device.
            selection: A selection of finite values, with the capacity of `budget`.
            budget: Number of elements per tensor.
            numel: Number of elements of the bucket.
            first_nonfinite: Index of the gradient's first non-finite element; numel if there is none.
            result: Type of the gradients. Decoded values stay within its range.
            ratio: Ratio of the elements sent in this step. Receivers must pass the same to `decode`.
            tensors: Bounds of the tensors in the buffer that `first_nonfinite` counts, if not those of `budget`.
        """
        assert selection.values.numel() == budget.capacity
        layout, tensors = self.layout(budget, numel), budget.bounds if tensors is None else tensors
        if isinstance(layout.indices, PlainSection) and isinstance(self.values, CastValues):
            # one fused call with the same result: after a pass over the bucket, caches are cold for small calls
            dtypes, limit = (layout.indices.dtype, self.values.torch_dtype), self.values.largest(result)
            how = (dtypes, limit, first_nonfinite, tensors, self.terms(ratio), layout.nbytes)
            payload, values = codec.encode_plain(selection, *how)
            return Encoded(payload, SparseVector(selection.indices, values, selection.count), selection.values)
        payload = codec.blank(layout.nbytes, selection.values)
        own = layout.indices.encode_(codec, selection, payload[layout.index_bytes])
        section = payload[layout.value_bytes]
        values, scale = self.values.encode_(codec, own, budget.bounds, section, result)
        codec.seal_(payload, own.count, first_nonfinite, tensors, scale, self.terms(ratio))
        return Encoded(payload, SparseVector(own.indices, values, own.count), own.values)

    def decode(
        self,
        codec: Codec,
        payloads: Sequence[UInt8[Tensor, "nbytes"]],
        budget: Budget,
        numel: int,
        ratio: float = 1.0,
        what: str = "a payload",
        bounds: Sequence[Int64[Tensor, "bounds"]] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> tuple[list[SparseVector], list[int]]:
        """Decode the payloads of several ranks, and wait until the device has done so.

        Args:
            codec: Codec for the payloads' device.
            payloads: One payload per rank.
            budget: As in `encode`.
            numel: As in `encode`.
            ratio: The ratio that this rank passed to `encode`.
            what: Name of the payloads in errors.
            bounds: Bounds of the tensors in each payload, if they are not those of `budget`.
            ranks: The senders. Default: all ranks.

        Returns:
            (selections, nonfinite), in the order of the payloads. `nonfinite` has the position, from 1, of each
            rank's first tensor with a non-finite gradient, or 0.

        Raises:
            PayloadError: A rank encoded with another ratio or format, or a payload has another size, a wrong
                checksum, or content that `encode` never writes. The message names the rank.
        """
        return self.decoding(codec, payloads, budget, numel, ratio, what, bounds, ranks).wait()

    def decoding(
        self,
        codec: Codec,
        payloads: Sequence[UInt8[Tensor, "nbytes"]],
        budget: Budget,
        numel: int,
        ratio: float = 1.0,
        what: str = "a payload",
        bounds: Sequence[Int64[Tensor, "bounds"]] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> Unchecked[SparseVector]:
        """Same as `decode`, without waiting for the device."""
        layout, terms = self.layout(budget, numel), self.terms(ratio)
        ranks = range(len(payloads)) if ranks is None else ranks
        check_sizes(payloads, layout.nbytes, terms, what, ranks)
        selections, scalars = [], []
        bounds = [budget.bounds] * len(payloads) if bounds is None else bounds
        for given, edges in zip(payloads, bounds, strict=True):
            payload = _aligned(given)
            header = codec.unseal(payload)
            indices, valid = layout.indices.decode(codec, payload[layout.index_bytes], header.count)
            section = payload[layout.value_bytes]
            values, finite = self.values.decode(codec, section, indices, header, edges)
            selections.append(SparseVector(indices, values, header.count))
            scalars += [header.count, header.number, *header.terms, header.sealed, valid, finite]  # `WORDS`
        check = partial(check_decoded, ranks=ranks, budget=budget, numel=numel, terms=terms, what=what)
        return Unchecked(scalars, selections, check)

    def layout(self, budget: Budget, numel: int) -> Layout:
        """Return the positions of a payload's sections."""
        key = (budget.capacity, budget.bounds.numel() - 1, numel)
        found = self._layouts.get(key)
        return found if found is not None else self._layouts.setdefault(key, self._plan(*key))

    def terms(self, ratio: float) -> Terms:
        """Return the header fields that are equal in all payloads of this format and ratio."""
        return Terms(ratio, self._fingerprint)

    @cached_property
    def _fingerprint(self) -> int:
        formats = repr((self.indices, self.values))
        return crc32(re.sub(r" at 0x[0-9a-f]+", "", formats).encode())  # without addresses

    @cached_property
    def _layouts(self) -> dict[tuple[int, int, int], Layout]:
        """Layouts by the arguments of `_plan`. A function cache would hash the format, as slow as encoding."""
        return {}

    def _plan(self, capacity: int, segments: int, numel: int) -> Layout:
        indices = self.indices.plan(capacity, numel)
        middle = HEADER_BYTES + indices.nbytes
        end = middle + self.values.nbytes(capacity, segments)
        return Layout(indices, slice(HEADER_BYTES, middle), slice(middle, end), -(-end // 8) * 8)


def sections_of(form: SparseFormat, budget: Budget, numel: int) -> Sections | None:
    """Return the sections for a `MeanDecoder`, or None if it cannot decode a payload of this format."""
    layout = form.layout(budget, numel)
    indices, values = getattr(layout.indices, "kind", None), getattr(form.values, "kind", None)
    if indices is None or values is None:
        return None
    return Sections(indices, layout.indices.nbytes, values, budget.capacity, numel, layout.nbytes)


@dataclass(frozen=True, eq=False)
class Gathered:
    """The payloads of all ranks, in rank order. Their mean is decoded and added in one call of the kernels.

    This is possible on a CPU, for formats whose sections have a `kind`. Other formats are decoded by
    `SparseFormat.decode`. Both ways give the same bits and raise the same errors.

    Attributes:
        payloads: One per rank.
        form: Their format.
        sections: Its `sections_of`.
        budget: Number of elements per tensor.
        size: Number of ranks.
        ratio: The ratio that this rank passed to `SparseFormat.encode`.
        what: Name of the payloads in errors.
    """

    payloads: Sequence[UInt8[Tensor, "nbytes"]]
    form: SparseFormat
    sections: Sections
    budget: Budget
    size: int
    ratio: float
    what: str

    def mean(self, decoder: MeanDecoder) -> tuple[Merged, list[int]]:
        """Return (mean, nonfinite): the mean over the ranks, and the numbers of `SparseFormat.decode`.

        Raises:
            PayloadError: See `SparseFormat.decode`.
        """
        payloads = self._checked()
        decoded, mean = decoder.mean(payloads, self.sections, self.budget.bounds, self.size)
        return mean, self._nonfinite(decoded)

    def mean_into_(self, dense: Float32[Tensor, "n"], decoder: MeanDecoder) -> tuple[bool, list[int]]:
        """Write the mean over the ranks. Returns (whether it is finite, the numbers of `SparseFormat.decode`).

        Raises:
            PayloadError: See `SparseFormat.decode`. The content of `dense` is then undefined.
        """
        payloads = self._checked()
        decoded = decoder.mean_into_(dense, payloads, self.sections, self.budget.bounds, self.size)
        return decoded.finite, self._nonfinite(decoded)

    def _checked(self) -> Sequence[Tensor]:
        ranks = range(len(self.payloads))
        check_sizes(self.payloads, self.sections.nbytes, self.form.terms(self.ratio), self.what, ranks)
        return [payload if payload.is_contiguous() else payload.contiguous() for payload in self.payloads]

    def _nonfinite(self, decoded: Decoded) -> list[int]:
        words: list[int] = decoded.words.tolist()
        terms, ranks = self.form.terms(self.ratio), range(len(self.payloads))
        nonfinite = check_decoded(words, ranks, self.budget, self.sections.numel, terms, self.what)
        assert decoded.valid, "a payload without a fault"
        return nonfinite


def sealed_bytes(nbytes: int) -> int:
    """Return the size of the buffer for `nbytes` bytes of codes."""
    return HEADER_BYTES + -(-nbytes // 8) * 8


def seal(
    codec: Codec,
    codes: UInt8[Tensor, "nbytes"],
    first_nonfinite: Int64[Tensor, ""],
    bounds: Int64[Tensor, "bounds"],
    terms: Terms,
) -> UInt8[Tensor, "total"]:
    """Return the buffer for `codes`.

    Args:
        codec: Codec for the codes' device.
        codes: The codes.
        first_nonfinite: Index of the gradient's first non-finite element; bounds[-1] if there is none.
        bounds: Bounds of the tensors in the bucket.
        terms: Ratio and form for the header.
    """
    return seal_each(codec, codes.unsqueeze(0), first_nonfinite, bounds, terms).view(-1)


def seal_each(
    codec: Codec,
    codes: UInt8[Tensor, "rows nbytes"],
    first_nonfinite: Int64[Tensor, ""],
    bounds: Int64[Tensor, "bounds"],
    terms: Terms,
) -> UInt8[Tensor, "rows total"]:
    """Same as `seal`, for the codes to each of several ranks. Every row is a buffer."""
    rows, nbytes = codes.shape
    payloads = codec.blank(rows * sealed_bytes(nbytes), codes).view(rows, -1)
    payloads[:, HEADER_BYTES : HEADER_BYTES + nbytes] = codes
    for payload in payloads:
        seal_(codec, payload, first_nonfinite, bounds, terms)
    return payloads


def seal_(
    codec: Codec,
    payload: UInt8[Tensor, "total"],
    first_nonfinite: Int64[Tensor, ""],
    bounds: Int64[Tensor, "bounds"],
    terms: Terms,
) -> None:
    """Write the header into a buffer that has the codes and is zero elsewhere."""
    none, one = _count_and_scale(payload.device)
    codec.seal_(payload, none, first_nonfinite, bounds, one, terms)


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


def open_sealed(
    codec: Codec,
    payloads: Sequence[UInt8[Tensor, "total"]],
    nbytes: int,
    segments: int,
    terms: Terms,
    what: str,
    ranks: Sequence[int] | None = None,
) -> Unchecked[UInt8[Tensor, "nbytes"]]:
    """Return the codes of several ranks, without waiting for the device.

    Args:
        codec: Codec for the payloads' device.
        payloads: One buffer per rank.
        nbytes: Bytes of codes.
        segments: Number of tensors in the bucket.
        terms: Terms of this rank.
        what: Name of the payloads in errors.
        ranks: The senders. Default: all ranks.

    Raises:
        PayloadError: A buffer has another size. The message names the rank.
    """
    codes, scalars = [], []
    ranks = range(len(payloads)) if ranks is None else ranks
    check_sizes(payloads, sealed_bytes(nbytes), terms, what, ranks)
    for payload in payloads:
        whole = _aligned(payload)
        header = codec.unseal(whole)
        codes.append(whole[HEADER_BYTES : HEADER_BYTES + nbytes])
        scalars += [header.number, header.sealed, header.count, *header.terms]
    check = partial(check_sealed, ranks=ranks, segments=segments, terms=terms, what=what)
    return Unchecked(scalars, codes, check)


def _aligned(payload: UInt8[Tensor, "total"]) -> UInt8[Tensor, "total"]:
    """Return the payload, or a copy if it is not contiguous or not aligned to 8 bytes."""
    return payload if payload.is_contiguous() and payload.storage_offset() % 8 == 0 else payload.clone()


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
    if all(payload.numel() == nbytes for payload in payloads):
        return
    whole, sizes = torch.cat(list(payloads)), [payload.numel() for payload in payloads]
    if sizes == [part.numel() for part in whole.chunk(len(payloads))]:
        payloads = [whole[i * nbytes :] for i in range(len(payloads))]
    for rank, payload in zip(ranks, payloads, strict=True):
        header = payload[:HEADER_BYTES].cpu().clone()
        if header.numel() == HEADER_BYTES:
            refuse_other_terms(rank, header.view(torch.int32).tolist()[4:], terms, what)
    rank, size = next((rank, size) for rank, size in zip(ranks, sizes, strict=True) if size != nbytes)
    raise PayloadError(f"rank {rank} sent {size} bytes of {what} instead of the planned {nbytes}")


def check_decoded(
    words: Sequence[int], ranks: Sequence[int], budget: Budget, numel: int, terms: Terms, what: str
) -> list[int]:
    """Return the number of each rank's first tensor with a non-finite gradient. words: see `Decoded`.

    Raises:
        PayloadError: A payload is not valid. The message names the rank of the first one.
    """
    segments = budget.bounds.numel() - 1
    for i, rank in enumerate(ranks):
        count, number, *theirs, sealed, indices_valid, values_valid = words[WORDS * i : WORDS * (i + 1)]
        if not sealed:
            refuse_changed(rank, what)
        refuse_other_terms(rank, theirs, terms, what)
        if not 0 <= count <= budget.capacity:
            raise PayloadError(f"rank {rank} sent {count} elements, but the capacity is {budget.capacity}")
        if not 0 <= number <= segments:
            raise PayloadError(f"rank {rank} reports tensor {number} of {segments} as non-finite")
        if not indices_valid:
            raise PayloadError(f"rank {rank} sent indices that do not ascend within 0..{numel - 1}")
        if not values_valid:
            raise PayloadError(f"rank {rank} sent values that are not finite: its error state has overflowed")
    return list(words[1::WORDS])


def check_sealed(words: Sequence[int], ranks: Sequence[int], segments: int, terms: Terms, what: str) -> list[int]:
    """Same as `check_decoded`, for sealed codes. words: five numbers per payload."""
    for i, rank in enumerate(ranks):
        number, sealed, count, *theirs = words[5 * i : 5 * i + 5]
        if not sealed or count or not 0 <= number <= segments:
            refuse_changed(rank, what)
        refuse_other_terms(rank, theirs, terms, what)
    return list(words[::5])


def refuse_changed(rank: int, what: str) -> NoReturn:
    """Raise PayloadError for a payload whose checksum is wrong."""
    raise PayloadError(f"rank {rank} sent {what} with a wrong checksum: it changed in transit")


def refuse_other_terms(rank: int, words: Sequence[int], terms: Terms, what: str) -> None:
    """Raise PayloadError if the terms of `rank` differ from this rank's. `words`: the terms in its header."""
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


def read_scalars(scalars: Sequence[Tensor]) -> list[int]:
    """Return the values of zero-dimensional tensors. On a GPU one read gets them all, because each read waits."""
    if not scalars or scalars[0].is_cpu:
        return [int(scalar) for scalar in scalars]
    known: list[int] = torch.stack([scalar.int() for scalar in scalars]).tolist()
    return known
