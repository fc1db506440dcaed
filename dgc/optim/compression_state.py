"""The compression methods of an optimizer or a wrapped model: their epochs, ratio and error state."""

from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Any, NoReturn, Protocol, TypedDict, runtime_checkable

import torch
from torch import Tensor

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


class ErrorStatePart(TypedDict):
    """Which part of the error state a rank has, if the ranks of a machine divide it among them."""

    machine: int
    machines: int
    tensors: list[str]  # names of this rank's parameters
    others: list[str]  # names of those that other ranks of the machine have


class HasCompression:
    """Base class of what exchanges gradients or models with compression methods.

    Args:
        methods: The compressors, or the gossip algorithm.
    """

    part: ErrorStatePart | None = None  # None: the error state of this rank is its own

    def __init__(self, methods: Sequence[Method]):
        self._methods = list(methods)

    def begin_epoch(self, epoch: int) -> float:
        """Set the epoch, counted from 0, for the warm-up of the compressors. Returns the new compress_ratio."""
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
        states: dict[str, Any] = {f"{type(m).__name__}.{i}": m.state_dict() for i, m in enumerate(self._methods)}
        return states if self.part is None else {**states, "part": self.part}

    def load_compression_state_dict(self, state: dict[str, Any]) -> None:
        saved, state = state.get("part"), {name: value for name, value in state.items() if name != "part"}
        if saved != self.part:
            raise ValueError(
                f"this error state is {_describe(saved)}, and this rank needs {_describe(self.part)}: load it "
                "with the same `hierarchical`, machines, ranks and bucket_mb, or redistribute it with "
                "dgc_training.checkpoint.reshard (docs/checkpoints.md)"
            )
        methods = {f"{type(m).__name__}.{i}": m for i, m in enumerate(self._methods)}
        if methods.keys() != state.keys():
            raise ValueError(f"state of other compressors: it has {sorted(state)}, not {sorted(methods)}")
        for name, method in methods.items():
            method.load_state_dict(state[name])

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: save state_dict() and, on each rank, "
            "compression_state_dict(), and load them into a new one"
        )


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

    def compression_state_dict(self) -> dict[str, Any]:
        return {**super().compression_state_dict(), **self._epochs.state_dict()}

    def load_compression_state_dict(self, state: dict[str, Any]) -> None:
        epochs = state.get("epochs")
        self._epochs.check(epochs)
        super().load_compression_state_dict({name: part for name, part in state.items() if name != "epochs"})
        self._epochs.load(epochs)
