"""Momentum correction with momentum factor masking (Lin et al. 2018, sections 3.1 to 3.3, Algorithm 1).

With gradient g, momentum m, local momentum u and accumulated velocity v of one rank:

    plain      u = m u + g          v = v + u
    Nesterov   u = m (u + g)        v = v + u + g
    sent       v_i = 0 where sent; u_i = 0 there too with masking
    dropped    v_i and u_i as before they were sent: the gradient stays taken in

Differences from the paper: what the wire rounds away stays in v. Where all of v is sent (ratio 1, or a payload
that would cost more than dense), nothing is stale and u is not masked, so that the step is ordinary momentum.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from dgc.bucket import Bucket
from dgc.comm.requests import Conversation
from dgc.kernels import Accumulation, Selection
from dgc.kernels.reference import remove_nonfinite_
from dgc.memory.clip import Clipping
from dgc.memory.protocol import MomentumCorrection
from dgc.memory.state import FlatState, Undo, load_parts


class DGCSGDMemory:
    """`momentum` and `nesterov` are the optimizer's; `gradient_clipping` acts on the local gradient first."""

    def __init__(
        self,
        momentum: float = 0.9,
        nesterov: bool = False,
        gradient_clipping: Clipping | None = None,
        momentum_masking: bool = True,
    ):
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), not {momentum}")
        if not isinstance(gradient_clipping, Clipping | None):
            raise ValueError(
                "gradient_clipping must be None or one of dgc.memory's ClipByNorm, ClipByValue and "
                f"ClipByGlobalNorm, not {gradient_clipping!r}"
            )
        self.momentum, self.nesterov = momentum, nesterov
        self.gradient_clipping, self.momentum_masking = gradient_clipping, momentum_masking
        self._momentums = FlatState("momentum")
        self._velocities = FlatState("velocity")
        self._undo = Undo()

    @property
    def correction(self) -> MomentumCorrection | None:
        return MomentumCorrection(self.momentum, self.nesterov)

    def plan(self, bucket: Bucket) -> None:
        self._momentums.add(bucket)
        self._velocities.add(bucket)

    def clip(self, bucket: Bucket) -> Conversation[Tensor | None]:
        if self.gradient_clipping is None:
            return None
        first = remove_nonfinite_(bucket.flat)
        yield from self.gradient_clipping.clip(bucket)
        return first

    def due(self, bucket: Bucket) -> Accumulation:
        self._undo.forget(bucket)
        u, v = self._momentums[bucket], self._velocities[bucket]
        return Accumulation(bucket.pieces, u, v, self.momentum, self.nesterov)

    def sent_(self, bucket: Bucket, sent: Selection) -> None:
        u = self._momentums[bucket] if self.momentum_masking else None
        self._undo.take(bucket, sent, u, self._velocities[bucket])

    def sent_all_(self, bucket: Bucket, values: Tensor) -> None:
        self._undo.subtract(self._velocities, bucket, values)

    def take_back_(self, bucket: Bucket) -> None:
        self._undo.take_back(bucket)

    def errors(self) -> Iterable[Tensor]:
        return self._velocities

    def state_dict(self) -> dict[str, Any]:
        return {"momentums": self._momentums.state_dict(), "velocities": self._velocities.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_parts({"momentums": self._momentums, "velocities": self._velocities}, state)
