"""The exchange of FSDP2's gradients between machines.

With M machines of L ranks, rank (m, l) has shard l of every parameter. For each parameter group, backward does

    reduce-scatter   g = mean over the L ranks of machine m, of shard l       by FSDP2, at full precision
    all-reduce hook  mean over the M machines of g, compressed                among the ranks with local rank l

The result is the mean over all M L ranks. The hook takes the gradients out of FSDP2 and leaves zeros. The means
are added to .grad when backward ends, so that a gradient that is not finite can drop all of them. A group's
exchange starts in its hook, once all groups before it have started. The order is the same on every rank. The
first backward pass counts how often each group is reduced, and starts all exchanges at its end.

An exception may end a backward pass. The next one then begins again, without the gradients that were taken since
the last exchange, if no group of that pass has started. Otherwise it raises RuntimeError, because ranks may have
started different groups. FSDP2 itself continues only after `reset_iter_state()`.

The models of all machines are compared before the first step, because FSDP2 does not broadcast parameters.
"""

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dgc.bucket import Bucket, Segment, check_real, lay_out
from dgc.comm.collectives import all_gather_object
from dgc.comm.meter import TrafficMeter
from dgc.comm.requests import AllReduce, as_bytes
from dgc.comm.transport import CrossMachineTransport, Transport
from dgc.compression.protocol import Compressor, NonFiniteGradientError, Result
from dgc.compression.route import Route
from dgc.engine.buckets import PlannedBucket, check_equal_plans
from dgc.engine.loop import Engine, LossScale, StartOrder, warn_of_drop
from dgc.engine.options import MomentumCheck, observe_steps
from dgc.engine.state import HasCompression, Method
from dgc.fsdp.shards import ParameterGroup, Place, add_gradient, check_all_exchanged, machines, raise_not_exchanged


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


def check_agreement(plans: Sequence[GroupPlan], transport: Transport) -> None:
    """Raise ValueError on every rank if the ranks train different parameters. Collective.

    Whole parameters are compared. A difference in rows that only some ranks have is then seen by all of them.
    """
    own = [
        (plan.group.label, name, str(p.dtype), tuple(p.shape), type(compressor).__name__)
        for plan in plans
        for name, p, compressor in zip(plan.group.names, plan.group.parameters, plan.compressors, strict=True)
    ]
    check_equal_plans(own, transport)


def _whole(name: str, p: DTensor) -> Segment:
    check_real(name, p.dtype)
    return Segment(name, 0, p.numel(), tuple(p.shape), tuple(p.stride()))


def check_equal_models(groups: Sequence[ParameterGroup], transport: Transport, name: str) -> None:
    """Compare the parameters of all machines. Collective.

    Args:
        groups: The parameters.
        transport: Connects all ranks.
        name: Name of the message.

    Raises:
        ValueError: A parameter differs. Raised on every rank.
    """
    own = {
        n: _digest(p.to_local()) for group in groups for n, p in zip(group.names, group.parameters, strict=True)
    }
    digests = all_gather_object(transport, own, name)
    first, *others = machines(transport)
    for machine, ranks in enumerate(others, 1):
        for mine, other in zip(first, ranks, strict=True):
            for parameter, digest in digests[mine].items():
                if digests[other][parameter] != digest:
                    raise ValueError(
                        f"{parameter} differs between machines 0 and {machine} before the first step: initialise "
                        "the model with the same seed on every rank, or load a checkpoint"
                    )


def _digest(tensor: Tensor) -> int:
    return crc32(as_bytes(tensor.detach().cpu().contiguous()).numpy().data)


