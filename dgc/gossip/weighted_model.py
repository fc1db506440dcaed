"""What a rank holds in push-sum: a numerator x and a weight w, with the model z = x / w in the parameters.

x is not stored: it is z w, and the shares that have come but are not yet added.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dgc.gossip.messages import Vector
from dgc.gossip.model import FlatModel
from dgc.gossip.parcels import Heard, heard_of, state_of
from dgc.memory.state import check_tensor


class WeightedModel:
    """A subclass sets model, z, rank and size before it uses the rest."""

    model: FlatModel
    z: Vector
    rank: int
    size: int

    def __init__(self) -> None:
        self.w = 1.0
        self._heard: dict[int, Heard] | None = None  # by sender, not yet added

    def _move(self, step: Callable[[], object]) -> None:
        """x moves by what the optimizer moves z by."""
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
        """x and w times share: z is the same."""
        self.w *= share

    @torch.no_grad()
    def _take_in(self) -> None:
        """Add what was heard in the order of ranks, so that ranks which hear the same have the same."""
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
        """ValueError for a state that is not finite, or of another model; then nothing has changed."""
        for name in ("z", "x"):
            check_tensor(name, state[name], self.z.shape)
        check_tensor("w", state["w"], (), torch.float64)
        heard = heard_of(state["heard"], self.rank, self.size, self.z)
        self.w = float(state["w"])
        # a state that is a sum over other ranks' has the sum of their x, not of their z
        self.z.copy_(state["z"] if state["size"] == self.size else state["x"] / self.w)
        self.model.scatter()
        self._heard = heard or None
