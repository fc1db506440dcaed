"""Graphs with edges only between odd and even ranks, for asynchronous averaging.

Odd ranks initiate an average and wait for the reply. Even ranks only reply. Ranks can therefore never wait for one
another in a cycle (Lian, Zhang, Zhang, Liu: AD-PSGD, ICML 2018, arXiv 1710.06952).
"""

from dgc.arguments import checked
from dgc.gossip.topology.topology import Peers, Topology

CURE = (
    "Without a path of odd-even pairs between all ranks there is no consensus: take bipartite_complete, for any "
    "number of ranks, or bipartite_exponential, for an even number"
)


@checked
def bipartite_complete(size: int) -> Topology:
    """Every odd rank with every even one in turn: in round t the i-th odd with the (i + t)-th even rank.

    Args:
        size (int): number of ranks.

    Example:
        >>> peer_schedule(bipartite_complete(6), rank=1)
        (0, 2, 4)
    """
    odd, even = size // 2, (size + 1) // 2

    def out(rank: int, t: int) -> Peers:
        if rank % 2:
            return (2 * ((rank // 2 + t) % even),)
        index = (rank // 2 - t) % even
        return (2 * index + 1,) if index < odd else ()

    return Topology("bipartite_complete", size, max(even, 1), out)


def bipartite_subgraph(topology: Topology) -> Topology:
    """The edges of a graph between an odd and an even rank, in both directions.

    Raises:
        TopologyError: if these edges do not connect all ranks.
    """

    def out(rank: int, t: int) -> Peers:
        peers = (*topology.out_peers(rank, t), *topology.in_peers(rank, t))
        return tuple(peer for peer in dict.fromkeys(peers) if (peer - rank) % 2)

    name = f"the odd-even pairs of {topology.name}"
    return Topology(name, topology.size, topology.period, out, CURE)


def peer_schedule(topology: Topology, rank: int) -> Peers:
    """The peers of a rank in the order of rounds, for one period."""
    return tuple(peer for t in range(topology.period) for peer in topology.out_peers(rank, t))
