"""Momentum correction with momentum factor masking (Lin et al. 2018, sections 3.1 to 3.3, Algorithm 1).

With gradient g, momentum m, local momentum u and accumulated velocity v of one rank:

    plain      u = m u + g          v = v + u
    Nesterov   u = m (u + g)        v = v + u + g
    sent       v_i = 0 where sent; u_i = 0 there too with masking
    returned   v_i = v_i + value where an exchange gives back a part of the ranks' sum; u_i stays
    dropped    v_i and u_i keep their values from before sending; the gradient stays in them

Sent elements are removed from v and u in the next step's pass, which reads and writes both anyway.

Differences from the paper: the rounding error of the payload stays in v. If all of v is sent (ratio 1, or a
payload that would cost more than dense), no element is stale and u is not masked. The step is then ordinary
momentum.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from dgc.arguments import FLAG, NUMBER, require
from dgc.bucket import Bucket
from dgc.comm.requests import Conversation
from dgc.kernels import PassInputs, SparseVector
from dgc.kernels.selection.reference import remove_nonfinite_
from dgc.memory.clip import Clipping
from dgc.memory.protocol import MomentumCorrection
from dgc.memory.state import DeferredUpdate, FlatState, Snapshots, load_parts, parts_of


class DGCSGDMemory:
    """Error feedback with momentum correction and momentum factor masking (Lin et al. 2018, Algorithm 1).

    Args:
        momentum: Momentum coefficient in [0, 1). It must equal the optimizer's.
        nesterov: Use Nesterov momentum. It must equal the optimizer's.
        gradient_clipping: One of ClipByNorm, ClipByValue, ClipByGlobalNorm, ClipValueByGlobalNorm, or None. Each
            tensor's local gradient is clipped before momentum, in dense warm-up steps as well. Tensors that the
            compressor's fallback sends dense (usually vectors) are clipped after averaging, with the same limit.
            Tensors that a Route assigns to another compressor are not clipped here.
        momentum_masking: Set the momentum of sent elements to zero.

    Raises:
        ValueError: `momentum` is outside [0, 1), or `gradient_clipping` is not a clipping object.

    Example:
        memory = DGCSGDMemory(momentum=0.9, gradient_clipping=ClipByNorm(1.0))
        compression = DGCCompressor(0.001, memory=memory)
    """

    def __init__(
        self,
        momentum: float = 0.9,
        nesterov: bool = False,
        gradient_clipping: Clipping | None = None,
        momentum_masking: bool = True,
    ):
        require("a number", NUMBER, momentum=momentum)
        require("True or False", FLAG, nesterov=nesterov, momentum_masking=momentum_masking)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), not {momentum}")
        if not isinstance(gradient_clipping, Clipping | None) or isinstance(gradient_clipping, type):
            raise ValueError(
                "gradient_clipping must be None or one of dgc.memory's ClipByNorm(...), ClipByValue(...), "
                f"ClipByGlobalNorm(...) and ClipValueByGlobalNorm(), not {gradient_clipping!r}"
            )
        self.momentum, self.nesterov = momentum, nesterov
        self.gradient_clipping, self.momentum_masking = gradient_clipping, momentum_masking
        self._momentums = FlatState("momentum")
        self._velocities = FlatState("velocity")
        self._deferred, self._snapshots = DeferredUpdate(momentum_masking), Snapshots()

    @property
    def correction(self) -> MomentumCorrection | None:
        return MomentumCorrection(self.momentum, self.nesterov)

    def plan(self, bucket: Bucket) -> None:
        self._deferred.forget(bucket)
        self._momentums.add(bucket)
        self._velocities.add(bucket)

    def clip(self, bucket: Bucket) -> Conversation[Tensor | None]:
        if self.gradient_clipping is None:
            return None
        first = remove_nonfinite_(bucket.flat)
        yield from self.gradient_clipping.clip(bucket)
        return first

    def pass_inputs(self, bucket: Bucket) -> PassInputs:
        self._snapshots.forget(bucket)
        u, v = self._momentums[bucket], self._velocities[bucket]
        sent = self._deferred.begin_pass_(bucket, u, v)
        return PassInputs(bucket.gradients, u, v, self.momentum, self.nesterov, sent, self.momentum_masking)

    def sent_(self, bucket: Bucket, sent: SparseVector) -> None:
        self._deferred.keep(bucket, sent)

    def returned_(self, bucket: Bucket, returned: SparseVector) -> None:
        self._deferred.keep_returned(bucket, returned)

    def sent_all_(self, bucket: Bucket, values: Tensor) -> None:
        self._snapshots.subtract(self._velocities, bucket, values)

    def rollback_(self, bucket: Bucket) -> None:
        self._deferred.forget(bucket)
        self._snapshots.rollback(bucket)

    def errors(self) -> Iterable[Tensor]:
        return self._deferred.errors(self._velocities)

    def state_dict(self) -> dict[str, Any]:
        momentums: dict[str, Tensor] = {}
        velocities: dict[str, Tensor] = {}
        for (bucket, u), v in zip(self._momentums.items(), self._velocities, strict=True):
            u, v = u.clone(), v.clone()
            self._deferred.apply_(bucket, u, v)
            momentums |= parts_of(bucket, u)
            velocities |= parts_of(bucket, v)
        return {"momentums": momentums, "velocities": velocities}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_parts({"momentums": self._momentums, "velocities": self._velocities}, state)
        self._deferred.clear()
