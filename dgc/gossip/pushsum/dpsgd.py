"""D-PSGD (Lian et al.: NeurIPS 2017, arXiv 1705.09056): SGP with a doubly stochastic P, so that every w stays 1.

    x_i = x_i - lr O(g(x_i));      x_i = sum over j of P_ij x_j

Differences from the paper: Ranks average after the local step, as the authors of SGP do, not before it.

Payload per step and rank in bytes: peers * message.nbytes(n).
"""

from dgc.gossip.pushsum.sgp import SGP


class DPSGD(SGP):
    """D-PSGD (Lian et al. 2017, arXiv 1705.09056). Args are those of SGP.

    Raises:
        TopologyError: by `start`, if the rows of P do not sum to one.
    """

    weighted = False

    def _divisor(self, w: float) -> float:
        return 1.0
