"""What a compressor needs of a memory."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from dgc.bucket import Bucket
from dgc.comm.requests import Conversation


@dataclass(frozen=True)
class MomentumCorrection:
    """Momentum that a memory applies before compression, in the optimizer's stead."""

    momentum: float
    nesterov: bool


@runtime_checkable
class Memory(Protocol):
    """State is fp32, one flat tensor per bucket, and saved under parameter names."""

    @property
    def correction(self) -> MomentumCorrection | None: ...

    def plan(self, bucket: Bucket) -> None:
        """Make room for a bucket."""
        ...

    def clip(self, bucket: Bucket) -> Conversation[None]:
        """Clip the bucket's local gradient in place."""
        ...

    def compensate(self, bucket: Bucket) -> Tensor:
        """Take in the gradient; return v [n] fp32, all that is due. The caller does not change it."""
        ...

    def sent_(self, bucket: Bucket, indices: Tensor, values: Tensor) -> None:
        """`values` [k] fp32 of v[indices] have been sent."""
        ...

    def sent_all_(self, bucket: Bucket, values: Tensor) -> None:
        """`values` [n] fp32, all of v but for rounding, have been sent."""
        ...

    def take_back_(self, bucket: Bucket) -> None:
        """What was sent since the last `compensate` returns, bit for bit: the step is dropped."""
        ...

    def errors(self) -> Iterable[Tensor]:
        """What waits to be sent, a flat tensor per bucket."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
