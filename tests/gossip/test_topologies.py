"""Topologies: laws for all of them, the published books entry by entry, and what is refused."""

import pytest
from gossip.table import CASES, IDS, named

from dgc import gossip
from dgc.gossip import Topology, TopologyError, check_mixing, metropolis, uniform
from dgc.gossip.topology.mixing import given, matrix


def books(topology, rank=0):
    """What one rank sends to, round by round."""
    return [topology.out_peers(rank, t) for t in range(topology.period)]


@pytest.mark.parametrize(("row", "size"), CASES, ids=IDS)
def test_who_is_sent_to_hears(row, size):
    topology = row.make(size)
    assert topology.size == size
    for t in range(2 * topology.period + 1):
        sent = {(rank, peer) for rank in range(size) for peer in topology.out_peers(rank, t)}
        heard = {(peer, rank) for rank in range(size) for peer in topology.in_peers(rank, t)}
        assert sent == heard
        assert topology.out_peers(0, t) == topology.out_peers(0, t + topology.period)
    assert topology.is_symmetric or not row.pairs


@pytest.mark.parametrize(("row", "size"), CASES, ids=IDS)
def test_equal_shares_keep_the_sum_over_ranks(row, size):
    check_mixing(row.make(size), uniform, doubly=row.doubly or size < 3)


@pytest.mark.parametrize(("row", "size"), CASES, ids=IDS)
def test_metropolis_weights_keep_every_total_on_symmetric_graphs(row, size):
    topology = row.make(size)
    if topology.is_symmetric:
        check_mixing(topology, metropolis, doubly=True)
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
def test_the_books_of_rank_0(topology, expected):
    assert books(topology()) == expected


def test_an_active_rank_takes_plus_first():
    assert books(gossip.bipartite_exponential(8), rank=1) == [(2,), (0,), (4,), (6,)]


@pytest.mark.parametrize(("row", "size"), [case for case in CASES if "bipartite" in case[0].name], ids=named)
def test_a_round_of_a_bipartite_graph_is_a_set_of_pairs_as_published(row, size):
    topology = row.make(size)
    for t in range(topology.period):
        mates = [topology.out_peers(rank, t)[0] for rank in range(size)]
        assert all((rank + mate) % 2 for rank, mate in enumerate(mates))
        paired = all(mates[mate] == rank for rank, mate in enumerate(mates))
        assert paired or "later" in row.name


def test_a_matching_changes_and_repeats_with_its_seed():
    first, again, other = (gossip.random_matching(9, seed) for seed in (1, 1, 2))
    assert books(first) == books(again) != books(other)
    assert len(set(books(first))) > 4
    assert () in books(first), "of nine ranks one rests"


def test_machines_mix_within_and_then_between():
    topology = gossip.hierarchical(8, 2)
    assert books(topology, rank=3) == [(2,), (5,), (2,), (7,)]


@pytest.mark.parametrize("size, peers", [(6, 2), (18, 2), (54, 2), (8, 3), (12, 3), (24, 3), (32, 3), (10, 4)])
def test_sizes_at_which_the_published_graph_fails_are_refused(size, peers):
    with pytest.raises(TopologyError, match=r"sends to (itself|one rank twice).*peers=1 works"):
        gossip.n_peer_exponential(size, peers)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gossip.bipartite_exponential(5), "even number of ranks, not 5"),
        (lambda: gossip.bipartite_linear(7), "even number"),
        (lambda: gossip.ring(1), "at least 2 ranks"),
        (lambda: gossip.ring(2, 2), "a rank has 1 to talk to, so peers must be from 1 to that, not 2"),
        (lambda: gossip.ring(5, 3), "a rank has 2 to talk to"),
        (lambda: gossip.n_peer_exponential(4, 0), "at least 1"),
        (lambda: gossip.exponential(8, 9), "must be from 1 to that, not 9"),
        (lambda: gossip.exponential(8, order="newest"), "paper, later"),
        (lambda: gossip.star(4, 4), "hub"),
        (lambda: gossip.hierarchical(6, 4), "do not fill"),
        (lambda: gossip.random_matching(64, rounds=1), "never reaches.*another seed"),
        (lambda: gossip.from_weights([]), "at least one matrix"),
        (lambda: gossip.from_weights([[[1.0, 0.0]]]), "rows and columns"),
        (lambda: Topology("mine", 3, 1, lambda rank, _: (rank,)), "mine with 3 ranks: rank 0 sends to itself"),
        (lambda: Topology("mine", 3, 1, lambda rank, _: (7,)), "rank 7 of 3"),
        (lambda: Topology("mine", 3, 1, lambda rank, _: (1, 1) if rank == 0 else ()), "twice"),
        (
            lambda: Topology("mine", 3, 1, lambda rank, _: (1,) if rank == 0 else (0,)),
            r"never reaches ranks \[2\]",
        ),
        (lambda: Topology("mine", 3, 1, lambda rank, _: (1, 2) if rank == 0 else ()), "never hears"),
        (lambda: Topology("mine", 0, 1, lambda rank, _: ()), "at least 1"),
    ],
)
def test_unusable_graphs_are_one_clear_error(make, words):
    with pytest.raises(TopologyError, match=f"(?s){words}"):
        make()


# --- a user's own weights --------------------------------------------------------------------------

P = [[0.5, 0.25, 0.0], [0.5, 0.5, 0.5], [0.0, 0.25, 0.5]]


def test_a_users_weights_are_a_graph_and_its_shares():
    topology = gossip.from_weights([P])
    assert [topology.out_peers(rank, 0) for rank in range(3)] == [(1,), (0, 2), (1,)]
    check_mixing(topology, given([P]))
    assert matrix(topology, given([P]), 5).tolist() == P
    with pytest.raises(TopologyError, match="rank 1 gets adds up to 1.5"):
        check_mixing(topology, given([P]), doubly=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ((0, 0, 0.6), "rank 0 gives away adds up to 1.1"),
        ((2, 1, -0.25), "negative"),
        ((1, 1, 0.0), "keeps nothing"),
    ],
)
def test_weights_that_lose_or_make_mass_are_refused(change, words):
    i, j, value = change
    changed = [list(row) for row in P]
    changed[i][j] = value
    topology = gossip.from_weights([changed])
    with pytest.raises(TopologyError, match=words):
        check_mixing(topology, given([changed]))
