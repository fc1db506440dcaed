"""The exchange of the gradients of a step.

Hooks fill the buckets during backward. The exchange of a full bucket starts at once, if all buckets before it have
started. `finish` waits for all. Every rank exchanges every bucket in every step, in the same order. A parameter
without a gradient counts as zero.
"""

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dgc.engine.buckets import PlannedBucket
from dgc.engine.loop import Engine, Outcome
from dgc.engine.options import claim, release


class GradientExchange:
    """Exchanges the gradients of every step, always in the same buckets.

    A bucket is full when each of its parameters has received `passes` gradients. It starts then, if all buckets
    before it have started, or at `finish`. Hooks may run in several threads (one per device), so a lock guards the
    state. A parameter's .grad may change between passes. It must not change between its last gradient and
    `finish`, whether or not its bucket has started (RuntimeError).

    After an exception in backward, `zero` begins the step again if no bucket has started. Otherwise `finish` must
    be called, as on the other ranks: gradients that are missing count as zero. After an exception in the exchange
    itself, `engine.intact` does not let it continue.

    Args:
        engine: Exchanges the buckets. Each is a group of its own.
        passes: Backward passes per step.
    """

    def __init__(self, engine: Engine, passes: int):
        self.engine, self.passes = engine, passes
        self.planned = [plan for group in engine.groups for plan in group]
        self.had_backward = False
        self.averaged = False  # whether .grad holds the results of `finish`, with nothing added since
        self._lock = threading.RLock()
        self.slots = {p: (b, i) for b, plan in enumerate(self.planned) for i, p in enumerate(plan.parameters)}
        self._handles: list[Any] = [p.register_post_accumulate_grad_hook(self._hook) for p in self.slots]
        claim(self.slots, self, "DistributedOptimizer")
        self._reset()

    def _reset(self) -> None:
        self._passes_left = dict.fromkeys(self.slots, self.passes)
        self._final_gradients: dict[Tensor, tuple[Tensor, int]] = {}  # complete gradients and their versions
        self.engine.reset()

    def __contains__(self, p: object) -> bool:
        return p in self.slots

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.slots)

    def _hook(self, p: Tensor) -> None:
        with self._lock:
            self.had_backward, self.averaged = True, False
            b, i = self.slots[p]
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
                if self.engine.order.add(b):
                    for full in self.engine.order.start():
                        self._start(full)
                    self.engine.advance()

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
        self.engine.start(b)
        if plan.bucket.is_flat:
            plan.attach()  # the gradients were copied: free the originals
            for p in plan.parameters:
                self._record_version(p)

    def finish(self) -> Outcome:
        """Start the buckets that backward did not fill, and wait for all. There is one result per bucket."""
        with self._lock, torch.no_grad():
            for plan in self.planned:
                self._check_unchanged(plan)
            with self.engine.intact:
                for b in self.engine.order.start(only_full=False):
                    plan = self.planned[b]
                    for i in range(len(plan.parameters)):
                        plan.collect(i)
                    self._start(b)
                outcome = self.engine.finish(learn=True)
                for plan in self.planned:
                    if plan.bucket.is_flat:
                        plan.attach()
                    plan.bucket.release()
                self._reset()
                self.averaged = True
            return outcome

    def zero(self, set_to_none: bool) -> None:
        """Drop all gradients, or make them zero views into the buckets.

        Dropping is faster: backward then stores a new gradient instead of adding to zeros.
        """
        self.engine.intact.check()
        if self.engine.in_flight:
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
        gradients = [p.grad for p in self.slots]
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
        release(self.slots)
