"""The interface between a compressor and its memory."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from dgc.bucket import Bucket
from dgc.comm.requests import Conversation
from dgc.kernels import PassInputs, SparseVector
from dgc.memory.clip import Clipping


@dataclass(frozen=True)
class MomentumCorrection:
    """Momentum that a memory applies before compression. The optimizer must then not apply it."""

    momentum: float
    nesterov: bool


@runtime_checkable
class Memory(Protocol):
    """Error state of one compressor: one flat fp32 tensor per bucket, saved under parameter names."""

    @property
    def correction(self) -> MomentumCorrection | None: ...

    @property
    def gradient_clipping(self) -> Clipping | None:
        """The limit on gradients. It also applies to the mean of tensors that a fallback sends dense."""
        ...

    def plan(self, bucket: Bucket) -> None:
        """Allocate the state of a bucket."""
        ...

    def clip(self, bucket: Bucket) -> Conversation[Tensor | None]:
        """Clip the bucket's local gradient in place. NaN and TOO_LARGE (`dgc.kernels`) count as zero.

        Returns:
            The index of the first element that was either, or n if there is none. None if nothing is clipped.
        """
        ...

    def pass_inputs(self, bucket: Bucket) -> PassInputs:
        """Return the pass that removes the previous step's sent elements from the state and adds the gradient.

        After the pass, `v` [n] fp32 holds all that is to be sent. The caller performs the pass exactly once and
        does not change v otherwise. `pass_inputs` is called only after the previous step is known to be valid.
        """
        ...

    def sent_(self, bucket: Bucket, sent: SparseVector) -> None:
        """Record the elements that the other ranks receive, with their values after rounding.

        `sent` is kept until the next pass. Its tensors must not be written to.
        """
        ...

    def returned_(self, bucket: Bucket, returned: SparseVector) -> None:
        """Record parts of the ranks' sum that no rank receives in this step, at most once per step.

        They are added to the error state of this rank as they are, and are kept until the next pass, like those of
        `sent_`. The momentum of these elements does not change.
        """
        ...

    def sent_all_(self, bucket: Bucket, values: Tensor) -> None:
        """Record that all of v was sent. `values` [n] fp32 are the sent values, after rounding."""
        ...

    def rollback_(self, bucket: Bucket) -> None:
        """Undo `sent_`, `returned_` or `sent_all_` of this step, bit for bit, because the step is dropped."""
        ...

    def errors(self) -> Iterable[Tensor]:
        """Return the unsent elements, one flat tensor per bucket, read-only."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
