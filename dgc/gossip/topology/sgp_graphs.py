"""The graphs of Stochastic Gradient Push (Assran, Loizou, Ballas, Rabbat: ICML 2019, arXiv 1811.10792).

With n ranks, rank r cycles through a schedule of peers r + offset (mod n), `peers` of them in each round:

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

Differences from both versions: Logarithms are computed with integers, so 3^5 ranks have 5 rounds, not 4. A graph
in which a rank would send to itself or to one rank twice is rejected.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from dgc.arguments import checked
from dgc.gossip.topology.topology import Topology, TopologyError, from_schedules

Order = Literal["paper", "later"]


def powers(base: int, limit: int) -> list[int]:
    """1, base, base^2, .. up to `limit`."""
    result = [1] if limit >= 1 else []
    while result and result[-1] * base <= limit:
        result.append(result[-1] * base)
    return result


@checked
def n_peer_exponential(size: int, peers: int = 1) -> Topology:
    """The n-peer exponential graph of SGP (arXiv 1811.10792), in which each round uses one power of peers + 1.

    Args:
        size (int): number of ranks, at least 2.
        peers (int): peers per round, m. With size = (m + 1)^p, the mean is exact after p rounds.

    Raises:
        TopologyError: if size or peers is out of range, or a rank would send to one rank twice.

    Example:
        >>> n_peer_exponential(8).out_peers(0, 2)
        (4,)
    """
    _check_size("n_peer_exponential", size)
    if peers < 1:
        raise TopologyError(f"n_peer_exponential: peers must be at least 1, not {peers}")
    offsets = [j * power for power in powers(peers + 1, size - 1) for j in range(1, peers + 1)]
    schedules = [[(rank + offset) % size for offset in offsets] for rank in range(size)]
    cure = (
        "peers=1 works for any number of ranks, peers=m for powers of m + 1, and peers=size-1 always, in one round"
    )
    return from_schedules("n_peer_exponential", schedules, peers, cure=cure)


@checked
def exponential(size: int, peers: int = 1, order: str = "paper") -> Topology:
    """The exponential graph of SGP (arXiv 1811.10792): offsets +2^i and -2^i in turn.

    Args:
        size (int): number of ranks, at least 2.
        peers (int): peers per round.
        order (str): "paper" or "later"; see the module's description.

    Raises:
        TopologyError: if an argument is out of range, or a rank would send to one rank twice.
    """
    return _two_directions("exponential", size, peers, order, powers(2, size - 1), False)


@checked
def bipartite_exponential(size: int, peers: int = 1, order: str = "paper") -> Topology:
    """The bipartite exponential graph of SGP (arXiv 1811.10792): offsets +-1, then +-(1 + 2^i).

    Args:
        size (int): number of ranks, even.
        peers, order: see `exponential`.

    Raises:
        TopologyError: if an argument is out of range, or a rank would send to one rank twice.
    """
    offsets = [1, *(1 + power for power in powers(2, size - 1)[1:])]
    return _two_directions("bipartite_exponential", size, peers, order, offsets, True)


@checked
def linear(size: int, peers: int = 1, order: str = "paper") -> Topology:
    """The linear graph of SGP (arXiv 1811.10792): offsets +i and -i for odd i.

    Args and errors are those of `exponential`.
    """
    return _two_directions("linear", size, peers, order, range(1, size, 2), False)


@checked
def bipartite_linear(size: int, peers: int = 1, order: str = "paper") -> Topology:
    """The bipartite linear graph: the offsets of `linear`, between ranks of opposite parity.

    Args and errors are those of `bipartite_exponential`.
    """
    return _two_directions("bipartite_linear", size, peers, order, range(1, size, 2), True)


@checked
def ring(size: int, peers: int = 1) -> Topology:
    """A ring, the same in all rounds.

    Args:
        size (int): number of ranks, at least 2.
        peers (int): 1 for a directed ring, 2 for both neighbours.

    Raises:
        TopologyError: if size or peers is out of range.
    """
    _check_size("ring", size)
    schedules = [_unique([(rank + 1) % size, (rank - 1) % size]) for rank in range(size)]
    return from_schedules("ring", schedules, peers, dynamic=False)


def _two_directions(
    name: str, size: int, peers: int, order: str, offsets: Sequence[int], bipartite: bool
) -> Topology:
    """Every offset in both directions."""
    _check_size(name, size)
    if order not in get_args(Order):
        raise TopologyError(f"{name}: order must be one of {', '.join(get_args(Order))}, not {order!r}")
    if bipartite and size % 2:
        raise TopologyError(f"{name} needs an even number of ranks, not {size}: odd ranks pair with even ranks")
    schedules = []
    for rank in range(size):
        passive = bipartite and rank % 2 == 0 and order == "paper"
        signs = (-1, 1) if passive else (1, -1)
        schedule = [(rank + sign * offset) % size for offset in offsets for sign in signs]
        schedules.append(_unique(schedule) if order == "paper" else schedule)
    return from_schedules(name, schedules, peers)


def _unique(peers: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(peers))


def _check_size(name: str, size: int) -> None:
    if size < 2:
        raise TopologyError(f"{name} needs at least 2 ranks, not {size}")
