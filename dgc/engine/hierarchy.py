"""Two levels for any compressor: dense inside a machine, compressed between machines.

A bucket's tensors are divided into L shares, one for each of the L ranks of a machine. On every rank, with
local rank l:

    round 1       g = mean over the machine's ranks of their gradients of share l      all-to-all, rank order
    rounds 2 ..   the compressor on g, with local rank l of the other machines         M machines are its ranks
    last round    the results of all shares                                            one broadcast per share

Each rank thus carries 1/L of the traffic between machines and of the error state. A share holds whole tensors, so
that methods that need matrices work. Shares are balanced over all buckets; one may be empty.

The number of rounds between machines may differ between shares, for example if one has no matrix. All ranks yield
the same number of rounds nevertheless, so that messages are issued in the same order everywhere: the last round
begins after as many rounds as the longest share needed in the last step. A rank that needs more reports it in the
last round, which is then repeated.

Payload of a bucket in bytes: that of the compressor for this rank's share, and inside the machine the bucket for
round 1, this rank's share and 40 for the last round.

Differences from the original code: Deep Gradient Compression lists this on its roadmap.

`choose_place` decides between one level, on which all ranks are treated alike, and two.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from dgc.bucket import Bucket, Segment, divide
from dgc.comm.collectives import MachineRank, find_machine_rank
from dgc.comm.requests import (
    AllGather,
    AllToAll,
    Broadcast,
    Conversation,
    Read,
    Reply,
    Request,
    as_bytes,
    between_machines,
)
from dgc.comm.transport import Transport
from dgc.compression.envelope import nonfinite_message, open_numbers, probe, seal_numbers
from dgc.compression.protocol import (
    Compressor,
    DenseResult,
    Result,
    SparseResult,
    StatelessCompressor,
    conversation_of,
    uses_point_to_point,
)
from dgc.engine.buckets import PlannedBucket
from dgc.engine.state import ErrorStatePart
from dgc.kernels.selection.reference import first_tensor_nonfinite
from dgc.memory import MomentumCorrection
from dgc.wire import PayloadError

RUNNING = -1  # in place of a number of rounds


@dataclass(eq=False)
class _Share:
    """The division of a bucket.

    bounds: first element of each share, and n. first: number of this rank's first tensor. bucket: this rank's
    share. rounds: rounds between machines that the longest share needed in the last step.
    """

    bounds: tuple[int, ...]
    first: int
    bucket: Bucket
    rounds: int = 1


class _Conversation:
    """A conversation between machines, round by round. `requests` are those of the next round."""

    def __init__(self, conversation: Conversation[Result]):
        self._conversation = conversation
        self.requests: tuple[Request, ...] = ()
        self.rounds = 0
        self.result: Result | None = None

    def resume(self, replies: tuple[Reply, ...] | None) -> Conversation[None]:
        """Continue to the next round, or to the end. `replies`: None at first."""
        if self.result is not None:
            return
        try:
            requests = self._conversation.send(replies)  # None starts it
            while isinstance(requests, Read):
                requests = self._conversation.send((yield requests))
        except StopIteration as stop:
            self.requests, self.result = (), stop.value
        except PayloadError as error:  # its message counts the ranks of this exchange
            raise PayloadError(f"machine{str(error).removeprefix('rank')}") from error
        else:
            self.requests = tuple(map(between_machines, requests))
            self.rounds += 1


class HierarchicalCompressor:
    """Averages densely inside each machine, and with another compressor between machines.

    `DistributedOptimizer(hierarchical=...)` makes it; its state is that of `inner`, for this rank's tensors.

    Args:
        inner (Compressor): method between machines.
        place (MachineRank): machine of this rank, from `find_machine_rank`.
        loads (list of int, optional): elements per local rank in the buckets planned so far; shared by the
            compressors of an optimizer, to balance their shares together.

    Raises:
        ValueError: `inner` sends messages from rank to rank.

    Example:
        >>> from dgc.comm.collectives import find_machine_rank
        >>> from dgc.engine.hierarchy import HierarchicalCompressor
        >>> place = find_machine_rank(transport, "my loop")
        >>> compressor = HierarchicalCompressor(PowerSGDCompressor(rank=4), place)
    """

    def __init__(self, inner: Compressor, place: MachineRank, loads: list[int] | None = None):
        if uses_point_to_point(inner):
            raise ValueError(
                f"{type(inner).__name__} sends messages from rank to rank (exchange='gtopk'), and not "
                "between machines alone: use exchange='reduce_scatter', or hierarchical='off'"
            )
        self.inner, self.place = inner, place
        self._loads = [0] * place.local_size if loads is None else loads
        self._shares: dict[str, _Share] = {}

    # --- setup and state --------------------------------------------------------------------------

    @property
    def compress_ratio(self) -> float:
        return self.inner.compress_ratio

    @property
    def correction(self) -> MomentumCorrection | None:
        return self.inner.correction

    @cached_property
    def fallback(self) -> "HierarchicalCompressor":
        inner = self.inner.fallback
        return self if inner is self.inner else HierarchicalCompressor(inner, self.place, self._loads)

    def accepts(self, segment: Segment) -> bool:
        return self.inner.accepts(segment)

    def plan(self, bucket: Bucket, size: int, rank: int) -> None:
        assert size == self.place.machines * self.place.local_size
        firsts = divide(bucket.segments, self._loads)
        offsets = [*(s.offset for s in bucket.segments), bucket.numel]
        bounds = tuple(offsets[first] for first in firsts)
        for local_rank, (start, end) in enumerate(pairwise(bounds)):
            self._loads[local_rank] += end - start
        first, end = firsts[self.place.local_rank :][:2]
        own = [replace(s, offset=s.offset - offsets[first]) for s in bucket.segments[first:end]]
        share = _Share(bounds, first, Bucket(f"{bucket.name}.share", own, bucket.dtype, bucket.device))
        self._shares[bucket.name] = share
        if own:
            self.inner.plan(share.bucket, self.place.machines, self.place.machine)

    def tensors(self) -> list[str]:
        """Names of the parameters with error state on this rank."""
        return [s.name for share in self._shares.values() for s in share.bucket.segments]

    def begin_epoch(self, epoch: int) -> None:
        self.inner.begin_epoch(epoch)

    def errors(self) -> Iterable[Tensor]:
        return self.inner.errors()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)

    # --- one step ---------------------------------------------------------------------------------

    def rollback(self, bucket: Bucket) -> None:
        if (share := self._shares[bucket.name].bucket).segments:
            self.inner.rollback(share)

    def reduce(self, bucket: Bucket) -> Conversation[Result]:
        share, own = self._shares[bucket.name], probe(bucket.flat)
        mean = yield from self._mean_inside(bucket, share)
        between = _Conversation(self._between(share.bucket, mean))
        yield from between.resume(None)
        for _ in range(share.rounds):
            yield from between.resume((yield between.requests))
        reports = [[RUNNING, 0]]
        while any(rounds == RUNNING for rounds, _ in reports):
            # equal places on all ranks of a group name equal requests: those of all ranks come first
            shared = self._shared(bucket, share, between)
            replies = yield (*shared, *between.requests)
            yield from between.resume(replies[len(shared) :])
            gathered, *parts = replies[: len(shared)]
            reports = yield from open_numbers(f"bucket {bucket.name} inside its machine", gathered, 2)
            for request, part in zip(shared[1:], parts, strict=True):
                request.tensor.copy_(part)
        share.rounds = max(rounds for rounds, _ in reports)
        if any(nonfinite for _, nonfinite in reports):
            return DenseResult((yield from self._explain(bucket, share, own, mean)))
        return DenseResult()

    def _mean_inside(self, bucket: Bucket, share: _Share) -> Conversation[Shaped[Tensor, "share"]]:
        """The mean over the machine's ranks of their gradients of this rank's share, in the bucket's dtype."""
        # as bytes, because not every transport sends bf16
        edges = [bound * bucket.dtype.itemsize for bound in share.bounds]
        splits = tuple(end - start for start, end in pairwise(edges))
        own = (splits[self.place.local_rank],) * len(splits)
        (parts,) = yield (AllToAll(as_bytes(bucket.flat), splits, "local", own),)
        first, *others = (part.view(bucket.dtype) for part in parts)
        total = first.to(torch.promote_types(bucket.dtype, torch.float32), copy=True)
        for other in others:
            total += other
        return total.div_(len(parts)).to(bucket.dtype)

    def _between(self, bucket: Bucket, mean: Shaped[Tensor, "share"]) -> Conversation[Result]:
        """The compressor's conversation about this rank's share."""
        if not bucket.segments:
            return DenseResult()
        for i, s in enumerate(bucket.segments):
            bucket.use_gradient(i, mean[s.offset : s.offset + s.numel])
        return (yield from conversation_of(self.inner, bucket))

    def _shared(self, bucket: Bucket, share: _Share, between: _Conversation) -> tuple[Any, ...]:
        """The requests of the last round: a report, and every share that is not empty."""
        result = between.result
        own = bucket.flat[share.bounds[self.place.local_rank] :][: share.bucket.numel]
        if isinstance(result, SparseResult):
            share.bucket.release()
            own.zero_()[result.indices] = result.values.to(bucket.dtype)
        elif result is not None and share.bucket.segments:
            own.copy_(share.bucket.flat)
        report = [RUNNING, 0] if result is None else [between.rounds, int(result.nonfinite is not None)]
        parts = [bucket.flat[start:end] for start, end in pairwise(share.bounds)]
        return (
            AllGather(seal_numbers(report, bucket.device), "local"),
            *(Broadcast(as_bytes(part), root, "local") for root, part in enumerate(parts) if part.numel()),
        )

    def _explain(
        self, bucket: Bucket, share: _Share, own: Tensor, mean: Shaped[Tensor, "share"]
    ) -> Conversation[str]:
        """The message for a bucket that is not finite. All ranks know that it is not, so all take part.

        own: the probe of this rank's gradient. mean: the machine's, of this rank's share.
        """
        offsets = [s.offset for s in bucket.segments]
        number = first_tensor_nonfinite(mean, [s.offset for s in share.bucket.segments])
        if number:
            number += share.first
        else:
            number = first_tensor_nonfinite(bucket.flat, offsets)
        found = [number, int(not own.isfinite())]
        (payloads,) = yield (AllGather(seal_numbers(found, bucket.device)),)
        reports = yield from open_numbers(f"bucket {bucket.name}", payloads, 2)
        numbers, bad = zip(*reports, strict=True)
        first = min((number for number in numbers if number), default=None)
        if first is None:
            return f"a gradient of bucket {bucket.name} is not finite"
        return nonfinite_message(bucket, first, [rank for rank, flag in enumerate(bad) if flag])


