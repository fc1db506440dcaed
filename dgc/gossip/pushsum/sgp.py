"""Stochastic Gradient Push (Assran, Loizou, Ballas, Rabbat: ICML 2019, arXiv 1811.10792, Algorithm 1).

Rank i has a numerator x and a push-sum weight w, initially 1. The model is z = x / w. With P of round k (columns
sum to one), gradients g at z and the direction O of any optimizer:

    x_i = x_i - lr O(g(z_i));      x_i = sum over j of P_ij x_j,  w_i likewise,  z_i = x_i / w_i

The parameters hold z. The optimizer steps on z (weight decay therefore decays z), and x moves by the same
difference. A rank keeps x minus the decoded values of its messages, so rounding in a message loses nothing.

Differences from the paper: Messages may be rounded. In epochs with the graph None, all ranks average x and w with
one all-reduce; for SGD with momentum this is all-reduce SGD.

Payload per step and rank in bytes: peers * (message.nbytes(n) + 8).
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dgc.comm.collectives import all_reduce
from dgc.comm.conversation import RunningConversation
from dgc.comm.meter import Meter
from dgc.comm.requests import AllReduce, Conversation, Exchange
from dgc.comm.transport import Transport
from dgc.gossip.formats import Exact, Message
from dgc.gossip.model import FlatModel
from dgc.gossip.protocol import NOT_BEGUN
from dgc.gossip.pushsum.messages import Heard, length, pack, unpack
from dgc.gossip.pushsum.weighted_model import WeightedModel
from dgc.gossip.topology.mixing import Mixing, check_mixing, uniform
from dgc.gossip.topology.sgp_graphs import n_peer_exponential
from dgc.gossip.topology.topology import Graph, Topology, made

PAUSE = 5e-4  # seconds


class SGP(WeightedModel):
    """Stochastic Gradient Push (Assran et al. 2019, arXiv 1811.10792, Algorithm 1).

    Args:
        graph (callable, optional): makes the topology for a number of ranks; None for an all-reduce.
        mixing (Mixing): shares that a rank sends to its peers.
        message (Message, optional): encoding of a model; default `Exact`, fp32.
        graph_from_epoch (mapping, optional): {epoch: graph that is used from this epoch on}. Epochs count from 0.
        blocking (bool): wait for neighbours right after each step, not before the next forward pass.

    Raises:
        ValueError: if graph_from_epoch has a negative epoch.
        TopologyError: by `start`, if a graph or its mixing weights are not valid for the number of ranks.

    Example:
        >>> sgp = SGP(n_peer_exponential, message=Half("bf16"))
        >>> optimizer = GossipOptimizer(optimizer, model.named_parameters(), sgp)
    """

    overlap = False
    weighted = True
    needs_groups = False
    is_synchronous = True

    def __init__(
        self,
        graph: Graph | None = n_peer_exponential,
        mixing: Mixing = uniform,
        message: Message | None = None,
        graph_from_epoch: Mapping[int | str, Graph | None] | None = None,
        blocking: bool = False,
    ):
        super().__init__()
        self._graphs = {0: graph} | {int(epoch): other for epoch, other in (graph_from_epoch or {}).items()}
        if min(self._graphs) < 0:
            raise ValueError(f"graph_from_epoch counts epochs from 0, there is {min(self._graphs)}")
        self.mixing, self.message = mixing, message or Exact()
        self.blocking, self.synch_freq = blocking, 0
        self.compress_ratio = min(1.0, self.message.nbytes(1 << 20) / (4 << 20))
        self.round, self.age = 0, 0
        self._stepped_with = 1.0  # weight of the model at the last gradient
        self._running: RunningConversation[dict[int, Heard]] | None = None
        self._begun = False
        self._since = 0  # first epoch of the current graph

    def start(self, model: FlatModel, transport: Transport, meter: Meter, name: str = "gossip") -> None:
        self.name, self.model, self.z = name, model, model.z
        self.rank, self.size = transport.rank, transport.size
        self._transport, self._meter = transport, meter
        self._topologies: dict[int, Topology | None] = {}
        for epoch, graph in self._graphs.items():
            topology = None if graph is None or self.size == 1 else made(graph, self.size)
            if topology is not None:
                check_mixing(topology, self.mixing, doubly=not self.weighted)
            self._topologies[epoch] = topology

    @property
    def topology(self) -> Topology | None:
        return self._topologies[self._since]

    def begin_epoch(self, epoch: int) -> None:
        """Switches to this epoch's graph. A new graph begins at round 0, after all messages of the old one."""
        since = max(first for first in self._graphs if first <= epoch)
        if since != self._since:
            self.settle()
            self._since, self.round = since, 0

    # --- one step ---------------------------------------------------------------------------------

    def begin_step(self) -> None:
        if self._begun:
            return
        self._begun = True
        self._listen(self.age >= self._patience)
        if self._overlaps:
            self._send()

    def update(self, step: Callable[[], object], lr: float) -> None:
        if not self._begun and (self._overlaps or self._on_its_way):
            raise RuntimeError(NOT_BEGUN)
        self._stepped_with = self.w
        self._move(step)
        self._begun = False
        if not self._overlaps:
            self._send()
        if self.blocking:
            self._listen(True)

    @property
    def _overlaps(self) -> bool:
        """Whether messages overlap the gradient. An all-reduce does not: until it ends a rank has no model."""
        return self.overlap and self.topology is not None

    @property
    def _patience(self) -> int:
        return self.synch_freq if self.topology is not None else 0

    @property
    def _on_its_way(self) -> bool:
        return self._running is not None or self._heard is not None

    def _send(self) -> None:
        if self.size > 1 and not self._on_its_way:
            round_ = self._exchange() if self.topology is not None else self._all_reduce()
            self._running = RunningConversation(self.name, round_, self._transport, self._meter)

    def _listen(self, wait: bool) -> None:
        if not self._on_its_way:
            return
        if self._heard is None and not wait and self._running is not None and not self._running.advance():
            self.age += 1
            return
        self._finish()
        self._take_in()
        self.age = 0

    def _finish(self) -> None:
        if self._running is not None:
            self._heard, self._running = self._running.finish(), None

    def hold(self) -> None:
        if self._patience:
            self._catch_up()
        self._finish()
        if not self._overlaps and not self._patience:
            self._listen(True)  # the next step would begin with this

    def _catch_up(self) -> None:
        """Brings all ranks to the same number of rounds.

        Ranks may have added rounds at different steps. A rank that is still stepping may wait for a round of a
        rank that is already here, so each rank continues with rounds until all are here. Then the ranks that are
        behind start the rounds that others wait for.
        """
        nothing = torch.zeros(1, dtype=torch.float32)
        here = self._transport.launch(f"{self.name}.here", (AllReduce(nothing, "sum"),))
        while not self._transport.poll(here):
            self._listen(False)
            self._send()
            time.sleep(PAUSE)
        self._transport.wait(here)
        rounds = torch.tensor([self.round], dtype=torch.int64)
        last = int(all_reduce(self._transport, rounds, "max", f"{self.name}.rounds"))
        while self.round < last:
            self._listen(True)
            self._send()

    def settle(self) -> None:
        self.hold()
        self._listen(True)

    def restart(self) -> None:
        assert not self._on_its_way, "settle() comes first"
        self.w = 1.0

    # --- one round --------------------------------------------------------------------------------

    @torch.no_grad()
    def _exchange(self) -> Conversation[dict[int, Heard]]:
        topology, k, n = self.topology, self.round, self.z.numel()
        assert topology is not None
        shares = self.mixing(topology, self.rank, k)
        sends = self._messages({to: share for to, share in shares.items() if to != self.rank}, shares[self.rank])
        sources, nbytes = topology.in_peers(self.rank, k), length(self.message, n, self.weighted)
        empty = {s: torch.empty(nbytes, dtype=torch.uint8, device=self.z.device) for s in sources}
        self.round += 1
        (replies,) = yield (Exchange(sends, empty),)
        known = {s: None if self.weighted else self.mixing(topology, s, k)[self.rank] for s in sources}
        return {s: unpack(self.message, replies[s], n, known[s]) for s in sources}

    def _messages(self, shares: dict[int, float], kept: float) -> dict[int, Tensor]:
        """Returns the message for each peer. x and w are reduced to the kept share."""
        parcels = {s: pack(self.message, self.z, self.w * s, self.weighted) for s in {*shares.values()}}
        lost = torch.zeros_like(self.z) if not self.message.exact else None  # the rounding errors of all messages
        if lost is not None:
            for share in shares.values():
                lost += self.z * (self.w * share) - parcels[share][1]
        self._keep(kept)
        if lost is not None:
            self.z.add_(lost, alpha=1 / self.w)
            self.model.scatter()
        return {to: parcels[share][0] for to, share in shares.items()}

    def _all_reduce(self) -> Conversation[dict[int, Heard]]:
        x, w = self.z * self.w, torch.tensor([self.w], dtype=torch.float64)
        self._keep(0.0)
        (x, w) = yield (AllReduce(x), AllReduce(w))
        return {self.rank: Heard(x, float(w))}

    # --- state ------------------------------------------------------------------------------------

    def numerator(self) -> Tensor:
        assert self._running is None, "hold() comes first"
        return super().numerator()

    def gauges(self) -> dict[str, float]:
        return {"weight": self._stepped_with, "staleness": float(self.age)}

    def errors(self) -> Iterable[Tensor]:
        return ()

    def close(self) -> None:
        self.settle()

    def state_dict(self) -> dict[str, Any]:
        assert self._running is None, "hold() comes first"
        return {**super().state_dict(), "round": self.round, "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != {"z", "x", "size", "w", "round", "since", "heard"}:
            raise ValueError(f"state of another algorithm: {sorted(state)}")
        if state["since"] not in self._graphs:
            raise ValueError("state of other graphs")
        super().load_state_dict(state)
        self.round, self.age = state["round"], 0
        self._since, self._running, self._begun = state["since"], None, False
