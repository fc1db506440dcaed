"""Overlap Stochastic Gradient Push (Assran et al. 2019, arXiv 1811.10792, Algorithm 2): communication overlaps
with the computation of gradients.

    send P_ji x_i, P_ji w_i and keep P_ii x_i, P_ii w_i;   z_i = x_i / w_i
    x_i = x_i - lr O(g(z_i))       while messages are in flight
    add the received messages; after at most `synch_freq` steps without any, wait for them

Differences from the paper: Messages are added before the next forward pass. A round begins after the previous one
is complete, so all ranks do the same number of rounds, but possibly at different steps. The optimizer's step is
not scaled by w.

Payload: as for SGP, in steps in which a round begins.
"""

from collections.abc import Mapping

import torch

from dgc.arguments import checked
from dgc.gossip.formats import Message
from dgc.gossip.pushsum.sgp import SGP
from dgc.gossip.topology.mixing import Mixing, uniform
from dgc.gossip.topology.sgp_graphs import n_peer_exponential
from dgc.gossip.topology.topology import Graph


@checked
class OSGP(SGP):
    """Overlap Stochastic Gradient Push (Assran et al. 2019, arXiv 1811.10792, Algorithm 2).

    Args:
        graph, mixing, message, graph_from_epoch: see `SGP`.
        synch_freq (int): largest number of steps without a neighbour's message before a rank waits for it. 0 keeps
            models closest to each other; more steps hide longer delays.
        biased (bool): set z = x, without division by the weights (an ablation of the paper).
        overlap (bool): send during forward and backward; False sends after the step, so that messages use the
            newest model but their delay is not hidden.

    Raises:
        ValueError: if synch_freq is negative.

    Example:
        >>> optimizer = GossipOptimizer(optimizer, model.named_parameters(), OSGP(ring, synch_freq=2))
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
    def _scale(self, share: float) -> None:
        if self.biased:
            self.z.mul_(share)
            self.model.scatter()
        else:
            super()._scale(share)

    def _divisor(self, w: float) -> float:
        return 1.0 if self.biased else w