MODES = {True: "on", False: "off"}


def choose_place(
    transport: Transport, hierarchical: str | bool, compressors: Sequence[Compressor]
) -> MachineRank | None:
    """Return this rank's place among the machines, or None if all ranks are treated alike. Collective.

    With "auto" and only stateless compressors, which reduce in one step, the result is None: the all-reduce of MPI
    and NCCL takes the machines into account already.

    Args:
        transport: Connects the ranks.
        hierarchical: "on", "off", "auto", or a bool. The same on every rank.
        compressors: The compressors of the optimizer.

    Raises:
        ValueError: `hierarchical` is none of these; or it is "on", and the transport has no groups, or machines
            have different numbers of ranks.
    """
    mode = MODES[hierarchical] if isinstance(hierarchical, bool) else hierarchical
    if mode not in ("auto", "on", "off"):
        raise ValueError(f"hierarchical must be 'auto', 'on' or 'off', not {hierarchical!r}")
    stateless = all(isinstance(compressor, StatelessCompressor) for compressor in compressors)
    if mode == "off" or (mode == "auto" and (stateless or not _has_groups(transport))):
        return None
    try:
        place = find_machine_rank(transport, "hierarchical='on'")
    except ValueError as error:
        if mode == "on":
            raise
        if transport.rank == 0:
            warnings.warn(f"{error}: hierarchical='auto' treats all ranks alike", stacklevel=3)
        return None
    is_useful = place.machines > 1 and place.local_size > 1
    return place if is_useful or mode == "on" else None


