"""Stochastic Gradient Push and its variants: gossip with push-sum weights during training.

Rank i has biased parameters x and a push-sum weight w, initially 1. P is the mixing matrix of a round; its columns
sum to one. The parameters hold the model z = x / w. The optimizer has gradients g at z and any direction O. It
steps on z (weight decay therefore decays z), and x moves by the same difference. x is not stored: it is z w plus
the received shares not added yet.

Differences from the papers: Messages may be rounded. A rank keeps x minus the decoded values of its messages, so
the sum over ranks is preserved. In epochs with the graph None, all ranks average x and w with one all-reduce; for
SGD with momentum this is all-reduce SGD.

Payload per step and rank in bytes: for each peer 24, and message.nbytes(n) + 8 (message.nbytes(n) without w),
rounded up to a multiple of 8.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from dgc.comm.collectives import all_reduce
from dgc.comm.conversation import RunningConversation
from dgc.comm.requests import AllReduce, Conversation, as_bytes
from dgc.core.arguments import WHOLE, checked, require
from dgc.core.state import check_mapping
from dgc.gossip.graphs import n_peer_exponential
from dgc.gossip.messages import WEIGHT_NBYTES, FP32Message, GossipMessage, blank, exchange, weight_of
from dgc.gossip.protocol import MISSING_ZERO_GRAD, Gossip, check_state
from dgc.gossip.topology import Graph, Mixing, Topology, build_topology, check_mixing, uniform

POLL_INTERVAL = 5e-4  # seconds
Share = tuple[Tensor, float]  # of x and of w


@checked
class SGP(Gossip):
    """Stochastic Gradient Push (Assran, Loizou, Ballas, Rabbat: ICML 2019, arXiv 1811.10792, Algorithm 1).

        x_i = x_i - lr O(g(z_i));      x_i = sum over j of P_ij x_j,  w_i likewise,  z_i = x_i / w_i

    Args:
        graph (callable, optional): returns the topology for a number of ranks; None for an all-reduce.
        mixing (Mixing): shares that a rank sends to its peers; the columns of P.
        message (GossipMessage, optional): encoding of a model; default `FP32Message`, fp32.
        graph_from_epoch (mapping, optional): {epoch: graph that is used from this epoch on}. Epochs count from 0.
        blocking (bool): wait for neighbours right after each step, not before the next forward pass.

    Raises:
        ValueError: if graph_from_epoch has a negative epoch.
        TopologyError: by `start`, if a graph or its mixing weights are not valid for the number of ranks.

    Example:
        >>> sgp = SGP(n_peer_exponential, message=HalfPrecisionMessage("bf16"))
        >>> optimizer = LocalOptimizer(optimizer, model.named_parameters(), sgp)
    """

    overlap = False
    weighted = True
    biased = False

    def __init__(
        self,
        graph: Graph | None = n_peer_exponential,
        mixing: Mixing = uniform,
        message: GossipMessage | None = None,
        graph_from_epoch: Mapping[int | str, Graph | None] | None = None,
        blocking: bool = False,
    ):
        self._graphs = {0: graph} | {int(epoch): other for epoch, other in (graph_from_epoch or {}).items()}
        if min(self._graphs) < 0:
            raise ValueError(f"graph_from_epoch counts epochs from 0, but has epoch {min(self._graphs)}")
        self.mixing, self.message = mixing, message or FP32Message()
        self.blocking, self.synch_freq = blocking, 0
        self.compress_ratio = min(1.0, self.message.nbytes(1 << 20) / (4 << 20))
        self.w = 1.0
        self.round = 0
        self.staleness = 0  # steps since the last round was added
        self._gradient_weight = 1.0  # weight of the model at the last gradient
        self._received: dict[int, Share] | None = None  # shares by sender, not added yet
        self._in_step = False
        self._graph_epoch = 0  # first epoch of the current graph

    def _prepare(self) -> None:
        self._topologies: dict[int, Topology | None] = {}
        for epoch, graph in self._graphs.items():
            topology = None if graph is None or self.size == 1 else build_topology(graph, self.size)
            if topology is not None:
                check_mixing(topology, self.mixing, doubly_stochastic=not self.weighted)
            self._topologies[epoch] = topology

    @property
    def topology(self) -> Topology | None:
        return self._topologies[self._graph_epoch]

    def begin_epoch(self, epoch: int) -> None:
        since = max(first for first in self._graphs if first <= epoch)
        if since != self._graph_epoch:
            self.synchronize_messages()
            self._graph_epoch, self.round = since, 0

    def begin_step(self) -> None:
        if self._in_step:
            return
        self._in_step = True
        self._receive(self.staleness >= self._max_staleness)
        if self._overlaps:
            self._start_round()

    def update(self, step: Callable[[], object], lr: float) -> None:
        if not self._in_step and (self._overlaps or self._is_pending):
            raise RuntimeError(MISSING_ZERO_GRAD)
        self._gradient_weight = self.w
        before = None if self.w == 1 else self.z.clone()
        step()
        self.model.gather()
        if before is not None:  # x moves by the same difference as z
            self.z.sub_(before).div_(self.w).add_(before)
            self.model.scatter()
        self._in_step = False
        if not self._overlaps:
            self._start_round()
        if self.blocking:
            self._receive(True)

    @property
    def _overlaps(self) -> bool:
        """Whether messages overlap the gradient. An all-reduce cannot: until it ends, a rank has no model."""
        return self.overlap and self.topology is not None

    @property
    def _max_staleness(self) -> int:
        return self.synch_freq if self.topology is not None else 0

    @property
    def _is_pending(self) -> bool:
        return self._conversation is not None or self._received is not None

    def _start_round(self) -> None:
        if self.size > 1 and not self._is_pending:
            conversation = self._exchange() if self.topology is not None else self._all_reduce()
            self._conversation = RunningConversation(self.name, conversation, self._transport, self._meter)

    @torch.no_grad()
    def _receive(self, wait: bool) -> None:
        """Adds the shares of a round in rank order, so that ranks with the same shares get the same result."""
        if not self._is_pending:
            return
        if self._conversation is not None and not wait and not self._conversation.advance():
            self.staleness += 1
            return
        self._complete_round()
        assert self._received is not None
        shares, self._received = self._received, None
        w = self.w + sum(shares[source][1] for source in sorted(shares))
        if self.rank not in shares:
            shares[self.rank] = self.z.mul_(self.w), self.w
        x, *others = (shares[source][0] for source in sorted(shares))
        for other in others:
            x.add_(other)
        self.w = w if self.weighted and not self.biased else 1.0
        torch.div(x, self.w, out=self.z)
        self.model.scatter()
        self.staleness = 0

    def _complete_round(self) -> None:
        if self._conversation is not None:
            self._received, self._conversation = self._conversation.finish(), None

    def flush(self) -> None:
        if self._max_staleness:
            self._align_rounds()
        self._complete_round()
        if not self._overlaps and not self._max_staleness:
            self._receive(True)  # as the next step would

    def _align_rounds(self) -> None:
        """Brings all ranks to the same number of rounds, which they may have added at different steps.

        A stepping rank may wait for a round of one that has called this, which continues until all have.
        """
        empty = torch.zeros(1, dtype=torch.float32)
        barrier = self._transport.launch(f"{self.name}.barrier", (AllReduce(empty, "sum"),))
        while not self._transport.poll(barrier):
            self._receive(False)
            self._start_round()
            time.sleep(POLL_INTERVAL)
        self._transport.wait(barrier)
        rounds = torch.tensor([self.round], dtype=torch.int64)
        last = int(all_reduce(self._transport, rounds, "max", f"{self.name}.rounds"))
        while self.round < last:
            self._receive(True)
            self._start_round()

    def synchronize_messages(self) -> None:
        self.flush()
        self._receive(True)

    def restart(self) -> None:
        assert not self._is_pending, "synchronize_messages() must be called first"
        self.w = 1.0

    @torch.no_grad()
    def _exchange(self) -> Conversation[dict[int, Share]]:
        """Sends shares of x and w to the peers, and keeps the rest. Returns the received shares."""
        topology, k, n = self.topology, self.round, self.z.numel()
        assert topology is not None
        shares = self.mixing(topology, self.rank, k)
        to_peers = {to: share for to, share in shares.items() if to != self.rank}
        end = self.message.nbytes(n)
        nbytes = end + (WEIGHT_NBYTES if self.weighted else 0)
        encoded, decoded = {}, {}  # by share
        for share in {*to_peers.values()}:
            encoded[share], content = blank(nbytes, self.z)
            decoded[share] = self.message.encode_(self.z, self.w * share, content[:end])
            if self.weighted:
                content[end:].copy_(as_bytes(fp64(self.w * share)))
        rounding = None if self.message.exact else torch.zeros_like(self.z)  # errors of all messages
        if rounding is not None:
            for share in to_peers.values():
                rounding += self.z * (self.w * share) - decoded[share]
        self._scale(shares[self.rank])
        if rounding is not None:
            self.z.add_(rounding, alpha=1 / self.w)
            self.model.scatter()
        self.round += 1
        sends = {to: encoded[share] for to, share in to_peers.items()}
        sizes = dict.fromkeys(topology.in_peers(self.rank, k), nbytes)
        received = {}
        for source, content in (yield from exchange(sends, sizes, f"a message of {self.name}", self.z)).items():
            w = float(weight_of(content)) if self.weighted else self.mixing(topology, source, k)[self.rank]
            received[source] = self.message.decode(content[:end], n), w
        return received

    @torch.no_grad()
    def _scale(self, share: float) -> None:
        """Multiplies x and w by share. z does not change, unless it is x."""
        if self.biased:
            self.z.mul_(share)
            self.model.scatter()
        else:
            self.w *= share

    def _all_reduce(self) -> Conversation[dict[int, Share]]:
        x, w = self.z * self.w, torch.tensor([self.w], dtype=torch.float64)
        self._scale(0.0)
        (x, w) = yield (AllReduce(x), AllReduce(w))
        return {self.rank: (x, float(w))}

    def biased_parameters(self) -> Tensor:
        self._check_flushed()
        x = self.z * self.w
        for share, _ in (self._received or {}).values():
            x += share
        return x

    def bias(self) -> float:
        return self.w + sum(w for _, w in (self._received or {}).values())

    def metrics(self) -> dict[str, float]:
        return {"weight": self._gradient_weight, "staleness": float(self.staleness)}

    def _state(self) -> dict[str, Any]:
        # Received shares by distance from the sender: on most graphs the distances are the same on all ranks, so
        # that another number of ranks can load the state.
        received = {
            str((source - self.rank) % self.size): {"x": x.clone(), "w": fp64(w)}
            for source, (x, w) in (self._received or {}).items()
        }
        state = {"z": self.z, "x": self.z * self.w, "size": self.size, "w": fp64(self.w), "received": received}
        return {**state, "round": self.round, "graph_epoch": self._graph_epoch, "in_step": self._in_step}

    def _check_content(self, state: Mapping[str, Any]) -> None:
        if not state["w"] > 0:
            raise ValueError(f"w must be positive, not {float(state['w'])}")
        if (epoch := state["graph_epoch"]) not in self._graphs:
            raise ValueError(f"state of another graph_from_epoch: its graph begins with epoch {epoch}")
        for distance, share in state["received"].items():
            if not isinstance(distance, str) or not distance.isdecimal():
                raise ValueError(f"a distance of received shares is {distance!r}, not a whole number as text")
            check_mapping(f"received share of distance {distance}", share)
            check_state(share, {"x": self.z, "w": fp64(self.w)}, prefix="received ")

    def _load(self, state: Mapping[str, Any]) -> None:
        received = {
            (self.rank + int(distance)) % self.size: (share["x"].to(self.z.device, copy=True), float(share["w"]))
            for distance, share in state["received"].items()
        }
        self.w = float(state["w"])
        # a state that is summed over several ranks has a valid sum of x, but not of z
        self.z.copy_(state["z"] if state["size"] == self.size else state["x"] / self.w)
        self.model.scatter()
        self._received = received or None
        self.round, self.staleness = state["round"], 0
        self._graph_epoch, self._conversation, self._in_step = state["graph_epoch"], None, state["in_step"]


def fp64(w: float) -> Float64[Tensor, ""]:
    return torch.tensor(w, dtype=torch.float64)


@checked
class OSGP(SGP):
    """Overlap Stochastic Gradient Push (Assran et al. 2019, arXiv 1811.10792, Algorithm 2).

        send P_ji x_i, P_ji w_i and keep P_ii x_i, P_ii w_i;   z_i = x_i / w_i
        x_i = x_i - lr O(g(z_i))       while messages are in flight
        add the received messages; after at most `synch_freq` steps without any, wait for them

    Differences from the paper: Messages are added before the next forward pass. A round begins after the previous
    one is complete, so ranks may do it at different steps, and only these have a payload. The optimizer's step is
    not scaled by w.

    Args:
        graph, mixing, message, graph_from_epoch: see `SGP`.
        synch_freq (int): largest number of steps without a neighbour's message before a rank waits for it. 0 keeps
            models closest to each other; more steps hide longer delays.
        biased (bool): set z = x, without division by the weights (an ablation of the paper).
        overlap (bool): send during forward and backward. False sends the newest model, after the step.

    Raises:
        ValueError: if synch_freq is negative.

    Example:
        >>> optimizer = LocalOptimizer(optimizer, model.named_parameters(), OSGP(ring, synch_freq=2))
    """

    def __init__(
        self,
        graph: Graph | None = n_peer_exponential,
        mixing: Mixing = uniform,
        message: GossipMessage | None = None,
        graph_from_epoch: Mapping[int | str, Graph | None] | None = None,
        synch_freq: int = 0,
        biased: bool = False,
        overlap: bool = True,
    ):
        super().__init__(graph, mixing, message, graph_from_epoch)
        require("0 or more steps", WHOLE, least=0, synch_freq=synch_freq)
        self.synch_freq, self.biased, self.overlap = synch_freq, biased, overlap


class DPSGD(SGP):
    """D-PSGD (Lian et al.: NeurIPS 2017, arXiv 1705.09056): SGP with a doubly stochastic P. Every w stays 1.

        x_i = x_i - lr O(g(x_i));      x_i = sum over j of P_ij x_j

    Differences from the paper: Ranks average after the local step, as the authors of SGP do, not before it.

    Arguments and errors are the same as for `SGP`. `start` raises TopologyError if the rows of P do not sum to
    one.
    """

    weighted = False
