"""One selection as one uint8 buffer of planned size.

    bytes 0-3    int32   number of elements, at most the planned capacity
    bytes 4-7    int32   number, from 1, of the first tensor whose gradient was not finite; 0: all were
    bytes 8-15           zero
    then                 capacity indices
    then                 capacity values; zeros fill up to a multiple of 8 bytes

The size depends on the plan alone. A collective whose size changes from step to step would miss Horovod's
response cache every time.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor

from dgc.wire.indices import PlainIndices
from dgc.wire.values import CastValues

HEADER_BYTES = 16


class PayloadError(RuntimeError):
    """A payload that cannot be what its sender made."""


@dataclass(frozen=True)
class SparseFormat:
    values: CastValues = CastValues()
    indices: PlainIndices = PlainIndices()

    def nbytes(self, capacity: int) -> int:
        """Size of a payload: 16 + capacity * (bytes per index + bytes per value), rounded up to 8."""
        size = HEADER_BYTES + capacity * (self.indices.itemsize + self.values.itemsize)
        return -(-size // 8) * 8

    def encode(
        self,
        indices: Int64[Tensor, "count"],
        values: Float[Tensor, "count"],
        capacity: int,
        nonfinite: int = 0,
    ) -> UInt8[Tensor, "nbytes"]:
        """One payload. count <= capacity; values are of the wire's dtype."""
        count = indices.numel()
        assert count <= capacity and values.dtype == self.values.dtype
        payload = torch.zeros(self.nbytes(capacity), dtype=torch.uint8, device=indices.device)
        header = payload[:HEADER_BYTES].view(torch.int32)
        header[0], header[1] = count, nonfinite
        index_slots, value_slots = self._slots(payload, capacity)
        index_slots[:count] = self.indices.encode(indices)
        value_slots[:count] = values
        return payload

    def decode(
        self, payload: UInt8[Tensor, "nbytes"], capacity: int, numel: int, sender: int
    ) -> tuple[Int64[Tensor, "count"], Float32[Tensor, "count"]]:
        """The indices and values of a payload for a bucket of `numel` elements.

        Raises PayloadError naming the sender where the count or an index is out of range.
        """
        if payload.numel() != self.nbytes(capacity):
            raise PayloadError(f"rank {sender} sent {payload.numel()} bytes, {self.nbytes(capacity)} were planned")
        count = int(payload[:4].view(torch.int32).item())
        if not 0 <= count <= capacity:
            raise PayloadError(f"rank {sender} sent a payload of {count} elements, at most {capacity} fit")
        index_slots, value_slots = self._slots(payload, capacity)
        indices = index_slots[:count].to(torch.int64)
        if count and not 0 <= int(indices.min()) <= int(indices.max()) < numel:
            raise PayloadError(f"rank {sender} sent an index outside of 0..{numel - 1}")
        return indices, value_slots[:count].to(torch.float32)

    @staticmethod
    def nonfinite(payload: Tensor) -> int:
        """Number, from 1, of the first tensor whose gradient was not finite on the sender; 0: all were."""
        return int(payload[4:8].view(torch.int32).item())

    def _slots(self, payload: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        start = HEADER_BYTES
        middle = start + capacity * self.indices.itemsize
        end = middle + capacity * self.values.itemsize
        return payload[start:middle].view(self.indices.dtype), payload[middle:end].view(self.values.dtype)
