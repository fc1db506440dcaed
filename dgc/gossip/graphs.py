"""Communication graphs of gossip, as functions of the number of ranks, `size`.

`n_peer_exponential` to `ring` are the graphs of Stochastic Gradient Push (Assran, Loizou, Ballas, Rabbat: ICML
2019, arXiv 1811.10792). Of n ranks, rank r cycles through peers r + offset (mod n), `peers` of them in each round:

    n_peer_exponential    +j (m+1)^i for j = 1 .. m, i = 0, 1, ..: one i in each round, m = peers. With n = (m+1)^p
                          every rank has the exact mean after p rounds
    exponential           +2^i, -2^i for i = 0, 1, ..
    bipartite_exponential +1, -1, then +(1 + 2^i), -(1 + 2^i) for i = 1, 2, ..
    linear                +i, -i for odd i
    bipartite_linear      the same, between ranks of opposite parity
    ring                  +1, -1, always the first ones

where (m+1)^i, or 2^i, is at most n - 1. In the bipartite graphs even ranks are passive, and odd ranks initiate.

`order` selects one of two versions of the authors' code. "paper", which produced the published results, lists each
peer once, and passive ranks take -offset first, so that every round of a bipartite graph is a set of pairs.
"later" keeps repeated peers and uses the same order for all ranks, so that rounds of bipartite graphs are
one-directional shifts.

All raise TopologyError if an argument is out of range, or if the graph is not valid for gossip (`Topology`).

Differences from both versions: Logarithms are computed with integers, so 3^5 ranks have 5 rounds, not 4.
"""

import random
from collections.abc import Sequence
from math import isqrt

from dgc.core.arguments import checked
from dgc.gossip.topology import Peers, Topology, TopologyError, from_schedules

ORDERS = ("paper", "later")


@checked
def n_peer_exponential(size: int, peers: int = 1) -> Topology:
    """The n-peer exponential graph of SGP, in which each round uses one power of peers + 1.

    Args:
        peers (int): peers per round, m. With size = (m + 1)^p, the mean is exact after p rounds.

    Example:
        >>> n_peer_exponential(8).out_peers(0, 2)
        (4,)
    """
    if peers < 1:
        raise TopologyError(f"n_peer_exponential: peers must be at least 1, not {peers}")
    offsets = [j * power for power in powers(peers + 1, size - 1) for j in range(1, peers + 1)]
    schedules = [[(rank + offset) % size for offset in offsets] for rank in range(size)]
    cure = "peers=1 works for any number of ranks, as does peers=size-1, and peers=m for powers of m + 1"
    return from_schedules("n_peer_exponential", schedules, peers, cure=cure)


@checked
def exponential(size: int, peers: int = 1, order: str = "paper") -> Topology:
    """The exponential graph of SGP: offsets +2^i and -2^i in turn. peers: per round. order: "paper" or "later"."""
    return _two_directions("exponential", size, peers, order, powers(2, size - 1), False)


@checked
def bipartite_exponential(size: int, peers: int = 1, order: str = "paper") -> Topology:
    """Offsets +-1, then +-(1 + 2^i), for an even number of ranks. Arguments as in `exponential`."""
    offsets = [1, *(1 + power for power in powers(2, size - 1)[1:])]
    return _two_directions("bipartite_exponential", size, peers, order, offsets, True)


@checked
def linear(size: int, peers: int = 1, order: str = "paper") -> Topology:
    """The linear graph of SGP: offsets +i and -i for odd i. Arguments are as in `exponential`."""
    return _two_directions("linear", size, peers, order, range(1, size, 2), False)


@checked
def bipartite_linear(size: int, peers: int = 1, order: str = "paper") -> Topology:
    """The offsets of `linear`, between ranks of opposite parity. Arguments are as in `bipartite_exponential`."""
    return _two_directions("bipartite_linear", size, peers, order, range(1, size, 2), True)


