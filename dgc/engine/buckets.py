"""Assignment of gradients to buckets, each with its compressor and its parameters."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from dgc.comm.collectives import all_gather_object
from dgc.comm.transport import Transport
from dgc.core.arguments import NUMBER, require
from dgc.core.bucket import Bucket, Segment, as_real, lay_out, make_bucket
from dgc.core.protocol import Compressor
from dgc.core.results import SparseResult
from dgc.engine.state import BucketStates
from dgc.warn import warn

MEGABYTE = 1024 * 1024
SMALL_MB, LARGE_MB = 25.0, 128.0


@dataclass(frozen=True, eq=False)
class SparseUpdate:
    """A sparse gradient of several parameters in one flat index space.

    Parameter s has the indices bounds[s] to bounds[s+1] - 1, in the order of its memory. The gradient is `values`
    at `indices`, which are unique and ascending, and zero elsewhere.
    """

    parameters: tuple[Tensor, ...]
    bounds: Int64[Tensor, "bounds"]
    indices: Int64[Tensor, "k"]
    values: Float32[Tensor, "k"]


@dataclass(eq=False)
class PlannedBucket:
    """A bucket with its compressor and its parameters.

    Attributes:
        compressor: As it was given, or bound to the optimizer (`dgc.engine.momentum`). That of the epoch is in
            `states`.
        states: The states of all buckets of the compressor, from `keep_states` on.
        is_attached: Whether each .grad was set to its view and has not been replaced since.
        transport: The ranks among which it is exchanged. None: all ranks of the exchange.
    """

    bucket: Bucket
    compressor: Compressor
    parameters: tuple[Tensor, ...]
    states: BucketStates = field(init=False)
    is_attached: bool = False
    transport: Transport | None = None

    @cached_property
    def views(self) -> tuple[Tensor, ...]:
        """A view of `bucket.flat` for each parameter's gradient.

        `.data` gives each view its own change counter (`_version`), separate from the other views and `flat`.
        """
        pairs = zip(self.bucket.segments, self.parameters, strict=True)
        views = [(segment.of(self.bucket.flat), p.is_complex()) for segment, p in pairs]
        return tuple((torch.view_as_complex(v) if is_complex else v).data for v, is_complex in views)

    def is_view(self, i: int, gradient: Tensor | None) -> bool:
        return "views" in self.__dict__ and gradient is self.views[i]

    def collect(self, i: int) -> None:
        """Use parameter i's .grad as its gradient, without a copy if the layout allows it. None means zero."""
        p, segment = self.parameters[i], self.bucket.segments[i]
        gradient = as_real(p.grad) if p.grad is not None and p.grad.is_complex() else p.grad
        if "views" in self.__dict__ and p.grad is self.views[i]:
            self.bucket.use_flat(i)
        elif gradient is not None and not gradient.is_sparse and segment.is_laid_out_as(gradient):
            self.bucket.use_gradient(i, gradient.detach())
            self.is_attached = False
        else:
            self.bucket.use_flat(i)
            if p.grad is None:
                self.views[i].zero_()
            else:
                own = p.grad.detach()
                self.views[i].copy_(own.to_dense() if own.is_sparse else own)
            p.grad = self.views[i]

    def attach(self) -> None:
        """Set every .grad to its view of `bucket.flat`."""
        if not self.is_attached:
            for p, view in zip(self.parameters, self.views, strict=True):
                p.grad = view
            self.is_attached = True

    def make_dense(self, result: SparseResult) -> None:
        """Write a sparse mean into the bucket and set every .grad to its view."""
        result.write_to(self.bucket)
        self.attach()

    @property
    def takes_sparse_updates(self) -> bool:
        """Whether a step needs only the sparse mean.

        This requires that momentum is already applied and that the parameters have the memory order of the bucket.
        `model.to(memory_format=...)` after wrapping changes that order.
        """
        pairs = zip(self.bucket.segments, self.parameters, strict=True)
        return self.compressor.correction is not None and all(segment.orders(p) for segment, p in pairs)


def check_bucket_mb(bucket_mb: Any) -> None:
    """Raise ValueError if the argument is neither a positive number nor None."""
    if bucket_mb is not None:
        require("a number", NUMBER, bucket_mb=bucket_mb)
        if not bucket_mb > 0:
            raise ValueError(f"bucket_mb must be positive, not {bucket_mb}")


def default_bucket_mb(nbytes: int, device: str) -> float:
    """Return the largest size of a bucket in MB, for gradients of `nbytes` bytes on a type of device.

    On a CPU a bucket is encoded while backward computes the next one. On a GPU, launches take longer than that
    overlap saves, and a bucket costs the same number of them whatever its size: there are about four.
    """
    return SMALL_MB if device == "cpu" else min(LARGE_MB, max(SMALL_MB, nbytes / 4 / MEGABYTE))