def _has_groups(transport: Transport) -> bool:
    try:
        transport.group_size("local")
    except ValueError:
        return False
    return True


def plan_compressors(
    planned: Sequence[PlannedBucket], transport: Transport, hierarchical: str | bool
) -> tuple[MachineRank | None, ErrorStatePart | None]:
    """Let the compressors plan their buckets, for all ranks or for the machines. Collective.

    Args:
        planned: The buckets. On two levels their compressors are replaced.
        transport: Connects the ranks.
        hierarchical: As in `choose_place`.

    Returns:
        This rank's place among the machines, and the part of its machine's error state that it has. None if all
        ranks are treated alike.
    """
    place = choose_place(transport, hierarchical, [plan.compressor for plan in planned])
    two_levels: dict[int, HierarchicalCompressor] = {}
    if place is not None:
        loads = [0] * place.local_size
        for plan in planned:
            inner = plan.compressor
            plan.compressor = two_levels.setdefault(id(inner), HierarchicalCompressor(inner, place, loads))
    for plan in planned:
        plan.compressor.plan(plan.bucket, transport.size, transport.rank)
    if place is None:
        return None, None
    tensors = {name for compressor in two_levels.values() for name in compressor.tensors()}
    others = {s.name for plan in planned for s in plan.bucket.segments} - tensors
    return place, ErrorStatePart(
        machine=place.machine, machines=place.machines, tensors=sorted(tensors), others=sorted(others)
    )
