"""State of push-sum on one rank: biased parameters x, a weight w, and the model z = x / w in the parameters.

x is not stored. It equals z w plus the received shares that are not added yet.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dgc.gossip.formats import Vector
from dgc.gossip.model import FlatModel
from dgc.gossip.pushsum.messages import ReceivedShare, shares_from_state, shares_to_state
from dgc.memory.state import check_count, check_tensor


class WeightedModel:
    """Base class with the state of push-sum. A subclass sets model, z, rank and size first."""

    model: FlatModel
    z: Vector
    rank: int
    size: int

    def __init__(self) -> None:
        self.w = 1.0
        self._received: dict[int, ReceivedShare] | None = None  # shares by sender, not added yet

    def _step(self, step: Callable[[], object]) -> None:
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

    def _scale(self, share: float) -> None:
        """Multiplies x and w by share. z does not change."""
        self.w *= share

    @torch.no_grad()
    def _add_received(self) -> None:
        """Adds the received shares in rank order, so that ranks with the same shares get the same result."""
        assert self._received is not None
        shares, self._received = self._received, None
        w = self.w + sum(shares[source].w for source in sorted(shares))
        if self.rank not in shares:
            shares[self.rank] = ReceivedShare(self.z.mul_(self.w), self.w)
        x, *others = (shares[source].x for source in sorted(shares))
        for other in others:
            x.add_(other)
        self.w = self._divisor(w)
        torch.div(x, self.w, out=self.z)
        self.model.scatter()

    def _divisor(self, w: float) -> float:
        """The divisor of x after a round, and the new weight. w: the sum of all shares of w."""
        return w

    def biased_parameters(self) -> Tensor:
        x = self.z * self.w
        for share in (self._received or {}).values():
            x += share.x
        return x

    def bias(self) -> float:
        return self.w + sum(share.w for share in (self._received or {}).values())

    def state_dict(self) -> dict[str, Any]:
        return {
            "z": self.z.clone(),
            "x": self.z * self.w,
            "size": self.size,
            "w": torch.tensor(self.w, dtype=torch.float64),
            "received": shares_to_state(self._received or {}, self.rank, self.size),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the state. Raises ValueError, before any change, if it is not finite or of another model."""
        for name in ("z", "x"):
            check_tensor(name, state[name], self.z.shape)
        check_tensor("w", state["w"], (), torch.float64)
        check_count("size", state["size"])
        received = shares_from_state(state["received"], self.rank, self.size, self.z)
        self.w = float(state["w"])
        # a state that is summed over several ranks has a valid sum of x, but not of z
        self.z.copy_(state["z"] if state["size"] == self.size else state["x"] / self.w)
        self.model.scatter()
        self._received = received or None
