"""The saved state of the compression methods of an optimizer or a wrapped model: whose it is, of which step and
epoch, and its checks.

Error state differs between ranks, but that of another rank has the same names and shapes. Loaded here, it would
replace what this rank has not sent, which is then lost, by what the other rank sends as well. States carry their
identity under the key `identity`: rank, step, and the settings that their meaning depends on. Every loader
verifies it.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, sqrt
from typing import Any, NoReturn, Protocol, TypedDict, runtime_checkable

import torch
from torch import Tensor

from dgc.arguments import FLAG, NUMBER, WHOLE, checked, require
from dgc.comm.collectives import all_gather_object, all_reduce
from dgc.comm.transport import Transport


def check_steps_per_epoch(steps: Any) -> None:
    """Raise ValueError for what is neither None nor a positive int."""
    if steps is not None:
        whole = isinstance(steps, int) and not isinstance(steps, bool)
        if not whole or steps < 1:
            raise ValueError(f"steps_per_epoch must be None or a positive int, not {steps!r}")


class EpochCount:
    """Calls `begin_epoch` before the first step of each epoch.

    The position is saved in epochs, so it stays valid if the number of steps per epoch changes on resume.

    Args:
        steps_per_epoch: Steps in an epoch. None: epochs are not counted.
        begin_epoch: Called with the epoch, counted from 0.

    Raises:
        ValueError: `steps_per_epoch` is neither None nor a positive int.
    """

    def __init__(self, steps_per_epoch: int | None, begin_epoch: Callable[[int], Any]):
        check_steps_per_epoch(steps_per_epoch)
        self.steps_per_epoch, self._begin_epoch = steps_per_epoch, begin_epoch
        self._steps, self._epoch = 0, -1

    def begin(self) -> None:
        """Begin the epoch of the next step, unless it has begun already."""
        if self.steps_per_epoch is not None and (epoch := self._steps // self.steps_per_epoch) != self._epoch:
            self._epoch = epoch
            self._begin_epoch(epoch)

    def begin_step(self) -> None:
        """Count a step. Call it once per step, before the step sends anything."""
        self.begin()
        self._steps += 1

    def state_dict(self) -> dict[str, float]:
        return {} if self.steps_per_epoch is None else {"epochs": self._steps / self.steps_per_epoch}

    def check(self, epochs: Any) -> None:
        """Raise ValueError if a saved position is needed and `epochs` is None, or if it is no position."""
        if epochs is not None:
            require("a number of 0 or more", NUMBER, least=0, **{"epochs of the state": epochs})
            if epochs == inf:
                raise ValueError("epochs of the state must be finite")
        if self.steps_per_epoch is not None and epochs is None:
            raise ValueError(
                "this state was saved without steps_per_epoch, so it has no epoch: build the optimizer without "
                "steps_per_epoch and call begin_epoch(epoch) before each epoch"
            )

    def load(self, epochs: float | None) -> None:
        """Continue from a saved position, in epochs. It is ignored if epochs are not counted."""
        if self.steps_per_epoch is not None and epochs is not None:
            self._steps, self._epoch = round(epochs * self.steps_per_epoch), -1
            self.begin()


KEY = "identity"


class ErrorStatePart(TypedDict):
    """Which part of the error state a rank has, if the ranks of a machine divide it among them."""

    machine: int
    machines: int
    tensors: list[str]  # names of this rank's parameters
    others: list[str]  # names of those that other ranks of the machine have


@checked
@dataclass(frozen=True)
class Identity:
    """Whose state it is. All values are plain, so that `torch.load(weights_only=True)` reads them.

    Attributes:
        rank, size: The rank and the number of ranks. Of a model that FSDP2 shards inside machines, the machine and
            the number of machines.
        step: Number of steps so far, dropped ones included. None: ranks take different numbers of steps.
        shard, shards: Which shard of a machine's model it is of, and the number of shards.
        settings: Those that the meaning of the state depends on, by name.
    """

    rank: int
    size: int
    step: int | None
    shard: int = 0
    shards: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.shards == 1:
            return f"rank {self.rank} of {self.size}"
        return f"shard {self.shard} of {self.shards} on machine {self.rank} of {self.size}"


def identified(state: Mapping[str, Any], identity: Identity) -> dict[str, Any]:
    """Return the state with its identity."""
    return {**state, KEY: asdict(identity)}


def check_is_state(state: Any) -> None:
    """Raise ValueError for what is no state at all."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state must be what compression_state_dict() returned, not {state!r}")


def identity_of(state: Mapping[str, Any]) -> Identity | None:
    """Return the identity of a state. None: it was saved without one.

    Raises:
        ValueError: It is damaged.
    """
    check_is_state(state)
    saved = state.get(KEY)
    if saved is None:
        return None
    try:
        identity = Identity(**saved)
        if any(isinstance(value, Tensor) for value in identity.settings.values()):
            raise ValueError("a setting is a tensor")
        if identity.step is None or 0 <= identity.step < 2**63:
            return identity
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{KEY} of the state is damaged: {saved!r}")


