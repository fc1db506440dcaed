"""Which gradients share a bucket."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgc.bucket import Bucket, Segment, lay_out, make_bucket
from dgc.comm.collectives import all_gather_object
from dgc.comm.transport import Transport
from dgc.compression.protocol import Compressor

MEGABYTE = 1024 * 1024


@dataclass(eq=False)
class PlannedBucket:
    """A bucket, its compressor and its parameters; `views` are the gradients inside `bucket.flat`."""

    bucket: Bucket
    compressor: Compressor
    parameters: tuple[Tensor, ...]
    views: tuple[Tensor, ...]

    def split(self, indices: Tensor, values: Tensor) -> dict[Tensor, tuple[Tensor, Tensor]]:
        """A sparse vector (ascending indices into the bucket) by parameter, with indices into its segment."""
        offsets = torch.tensor([s.offset for s in self.bucket.segments], device=indices.device)
        bounds = [*torch.searchsorted(indices, offsets).tolist(), indices.numel()]
        parts = {}
        for i, (p, segment) in enumerate(zip(self.parameters, self.bucket.segments, strict=True)):
            own = slice(bounds[i], bounds[i + 1])
            parts[p] = (indices[own] - segment.offset, values[own])
        return parts


def plan_buckets(
    named_parameters: Sequence[tuple[str, Tensor]],
    compressor_for: Callable[[Segment], Compressor],
    bucket_mb: float,
    prefix: str,
) -> list[PlannedBucket]:
    """Buckets in reverse order of registration, the order in which backward fills them.

    A bucket is homogeneous in compressor, dtype and device and holds whole tensors, together at most
    `bucket_mb` MB unless a single tensor is larger.
    """
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb must be positive, not {bucket_mb}")
    Key = tuple[int, torch.dtype, torch.device]
    open_buckets: dict[Key, list[tuple[str, Tensor]]] = {}
    closed: list[tuple[Compressor, list[tuple[str, Tensor]]]] = []
    compressors: dict[int, Compressor] = {}
    for name, p in reversed(named_parameters):
        compressor = compressor_for(lay_out([(name, p)])[0])
        compressors[id(compressor)] = compressor
        key = (id(compressor), p.dtype, p.device)
        members = open_buckets.setdefault(key, [])
        if members and _nbytes(members) + _nbytes([(name, p)]) > bucket_mb * MEGABYTE:
            closed.append((compressor, open_buckets.pop(key)))
            members = open_buckets.setdefault(key, [])
        members.append((name, p))
    closed += [(compressors[key[0]], members) for key, members in open_buckets.items()]
    planned = []
    for i, (compressor, members) in enumerate(closed):
        bucket = make_bucket(f"{prefix}.{i}", members)
        views = tuple(segment.of(bucket.flat) for segment in bucket.segments)
        planned.append(PlannedBucket(bucket, compressor, tuple(p for _, p in members), views))
    return planned


def describe(planned: Sequence[PlannedBucket]) -> list[tuple[str, str, str, tuple[int, ...]]]:
    """What must be the same on every rank: bucket, kind of compressor, parameter, shape."""
    return [
        (p.bucket.name, type(p.compressor).__name__, f"{s.name} ({p.bucket.flat.dtype})", s.shape)
        for p in planned
        for s in p.bucket.segments
    ]


def check_agreement(planned: Sequence[PlannedBucket], transport: Transport) -> None:
    """ValueError, on every rank, where ranks have planned other buckets."""
    own = describe(planned)
    for rank, other in enumerate(all_gather_object(transport, own, "plan")):
        if other != own:
            difference = next(
                (f"{a} there, {b} here" for a, b in zip(other, own, strict=False) if a != b),
                f"{len(other)} gradients there, {len(own)} here",
            )
            raise ValueError(
                f"rank {rank} and rank {transport.rank} train different models or compress them "
                f"differently: {difference}"
            )


def _nbytes(members: Sequence[tuple[str, Tensor]]) -> int:
    return sum(p.numel() * p.element_size() for _, p in members)
