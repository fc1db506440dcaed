"""What a wrapped optimizer still is: its groups and state; and the compression state beside them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import sqrt
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.comm.meter import Meter
from dgc.comm.transport import Transport
from dgc.compression.protocol import SparseOrDense


@runtime_checkable
class Method(Protocol):
    """The parts of a compressor or a gossip algorithm that a trainer sees."""

    @property
    def compress_ratio(self) -> float: ...

    def begin_epoch(self, epoch: int) -> None: ...
    def errors(self) -> Iterable[Tensor]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Wrapper(Optimizer):
    """Parameter groups, state, defaults and all else unknown here are the wrapped optimizer's, `inner`.

    It cannot be copied or pickled: it holds hooks on its parameters and a connection to the other ranks. What
    there is to save are `state_dict()` and, on each rank, `compression_state_dict()`.
    """

    transport: Transport
    meter: Meter
    dropped_steps: int  # those that NaN or inf in a gradient undid

    def __init__(self, inner: Optimizer, methods: Sequence[Method]):
        # Optimizer's own __init__ would make groups and hooks of its own
        self.inner: Any = inner
        self._methods = list(methods)

    # --- the wrapped optimizer's ------------------------------------------------------------------

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
        """The wrapped optimizer's state, the same on every rank."""
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

    steps_apart: int | None = 0  # how far one rank may be ahead of another; None: any number of steps

    def pace(self, steps: int) -> Callable[[], bool] | None:
        """Where ranks train at paces of their own: whether all together have yet to reach `steps` steps."""
        return None

    def close(self) -> None:
        """Let go of the parameters and of the other ranks. Collective."""

    def settle(self) -> None:
        """Finish what is on its way between ranks. Collective."""

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, every rank's parameters are the run's model, the same on all ranks. Collective."""
        yield

    def gauges(self) -> dict[str, float]:
        """Further numbers of the last step, for logs."""
        shares = [m.dense_share for m in self._methods if isinstance(m, SparseOrDense)]
        return {"dense_share": max(shares)} if shares else {}

    # --- compression ------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> float:
        """Tell the compressors the epoch, counted from 0, for their warm-up; the compress_ratio now."""
        for method in self._methods:
            method.begin_epoch(epoch)
        return self.compress_ratio

    @property
    def compress_ratio(self) -> float:
        """The smallest nominal fraction of elements that a compressor sends now; 1.0 is dense."""
        return min((m.compress_ratio for m in self._methods), default=1.0)

    def error_norm(self) -> float:
        """L2 norm of this rank's error state: what waits to be sent."""
        squares = [float(e.norm(dtype=torch.float64)) ** 2 for m in self._methods for e in m.errors()]
        return sqrt(sum(squares))

    def compression_state_dict(self) -> dict[str, Any]:
        """This rank's error state. Unlike `state_dict()` it differs between ranks: save it on each of them."""
        return {f"{type(m).__name__}.{i}": m.state_dict() for i, m in enumerate(self._methods)}

    def load_compression_state_dict(self, state: dict[str, Any]) -> None:
        own = {f"{type(m).__name__}.{i}": m for i, m in enumerate(self._methods)}
        if own.keys() != state.keys():
            raise ValueError(f"the state is of other compressors: {sorted(state)}, here are {sorted(own)}")
        for name, method in own.items():
            method.load_state_dict(state[name])
