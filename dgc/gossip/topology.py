"""Topologies of gossip: who sends to whom in each round, and which share of its value.

In round t rank r sends to `out_peers(r, t)`, in that order, and receives from `in_peers(r, t)`. Over one period,
every rank must be able to reach every other rank; otherwise there is no consensus.

The shares of a rank, its mixing weights, are a column of the round's mixing matrix P. Each column sums to one, so
the sum over ranks is preserved. If each row does as well, all ranks converge to the mean without push-sum weights.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

import torch
from jaxtyping import Float64
from torch import Tensor

from dgc.core.arguments import checked

Peers = tuple[int, ...]
Shares = dict[int, float]  # by receiver, including the rank itself

ROUNDING = 1e-9  # of a sum of shares


class TopologyError(ValueError):
    """A graph is not valid for gossip. The message names the fault and a graph that would work."""


@checked
@dataclass(frozen=True, eq=False)
class Topology:
    """A communication graph that repeats after `period` rounds. It is validated on construction.

    Args:
        name (str): name for error messages.
        size (int): number of ranks.
        period (int): number of rounds.
        out (callable): maps (rank, round) to the ranks that it sends to.
        cure (str): advice that is appended to error messages.

    Raises:
        TopologyError: if size or period is less than 1, a rank sends to itself, to one rank twice in a round or to
            a rank outside the world, or cannot reach all others.

    Example:
        >>> ring = Topology("ring", 4, 1, lambda rank, round: ((rank + 1) % 4,))
        >>> ring.out_peers(3, 0)
        (0,)
    """

    name: str
    size: int
    period: int
    out: Callable[[int, int], Iterable[int]]
    cure: str = ""
    _rounds: dict[int, tuple[Peers, ...]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.size < 1 or self.period < 1:
            raise TopologyError(f"{self.name}: {self.size} ranks, {self.period} rounds; both must be at least 1")
        ranks, rounds = range(self.size), range(self.period)
        for t in rounds:
            for rank in ranks:
                peers = self.out_peers(rank, t)
                if rank in peers:
                    raise self.error(f"rank {rank} sends to itself in round {t}")
                if len(set(peers)) < len(peers):
                    raise self.error(f"rank {rank} sends to one rank twice in round {t}: {list(peers)}")
        for peers_of, fault in ((self.out_peers, "never reaches"), (self.in_peers, "is never reached from")):
            edges = [{peer for t in rounds for peer in peers_of(rank, t)} for rank in ranks]
            if missing := sorted(set(ranks) - _reachable(edges)):
                raise self.error(f"rank 0 {fault} ranks {missing} in any number of rounds")

    def out_peers(self, rank: int, round: int) -> Peers:
        return self._round(round)[rank]

    def in_peers(self, rank: int, round: int) -> Peers:
        """In ascending order."""
        return self._round(round)[self.size + rank]

    def _round(self, round: int) -> tuple[Peers, ...]:
        """The out-peers of every rank, then the in-peers of every rank."""
        t = round % self.period
        if t not in self._rounds:
            out = [tuple(self.out(rank, t)) for rank in range(self.size)]
            senders: list[list[int]] = [[] for _ in range(self.size)]
            for rank, peers in enumerate(out):
                for peer in peers:
                    if not 0 <= peer < self.size:
                        raise self.error(f"rank {rank} sends to rank {peer} of {self.size} in round {t}")
                    senders[peer].append(rank)
            self._rounds[t] = (*out, *map(tuple, senders))
        return self._rounds[t]

    @property
    def is_symmetric(self) -> bool:
        """Whether in every round each rank receives from exactly the ranks that it sends to."""
        pairs = ((rank, t) for t in range(self.period) for rank in range(self.size))
        return all(sorted(self.out_peers(*pair)) == list(self.in_peers(*pair)) for pair in pairs)

    def error(self, fault: str) -> TopologyError:
        return TopologyError(f"{self.name} with {self.size} ranks: {fault}{'. ' if self.cure else ''}{self.cure}")


Graph = Callable[[int], Topology]  # returns the topology for a number of ranks
Mixing = Callable[[Topology, int, int], Shares]  # (topology, rank, round)


def _reachable(edges: Sequence[set[int]]) -> set[int]:
    """The ranks that rank 0 reaches along the edges."""
    reached, new = {0}, [0]
    while new:
        new = sorted({peer for rank in new for peer in edges[rank]} - reached)
        reached.update(new)
    return reached


def from_schedules(
    name: str, schedules: Sequence[Sequence[int]], peers: int, dynamic: bool = True, cure: str = ""
) -> Topology:
    """A graph in which each rank cycles through its schedule of peers, all of one length, some of them per round.

    dynamic: False uses the first entries in every round.
    """
    size = len(schedules)
    if size < 2:
        raise TopologyError(f"{name} needs at least 2 ranks, not {size}")
    length = len(schedules[0])
    if not 1 <= peers <= length:
        fault = f"peers must be from 1 to {length}, the length of a peer schedule, not {peers}. {cure}"
        raise TopologyError(f"{name} with {size} ranks: {fault}".rstrip())

    def out(rank: int, t: int) -> Peers:
        first = t * peers if dynamic else 0
        return tuple(schedules[rank][(first + j) % length] for j in range(peers))

    return Topology(name, size, length // gcd(length, peers) if dynamic else 1, out, cure)


def build_topology(graph: Graph, size: int) -> Topology:
    topology = graph(size)
    if not isinstance(topology, Topology):
        raise TopologyError(f"graph must return a Topology for {size} ranks, not {topology!r}")
    if topology.size != size:
        raise TopologyError(f"{topology.name} is for {topology.size} ranks, not for {size}")
    return topology


def bipartite_subgraph(topology: Topology) -> Topology:
    """The edges of a graph between an odd and an even rank, in both directions, if they connect all ranks.

    Odd ranks initiate an average and wait for the reply. Even ranks only reply. Ranks can therefore never wait for
    one another in a cycle.
    """

    def out(rank: int, t: int) -> Peers:
        peers = (*topology.out_peers(rank, t), *topology.in_peers(rank, t))
        return tuple(peer for peer in dict.fromkeys(peers) if (peer - rank) % 2)

    name = f"the odd-even pairs of {topology.name}"
    cure = "Take bipartite_complete, for any number of ranks, or bipartite_exponential, for an even number"
    return Topology(name, topology.size, topology.period, out, cure)


def peer_schedule(topology: Topology, rank: int) -> Peers:
    """The peers of a rank in the order of rounds, for one period."""
    return tuple(peer for t in range(topology.period) for peer in topology.out_peers(rank, t))


def uniform(topology: Topology, rank: int, round: int) -> Shares:
    """Equal shares: 1 / (1 + number of peers)."""
    peers = topology.out_peers(rank, round)
    return dict.fromkeys((rank, *peers), 1 / (1 + len(peers)))


def metropolis(topology: Topology, rank: int, round: int) -> Shares:
    """Metropolis weights (Xiao, Boyd, Kim 2007): the share of an edge is 1 / (1 + the larger degree of its ends).

    The rank keeps the rest. Rows sum to one on every symmetric graph, for any number of peers of each rank.
    Raises TopologyError if the graph is not symmetric at this rank and round.
    """
    peers = topology.out_peers(rank, round)
    if sorted(peers) != list(topology.in_peers(rank, round)):
        raise topology.error(f"metropolis needs a symmetric graph, but round {round} is not one at rank {rank}")
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
    """Validates mixing weights. doubly_stochastic: require rows to sum to one as well.

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
