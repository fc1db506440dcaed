"""What the adapters that average gradients have in common.

    settings = ExchangeSettings(compression, nonfinite="skip", ...)     checked on this rank
    settings.check_equal(transport)                                     compared with all ranks
    plan = plan_gradients(settings, named_parameters, transport)        buckets, methods and states
    GradientExchange.__init__(self, settings, plan, transport)          engine, meter, drop policy, checkpoints

An adapter has two jobs. It says when a gradient is complete (`self._engine.order.add`), and puts the means that
`_finish_step` returns where they belong. It does not know which compressor averages a bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dgc.comm.collectives import MachineRank
from dgc.comm.meter import TrafficMeter
from dgc.comm.transport import Transport
from dgc.core.route import Route
from dgc.engine.agreement import check_settings
from dgc.engine.buckets import (
    PlannedBucket,
    check_bucket_mb,
    check_equal_plans,
    describe,
    plan_buckets,
    states_in_order,
)
from dgc.engine.drops import DropPolicy, check_nonfinite, is_used
from dgc.engine.gathered import HasGatheredState
from dgc.engine.hierarchy import mode_of, plan_compressors
from dgc.engine.loop import Engine, LossScale, Outcome
from dgc.engine.momentum import MomentumCheck, check_owned
from dgc.engine.options import as_route, unique_prefix
from dgc.engine.state import BucketStates, ResidualPart, check_steps_per_epoch
from dgc.engine.steps import AwaitedStep, BackwardPass


@dataclass(frozen=True)
class ExchangeSettings:
    """The arguments that adapters have in common, see `DistributedOptimizer`.

    Raises:
        ValueError: One is invalid.
    """

    compression: Any
    nonfinite: str = "skip"
    grad_scaler: Any = None
    steps_per_epoch: int | None = None
    bucket_mb: float | None = None
    hierarchical: str | bool = "off"

    def __post_init__(self) -> None:
        check_nonfinite(self.nonfinite, self.grad_scaler)
        check_steps_per_epoch(self.steps_per_epoch)
        check_bucket_mb(self.bucket_mb)
        mode_of(self.hierarchical)
        _ = self.route  # raises ValueError if it is not a compression

    @cached_property
    def route(self) -> Route:
        return as_route(self.compression)

    def check_equal(self, transport: Transport, **others: object) -> None:
        """Compare these and other settings between all ranks. Collective.

        Raises:
            ValueError: One differs. Raised on every rank.
        """
        # a compression of Horovod is compared as the compressor that it stands for
        own = self.compression if isinstance(self.compression, Route) else self.route.rules[0].compressor
        check_settings(
            transport,
            "settings",
            **others,
            nonfinite=self.nonfinite,
            bucket_mb=self.bucket_mb,
            steps_per_epoch=self.steps_per_epoch,
            uses_grad_scaler=is_used(self.grad_scaler),
            hierarchical=self.hierarchical,
            compression=own,
        )


@dataclass
class GradientPlan:
    """What is exchanged, and how.

    Attributes:
        groups: The buckets. The buckets of one group start together.
        states: The compressors with their states, in the order of the model.
        transport: The ranks among which buckets are exchanged, unless they have a transport of their own.
        prefix: Of all messages, unique on the transport.
        loss_scale: Removed from the gradients before they are compressed.
        momentum: The assignment of momentum, if an optimizer was given.
        place, part: This rank's place among the machines, and its part of their residual, on two levels.
        others: The transports of the buckets that have one of their own, in one order on all ranks.
    """

    groups: Sequence[Sequence[PlannedBucket]]
    states: list[BucketStates]
    transport: Transport
    prefix: str
    loss_scale: LossScale
    momentum: MomentumCheck | None = None
    place: MachineRank | None = None
    part: ResidualPart | None = None
    others: Sequence[Transport] = ()
    buckets: list[PlannedBucket] = field(init=False)

    def __post_init__(self) -> None:
        self.buckets = [bucket for group in self.groups for bucket in group]


def plan_gradients(
    settings: ExchangeSettings,
    named: Sequence[tuple[str, Tensor]],
    transport: Transport,
    optimizer: Optimizer | None = None,
    factor: int = 1,
) -> GradientPlan:
    """Divide gradients into buckets of one group each, and let the compressors plan them. Collective.

    optimizer: the one that steps on the means, if it is known. factor: of the means, in its gradients.

    Raises:
        ValueError: A setting does not fit, momentum would not be applied once, or ranks have other models.
    """
    prefix = unique_prefix(transport)
    planned = plan_buckets(named, settings.route.compressor_for, settings.bucket_mb, prefix)
    loss_scale = LossScale(settings.grad_scaler, planned)
    check_owned(optimizer, planned)
    momentum = None if optimizer is None else MomentumCheck(optimizer, planned, transport, factor)
    check_equal_plans(describe(planned), transport)
    place, part = plan_compressors(planned, transport, settings.hierarchical)
    groups, states = [[bucket] for bucket in planned], states_in_order(planned, named)
    return GradientPlan(groups, states, transport, prefix, loss_scale, momentum, place, part)


class GradientExchange(HasGatheredState):
    """Base class of the adapters that average gradients.

    Args:
        settings: The common arguments.
        plan: Buckets and states.
        transport: Connects all ranks. The transport of the plan may connect some of them.
        meter: Counts bytes and seconds.
        effect: What every rank does with a dropped step, for the warning.

    Attributes:
        meter (TrafficMeter): Bytes that this rank sent, and seconds.
        planned: The buckets.
        place (MachineRank, optional): This rank's place among the machines, if it compresses only between them.
    """

    def __init__(
        self,
        settings: ExchangeSettings,
        plan: GradientPlan,
        transport: Transport,
        meter: TrafficMeter,
        effect: str = "every rank drops this step",
    ):
        drops = DropPolicy(settings.nonfinite, effect, grad_scaler=settings.grad_scaler, warns=transport.rank == 0)
        super().__init__(plan.states, transport, settings.steps_per_epoch, drops)
        self.transport, self.meter = transport, meter
        self.planned, self.place, self.part = plan.buckets, plan.place, plan.part
        self._loss_scale = plan.loss_scale
        self._engine = Engine(
            plan.groups,
            plan.transport,
            meter,
            plan.prefix,
            self._begin_step,
            plan.loss_scale,
            others=plan.others,
        )
        self._pass = BackwardPass()
        self._awaited_step: AwaitedStep | None = None
        self._epochs.begin()

    def _start(self, g: int) -> None:
        """Start the exchange of a group, whose missing gradients are zero."""
        self._engine.start(g)

    def _judge(self, reason: str | None) -> str | None:
        """Combine this rank's reason to drop the step, or None, with the reasons of all ranks."""
        return reason

    def _finish_step(self, learn: bool = True) -> Outcome:
        """Start the groups that have not started, and wait for all means. See `Engine.finish`."""
        for g in self._engine.order.start(only_full=False):
            self._start(g)
        outcome = self._engine.finish(learn, self._judge)
        if self._awaited_step is not None:
            self._awaited_step.begin()
        return outcome

    def _is_running(self) -> bool:
        """Whether the step of the gradients that were sent still runs, and no exception has ended it."""
        return self._pass.is_running

    def _check_idle(self, call: str) -> None:
        self._engine.check_idle(call, self._is_running())

    def _check_taken(self, call: str) -> None:
        if self._awaited_step is not None:
            self._awaited_step.check(call)
