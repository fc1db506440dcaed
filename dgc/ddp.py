"""Compression for torch.nn.parallel.DistributedDataParallel (DDP), as a communication hook.

DDP calls the hook once for each of its buckets, in the same order on every rank, when all gradients of the bucket
are computed. DDP changes its buckets after the first step. The residual must not depend on that. Gradients are
therefore exchanged in the buckets of DistributedOptimizer, which never change. Such a bucket starts when
all of its gradients are there. The hook of DDP's last bucket waits for all exchanges and writes the means into
DDP's buckets.
"""

import weakref
from collections.abc import Callable, Iterable, MutableMapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from dgc.comm.meter import TrafficMeter
from dgc.comm.torch_distributed import connect
from dgc.comm.transport import Transport
from dgc.core.protocol import Compressor, ExchangesMomentum
from dgc.core.results import DenseResult, NonFiniteGradientError, Result
from dgc.core.route import Route
from dgc.engine.buckets import PlannedBucket
from dgc.engine.exchange import ExchangeSettings, GradientExchange, plan_gradients
from dgc.engine.momentum import compressors_of, warn_of_unsuited
from dgc.engine.options import (
    Layouts,
    SharesSteps,
    check_not_wrapped,
    check_transport,
    claim,
    ddp_of,
    unwrapped,
)
from dgc.engine.steps import AwaitedStep, ParametersOf, before_steps
from dgc.versions import TorchRange

# The private and young names that this file reads of torch. Others may be absent: a version without the options
# _delay_all_reduce_params (2.1), _use_python_reducer (2.4) and skip_all_reduce_unused_params (2.9) cannot have set
# them, _divide_by_initial_world_size exists only inside join(), _in_backward_optimizers only on the parameters of
# such optimizers, and _orig_mod only on what torch.compile returns.
TORCH = TorchRange(
    "ddp",
    oldest="2.4",
    newest="2.15",
    since={
        "_build_params_for_reducer": "2.1",
        "_comm_hooks": "2.1",
        "parameters_to_ignore": "2.1",
        "static_graph": "2.1",
    },
)


WRAPPED = ("_forward_module", "_orig_mod")  # of what Fabric.setup() returns, which has all names of its module too


def check_model(model: Any) -> DistributedDataParallel:
    """Return the DDP model inside of what torch.compile or Fabric has made of it.

    Raises:
        ValueError: It is none, or a hook cannot exchange its gradients.
    """
    while not isinstance(model, DistributedDataParallel) and (names := [n for n in WRAPPED if hasattr(model, n)]):
        model = getattr(model, names[0])
    if not isinstance(model, DistributedDataParallel):
        kind = type(model).__name__
        raise ValueError(f"compress needs a model in DistributedDataParallel, not {kind}: wrap it first")
    TORCH.check_version()
    TORCH.check(model, TORCH.since)
    TORCH.check(torch._C, ["_current_graph_task_id"])  # since 2.1
    TORCH.check(torch.autograd.Variable._execution_engine, ["queue_callback"])
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    sparse = [name for name, m in model.module.named_modules() if isinstance(m, embeddings) and m.sparse]
    stepped = [n for n, p in model.module.named_parameters() if hasattr(p, "_in_backward_optimizers")]

    def has(attribute: str) -> bool:  # some versions of torch lack some options
        return bool(getattr(model, attribute, None))

    refused = {
        "it is around another one, and both would average the gradients: leave one out": (
            any(isinstance(m, DistributedDataParallel) for m in model.module.modules())
        ),
        "mixed_precision= changes the type of the buckets: use torch.autocast": has("mixed_precision"),
        "it has a communication hook already: register only this one": has("_comm_hooks"),
        "torch.compile's python_reducer calls no hooks: set torch._dynamo.config.optimize_ddp = 'ddp_optimizer'": (
            has("_use_python_reducer")
        ),
        "delay_all_reduce_named_params bypasses the hook: leave it out": has("_delay_all_reduce_params"),
        "skip_all_reduce_unused_params leaves out buckets: set find_unused_parameters alone": (
            has("skip_all_reduce_unused_params")
        ),
        f"{', '.join(sparse[:3])} has sparse gradients, which DDP does not put into buckets: set sparse=False": (
            bool(sparse)
        ),
        f"an optimizer steps {', '.join(stepped[:3])} during backward, before the exchange is complete: step it "
        "after backward": bool(stepped),
    }
    for reason, is_refused in refused.items():
        if is_refused:
            raise ValueError(f"this DistributedDataParallel cannot be compressed: {reason}")
    return model


