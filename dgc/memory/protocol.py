"""What a compressor needs of a memory."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from dgc.bucket import Bucket
from dgc.comm.requests import Conversation
from dgc.kernels import Accumulation, Selection
from dgc.memory.clip import Clipping


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

    @property
    def gradient_clipping(self) -> Clipping | None:
        """The limit on gradients; it also applies to the mean of tensors that travel dense through a fallback."""
        ...

    def plan(self, bucket: Bucket) -> None:
        """Make room for a bucket."""
        ...

    def clip(self, bucket: Bucket) -> Conversation[Tensor | None]:
        """Clip the bucket's local gradient in place, NaN and TOO_LARGE (`dgc.kernels.protocol`) counting as zero.

        Returns the index of the first element that was either, n where there was none. None: nothing is
        clipped.
        """
        ...

    def due(self, bucket: Bucket) -> Accumulation:
        """The pass that takes out what the step before sent, and takes in the gradient; after it `v` [n] fp32 is
        all that is due.

        Whoever asks does the pass, once, and does not change v otherwise. The step before is known to be good.
        """
        ...

    def sent_(self, bucket: Bucket, sent: Selection) -> None:
        """What the other ranks receive: elements, and their values after rounding. Kept until the next pass, so
        nobody may write to its tensors.
        """
        ...

    def sent_all_(self, bucket: Bucket, values: Tensor) -> None:
        """`values` [n] fp32, all of v but for rounding, have been sent."""
        ...

    def take_back_(self, bucket: Bucket) -> None:
        """What was sent since the last `due` returns, bit for bit: the step is dropped."""
        ...

    def errors(self) -> Iterable[Tensor]:
        """What waits to be sent, a flat tensor per bucket, to be read only."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
