"""Base class of the optimizers that wrap another one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast
from weakref import ref

from torch.optim import Optimizer

from dgc.comm.meter import TrafficMeter
from dgc.comm.transport import Transport
from dgc.engine.gathered import HasGatheredState
from dgc.engine.options import WRAPPERS, load_optimizer_state
from dgc.engine.state import BucketStates


class Wrapper(HasGatheredState, Optimizer):
    """Wraps the optimizer `inner`, with compressors or a gossip algorithm. All other attributes come from `inner`.

    It cannot be copied or pickled. Save `state_dict()` and, on each rank, `compression_state_dict()`.
    """

    transport: Transport
    meter: TrafficMeter
    inner: Any  # Optimizer.__init__ is not called: it would create groups and hooks
    _original: ref[Any]  # to this object, and in a copy of its attributes to another one

    @property
    def _known_optimizer(self) -> Optimizer | None:
        return cast(Optimizer, self.inner)

    def __init_subclass__(cls) -> None:
        if not WRAPPERS.isdisjoint(kind.__name__ for kind in cls.__mro__):
            kind = next(kind.__name__ for kind in cls.__mro__ if kind.__module__.startswith("dgc."))
            raise ValueError(
                f"Lightning makes an optimizer of its own of a {kind}, which would change copies of some of its "
                f"attributes: pass the wrapped optimizer to Lightning, and step the {kind} itself, or use "
                "dgc.ddp.compress"
            )

    def _refuse_copy(self) -> NoReturn:
        """Called where `_original` is not this object, which has copies of its attributes then."""
        raise RuntimeError(
            f"this {type(self).__name__} has the attributes of another one, which exchanges the gradients: step "
            "that one"
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, which is the same on every rank."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_optimizer_state(self.inner, state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError(
            "parameters cannot be added here: close() this optimizer, add the group to the wrapped one "
            "(`inner`), and wrap that in a new DistributedOptimizer"
        )

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet: an object under construction
            raise AttributeError(name)
        return getattr(self.inner, name)

    max_step_lag: int | None = 0  # largest number of steps by which a rank may be ahead of another; None: no limit

    def more_steps(self, total: int) -> Callable[[], bool] | None:
        """Return a function that is True until the steps of all ranks together reach `total`.

        None: ranks are synchronous, and take the same number of steps.
        """
        return None

    replica_group: int | None = None  # of this rank, see `Gossip`

    def join(self) -> None:
        """Continue as a replica group that joins or returns, from the common model and without a residual.

        A replica group is a rank, or the ranks of a machine that have one model together. Load the state of
        another group before, with allow_other_rank=True. Call `join` on every rank of the group, before the next
        zero_grad().
        """
        raise ValueError(
            f"no replica group can join in mid-run with {self!r}: use `dgc.local.OuterSteps` without a base"
        )

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
        states = [m for m in self._methods if isinstance(m, BucketStates)]
        shares = [m.dense_share for m in states if m.dense_share is not None]
        return {"dense_share": max(shares)} if shares else {}
