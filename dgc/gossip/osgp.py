"""Overlap Stochastic Gradient Push (Assran et al. 2019, arXiv 1811.10792, Algorithm 2): messages travel while
gradients are computed.

    send P_ji x_i, P_ji w_i and keep P_ii x_i, P_ii w_i;   z_i = x_i / w_i
    x_i = x_i - lr O(g(z_i))       while messages travel
    add what has come; after at most `synch_freq` steps without, wait for it

Differences from the paper: messages are taken in before the next forward pass, and a round begins once the one
before it is over, so that all ranks do the same number of rounds, at steps of their own. The optimizer's step is
not scaled by w.

Payload as of SGP, in steps in which a round begins.
"""

from collections.abc import Mapping

import torch

from dgc.gossip.books import n_peer_exponential
from dgc.gossip.messages import Message
from dgc.gossip.mixing import Mixing, uniform
from dgc.gossip.sgp import SGP
from dgc.gossip.topology import Graph


class OSGP(SGP):
    """synch_freq: steps that may pass without a neighbour's message. biased: the paper's ablation, in which z = x:
    weights are not divided by.
    """

    overlap = True

    def __init__(
        self,
        graph: Graph | None = n_peer_exponential,
        mixing: Mixing = uniform,
        message: Message | None = None,
        graph_from_epoch: Mapping[int | str, Graph | None] | None = None,
        synch_freq: int = 0,
        biased: bool = False,
        overlap: bool = True,
    ):
        super().__init__(graph, mixing, message, graph_from_epoch)
        if synch_freq < 0:
            raise ValueError(f"synch_freq must be 0 or more steps, not {synch_freq}")
        self.synch_freq, self.biased, self.overlap = synch_freq, biased, overlap

    @torch.no_grad()
    def _keep(self, share: float) -> None:
        if self.biased:
            self.z.mul_(share)
            self.model.scatter()
        else:
            super()._keep(share)

    def _weight(self, w: float) -> float:
        return 1.0 if self.biased else w
