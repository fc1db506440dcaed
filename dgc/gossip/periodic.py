"""Averages over all ranks every H steps: local SGD (Stich 2019, arXiv 1805.09767), Gossip-PGA (Chen et al. 2021,
arXiv 2105.09080), SlowMo (Wang et al.: ICLR 2020, arXiv 1910.00643, Algorithm 1), DiLoCo (Douillard et al. 2023,
arXiv 2311.08105, Algorithm 1).

Between two averages, every rank takes local steps or gossips (`base`). The average is the new model, or the input
of an outer optimizer (`dgc.gossip.outer`).

Differences from the papers: Each rank keeps its own optimizer buffers, which are never reset. The learning rate of
SlowMo is that of the first parameter group in the step before the average.

Payload in bytes: 4 n every H steps, and that of the base.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dgc.comm.conversation import RunningConversation
from dgc.comm.meter import TrafficMeter
from dgc.comm.requests import AllReduce, Conversation
from dgc.comm.transport import Transport
from dgc.gossip.model import FlatModel
from dgc.gossip.outer import OuterOptimizer, Vector
from dgc.gossip.protocol import Gossip
from dgc.memory.state import check_tensor


class Periodic:
    """Averages over all ranks every H steps: local SGD, Gossip-PGA, SlowMo and DiLoCo.

    Args:
        average_every (int): steps between two averages, H.
        base (Gossip, optional): synchronous gossip between averages; None for local steps.
        outer (OuterOptimizer, optional): `SlowMo` or `Nesterov`; None continues from the mean.

    Raises:
        ValueError: if average_every is less than 1, or base is asynchronous.

    Example:
        >>> diloco = Periodic(average_every=500, outer=Nesterov())
        >>> optimizer = GossipOptimizer(optimizer, model.named_parameters(), diloco)
    """

    is_synchronous = True

    def __init__(self, average_every: int, base: Gossip | None = None, outer: OuterOptimizer | None = None):
        if average_every < 1:
            raise ValueError(f"average_every must be at least 1 step, not {average_every}")
        if base is not None and not base.is_synchronous:
            raise ValueError(
                f"{type(base).__name__} is asynchronous, so its ranks have no common step after which to average"
            )
        self.average_every, self.base, self.outer = average_every, base, outer
        self.compress_ratio = base.compress_ratio if base is not None else 1 / average_every
        self.steps = 0

    @property
    def needs_groups(self) -> bool:
        return self.base is not None and self.base.needs_groups

    def start(self, model: FlatModel, transport: Transport, meter: TrafficMeter, name: str = "gossip") -> None:
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
            self.base.synchronize_messages()
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
        x = self.z.clone() if self.base is None else self.base.biased_parameters()
        (mean,) = yield (AllReduce(x),)
        return mean

    def synchronize_messages(self) -> None:
        if self.base is not None:
            self.base.synchronize_messages()

    def restart(self) -> None:
        if self.base is not None:
            self.base.restart()

    def flush(self) -> None:
        if self.base is not None:
            self.base.flush()

    def biased_parameters(self) -> Tensor:
        return self.z.clone() if self.base is None else self.base.biased_parameters()

    def metrics(self) -> dict[str, float]:
        return {} if self.base is None else self.base.metrics()

    def errors(self) -> Iterable[Tensor]:
        return () if self.base is None else self.base.errors()

    def close(self) -> None:
        if self.base is not None:
            self.base.close()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"steps": self.steps}
        if self.base is None:
            state["z"] = self.z.clone()
        else:
            state["base"] = self.base.state_dict()
        if self.outer is not None:
            state |= {"z0": self._z0.clone(), "u": self._u.clone()}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != self._keys():
            raise ValueError(f"state of another algorithm: it has {sorted(state)}, not {sorted(self._keys())}")
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
