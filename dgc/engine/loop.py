"""The loop of one step: buckets start in one order on every rank, advance, and finish or are dropped.

Adapters call it: DistributedOptimizer, the hooks of DDP and FSDP2, lists of gradients (`dgc.aggregate`) and outer
steps. An adapter fills the buckets, says when a gradient is complete, and puts the means where they belong.

    engine.order.add(g)                          for each complete gradient of group g
    for g in engine.order.start():               groups that may start now
        engine.start(g)
    engine.advance()                             any number of times
    outcome = engine.finish()                    results, or the reason why every rank drops the step

Which replies arrive first depends on timing. The order of launches on one communicator must not depend on it:

- The caller starts groups, and so launches round 0 of their conversations, in the same order on every rank.
- Round r of a conversation is launched after round r of all conversations that started before it.
- Each round r < COMMUNICATORS has a communicator of its own. The order between round 0 of one conversation and
  round 1 of another therefore does not matter.
- Later rounds are launched by `finish` alone, on the communicator of round 0: for each r, round r of all
  conversations. Only its continuation shows whether a conversation has more rounds, so `finish` does that too.

Loss scaling (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2): with scale s the loss is multiplied by s,
so backward computes s g. A bucket is divided by s before compression and multiplied by s after it. The residual
therefore does not depend on s, which may change from step to step, and GradScaler.unscale_ works as usual. If any
rank's gradient has NaN or inf, all ranks get NaN. Every rank's scaler then skips the step and lowers s by the same
factor.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.comm.collectives import broadcast_object
from dgc.comm.conversation import Intact, RunningConversation
from dgc.comm.meter import TrafficMeter
from dgc.comm.requests import is_on_host
from dgc.comm.staging import HostCopy
from dgc.comm.transport import Transport
from dgc.core.results import DenseResult, Report, Result, check_means, explained, joined
from dgc.engine.buckets import PlannedBucket
from dgc.engine.drops import is_used
from dgc.engine.steps import check_not_running

NO_STREAM = nullcontext()
COMMUNICATORS = 3  # few methods have more rounds. With torch.distributed each has connections of its own.


class StartOrder:
    """The order in which groups of buckets start: one for all ranks, close to the order in which they fill.

    A group may start when it is full and all groups before it have started. The first step takes the order of the
    plan, later steps the order in which rank 0 filled them.

    sizes: number of gradients of each group. name: prefix of control messages, unique on the transport.
    """

    def __init__(self, sizes: Sequence[int], transport: Transport, name: str):
        self.groups = list(range(len(sizes)))  # in the order in which they start
        self._sizes, self._transport, self._name = sizes, transport, name
        self.is_learned = False
        self.reset()

    def reset(self) -> None:
        """Begin a step: no group has gradients or has started."""
        self._missing = list(self._sizes)
        self._filled: list[int] = []
        self._started = 0

    def add(self, group: int) -> bool:
        """Count one more complete gradient of a group. Return whether the group is full now."""
        self._missing[group] -= 1
        if self._missing[group] == 0:
            self._filled.append(group)
        return self._missing[group] == 0

    def start(self, only_full: bool = True) -> Iterator[int]:
        """Yield the groups to start now, in order. With only_full=False these are all that have not started."""
        while self._started < len(self.groups):
            group = self.groups[self._started]
            if only_full and self._missing[group]:
                return
            yield group
            self._started += 1  # unless the caller has failed to start it

    def learn(self) -> None:
        """Take over the order in which rank 0 has filled its groups, unless it has filled none. Collective."""
        filled = broadcast_object(self._transport, self._filled, name=f"{self._name}.order")
        self.groups = list(dict.fromkeys([*filled, *self.groups]))
        self.is_learned = bool(filled)


class LossScale:
    """Removes the scale of a GradScaler before compression and restores it afterwards. None: no scaling.

    Raises:
        ValueError: Scaling is enabled and a parameter is fp16. GradScaler cannot unscale fp16 gradients.
    """

    def __init__(self, grad_scaler: Any, planned: Sequence[PlannedBucket]):
        self._scaler = grad_scaler
        self.enabled = is_used(grad_scaler)
        half = [s.name for p in planned if p.bucket.dtype == torch.float16 for s in p.bucket.segments]
        if self.enabled and half:
            raise ValueError(
                f"grad_scaler cannot unscale gradients of fp16 parameters, such as {half[0]}: keep parameters in "
                "fp32 and use torch.autocast"
            )

    def divide_(self, flat: Tensor) -> None:
        flat.div_(self._on(flat.device))

    def multiply_(self, flat: Tensor) -> None:
        if self.enabled:
            flat.mul_(self._on(flat.device))

    def check_before_averaging(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError if there is no scaler, or it has already unscaled the gradients."""
        if not self.enabled:
            raise RuntimeError(
                "a GradScaler steps this DistributedOptimizer but was not passed to it: pass it as grad_scaler="
            )
        if self._is_unscaled(optimizer):
            raise RuntimeError(
                "unscale_(optimizer) was called before optimizer.synchronize(): first average the gradients, then "
                "unscale, then clip, then step inside optimizer.skip_synchronize()"
            )

    def check_before_step(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError if a step would use scaled gradients."""
        steps_scaled = getattr(optimizer, "grad_scale", None) is not None  # a fused optimizer unscales in its step
        if self.enabled and not steps_scaled and not self._is_unscaled(optimizer):
            raise RuntimeError("the gradients are scaled: call grad_scaler.step(optimizer), not optimizer.step()")

    def _is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether the scaler has unscaled this optimizer's gradients since its last update()."""
        return self._scaler._per_optimizer_states[id(optimizer)]["stage"].name == "UNSCALED"

    def _on(self, device: torch.device) -> Tensor:
        # not get_scale(), which waits for the device
        return self._scaler.scale(torch.ones((), dtype=torch.float32, device=device))


class SideStream:
    """A stream next to the caller's current stream.

    Work inside `after_caller` waits for the work that the caller has queued so far. Work inside `concurrently`
    does not. After `join`, the caller's stream waits for the side stream. The host never waits.
    """

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)

    def after_caller(self) -> AbstractContextManager[Any]:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        return self.concurrently()

    def concurrently(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)

    def join(self) -> None:
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