class FSDPExchange(HasCompression):
    """Exchanges the gradients of a sharded model between machines. `dgc.fsdp.compress` makes it.

    Save `compression_state_dict()` on each rank, beside the model and the optimizer. It has the error state of
    this rank's rows, under parameter names.

    Args:
        model: The model.
        plans: Its parameter groups. There is at least one.
        methods: The compressors.
        transport: Connects all ranks.
        name: Prefix of lanes and messages, unique on the transport.
        nonfinite: "skip" or "raise".
        loss_scale: Removes the loss scale before compression.
        steps_per_epoch: Steps in an epoch, to count epochs, or None.

    Attributes:
        meter (TrafficMeter): Bytes that this rank sent to other machines, and seconds.
        dropped_steps (int): Backward passes whose gradients were dropped because of NaN or inf.
    """

    _is_sharded = True

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[GroupPlan],
        methods: Sequence[Method],
        transport: Transport,
        name: str,
        nonfinite: str,
        loss_scale: LossScale,
        steps_per_epoch: int | None,
    ):
        super().__init__(methods, transport, steps_per_epoch)
        self.meter, self.dropped_steps = TrafficMeter(), 0
        self._plans, self._transport, self._name = plans, transport, name
        self._planned = [bucket for plan in plans for bucket in plan.buckets]
        self._parameters = {p for plan in plans for p in plan.group.parameters}
        self._model = weakref.ref(model)
        self._nonfinite, self._loss_scale = nonfinite, loss_scale
        self._machines = transport.group_size("cross")
        between = CrossMachineTransport(transport)
        self._engine = Engine(
            [p.buckets for p in plans], between, self.meter, name, self._begin_step, self._loss_scale
        )
        self._engine.order = StartOrder([1] * len(plans), transport, name)
        self._parts = [0] * len(plans)  # reduce-scatters of each group in this backward pass
        self._expected: list[int] | None = None  # the same, of the first pass
        self._end: weakref.ref[Callable[[], None]] | None = None  # of this backward pass, while that has not ended
        self._momentum: WeakKeyDictionary[Optimizer, MomentumCheck] = WeakKeyDictionary()
        self._handle = observe_steps(self.check_step)
        self._side = side = self._engine.streams.get(plans[0].group.device)
        for g, plan in enumerate(plans):
            plan.group.install(self._hook_of(g), side.stream if side else None)
            plan.group.claim(self)
        self._epochs.begin()

    # --- one backward pass ------------------------------------------------------------------------

    def _hook_of(self, g: int) -> Callable[[Tensor], None]:
        def hook(output: Tensor) -> None:
            with torch.no_grad():
                self._take(g, output)

        return hook

    def _take(self, g: int, output: Tensor) -> None:
        """Take the gradients of a group. On a GPU, the current stream is the side stream."""
        if self._end is None or self._end() is None:
            self._begin()
        plan = self._plans[g]
        plan.group.check(output)
        plan.add(output)
        output.zero_()
        if output.is_cuda:  # FSDP2 may free it while this stream still reads it
            output.record_stream(torch.cuda.current_stream(output.device))
        if plan.group.is_exchanged:
            self._count(g)
            if self._expected is not None:
                self._start(self._engine.order.start())
                self._engine.advance()

    def _begin(self) -> None:
        """Begin a backward pass."""
        self._check_ended()
        check_all_exchanged([plan.group for plan in self._plans])
        if self._end is not None:  # an exception ended the pass before
            for plan in self._plans:
                plan.has_gradients = False

        def end() -> None:
            if any(plan.group.is_exchanged for plan in self._plans):
                self._finish()
            self._end = None

        self._end = weakref.ref(end)  # autograd drops `end` if the pass ends with an exception
        # runs after that of FSDP2, which was queued when backward began
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self._parts = [0] * len(self._plans)
        self._engine.order.reset()
        for g, plan in enumerate(self._plans):
            if not plan.group.is_exchanged:
                self._engine.order.add(g)  # nothing to wait for

    def _count(self, g: int) -> None:
        """Count a reduce-scatter of a group. There are several if the module runs several times in forward."""
        if self._expected is not None and self._parts[g] == self._expected[g]:
            raise RuntimeError(
                f"{self._plans[g].group.label} runs more often in this forward pass than in the first, "
                f"{self._expected[g]} times: its exchange has started, and the rest of its gradient would be lost"
            )
        self._parts[g] += 1
        self._engine.order.add(g)

    def _start(self, groups: Iterable[int]) -> None:
        for g in groups:
            if self._plans[g].group.is_exchanged:
                self._plans[g].fill()
                self._engine.start(g)

    def _finish(self) -> None:
        """Wait for the exchange of all groups, and complete .grad. Runs at the end of backward."""
        with torch.no_grad():
            is_first = self._expected is None
            if is_first:
                check_equal_models([plan.group for plan in self._plans], self._transport, f"{self._name}.models")
            with self._side.after_caller() if self._side else nullcontext():
                self._start(self._engine.order.start(only_full=False))
                outcome = self._engine.finish(not is_first, self._reason)
                if is_first:
                    self._expected = [max(1, parts) for parts in self._parts]
                    self._engine.order = StartOrder(self._expected, self._transport, self._name)
                if outcome.nonfinite is None:
                    self._deliver(outcome.results)
            if self._side:
                self._side.join()
            if outcome.nonfinite is not None:
                self._drop(outcome.nonfinite)

    def _deliver(self, results: Sequence[tuple[PlannedBucket, Result]]) -> None:
        """Add the means to .grad."""
        for planned, result in results:
            result.write_to(planned.bucket)
            self._loss_scale.multiply_(planned.bucket.flat)
        for plan in self._plans:
            if plan.group.is_exchanged:
                plan.deliver()

    def _reason(self, reason: str | None) -> str | None:
        """Return why this step is dropped, or None. The same on every rank.

        All machines have the same results of a shard, so the ranks of one machine know of all shards.
        """
        flag = torch.tensor([reason is not None], dtype=torch.int64)
        request = AllReduce(flag, "max", "local")
        (dropped,) = self._transport.wait(self._transport.launch(f"{self._name}.dropped", (request,)))
        if not dropped.item():
            return None
        reasons = all_gather_object(self._transport, reason, f"{self._name}.reason")
        return f"{next(filter(None, reasons))} (the rank is the number of a machine)"

    def _drop(self, reason: str) -> None:
        self.dropped_steps += 1
        for plan in self._plans:
            plan.has_gradients = False
            plan.group.drop_gradients(keep_as_nan=self._loss_scale.enabled)
        if self._nonfinite == "raise":
            raise NonFiniteGradientError(reason)
        if self.dropped_steps == 1 and not self._loss_scale.enabled and self._transport.rank == 0:
            warn_of_drop(reason, "every rank drops this step, in which every .grad is None")

    def _check_ended(self) -> None:
        self._engine.check_ended("backward()")

    def compression_state_dict(self) -> dict[str, Any]:
        self._check_ended()
        return super().compression_state_dict()

    # --- steps of optimizers ----------------------------------------------------------------------

    def check_step(self, optimizer: Optimizer) -> None:
        """Check that backward has ended and that momentum is applied once. Runs before each step of any optimizer.

        Raises:
            RuntimeError: An exception has ended a backward pass, so that gradients are missing. Or gradients are
                scaled, or each machine would train a parameter alone.
            ValueError: The optimizer applies the momentum of the compressor's memory again.
        """
        if optimizer not in self._momentum:
            steps = {p for group in optimizer.param_groups for p in group["params"]}
            if self._parameters.isdisjoint(steps):
                return
            self._check_no_others(steps)
            self._momentum[optimizer] = MomentumCheck(optimizer, self._planned, self._transport)
        self._check_ended()
        self._plans[0].group.check_ended()
        check_all_exchanged([plan.group for plan in self._plans])
        self._loss_scale.check_before_step(optimizer)
        self._momentum[optimizer].check(optimizer)

    def _check_no_others(self, parameters: Container[Tensor]) -> None:
        """Raise RuntimeError if one of them is a trainable parameter of the model that was not there before."""
        model = self._model()
        for name, p in model.named_parameters() if model is not None else ():
            if p in parameters and p.requires_grad and p not in self._parameters:
                raise_not_exchanged(name)

    def close(self) -> None:
        """Remove the hooks. Gradients are then averaged inside machines only, until `compress` is called again."""
        self._handle.remove()
        for plan in self._plans:
            plan.group.remove()
            plan.group.release(self)
