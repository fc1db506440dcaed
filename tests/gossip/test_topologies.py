"""Topologies: laws for all of them, the published peer schedules entry by entry, and refused arguments."""

from typing import Any

import pytest
from cases import at_every_size
from gossip.table import ROWS, SIZES, named
from refusals import check_refusals

from dgc import gossip
from dgc.gossip import Topology, TopologyError, check_mixing, metropolis, uniform
from dgc.gossip.topology import mixing_from_weights, mixing_matrix


def schedule(topology: Any, rank: int = 0) -> Any:
    """The peers that a rank sends to, by round."""
    return [topology.out_peers(rank, t) for t in range(topology.period)]


@at_every_size(ROWS, SIZES)
def test_in_peers_mirror_out_peers(row: Any, size: Any) -> None:
    topology = row.make(size)
    assert topology.size == size
    for t in range(2 * topology.period + 1):
        sent = {(rank, peer) for rank in range(size) for peer in topology.out_peers(rank, t)}
        received = {(peer, rank) for rank in range(size) for peer in topology.in_peers(rank, t)}
        assert sent == received
        assert topology.out_peers(0, t) == topology.out_peers(0, t + topology.period)
    assert topology.is_symmetric or not row.pairs


@at_every_size(ROWS, SIZES)
def test_equal_shares_keep_the_sum_over_ranks_and_metropolis_weights_every_total(row: Any, size: Any) -> None:
    topology = row.make(size)
    check_mixing(topology, uniform, doubly_stochastic=row.doubly_stochastic or size < 3)
    if topology.is_symmetric:
        check_mixing(topology, metropolis, doubly_stochastic=True)
    else:
        with pytest.raises(TopologyError, match="symmetric"):
            check_mixing(topology, metropolis)


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        (lambda: gossip.n_peer_exponential(8), [(1,), (2,), (4,)]),
        (lambda: gossip.n_peer_exponential(9), [(1,), (2,), (4,), (8,)]),
        (lambda: gossip.n_peer_exponential(9, 2), [(1, 2), (3, 6)]),
        (lambda: gossip.n_peer_exponential(243, 2), [(3**i, 2 * 3**i) for i in range(5)]),
        (lambda: gossip.exponential(8), [(1,), (7,), (2,), (6,), (4,)]),
        (lambda: gossip.exponential(8, order="later"), [(1,), (7,), (2,), (6,), (4,), (4,)]),
        (lambda: gossip.linear(6), [(1,), (5,), (3,)]),
        (lambda: gossip.linear(6, order="later"), [(1,), (5,), (3,), (3,), (5,), (1,)]),
        (lambda: gossip.ring(5), [(1,)]),
        (lambda: gossip.ring(5, 2), [(1, 4)]),
        (lambda: gossip.bipartite_exponential(8, order="later"), [(1,), (7,), (3,), (5,), (5,), (3,)]),
        (lambda: gossip.bipartite_exponential(8), [(7,), (1,), (5,), (3,)]),
        (lambda: gossip.bipartite_linear(4), [(3,), (1,)]),
        (lambda: gossip.static_exponential(6), [(1, 2, 4)]),
    ],
    ids=named,
)
def test_the_schedules_of_rank_0(topology: Any, expected: Any) -> None:
    assert schedule(topology()) == expected


@at_every_size([row for row in ROWS if "bipartite" in row.name], SIZES)
def test_a_round_of_a_bipartite_graph_is_a_set_of_pairs_as_published(row: Any, size: Any) -> None:
    topology = row.make(size)
    for t in range(topology.period):
        mates = [topology.out_peers(rank, t)[0] for rank in range(size)]
        assert all((rank + mate) % 2 for rank, mate in enumerate(mates))
        paired = all(mates[mate] == rank for rank, mate in enumerate(mates))
        assert paired or "later" in row.name


