"""What the optimizer needs of a compressor, and what a conversation about gradients returns."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from dgc.bucket import Bucket, Segment
from dgc.comm.requests import Conversation
from dgc.memory.protocol import MomentumCorrection as MomentumCorrection


@dataclass(frozen=True)
class DenseResult:
    """The mean gradient is in `bucket.flat`.

    nonfinite: what is wrong with it, in words that name the parameter and the rank, where a rank's gradient or
    the mean has NaN or inf. Then nothing of the result may be applied. The same on every rank.
    """

    nonfinite: str | None = None


@dataclass(frozen=True)
class SparseResult:
    """The mean gradient is zero but for `values` [k] fp32 at the unique ascending `indices` [k] int64.

    nonfinite: as in DenseResult.
    """

    indices: Tensor
    values: Tensor
    nonfinite: str | None = None


class NonFiniteGradientError(RuntimeError):
    """NaN or inf in a gradient. Every rank raises it; no error state holds the value."""


Result: TypeAlias = DenseResult | SparseResult


@runtime_checkable
class Compressor(Protocol):
    """Averages buckets over all ranks. The result is the same, bit for bit, on every rank."""

    @property
    def compress_ratio(self) -> float:
        """Nominal fraction of elements sent, now: numbers sent over elements, or the bits of a code over 32.

        Below 1 wherever less than 2 bytes per element travel. Casts to fp16 and bf16 send every element: 1.
        """
        ...

    @property
    def correction(self) -> MomentumCorrection | None:
        """Momentum that this compressor applies to its gradients, in the optimizer's stead."""
        ...

    @property
    def fallback(self) -> "Compressor":
        """What takes the tensors that this one does not accept."""
        ...

    def accepts(self, segment: Segment) -> bool:
        """Whether this compressor is meant for such a tensor."""
        ...

    def plan(self, bucket: Bucket, size: int, rank: int) -> None:
        """Get ready for a bucket, as rank `rank` of `size`. Called once per bucket."""
        ...

    def reduce(self, bucket: Bucket) -> Conversation[Result]:
        """One step's exchange of a bucket. Every rank speaks the same number of rounds."""
        ...

    def take_back(self, bucket: Bucket) -> None:
        """The step that `reduce` spoke for is dropped: what this rank sent returns to its error state."""
        ...

    def begin_epoch(self, epoch: int) -> None:
        """Called before the first step of each epoch, counted from 0, with the same number on every rank."""
        ...

    def errors(self) -> Iterable[Tensor]:
        """The error state: what waits to be sent."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: tensors under parameter names, numbers and strings."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def conversation_of(compressor: Compressor, bucket: Bucket) -> Conversation[Result]:
    """`compressor.reduce(bucket)`. ValueError where that is no generator or does not return a result."""
    what = f"reduce of {type(compressor).__name__} must"
    conversation = compressor.reduce(bucket)
    if not isinstance(conversation, Generator):
        raise ValueError(
            f"{what} be a generator, which yields tuples of requests and returns a DenseResult or SparseResult, "
            f"not {type(conversation).__name__}"
        )
    result = yield from conversation
    if not isinstance(result, DenseResult | SparseResult):
        raise ValueError(f"{what} return a DenseResult or SparseResult, not {result!r}")
    return result


@runtime_checkable
class SparseOrDense(Protocol):
    """A compressor that sends a bucket dense where a sparse message would cost more."""

    @property
    def dense_share(self) -> float:
        """Share of its buckets' elements that went dense in the last step; 0 before the first."""
        ...


class Stateless(ABC):
    """The parts of a compressor that keeps nothing between steps, accepts every tensor and sends it whole."""

    compress_ratio: float = 1.0
    correction: MomentumCorrection | None = None

    @property
    def fallback(self) -> "Stateless":
        return self

    def accepts(self, segment: Segment) -> bool:
        return True

    def plan(self, bucket: Bucket, size: int, rank: int) -> None:
        return None

    @abstractmethod
    def reduce(self, bucket: Bucket) -> Conversation[Result]: ...

    def take_back(self, bucket: Bucket) -> None:
        return None

    def begin_epoch(self, epoch: int) -> None:
        return None

    def errors(self) -> Iterable[Tensor]:
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"state of another compressor: {sorted(state)}")