def plan_buckets(
    named_parameters: Sequence[tuple[str, Tensor]],
    compressor_for: Callable[[Segment], Compressor],
    bucket_mb: float | None,
    prefix: str,
) -> list[PlannedBucket]:
    """Plan buckets in reverse order of registration, which is the order in which backward fills them.

    All tensors of a bucket have the same compressor, dtype and device. Tensors are not split. A complex tensor is
    planned as its real view [..., 2].

    named_parameters: In model order. bucket_mb: Largest size of a bucket in MB (2**20 bytes). A larger single
    tensor gets its own bucket. None: `default_bucket_mb`. prefix: Of the buckets' names. Raises ValueError if
    `bucket_mb` is not positive.
    """
    check_bucket_mb(bucket_mb)
    if bucket_mb is None:
        device = named_parameters[0][1].device.type if named_parameters else "cpu"
        bucket_mb = default_bucket_mb(_nbytes(named_parameters), device)
    Key = tuple[int, torch.dtype, torch.device]
    open_buckets: dict[Key, list[tuple[str, Tensor]]] = {}
    closed: list[tuple[Compressor, list[tuple[str, Tensor]]]] = []
    compressors: dict[int, Compressor] = {}
    for name, p in reversed(named_parameters):
        compressor = compressor_for(lay_out([(name, as_real(p.detach()))])[0])
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
        bucket = make_bucket(f"{prefix}.{i}", [(name, as_real(p.detach())) for name, p in members])
        planned.append(PlannedBucket(bucket, compressor, tuple(p for _, p in members)))
    return planned


def replace_compressors(planned: Iterable[PlannedBucket], new: Mapping[int, Compressor]) -> None:
    """Replace the compressors of buckets that have no states yet. new: by the id of the one before."""
    for plan in planned:
        plan.compressor = new.get(id(plan.compressor), plan.compressor)


def keep_states(
    planned: Sequence[PlannedBucket], size: int, rank: int, compressors: Iterable[Compressor] = ()
) -> list[BucketStates]:
    """Begin with the initial states of the buckets. Returns those for `compressors`, then for others.

    size, rank: Of buckets without a transport of their own.
    """
    every = [*compressors, *(plan.compressor for plan in planned)]
    kept = {id(c): BucketStates(c) for c in {id(c): c for c in every}.values()}
    for plan in planned:
        plan.states = kept[id(plan.compressor)]
        ranks = plan.transport
        plan.states.add(plan.bucket, *((size, rank) if ranks is None else (ranks.size, ranks.rank)))
    if rank == 0:
        warn_of_dense(planned)
    return list(kept.values())


def warn_of_dense(planned: Sequence[PlannedBucket]) -> None:
    """Warn if most of what is exchanged is in tensors of which a method cannot save anything."""
    dense = [(plan.compressor, s) for plan in planned for s in plan.compressor.too_small(plan.bucket)]
    total, elements = sum(len(p.bucket.segments) for p in planned), sum(p.bucket.numel for p in planned)
    if 2 * sum(s.numel for _, s in dense) > elements:
        warn(
            f"{dense[0][0].class_name} sends {len(dense)} of {total} tensors dense, such as {dense[0][1].name}: "
            "their rank is at most its own, as with LoRA's factors, so that it saves nothing. Use a smaller "
            "rank, or a method that needs no matrices, such as 1-bit Adam"
        )


def states_in_order(
    planned: Sequence[PlannedBucket], named_parameters: Sequence[tuple[str, Tensor]]
) -> list[BucketStates]:
    """Return the states of the compressors in the order of the model's parameters.

    Positions in this list name the saved states, so they must not depend on the buckets.
    """
    states_of = {p: plan.states for plan in planned for p in plan.parameters}
    return list({id(states_of[p]): states_of[p] for _, p in named_parameters}.values())


def describe(planned: Sequence[PlannedBucket]) -> list[tuple[str, str, str, tuple[int, ...]]]:
    """Return the parts of a plan that must be equal on all ranks: bucket, compressor class, parameter, shape."""
    return [
        (p.bucket.name, type(p.compressor).__name__, f"{s.name} ({p.bucket.dtype})", s.shape)
        for p in planned
        for s in p.bucket.segments
    ]


def check_equal_plans(own: Sequence[object], transport: Transport) -> None:
    """Raise ValueError on every rank if the descriptions of the ranks' gradients differ. Collective."""
    for rank, other in enumerate(all_gather_object(transport, own, "plan")):
        if other != own:
            lengths = f"{len(other)} gradients there, {len(own)} here"
            pairs = zip(other, own, strict=False)
            difference = next((f"{a} there, {b} here" for a, b in pairs if a != b), lengths)
            raise ValueError(
                f"rank {rank} and rank {transport.rank} train different models or compress them "
                f"differently: {difference}"
            )


def _nbytes(members: Sequence[tuple[str, Tensor]]) -> int:
    return sum(p.numel() * p.element_size() for _, p in members)
