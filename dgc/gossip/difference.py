"""Base class of gossip with differences of models (`dgc.gossip.choco`, `dgc.gossip.powergossip`)."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from dgc.arguments import WHOLE, require
from dgc.comm.conversation import RunningConversation
from dgc.comm.requests import Conversation
from dgc.gossip.protocol import MISSING_ZERO_GRAD, Gossip
from dgc.gossip.topology import ROUNDING, Graph, Mixing, Peers, Shares, Topology, build_topology, check_mixing


class DifferenceGossip(Gossip):
    """Every `average_every` steps, a rank exchanges with its neighbours, in both directions of every edge.

    The exchange completes before the next forward pass. With more than one step between exchanges these are local
    steps (Koloskova et al.: ICML 2020, arXiv 2003.10422): what is compressed is the progress of all of them.

    If x_i moves by the sum over neighbours j of W_ij e_ij, and e_ij is -e_ji, the mean over ranks is preserved for
    any compression of e.

    Args and errors are those of `CHOCO`.
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
