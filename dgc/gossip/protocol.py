"""What `dgc.optim.GossipOptimizer` needs of an algorithm that lets ranks keep models of their own."""

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
    """In every step: `begin_step`, forward and backward by the model's parameters, `update`."""

    compress_ratio: float  # bytes of a message over those of the model in fp32

    @property
    def is_synchronous(self) -> bool:
        """Whether every rank does the same number of steps."""
        ...

    @property
    def needs_groups(self) -> bool:
        """Whether the transport must know the groups `local` and `cross`."""
        ...

    def start(self, model: FlatModel, transport: Transport, meter: Meter, name: str = "gossip") -> None:
        """Take over a model that is the same on every rank. Collective. name: what messages are called."""
        ...

    def begin_epoch(self, epoch: int) -> None:
        """Epochs count from 0. Collective where it changes something."""
        ...

    def begin_step(self) -> None:
        """Take in what has come from neighbours: the parameters are the ones to compute the gradient at."""
        ...

    def update(self, step: Callable[[], object], lr: float) -> None:
        """`step` lets the wrapped optimizer, with learning rate lr, move the parameters; or does nothing."""
        ...

    def settle(self) -> None:
        """Finish and take in what is on its way: nothing is afterwards. Collective."""
        ...

    def restart(self) -> None:
        """After `settle` all ranks' parameters have been made the same: go on from there."""
        ...

    def hold(self) -> None:
        """Finish what is on its way without taking it in, so that going on is not changed by it. Collective."""
        ...

    def numerator(self) -> Tensor:
        """[n] fp32, after `hold`: what this rank adds to the sum over ranks whose mean is the common model."""
        ...

    def gauges(self) -> dict[str, float]:
        """Of the last step, for logs: weight, staleness."""
        ...

    def errors(self) -> Iterable[Tensor]:
        """What waits to be sent."""
        ...

    def close(self) -> None:
        """Nothing is sent or received afterwards."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """After `hold`: this rank's part of all that the next step depends on, the model included."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Asynchronous(Gossip, Protocol):
    """One whose ranks train at paces of their own."""

    @property
    def progress(self) -> int:
        """Steps that all ranks together are known to have done."""
        ...

    @property
    def is_under_way(self) -> bool:
        """Whether ranks may send this one something: not when it has settled, failed or been closed."""
        ...
