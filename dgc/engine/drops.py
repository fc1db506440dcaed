"""What happens to a step whose gradients have NaN or inf.

Every adapter has one `DropPolicy`. `Engine.finish` says why a step must be dropped, and undoes it in the states of
the compressors (`BucketStates.rollback`). The policy counts the step, says whether to raise an error, and
takes the gradients from an optimizer that would use them: in DDP and FSDP2, which do not step it themselves.
"""

from collections.abc import Iterable
from math import nan
from typing import Any

from torch import Tensor

from dgc.core.bucket import local_part
from dgc.warn import warn


def check_nonfinite(nonfinite: Any, grad_scaler: Any = None) -> None:
    """Raise ValueError for an unknown response to NaN, or one that does not fit a GradScaler."""
    if nonfinite not in ("skip", "raise"):
        raise ValueError(f"nonfinite must be 'skip' or 'raise', not {nonfinite!r}")
    is_scaler = callable(getattr(grad_scaler, "is_enabled", None)) and not isinstance(grad_scaler, type)
    if grad_scaler is not None and not is_scaler:
        raise ValueError(f"grad_scaler must be a torch.amp.GradScaler or None, not {grad_scaler!r}")
    if is_used(grad_scaler) and nonfinite == "raise":
        raise ValueError("a grad_scaler adapts its scale by dropping steps: it needs nonfinite='skip'")


def is_used(grad_scaler: Any) -> bool:
    """Whether `grad_scaler` is an enabled GradScaler."""
    return grad_scaler is not None and bool(grad_scaler.is_enabled())


class DropPolicy:
    """Counts the dropped steps, and warns of the first one or demands an error for each.

    Args:
        nonfinite: "skip" or "raise".
        effect: What is done about such a step, for the warning.
        grad_scaler: The GradScaler that scales the loss, if any. It drops steps to adapt its scale, which needs no
            warning.
        warns: Whether this rank warns.
        counter: Where users find `dropped`.

    Attributes:
        dropped: Number of dropped steps.
    """

    def __init__(
        self,
        nonfinite: str,
        effect: str,
        *,
        grad_scaler: Any = None,
        warns: bool = True,
        counter: str = "dropped_steps",
    ):
        check_nonfinite(nonfinite, grad_scaler)
        self.nonfinite, self.dropped = nonfinite, 0
        self._effect, self._warns, self._counter = effect, warns, counter
        self._is_scaled = is_used(grad_scaler)

    def drop(self, reason: str, *, by_scaler: bool = False, warns: bool = True) -> bool:
        """Count a step. Return whether to raise a NonFiniteGradientError, when no other rank waits for this one.

        by_scaler: The GradScaler of this rank alone has found inf. There is neither a warning nor an error then.
        warns: False if another rank warns of this step.
        """
        self.dropped += 1
        if by_scaler or self._is_scaled:
            return False
        if self.nonfinite == "raise":
            return True
        if self.dropped == 1 and self._warns and warns:
            text = f"{reason}: {self._effect}. Further dropped steps are only counted, in {self._counter}"
            if self._counter == "dropped_steps":
                text += "; nonfinite='raise' raises an error instead"
            warn(text)
        return False

    def withhold(self, parameters: Iterable[Tensor]) -> None:
        """Take the gradients of a dropped step from the optimizer.

        They become None, and the optimizer changes nothing. With a GradScaler they become NaN, on every rank: each
        scaler then skips the step and lowers its scale.
        """
        for p in parameters:
            if not self._is_scaled:
                p.grad = None
            elif p.grad is not None:
                local_part(p.grad).fill_(nan)
