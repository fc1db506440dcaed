"""CHOCO-SGD: gossip with compressed differences (Koloskova, Stich, Jaggi: ICML 2019, arXiv 1902.00340,
Algorithm 2; for deep learning Koloskova, Lin, Stich, Jaggi: ICLR 2020, arXiv 1907.09356).

Each neighbour of rank i has a public copy xhat_i of the model x_i, which the messages of rank i update. With W
symmetric, rows summing to one, and Q from `dgc.gossip.difference`:

    x_i = x_i - lr O(g(x_i))                           for the direction O of any optimizer
    q_i = Q(x_i - xhat_i), to all neighbours;          xhat_i = xhat_i + q_i
    d_i = d_i + sum over j of W_ij (q_j - q_i)         so that d_i = sum over j of W_ij (xhat_j - xhat_i)
    x_i = x_i + gamma d_i

The part that Q drops stays in x_i - xhat_i and is sent later. The d_i of all ranks sum to zero, so the mean of the
models is preserved.

Differences from the papers: d replaces s = d + xhat, the weighted sum of public copies (the memory-efficient
form). As models converge, d and its rounding errors become small. In s the rounding errors would be those of x and
would accumulate. Public copies begin as the initial model, which is the same on all ranks, not as zeros.

Payload per exchange and rank in bytes: neighbours * bytes of Q.
"""

from collections.abc import Iterable
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from dgc.arguments import FLAG, WHOLE, checked, require
from dgc.bucket import Segment
from dgc.comm.requests import Conversation, Exchange
from dgc.gossip.difference import DifferenceGossip, Quantizer, TopK
from dgc.gossip.graphs import two_way_ring
from dgc.gossip.messages import exchange, message_of
from dgc.gossip.topology import Graph, Mixing, Peers, Shares, Topology, metropolis
from dgc.state import check_tensor

NOMINAL = (Segment("", 0, 1 << 20, (1 << 20,), (1,)),)  # for compress_ratio before the model is known


def digest(topology: Topology, mixing: Mixing) -> int:
    """A checksum of W, the same on every rank."""
    return crc32(repr([sorted(mixing(topology, rank, 0).items()) for rank in range(topology.size)]).encode())


@checked
class CHOCO(DifferenceGossip):
    """CHOCO-SGD (Koloskova et al. 2019, arXiv 1902.00340, Algorithm 2; 2020, arXiv 1907.09356).

    Args:
        graph (callable): returns the topology for a number of ranks. Symmetric and the same in all rounds.
        mixing (Mixing): weights W, symmetric with rows that sum to one.
        quantizer (Quantizer, optional): compression operator Q; default `TopK()`.
        gamma (float, optional): consensus step size in (0, 1]; None uses the quantizer's. With a value that is too
            large, models diverge; with one that is too small, averaging is slower than the local steps.
        average_every (int): steps between two exchanges. Above 1, ranks train alone in between.

    Raises:
        ValueError: if gamma or average_every is out of range.
        TopologyError: by `start`, if the graph or the weights are not valid.

    Example:
        >>> optimizer = GossipOptimizer(optimizer, model.named_parameters(), CHOCO(quantizer=TopK(0.01)))
    """

    static = True

    def __init__(
        self,
        graph: Graph = two_way_ring,
        mixing: Mixing = metropolis,
        quantizer: Quantizer | None = None,
        gamma: float | None = None,
        average_every: int = 1,
    ):
        if gamma is not None and not 0 < gamma <= 1:
            raise ValueError(f"gamma must be a step size in (0, 1], or None, not {gamma}")
        super().__init__(graph, mixing, average_every)
        self.quantizer = quantizer or TopK()
        self.gamma = self.quantizer.gamma if gamma is None else gamma
        ratio = self.quantizer.plan(NOMINAL, torch.device("cpu")).nbytes / (4 << 20)
        self.compress_ratio = min(1.0, ratio) / average_every

    def _prepare(self) -> None:
        self._coder = self.quantizer.plan(self.model.segments, self.z.device)
        self.xhat, self.d = self.z.clone(), torch.zeros_like(self.z)
        self._copies_valid = True
        self._digest = 0 if self.topology is None else digest(self.topology, self.mixing)

    def _nbytes(self) -> int:
        return self._coder.nbytes

    @torch.no_grad()
    def _average(self) -> Conversation[None]:
        peers, weights = self.neighbours(0)
        if not self._copies_valid:
            yield from self._send_models(peers, weights)
        payload, q = self._coder.encode(self.z - self.xhat)
        q(self.xhat, 1.0)
        q(self.d, -sum(weights[peer] for peer in peers))
        self.round += 1
        empty = {source: torch.empty_like(payload) for source in peers}
        (replies,) = yield (Exchange(dict.fromkeys(peers, payload), empty),)
        for source in peers:
            self._coder.decode(replies[source], source)(self.d, weights[source])
        self.z.add_(self.d, alpha=self.gamma)

    def _send_models(self, peers: Peers, weights: Shares) -> Conversation[None]:
        """Sends whole models to make the public copies valid."""
        self.xhat.copy_(self.z)
        self.d.zero_()
        sizes = dict.fromkeys(peers, self.z.numel() * self.z.element_size())
        replies = yield from exchange(dict.fromkeys(peers, message_of(self.z)), sizes, "a model of CHOCO", self.z)
        for source in peers:
            self.d.add_(replies[source].view(self.z.dtype) - self.xhat, alpha=weights[source])
        self._copies_valid = True

    @torch.no_grad()
    def restart(self) -> None:
        """Resets the public copies: all models are equal now."""
        super().restart()
        self.xhat.copy_(self.z)
        self.d.zero_()
        self._copies_valid = True

    def errors(self) -> Iterable[Tensor]:
        yield self.z - self.xhat

    def _state(self) -> dict[str, Any]:
        return {
            "xhat": self.xhat.clone(),
            "d": self.d.clone(),
            "copies_valid": self._copies_valid,
            "graph": self._digest,
        }

    def _reset_neighbours(self) -> None:
        self._copies_valid = False

    def _load(self, state: dict[str, Any]) -> None:
        require("a whole number", WHOLE, graph=state["graph"])
        require("True or False", FLAG, copies_valid=state["copies_valid"])
        if state["graph"] != self._digest:
            raise ValueError("state of another graph or mixing, in which d is a sum over other neighbours")
        for name in ("xhat", "d"):
            check_tensor(name, state[name], self.z.shape)
        self.xhat.copy_(state["xhat"])
        self.d.copy_(state["d"])
        self._copies_valid = state["copies_valid"]
