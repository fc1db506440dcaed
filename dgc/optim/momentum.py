"""Momentum has one owner: the memory, before compression, or the optimizer, never both."""

import warnings
from collections.abc import Sequence

from torch.optim import Optimizer

from dgc.optim.planning import PlannedBucket


def check_momentum(optimizer: Optimizer, planned: Sequence[PlannedBucket]) -> None:
    """Settle who applies momentum to which parameter, or raise a ValueError that says what to change."""
    corrected = {
        p: correction
        for plan in planned
        if (correction := plan.compressor.correction) is not None
        for p in plan.parameters
    }
    if not corrected:
        return
    leave_momentum_of = getattr(optimizer, "leave_momentum_of", None)
    kind = type(optimizer).__name__
    for group in optimizer.param_groups:
        for correction in {corrected[p] for p in group["params"] if p in corrected}:
            if leave_momentum_of is None:
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
    if leave_momentum_of is not None:
        leave_momentum_of(corrected)
    elif len(corrected) < sum(len(plan.parameters) for plan in planned):
        warnings.warn(
            f"the memory applies momentum to compressed parameters alone and {kind} has none: parameters that "
            "travel dense get no momentum; dgc.optim.DGCSGD gives it to them",
            stacklevel=3,
        )
