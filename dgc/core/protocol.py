"""The interface between the optimizer and a compressor."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Any, Protocol, TypeVar, runtime_checkable

from jaxtyping import Float32, Int64
from torch import Tensor

from dgc.comm.requests import Conversation
from dgc.core.arguments import NUMBER, require
from dgc.core.bucket import Bucket, Segment
from dgc.core.momentum import MomentumCorrection as MomentumCorrection
from dgc.core.results import Reduced
from dgc.core.state import State, Tables
from dgc.warn import warn

Vector = Float32[Tensor, "n"]
Position = Int64[Tensor, ""]  # of the first non-finite element of a gradient, or n


class Use(Enum):
    """What an optimizer does with the mean that a compressor returns."""

    ADAM = "the mean gradient divided by the root of a second moment, as in Adam"
    MUON = "the mean gradient made orthogonal, as in Muon"
    OUTER_MUON = "the mean of what local steps of Muon have changed"


@dataclass(frozen=True, eq=False)
class Repeats:
    """A step that does the same as others with the same key: only the content of tensors and the seeds differ.

    Attributes:
        key: What is equal in all of them, besides the compressor, and the addresses of gradients and state.
        seeds: Those of the step, of up to 64 bits with a sign, in the order in which its kernels take them
            (`dgc.kernels.launch.seed_slot`). As many in every step.
    """

    key: tuple[Any, ...] = ()
    seeds: tuple[int, ...] = ()


class Run(Protocol):
    """One use of a compressor: in an exchange, with the epoch there and the states of its buckets."""

    @property
    def compress_ratio(self) -> float: ...

    def begin_epoch(self, epoch: int) -> None: ...


C = TypeVar("C", bound="Compressor")


class Compressor(ABC):
    """Averages buckets over all ranks. The result is identical, bit for bit, on every rank.

    It has settings, and is not changed after its construction, so that any number of exchanges can use it. What it
    keeps of a bucket is in a `State`, which the engine keeps, saves and loads. What depends on the epoch or on the
    optimizer is in copies with other settings, which the engine uses in its place (`in_epoch`, `with_momentum`).

    Attributes:
        point_to_point: Whether it sends messages from rank to rank (`Exchange`). Not every transport can.
        keeps_server_errors: Whether a rank also keeps what it has not sent of the mean, for all ranks.
        averages_by_sums: Whether its means follow from results of its all-reduces alone: ranks with equal results
            have equal means, bit for bit. A subclass that overrides `reduce` says it anew.
        has_momentum: Whether it returns a momentum of its gradients, of which no optimizer is told.
        correction: Momentum that this compressor applies to its gradients in place of the optimizer.
        unsuited: The uses for which it was measured to lose quality, with the reason and the page of the numbers.
    """

    point_to_point: bool = False
    keeps_server_errors: bool = False
    averages_by_sums: bool = False
    has_momentum: bool = False
    unsuited: Mapping[Use, str] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        """What a base class says of its own `reduce` is not true of another one."""
        super().__init_subclass__(**options)
        if "reduce" in vars(cls):
            if "repeats" not in vars(cls):
                cls.repeats = Compressor.repeats  # type: ignore[method-assign]
            if "averages_by_sums" not in vars(cls):
                cls.averages_by_sums = False

    @property
    def class_name(self) -> str:
        """Name of the method in saved states."""
        return type(self).__name__

    @property
    def correction(self) -> MomentumCorrection | None:
        return None

    def changed(self: C, **settings: Any) -> C:
        """Return a copy with these attributes. All others are shared."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, **settings)
        return copy

    @property
    def compress_ratio(self) -> float:
        """Nominal fraction of elements sent: numbers sent / elements, or bits of a code / 32.

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

    def too_small(self, bucket: Bucket) -> list[Segment]:
        """Return the tensors that are sent whole, because what the method sends of them would be as large."""
        return []

    def init(self, bucket: Bucket, size: int, rank: int) -> State:
        """Return the state of a bucket before the first step, on rank `rank` of `size`."""
        return State(size, rank)

    @abstractmethod
    def reduce(self, bucket: Bucket, state: Any) -> Conversation[Reduced]:
        """Average a bucket in one step. The number of communication rounds is the same on every rank."""

    def repeats(self, bucket: Bucket, state: Any) -> Repeats | None:
        """Say that the next step on a GPU may be recorded as a CUDA graph (`dgc.core.graphs`). None: it may not.
        A subclass with another `reduce` says it anew.

        It must then not read a number from the device, nor launch a kernel with a number that differs between
        steps with the same key. The tensors that it changes or replaces are `State.moving`.
        """
        return None

    def in_epoch(self, epoch: int) -> "Compressor":
        """Return the compressor with the settings of an epoch, counted from 0, the same on every rank.

        The engine asks the compressor that it was given, first for epoch 0, and uses what is returned until the
        next epoch begins. A compressor that does not depend on the epoch returns itself. Of another one rank 0
        warns if no epoch has begun before the first step.
        """
        return self

    def at_epoch(self, bucket: Bucket, state: Any, epoch: int) -> State:
        """Return the state with which an epoch begins. The engine asks what `in_epoch` has returned."""
        return state

    def with_momentum(self, momentum: float, nesterov: bool) -> "Compressor":
        """Return the compressor with the momentum of an optimizer, where `correction` has None."""
        return self

    def used_by(self, run: Run) -> None:
        """Called once by each exchange that uses the compressor, before it begins with the states of buckets."""
        return None

    def ratio_of(self, states: Sequence[tuple[Bucket, Any]]) -> float:
        """`compress_ratio` for these buckets, if it depends on them."""
        return self.compress_ratio


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


CLEARLY_A_FACTOR = 100  # no share and no percentage


def fraction_of(**ratio: float) -> float:
    """Return a ratio as a fraction: above 1 it is the factor saved. Raises ValueError if it is not positive."""
    require("a number", NUMBER, **ratio)
    ((name, value),) = ratio.items()
    if not 0 < value < inf:
        raise ValueError(f"{name} must be positive and finite, not {value}")
    if 1 < value < CLEARLY_A_FACTOR and value != 10:  # 10 percent are a tenth
        warn(
            f"{name}={value:g} is read as the factor saved: a share of {1 / value:.4g} is sent. Give that share, "
            f"{name}={1 / value:.4g}, if you mean it, and {name}={value / 100:g} for {value:g} percent"
        )
    return min(value, 1 / value)


def check_choice(choices: Iterable[str | None], **option: str | None) -> None:
    """Raise ValueError if the value of an option is none of `choices`."""
    ((name, value),) = option.items()
    if value not in (known := tuple(choices)):
        raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, not {value!r}")


# --- optimizers whose momentum is exchanged --------------------------------------------------------


@runtime_checkable
class MomentumOwner(Protocol):
    """An optimizer that keeps momentum and lets a compressor exchange it in place of the gradients."""

    @property
    def exchanges_momentum(self) -> bool:
        """Whether the next step takes momentum. Otherwise it takes gradients. The same on every rank."""

    def momentum_of(self, parameters: Sequence[Tensor]) -> list[tuple[float, Tensor]]:
        """The coefficient m and the momentum u of each parameter, for u = m u + (1 - m) g."""

    def receive_momentum_of(self, parameters: Iterable[Tensor]) -> None:
        """Expect the mean of u in .grad of these parameters, in every step with `exchanges_momentum`."""


@runtime_checkable
class Preconditioner(MomentumOwner, Protocol):
    """An optimizer that divides by something that no longer changes once it takes momentum."""

    def preconditioner_of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The factor of each element of the parameters, the same on every rank."""


@runtime_checkable
class ExchangesMomentum(Protocol):
    """A compressor that needs a MomentumOwner."""

    def bound_to(self, owner: MomentumOwner, parameters: Mapping[str, Tensor]) -> Compressor:
        """Return the compressor that exchanges the momentum of this optimizer, before it makes any state.

        parameters: the parameters of this compressor, by name.
        """
