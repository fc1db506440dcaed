"""The interface between `dgc.optim.GossipOptimizer` and gossip algorithms. Each rank has its own model."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from dgc.comm.meter import Meter
from dgc.comm.transport import Transport
from dgc.gossip.model import FlatModel

NOT_BEGUN = (
    "the neighbours' models have not been taken in: call the optimizer's zero_grad() before the forward pass of "
    "every step"
)


@runtime_checkable
class Gossip(Protocol):
    """A gossip algorithm. Each step calls `begin_step`, runs forward and backward with the model's parameters, and
    calls `update`.
    """

    compress_ratio: float  # bytes of a message / bytes of the model in fp32

    @property
    def is_synchronous(self) -> bool:
        """Whether every rank does the same number of steps."""
        ...

    @property
    def needs_groups(self) -> bool:
        """Whether the transport must have the groups `local` and `cross`."""
        ...

    def start(self, model: FlatModel, transport: Transport, meter: Meter, name: str = "gossip") -> None:
        """Initializes gossip with a model that is equal on all ranks. Collective. name: name of the messages."""
        ...

    def begin_epoch(self, epoch: int) -> None:
        """Called before each epoch, counted from 0. Collective if it changes anything."""
        ...

    def begin_step(self) -> None:
        """Adds received messages. Afterwards the gradient may be computed at the parameters."""
        ...

    def update(self, step: Callable[[], object], lr: float) -> None:
        """Calls `step`: the wrapped optimizer moves the parameters with learning rate lr, or skips the step."""
        ...

    def settle(self) -> None:
        """Completes all messages in flight and adds them. Afterwards no message is in flight. Collective."""
        ...

    def restart(self) -> None:
        """Continues after `settle`, when the parameters of all ranks have been made equal."""
        ...

    def hold(self) -> None:
        """Completes all messages in flight without adding them, so that training is not affected. Collective."""
        ...

    def numerator(self) -> Tensor:
        """[n] fp32, after `hold`: this rank's term. The mean of the terms over all ranks is the common model."""
        ...

    def gauges(self) -> dict[str, float]:
        """Values of the last step for logs: weight, staleness."""
        ...

    def errors(self) -> Iterable[Tensor]:
        """Tensors that are not yet sent."""
        ...

    def close(self) -> None:
        """Ends gossip. Nothing is sent or received afterwards."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """After `hold`: this rank's part of the state that determines the next step, including the model."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Asynchronous(Gossip, Protocol):
    """A gossip algorithm in which each rank trains at its own pace."""

    @property
    def progress(self) -> int:
        """Number of steps of all ranks together, as far as known."""
        ...

    @property
    def is_under_way(self) -> bool:
        """Whether ranks may send messages to this one: not after it has settled, failed or been closed."""
        ...
