"""CHOCO-SGD: gossip about compressed differences (Koloskova, Stich, Jaggi: ICML 2019, arXiv 1902.00340,
Algorithm 2; for deep learning Koloskova, Lin, Stich, Jaggi: ICLR 2020, arXiv 1907.09356).

Neighbours know of rank i's model x_i a public copy xhat_i, which i's messages bring closer to it. With W
symmetric, rows summing to one, and Q from `dgc.gossip.quantized`:

    x_i = x_i - lr O(g(x_i))                           any optimizer's direction O
    q_i = Q(x_i - xhat_i), to all neighbours;          xhat_i = xhat_i + q_i
    d_i = d_i + sum over j of W_ij (q_j - q_i)         so that d_i = sum over j of W_ij (xhat_j - xhat_i)
    x_i = x_i + gamma d_i

What Q leaves out stays in x_i - xhat_i and is sent later. The d_i of all ranks add up to zero, so that the mean of
the models is kept.

Differences from the papers: d takes the place of s = d + xhat, the weighted sum of public copies (the
memory-efficient form): as models agree d becomes small, and so does its rounding, which in s would be that of x
and would add up. Public copies begin as the model that all ranks start with, not as zeros.

Payload per step and rank in bytes: neighbours * those of Q.
"""

from collections.abc import Iterable
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from dgc.bucket import Segment
from dgc.comm.requests import Conversation, Exchange
from dgc.gossip.mixing import Mixing, Shares, metropolis
from dgc.gossip.neighbours import Neighbours, two_way_ring
from dgc.gossip.quantized import Quantizer, TopK
from dgc.gossip.topology import Graph, Peers, Topology
from dgc.memory.state import check_tensor

NOMINAL = (Segment("", 0, 1 << 20, (1 << 20,), (1,)),)


def digest(topology: Topology, mixing: Mixing) -> int:
    """One number for W, the same on every rank."""
    return crc32(repr([sorted(mixing(topology, rank, 0).items()) for rank in range(topology.size)]).encode())


class CHOCO(Neighbours):
    """graph: symmetric, and the same in all rounds. quantizer: Q. gamma: the consensus step size, None for one
    that suits Q; too large a one drives models apart, too small a one lets them.
    """

    static = True

    def __init__(
        self,
        graph: Graph = two_way_ring,
        mixing: Mixing = metropolis,
        quantizer: Quantizer | None = None,
        gamma: float | None = None,
    ):
        if gamma is not None and not 0 < gamma <= 1:
            raise ValueError(f"gamma is a step size in (0, 1], or None, not {gamma}")
        super().__init__(graph, mixing)
        self.quantizer = quantizer or TopK()
        self.gamma = self.quantizer.gamma if gamma is None else gamma
        self.compress_ratio = min(1.0, self.quantizer.plan(NOMINAL, torch.device("cpu")).nbytes / (4 << 20))

    def _prepare(self) -> None:
        self._coder = self.quantizer.plan(self.model.segments, self.z.device)
        self.xhat, self.d = self.z.clone(), torch.zeros_like(self.z)
        self._have_met = True
        self._graph = 0 if self.topology is None else digest(self.topology, self.mixing)

    def _nbytes(self) -> int:
        return self._coder.nbytes

    @torch.no_grad()
    def _average(self) -> Conversation[None]:
        peers, weights = self.neighbours(0)
        if not self._have_met:
            yield from self._introduce(peers, weights)
        payload, q = self._coder.encode(self.z - self.xhat)
        q(self.xhat, 1.0)
        q(self.d, -sum(weights[peer] for peer in peers))
        self.round += 1
        empty = {source: torch.empty_like(payload) for source in peers}
        (replies,) = yield (Exchange(dict.fromkeys(peers, payload), empty),)
        for source in peers:
            self._coder.decode(replies[source], source)(self.d, weights[source])
        self.z.add_(self.d, alpha=self.gamma)

    def _introduce(self, peers: Peers, weights: Shares) -> Conversation[None]:
        """Models travel whole, once."""
        self.xhat.copy_(self.z)
        self.d.zero_()
        empty = {source: torch.empty_like(self.z) for source in peers}
        (replies,) = yield (Exchange({peer: self.z.clone() for peer in peers}, empty),)
        for source in peers:
            self.d.add_(replies[source] - self.xhat, alpha=weights[source])
        self._have_met = True

    @torch.no_grad()
    def restart(self) -> None:
        """Every rank knows everybody's model now."""
        super().restart()
        self.xhat.copy_(self.z)
        self.d.zero_()
        self._have_met = True

    def errors(self) -> Iterable[Tensor]:
        yield self.z - self.xhat

    def _state(self) -> dict[str, Any]:
        return {"xhat": self.xhat.clone(), "d": self.d.clone(), "have_met": self._have_met, "graph": self._graph}

    def _meet(self) -> None:
        self._have_met = False

    def _load(self, state: dict[str, Any]) -> None:
        if state["graph"] != self._graph:
            raise ValueError("state of another graph or mixing: d is a sum over other neighbours")
        for name in ("xhat", "d"):
            check_tensor(name, state[name], self.z.shape)
        self.xhat.copy_(state["xhat"])
        self.d.copy_(state["d"])
        self._have_met = state["have_met"]
