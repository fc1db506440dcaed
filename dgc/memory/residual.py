"""Memories without momentum: plain error feedback, and no error feedback.

Error feedback: v = e + g. The sent elements are subtracted from v, and the rest is the next step's e (Stich et al.
2018, Mem-SGD). The subtraction is part of the next step's pass, which reads and writes v anyway.
With a decay beta: v = beta e + g (SparseLoCo: Sarfi et al. 2025, arXiv 2508.15706).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dgc.arguments import checked
from dgc.bucket import Bucket
from dgc.comm.requests import Conversation
from dgc.kernels import PassInputs, SparseVector
from dgc.memory.clip import Clipping
from dgc.memory.protocol import MomentumCorrection
from dgc.memory.state import DeferredUpdate, FlatState, Snapshots, load_parts, parts_of


@checked
class ResidualMemory:
    """Error feedback without momentum (Mem-SGD, Stich et al. 2018): the unsent rest is added to the next gradient.

    Args:
        decay: Factor of the unsent rest in each step, in (0, 1]. Below 1 the rest is forgotten after about
            1 / (1 - decay) steps, as in SparseLoCo (0.95).

    Raises:
        ValueError: `decay` is out of range.

    Example:
        compression = DGCCompressor(0.01, memory=ResidualMemory())
    """

    correction: MomentumCorrection | None = None
    gradient_clipping: Clipping | None = None

    def __init__(self, decay: float = 1.0) -> None:
        if not 0 < decay <= 1:
            raise ValueError(f"decay must be in (0, 1], not {decay}: NoMemory() keeps nothing of the rest")
        self.decay = decay
        self._residual = FlatState("residual")
        self._deferred, self._snapshots = DeferredUpdate(), Snapshots()

    def plan(self, bucket: Bucket) -> None:
        self._deferred.forget(bucket)
        self._residual.add(bucket)

    def clip(self, bucket: Bucket) -> Conversation[Tensor | None]:
        yield from ()
        return None

    def pass_inputs(self, bucket: Bucket) -> PassInputs:
        self._snapshots.forget(bucket)
        v = self._residual[bucket]
        if self.decay != 1:
            self._deferred.apply_(bucket, None, v)  # what was sent must not decay with the rest
            self._deferred.forget(bucket)
            v.mul_(self.decay)
        return PassInputs(bucket.gradients, None, v, sent=self._deferred.begin_pass_(bucket, None, v))

    def sent_(self, bucket: Bucket, sent: SparseVector) -> None:
        self._deferred.keep(bucket, sent)

    def returned_(self, bucket: Bucket, returned: SparseVector) -> None:
        self._deferred.keep_returned(bucket, returned)

    def sent_all_(self, bucket: Bucket, values: Tensor) -> None:
        self._snapshots.subtract(self._residual, bucket, values)

    def rollback_(self, bucket: Bucket) -> None:
        self._deferred.forget(bucket)
        self._snapshots.rollback(bucket)

    def errors(self) -> Iterable[Tensor]:
        return self._deferred.errors(self._residual)

    def state_dict(self) -> dict[str, Any]:
        residuals: dict[str, Tensor] = {}
        for (bucket, _), error in zip(self._residual.items(), self.errors(), strict=True):
            residuals |= parts_of(bucket, error)
        return {"residuals": residuals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_parts({"residuals": self._residual}, state)
        self._deferred.clear()


class NoMemory:
    """No error feedback: unsent elements are discarded."""

    correction: MomentumCorrection | None = None
    gradient_clipping: Clipping | None = None

    def plan(self, bucket: Bucket) -> None:
        pass

    def clip(self, bucket: Bucket) -> Conversation[Tensor | None]:
        yield from ()
        return None

    def pass_inputs(self, bucket: Bucket) -> PassInputs:
        nothing = torch.zeros(bucket.numel, dtype=torch.float32, device=bucket.device)
        return PassInputs(bucket.gradients, None, nothing)

    def sent_(self, bucket: Bucket, sent: SparseVector) -> None:
        pass

    def returned_(self, bucket: Bucket, returned: SparseVector) -> None:
        pass

    def sent_all_(self, bucket: Bucket, values: Tensor) -> None:
        pass

    def rollback_(self, bucket: Bucket) -> None:
        pass

    def errors(self) -> Iterable[Tensor]:
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"state of another memory: {sorted(state)}")
