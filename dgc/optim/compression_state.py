"""The compression methods of an optimizer or a wrapped model: their epochs, ratio and error state."""

from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from dgc.arguments import WHOLE, require
from dgc.comm.transport import Transport
from dgc.identity import ErrorStatePart as ErrorStatePart
from dgc.identity import Identity, check_is_state, compare_steps, identified, verified
from dgc.optim.epochs import EpochCount


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
        if lacks_state or any(state[name] for name in state.keys() - methods.keys()):
            raise ValueError(f"state of other compressors: it has {sorted(state)}, not {sorted(methods)}")
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
