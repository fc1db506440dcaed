"""Other graphs: static graphs, random pairs, hierarchies of machines, and graphs of weight matrices."""

import random
from collections.abc import Sequence
from math import isqrt

from dgc.arguments import checked
from dgc.gossip.topology.sgp_graphs import n_peer_exponential, powers, ring
from dgc.gossip.topology.topology import Peers, Topology, TopologyError


@checked
def full(size: int) -> Topology:
    """Every rank sends to every other rank: the exact mean in one round.

    Args:
        size (int): number of ranks.
    """
    return Topology("full", size, 1, lambda rank, _: (r for r in range(size) if r != rank))


@checked
def two_way_ring(size: int) -> Topology:
    """A ring in which each rank exchanges with both neighbours. With two ranks, there is one neighbour.

    Args:
        size (int): number of ranks, at least 2.

    Raises:
        TopologyError: if size is less than 2.
    """
    return ring(size, min(2, size - 1))


@checked
def static_exponential(size: int) -> Topology:
    """Rank r sends to r + 1, r + 2, r + 4, .. in every round (Ying et al. 2021, arXiv 2110.13363).

    Args:
        size (int): number of ranks.
    """
    return Topology(
        "static_exponential", size, 1, lambda rank, _: ((rank + p) % size for p in powers(2, size - 1))
    )


@checked
def star(size: int, hub: int = 0) -> Topology:
    """Every rank exchanges with the hub, and the hub with every rank.

    Args:
        size (int): number of ranks.
        hub (int): rank of the hub.

    Raises:
        TopologyError: if hub is not a rank.
    """
    if not 0 <= hub < size:
        raise TopologyError(f"star with {size} ranks: hub must be a rank from 0 to {size - 1}, not {hub}")
    return Topology("star", size, 1, lambda rank, _: (r for r in range(size) if r != rank and hub in (r, rank)))


@checked
def grid(size: int) -> Topology:
    """A rectangle in which each rank exchanges with its neighbours. Opposite sides are not connected.

    Args:
        size (int): number of ranks. The rectangle is as close to a square as the divisors of `size` allow.
    """
    rows = next((r for r in range(isqrt(max(size, 0)), 0, -1) if size % r == 0), 1)
    columns = size // rows

    def out(rank: int, _: int) -> Peers:
        row, column = divmod(rank, columns)
        around = ((row, column + 1), (row, column - 1), (row + 1, column), (row - 1, column))
        return tuple(r * columns + c for r, c in around if 0 <= r < rows and 0 <= c < columns)

    return Topology("grid", size, 1, out)


@checked
def random_matching(size: int, seed: int = 0, rounds: int = 256) -> Topology:
    """Random pairs, with new pairs in each round. If the number of ranks is odd, one rank has no peer in a round.

    Args:
        size (int): number of ranks.
        seed (int): seed of the pairs, the same on all ranks.
        rounds (int): number of different rounds, after which they repeat.

    Raises:
        TopologyError: if the pairs of all rounds do not connect all ranks.
    """

    def out(rank: int, t: int) -> Peers:
        order = list(range(size))
        random.Random(f"{seed} {t}").shuffle(order)
        index = order.index(rank) ^ 1
        return (order[index],) if index < size else ()

    return Topology("random_matching", size, rounds, out, "Try another seed, or more rounds")


@checked
def hierarchical(size: int, local_size: int) -> Topology:
    """Alternates rounds inside machines and between machines.

    In even rounds all ranks of a machine exchange with each other. In odd rounds each rank sends to the rank with
    its local rank on one other machine, as in `n_peer_exponential` with one peer.

    Args:
        size (int): number of ranks.
        local_size (int): ranks per machine. Ranks of a machine are consecutive.

    Raises:
        TopologyError: if local_size is less than 1 or does not divide size.
    """
    if local_size < 1 or size % local_size:
        raise TopologyError(f"hierarchical with {size} ranks: local_size must divide them, but it is {local_size}")
    machines = size // local_size
    if machines == 1:
        return full(size)
    between = n_peer_exponential(machines)
    if local_size == 1:
        return between

    def out(rank: int, t: int) -> Peers:
        machine, local = divmod(rank, local_size)
        if t % 2:
            return tuple(peer * local_size + local for peer in between.out_peers(machine, t // 2))
        first = machine * local_size
        return tuple(r for r in range(first, first + local_size) if r != rank)

    return Topology("hierarchical", size, 2 * between.period, out)


@checked
def from_weights(matrices: Sequence[Sequence[Sequence[float]]]) -> Topology:
    """The edges of weight matrices. Use it together with `mixing_from_weights`.

    Args:
        matrices (sequence of matrices): one square matrix for each round. P[i][j] is the share of rank j's value
            that rank i receives.

    Raises:
        TopologyError: if there is no matrix, or the matrices are not square and of one size.
    """
    if not matrices:
        raise TopologyError("from_weights needs at least one matrix")
    size = len(matrices[0])
    if any(len(P) != size or any(len(row) != size for row in P) for P in matrices):
        raise TopologyError(f"from_weights: every matrix must have {size} rows and columns, like the first")

    def out(rank: int, t: int) -> Peers:
        return tuple(i for i in range(size) if i != rank and matrices[t][i][rank] != 0)

    return Topology("from_weights", size, len(matrices), out)
