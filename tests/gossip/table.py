"""Every topology at every number of ranks that it takes, for laws that hold for all."""

from collections.abc import Callable
from dataclasses import dataclass

from dgc import gossip
from dgc.gossip import Topology

SIZES = (2, 3, 4, 5, 6, 8, 9, 12, 17)


@dataclass(frozen=True)
class Row:
    name: str
    make: Callable[[int], Topology]
    takes: Callable[[int], bool] = lambda size: True
    doubly_stochastic: bool = True  # whether equal shares keep every rank's total too
    pairs: bool = False  # whether each rank receives from the ranks that it sends to


def even(size: int) -> bool:
    return size % 2 == 0


ROWS = [
    Row("one-peer exponential", gossip.n_peer_exponential),
    Row("two-peer exponential", lambda n: gossip.n_peer_exponential(n, 2), lambda n: n in (3, 9)),
    Row("all-peer exponential", lambda n: gossip.n_peer_exponential(n, n - 1), pairs=True),
    Row("exponential", gossip.exponential),
    Row("exponential, later", lambda n: gossip.exponential(n, order="later")),
    Row("exponential, two peers", lambda n: gossip.exponential(n, 2), lambda n: n in (5, 6, 9, 17)),
    Row("bipartite exponential", gossip.bipartite_exponential, even, pairs=True),
    Row("bipartite exponential, later", lambda n: gossip.bipartite_exponential(n, order="later"), even),
    Row("linear", gossip.linear),
    Row("linear, later", lambda n: gossip.linear(n, order="later")),
    Row("bipartite linear", gossip.bipartite_linear, even, pairs=True),
    Row("bipartite linear, later", lambda n: gossip.bipartite_linear(n, order="later"), even),
    Row("directed ring", gossip.ring),
    Row("ring", lambda n: gossip.ring(n, 2), lambda n: n > 2, pairs=True),
    Row("full", gossip.full, pairs=True),
    Row("static exponential", gossip.static_exponential),
    Row("star", gossip.star, doubly_stochastic=False, pairs=True),
    Row("star around the last", lambda n: gossip.star(n, n - 1), doubly_stochastic=False, pairs=True),
    Row("grid", gossip.grid, doubly_stochastic=False, pairs=True),
    Row("random matching", lambda n: gossip.random_matching(n, rounds=64), pairs=True),
    Row("machines of two", lambda n: gossip.hierarchical(n, 2), even),
    Row("machines of three", lambda n: gossip.hierarchical(n, 3), lambda n: n % 3 == 0),
]


def named(value: object) -> str:
    """A test's name for a row, a function or a number: the same in every process."""
    return str(getattr(value, "name", "" if callable(value) else value))
