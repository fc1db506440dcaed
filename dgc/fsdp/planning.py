"""The buckets of FSDP2's parameter groups."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from dgc.bucket import Bucket, Segment, check_real, lay_out
from dgc.compression.protocol import Compressor
from dgc.compression.route import Route
from dgc.fsdp.shards import ParameterGroup, Place, add_gradient
from dgc.optim.exchange.planning import PlannedBucket


@dataclass(eq=False)
class GroupPlan:
    """A parameter group and the buckets of its shards, one for each compressor.

    Attributes:
        group: The parameter group.
        compressors: The compressor of each parameter.
        buckets: The buckets. Parameters of which this rank has no rows are in none.
        places: For each bucket, the places of its parameters in the result of the reduce-scatter.
        has_gradients: Whether the buckets have gradients of this or an earlier backward pass.
    """

    group: ParameterGroup
    compressors: tuple[Compressor, ...]
    buckets: tuple[PlannedBucket, ...]
    places: tuple[tuple[Place, ...], ...]
    has_gradients: bool = False

    def add(self, output: Tensor) -> None:
        """Add the result of a reduce-scatter to the gradients in the buckets."""
        self.fill()
        for planned, places in zip(self.buckets, self.places, strict=True):
            flat = planned.bucket.flat
            for segment, place in zip(planned.bucket.segments, places, strict=True):
                flat[segment.offset : segment.offset + segment.numel].add_(place.rows_of(output))
        self.has_gradients = True

    def fill(self) -> None:
        """Fill the buckets with zeros if no backward pass has used the group."""
        if not self.has_gradients:
            for planned in self.buckets:
                planned.bucket.flat.zero_()

    def deliver(self) -> None:
        """Add the content of the buckets to .grad. It is replaced by the next gradients."""
        self.has_gradients = False
        for planned in self.buckets:
            for segment, p in zip(planned.bucket.segments, planned.parameters, strict=True):
                add_gradient(p, segment.of(planned.bucket.flat))


def plan_groups(groups: Sequence[ParameterGroup], route: Route, prefix: str) -> list[GroupPlan]:
    """Plan the buckets of each group.

    A parameter's compressor depends on the whole parameter, so that all ranks choose the same.

    Args:
        groups: In the order of their exchange.
        route: Chooses the compressor of each parameter.
        prefix: Prefix of the buckets' names.
    """
    plans = []
    for g, group in enumerate(groups):
        compressors = [
            route.compressor_for(_whole(name, p)) for name, p in zip(group.names, group.parameters, strict=True)
        ]
        buckets, places = [], []
        for c, compressor in enumerate(dict.fromkeys(compressors)):
            members = [
                (name, p, place)
                for name, p, place, own in zip(
                    group.names, group.parameters, group.places, compressors, strict=True
                )
                if own is compressor and p.to_local().numel()
            ]
            if members:
                segments = lay_out([(name, p.to_local()) for name, p, _ in members])
                bucket = Bucket(f"{prefix}.{g}.{c}", segments, members[0][1].dtype, group.device)
                buckets.append(PlannedBucket(bucket, compressor, tuple(p for _, p, _ in members)))
                places.append(tuple(place for _, _, place in members))
        plans.append(GroupPlan(group, tuple(compressors), tuple(buckets), tuple(places)))
    return plans


def _whole(name: str, p: DTensor) -> Segment:
    check_real(name, p.dtype)
    return Segment(name, 0, p.numel(), tuple(p.shape), tuple(p.stride()))
