"""Momentum that is applied before compression, in place of the optimizer."""

from dataclasses import dataclass


@dataclass
class MomentumCorrection:
    """Momentum that a memory applies before compression. The optimizer must then not apply it.

    None stands for the optimizer's momentum, until `take` sets it.
    """

    momentum: float | None
    nesterov: bool | None

    def take(self, momentum: float, nesterov: bool) -> None:
        if self.momentum is None:
            self.momentum = momentum
            self.nesterov = nesterov if self.nesterov is None else self.nesterov
