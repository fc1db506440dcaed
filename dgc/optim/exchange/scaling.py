"""Loss scaling (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2) around an exchange of gradients.

With scale s the loss is multiplied by s, so backward computes s g. A bucket is divided by s before compression and
multiplied by s after it. The error state therefore does not depend on s, which may change from step to step, and
GradScaler.unscale_ works as usual. If any rank's gradient has NaN or inf, all ranks get NaN. Every rank's scaler
then skips the step and lowers s by the same factor.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.optim.exchange.planning import PlannedBucket


def is_used(grad_scaler: Any) -> bool:
    """Whether `grad_scaler` is an enabled GradScaler."""
    return grad_scaler is not None and bool(grad_scaler.is_enabled())


class LossScale:
    """Removes the loss scale before compression and restores it afterwards.

    Args:
        grad_scaler: A torch.amp.GradScaler, or None for no scaling.
        planned: The buckets.

    Raises:
        ValueError: Scaling is enabled and a parameter is fp16. GradScaler cannot unscale fp16 gradients.
    """

    def __init__(self, grad_scaler: Any, planned: Sequence[PlannedBucket]):
        self._scaler = grad_scaler
        self.enabled = is_used(grad_scaler)
        half = [s.name for p in planned if p.bucket.dtype == torch.float16 for s in p.bucket.segments]
        if self.enabled and half:
            raise ValueError(
                f"grad_scaler cannot unscale gradients of fp16 parameters, such as {half[0]}: keep parameters in "
                "fp32 and use torch.autocast"
            )

    def divide_(self, flat: Tensor) -> None:
        if self.enabled:
            flat.div_(self._on(flat.device))

    def multiply_(self, flat: Tensor) -> None:
        if self.enabled:
            flat.mul_(self._on(flat.device))

    def check_before_averaging(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError if there is no scaler, or it has already unscaled the gradients."""
        if not self.enabled:
            raise RuntimeError(
                "a GradScaler steps this DistributedOptimizer but was not passed to it: pass it as grad_scaler="
            )
        if self._is_unscaled(optimizer):
            raise RuntimeError(
                "unscale_(optimizer) was called before optimizer.synchronize(): first average the gradients, then "
                "unscale, then clip, then step inside optimizer.skip_synchronize()"
            )

    def check_before_step(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError if a step would use scaled gradients."""
        if self.enabled and not self._is_unscaled(optimizer):
            raise RuntimeError("the gradients are scaled: call grad_scaler.step(optimizer), not optimizer.step()")

    def _is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether the scaler has unscaled this optimizer's gradients since its last update()."""
        return self._scaler._per_optimizer_states[id(optimizer)]["stage"].name == "UNSCALED"

    def _on(self, device: torch.device) -> Tensor:
        # not get_scale(), which waits for the device
        return self._scaler.scale(torch.ones((), dtype=torch.float32, device=device))
