"""One selection as one uint8 buffer of planned size.

    bytes 0-3    int32   number of elements, at most the planned capacity
    bytes 4-7    int32   number, from 1, of the first tensor whose gradient was not finite; 0: all were
    bytes 8-11   uint32  checksum of all other bytes (dgc.kernels.codec)
    bytes 12-15  fp32    scale of the values
    then                 indices, a multiple of 4 bytes
    then                 values; zeros fill up to a multiple of 8 bytes

The size depends on the plan alone. A collective whose size changes from step to step would miss Horovod's
response cache every time. Encoding waits for no device; decoding reads from it once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from dgc.kernels.codec import HEADER_BYTES, Codec
from dgc.kernels.protocol import Quotas, Selection
from dgc.wire.indices import IndexFormat, IndexSection, PlainIndices, PlainSection
from dgc.wire.values import CastValues, ValueFormat


class PayloadError(RuntimeError):
    """A payload that cannot be what its sender made."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """sent: the elements in the payload, with the values that every receiver will see. own: what they were."""

    payload: UInt8[Tensor, "nbytes"]
    sent: Selection
    own: Float32[Tensor, "capacity"]


@dataclass(frozen=True)
class Layout:
    """Where the sections of a payload are."""

    indices: IndexSection
    index_bytes: slice
    value_bytes: slice
    nbytes: int


@dataclass(frozen=True)
class SparseFormat:
    values: ValueFormat = field(default_factory=CastValues)
    indices: IndexFormat = field(default_factory=PlainIndices)

    def nbytes(self, quotas: Quotas, numel: int) -> int:
        """Size of a payload: 16, the sections of indices and of values, rounded up to 8."""
        return self._layout(quotas, numel).nbytes

    def encode(
        self,
        codec: Codec,
        selection: Selection,
        quotas: Quotas,
        numel: int,
        first_nonfinite: Int64[Tensor, ""],
        result: torch.dtype = torch.float32,
    ) -> Encoded:
        """A selection of the quotas' capacity, with finite values, from a bucket of numel elements.

        first_nonfinite: index of the first element of the gradient that was not finite; numel: all were.
        result: the gradients' dtype, in whose range decoded values stay.
        """
        assert selection.values.numel() == quotas.capacity
        layout = self._layout(quotas, numel)
        if isinstance(layout.indices, PlainSection) and isinstance(self.values, CastValues):
            # the same in one call: on a CPU each small one finds cold what the pass has driven out of the caches
            dtypes, limit = (layout.indices.dtype, self.values.torch_dtype), self.values.largest(result)
            how = (dtypes, limit, first_nonfinite, quotas.bounds, layout.nbytes)
            payload, values = codec.encode_plain(selection, *how)
            return Encoded(payload, Selection(selection.indices, values, selection.count), selection.values)
        payload = codec.blank(layout.nbytes, selection.values)
        own = layout.indices.encode_(codec, selection, payload[layout.index_bytes])
        section = payload[layout.value_bytes]
        values, scale = self.values.encode_(codec, own, quotas.bounds, section, result)
        codec.seal_(payload, own.count, first_nonfinite, quotas.bounds, scale)
        return Encoded(payload, Selection(own.indices, values, own.count), own.values)

    def decode(
        self, codec: Codec, payloads: Sequence[UInt8[Tensor, "nbytes"]], quotas: Quotas, numel: int
    ) -> tuple[list[Selection], list[int]]:
        """(selections, numbers from 1 of each rank's first tensor that was not finite, or 0), in rank order.

        PayloadError, naming the rank: a payload is not of the planned size, its checksum is not that of its bytes,
        or they are none that `encode` writes.
        """
        ranges, layout = quotas.bounds.numel() - 1, self._layout(quotas, numel)
        selections, facts = [], []
        for rank, given in enumerate(payloads):
            if given.numel() != layout.nbytes:
                raise PayloadError(f"rank {rank} sent {given.numel()} bytes, {layout.nbytes} were planned")
            payload = given if given.is_contiguous() and given.storage_offset() % 8 == 0 else given.clone()
            header = codec.unseal(payload)
            indices, sound = layout.indices.decode(codec, payload[layout.index_bytes], header.count)
            section = payload[layout.value_bytes]
            values, finite = self.values.decode(codec, section, indices, header, quotas.bounds)
            selections.append(Selection(indices, values, header.count))
            facts += [header.count, header.number, header.sealed, sound, finite]
        known = read_facts(facts)
        for rank in range(len(selections)):
            count, number, sealed, good, fine = known[5 * rank : 5 * rank + 5]
            if not sealed:
                raise PayloadError(f"rank {rank} sent a payload with a wrong checksum: it was changed on its way")
            if not 0 <= count <= quotas.capacity:
                raise PayloadError(f"rank {rank} sent {count} elements, at most {quotas.capacity} fit")
            if not 0 <= number <= ranges:
                raise PayloadError(f"rank {rank} names tensor {number} of {ranges} as not finite")
            if not good:
                raise PayloadError(f"rank {rank} sent indices that do not ascend within 0..{numel - 1}")
            if not fine:
                raise PayloadError(f"rank {rank} sent values that are not finite: its error state has overflowed")
        return selections, known[1::5]

    def _layout(self, quotas: Quotas, numel: int) -> Layout:
        key = (quotas.capacity, quotas.bounds.numel() - 1, numel)
        found = self._layouts.get(key)
        return found if found is not None else self._layouts.setdefault(key, self._plan(*key))

    @cached_property
    def _layouts(self) -> dict[tuple[int, int, int], Layout]:
        """By what `_plan` takes, and not in a cache of functions: to hash a format takes as long as to encode."""
        return {}

    def _plan(self, capacity: int, ranges: int, numel: int) -> Layout:
        indices = self.indices.plan(capacity, numel)
        middle = HEADER_BYTES + indices.nbytes
        end = middle + self.values.nbytes(capacity, ranges)
        return Layout(indices, slice(HEADER_BYTES, middle), slice(middle, end), -(-end // 8) * 8)


def read_facts(facts: list[Tensor]) -> list[int]:
    """The numbers in tensors of no dimensions: on a GPU all in one read, since each read waits for the device."""
    if not facts or facts[0].is_cpu:
        return [int(fact) for fact in facts]
    known: list[int] = torch.stack([fact.int() for fact in facts]).tolist()
    return known
