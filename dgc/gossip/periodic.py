"""Averages over all ranks every H steps: local SGD (Stich 2019, arXiv 1805.09767), Gossip-PGA (Chen et al. 2021,
arXiv 2105.09080), SlowMo (Wang et al.: ICLR 2020, arXiv 1910.00643, Algorithm 1), DiLoCo (Douillard et al. 2023,
arXiv 2311.08105, Algorithm 1).

Between two averages every rank steps alone or gossips (`base`). Let z0 be the model after the last average and z
the current mean of all ranks' models. The outer step starts at z0 and uses the pseudo-gradient z0 - z:

    none        z0 = z
    SlowMo      u = beta u + (z0 - z) / lr;   z0 = z0 - alpha lr u
    Nesterov    u = momentum u + (z0 - z);    z0 = z0 - outer_lr ((z0 - z) + momentum u)      (DiLoCo)

Differences from the papers: Each rank keeps its own optimizer buffers, which are never reset. The learning rate of
SlowMo is that of the first parameter group in the step before the average.

Payload every H steps in bytes: 4 n + 8; and the base's.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float32
from torch import Tensor

from dgc.comm.conversation import RunningConversation
from dgc.comm.meter import Meter
from dgc.comm.requests import AllReduce, Conversation
from dgc.comm.transport import Transport
from dgc.gossip.model import FlatModel
from dgc.gossip.protocol import Gossip
from dgc.memory.state import check_tensor

Vector = Float32[Tensor, "n"]


@runtime_checkable
class Outer(Protocol):
    """An outer optimizer."""

    def step(self, z0: Vector, z: Vector, u: Vector, lr: float) -> Vector:
        """Returns the next z0. Changes u, initially zeros, in place."""
        ...


@dataclass(frozen=True)
class SlowMo:
    """SlowMo's outer step (Wang et al. 2020, arXiv 1910.00643, Algorithm 1).

    Args:
        beta (float): slow momentum, in [0, 1).
        alpha (float): slow learning rate, positive.

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


class Periodic:
    """Averages over all ranks every H steps: local SGD, Gossip-PGA, SlowMo and DiLoCo.

    Args:
        average_every (int): steps between two averages, H.
        base (Gossip, optional): synchronous gossip between averages; None for local steps.
        outer (Outer, optional): `SlowMo` or `Nesterov`; None continues from the mean.

    Raises:
        ValueError: if average_every is less than 1, or base is asynchronous.

    Example:
        >>> diloco = Periodic(average_every=500, outer=Nesterov())
        >>> optimizer = GossipOptimizer(optimizer, model.named_parameters(), diloco)
    """

    is_synchronous = True

    def __init__(self, average_every: int, base: Gossip | None = None, outer: Outer | None = None):
        if average_every < 1:
            raise ValueError(f"average_every must be at least 1 step, not {average_every}")
        if base is not None and not base.is_synchronous:
            raise ValueError(f"{type(base).__name__} has no steps in common, so no average after some of them")
        self.average_every, self.base, self.outer = average_every, base, outer
        self.compress_ratio = base.compress_ratio if base is not None else 1 / average_every
        self.steps = 0

    @property
    def needs_groups(self) -> bool:
        return self.base is not None and self.base.needs_groups

    def start(self, model: FlatModel, transport: Transport, meter: Meter, name: str = "gossip") -> None:
        self.model, self.z = model, model.z
        self.size, self._name, self._transport, self._meter = transport.size, name, transport, meter
        if self.base is not None:
            self.base.start(model, transport, meter, name)
            self.compress_ratio = self.base.compress_ratio
        if self.outer is not None:
            self._z0, self._u = self.z.clone(), torch.zeros_like(self.z)

    def begin_epoch(self, epoch: int) -> None:
        if self.base is not None:
            self.base.begin_epoch(epoch)

    def begin_step(self) -> None:
        if self.base is not None:
            self.base.begin_step()

    def update(self, step: Callable[[], object], lr: float) -> None:
        if self.base is None:
            step()
            self.model.gather()
        else:
            self.base.update(step, lr)
        self.steps += 1
        if self.steps % self.average_every == 0:
            self._average(lr)

    @torch.no_grad()
    def _average(self, lr: float) -> None:
        if self.base is not None:
            self.base.settle()
        if self.size > 1:
            self.z.copy_(
                RunningConversation(f"{self._name}.average", self._mean(), self._transport, self._meter).finish()
            )
        if self.outer is not None:
            self._z0 = self.outer.step(self._z0, self.z, self._u, lr)
            self.z.copy_(self._z0)
        if self.base is not None:
            self.base.restart()
        self.model.scatter()

    def _mean(self) -> Conversation[Vector]:
        x = self.z.clone() if self.base is None else self.base.numerator()
        (mean,) = yield (AllReduce(x),)
        return mean

    def settle(self) -> None:
        if self.base is not None:
            self.base.settle()

    def restart(self) -> None:
        if self.base is not None:
            self.base.restart()

    def hold(self) -> None:
        if self.base is not None:
            self.base.hold()

    def numerator(self) -> Tensor:
        return self.z.clone() if self.base is None else self.base.numerator()

    def gauges(self) -> dict[str, float]:
        return {} if self.base is None else self.base.gauges()

    def errors(self) -> Iterable[Tensor]:
        return () if self.base is None else self.base.errors()

    def close(self) -> None:
        if self.base is not None:
            self.base.close()

    def state_dict(self) -> dict[str, Any]:
        own: dict[str, Any] = {"steps": self.steps}
        if self.base is None:
            own["z"] = self.z.clone()
        else:
            own["base"] = self.base.state_dict()
        if self.outer is not None:
            own |= {"z0": self._z0.clone(), "u": self._u.clone()}
        return own

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != self._keys():
            raise ValueError(f"state of another algorithm: {sorted(state)}, here are {sorted(self._keys())}")
        for name in self._keys() & {"z", "z0", "u"}:
            check_tensor(name, state[name], self.z.shape)
        if self.base is None:
            self.z.copy_(state["z"])
            self.model.scatter()
        else:
            self.base.load_state_dict(state["base"])
        self.steps = state["steps"]
        if self.outer is not None:
            self._z0.copy_(state["z0"])
            self._u.copy_(state["u"])

    def _keys(self) -> set[str]:
        return {"steps", "z" if self.base is None else "base"} | (set() if self.outer is None else {"z0", "u"})