def verified(
    state: Mapping[str, Any], own: Identity, allow_other_rank: bool = False
) -> tuple[dict[str, Any], int | None]:
    """Check that a state belongs to this rank and fits its settings. Warns if it has no identity.

    Args:
        state: The saved state.
        own: The identity of this rank.
        allow_other_rank: Accept the state of another rank, or of another number of ranks. Never of another shard.

    Returns:
        The state without its identity, and its step, None if that is not known.

    Raises:
        ValueError: The state belongs elsewhere. The message names whose it is, and the cures.
    """
    check_is_state(state)
    identity = identity_of(state)
    content = {name: value for name, value in state.items() if name != KEY}
    if identity is None:
        if not allow_other_rank:
            warnings.warn(
                "this state does not say whose it is, because an earlier version saved it: make sure that it is "
                f"that of {own}",
                stacklevel=4,
            )
        return content, None
    if (identity.shard, identity.shards) != (own.shard, own.shards):
        raise ValueError(
            f"this state is that of {identity}, and {own} loads it: shards are different parts of the model. Load "
            "the state that this rank has saved, with the same number of ranks on each machine"
        )
    if (identity.rank, identity.size) != (own.rank, own.size) and not allow_other_rank:
        raise ValueError(
            f"this state is that of {identity}, and {own} loads it. What is not sent yet differs between ranks: "
            "that of this rank would be lost, and that of the other one sent twice. Save the state on every rank, "
            "into a file of its own, and load this rank's file. For another number of ranks, use "
            "dgc.optim.redistribute on the states of all ranks. allow_other_rank=True loads it nevertheless "
            "(docs/checkpoints.md)"
        )
    for name in sorted({*identity.settings, *own.settings}):
        saved, here = identity.settings.get(name), own.settings.get(name)
        if saved != here:
            raise ValueError(
                f"this state was saved with {name}={saved}, and here it is {here}: the state has another meaning "
                f"then. Use {saved}, or begin from the model alone, saved inside consensus()"
            )
    return content, identity.step


def compare_steps(transport: Transport, step: int) -> None:
    """Check that the states of all ranks are of one step. Collective.

    A rank that has loaded nothing is at step 0.

    Raises:
        ValueError: They are not. Raised on every rank, with the steps of all ranks.
    """
    name = "load_compression_state_dict_on_every_rank"  # shown where a rank waits for others
    both = torch.tensor([step, -step], dtype=torch.int64)
    if all_reduce(transport, both, "max", name).tolist() == [step, -step]:
        return
    ranks: dict[int, list[str]] = {}
    for rank, other in enumerate(all_gather_object(transport, step, f"{name}.steps")):
        ranks.setdefault(other, []).append(str(rank))
    found = "; ".join(
        f"{'ranks' if len(its) > 1 else 'rank'} {', '.join(its)}: step {other}" for other, its in ranks.items()
    )
    raise ValueError(
        f"the ranks have error states of different steps ({found}): load the states of one checkpoint on every "
        "rank. A rank that has loaded none is at step 0"
    )


@runtime_checkable
class Method(Protocol):
    """The common interface of compressors and gossip algorithms."""

    @property
    def compress_ratio(self) -> float: ...

    def begin_epoch(self, epoch: int) -> None: ...
    def errors(self) -> Iterable[Tensor]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class HasFixedSettings(Protocol):
    """A method whose state has another meaning with other settings."""

    @property
    def fixed_settings(self) -> dict[str, Any]:
        """These settings, as plain values by name."""
        ...


