"""State of push-sum on one rank: a numerator x, a weight w, and the model z = x / w in the parameters.

x is not stored. It equals z w plus the received shares that are not yet added.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dgc.gossip.formats import Vector
from dgc.gossip.model import FlatModel
from dgc.gossip.pushsum.messages import Heard, heard_of, state_of
from dgc.memory.state import check_tensor


class WeightedModel:
    """Base class with the state of push-sum. A subclass sets model, z, rank and size first."""

    model: FlatModel
    z: Vector
    rank: int
    size: int

    def __init__(self) -> None:
        self.w = 1.0
        self._heard: dict[int, Heard] | None = None  # received shares by sender, not yet added

    def _move(self, step: Callable[[], object]) -> None:
        """Runs the optimizer's step on z and moves x by the same difference."""
        if self.w == 1:
            step()
            self.model.gather()
            return
        before = self.z.clone()
        step()
        self.model.gather()
        self.z.sub_(before).div_(self.w).add_(before)
        self.model.scatter()

    def _keep(self, share: float) -> None:
        """Multiplies x and w by share. z does not change."""
        self.w *= share

    @torch.no_grad()
    def _take_in(self) -> None:
        """Adds the received shares in rank order, so that ranks with the same shares get the same result."""
        assert self._heard is not None
        heard, self._heard = self._heard, None
        w = self.w + sum(heard[source].w for source in sorted(heard))
        if self.rank not in heard:
            heard[self.rank] = Heard(self.z.mul_(self.w), self.w)
        first, *rest = (heard[source].x for source in sorted(heard))
        for x in rest:
            first.add_(x)
        self.w = self._weight(w)
        torch.div(first, self.w, out=self.z)
        self.model.scatter()

    def _weight(self, w: float) -> float:
        return w

    def numerator(self) -> Tensor:
        x = self.z * self.w
        for heard in (self._heard or {}).values():
            x += heard.x
        return x

    def state_dict(self) -> dict[str, Any]:
        return {
            "z": self.z.clone(),
            "x": self.z * self.w,
            "size": self.size,
            "w": torch.tensor(self.w, dtype=torch.float64),
            "heard": state_of(self._heard or {}, self.rank, self.size),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the state. Raises ValueError, before any change, if it is not finite or of another model."""
        for name in ("z", "x"):
            check_tensor(name, state[name], self.z.shape)
        check_tensor("w", state["w"], (), torch.float64)
        heard = heard_of(state["heard"], self.rank, self.size, self.z)
        self.w = float(state["w"])
        # a state that is summed over several ranks has a valid sum of x, but not of z
        self.z.copy_(state["z"] if state["size"] == self.size else state["x"] / self.w)
        self.model.scatter()
        self._heard = heard or None
