"""Momentum is applied once: by the memory before compression, or by the optimizer, never by both."""

import warnings
from collections.abc import Sequence

from torch.optim import Optimizer

from dgc.optim.exchange.planning import PlannedBucket
from dgc.optim.sgd import TakesCorrected


class MomentumOwners:
    """Settles who applies momentum to each parameter group, and checks at every step that it still holds.

    A scheduler that cycles momentum, or a loaded state, would change the optimizer's momentum, not the memory's.

    Raises:
        ValueError: Optimizer and memory disagree. See `settle_momentum`.
    """

    def __init__(self, optimizer: Optimizer, planned: Sequence[PlannedBucket]):
        settle_momentum(optimizer, planned)
        corrected = {p for plan in planned if plan.compressor.correction is not None for p in plan.parameters}
        self._settled = [
            (g, group["momentum"])
            for g, group in enumerate(optimizer.param_groups)
            if isinstance(optimizer, TakesCorrected) and not corrected.isdisjoint(group["params"])
        ]

    def check(self, optimizer: Optimizer) -> None:
        for g, momentum in self._settled:
            # some broadcasts of optimizer state round to fp32
            if abs((now := optimizer.param_groups[g]["momentum"]) - momentum) > 1e-6:
                raise ValueError(
                    f"the momentum of group {g} was {momentum}, which the compression's memory applies, and is "
                    f"now {now}: it must stay (of a scheduler that cycles it: cycle_momentum=False)"
                )


def settle_momentum(optimizer: Optimizer, planned: Sequence[PlannedBucket]) -> None:
    """Decide whether the memory or the optimizer applies momentum to each parameter.

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
        for correction in {corrected[p] for p in group["params"] if p in corrected}:
            if not isinstance(optimizer, TakesCorrected):
                if group.get("momentum", 0) or "betas" in group:
                    raise ValueError(
                        f"the compression's memory applies momentum {correction.momentum}, and so would {kind}: "
                        "use dgc.optim.DGCSGD, or a memory without momentum (ResidualMemory)"
                    )
            elif (group["momentum"], group["nesterov"]) != (correction.momentum, correction.nesterov):
                raise ValueError(
                    f"the compression's memory has momentum={correction.momentum}, "
                    f"nesterov={correction.nesterov}, the optimizer momentum={group['momentum']}, "
                    f"nesterov={group['nesterov']}: they must agree"
                )
            elif group["dampening"]:
                raise ValueError("dampening is not defined for momentum before compression: set it to 0")
    if isinstance(optimizer, TakesCorrected):
        optimizer.leave_momentum_of(corrected)
    elif len(corrected) < sum(len(plan.parameters) for plan in planned):
        warnings.warn(
            f"the memory applies momentum to compressed parameters alone and {kind} has none: parameters that "
            "travel dense get no momentum; dgc.optim.DGCSGD gives it to them",
            stacklevel=4,
        )
