"""Base class of the optimizers that wrap another one: its groups and state, and the compression state."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import sqrt
from typing import Any, NoReturn, Protocol, TypedDict, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.comm.meter import TrafficMeter
from dgc.comm.transport import Transport
from dgc.compression.protocol import SparseOrDense


class ErrorStatePart(TypedDict):
    """Which part of the error state a rank has, if the ranks of a machine divide it among them."""

    machine: int
    machines: int
    tensors: list[str]  # names of parameters


@runtime_checkable
class Method(Protocol):
    """The common interface of compressors and gossip algorithms."""

    @property
    def compress_ratio(self) -> float: ...

    def begin_epoch(self, epoch: int) -> None: ...
    def errors(self) -> Iterable[Tensor]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Wrapper(Optimizer):
    """Wraps the optimizer `inner`. Attributes that are not defined here are those of `inner`.

    It cannot be copied or pickled, because it has hooks on its parameters and a connection to the other ranks.
    Save `state_dict()` and, on each rank, `compression_state_dict()`.

    Args:
        inner: The wrapped optimizer.
        methods: Its compressors, or its gossip algorithm.
    """

    transport: Transport
    meter: TrafficMeter
    dropped_steps: int  # number of steps dropped because of NaN or inf in a gradient
    part: ErrorStatePart | None = None  # the part of a machine's error state that this rank has; None: it has all

    def __init__(self, inner: Optimizer, methods: Sequence[Method]):
        # Optimizer.__init__ is not called: it would create its own groups and hooks
        self.inner: Any = inner
        self._methods = list(methods)

    # --- the wrapped optimizer ---------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, which is the same on every rank."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError(
            "parameters cannot be added here: close() this optimizer, add the group to the wrapped one "
            "(`inner`), and wrap that in a new DistributedOptimizer"
        )

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet: an object under construction
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: save state_dict() and, on each rank, "
            "compression_state_dict(), and load them into a new one"
        )

    # --- ranks ------------------------------------------------------------------------------------

    max_step_lag: int | None = 0  # largest number of steps by which a rank may be ahead of another; None: no limit

    def more_steps(self, total: int) -> Callable[[], bool] | None:
        """Return a function that decides whether this rank takes another step, or None if ranks are synchronous.

        Without synchronization, ranks take different numbers of steps. The function returns True until the steps
        of all ranks together reach `total`.
        """
        return None

    def close(self) -> None:
        """Release the parameters and the connection to the other ranks. Collective."""

    def synchronize_messages(self) -> None:
        """Wait for all messages in flight between ranks and apply them. Collective."""

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Context in which the parameters are the model of the run, equal on all ranks. Collective."""
        yield

    def metrics(self) -> dict[str, float]:
        """Return further values of the last step, for logs."""
        shares = [m.dense_share for m in self._methods if isinstance(m, SparseOrDense)]
        return {"dense_share": max(shares)} if shares else {}

    # --- compression ------------------------------------------------------------------------------

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


def _describe(part: ErrorStatePart | None) -> str:
    if part is None:
        return "that of a rank of its own"
    return f"that of {len(part['tensors'])} tensors on machine {part['machine']} of {part['machines']}"
