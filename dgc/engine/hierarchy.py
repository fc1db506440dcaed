"""Two levels for any compressor: dense inside a machine, compressed between machines.

A bucket's tensors are divided into L shares, one for each of the L ranks of a machine. On every rank, with
local rank l:

    round 1       g = mean over the machine's ranks of their gradients of share l      all-to-all, rank order
    rounds 2 ..   the compressor on g, with local rank l of the other machines         M machines are its ranks
    last round    the results of all shares                                            one broadcast per share

Each rank thus carries 1/L of the traffic between machines and of the residual. A share holds whole tensors, so
that methods that need matrices work. Shares are balanced over all buckets; one may be empty.

The number of rounds between machines may differ between shares, for example if one has no matrix. All ranks yield
the same number of rounds nevertheless, so that messages are issued in the same order on all ranks: the last round
begins after as many rounds as the longest share needed in the last step. A rank that needs more reports it in the
last round, which is then repeated.

Payload of a bucket in bytes: the payload of the compressor for this rank's share, and inside the machine the
bucket for round 1, this rank's share and 40 for the last round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

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
from dgc.core.bucket import Bucket, Segment, divide
from dgc.core.envelope import PayloadError, open_numbers, seal_numbers
from dgc.core.momentum import MomentumCorrection
from dgc.core.protocol import Compressor, Run, StatelessCompressor
from dgc.core.results import DenseResult, Reduced, check_means, nonfinite_message
from dgc.core.state import State, Tables
from dgc.engine.buckets import PlannedBucket, keep_states, replace_compressors
from dgc.engine.options import check_can_send
from dgc.engine.state import ResidualPart
from dgc.kernels.selection import first_tensor_nonfinite
from dgc.warn import warn

RUNNING = -1  # in place of a number of rounds


@dataclass(eq=False, kw_only=True)
class ShareState(State):
    """The state of this rank's share of a bucket.

    Attributes:
        bounds: First element of each share, and n.
        first_tensor: Number of this rank's first tensor.
        share: This rank's share. It may have no tensors.
        inner: The state of the compressor for the share.
        rounds: Rounds between machines that the longest share needed in the last step.
    """

    bounds: tuple[int, ...]
    first_tensor: int
    share: Bucket
    inner: Any
    rounds: int = 1

    @property
    def tensors(self) -> list[str]:
        """Names of the parameters with a residual on this rank."""
        return [s.name for s in self.share.segments]

    def unsent(self, bucket: Bucket) -> list[Tensor]:
        return self.inner.unsent(self.share) if self.tensors else []

    def saved(self, bucket: Bucket) -> Tables:
        return self.inner.saved(self.share) if self.tensors else {}

    def loaded(self, bucket: Bucket, tables: Tables) -> "ShareState":
        return replace(self, inner=self.inner.loaded(self.share, tables)) if self.tensors else self


class _Conversation:
    """A conversation between machines, round by round. `requests` belong to the next round."""

    def __init__(self, conversation: Conversation[Reduced]):
        self._conversation = conversation
        self.requests: tuple[Request, ...] = ()
        self.rounds = 0
        self.result: Reduced | None = None

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


class HierarchicalCompressor(Compressor):
    """Averages densely inside each machine, and with another compressor between machines.

    `DistributedOptimizer(hierarchical=...)` makes it; its state is the state of `inner`, for this rank's tensors.

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
        if inner.point_to_point:
            raise ValueError(
                f"{type(inner).__name__} sends messages from rank to rank, and not between machines alone: use "
                "hierarchical='off'"
            )
        self.inner, self.place = inner, place
        self._loads = [0] * place.local_size if loads is None else loads

    @property
    def class_name(self) -> str:
        return self.inner.class_name

    @property
    def correction(self) -> MomentumCorrection | None:
        return self.inner.correction

    @property
    def compress_ratio(self) -> float:
        return self.inner.compress_ratio

    @cached_property
    def fallback(self) -> "HierarchicalCompressor":
        inner = self.inner.fallback
        return self if inner is self.inner else HierarchicalCompressor(inner, self.place, self._loads)

    def accepts(self, segment: Segment) -> bool:
        return self.inner.accepts(segment)

    def in_epoch(self, epoch: int) -> "HierarchicalCompressor":
        inner = self.inner.in_epoch(epoch)
        return self if inner is self.inner else HierarchicalCompressor(inner, self.place, self._loads)

    def at_epoch(self, bucket: Bucket, state: ShareState, epoch: int) -> ShareState:
        inner = self.inner.at_epoch(state.share, state.inner, epoch) if state.tensors else state.inner
        return replace(state, inner=inner)

    def used_by(self, run: Run) -> None:
        self.inner.used_by(run)

    def ratio_of(self, states: Sequence[tuple[Bucket, ShareState]]) -> float:
        return self.inner.ratio_of([(state.share, state.inner) for _, state in states if state.tensors])

    def init(self, bucket: Bucket, size: int, rank: int) -> ShareState:
        assert size == self.place.machines * self.place.local_size
        firsts = divide(bucket.segments, self._loads)
        offsets = [*(s.offset for s in bucket.segments), bucket.numel]
        bounds = tuple(offsets[first] for first in firsts)
        for local_rank, (start, end) in enumerate(pairwise(bounds)):
            self._loads[local_rank] += end - start
        first, end = firsts[self.place.local_rank :][:2]
        own = [replace(s, offset=s.offset - offsets[first]) for s in bucket.segments[first:end]]
        share = Bucket(f"{bucket.name}.share", own, bucket.dtype, bucket.device)
        inner = self.inner.init(share, self.place.machines, self.place.machine) if own else None
        dense, partial = (None, ()) if inner is None else (inner.dense, inner.partial)
        return ShareState(
            size, rank, bounds=bounds, first_tensor=first, share=share, inner=inner, dense=dense, partial=partial
        )

    # --- one step ---------------------------------------------------------------------------------

    def reduce(self, bucket: Bucket, state: ShareState) -> Conversation[Reduced]:
        own = bucket.probe()
        mean = yield from self._mean_inside(bucket, state)
        between = _Conversation(self._between(state, mean))
        yield from between.resume(None)
        for _ in range(state.rounds):
            yield from between.resume((yield between.requests))
        reports = [[RUNNING, 0]]
        while any(rounds == RUNNING for rounds, _ in reports):
            # equal places on all ranks of a group must have equal requests: requests of all ranks come first
            last_round = self._last_round(bucket, state, between)
            replies = yield (*last_round, *between.requests)
            yield from between.resume(replies[len(last_round) :])
            gathered, *parts = replies[: len(last_round)]
            reports = yield from open_numbers(f"bucket {bucket.name} inside its machine", gathered, 2)
            for request, part in zip(last_round[1:], parts, strict=True):
                request.tensor.copy_(part)
        rounds, reduced = max(rounds for rounds, _ in reports), between.result
        assert reduced is not None
        new = state.changed(rounds=rounds, inner=reduced.state, dense=reduced.state.dense)
        old = state.changed(rounds=rounds, inner=state.inner if reduced.dropped is None else reduced.dropped)
        bad = any(nonfinite for _, nonfinite in reports)
        message = (yield from self._explain(bucket, state, own, mean)) if bad else None
        return Reduced(DenseResult(message, is_finite=True), new, old)

    def _mean_inside(self, bucket: Bucket, state: ShareState) -> Conversation[Shaped[Tensor, "share"]]:
        """The mean over the machine's ranks of their gradients of this rank's share, in the bucket's dtype."""
        # as bytes, because not every transport sends bf16
        edges = [bound * bucket.dtype.itemsize for bound in state.bounds]
        splits = tuple(end - start for start, end in pairwise(edges))
        own = (splits[self.place.local_rank],) * len(splits)
        (parts,) = yield (AllToAll(as_bytes(bucket.flat), splits, "local", own),)
        first, *others = (part.view(bucket.dtype) for part in parts)
        total = first.to(torch.promote_types(bucket.dtype, torch.float32), copy=True)
        for other in others:
            total += other
        return total.div_(len(parts)).to(bucket.dtype)

    def _between(self, state: ShareState, mean: Shaped[Tensor, "share"]) -> Conversation[Reduced]:
        """The compressor's conversation about this rank's share, and whether its mean is finite."""
        bucket = state.share
        if not bucket.segments:
            return Reduced(DenseResult(is_finite=True), state)
        for i, s in enumerate(bucket.segments):
            bucket.use_gradient(i, mean[s.offset : s.offset + s.numel])
        reduced = yield from self.inner.reduce(bucket, state.inner)
        message = yield from check_means([(bucket, reduced.result)])
        result = replace(reduced.result, nonfinite=message)
        return replace(reduced, result=replace(result, reports=()) if isinstance(result, DenseResult) else result)

    def _last_round(self, bucket: Bucket, state: ShareState, between: _Conversation) -> tuple[Any, ...]:
        """The requests of the last round: a report, and every share that is not empty."""
        result = None if between.result is None else between.result.result
        own = bucket.flat[state.bounds[self.place.local_rank] :][: state.share.numel]
        if result is not None and state.tensors:
            result.write_to(state.share)
            own.copy_(state.share.flat)
        report = [RUNNING, 0] if result is None else [between.rounds, int(result.nonfinite is not None)]
        parts = [bucket.flat[start:end] for start, end in pairwise(state.bounds)]
        return (
            AllGather(seal_numbers(report, bucket.device), "local"),
            *(Broadcast(as_bytes(part), root, "local") for root, part in enumerate(parts) if part.numel()),
        )

    def _explain(
        self, bucket: Bucket, state: ShareState, own: Tensor, mean: Shaped[Tensor, "share"]
    ) -> Conversation[str]:
        """The message for a bucket that is not finite. All ranks know that it is not, so all take part.

        own: the probe of this rank's gradient. mean: the machine's, of this rank's share.
        """
        number = first_tensor_nonfinite(mean, [s.offset for s in state.share.segments])
        if number:
            number += state.first_tensor
        else:
            number = first_tensor_nonfinite(bucket.flat, [s.offset for s in bucket.segments])
        found = [number, int(not own.isfinite())]
        (payloads,) = yield (AllGather(seal_numbers(found, bucket.device)),)
        reports = yield from open_numbers(f"bucket {bucket.name}", payloads, 2)
        numbers, bad = zip(*reports, strict=True)
        first = min((number for number in numbers if number), default=None)
        if first is None:
            return f"a gradient of bucket {bucket.name} is not finite"
        return nonfinite_message(bucket, first, [rank for rank, flag in enumerate(bad) if flag])


