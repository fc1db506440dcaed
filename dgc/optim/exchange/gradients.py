"""The exchange of the gradients of a step.

Hooks fill the buckets during backward. The exchange of a full bucket starts at once, if all buckets before it have
started. `finish` waits for all. Every rank exchanges every bucket in every step, in the same order. A parameter
without a gradient counts as zero.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from dgc.comm.conversation import Intact, OrderedConversations
from dgc.comm.meter import TrafficMeter
from dgc.comm.transport import Transport
from dgc.compression.protocol import Result, conversation_of
from dgc.optim.exchange.planning import PlannedBucket
from dgc.optim.exchange.scaling import LossScale
from dgc.optim.exchange.start_order import StartOrder
from dgc.optim.exchange.streams import SideStream

# of each parameter with hooks, a weak reference to what averages its gradients
_owners: MutableMapping[Tensor, weakref.ref[Any]] = WeakIdKeyDictionary()


def claim(parameters: Iterable[Tensor], owner: Any) -> None:
    """Record that `owner`, a GradientExchange or a DistributedDataParallel, averages these gradients."""
    _owners.update((p, weakref.ref(owner)) for p in parameters)


def check_not_wrapped(named_parameters: Iterable[tuple[str, Tensor]], by_ddp: bool = False) -> None:
    """Check that nothing else averages the gradients of these parameters, because they would be averaged twice.

    Args:
        named_parameters: (name, parameter) pairs.
        by_ddp: A new DistributedDataParallel is to average them, in place of an earlier one.

    Raises:
        ValueError: A parameter belongs to another DistributedOptimizer, or to a DistributedDataParallel.
    """
    for name, p in named_parameters:
        owner = _owners[p]() if p in _owners else None
        if isinstance(owner, GradientExchange):
            raise ValueError(
                f"{name} belongs to another DistributedOptimizer already: close() that one before wrapping its "
                "parameters again"
            )
        if owner is not None and not by_ddp:
            raise ValueError(
                f"dgc.ddp.compress exchanges the gradient of {name} already: step the optimizer itself, without "
                "DistributedOptimizer, or delete the model in DistributedDataParallel first"
            )


class GradientExchange:
    """Exchanges the gradients of every step, always in the same buckets.

    A bucket is full when each of its parameters has received `passes` gradients. It starts then, if all buckets
    before it in `StartOrder` have started, or at `finish`. Hooks may run in several threads (one per device), so a
    lock guards the state. A parameter's .grad may change between passes. It must not change between its last
    gradient and `finish`, whether or not its bucket has started (RuntimeError).

    After an exception in backward, `zero` begins the step again if no bucket has started. Otherwise `finish` must
    be called, as on the other ranks: gradients that are missing count as zero. After an exception in the exchange
    itself, `intact` does not let it continue.

    Args:
        planned: The buckets, in the order in which backward fills them.
        passes: Backward passes per step.
        transport: Connects the ranks.
        meter: Counts bytes and seconds.
        loss_scale: Removes the loss scale before compression.
        begin_step: Called before the first bucket of each step starts.
        name: Prefix of lanes and control messages, unique on the transport.
    """

    def __init__(
        self,
        planned: Sequence[PlannedBucket],
        passes: int,
        transport: Transport,
        meter: TrafficMeter,
        loss_scale: LossScale,
        begin_step: Callable[[], None],
        name: str,
    ):
        self.planned, self.passes, self.meter = planned, passes, meter
        self.had_backward = False
        self.averaged = False  # whether .grad holds the results of `finish`, with nothing added since
        self._transport, self._loss_scale, self._begin_step = transport, loss_scale, begin_step
        self._lock = threading.RLock()
        self._slots = {p: (b, i) for b, plan in enumerate(planned) for i, p in enumerate(plan.parameters)}
        self._side_streams = {device: SideStream(device) for device in {plan.bucket.device for plan in planned}}
        self._conversations: OrderedConversations[Result] = OrderedConversations(name, transport, meter)
        self._order = StartOrder([len(plan.parameters) for plan in planned], transport, name)
        self._handles: list[Any] = [p.register_post_accumulate_grad_hook(self._hook) for p in self._slots]
        claim(self._slots, self)
        self._reset()

    def _reset(self) -> None:
        self._passes_left = dict.fromkeys(self._slots, self.passes)
        self._order.reset()
        self._conversations.clear()
        self._final_gradients: dict[Tensor, tuple[Tensor, int]] = {}  # complete gradients and their versions

    def __contains__(self, p: object) -> bool:
        return p in self._slots

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._slots)

    @property
    def intact(self) -> Intact:
        """Guards the exchange, and what must happen after it on every rank."""
        return self._conversations.intact

    @property
    def in_flight(self) -> bool:
        return len(self._conversations) > 0

    def _hook(self, p: Tensor) -> None:
        with self._lock:
            self.had_backward, self.averaged = True, False
            b, i = self._slots[p]
            if self._passes_left[p] == 0:
                raise RuntimeError(
                    f"{self.planned[b].bucket.segments[i].name} received more gradients than "
                    f"backward_passes_per_step={self.passes} since the last step() or synchronize(). If an "
                    "exception ended an earlier backward, call zero_grad() after it"
                )
            with torch.no_grad():
                self.planned[b].collect(i)
            self._passes_left[p] -= 1
            if self._passes_left[p] == 0:
                self._record_version(p)
                self._order.add(b)
                for full in self._order.start():
                    self._start(full)
            with torch.no_grad():
                self._conversations.advance()

    def _record_version(self, p: Tensor) -> None:
        assert p.grad is not None
        self._final_gradients[p] = p.grad, p.grad._version

    def _check_unchanged(self, plan: PlannedBucket) -> None:
        """Raise RuntimeError if a complete gradient has changed, as sent values would depend on timing."""
        for p, segment in zip(plan.parameters, plan.bucket.segments, strict=True):
            final = self._final_gradients.get(p)
            if final is not None and (p.grad is not final[0] or final[0]._version != final[1]):
                raise RuntimeError(
                    f"the gradient of {segment.name} changed between backward and step() or synchronize(), while "
                    "gradients are exchanged: call optimizer.synchronize() first, then clip, then step() inside "
                    "optimizer.skip_synchronize()"
                )

    def _start(self, b: int) -> None:
        plan = self.planned[b]
        self._check_unchanged(plan)
        if not self.in_flight:
            self._begin_step()
        self.meter.count_dense(plan.bucket.numel, self._transport.size)
        with torch.no_grad(), self._side_stream(b).after_caller():
            if self._loss_scale.enabled:
                self._loss_scale.divide_(plan.bucket.flat)
            conversation = conversation_of(plan.compressor, plan.bucket)
            self._conversations.start(plan.bucket.name, conversation, self._side_stream(b).concurrently)
        if plan.bucket.is_flat:
            plan.attach()  # the gradients were copied: free the originals
            for p in plan.parameters:
                self._record_version(p)

    def _side_stream(self, b: int) -> SideStream:
        return self._side_streams[self.planned[b].bucket.device]

    def finish(self) -> list[Result]:
        """Start the buckets that backward did not fill and wait for all. Returns one result per bucket."""
        with self._lock, torch.no_grad():
            for plan in self.planned:
                self._check_unchanged(plan)
            with self.intact:
                for b in self._order.start(only_full=False):
                    plan = self.planned[b]
                    for i in range(len(plan.parameters)):
                        plan.collect(i)
                    self._start(b)
                result_of = dict(zip(self._order.buckets, self._conversations.finish(), strict=True))
                results = [result_of[b] for b in range(len(self.planned))]
                self._order.learn()
                for side in self._side_streams.values():
                    side.join()
                for plan in self.planned:
                    if plan.bucket.is_flat:
                        plan.attach()
                    plan.bucket.release()
                self._reset()
                self.averaged = True
            return results

    def zero(self, set_to_none: bool) -> None:
        """Drop all gradients, or make them zero views into the buckets.

        Dropping is faster: backward then stores a new gradient instead of adding to zeros.
        """
        self.intact.check()
        if self.in_flight:
            raise RuntimeError(
                "zero_grad() between backward and step() or synchronize(), while gradients are in flight. After "
                "an exception in backward call step() all the same, as other ranks do: what is missing is zero"
            )
        for plan in self.planned:
            if set_to_none:
                for p in plan.parameters:
                    p.grad = None
            else:
                plan.bucket.flat.zero_()
                plan.attach()
        self._reset()
        self.averaged = False

    def is_state_initialisation(self) -> bool:
        """Whether hvd.broadcast_optimizer_state called step() on zero gradients to create optimizer state.

        Only the ranks without state do so. Nothing may be exchanged, and no weight may change.
        """
        if self.had_backward:
            return False
        gradients = [p.grad for p in self._slots]
        foreign = [
            p.grad
            for plan in self.planned
            for i, p in enumerate(plan.parameters)
            if p.grad is not None and not plan.is_view(i, p.grad)
        ]
        if not foreign or len(foreign) < len(gradients):
            return False
        # small ones first: one of them usually ends the search
        return not any(g.count_nonzero() for g in sorted(foreign, key=Tensor.numel))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        for p in self._slots:
            _owners.pop(p, None)
