"""Sparse payloads: buffers of planned size with the selected elements of a bucket.

    bytes 0-23           the header of `dgc.core.envelope`
    then                 indices, a multiple of 4 bytes
    then                 values, padded with zeros to a multiple of 8 bytes

The size depends only on the plan. A collective with a size that changes from step to step would miss Horovod's
response cache every time. Encoding does not wait for the device. A receiver reads from it once, for all checks.
Every error names the rank whose payload is not valid.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeAlias
from zlib import crc32

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from dgc.core.arguments import checked
from dgc.core.envelope import PayloadError, Unchecked, Written, check_sizes, refuse_changed, refuse_other_terms
from dgc.core.values import CastValues, ValueFormat
from dgc.kernels.payload import HEADER_BYTES, WORDS, Codec, MeanDecoder, PayloadLayout, Terms
from dgc.kernels.payload.native import NativeMeanDecoder
from dgc.kernels.selection import Budget, Merged, SparseVector
from dgc.sparse.payloads.indices import IndexFormat, PlainIndices

Payloads: TypeAlias = Sequence[UInt8[Tensor, "nbytes"]]  # one per rank


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

    def layout(self, budget: Budget, numel: int) -> PayloadLayout:
        """Return the positions of a payload's sections."""
        indices = self.indices.plan(budget.capacity, numel)
        middle = HEADER_BYTES + indices.nbytes
        end = middle + self.values.nbytes(budget.capacity, budget.bounds.numel() - 1)
        nbytes = -(-end // 8) * 8
        return PayloadLayout(indices, self.values.kind, slice(HEADER_BYTES, middle), slice(middle, end), nbytes)

    @cached_property
    def fingerprint(self) -> int:
        """The number of the format in headers."""
        formats = repr((self.indices, self.values))
        return crc32(re.sub(r" at 0x[0-9a-f]+", "", formats).encode())  # without addresses


@dataclass(frozen=True, eq=False)
class PayloadPlan:
    """The payloads of one bucket, or of a part of it, in the steps of one ratio.

    Args:
        form: The format.
        budget: Number of elements per tensor.
        numel: Number of elements of the bucket.
        ratio: Ratio of the elements sent. All ranks must have the same.
        what: Name of the payloads in errors.
        result: Type of the gradients. Decoded values stay within its range.
        tensors: Bounds of the tensors that `first_nonfinite` counts, if not the bounds of `budget`.
    """

    form: SparseFormat
    budget: Budget
    numel: int
    ratio: float = 1.0
    what: str = "a payload"
    result: torch.dtype = torch.float32
    tensors: Int64[Tensor, "bounds"] | None = None

    @cached_property
    def layout(self) -> PayloadLayout:
        return self.form.layout(self.budget, self.numel)

    @cached_property
    def terms(self) -> Terms:
        """The header fields that are equal in all payloads of this format and ratio."""
        return Terms(self.ratio, self.form.fingerprint)

    @cached_property
    def limit(self) -> float:
        """Largest magnitude that is encoded."""
        return self.form.values.limit(self.result)

    def encode(self, codec: Codec, selection: SparseVector, first_nonfinite: Int64[Tensor, ""]) -> Encoded:
        """Encode a selection of finite values, with the capacity of the budget.

        first_nonfinite: Index of the gradient's first non-finite element; numel if there is none.
        """
        assert selection.values.numel() == self.budget.capacity
        layout, tensors = self.layout, self.budget.bounds if self.tensors is None else self.tensors
        if codec.encodes(layout):
            # one fused call with the same result: after a pass over the bucket, caches are cold for small calls
            header = (first_nonfinite, self.budget.bounds, tensors, self.terms)
            return Encoded(*codec.encode(selection, layout, self.limit, self.form.values.r, *header))
        payload = codec.blank(layout.nbytes, selection.values)
        own = codec.indices_encode_(selection, layout.indices, payload[layout.index_bytes])
        section = payload[layout.value_bytes]
        values, scale = self.form.values.encode_(codec, own, self.budget.bounds, section, self.result)
        codec.seal_(payload, own.count, first_nonfinite, tensors, scale, self.terms)
        return Encoded(payload, SparseVector(own.indices, values, own.count), own.values)

    def decode(
        self,
        codec: Codec,
        payloads: Payloads,
        bounds: Sequence[Int64[Tensor, "bounds"]] | None = None,
    ) -> Unchecked[SparseVector]:
        """Decode the payloads of several ranks, without waiting for the device.

        bounds: Bounds of the tensors in each payload, if not the bounds of the budget.

        Raises:
            PayloadError: A payload has another size. By `check`: a rank encoded with another ratio or format, or a
                payload has a wrong checksum, or content that `encode` never writes. The message names the rank.
        """
        layout = self.layout
        ranks = range(len(payloads))
        check_sizes(payloads, layout.nbytes, self.terms, self.what, ranks)
        selections, scalars = [], []
        bounds = [self.budget.bounds] * len(payloads) if bounds is None else bounds
        for given, edges in zip(payloads, bounds, strict=True):
            payload = given if given.is_contiguous() and given.storage_offset() % 8 == 0 else given.clone()
            header = codec.unseal(payload)
            indices, valid = codec.indices_decode(payload[layout.index_bytes], header.count, layout.indices)
            section = payload[layout.value_bytes]
            values, finite = self.form.values.decode(codec, section, indices, header, edges)
            selections.append(SparseVector(indices, values, header.count))
            scalars += [header.count, header.number, *header.terms, header.sealed, valid, finite]  # `WORDS`
        return Unchecked(selections, scalars, partial(self._check, ranks=ranks))

    def mean(self, decoder: NativeMeanDecoder, payloads: Payloads, size: int) -> tuple[Merged, list[int]]:
        """Decode the payloads of all ranks and add them in rank order, in one call of the kernels.

        The decoder must take such payloads. The bits and the errors are the same as for `decode`. Returns (the
        mean over `size` ranks, the numbers of `decode`).
        """
        words, mean = decoder.mean(self._whole(payloads), self.layout, self.budget.bounds, size)
        nonfinite = self._check(words.tolist(), range(len(payloads)))
        assert mean is not None, "a payload without a fault"
        return mean, nonfinite

    def mean_into_(
        self, dense: Float32[Tensor, "n"], decoder: MeanDecoder, payloads: Payloads, size: int
    ) -> Written:
        """Write the mean over `size` ranks into a tensor, without waiting for the device.

        The decoder must take such payloads. After an error the content of `dense` is undefined.
        """
        numbers = decoder.mean_into_(dense, self._whole(payloads), self.layout, self.budget.bounds, size)
        return Written(numbers, partial(self._check, ranks=range(len(payloads))))

    def _whole(self, payloads: Sequence[Tensor]) -> list[Tensor]:
        """Return contiguous payloads of the planned size."""
        check_sizes(payloads, self.layout.nbytes, self.terms, self.what, range(len(payloads)))
        return list(map(Tensor.contiguous, payloads))

    def _check(self, words: Sequence[int], ranks: Sequence[int]) -> list[int]:
        """Return the number of each rank's first tensor with a non-finite gradient. words: WORDS per payload."""
        segments, capacity = self.budget.bounds.numel() - 1, self.budget.capacity
        for i, rank in enumerate(ranks):
            count, number, ratio, form, sealed, indices_valid, values_valid = words[WORDS * i : WORDS * (i + 1)]
            if not sealed:
                refuse_changed(rank, self.what)
            if (ratio, form) != self.terms.words:
                refuse_other_terms(rank, (ratio, form), self.terms, self.what)
            if not 0 <= count <= capacity:
                raise PayloadError(f"rank {rank} sent {count} elements, but the capacity is {capacity}")
            if not 0 <= number <= segments:
                raise PayloadError(f"rank {rank} reports tensor {number} of {segments} as non-finite")
            if not indices_valid:
                raise PayloadError(f"rank {rank} sent indices that do not ascend within 0..{self.numel - 1}")
            if not values_valid:
                raise PayloadError(f"rank {rank} sent values that are not finite: its residual has overflowed")
        return list(words[1::WORDS])
