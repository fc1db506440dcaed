"""The base classes of algorithms that exchange models, for `dgc.optim.LocalOptimizer`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.comm.conversation import RunningConversation
from dgc.comm.meter import TrafficMeter
from dgc.comm.requests import Conversation
from dgc.comm.transport import Transport
from dgc.core.arguments import FLAG, WHOLE, require
from dgc.core.state import check_count, check_mapping, check_tensor
from dgc.gossip.model import FlatModel
from dgc.gossip.topology import ROUNDING, Graph, Mixing, Peers, Shares, Topology, build_topology, check_mixing

MISSING_ZERO_GRAD = (
    "messages of neighbours have not been added to the model: call the optimizer's zero_grad() before the forward "
    "pass of every step"
)


class Gossip(ABC):
    """A gossip algorithm. Each step calls `begin_step`, runs forward and backward with the model's parameters, and
    calls `update`.

    The defaults suit a synchronous algorithm without push-sum weights, which receives all messages of a
    step before the next one.

    Attributes:
        compress_ratio: Bytes of a message / bytes of the model in fp32.
        is_synchronous: Whether every rank takes the same number of steps.
        needs_groups: Whether the transport must have the groups `local` and `cross`.
        averages_momentum: Whether the momenta of the optimizer are exchanged with the parameters.
        keeps_start: Whether it keeps a copy of the model that the ranks begin with: see `begin_from`.
        needs_common_start: Whether the ranks must begin with equal models.
        has_skipped: Whether the last step was left out because of a gradient of another rank.
        progress: Steps of all ranks together, as far as this rank has been informed. Only if asynchronous.
        replica_group: After `start`, the number of this rank's replica group: a rank, or the ranks of a machine
            that have one model together. Replica groups may be lost and join while the others keep their states.
            None: no replica group can join with these settings.
        compression: A Route, of pseudo-gradients, if it exchanges any.
    """

    compress_ratio: float
    compression: Any = None
    is_synchronous: bool = True
    needs_groups: bool = False
    averages_momentum: bool = False
    keeps_start: bool = False
    needs_common_start: bool = False
    has_skipped: bool = False
    progress: int
    replica_group: int | None = None
    _conversation: RunningConversation[Any] | None = None  # in flight
    _resizable: tuple[str, ...] = ()  # tensors of the state whose shape `_load` checks

    def start(self, model: FlatModel, transport: Transport, meter: TrafficMeter, name: str = "gossip") -> None:
        """Initializes gossip with a model that is equal on all ranks. Collective. name: prefix of messages."""
        self.name, self.model, self.z = name, model, model.z
        self.rank, self.size = transport.rank, transport.size
        self._transport, self._meter = transport, meter
        self._prepare()

    def _prepare(self) -> None:
        """Called by `start`, when the model and the number of ranks are known."""
        return None

    def begin_from(self, z: Tensor) -> None:
        """Takes z [n], with which all ranks begin the first step, in place of the model of `start`."""
        return None

    @property
    def is_running(self) -> bool:
        """Whether other ranks may send messages at any time: not if gossip is paused, failed or closed."""
        return False

    def begin_epoch(self, epoch: int) -> None:
        """Called before each epoch, counted from 0. Collective if it changes anything."""
        return None

    @abstractmethod
    def begin_step(self) -> None:
        """Adds received messages to the model. The gradient may be computed afterwards."""

    @abstractmethod
    def update(self, step: Callable[[], object], lr: float) -> None:
        """Calls `step`, in which the wrapped optimizer updates the parameters with learning rate lr, or skips."""

    @abstractmethod
    def synchronize_messages(self) -> None:
        """Completes all messages in flight and adds them to the model. Collective."""

    def restart(self) -> None:
        """Restarts from equal parameters on all ranks. Call it after `synchronize_messages`."""
        assert self._conversation is None, "synchronize_messages() must be called first"

    def join(self) -> None:
        """Continue from the common model, on every rank of a group that has loaded the state of another group."""
        raise ValueError(f"no machine can join in mid-run with {type(self).__name__}")

    def flush(self) -> None:
        """Completes all messages in flight without adding them, so that training is not affected. Collective."""
        self.synchronize_messages()

    def _check_flushed(self) -> None:
        assert self._conversation is None, "flush() must be called first"

    def biased_parameters(self) -> Tensor:
        """[n] fp32, after `flush`: x of push-sum, or the parameters. Its mean over ranks is the model."""
        self._check_flushed()
        return self.z.clone()

    def bias(self) -> float | Tensor:
        """After `flush`: w of push-sum, or 1. [n] if elements differ. Its mean over ranks is 1."""
        return 1.0

    def metrics(self) -> dict[str, float]:
        """Values of the last step for logs: weight, staleness."""
        return {"weight": 1.0, "staleness": 0.0}

    def errors(self) -> Iterable[Tensor]:
        """Tensors that are not sent yet."""
        return ()

    def close(self) -> None:
        """Ends gossip. Nothing is sent or received afterwards."""
        self.synchronize_messages()

    def _state(self) -> dict[str, Any]:
        """Tensors, numbers, flags and mappings that `state_dict` copies, unless the algorithm replaces it."""
        return {}

    def _check_content(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state with the names, shapes and types of `_state` that cannot be loaded."""
        return None

    def _load(self, state: Mapping[str, Any]) -> None:
        """Takes over a state that has been checked."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """After `flush`: this rank's part of the state that determines the next step, including the model."""
        self._check_flushed()
        return {name: v.clone() if isinstance(v, Tensor) else v for name, v in self._state().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the state. Raises ValueError, before any change, if it is not finite or of another model."""
        self.loader(state)()

    def loader(self, state: dict[str, Any]) -> Callable[[], None]:
        """Checks the state as `load_state_dict`. Returns the function that takes it over."""
        check_mapping("state of an algorithm", state)
        check_state(state, self._state(), self._resizable)
        self._check_content(state)
        return partial(torch.no_grad()(self._load), state)


class DifferenceGossip(Gossip):
    """Every `average_every` steps, a rank exchanges with its neighbours, in both directions of every edge.

    The exchange completes before the next forward pass. With more than one step between exchanges these are local
    steps (Koloskova et al.: ICML 2020, arXiv 2003.10422): what is compressed is the progress of all of them.

    If x_i moves by the sum over neighbours j of W_ij e_ij, and e_ij is -e_ji, the mean over ranks is preserved for
    any compression of e.

    A subclass says what is exchanged: `_allocate` and `_average`.

    Args:
        graph (callable): returns the topology for a number of ranks. Symmetric.
        mixing (Mixing): weights W, symmetric with rows that sum to one.
        average_every (int): steps between two exchanges. Above 1, ranks train alone in between.

    Raises:
        ValueError: if average_every is less than 1.
        TopologyError: by `start`, if the graph or the weights are not valid.
    """

    static = False  # whether neighbours must be the same in all rounds

    def __init__(self, graph: Graph, mixing: Mixing, average_every: int):
        require("at least 1 step", WHOLE, least=1, average_every=average_every)
        self.graph, self.mixing, self.average_every = graph, mixing, average_every
        self.compress_ratio = 1.0
        self.steps = self.round = 0

    def _prepare(self) -> None:
        self.topology = None if self.size == 1 else build_topology(self.graph, self.size)
        if self.topology is not None:
            self._check(self.topology)
        self.compress_ratio = min(1.0, self._allocate() / (4 * self.z.numel())) / self.average_every

    def _check(self, topology: Topology) -> None:
        needs = f"{type(self).__name__} needs"
        cure = "use ring with peers=2, grid, star or full"
        if self.static and topology.period != 1:
            raise topology.error(f"{needs} the same neighbours in every round, but they change: {cure}")
        if not topology.is_symmetric:
            cure += "" if self.static else ", or a graph of pairs"
            raise topology.error(f"{needs} edges in both directions, but some have only one: {cure}")
        check_mixing(topology, self.mixing, doubly_stochastic=True)
        for t in range(topology.period):
            shares = [self.mixing(topology, rank, t) for rank in range(self.size)]
            if any(abs(shares[j][i] - w) > ROUNDING for i, row in enumerate(shares) for j, w in row.items()):
                raise topology.error(f"{needs} the same weight at both ends of an edge: use the mixing metropolis")

    def neighbours(self, round: int) -> tuple[Peers, Shares]:
        assert self.topology is not None
        return self.topology.in_peers(self.rank, round), self.mixing(self.topology, self.rank, round)

    @abstractmethod
    def _allocate(self) -> float:
        """Allocates state when the model is known. Returns the bytes sent to a neighbour in a step."""

    @abstractmethod
    def _average(self) -> Conversation[None]:
        """Exchanges with the neighbours in one step and moves z."""

    def begin_step(self) -> None:
        self.synchronize_messages()

    def update(self, step: Callable[[], object], lr: float) -> None:
        if self._conversation is not None:
            raise RuntimeError(MISSING_ZERO_GRAD)
        step()
        self.model.gather()
        self.steps += 1
        if self.size > 1 and self.steps % self.average_every == 0:
            self._conversation = RunningConversation(self.name, self._average(), self._transport, self._meter)

    def synchronize_messages(self) -> None:
        if self._conversation is not None:
            self._conversation.finish()
            self._conversation = None
            self.model.scatter()

    def _state(self) -> dict[str, Any]:
        return {"z": self.z, "steps": self.steps, "round": self.round, "size": self.size}

    def _load(self, state: Mapping[str, Any]) -> None:
        self.z.copy_(state["z"])
        self.model.scatter()
        self.steps, self.round, self._conversation = state["steps"], state["round"], None


def check_state(
    saved: Mapping[str, Any], own: Mapping[str, Any], resizable: Container[str] = (), prefix: str = ""
) -> None:
    """Raises ValueError unless `saved` has the names, shapes and types of `own`, and finite numbers.

    The content of mappings is not checked. resizable: tensors of any shape. prefix: of the names in errors.
    """
    if saved.keys() != own.keys():
        raise ValueError(f"state of another algorithm: it has {sorted(map(str, saved))}, not {sorted(own)}")
    for name, value in own.items():
        what, found = f"{prefix}{name}", saved[name]
        if isinstance(value, Tensor):
            check_tensor(what, found, None if name in resizable else value.shape, value.dtype)
        elif isinstance(value, bool):
            require("True or False", FLAG, **{what: found})
        elif isinstance(value, int):
            check_count(what, found)
        elif isinstance(value, dict):
            check_mapping(what, found)
        elif type(found) is not type(value):
            raise ValueError(f"{what} must be of type {type(value).__name__}, not {found!r}")


class JoinsGroups(Protocol):
    """Connects a group of ranks with other groups that come and go: `dgc.groups.connect` returns it.

    Attributes:
        size: Number of groups in the last round, 1 before the first one.
    """

    @property
    def size(self) -> int: ...

    def method(self, method: Gossip) -> Gossip:
        """Returns the method with the group as its worker. Raises ValueError if it is of another kind."""
        ...

    def count(self, items: int) -> None:
        """Count the samples or tokens of a step of this rank, before it."""
        ...


@runtime_checkable
class UsesOptimizer(Protocol):
    """A gossip algorithm that works with the state of one kind of optimizer."""

    def use_optimizer(self, optimizer: Optimizer) -> None:
        """Called once, before `start`, with the wrapped optimizer. Raises ValueError if it is of another kind."""
        ...
