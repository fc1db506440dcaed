"""Graphs with edges only between odd and even ranks, for asynchronous averaging.

Odd ranks initiate an average and wait for the answer. Even ranks only answer. Ranks can therefore never wait for
one another in a cycle (Lian, Zhang, Zhang, Liu: AD-PSGD, ICML 2018, arXiv 1710.06952).
"""

from dgc.gossip.topology.topology import Peers, Topology

CURE = (
    "Without a path of odd-even pairs between all ranks there is no consensus: take bipartite_complete, for any "
    "number of ranks, or bipartite_exponential, for an even one"
)


def bipartite_complete(size: int) -> Topology:
    """Every odd rank with every even one in turn: in round t the i-th odd with the (i + t)-th even rank.

    Args:
        size (int): number of ranks.
    """
    odd, even = size // 2, (size + 1) // 2

    def out(rank: int, t: int) -> Peers:
        if rank % 2:
            return (2 * ((rank // 2 + t) % even),)
        place = (rank // 2 - t) % even
        return (2 * place + 1,) if place < odd else ()

    return Topology("bipartite_complete", size, max(even, 1), out)


def odd_even(topology: Topology) -> Topology:
    """The edges of a graph between an odd and an even rank, in both directions.

    Raises:
        TopologyError: if these edges do not connect all ranks.
    """

    def out(rank: int, t: int) -> Peers:
        peers = (*topology.out_peers(rank, t), *topology.in_peers(rank, t))
        return tuple(peer for peer in dict.fromkeys(peers) if (peer - rank) % 2)

    return Topology(
        f"{topology.name}, of it pairs of an odd and an even rank,", topology.size, topology.period, out, CURE
    )


def book(pairs: Topology, rank: int) -> Peers:
    """The peers of a rank in the order of rounds, for one period."""
    return tuple(peer for t in range(pairs.period) for peer in pairs.out_peers(rank, t))
