"""The interface between `dgc.optim.LocalOptimizer` and gossip algorithms. Each rank has its own model."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from dgc.comm.meter import TrafficMeter
from dgc.comm.transport import Transport
from dgc.gossip.model import FlatModel

MISSING_ZERO_GRAD = (
    "messages of neighbours have not been added to the model: call the optimizer's zero_grad() before the forward "
    "pass of every step"
)


@runtime_checkable
class Gossip(Protocol):
    """A gossip algorithm. Each step calls `begin_step`, runs forward and backward with the model's parameters, and
    calls `update`.
    """

    @property
    def compress_ratio(self) -> float:
        """Bytes of a message / bytes of the model in fp32."""
        ...

    @property
    def is_synchronous(self) -> bool:
        """Whether every rank takes the same number of steps."""
        ...

    @property
    def needs_groups(self) -> bool:
        """Whether the transport must have the groups `local` and `cross`."""
        ...

    def start(self, model: FlatModel, transport: Transport, meter: TrafficMeter, name: str = "gossip") -> None:
        """Initializes gossip with a model that is equal on all ranks. Collective. name: prefix of messages."""
        ...

    def begin_epoch(self, epoch: int) -> None:
        """Called before each epoch, counted from 0. Collective if it changes anything."""
        ...

    def begin_step(self) -> None:
        """Adds received messages to the model. The gradient may be computed afterwards."""
        ...

    def update(self, step: Callable[[], object], lr: float) -> None:
        """Calls `step`, in which the wrapped optimizer updates the parameters with learning rate lr, or skips."""
        ...

    def synchronize_messages(self) -> None:
        """Completes all messages in flight and adds them to the model. Collective."""
        ...

    def restart(self) -> None:
        """Restarts from equal parameters on all ranks. Call it after `synchronize_messages`."""
        ...

    def flush(self) -> None:
        """Completes all messages in flight without adding them, so that training is not affected. Collective."""
        ...

    def biased_parameters(self) -> Tensor:
        """[n] fp32, after `flush`: x of push-sum, with all received messages. Its mean over ranks is the model.

        Without push-sum weights, these are the parameters.
        """
        ...

    def bias(self) -> float | Tensor:
        """The factor between the parameters and `biased_parameters`, after `flush`: w of push-sum, or 1.

        [n] if elements differ. Its mean over ranks is 1.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Values of the last step for logs: weight, staleness."""
        ...

    def errors(self) -> Iterable[Tensor]:
        """Tensors that are not sent yet."""
        ...

    def close(self) -> None:
        """Ends gossip. Nothing is sent or received afterwards."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """After `flush`: this rank's part of the state that determines the next step, including the model."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Asynchronous(Gossip, Protocol):
    """A gossip algorithm in which ranks take different numbers of steps."""

    @property
    def progress(self) -> int:
        """Number of steps of all ranks together, as far as this rank has been informed."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether other ranks may send messages to this one: not while it is paused, failed or closed."""
        ...


@runtime_checkable
class UsesOptimizer(Gossip, Protocol):
    """A gossip algorithm that works with the state of one kind of optimizer."""

    def use_optimizer(self, optimizer: Optimizer) -> None:
        """Called once, before `start`, with the wrapped optimizer. Raises ValueError if it is of another kind."""
        ...


@runtime_checkable
class Joinable(Gossip, Protocol):
    """A gossip algorithm in which islands may be lost and join while the others keep their states.

    An island is a rank, or the ranks of a machine that have one model together.
    """

    @property
    def island(self) -> int | None:
        """The number of this rank's island, after `start`. None: no island can join with these settings."""
        ...

    def join(self) -> None:
        """Continues from the common model and without errors, after the state of another island has been loaded.

        Called on every rank of the island, before the next `begin_step`.
        """
        ...
