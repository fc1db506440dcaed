"""Base class of gossip with differences (`choco`, `powergossip`).

Every step ends with an exchange with the neighbours, in both directions of every edge. It completes before the
next forward pass.

Weights W are symmetric, and rows sum to one. If x_i moves by the sum over neighbours j of W_ij e_ij, and e_ij is
-e_ji, the mean over ranks is preserved for any compression of e.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dgc.comm.conversation import RunningConversation
from dgc.comm.meter import Meter
from dgc.comm.requests import Conversation
from dgc.comm.transport import Transport
from dgc.gossip.model import FlatModel
from dgc.gossip.protocol import NOT_BEGUN
from dgc.gossip.topology.mixing import ROUNDING, Mixing, Shares, check_mixing
from dgc.gossip.topology.sgp_graphs import ring
from dgc.gossip.topology.topology import Graph, Peers, Topology, made
from dgc.memory.state import check_tensor


def two_way_ring(size: int) -> Topology:
    """Both neighbours on a ring; with two ranks, the other one.

    Args:
        size (int): number of ranks, at least 2.

    Raises:
        TopologyError: if size is less than 2.
    """
    return ring(size, min(2, size - 1))


class Neighbours(ABC):
    """Base class of gossip with differences.

    Args:
        graph (callable): makes the topology for a number of ranks.
        mixing (Mixing): weights W.
    """

    needs_groups = False
    is_synchronous = True
    static = False  # whether neighbours must be the same in all rounds

    def __init__(self, graph: Graph, mixing: Mixing):
        self.graph, self.mixing = graph, mixing
        self.compress_ratio = 1.0
        self.round = 0
        self._running: RunningConversation[None] | None = None

    def start(self, model: FlatModel, transport: Transport, meter: Meter, name: str = "gossip") -> None:
        self.name, self.model, self.z = name, model, model.z
        self.rank, self.size = transport.rank, transport.size
        self._transport, self._meter = transport, meter
        self.topology = None if self.size == 1 else made(self.graph, self.size)
        if self.topology is not None:
            self._check(self.topology)
        self._prepare()
        self.compress_ratio = min(1.0, self._nbytes() / (4 * self.z.numel()))

    def _check(self, topology: Topology) -> None:
        who = f"{type(self).__name__} needs"
        cure = "use ring with peers=2, grid, star or full"
        if self.static and topology.period != 1:
            raise topology.error(f"{who} the same neighbours in every round, and here they change: {cure}")
        if not topology.is_symmetric:
            cure += "" if self.static else ", or a graph of pairs"
            raise topology.error(f"{who} edges that go both ways, and here some do not: {cure}")
        check_mixing(topology, self.mixing, doubly=True)
        for t in range(topology.period):
            shares = [self.mixing(topology, rank, t) for rank in range(self.size)]
            if any(abs(shares[j][i] - w) > ROUNDING for i, own in enumerate(shares) for j, w in own.items()):
                raise topology.error(f"{who} one weight for both ends of an edge: use the mixing metropolis")

    def neighbours(self, round: int) -> tuple[Peers, Shares]:
        """This rank's neighbours, ascending, and its weights."""
        assert self.topology is not None
        return self.topology.in_peers(self.rank, round), self.mixing(self.topology, self.rank, round)

    @abstractmethod
    def _prepare(self) -> None:
        """Allocates state when the model is known."""

    @abstractmethod
    def _nbytes(self) -> float:
        """Bytes sent to a neighbour in a step."""

    @abstractmethod
    def _average(self) -> Conversation[None]:
        """Exchanges with the neighbours in one step and moves z."""

    # --- one step ---------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        return None

    def begin_step(self) -> None:
        self.settle()

    def update(self, step: Callable[[], object], lr: float) -> None:
        if self._running is not None:
            raise RuntimeError(NOT_BEGUN)
        step()
        self.model.gather()
        if self.size > 1:
            self._running = RunningConversation(self.name, self._average(), self._transport, self._meter)

    def settle(self) -> None:
        if self._running is not None:
            self._running.finish()
            self._running = None
            self.model.scatter()

    def hold(self) -> None:
        """Same as `settle`: no step lies between the end of a step and the effect of its messages."""
        self.settle()

    def restart(self) -> None:
        assert self._running is None, "settle() comes first"

    # --- state ------------------------------------------------------------------------------------

    def numerator(self) -> Tensor:
        assert self._running is None, "hold() comes first"
        return self.z.clone()

    def gauges(self) -> dict[str, float]:
        return {"weight": 1.0, "staleness": 0.0}

    def errors(self) -> Iterable[Tensor]:
        return ()

    def close(self) -> None:
        self.settle()

    def state_dict(self) -> dict[str, Any]:
        assert self._running is None, "hold() comes first"
        return {"z": self.z.clone(), "round": self.round, "size": self.size, **self._state()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != {"z", "round", "size", *self._state()}:
            raise ValueError(f"state of another algorithm: {sorted(state)}")
        check_tensor("z", state["z"], self.z.shape)
        if state["size"] == self.size:
            self._load(state)
        else:
            self._meet()
        self.z.copy_(state["z"])
        self.model.scatter()
        self.round, self._running = state["round"], None

    @abstractmethod
    def _state(self) -> dict[str, Any]: ...

    @abstractmethod
    def _meet(self) -> None:
        """Resets the state of the neighbours, after a state of another number of ranks was loaded."""

    @abstractmethod
    def _load(self, state: dict[str, Any]) -> None:
        """Loads the state. Raises ValueError, before any change, if it is of another model or graph."""
