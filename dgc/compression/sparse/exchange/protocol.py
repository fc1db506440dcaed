"""The interface between the sparse compressor and an exchange."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

import dgc.kernels as kernels
from dgc.bucket import Bucket
from dgc.comm.requests import Conversation, read
from dgc.compression.finite import first_nonfinite_message, overflow_message, probe, sparse_overflow_message
from dgc.compression.protocol import DenseResult, Result, SparseResult
from dgc.kernels import Budget, Merged, SparseVector
from dgc.memory import Memory
from dgc.selection import Plan
from dgc.wire import Encoded, SparseFormat
from dgc.wire.mean import Gathered, sections_of


@dataclass(frozen=True, eq=False)
class Chosen:
    """The elements of a bucket that one rank has selected in one step.

    Attributes:
        bucket: The bucket.
        plan: Number of elements per tensor.
        elements: The elements, with the capacity of the plan.
        first_nonfinite: Index of the gradient's first non-finite element; n if there is none.
        form: Format of the payloads.
        memory: Learns what has been sent.
        size: Number of ranks.
        rank: This rank.
    """

    bucket: Bucket
    plan: Plan
    elements: SparseVector
    first_nonfinite: Tensor
    form: SparseFormat
    memory: Memory
    size: int
    rank: int

    @property
    def kernels(self) -> kernels.Tier:
        return kernels.of(self.elements.values)

    @property
    def what(self) -> str:
        """Name of the payloads in errors."""
        return f"bucket {self.bucket.name}"

    def encode(
        self,
        elements: SparseVector | None = None,
        first_nonfinite: Tensor | None = None,
        budget: Budget | None = None,
    ) -> Encoded:
        """Encode the selection, or other elements with the capacity of `budget`, as one payload."""
        plan, bucket = self.plan, self.bucket
        first = self.first_nonfinite if first_nonfinite is None else first_nonfinite
        how = (budget or plan.per_tensor, bucket.numel, first, bucket.dtype, plan.ratio)
        return self.form.encode(self.kernels.codec, self.elements if elements is None else elements, *how)

    def mean(self, parts: Sequence[SparseVector], nonfinite: Sequence[int]) -> Conversation[SparseResult]:
        """The sum of sparse vectors of the bucket, divided by the number of ranks. nonfinite: each rank's flag."""
        merged = self.kernels.selection.merge_mean(parts, self.size, self.bucket.numel)
        return (yield from self._result(merged, nonfinite))

    def mean_of(self, payloads: Sequence[Tensor]) -> Conversation[Result]:
        """The mean of payloads of the whole plan, one from each rank.

        It is written into the bucket at once where it is needed there anyway: only a memory with momentum
        correction leaves the optimizer nothing to do but to subtract the sparse mean.
        """
        bucket, planned = self.bucket, (self.plan.per_tensor, self.bucket.numel)
        decoder, sections = self.kernels.decoder, sections_of(self.form, *planned)
        if decoder is None or sections is None:
            decoding = self.form.decoding(self.kernels.codec, payloads, *planned, self.plan.ratio, self.what)
            return (yield from self.mean(*decoding.checked((yield from read(decoding.scalars)))))
        settings = (self.plan.per_tensor, self.size, self.plan.ratio, self.what)
        gathered = Gathered(payloads, self.form, sections, *settings)
        if self.memory.correction is not None or bucket.dtype != torch.float32:
            return (yield from self._result(*gathered.mean(decoder)))
        bucket.release()  # the gradients are accumulated and need no copy
        finite, nonfinite = gathered.mean_into_(bucket.flat, decoder)
        message = first_nonfinite_message(bucket, nonfinite)
        return DenseResult(message if finite else message or overflow_message(bucket))

    def _result(self, merged: Merged, nonfinite: Sequence[int]) -> Conversation[SparseResult]:
        # entries that are not valid are zero
        count, finite = yield from read([merged.count, probe(merged.values).isfinite()])
        indices, values = merged.indices[:count], merged.values[:count]
        message = first_nonfinite_message(self.bucket, nonfinite)
        if not finite and message is None:
            message = sparse_overflow_message(self.bucket, indices, values)
        return SparseResult(indices, values, message)


@runtime_checkable
class SparseExchange(Protocol):
    """Sums what the ranks have selected. The result is identical, bit for bit, on every rank."""

    @property
    def point_to_point(self) -> bool:
        """Whether messages go from rank to rank, which not every transport can do."""
        ...

    def wire_bytes(self, form: SparseFormat, plan: Plan, numel: int, size: int) -> float:
        """Bytes that a rank sends for a bucket of `numel` elements, by the meter's formulas.

        The same on every rank: where ranks send different numbers of bytes, the largest.
        """
        ...

    def mean(self, chosen: Chosen) -> Conversation[Result]:
        """Exchange the selections. Tells the memory what has left this rank."""
        ...
