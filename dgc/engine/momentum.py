"""Momentum is applied once: by the memory before compression or by the optimizer, never by both."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable
from weakref import WeakMethod

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dgc.comm.transport import Transport
from dgc.compression.protocol import ExchangesMomentum, MomentumOwner
from dgc.engine.agreement import check_settings
from dgc.engine.buckets import PlannedBucket, SparseUpdate


@runtime_checkable
class SupportsCorrectedGradients(Protocol):
    """An optimizer that leaves momentum to the compressor's memory and applies sparse updates directly."""

    def skip_momentum_of(self, parameters: Iterable[Tensor]) -> None: ...

    def step(self, closure: Callable[[], Any] | None = None, sparse: Sequence[SparseUpdate] = ()) -> Any: ...


class MomentumCheck:
    """Assigns momentum to the memory or the optimizer, and checks at every step that their settings stay equal.

    A scheduler that cycles momentum, or a loaded state, changes the momentum of the optimizer only.

    Args:
        optimizer: The wrapped optimizer.
        planned: The buckets, with their compressors.
        transport: Connects the ranks.
        factor: Factor of the mean over the ranks in the optimizer's gradients.

    Raises:
        ValueError: The settings of optimizer and memory differ (see `assign_momentum`), or a compressor does not
            get the momentum that it needs (see `share_momentum`).
    """

    def __init__(
        self, optimizer: Optimizer, planned: Sequence[PlannedBucket], transport: Transport, factor: int = 1
    ):
        assign_momentum(optimizer, planned)
        share_momentum(optimizer, planned, transport, factor)
        corrected = {p for plan in planned if plan.compressor.correction is not None for p in plan.parameters}
        self.watched = [
            (g, group.get("momentum", 0.0))
            for g, group in enumerate(optimizer.param_groups)
            if not corrected.isdisjoint(group["params"])
        ]

    def check(self, optimizer: Optimizer) -> None:
        for g, momentum in self.watched:
            # some broadcasts of optimizer state round to fp32
            if abs((now := optimizer.param_groups[g].get("momentum", 0.0)) - momentum) > 1e-6:
                raise ValueError(
                    f"the momentum of group {g} was {momentum} and is now {now}, but the compression's memory "
                    "applies momentum: it must not change (set cycle_momentum=False in a scheduler that cycles it)"
                )


def assign_momentum(optimizer: Optimizer, planned: Sequence[PlannedBucket]) -> None:
    """Decide whether the memory or the optimizer applies momentum to each parameter.

    A memory without a momentum of its own takes that of the first group with a parameter of it.

    Raises:
        ValueError: Both would apply it, or their settings differ. The message names the cure.
    """
    corrected = {
        p: correction
        for plan in planned
        if (correction := plan.compressor.correction) is not None
        for p in plan.parameters
    }
    if not corrected:
        return
    kind = type(optimizer).__name__
    for group in optimizer.param_groups:
        of_group = [corrected[p] for p in group["params"] if p in corrected]
        for correction in {id(c): c for c in of_group}.values():
            correction.take(group.get("momentum", 0.0), bool(group.get("nesterov")))
            if not isinstance(optimizer, SupportsCorrectedGradients):
                if group.get("momentum", 0) or "betas" in group:
                    raise ValueError(
                        f"the compression's memory applies momentum, and {kind} would apply it again: use "
                        "dgc.optim.DGCSGD, or a memory without momentum (ResidualMemory)"
                    )
            elif (group["momentum"], group["nesterov"]) != (correction.momentum, correction.nesterov):
                raise ValueError(
                    f"the compression's memory has momentum={correction.momentum}, "
                    f"nesterov={correction.nesterov}, the optimizer momentum={group['momentum']}, "
                    f"nesterov={group['nesterov']}: they must agree"
                )
            elif group["dampening"]:
                raise ValueError("dampening is not defined for momentum before compression: set dampening=0")
    if isinstance(optimizer, SupportsCorrectedGradients):
        optimizer.skip_momentum_of(corrected)
    elif len(corrected) < sum(len(plan.parameters) for plan in planned):
        warnings.warn(
            f"the memory applies momentum only to compressed parameters and {kind} has none: parameters that are "
            "exchanged dense get no momentum; use dgc.optim.DGCSGD to apply it",
            stacklevel=4,
        )


def share_momentum(
    optimizer: Optimizer, planned: Sequence[PlannedBucket], transport: Transport, factor: int
) -> None:
    """Give the momentum of the optimizer to the compressors that exchange it. Collective if there are any.

    Raises:
        ValueError: The optimizer has none to give, differs between ranks, or needs sums in place of means.
    """
    shared: dict[ExchangesMomentum, dict[str, Tensor]] = {}
    for plan in planned:
        if isinstance(plan.compressor, ExchangesMomentum):
            names = (s.name for s in plan.bucket.segments)
            shared.setdefault(plan.compressor, {}).update(zip(names, plan.parameters, strict=True))
    if not shared:
        return
    groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    check_settings(transport, "optimizer", optimizer=optimizer, param_groups=groups)
    kind = " and ".join(sorted({type(compressor).__name__ for compressor in shared}))
    if not isinstance(optimizer, MomentumOwner):
        raise ValueError(
            f"{kind} exchanges the momentum of the optimizer, and {type(optimizer).__name__} does not share its "
            "own: use dgc.optim.OneBitAdam or DGCAdam, or a compressor of gradients"
        )
    if factor != 1:
        raise ValueError(f"{kind} exchanges means of momentum: use op='average', and a learning rate for it")
    optimizer.receive_momentum_of([p for parameters in shared.values() for p in parameters.values()])
    for compressor, parameters in shared.items():
        compressor.exchange_momentum_of(optimizer, parameters)


def observe_steps(check: Callable[[Optimizer], None]) -> Any:
    """Call a method before each step of any optimizer, while its object exists. Return a removable handle."""
    reference = WeakMethod(check)

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (observed := reference()) is not None:
            observed(optimizer)

    return register_optimizer_step_pre_hook(before_step)
