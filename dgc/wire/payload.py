"""Encoding of a selection as one uint8 buffer of planned size.

    bytes 0-3    int32   number of elements, at most the planned capacity
    bytes 4-7    int32   number, from 1, of the first tensor with a non-finite gradient; 0 if all are finite
    bytes 8-11   uint32  checksum of all other bytes (dgc.kernels.codec.protocol)
    bytes 12-15  fp32    scale of the values
    bytes 16-19  fp32    ratio of the elements sent in this step
    bytes 20-23  uint32  crc32 of the formats of indices and values
    then                 indices, a multiple of 4 bytes
    then                 values, padded with zeros to a multiple of 8 bytes

The size depends only on the plan. A collective with a size that changes from step to step would miss Horovod's
response cache every time. Encoding does not wait for the device. A receiver reads from it once, for all checks.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from zlib import crc32

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from dgc.arguments import checked
from dgc.kernels.codec.mean import WORDS
from dgc.kernels.codec.protocol import HEADER_BYTES, Codec, Terms
from dgc.kernels.selection.protocol import Budget, SparseVector
from dgc.wire.checks import check_sizes, read_scalars, refuse_invalid
from dgc.wire.indices import IndexFormat, IndexSection, PlainIndices, PlainSection
from dgc.wire.values import CastValues, ValueFormat


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
class Decoding:
    """Payloads that are decoded, but not checked: the device need not have finished.

    Attributes:
        scalars: `WORDS` numbers per payload, for `checked`.
    """

    scalars: Sequence[Tensor]
    _selections: list[SparseVector]
    _check: Callable[[Sequence[int]], None]

    def checked(self, words: Sequence[int]) -> tuple[list[SparseVector], list[int]]:
        """Return what `SparseFormat.decode` does.

        Args:
            words: The values of `scalars`.

        Raises:
            PayloadError: See `SparseFormat.decode`.
        """
        self._check(words)
        return self._selections, list(words[1::WORDS])


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
        decoding = self.decoding(codec, payloads, budget, numel, ratio, what, bounds, ranks)
        return decoding.checked(read_scalars(decoding.scalars))

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
    ) -> Decoding:
        """Same as `decode`, without waiting for the device."""
        layout, terms = self.layout(budget, numel), self.terms(ratio)
        ranks = range(len(payloads)) if ranks is None else ranks
        check_sizes(payloads, layout.nbytes, terms, what, ranks)
        selections, scalars = [], []
        bounds = [budget.bounds] * len(payloads) if bounds is None else bounds
        for given, edges in zip(payloads, bounds, strict=True):
            payload = given if given.is_contiguous() and given.storage_offset() % 8 == 0 else given.clone()
            header = codec.unseal(payload)
            indices, valid = layout.indices.decode(codec, payload[layout.index_bytes], header.count)
            section = payload[layout.value_bytes]
            values, finite = self.values.decode(codec, section, indices, header, edges)
            selections.append(SparseVector(indices, values, header.count))
            scalars += [header.count, header.number, *header.terms, header.sealed, valid, finite]  # `WORDS`
        check = partial(refuse_invalid, ranks=ranks, budget=budget, numel=numel, terms=terms, what=what)
        return Decoding(scalars, selections, check)

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
