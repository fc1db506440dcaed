"""DistributedOptimizer: Horovod's interface with gradient compression.

Hooks fill the buckets during backward. The exchange of a full bucket starts at once, if all buckets before it have
started. `step()` waits for all exchanges and then steps the wrapped optimizer on the averages. In each step every
rank exchanges all buckets, in the same order. A parameter without a gradient counts as zero.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer, SparseAdam

from dgc.comm.collectives import all_reduce
from dgc.comm.connect import default_transport, process_set_transport
from dgc.comm.meter import TrafficMeter
from dgc.comm.transport import Transport
from dgc.core.dense import HorovodCompression
from dgc.core.protocol import Compressor
from dgc.core.results import NonFiniteGradientError, Result, SparseResult
from dgc.core.route import Route
from dgc.engine.buckets import PlannedBucket, SparseUpdate
from dgc.engine.exchange import ExchangeSettings, GradientExchange, plan_gradients
from dgc.engine.momentum import SupportsCorrectedGradients
from dgc.engine.options import (
    SharesSteps,
    check_arguments,
    check_needs_no_closure,
    check_no_unfrozen,
    check_not_sharded,
    check_not_wrapped,
    check_steps,
    check_transport,
    claim,
    ddp_of,
    loss_of,
    name_parameters,
    reduction_factor,
    release,
)
from dgc.engine.steps import check_taken
from dgc.optim.broadcast import create_state
from dgc.optim.wrapper import Wrapper
from dgc.warn import warn

OF_ANOTHER = (
    "If it was the backward pass of another optimizer's loss, as the loss of a GAN's generator reaches the "
    "discriminator, step() would train the wrong network: call requires_grad_(False) on these parameters before "
    "that pass, and requires_grad_(True) after it"
)


class DistributedOptimizer(Wrapper, GradientExchange):
    """Wraps an optimizer: averages its gradients over all ranks with compression, then steps it on the averages.

    Learning-rate schedulers, parameter groups and state belong to the wrapped optimizer. Parameters without
    requires_grad at construction take no part: to train them later, close() this optimizer and wrap again.
    Parameters that are frozen later stay unchanged.

    A parameter's .grad may change between backward passes, but not between its last gradient and step() or
    synchronize(), whether or not its bucket has started (RuntimeError). After an exception in backward,
    zero_grad() begins the step again, or says that gradients are in flight: step() then finishes it, as on the
    other ranks. After an exception in step() or in a compressor nothing can be used.

    Args:
        optimizer: The optimizer to wrap.
        named_parameters: `model.named_parameters()`. None: names are made from group and position.
        compression: A compressor of `dgc.compression`, a Route, or Horovod's Compression.none or .fp16. None: no
            compression.
        backward_passes_per_step: Number of gradients that backward adds up before the exchange.
        op: "average" or "sum", or Horovod's Average or Sum.
        gradient_predivide_factor: Must be 1.0.
        groups, num_groups, sparse_as_dense: For Horovod's signature. Buckets replace groups. Sparse gradients are
            always exchanged as dense ones, because messages have planned sizes; SparseAdam then gets the rows of
            the mean that are not zero.
        process_set: The hvd.ProcessSet of the ranks that train together, in place of `transport`. A rank outside
            of it steps on its own gradients. None: all ranks.
        bucket_mb: Largest size of a bucket in MB (2**20 bytes), unless a single tensor is larger. None: 25 on a
            CPU; on a GPU a quarter of the gradients, between 25 and 128.
        transport: Connects the ranks. None: see `dgc.init`.
        nonfinite: Response of all ranks to NaN or inf in any rank's gradient, and to magnitudes of 2**64 or more
            if a method keeps a residual. "skip" drops and counts the step: nothing is updated, and sent elements
            return to the residual. "raise" also raises NonFiniteGradientError, with parameter and rank.
        grad_scaler: The torch.amp.GradScaler that scales the loss, if any. Step by `grad_scaler.step(optimizer)`,
            with or without synchronize() and unscale_() before it.
        steps_per_epoch: Optimizer steps per epoch, to count epochs for compressors that warm up. Dropped steps
            count, and begin_epoch() raises ValueError. compression_state_dict() stores the position in epochs.
            None: call begin_epoch() before each epoch; otherwise a warm-up stays at its first epoch.
        hierarchical: "on": average densely inside each machine and compress only between machines. "auto": do so
            for methods with state on several machines of several ranks each. "off": treat all ranks alike. The
            transport must have groups: `connect(hierarchical=True)` or "auto".

    Raises:
        ValueError: An argument is invalid, or a setting differs between ranks, settings of the compressors
            included.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        compression: Compressor | Route | HorovodCompression | None = None,
        backward_passes_per_step: int = 1,
        op: Any = "average",
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        sparse_as_dense: bool = False,
        process_set: Any = None,
        *,
        bucket_mb: float | None = None,
        transport: Transport | None = None,
        nonfinite: str = "skip",
        grad_scaler: Any = None,
        steps_per_epoch: int | None = None,
        hierarchical: str | bool = "off",
    ):
        check_arguments(backward_passes_per_step, gradient_predivide_factor, num_groups, groups)
        check_steps(optimizer, "DistributedOptimizer")
        self.inner, self._original = optimizer, ref(self)
        check_needs_no_closure(optimizer, "DistributedOptimizer")
        if process_set is not None:
            if transport is not None:
                raise ValueError("process_set and transport both choose the ranks: give one of them")
            transport = process_set_transport(process_set)
            compression = compression if process_set.included() else None
        named = name_parameters(optimizer, named_parameters)
        self._parameter_names = {p: name for name, p in named}  # Horovod has it, and programs read it
        check_not_wrapped(named, "DistributedOptimizer")
        check_not_sharded(named, "DistributedOptimizer", "use dgc.fsdp.compress")
        check_transport(transport)
        settings = ExchangeSettings(compression, nonfinite, grad_scaler, steps_per_epoch, bucket_mb, hierarchical)
        self.route = settings.route
        transport = transport or default_transport(point_to_point=self.route.point_to_point)
        self._factor = reduction_factor(op, transport.size)
        settings.check_equal(
            transport,
            op="average" if self._factor == 1 else "sum",
            backward_passes_per_step=backward_passes_per_step,
        )
        plan = plan_gradients(settings, named, transport, optimizer, self._factor)
        assert plan.momentum is not None
        self._momentum = plan.momentum
        GradientExchange.__init__(self, settings, plan, transport, TrafficMeter(transport.local_size))
        if isinstance(optimizer, SharesSteps):
            optimizer.use_transport(transport, self.meter)
        self._should_synchronize, self._averaged_for_scaler = True, False
        self._averaged = False  # whether .grad holds the averages, with nothing added since
        self._dropped = False  # whether the last averaged gradients were not finite
        self._is_first_step, self._created_state = True, None
        self._takes_sparse = isinstance(optimizer, SupportsCorrectedGradients) and self._factor == 1
        self.backward_passes_per_step = backward_passes_per_step
        self._lock = threading.RLock()  # hooks run in a thread per device
        self._slots = {p: (b, i) for b, plan in enumerate(self.planned) for i, p in enumerate(plan.parameters)}
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(partial(self._hook, b, i)) for p, (b, i) in self._slots.items()
        ]
        claim(self._slots, self, "DistributedOptimizer")
        self.zero_grad()

    # --- backward ---------------------------------------------------------------------------------

    def _reset(self) -> None:
        # of each parameter of each bucket: missing gradients, and the complete one with its version
        self._passes_left: list[list[int]] = []
        self._final_gradients: list[list[tuple[Tensor, int] | None]] = []
        for plan in self.planned:
            self._passes_left.append([self.backward_passes_per_step] * len(plan.parameters))
            self._final_gradients.append([None] * len(plan.parameters))
        self._engine.reset()

    def _hook(self, b: int, i: int, p: Tensor) -> None:
        """Called when parameter i of bucket b has received a gradient."""
        with self._lock:
            self._averaged = False
            left = self._passes_left[b]
            if left[i] == 0:
                raise RuntimeError(
                    f"{self.planned[b].bucket.segments[i].name} received more gradients than "
                    f"backward_passes_per_step={self.backward_passes_per_step} since the last step() or "
                    "synchronize(). Step this optimizer, not the one that it wraps. If an exception ended an "
                    f"earlier backward, call zero_grad() after it. {OF_ANOTHER}"
                )
            self.planned[b].collect(i)
            left[i] -= 1
            if left[i] == 0:
                assert p.grad is not None
                self._final_gradients[b][i] = p.grad, p.grad._version
                if self._engine.order.add(b):
                    for full in self._engine.order.start():
                        self._start(full)
                    self._engine.advance()

    def _check_unchanged(self, b: int) -> None:
        """Raise RuntimeError if a complete gradient has changed, as sent values would depend on timing."""
        plan = self.planned[b]
        for i, final in enumerate(self._final_gradients[b]):
            if final is not None and (plan.parameters[i].grad is not final[0] or final[0]._version != final[1]):
                name = plan.bucket.segments[i].name
                if ddp_of(self._slots):
                    raise RuntimeError(
                        f"{name} is in DistributedDataParallel, which writes its own mean into the gradients: "
                        "pass the module without it, or use dgc.ddp.compress in place of DistributedOptimizer"
                    )
                raise RuntimeError(
                    f"the gradient of {name} changed between backward and step() or synchronize(), while it is "
                    "exchanged: call optimizer.synchronize() first, then clip, then step() inside "
                    "optimizer.skip_synchronize()"
                )

    def _start(self, b: int) -> None:
        plan = self.planned[b]
        for i, left in enumerate(self._passes_left[b]):
            if left:
                plan.collect(i)
        self._check_unchanged(b)
        self._engine.start(b)
        if plan.bucket.is_flat:
            plan.attach()  # the gradients were copied: free the originals
            for i, view in enumerate(plan.views):
                self._final_gradients[b][i] = view, view._version

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of gradients that backward adds up before the exchange. Call it on every rank.

        Raises:
            ValueError: It is no whole number of at least 1.
            RuntimeError: Gradients were computed since the last step.
        """
        check_arguments(passes, 1.0, 0, None)
        if any(left < self.backward_passes_per_step for of_bucket in self._passes_left for left in of_bucket):
            raise RuntimeError("set_backward_passes_per_step() between backward and step(): call it after step()")
        self.backward_passes_per_step = passes
        self._reset()

    # --- one step ---------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until .grad of every parameter is the average over all ranks, or NaN if the step is dropped."""
        if self._averaged:
            return  # a second exchange would add the averages to the residual
        for plan, result in self._finish():
            flat = plan.bucket.flat
            if self._dropped:
                flat.fill_(float("nan"))
                continue
            if isinstance(result, SparseResult):
                plan.make_dense(result)
            if self._factor != 1:
                flat.mul_(self._factor)
            self._loss_scale.multiply_(flat)
        for plan in self.planned:
            plan.attach()
        if isinstance(self.inner, SparseAdam):
            self._make_sparse()

    def _make_sparse(self) -> None:
        """Give SparseAdam the rows that are not zero. All other optimizers take dense gradients."""
        for p in self._slots:
            p.grad = None if p.grad is None else p.grad.to_sparse(1)

    def _finish(self) -> list[tuple[PlannedBucket, Result]]:
        """Start the buckets that backward did not fill, wait for all, and drop the step, or raise, if needed."""
        self._averaged_for_scaler = False
        with self._lock:
            for b in range(len(self.planned)):
                self._check_unchanged(b)
            with self._engine.intact:
                outcome = self._finish_step()
                for plan in self.planned:
                    if plan.bucket.is_flat:
                        plan.attach()
                    plan.bucket.release()
                self._reset()
                self._averaged = True
        if self._is_first_step:
            self._is_first_step = False
            # the state of `create_state` is dropped if no rank has loaded or had another one to broadcast
            created = torch.tensor([self.inner.state is self._created_state], dtype=torch.int64)
            if all_reduce(self.transport, created, "min", "created_state").item():
                self.inner.state.clear()
        self._dropped = outcome.nonfinite is not None
        if outcome.nonfinite is not None:
            if self._drops.drop(outcome.nonfinite):
                raise NonFiniteGradientError(outcome.nonfinite)
        return outcome.results

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context in which step() uses the gradients as they are. Use it after synchronize()."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler.step reads this before it checks for inf, so the gradients are averaged here."""
        if self._should_synchronize and not self._averaged:
            self._loss_scale.check_before_averaging(self)
            self.synchronize()
            self._averaged_for_scaler = True
        return False

    @property
    def _known_optimizer(self) -> Optimizer | None:
        """But not if `create_state` has made its state, for a broadcast."""
        return None if self.inner.state is self._created_state else self.inner

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish the exchange, then step the wrapped optimizer unless the step is dropped.

        With sparse updates, .grad then has the local gradient. Call synchronize() first if you need the average.
        """
        if self._original() is not self:
            self._refuse_copy()
        self._engine.intact.check()
        for group in self.inner.param_groups:
            for p in group["params"]:
                if p.requires_grad and p not in self._slots:
                    check_no_unfrozen(self.inner.param_groups, self._slots, "DistributedOptimizer")
        if self._momentum.watched:
            self._momentum.check(self.inner)
        loss = None if closure is None else loss_of(closure)
        if not self._engine.in_flight and _is_called_by("broadcast_optimizer_state"):
            if not self.inner.state:
                if isinstance(self.inner, SparseAdam):
                    self._make_sparse()
                create_state(self.inner, self._slots)
                self._created_state = self.inner.state
            return loss
        if self._loss_scale.enabled:
            self._loss_scale.check_before_step(self)
        sparse: list[SparseUpdate] = []
        if self._should_synchronize and self._averaged:
            if not self._averaged_for_scaler:
                warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the gradients are not exchanged again"
                )
        elif self._should_synchronize and self._takes_sparse:
            sparse = self._synchronize_sparse()
        elif self._should_synchronize:
            self.synchronize()
        if not (self._dropped and self._averaged):
            with self._engine.intact:  # other ranks take the step
                start = perf_counter()
                for p in self._slots:
                    if not p.requires_grad:  # frozen later: momentum and weight decay must not change it
                        p.grad = None
                self.inner.step(**({"sparse": sparse} if sparse else {}))
                self.meter.add_time("step", "optimizer", start, perf_counter())
        self._averaged = False
        return loss

    def _synchronize_sparse(self) -> list[SparseUpdate]:
        """Like synchronize(), but return sparse results that need no momentum instead of making them dense."""
        updates = []
        for plan, result in self._finish():
            if isinstance(result, SparseResult) and not self._dropped:
                if plan.takes_sparse_updates:
                    where = (plan.parameters, plan.bucket.bounds)
                    updates.append(SparseUpdate(*where, result.indices, result.values))
                else:
                    plan.make_dense(result)
        return updates

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. With set_to_none=False they become zero views into the buckets, which is slower."""
        self._engine.intact.check()
        if self._engine.in_flight:
            raise RuntimeError(
                "zero_grad() between backward and step() or synchronize(), while gradients are in flight. After "
                "an exception in backward call step() all the same, as other ranks do: what is missing is zero. "
                f"{OF_ANOTHER}"
            )
        for plan in self.planned:
            if set_to_none:
                plan.is_attached = False
                for p in plan.parameters:
                    p.grad = None
            else:
                plan.bucket.flat.zero_()
                plan.attach()
        self._reset()
        self._averaged = False
        for group in self.inner.param_groups:
            for p in group["params"]:
                if p not in self._slots:
                    p.grad = None  # always: a zero gradient would decay frozen parameters

    def _is_running(self) -> bool:
        return True  # until step(), which an exception in backward does not take from the user

    def _check_taken(self, call: str) -> None:
        if self._averaged and not self._dropped:
            check_taken(call, self._slots)

    def close(self) -> None:
        """Remove the hooks from the parameters, so that another DistributedOptimizer can wrap them."""
        for handle in self._handles:
            handle.remove()
        release(self._slots)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.inner!r}, size={self.transport.size})"


def _is_called_by(function: str) -> bool:
    """Whether a function of this name is among the callers.

    hvd.broadcast_optimizer_state calls step() on gradients of zero, to create state, on the ranks that have none.
    Nothing may be exchanged then. The gradients do not tell: gradients that a program sets itself may be zero on
    one rank only.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None