def test_a_matching_changes_and_repeats_with_its_seed_and_the_schedules_of_other_ranks() -> None:
    """An active rank takes plus first. Machines mix within and then between."""
    first, again, other = (gossip.random_matching(9, seed) for seed in (1, 1, 2))
    assert schedule(first) == schedule(again) != schedule(other)
    assert len(set(schedule(first))) > 4
    assert () in schedule(first), "one of nine ranks has no peer"
    assert schedule(gossip.bipartite_exponential(8), rank=1) == [(2,), (0,), (4,), (6,)]
    assert schedule(gossip.hierarchical(8, 2), rank=3) == [(2,), (5,), (2,), (7,)]


def mine(size: int, peers: Any) -> Topology:
    return Topology("mine", size, 1, lambda rank, _: peers(rank))


def test_unusable_graphs_are_one_clear_error() -> None:
    for size, peers in ((6, 2), (18, 2), (54, 2), (8, 3), (12, 3), (24, 3), (32, 3), (10, 4)):
        with pytest.raises(TopologyError, match=r"sends to (itself|one rank twice).*peers=1 works"):
            gossip.n_peer_exponential(size, peers)
    check_refusals(
        (lambda: gossip.bipartite_exponential(5), "even number of ranks, not 5"),
        (lambda: gossip.bipartite_linear(7), "even number"),
        (lambda: gossip.ring(1), "at least 2 ranks"),
        (lambda: gossip.ring(2, 2), "peers must be from 1 to 1, the length of a peer schedule, not 2"),
        (lambda: gossip.ring(5, 3), "peers must be from 1 to 2"),
        (lambda: gossip.n_peer_exponential(4, 0), "at least 1"),
        (lambda: gossip.exponential(8, 9), "must be from 1 to 5, the length of a peer schedule, not 9"),
        (lambda: gossip.exponential(8, order="newest"), "paper, later"),
        (lambda: gossip.star(4, 4), "hub"),
        (lambda: gossip.hierarchical(6, 4), "local_size must divide"),
        (lambda: gossip.random_matching(64, rounds=1), "(?s)never reaches.*another seed"),
        (lambda: gossip.from_weights([]), "at least one matrix"),
        (lambda: gossip.from_weights([[[1.0, 0.0]]]), "rows and columns"),
        (lambda: mine(3, lambda rank: (rank,)), "mine with 3 ranks: rank 0 sends to itself"),
        (lambda: mine(3, lambda rank: (7,)), "rank 7 of 3"),
        (lambda: mine(3, lambda rank: (1, 1) if rank == 0 else ()), "twice"),
        (lambda: mine(3, lambda rank: (1,) if rank == 0 else (0,)), r"never reaches ranks \[2\]"),
        (lambda: mine(3, lambda rank: (1, 2) if rank == 0 else ()), "rank 0 is never reached from"),
        (lambda: mine(0, lambda rank: ()), "at least 1"),
        kind=TopologyError,
    )


def test_a_users_weights_are_a_graph_and_its_shares_and_preserve_the_sum() -> None:
    P = [[0.5, 0.25, 0.0], [0.5, 0.5, 0.5], [0.0, 0.25, 0.5]]
    topology, mixing = gossip.from_weights([P]), mixing_from_weights([P])
    assert [topology.out_peers(rank, 0) for rank in range(3)] == [(1,), (0, 2), (1,)]
    check_mixing(topology, mixing)
    assert mixing_matrix(topology, mixing, 5).tolist() == P
    with pytest.raises(TopologyError, match="the shares that rank 1 receives sum to 1.5"):
        check_mixing(topology, mixing, doubly_stochastic=True)
    for i, j, value, words in (
        (0, 0, 0.6, "the shares that rank 0 sends sum to 1.1"),
        (2, 1, -0.25, "negative"),
        (1, 1, 0.0, "or keeps nothing"),
    ):
        changed = [list(row) for row in P]
        changed[i][j] = value
        with pytest.raises(TopologyError, match=words):
            check_mixing(gossip.from_weights([changed]), mixing_from_weights([changed]))