MODES = {True: "on", False: "off"}


def mode_of(hierarchical: str | bool) -> str:
    """Return "on", "off" or "auto". Raises ValueError for another value."""
    mode = MODES[hierarchical] if isinstance(hierarchical, bool) else hierarchical
    if mode not in ("auto", "on", "off"):
        raise ValueError(f"hierarchical must be 'auto', 'on' or 'off', not {hierarchical!r}")
    return mode


def choose_place(
    transport: Transport, hierarchical: str | bool, compressors: Sequence[Compressor]
) -> MachineRank | None:
    """Return this rank's place among the machines, or None if all ranks are treated alike. Collective.

    With "auto" and only stateless compressors, which reduce in one step, the result is None: the all-reduce of MPI
    and NCCL takes the machines into account already.

    hierarchical: "on", "off", "auto", or a bool. The same on every rank.

    Raises:
        ValueError: `hierarchical` is none of these; or it is "on", and the transport has no groups, or machines
            have different numbers of ranks.
    """
    mode = mode_of(hierarchical)
    stateless = all(isinstance(compressor, StatelessCompressor) for compressor in compressors)
    if mode == "off" or (mode == "auto" and (stateless or not _has_groups(transport))):
        return None
    try:
        place = find_machine_rank(transport, "hierarchical='on'")
    except ValueError as error:
        if mode == "on":
            raise
        if transport.rank == 0:
            warn(f"{error}: hierarchical='auto' treats all ranks alike")
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
) -> tuple[MachineRank | None, ResidualPart | None]:
    """Let the compressors plan their buckets, for all ranks or for the machines. Collective.

    On two levels the compressors of the buckets are replaced. Returns this rank's place among the machines, and
    the part of its machine's residual that it has, None if all ranks are treated alike.
    """
    compressors = list({id(plan.compressor): plan.compressor for plan in planned}.values())
    check_can_send(compressors, transport)
    place = choose_place(transport, hierarchical, compressors)
    if place is not None:
        loads = [0] * place.local_size
        replace_compressors(planned, {id(c): HierarchicalCompressor(c, place, loads) for c in compressors})
    keep_states(planned, transport.size, transport.rank)
    if place is None:
        return None, None
    tensors = {name for plan in planned for name in plan.states[plan.bucket].tensors}
    others = {s.name for plan in planned for s in plan.bucket.segments} - tensors
    return place, ResidualPart(
        machine=place.machine, machines=place.machines, tensors=sorted(tensors), others=sorted(others)
    )
