"""The exchange of the gradients of a DDP model."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dgc.comm.meter import TrafficMeter
from dgc.comm.ordered import OrderedConversations
from dgc.comm.torch_distributed import connect
from dgc.comm.transport import Transport
from dgc.compression.protocol import Compressor, NonFiniteGradientError, Result, conversation_of
from dgc.compression.route import Route
from dgc.ddp.checks import check_model, momentum_check
from dgc.optim.agreement import check_settings
from dgc.optim.compression_state import CountsEpochs
from dgc.optim.exchange.gradients import check_not_wrapped
from dgc.optim.exchange.hierarchy import plan_compressors
from dgc.optim.exchange.planning import PlannedBucket, check_agreement, compressors_in_order, plan_buckets
from dgc.optim.exchange.scaling import LossScale, is_used
from dgc.optim.exchange.start_order import StartOrder
from dgc.optim.exchange.streams import SideStream
from dgc.optim.options import as_route, register_compressors, unique_prefix


class DDPExchange(CountsEpochs):
    """Exchanges the gradients of a DDP model with compression. `compress` is another name for this class.

    Construction is collective and registers a communication hook. Construct it before the first backward pass.
    Save `compression_state_dict()` on each rank, beside the model and the optimizer. It has the error state under
    parameter names. DistributedOptimizer can load it.

    Each backward pass outside `model.no_sync()` is one exchange. To accumulate gradients, run all backward passes
    but the last inside `no_sync()`. Gradients that remain from an earlier exchange take part in the next one. No
    part of a gradient is lost then, but a memory with momentum applies momentum to them twice.

    An exception of a compressor or of the network ends `backward()`. DDP cannot continue afterwards: end the
    process, or build the model's DistributedDataParallel and this exchange anew on all ranks.

    Args:
        model: The DDP model. Its process group must contain all ranks.
        compression: A compressor of `dgc.compression`, or a Route.
        optimizer: The optimizer of the model. Needed if the compression's memory applies momentum, which must be
            applied only once: `dgc.optim.DGCSGD` leaves it to the memory. Other optimizers must have none. Also
            needed by OneBitAdamCompressor and DGCAdamCompressor, for `dgc.optim.OneBitAdam` and `DGCAdam`.
        bucket_mb: Largest size of a bucket in MB (2**20 bytes), unless a single tensor is larger. It does not
            depend on DDP's bucket_cap_mb.
        transport: Connects the ranks. None: torch.distributed, on process groups of its own.
        nonfinite: Response of all ranks to NaN or inf in any rank's gradient, and to magnitudes of 2**64 or more
            if a method keeps error state. "skip" drops the step: sent elements return to the error state,
            `dropped_steps` is incremented, and every .grad is None, so that the optimizer changes nothing. With a
            grad_scaler every .grad is NaN instead, and every rank's scaler skips the step. "raise" raises
            NonFiniteGradientError at the end of `backward()`, with every .grad None. Training may continue.
        grad_scaler: The torch.amp.GradScaler that scales the loss, if any. Without it, the error state would have
            the scale of the step in which it was made.
        steps_per_epoch: Optimizer steps per epoch, to count epochs for compressors that warm up. None: call
            begin_epoch() before each epoch.
        hierarchical: As in DistributedOptimizer. A transport that is given must have groups.

    Raises:
        ValueError: An argument is invalid, a setting differs between ranks, or DDP has a mode that a
            communication hook cannot serve. The message names it.

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
        bucket_mb: float = 25.0,
        transport: Transport | None = None,
        nonfinite: str = "skip",
        grad_scaler: Any = None,
        steps_per_epoch: int | None = None,
        hierarchical: str | bool = "off",
    ):
        check_model(model)
        if nonfinite not in ("skip", "raise"):
            raise ValueError(f"nonfinite must be 'skip' or 'raise', not {nonfinite!r}")
        route = as_route(compression)
        self.transport = transport or connect(
            "auto" if hierarchical == "auto" else hierarchical in ("on", True), point_to_point=route.point_to_point
        )
        if model.process_group.size() != self.transport.size:
            raise ValueError(
                f"the model's process group has {model.process_group.size()} ranks, but the exchange has "
                f"{self.transport.size}: build DistributedDataParallel on the default group"
            )
        self._count_epochs(steps_per_epoch)
        check_settings(
            self.transport,
            "settings",
            nonfinite=nonfinite,
            bucket_mb=bucket_mb,
            steps_per_epoch=steps_per_epoch,
            uses_grad_scaler=is_used(grad_scaler),
            hierarchical=hierarchical,
            compression=compression,
        )
        # not by parameters_to_ignore, whose names differ from those of named_parameters()
        reduced = set(model._build_params_for_reducer()[0])
        named = [(name, p) for name, p in model.module.named_parameters() if p in reduced]
        check_not_wrapped(named)
        prefix = unique_prefix(self.transport)
        self._planned = plan_buckets(named, route.compressor_for, bucket_mb, prefix)
        compressors = compressors_in_order(self._planned, named)
        super().__init__(compressors)
        self._loss_scale = LossScale(grad_scaler, self._planned)
        if self._loss_scale.enabled and nonfinite == "raise":
            raise ValueError("a grad_scaler adapts its scale by dropping steps: it needs nonfinite='skip'")
        self._check_momentum = momentum_check(optimizer, self._planned, self.transport)
        check_agreement(self._planned, self.transport)
        register_compressors(compressors, self.transport)
        self.place, self.part = plan_compressors(self._planned, self.transport, hierarchical)
        self.meter = TrafficMeter(self.transport.local_size)
        self.nonfinite, self.dropped_steps = nonfinite, 0
        # no reference to the model, which refers to this exchange from C++
        self._may_be_unused = model.find_unused_parameters or model.static_graph
        self._slots = {p: (b, i) for b, plan in enumerate(self._planned) for i, p in enumerate(plan.parameters)}
        self._streams = {device: SideStream(device) for device in {p.bucket.device for p in self._planned}}
        self._conversations: OrderedConversations[Result] = OrderedConversations(
            prefix, self.transport, self.meter
        )
        self._order = StartOrder([len(p.parameters) for p in self._planned], self.transport, prefix)
        self._buffers: list[tuple[torch.futures.Future[Tensor], Tensor]] = []  # DDP's buckets of this step
        self._views: dict[Tensor, Tensor] = {}  # one-dimensional view of each gradient in DDP's buckets
        self._epochs.begin()
        model.register_comm_hook(self, _hook)

    def add(self, bucket: dist.GradBucket) -> "torch.futures.Future[Tensor]":
        """Take over the gradients of one of DDP's buckets. The future has their means after the last bucket."""
        with torch.no_grad():  # DDP's reducer holds a lock
            buffer = bucket.buffer()
            if not self._buffers:
                self._check_momentum()
                self._epochs.begin_step()
            devices: Any = [buffer.device] if buffer.is_cuda else None
            future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
            self._buffers.append((future, buffer))
            # not bucket.gradients(), which are wrong for complex parameters: DDP stores pairs of real numbers
            parameters = bucket.parameters()
            sizes = [p.numel() * (2 if p.is_complex() else 1) for p in parameters]
            for p, gradient in zip(parameters, buffer.split(sizes), strict=True):
                b, i = self._slots[p]
                # DDP lays a gradient out as our buckets do: in the memory order of its parameter
                self._views[p] = gradient
                self._planned[b].bucket.use_gradient(i, gradient)
                self._order.add(b)
            for b in self._order.start():
                self._start(b)
            self._conversations.advance()
            # not bucket.is_last(), which static_graph never says in its first step if there are several types
            if len(self._views) == len(self._slots):
                self._finish()
            return future

    def _start(self, b: int) -> None:
        plan, stream = self._planned[b], self._streams[self._planned[b].bucket.device]
        self.meter.count_dense(plan.bucket.numel, self.transport.size)
        with stream.after_caller():
            if self._loss_scale.enabled:
                self._loss_scale.divide_(plan.bucket.flat)
            conversation = conversation_of(plan.compressor, plan.bucket)
            self._conversations.start(plan.bucket.name, conversation, stream.concurrently)

    def _finish(self) -> None:
        """Wait for all exchanges, write the means into DDP's buckets and hand them back."""
        for b in self._order.start(only_full=False):
            self._start(b)
        result_of = dict(zip(self._order.buckets, self._conversations.finish(), strict=True))
        results = [result_of[b] for b in range(len(self._planned))]
        self._order.learn()
        for stream in self._streams.values():
            stream.join()
        reason = next((result.nonfinite for result in results if result.nonfinite), None)
        for plan, result in zip(self._planned, results, strict=True):
            if reason is None:
                self._write(plan, result)
            else:
                plan.compressor.rollback(plan.bucket)
            plan.bucket.release()
        if reason is not None:
            self._drop(reason)
        elif self._may_be_unused:
            _after_ddp(self._deliver_unused)
        for future, buffer in self._buffers:
            future.set_result(buffer)
        self._buffers = []
        self._views = {}
        self._order.reset()

    def _write(self, plan: PlannedBucket, result: Result) -> None:
        bucket = plan.bucket
        bucket.release()
        result.write_to(bucket)
        self._loss_scale.multiply_(bucket.flat)
        views = [self._views[p] for p in plan.parameters]
        torch._foreach_copy_(views, [bucket.flat[s.offset : s.offset + s.numel] for s in bucket.segments])

    def _drop(self, reason: str) -> None:
        for _, buffer in self._buffers:
            buffer.fill_(float("nan"))
        if self.nonfinite == "raise":
            _after_ddp(partial(self._drop_gradients, NonFiniteGradientError(reason)))
            return
        self.dropped_steps += 1
        if not self._loss_scale.enabled:
            _after_ddp(self._drop_gradients)
            if self.dropped_steps == 1 and self.transport.rank == 0:
                warnings.warn(
                    f"{reason}: every rank drops this step, and every .grad is None. Further dropped steps are "
                    "only counted, in dropped_steps; nonfinite='raise' raises an error instead",
                    stacklevel=2,
                )

    def _drop_gradients(self, error: Exception | None = None) -> None:
        for p in self._slots:
            p.grad = None
        if error is not None:
            raise error

    def _deliver_unused(self) -> None:
        """Set the gradient of parameters that no rank used: DDP does not, but their error state may be sent."""
        for plan in self._planned:
            for p, mean in zip(plan.parameters, plan.views, strict=True):
                if p.grad is None:
                    p.grad = mean.clone()
                elif not torch.equal(p.grad, mean):
                    p.grad.copy_(mean)


def _hook(state: DDPExchange, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.add(bucket)


def _after_ddp(function: Callable[[], None]) -> None:
    """Call a function at the end of this backward pass, after DDP has set the gradients.

    DDP queues its own end when it has called the last hook. A function that is queued at the end of backward runs
    after everything that was queued before.
    """
    if torch._C._current_graph_task_id() == -1:  # a rank without further data, inside DDP's join()
        function()
        return
    queue: Any = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(function))


compress = DDPExchange