class Running(NamedTuple):
    """A bucket whose exchange has started. position: its number in the plan."""

    position: int
    plan: PlannedBucket
    conversation: RunningConversation[Result]
    side: SideStream | None


@dataclass(frozen=True)
class Outcome:
    """The end of a step.

    Attributes:
        results: Buckets and their results, in the order of the plan.
        nonfinite: Why no result may be used, or None. The same on every rank.
    """

    results: list[tuple[PlannedBucket, Result]]
    nonfinite: str | None


class Engine:
    """Runs the conversations of the buckets of each step. Construction is collective.

    If a result is not finite, `finish` undoes the step in the state of all methods. After an exception in a method
    or in the network, `intact` does not let the next use continue.

    Args:
        groups: The buckets. The buckets of one group start together.
        transport: Connects the ranks.
        meter: Counts bytes and seconds.
        name: Prefix of communicators and messages, unique on the transports.
        begin_step: Called before the first bucket of each step starts.
        loss_scale: Removes the loss scale before compression.
        counts_dense: Count what a dense exchange would send. Otherwise the caller does.
        others: The transports of the buckets that have one of their own, in one order on all ranks.

    Attributes:
        order: Says which groups may start. Each gradient of a group must be added once.
        in_flight: Whether a bucket of this step has started.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[PlannedBucket]],
        transport: Transport,
        meter: TrafficMeter,
        name: str,
        begin_step: Callable[[], None] = lambda: None,
        loss_scale: LossScale | None = None,
        counts_dense: bool = True,
        others: Sequence[Transport] = (),
    ):
        self.groups, self.meter, self._name = groups, meter, name
        planned = [plan for group in groups for plan in group]
        self.loss_scale = loss_scale or LossScale(None, planned)
        self.order = StartOrder([sum(len(p.parameters) for p in group) for group in groups], transport, name)
        devices = dict.fromkeys(p.bucket.device for p in planned)
        self.streams = {device: SideStream(device) for device in devices if device.type == "cuda"}
        self._transport, self._begin_step, self._counts_dense = transport, begin_step, counts_dense
        self._position = {plan.bucket.name: i for i, plan in enumerate(planned)}
        self._communicators = [f"{name}.round{r}" for r in range(COMMUNICATORS)]
        self._transports = list(dict.fromkeys([transport, *others]))
        for connection in self._transports:
            for communicator in self._communicators:
                connection.open_communicator(communicator)
        self.intact, self.in_flight = Intact(), False
        self._started: list[Running] = []
        self._waiting: deque[Running] = deque()  # the last ones of them, not all of which are done

    def _transport_of(self, plan: PlannedBucket) -> Transport:
        return plan.transport or self._transport

    def check_ended(self, where: str) -> None:
        """Raise RuntimeError if an exception has ended a step after buckets had started. where: in which call."""
        if self.in_flight:
            self.intact.fail(f"in {where}, while gradients were exchanged")
        self.intact.check()

    def check_idle(self, call: str, is_running: bool) -> None:
        """Raise RuntimeError if `call` would meet an incomplete step. Nothing changes if the step still runs."""
        self.intact.check()
        check_not_running(call, self.intact.is_entered or (self.in_flight and is_running))
        self.check_ended("backward()")

    def reset(self) -> None:
        """Begin a step: no bucket has gradients or has started."""
        self.order.reset()
        self.in_flight = False
        self._started.clear()
        self._waiting.clear()

    def start(self, g: int) -> None:
        """Start the buckets of group number `g`."""
        if not self.in_flight:
            self._begin_step()
            self.in_flight = True
        for plan in self.groups[g]:
            ranks = self._transport_of(plan)
            if self._counts_dense:
                self.meter.count_dense(plan.bucket.numel, ranks.size)
            side = self.streams.get(plan.bucket.device)
            with side.after_caller() if side else NO_STREAM, self.intact:
                if self.loss_scale.enabled:
                    self.loss_scale.divide_(plan.bucket.flat)
                conversation = RunningConversation(
                    plan.bucket.name,
                    plan.states.reduce(plan.bucket),
                    ranks,
                    self.meter,
                    self._communicators,
                )
            running = Running(self._position[plan.bucket.name], plan, conversation, side)
            self._started.append(running)
            self._waiting.append(running)

    def advance(self) -> None:
        """Continue what has arrived, without waiting."""
        while self._waiting and self._waiting[0].conversation.done:
            self._waiting.popleft()
        limit = COMMUNICATORS
        for running in self._waiting:
            conversation = running.conversation
            if not conversation.done:
                with self.intact, running.side.concurrently() if running.side else NO_STREAM:
                    done = conversation.advance(limit)
                limit = limit if done else min(limit, conversation.rounds)
                if limit == 1:  # all others wait in their first round, and may not begin another one
                    break

    def finish(self, learn: bool = False, judge: Callable[[str | None], str | None] | None = None) -> Outcome:
        """Wait for the buckets that have started, and end the step.

        learn: Use the order in which rank 0 has filled its buckets in all later steps. Collective.
        judge: Given why the results of this rank cannot be used, or None, returns why the results of no rank can.
        """
        with self.intact:
            self._wait()
            started = sorted(self._started)  # by position
            if learn and not self.order.is_learned:
                self.order.learn()
            self.reset()
            for side in self.streams.values():
                side.join()
            results = [(running.plan, running.conversation.result) for running in started]
            reasons = [self._unusable(own, ranks) for ranks, own in self._by_transport(results)]
            reason = next((found for found in reasons if found is not None), None)
            reason = reason if judge is None else judge(reason)
            if reason is not None:
                for running in started:
                    running.plan.states.rollback(running.plan.bucket)
            return Outcome(results, reason)

    def _by_transport(
        self, results: list[tuple[PlannedBucket, Result]]
    ) -> list[tuple[Transport, list[tuple[PlannedBucket, Result]]]]:
        if len(self._transports) == 1:
            return [(self._transport, results)]
        return [(ranks, [r for r in results if self._transport_of(r[0]) is ranks]) for ranks in self._transports]

    def _unusable(self, results: list[tuple[PlannedBucket, Result]], ranks: Transport) -> str | None:
        """Return why the results on a transport must not be used, or None: the same on all its ranks."""
        reason, reports, probes, is_finite = None, list[Report](), list[Tensor](), True
        for plan, result in results:
            reason = reason or result.nonfinite
            reports += result.reports
            if isinstance(result, DenseResult) and not result.is_finite:
                probe = plan.bucket.probe()
                if is_on_host(probe):
                    is_finite = is_finite and isfinite(probe.item())
                else:
                    probes.append(probe.isfinite())
        if reports or probes:  # the host waits once
            numbers = HostCopy(joined(reports, probes)).wait()
            reason = explained(reports, numbers) or reason
            is_finite = is_finite and all(numbers[len(numbers) - len(probes) :])
        if reason is not None or is_finite:
            return reason
        # large finite elements may have made a sum infinite
        check, name = check_means([(plan.bucket, result) for plan, result in results]), f"{self._name}.means"
        return RunningConversation(name, check, ranks, self.meter, self._communicators).finish()

    def _wait(self) -> None:
        """Wait for all rounds of all conversations. Those that can end do so while others are in flight."""
        rounds, remaining = 1, list(self._waiting)
        while remaining:
            waited, remaining = remaining, []
            for running in waited:
                if running.conversation.rounds == rounds:
                    if not running.conversation.has_replies:
                        self._end_first()
                    with running.side.concurrently() if running.side else NO_STREAM:
                        running.conversation.finish_round()
                if not running.conversation.done:
                    remaining.append(running)
            rounds += 1

    def _end_first(self) -> None:
        """Continue the first conversation as far as its replies have come, and the next one if it has ended."""
        while self._waiting:
            running = self._waiting[0]
            with running.side.concurrently() if running.side else NO_STREAM:
                if not running.conversation.done and not running.conversation.advance(COMMUNICATORS):
                    return
            self._waiting.popleft()