@checked
def ring(size: int, peers: int = 1) -> Topology:
    """A ring, the same in all rounds. peers: 1 for a directed ring, 2 for both neighbours."""
    schedules = [list(dict.fromkeys([(rank + 1) % size, (rank - 1) % size])) for rank in range(size)]
    return from_schedules("ring", schedules, peers, dynamic=False)


@checked
def full(size: int) -> Topology:
    """Every rank sends to every other rank: the exact mean in one round."""
    return Topology("full", size, 1, lambda rank, _: (r for r in range(size) if r != rank))


@checked
def two_way_ring(size: int) -> Topology:
    """A ring in which each rank exchanges with both neighbours. With two ranks, there is one neighbour."""
    return ring(size, min(2, size - 1))


@checked
def static_exponential(size: int) -> Topology:
    """Rank r sends to r + 1, r + 2, r + 4, .. in every round (Ying et al. 2021, arXiv 2110.13363)."""
    offsets = powers(2, size - 1)
    return Topology("static_exponential", size, 1, lambda rank, _: ((rank + p) % size for p in offsets))


@checked
def star(size: int, hub: int = 0) -> Topology:
    """Every rank exchanges with the rank `hub`, and the hub with every rank."""
    if not 0 <= hub < size:
        raise TopologyError(f"star with {size} ranks: hub must be a rank from 0 to {size - 1}, not {hub}")
    return Topology("star", size, 1, lambda rank, _: (r for r in range(size) if r != rank and hub in (r, rank)))


@checked
def grid(size: int) -> Topology:
    """Neighbours in a rectangle, as square as the divisors of `size` allow. Opposite sides are not connected."""
    rows = next((r for r in range(isqrt(max(size, 0)), 0, -1) if size % r == 0), 1)
    columns = size // rows

    def out(rank: int, _: int) -> Peers:
        row, column = divmod(rank, columns)
        around = ((row, column + 1), (row, column - 1), (row + 1, column), (row - 1, column))
        return tuple(r * columns + c for r, c in around if 0 <= r < rows and 0 <= c < columns)

    return Topology("grid", size, 1, out)


@checked
def random_matching(size: int, seed: int = 0, rounds: int = 256) -> Topology:
    """Random pairs, new ones in each round until they repeat after `rounds`. The seed is the same on all ranks.

    If the number of ranks is odd, one rank has no peer in a round.
    """

    def out(rank: int, t: int) -> Peers:
        order = list(range(size))
        random.Random(f"{seed} {t}").shuffle(order)
        index = order.index(rank) ^ 1
        return (order[index],) if index < size else ()

    return Topology("random_matching", size, rounds, out, "Try another seed, or more rounds")


@checked
def bipartite_complete(size: int) -> Topology:
    """Every odd rank with every even one in turn: in round t the i-th odd with the (i + t)-th even rank.

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


@checked
def hierarchical(size: int, local_size: int) -> Topology:
    """In even rounds a machine's ranks, which are consecutive, exchange with each other. In odd rounds each sends
    to the rank with its local rank on one other machine, as in `n_peer_exponential` with one peer.
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
    """The edges of weight matrices. Use it together with `mixing_from_weights`, whose Args it has.

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


def powers(base: int, limit: int) -> list[int]:
    """1, base, base^2, .. up to `limit`."""
    result = [1] if limit >= 1 else []
    while result and result[-1] * base <= limit:
        result.append(result[-1] * base)
    return result


def _two_directions(
    name: str, size: int, peers: int, order: str, offsets: Sequence[int], bipartite: bool
) -> Topology:
    if order not in ORDERS:
        raise TopologyError(f"{name}: order must be one of {', '.join(ORDERS)}, not {order!r}")
    if bipartite and size % 2:
        raise TopologyError(f"{name} needs an even number of ranks, not {size}: odd ranks pair with even ranks")
    schedules = []
    for rank in range(size):
        passive = bipartite and rank % 2 == 0 and order == "paper"
        signs = (-1, 1) if passive else (1, -1)
        schedule = [(rank + sign * offset) % size for offset in offsets for sign in signs]
        schedules.append(list(dict.fromkeys(schedule)) if order == "paper" else schedule)
    return from_schedules(name, schedules, peers)