class NoCopies(list[Any]):
    """The hooks of a DDP model. The list of a copy or of a saved model is empty: its reducer has no hook."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, ()


def after_ddp(function: Callable[[], None]) -> None:
    """Call a function at the end of this backward pass, after DDP has set the gradients."""
    if torch._C._current_graph_task_id() == -1:  # a rank without further data, inside DDP's join()
        function()
        return
    queue: Any = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(function))  # DDP queues its own end when it has called the last hook


def deliver_unused(planned: Iterable[PlannedBucket]) -> None:
    """Set the gradient of parameters that no rank used, if their residual was sent.

    DDP leaves these gradients as they were. It has written zeros at least where some rank used the parameter. None
    therefore remains without a residual: an optimizer would move the parameter by a gradient of zero.
    """
    for plan in planned:
        for p, mean in zip(plan.parameters, plan.views, strict=True):
            if p.grad is None:
                if p.requires_grad and mean.any():
                    p.grad = mean.clone()
            elif not torch.equal(p.grad, mean):
                p.grad.copy_(mean)


class DDPExchange(GradientExchange):
    """Exchanges the gradients of a DDP model with compression. `compress` is another name for this class.

    Construction is collective, before the first backward pass, and registers a communication hook. Save
    `compression_state_dict()` on each rank, beside the model and the optimizer. DistributedOptimizer can load it.

    Each backward pass outside `model.no_sync()` is one exchange. To accumulate gradients, run all backward passes
    but the last inside `no_sync()`. Gradients that remain from an earlier exchange take part in the next one, and
    get the momentum of a memory twice.

    An exception ends `backward()`. If a gradient was computed, DDP refuses to continue ("Expected to have finished
    reduction in the prior iteration"), and so does this exchange if something was sent: end the process, or build
    the model's DistributedDataParallel and this exchange anew on all ranks. With static_graph do so after any
    exception in the first step: DDP would then average nothing.

    A copy of the model (`copy.deepcopy`, `AveragedModel`, `torch.save`) has no exchange until `compress` is called
    with it: DDP averages its gradients.

    Args:
        model: The DDP model, or what torch.compile or Lightning's Fabric.setup() has made of it. Its process group
            must contain all ranks. Parameters without requires_grad take no part, and must remain without.
        compression: A compressor of `dgc.compression`, or a Route.
        optimizer: The optimizer of the model, or what Lightning or Accelerate has made of it. Needed if the memory
            of the compression applies momentum, which `dgc.optim.DGCSGD` leaves to it and others must not have,
            and by OneBitAdamCompressor and DGCAdamCompressor, for `dgc.optim.OneBitAdam` and `DGCAdam`.
        bucket_mb, steps_per_epoch, hierarchical: As for DistributedOptimizer. `bucket_mb` does not depend on DDP's
            bucket_cap_mb. For `hierarchical` a transport that is given must have groups.
        transport: Connects the ranks. None: torch.distributed, on process groups of its own.
        nonfinite: As for DistributedOptimizer. In a dropped step .grad of every averaged parameter is None, so
            that the optimizer changes none of them. With a grad_scaler it is NaN instead, and every rank's scaler
            skips the step. "raise" raises NonFiniteGradientError at the end of `backward()`. Training may go on.
        grad_scaler: The torch.amp.GradScaler that scales the loss, if any.

    Attributes:
        meter (TrafficMeter): Bytes that this rank sent, and seconds.
        dropped_steps (int): Number of steps dropped because of NaN or inf in a gradient.

    Raises:
        ValueError: An argument is invalid, a setting differs between ranks, or a hook cannot serve a mode of DDP.
        LaunchError: torchrun restarts ranks that could not connect again.

    Example:
        >>> model = DistributedDataParallel(model)
        >>> optimizer = DGCSGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> compression = DGCCompressor(0.01, DGCSGDMemory(momentum=0.9), warmup_epochs=5)
        >>> exchange = compress(model, compression, optimizer)
        >>> ratio = exchange.begin_epoch(0)  # before each epoch
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        compression: Compressor | Route,
        optimizer: Optimizer | None = None,
        *,
        bucket_mb: float | None = None,
        transport: Transport | None = None,
        nonfinite: str = "skip",
        grad_scaler: Any = None,
        steps_per_epoch: int | None = None,
        hierarchical: str | bool = "off",
    ):
        model = check_model(model)
        check_transport(transport)
        settings = ExchangeSettings(compression, nonfinite, grad_scaler, steps_per_epoch, bucket_mb, hierarchical)
        transport = transport or connect(
            "auto" if hierarchical == "auto" else hierarchical in ("on", True),
            point_to_point=settings.route.point_to_point,
        )
        if model.process_group.size() != transport.size:
            raise ValueError(
                f"the model's process group has {model.process_group.size()} ranks, but the exchange has "
                f"{transport.size}: build DistributedDataParallel on the default group"
            )
        settings.check_equal(transport)
        # not by parameters_to_ignore, whose names differ from the names of named_parameters()
        reduced = set(model._build_params_for_reducer()[0])
        self._ignored = ignored = {name.removeprefix(".") for name in model.parameters_to_ignore}
        every = list(model.module.named_parameters())
        named = [(name, p) for name, p in every if p in reduced]
        self._frozen = [(name, p) for name, p in every if not p.requires_grad and name not in ignored]
        check_not_wrapped(named, "DDP")
        self._stepped = None if optimizer is None else unwrapped(optimizer)
        plan = plan_gradients(settings, named, transport, self._stepped)
        effect = "every rank drops this step, and every .grad is None"
        super().__init__(settings, plan, transport, TrafficMeter(transport.local_size), effect)
        self._momentum = plan.momentum
        if isinstance(self._stepped, SharesSteps):
            self._stepped.use_transport(transport, self.meter)
        self._model = weakref.ref(model)  # it refers to this exchange from C++
        self._may_be_unused = model.find_unused_parameters or model.static_graph
        self._slots = {p: (b, i) for b, plan in enumerate(self.planned) for i, p in enumerate(plan.parameters)}
        self._buffers: list[tuple[torch.futures.Future[Tensor], Tensor]] = []  # DDP's buckets of this step
        self._views: dict[Tensor, Tensor] = {}  # one-dimensional view of each gradient in DDP's buckets
        model.register_comm_hook(self, _hook)
        model._comm_hooks = NoCopies(model._comm_hooks)
        claim(self._slots, model, "DDP")
        self._awaited_step = AwaitedStep(self._slots, self._first_step if optimizer is None else None)
        self._layouts = Layouts(self.planned)
        self._told = {  # parameters of whose gradients the optimizer was told what they are
            p
            for plan in self.planned
            if plan.compressor.correction or isinstance(plan.compressor, ExchangesMomentum)
            for p in plan.parameters
        }
        self._is_alone = False  # whether another DDP was looked for
        self._others: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()  # of other models, or not exchanged
        self._known_of = ParametersOf(self._look_at)
        before_steps(self._check_step)

    @property
    def _known_optimizer(self) -> Optimizer | None:
        return self._stepped

    def _check_step(self, optimizer: Optimizer) -> None:
        """Check that the gradients were exchanged, with the momentum of this optimizer. Runs before each step.

        Raises:
            RuntimeError: DistributedDataParallel does not call the hook with them, or another optimizer was told
                how the compression applies momentum.
        """
        has_own, is_told = self._known_of(optimizer)
        if not has_own:
            return
        self._layouts.check()
        if is_told and optimizer is not self._stepped:
            raise RuntimeError(
                f"this {type(optimizer).__name__} is not the optimizer that compress was given, to which it has "
                "said how the compression applies momentum: step that one, and not a copy"
            )

    def _look_at(self, parameters: list[Tensor]) -> tuple[bool, bool]:
        """Return whether some parameters of an optimizer are averaged here, and whether an optimizer was told of
        their momentum.

        Raises:
            RuntimeError: One belongs to the model, and DistributedDataParallel does not average it.
        """
        unknown = [p for p in parameters if p not in self._slots and p not in self._others]
        if unknown and (model := self._model()) is not None:
            own = {p: name for name, p in model.module.named_parameters() if name not in self._ignored}
            for p in unknown:
                if p.requires_grad and p in own:
                    raise RuntimeError(
                        f"{own[p]} was replaced or added after DistributedDataParallel was built, which averages "
                        "no gradient of it: build DistributedDataParallel and compress after it"
                    )
            self._others.update(dict.fromkeys(unknown, True))
        return any(p in self._slots for p in parameters), any(p in self._told for p in parameters)

    def _first_step(self, optimizer: Optimizer) -> None:
        """Warn of compressors that do not suit an optimizer which `compress` was not given."""
        warn_of_unsuited(optimizer, compressors_of(self.planned), self.transport)

    def add(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Take over the gradients of one of DDP's buckets. The future has their means after the last bucket."""
        with torch.no_grad():  # DDP's reducer holds a lock
            buffer, parameters = bucket.buffer(), bucket.parameters()
            # not bucket.index() == 0, which static_graph does not give first in its first step
            if not self._buffers or parameters[0] in self._views:
                self._begin()
            devices: Any = [buffer.device] if buffer.is_cuda else None
            future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
            self._buffers.append((future, buffer))
            # not bucket.gradients(), which are wrong for complex parameters: DDP stores pairs of real numbers
            sizes = [p.numel() * (2 if p.is_complex() else 1) for p in parameters]
            for p, gradient in zip(parameters, buffer.split(sizes), strict=True):
                b, i = self._slots[p]
                # DDP lays a gradient out as our buckets do: in the memory order of its parameter
                self._views[p] = gradient
                self.planned[b].bucket.use_gradient(i, gradient)
                self._engine.order.add(b)
            for b in self._engine.order.start():
                self._start(b)
            self._engine.advance()
            # not bucket.is_last(), which static_graph never says in its first step if there are several types
            if len(self._views) == len(self._slots):
                self._finish()
            return future

    def _begin(self) -> None:
        """Begin a backward pass. What an exception in the pass before has left is dropped, if nothing was sent."""
        self._engine.check_ended("backward()")
        self._reset()
        if not self._is_alone:
            self._check_alone()
        if not getattr(self._model(), "_divide_by_initial_world_size", True):
            raise RuntimeError(
                "join(divide_by_initial_world_size=False) cannot be served: ranks without further data send their "
                "residual, so that the mean is over all ranks. Leave the argument out"
            )
        if unfrozen := [name for name, p in self._frozen if p.requires_grad]:
            raise RuntimeError(
                f"{', '.join(unfrozen[:3])} required no gradient when DistributedDataParallel was built, which "
                "therefore does not average it: build DistributedDataParallel and compress after you unfreeze it"
            )
        if self._momentum is not None and self._stepped is not None:
            self._momentum.check(self._stepped)
        if torch._C._current_graph_task_id() != -1:  # not inside join()
            self._pass.begin()

    def _check_alone(self) -> None:
        """Raise RuntimeError if another DistributedDataParallel was built around this one."""
        own = self._model()
        for other in ddp_of(self._slots):
            if other is not own and any(module is own for module in other.modules()):
                raise RuntimeError(
                    "another DistributedDataParallel is around the one that is compressed, and averages the "
                    "gradients too, without compression: leave one of the two out"
                )
        self._is_alone = True

    def _reset(self) -> None:
        self._buffers = []
        self._views = {}
        for plan in self.planned:
            plan.bucket.destinations = None
        self._engine.reset()

    def _start(self, b: int) -> None:
        plan = self.planned[b]
        if not self._may_be_unused:  # `deliver_unused` needs the means in our bucket
            plan.bucket.destinations = tuple(self._views[p] for p in plan.parameters)
        self._engine.start(b)

    def _finish(self) -> None:
        """Wait for all exchanges, write the means into DDP's buckets and hand them back."""
        # before it rebuilds its buckets, DDP has one, in the order of the model
        outcome = self._finish_step(learn=len(self._buffers) > 1)
        for plan, result in outcome.results:
            if outcome.nonfinite is None:
                self._write(plan, result)
            plan.bucket.release()
        if outcome.nonfinite is not None:
            self._drop(outcome.nonfinite)
        elif self._may_be_unused:
            after_ddp(partial(deliver_unused, self.planned))
        for future, buffer in self._buffers:
            future.set_result(buffer)
        self._reset()

    def _write(self, plan: PlannedBucket, result: Result) -> None:
        bucket, views = plan.bucket, [self._views[p] for p in plan.parameters]
        bucket.release()
        if isinstance(result, DenseResult) and result.is_delivered:
            for view in views:
                self._loss_scale.multiply_(view)
            return
        result.write_to(bucket)
        self._loss_scale.multiply_(bucket.flat)
        torch._foreach_copy_(views, [bucket.flat[s.offset : s.offset + s.numel] for s in bucket.segments])

    def _drop(self, reason: str) -> None:
        for _, buffer in self._buffers:
            buffer.fill_(float("nan"))

        def withhold() -> None:
            self._drops.withhold(self._slots)
            if self._drops.drop(reason):  # last, because a warning may be an error
                raise NonFiniteGradientError(reason)

        after_ddp(withhold)


def _hook(state: DDPExchange, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.add(bucket)


compress = DDPExchange