class HasCompression:
    """Base class of what exchanges gradients or models with compression methods.

    Args:
        methods: The compressors, or the gossip algorithm.
        transport: Connects all ranks.
    """

    part: ErrorStatePart | None = None  # None: the error state of this rank is its own
    _is_sharded = False  # whether the ranks of a machine have shards of one model
    _takes_common_steps = True  # whether all ranks take the same number of steps

    def __init__(self, methods: Sequence[Method], transport: Transport):
        self._methods, self._ranks = list(methods), transport
        self._steps, self._compares_steps = 0, True

    def _begin_step(self) -> None:
        """Count a step. Call it before the step sends anything. Collective in the first step and after a load."""
        if self._compares_steps and self._takes_common_steps:
            compare_steps(self._ranks, self._steps)
        self._compares_steps = False
        self._steps += 1

    def _identity(self) -> Identity:
        ranks, named = self._ranks, self._named_methods()
        step = self._steps if self._takes_common_steps else None
        settings = {
            f"{name}.{key}": value
            for name, method in named.items()
            if isinstance(method, HasFixedSettings)
            for key, value in method.fixed_settings.items()
        }
        if not self._is_sharded:
            return Identity(ranks.rank, ranks.size, step, settings=settings)
        (machine, shard), (machines, shards) = (
            (of("cross"), of("local")) for of in (ranks.group_rank, ranks.group_size)
        )
        return Identity(machine, machines, step, shard, shards, settings)

    def _named_methods(self) -> dict[str, Method]:
        return {f"{type(m).__name__}.{i}": m for i, m in enumerate(self._methods)}

    def begin_epoch(self, epoch: int) -> float:
        """Set the epoch, counted from 0, for the warm-up of the compressors. Returns the new compress_ratio."""
        require("a whole number of at least 0", WHOLE, least=0, epoch=epoch)
        for method in self._methods:
            method.begin_epoch(epoch)
        return self.compress_ratio

    @property
    def compress_ratio(self) -> float:
        """The smallest nominal fraction of elements that a compressor currently sends. 1.0 is dense."""
        return min((m.compress_ratio for m in self._methods), default=1.0)

    def error_norm(self) -> float:
        """Return the L2 norm of this rank's error state, the unsent part of its gradients."""
        squares = [float(e.norm(dtype=torch.float64)) ** 2 for m in self._methods for e in m.errors()]
        return sqrt(sum(squares))

    def compression_state_dict(self) -> dict[str, Any]:
        """Return this rank's error state. Unlike `state_dict()` it differs between ranks: save it on each."""
        states: dict[str, Any] = {name: method.state_dict() for name, method in self._named_methods().items()}
        return identified(states if self.part is None else {**states, "part": self.part}, self._identity())

    def load_compression_state_dict(self, state: dict[str, Any], *, allow_other_rank: bool = False) -> None:
        """Load this rank's error state. Call it on every rank: the next step compares the steps of all states.

        Args:
            state: What `compression_state_dict()` returned on this rank, or this rank's element of what
                `redistribute` returns.
            allow_other_rank: Load the state of another rank, or of another number of ranks. What this rank had not
                sent is lost. If all ranks load the state of one, the mean of the unsent gradients becomes that of
                this one.

        Raises:
            ValueError: The state is that of another rank, of another method or model, or of other settings.
        """
        require("True or False", FLAG, allow_other_rank=allow_other_rank)
        state, step = verified(state, self._identity(), allow_other_rank)
        saved = state.pop("part", None)
        if _division(saved, allow_other_rank) != _division(self.part, allow_other_rank):
            raise ValueError(
                f"this error state is {_describe(saved)}, and this rank needs {_describe(self.part)}: load it "
                "with the same `hierarchical`, machines, ranks and bucket_mb, or redistribute it with "
                "dgc.optim.redistribute (docs/checkpoints.md)"
            )
        methods = self._named_methods()
        # what keeps no state may be of another class: dense tensors in fp16 in place of fp32
        lacks_state = any(methods[name].state_dict() for name in methods.keys() - state.keys())
        unknown = [state[name] for name in state.keys() - methods.keys()]
        if lacks_state or any(not isinstance(part, Mapping) or part for part in unknown):
            raise ValueError(f"state of other compressors: it has {sorted(state)}, not {sorted(methods)}")
        for name, part in state.items():
            require("a mapping", (Mapping,), **{str(name): part})
        for name in (name for name in methods if name in state):
            methods[name].load_state_dict(state[name])
        self._steps, self._compares_steps = self._steps if step is None else step, True

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: save state_dict() and, on each rank, "
            "compression_state_dict(), and load them into a new one"
        )


def _division(part: ErrorStatePart | None, allow_other_rank: bool) -> Any:
    """What a state must have in common with the rank that loads it, of the division of a machine's error state."""
    return part["tensors"] if part is not None and allow_other_rank else part


def _describe(part: ErrorStatePart | None) -> str:
    if part is None:
        return "that of a rank of its own"
    return f"that of {len(part['tensors'])} tensors on machine {part['machine']} of {part['machines']}"


class CountsEpochs(HasCompression):
    """A HasCompression that can count epochs by steps. A subclass must call `_count_epochs` first."""

    def _count_epochs(self, steps_per_epoch: int | None) -> None:
        self._epochs = EpochCount(steps_per_epoch, super().begin_epoch)

    def begin_epoch(self, epoch: int) -> float:
        if self._epochs.steps_per_epoch is not None:
            raise ValueError(
                f"begin_epoch() was called, but steps_per_epoch={self._epochs.steps_per_epoch} counts the epochs: "
                "keep one of the two"
            )
        return super().begin_epoch(epoch)

    def _begin_step(self) -> None:
        super()._begin_step()
        if self._epochs.steps_per_epoch is not None:
            self._epochs.begin_step()

    def compression_state_dict(self) -> dict[str, Any]:
        return {**super().compression_state_dict(), **self._epochs.state_dict()}

    def load_compression_state_dict(self, state: dict[str, Any], *, allow_other_rank: bool = False) -> None:
        check_is_state(state)
        epochs = state.get("epochs")
        self._epochs.check(epochs)
        rest = {name: part for name, part in state.items() if name != "epochs"}
        super().load_compression_state_dict(rest, allow_other_rank=allow_other_rank)
        self._epochs.load(epochs)
