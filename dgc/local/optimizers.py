"""Outer optimizers: SlowMo, and the Nesterov momentum of DiLoCo.

z0 is the model after the last exchange, and d the mean over the ranks of their pseudo-gradients z0 - z:

    SlowMo      u = beta u + d / lr;     z0 = z0 - alpha lr u             lr: learning rate of the inner optimizer
    Nesterov    u = momentum u + d;      z0 = z0 - outer_lr (d + momentum u)

Nesterov is `torch.optim.SGD`. Any other optimizer of torch may take its place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from dgc.core.arguments import NUMBER, require

# Makes the optimizer of z0. Each group has the learning rate of the inner optimizer as `inner_lr`. If an optimizer
# has a default of it, ranks must have the same learning rate in the step of an exchange.
OuterOptimizer: TypeAlias = Callable[[list[Tensor]], Optimizer]


@dataclass(frozen=True)
class SlowMo:
    """SlowMo's outer step (Wang et al. 2020, arXiv 1910.00643, Algorithm 1).

    Args:
        beta: Slow momentum, in [0, 1).
        alpha: Slow learning rate, positive. 1 equals the learning rate of the wrapped optimizer, which must be the
            same on all ranks in the step of an exchange.

    Example:
        >>> slowmo = OuterSteps(average_every=48, base=SGP(), outer=SlowMo(beta=0.6))
    """

    beta: float = 0.5
    alpha: float = 1.0

    def __post_init__(self) -> None:
        require("a number", NUMBER, beta=self.beta, alpha=self.alpha)
        if not 0 <= self.beta < 1 or not 0 < self.alpha < inf:
            raise ValueError(f"SlowMo needs beta in [0, 1) and alpha above 0, not {self.beta} and {self.alpha}")

    def __call__(self, parameters: list[Tensor]) -> Optimizer:
        return _SlowMomentum(parameters, self.beta, self.alpha)


@dataclass(frozen=True)
class Nesterov:
    """DiLoCo's outer step, with its default values (Douillard et al. 2023, arXiv 2311.08105, Algorithm 1).

    Args:
        outer_lr: Learning rate, positive.
        momentum: Nesterov momentum, in [0, 1).

    Example:
        >>> diloco = OuterSteps(average_every=500, outer=Nesterov())
    """

    outer_lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        require("a number", NUMBER, outer_lr=self.outer_lr, momentum=self.momentum)
        if not 0 <= self.momentum < 1 or not 0 < self.outer_lr < inf:
            raise ValueError(
                f"Nesterov needs momentum in [0, 1) and outer_lr above 0, not {self.momentum} and {self.outer_lr}"
            )

    def __call__(self, parameters: list[Tensor]) -> Optimizer:
        return SGD(parameters, lr=self.outer_lr, momentum=self.momentum, nesterov=self.momentum > 0)


class _SlowMomentum(Optimizer):
    def __init__(self, parameters: list[Tensor], beta: float, alpha: float):
        super().__init__(parameters, {"beta": beta, "alpha": alpha, "inner_lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr = group["inner_lr"]
            for z0 in group["params"]:
                if z0.grad is None:
                    continue
                state = self.state[z0]
                if not state:
                    state["u"] = torch.zeros_like(z0)
                if lr == 0:
                    z0.sub_(z0.grad)  # the limit without momentum, which would grow without bound
                    continue
                u = state["u"].mul_(group["beta"]).add_(z0.grad, alpha=1 / lr)
                z0.sub_(u, alpha=group["alpha"] * lr)
