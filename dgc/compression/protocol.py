"""The interface between the optimizer and a compressor, and the results of `Compressor.reduce`."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from dgc.bucket import Bucket, Segment
from dgc.comm.requests import Conversation
from dgc.memory import MomentumCorrection as MomentumCorrection
from dgc.state import State, Tables


@dataclass(frozen=True, eq=False)
class DenseResult:
    """The mean gradient, stored in `bucket.flat`.

    Attributes:
        nonfinite: A message that names the parameter and the rank if a rank's gradient has NaN or inf. No part of
            such a result may be applied. It is the same on every rank.
        own: A number that is not finite if this rank's gradient is not (`probe`), where the ranks have not told
            each other about their gradients.
        is_finite: Whether the mean is known to be finite. Otherwise `check_means` finds out, once per step.
    """

    nonfinite: str | None = None
    own: Tensor | None = None
    is_finite: bool = False

    def write_to(self, bucket: Bucket) -> None:
        """Store the mean in `bucket.flat`."""


@dataclass(frozen=True, eq=False)
class SparseResult:
    """A mean gradient that is zero except for `values` [k] fp32 at the unique ascending `indices` [k] int64.

    nonfinite: as in DenseResult, and also if the mean is not finite.
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


@dataclass(frozen=True, eq=False)
class Reduced:
    """The end of `Compressor.reduce`.

    Attributes:
        result: The mean.
        state: The state after the step.
        dropped: The state if every rank drops the step: what this rank has sent is unsent again. None: that which
            `reduce` was given.
    """

    result: Result
    state: State
    dropped: State | None = None


class Compressor(ABC):
    """Averages buckets over all ranks. The result is identical, bit for bit, on every rank.

    It has settings. What it keeps of a bucket is in a `State`, which `dgc.engine.state.BucketStates` keeps, saves
    and loads.

    Attributes:
        point_to_point: Whether it sends messages from rank to rank (`Exchange`). Not every transport can.
        keeps_server_errors: Whether a rank also keeps what it has not sent of the mean, for all ranks.
    """

    point_to_point: bool = False
    keeps_server_errors: bool = False

    @property
    def class_name(self) -> str:
        """Name of the method in saved states."""
        return type(self).__name__

    @property
    def correction(self) -> MomentumCorrection | None:
        """Momentum that this compressor applies to its gradients in place of the optimizer."""
        return None

    @property
    def compress_ratio(self) -> float:
        """Current nominal fraction of elements sent: numbers sent / elements, or bits of a code / 32.

        It is below 1 if less than 2 bytes per element are sent. Casts to fp16 and bf16 send every element: 1.
        """
        return 1.0

    @property
    def fallback(self) -> "Compressor":
        """The compressor for tensors that this one does not accept."""
        return self

    def accepts(self, segment: Segment) -> bool:
        """Whether this compressor handles the tensor."""
        return True

    def init(self, bucket: Bucket, size: int, rank: int) -> State:
        """Return the state of a bucket before the first step, on rank `rank` of `size`."""
        return State(size, rank)

    @abstractmethod
    def reduce(self, bucket: Bucket, state: Any) -> Conversation[Reduced]:
        """Average a bucket in one step. The number of communication rounds is the same on every rank."""
        ...

    def begin_epoch(self, epoch: int) -> None:
        """Called before the first step of each epoch, counted from 0, with the same number on every rank."""
        return None

    def at_epoch(self, bucket: Bucket, state: Any, epoch: int) -> State:
        """Return the state with which an epoch begins. Called after `begin_epoch`."""
        return state

    def ratio_of(self, states: Sequence[tuple[Bucket, Any]]) -> float:
        """`compress_ratio` for these buckets, if it depends on them."""
        return self.compress_ratio


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


class NoState(State):
    """The state of a method that keeps nothing."""

    def saved(self, bucket: Bucket) -> Tables:
        return {}

    def loaded(self, bucket: Bucket, tables: Tables) -> "NoState":
        return self


class StatelessCompressor(Compressor):
    """Base class of compressors that keep no state, accept every tensor and send every element."""

    def init(self, bucket: Bucket, size: int, rank: int) -> NoState:
        return NoState(size, rank)
