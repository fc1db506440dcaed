"""Mixing weights: the share of its value that a rank sends to each peer.

The shares of a rank are a column of the round's mixing matrix P. Each column sums to one, so the sum over ranks is
preserved. If each row sums to one as well, all ranks converge to the mean without push-sum weights.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from dgc.arguments import checked
from dgc.gossip.topology.topology import Topology

Shares = dict[int, float]  # by receiver, including the rank itself
Mixing = Callable[[Topology, int, int], Shares]  # (topology, rank, round)

ROUNDING = 1e-9


def uniform(topology: Topology, rank: int, round: int) -> Shares:
    """Equal shares: 1 / (1 + number of peers)."""
    peers = topology.out_peers(rank, round)
    return dict.fromkeys((rank, *peers), 1 / (1 + len(peers)))


def metropolis(topology: Topology, rank: int, round: int) -> Shares:
    """Metropolis weights (Xiao, Boyd, Kim 2007): the share of an edge is 1 / (1 + the larger degree of its ends).

    The rank keeps the rest. Rows sum to one on every symmetric graph, even if the number of peers differs between
    ranks.

    Raises:
        TopologyError: if the graph is not symmetric at this rank and round.
    """
    peers = topology.out_peers(rank, round)
    if sorted(peers) != list(topology.in_peers(rank, round)):
        raise topology.error(
            f"Metropolis weights need a symmetric graph, but round {round} is not symmetric at rank {rank}"
        )
    shares = {peer: 1 / (1 + max(len(peers), len(topology.out_peers(peer, round)))) for peer in peers}
    return {rank: 1 - sum(shares.values()), **shares}


def mixing_from_weights(matrices: Sequence[Sequence[Sequence[float]]]) -> Mixing:
    """Mixing weights from matrices, for the topology of `from_weights` with the same matrices.

    Args:
        matrices (sequence of matrices): one for each round; P[i][j] is the share that rank j sends to rank i.

    Example:
        >>> ring = [[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]]
        >>> sgp = SGP(graph=lambda size: from_weights([ring]), mixing=mixing_from_weights([ring]))
    """

    def mixing(topology: Topology, rank: int, round: int) -> Shares:
        P = matrices[round % len(matrices)]
        return {i: P[i][rank] for i in (rank, *topology.out_peers(rank, round))}

    return mixing


def mixing_matrix(topology: Topology, mixing: Mixing, round: int) -> Float64[Tensor, "n n"]:
    """P[i, j]: the share of rank j's value that rank i receives."""
    columns = [[0.0] * topology.size for _ in range(topology.size)]
    for rank, column in enumerate(columns):
        for peer, share in mixing(topology, rank, round).items():
            column[peer] = share
    return torch.tensor(columns, dtype=torch.float64).T


@checked
def check_mixing(topology: Topology, mixing: Mixing, doubly_stochastic: bool = False) -> None:
    """Validates mixing weights.

    Args:
        topology (Topology): graph.
        mixing (Mixing): weights, as a function of (topology, rank, round).
        doubly_stochastic (bool): require rows to sum to one as well.

    Raises:
        TopologyError: if a share is negative, a rank keeps no share of its value, or a sum differs from one.
    """
    for t in range(topology.period):
        sent, received = [0.0] * topology.size, [0.0] * topology.size
        for rank in range(topology.size):
            shares = mixing(topology, rank, t)
            if not isinstance(shares, Mapping):
                raise topology.error(f"mixing must return a share for each rank in round {t}, not {shares!r}")
            if min(shares.values()) < 0 or not shares.get(rank, 0.0) > 0:
                raise topology.error(f"in round {t} rank {rank} sends a negative share, or keeps nothing")
            sent[rank] = sum(shares.values())
            for peer, share in shares.items():
                received[peer] += share
        for sums, verb in ((sent, "sends"), (received, "receives"))[: 2 if doubly_stochastic else 1]:
            worst = max(range(topology.size), key=lambda rank: abs(sums[rank] - 1))
            if abs(sums[worst] - 1) > ROUNDING:
                raise topology.error(
                    f"in round {t} the shares that rank {worst} {verb} sum to {sums[worst]:.6g}, not to 1"
                )
