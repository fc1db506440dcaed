"""Optimizers around optimizers, built as in Lightning and Accelerate, and one that nobody knows."""

from typing import Any

from torch.optim import Optimizer

GROUPS = ("param_groups", "state", "defaults")


class _FabricOptimizer:
    """An instance of the optimizer's class too, so that what is set on it does not reach the optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Fabric", (type(self), type(optimizer)), {})

    def step(self, closure: Any = None) -> None:
        self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class LightningOptimizer(_FabricOptimizer):
    pass


class Lookahead(Optimizer):
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __getattribute__(self, name: str) -> Any:
        return getattr(self.optimizer, name) if name in GROUPS else super().__getattribute__(name)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class AcceleratedOptimizer(Lookahead):
    pass


KNOWN: list[Any] = [_FabricOptimizer, LightningOptimizer, AcceleratedOptimizer]
