"""Outer optimizers of periodic averaging: SlowMo (Wang et al.: ICLR 2020, arXiv 1910.00643, Algorithm 1) and the
Nesterov momentum of DiLoCo (Douillard et al. 2023, arXiv 2311.08105, Algorithm 1).

z0 is the model after the last average, z the mean of all ranks' models now, and z0 - z the pseudo-gradient:

    SlowMo      u = beta u + (z0 - z) / lr;   z0 = z0 - alpha lr u
    Nesterov    u = momentum u + (z0 - z);    z0 = z0 - outer_lr ((z0 - z) + momentum u)
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float32
from torch import Tensor

Vector = Float32[Tensor, "n"]


@runtime_checkable
class OuterOptimizer(Protocol):
    """An optimizer that steps on the pseudo-gradient."""

    def step(self, z0: Vector, z: Vector, u: Vector, lr: float) -> Vector:
        """Returns the next z0. Changes u, initially zeros, in place."""
        ...


@dataclass(frozen=True)
class SlowMo:
    """SlowMo's outer step (Wang et al. 2020, arXiv 1910.00643, Algorithm 1).

    Args:
        beta (float): slow momentum, in [0, 1).
        alpha (float): slow learning rate, positive. 1 equals the learning rate of the wrapped optimizer.

    Raises:
        ValueError: if an argument is out of range.
    """

    beta: float = 0.5
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1 or not self.alpha > 0:
            raise ValueError(f"SlowMo needs beta in [0, 1) and alpha above 0, not {self.beta} and {self.alpha}")

    def step(self, z0: Vector, z: Vector, u: Vector, lr: float) -> Vector:
        if lr == 0:
            return z
        u.mul_(self.beta).add_(z0 - z, alpha=1 / lr)
        return z0 - u * (self.alpha * lr)


@dataclass(frozen=True)
class Nesterov:
    """DiLoCo's outer step, with its default values (Douillard et al. 2023, arXiv 2311.08105, Algorithm 1).

    Args:
        outer_lr (float): learning rate, positive.
        momentum (float): Nesterov momentum, in [0, 1).

    Raises:
        ValueError: if an argument is out of range.
    """

    outer_lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1 or not self.outer_lr > 0:
            raise ValueError(
                f"Nesterov needs momentum in [0, 1) and outer_lr above 0, not {self.momentum} and {self.outer_lr}"
            )

    def step(self, z0: Vector, z: Vector, u: Vector, lr: float) -> Vector:
        pseudo_gradient = z0 - z
        u.mul_(self.momentum).add_(pseudo_gradient)
        return z0 - (pseudo_gradient + u * self.momentum) * self.outer_lr
