"""The interface between the optimizer and a compressor, and the results of `Compressor.reduce`."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from dgc.bucket import Bucket, Segment
from dgc.comm.requests import Conversation
from dgc.memory import MomentumCorrection as MomentumCorrection


@dataclass(frozen=True)
class DenseResult:
    """The mean gradient, stored in `bucket.flat`.

    nonfinite: a message that names the parameter and the rank if a rank's gradient or the mean has NaN or inf. No
    part of such a result may be applied. It is the same on every rank.
    """

    nonfinite: str | None = None

    def write_to(self, bucket: Bucket) -> None:
        """Store the mean in `bucket.flat`."""


@dataclass(frozen=True)
class SparseResult:
    """A mean gradient that is zero except for `values` [k] fp32 at the unique ascending `indices` [k] int64.

    nonfinite: as in DenseResult.
    """

    indices: Tensor
    values: Tensor
    nonfinite: str | None = None

    def write_to(self, bucket: Bucket) -> None:
        """Store the mean in `bucket.flat`."""
        bucket.release()
        bucket.flat.zero_()
        bucket.flat[self.indices] = self.values.to(bucket.dtype)


class NonFiniteGradientError(RuntimeError):
    """NaN or inf in a gradient. It is raised on every rank, and the value is not kept in any error state."""


Result: TypeAlias = DenseResult | SparseResult


@runtime_checkable
class Compressor(Protocol):
    """Averages buckets over all ranks. The result is identical, bit for bit, on every rank."""

    @property
    def compress_ratio(self) -> float:
        """Current nominal fraction of elements sent: numbers sent / elements, or bits of a code / 32.

        It is below 1 if less than 2 bytes per element are sent. Casts to fp16 and bf16 send every element: 1.
        """
        ...

    @property
    def correction(self) -> MomentumCorrection | None:
        """Momentum that this compressor applies to its gradients in place of the optimizer."""
        ...

    @property
    def fallback(self) -> "Compressor":
        """The compressor for tensors that this one does not accept."""
        ...

    def accepts(self, segment: Segment) -> bool:
        """Whether this compressor handles the tensor."""
        ...

    def plan(self, bucket: Bucket, size: int, rank: int) -> None:
        """Allocates the state of a bucket on rank `rank` of `size`. Called once per bucket."""
        ...

    def reduce(self, bucket: Bucket) -> Conversation[Result]:
        """Averages a bucket in one step. The number of communication rounds is the same on every rank."""
        ...

    def rollback(self, bucket: Bucket) -> None:
        """Undoes the last `reduce` of a dropped step: what this rank sent returns to its error state."""
        ...

    def begin_epoch(self, epoch: int) -> None:
        """Called before the first step of each epoch, counted from 0, with the same number on every rank."""
        ...

    def errors(self) -> Iterable[Tensor]:
        """The error state: tensors that are not yet sent."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: tensors by parameter name, numbers and strings."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def conversation_of(compressor: Compressor, bucket: Bucket) -> Conversation[Result]:
    """Runs `compressor.reduce(bucket)`.

    Raises:
        ValueError: if `reduce` is not a generator or does not return a result.
    """
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
    """A compressor that sends a bucket dense if a sparse message would cost more."""

    @property
    def dense_share(self) -> float:
        """Fraction of the elements of its buckets that were sent dense in the last step; 0 before the first."""
        ...


@runtime_checkable
class PointToPoint(Protocol):
    """A compressor that can send messages from rank to rank (`Exchange`)."""

    @property
    def point_to_point(self) -> bool:
        """Whether it does so with its settings. Not every transport can."""
        ...


def uses_point_to_point(compressor: Any) -> bool:
    """Whether a compressor sends messages from rank to rank."""
    return isinstance(compressor, PointToPoint) and compressor.point_to_point


@runtime_checkable
class MomentumOwner(Protocol):
    """An optimizer that keeps momentum and lets a compressor exchange it in place of the gradients."""

    @property
    def exchanges_momentum(self) -> bool:
        """Whether the next step takes momentum. Otherwise it takes gradients. The same on every rank."""
        ...

    def momentum_of(self, parameters: Sequence[Tensor]) -> list[tuple[float, Tensor]]:
        """The coefficient m and the momentum u of each parameter, for u = m u + (1 - m) g."""
        ...

    def receive_momentum_of(self, parameters: Iterable[Tensor]) -> None:
        """Expect the mean of u in .grad of these parameters, in every step with `exchanges_momentum`."""
        ...


@runtime_checkable
class Preconditioner(MomentumOwner, Protocol):
    """An optimizer that divides by something that no longer changes once it takes momentum."""

    def preconditioner_of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The factor of each element of the parameters, the same on every rank."""
        ...


@runtime_checkable
class ExchangesMomentum(Protocol):
    """A compressor that needs a MomentumOwner."""

    def exchange_momentum_of(self, owner: MomentumOwner, parameters: Mapping[str, Tensor]) -> None:
        """Called once, before `plan`. parameters: those of this compressor, by name."""
        ...


class StatelessCompressor(ABC):
    """Base class of compressors that keep no state, accept every tensor and send every element."""

    compress_ratio: float = 1.0
    correction: MomentumCorrection | None = None

    @property
    def fallback(self) -> "StatelessCompressor":
        return self

    def accepts(self, segment: Segment) -> bool:
        return True

    def plan(self, bucket: Bucket, size: int, rank: int) -> None:
        return None

    @abstractmethod
    def reduce(self, bucket: Bucket) -> Conversation[Result]: ...

    def rollback(self, bucket: Bucket) -> None:
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
