"""Momentum that is applied before compression, in place of the optimizer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MomentumCorrection:
    """Momentum that a memory applies before compression. The optimizer must then not apply it.

    None stands for the optimizer's.
    """

    momentum: float | None
    nesterov: bool | None

    def filled(self, momentum: float, nesterov: bool) -> "MomentumCorrection":
        """Return it with the optimizer's momentum in place of None."""
        if self.momentum is not None:
            return self
        return MomentumCorrection(momentum, nesterov if self.nesterov is None else self.nesterov)
