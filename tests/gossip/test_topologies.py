"""Topologies and averages over them: laws for all, the published schedules, exact means, refused arguments."""

from typing import Any

import pytest
import torch
from cases import at_every_size
from gossip.table import ROWS, SIZES
from refusals import check_refusals

from dgc import gossip
from dgc.comm.lockstep import LockstepWorld
from dgc.gossip import Topology, TopologyError, check_mixing, metropolis, uniform
from dgc.gossip.average import initial_state
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
        assert sent == {(peer, rank) for rank in range(size) for peer in topology.in_peers(rank, t)}
        assert topology.out_peers(0, t) == topology.out_peers(0, t + topology.period)
    assert topology.is_symmetric or not row.pairs


@at_every_size(ROWS, SIZES)
def test_equal_shares_keep_the_sum_over_ranks(row: Any, size: Any) -> None:
    check_mixing(row.make(size), uniform, doubly_stochastic=row.doubly_stochastic or size < 3)


@at_every_size(ROWS, SIZES)
def test_metropolis_weights_of_symmetric_graphs_keep_every_rank_s_total(row: Any, size: Any) -> None:
    topology = row.make(size)
    if topology.is_symmetric:
        check_mixing(topology, metropolis, doubly_stochastic=True)
    else:
        with pytest.raises(TopologyError, match="symmetric"):
            check_mixing(topology, metropolis)


@at_every_size(ROWS, SIZES)
def test_rounds_of_push_sum_are_products_with_the_mixing_matrices(row: Any, size: Any) -> None:
    graph, own = row.make(size), values(size, shape=(3,))
    states = [initial_state(x) for x in own]
    for t in range(4):
        rounds = [gossip.push_sum_round(state, rank, t, graph) for rank, state in enumerate(states)]
        states = LockstepWorld(size).converse("round", rounds)
    x, w, P = torch.stack([s.x for s in states]), torch.stack([s.w for s in states]), mixed(graph, uniform, 4)
    torch.testing.assert_close(x, P @ torch.stack(own))
    torch.testing.assert_close(w, P.sum(1))
    torch.testing.assert_close(x.sum(0), sum(own), rtol=0, atol=1e-12)
    assert float(w.sum()) == pytest.approx(size, abs=1e-12)


@at_every_size(ROWS, SIZES)
def test_many_rounds_converge_to_the_mean(row: Any, size: Any) -> None:
    P = long_product(row.make(size), uniform)
    mean = torch.full_like(P, 1 / size)
    torch.testing.assert_close(P / P.sum(1, keepdim=True), mean, rtol=0, atol=1e-6)
    assert row.pairs or not row.doubly_stochastic or bool((P.sum(1) - 1).abs().max() < 1e-9)


@at_every_size([row for row in ROWS if row.pairs], SIZES)
def test_many_rounds_with_metropolis_weights_converge_to_the_mean(row: Any, size: Any) -> None:
    P = long_product(row.make(size), metropolis)
    torch.testing.assert_close(P, torch.full_like(P, 1 / size), rtol=0, atol=1e-6)


SCHEDULES: list[tuple[Topology, int, list[tuple[int, ...]]]] = [
    (gossip.n_peer_exponential(8), 0, [(1,), (2,), (4,)]),
    (gossip.n_peer_exponential(9), 0, [(1,), (2,), (4,), (8,)]),
    (gossip.n_peer_exponential(9, 2), 0, [(1, 2), (3, 6)]),
    (gossip.n_peer_exponential(243, 2), 0, [(3**i, 2 * 3**i) for i in range(5)]),
    (gossip.exponential(8), 0, [(1,), (7,), (2,), (6,), (4,)]),
    (gossip.exponential(8, order="later"), 0, [(1,), (7,), (2,), (6,), (4,), (4,)]),
    (gossip.linear(6), 0, [(1,), (5,), (3,)]),
    (gossip.linear(6, order="later"), 0, [(1,), (5,), (3,), (3,), (5,), (1,)]),
    (gossip.ring(5), 0, [(1,)]),
    (gossip.ring(5, 2), 0, [(1, 4)]),
    (gossip.bipartite_exponential(8, order="later"), 0, [(1,), (7,), (3,), (5,), (5,), (3,)]),
    (gossip.bipartite_exponential(8), 0, [(7,), (1,), (5,), (3,)]),
    (gossip.bipartite_exponential(8), 1, [(2,), (0,), (4,), (6,)]),  # an active rank takes plus first
    (gossip.bipartite_linear(4), 0, [(3,), (1,)]),
    (gossip.static_exponential(6), 0, [(1, 2, 4)]),
    (gossip.hierarchical(8, 2), 3, [(2,), (5,), (2,), (7,)]),  # within the machine, then between machines
]


@pytest.mark.parametrize(
    ("topology", "rank", "expected"), SCHEDULES, ids=lambda of: of.name if isinstance(of, Topology) else ""
)
def test_schedules_are_as_published(topology: Any, rank: int, expected: Any) -> None:
    assert schedule(topology, rank) == expected


def test_a_random_matching_repeats_with_its_seed() -> None:
    first, again, other = (gossip.random_matching(9, seed) for seed in (1, 1, 2))
    assert schedule(first) == schedule(again) != schedule(other)


def test_a_random_matching_has_other_pairs_in_other_rounds() -> None:
    rounds = schedule(gossip.random_matching(9, 1))
    assert len(set(rounds)) > 4
    assert () in rounds, "one of nine ranks has no peer"


@at_every_size([row for row in ROWS if "bipartite" in row.name], SIZES)
def test_a_round_of_a_bipartite_graph_is_a_set_of_pairs_as_published(row: Any, size: Any) -> None:
    topology = row.make(size)
    for t in range(topology.period):
        mates = [topology.out_peers(rank, t)[0] for rank in range(size)]
        assert all((rank + mate) % 2 for rank, mate in enumerate(mates))
        assert "later" in row.name or all(mates[mate] == rank for rank, mate in enumerate(mates))


def test_unusable_graphs_are_one_clear_error() -> None:
    for size, peers in ((6, 2), (18, 2), (54, 2), (8, 3), (12, 3), (24, 3), (32, 3), (10, 4)):
        with pytest.raises(TopologyError, match=r"sends to (itself|one rank twice).*peers=1 works"):
            gossip.n_peer_exponential(size, peers)

    def mine(size: int, peers: Any) -> Any:
        return lambda: Topology("mine", size, 1, lambda rank, _: peers(rank))

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
        (mine(3, lambda rank: (rank,)), "mine with 3 ranks: rank 0 sends to itself"),
        (mine(3, lambda rank: (7,)), "rank 7 of 3"),
        (mine(3, lambda rank: (1, 1) if rank == 0 else ()), "twice"),
        (mine(3, lambda rank: (1,) if rank == 0 else (0,)), r"never reaches ranks \[2\]"),
        (mine(3, lambda rank: (1, 2) if rank == 0 else ()), "rank 0 is never reached from"),
        (mine(0, lambda rank: ()), "at least 1"),
        kind=TopologyError,
    )


P_OF_USER = [[0.5, 0.25, 0.0], [0.5, 0.5, 0.5], [0.0, 0.25, 0.5]]


def test_a_users_weights_are_a_graph() -> None:
    topology = gossip.from_weights([P_OF_USER])
    assert [topology.out_peers(rank, 0) for rank in range(3)] == [(1,), (0, 2), (1,)]


def test_a_users_weights_are_the_shares() -> None:
    topology, mixing = gossip.from_weights([P_OF_USER]), mixing_from_weights([P_OF_USER])
    check_mixing(topology, mixing)
    assert mixing_matrix(topology, mixing, 5).tolist() == P_OF_USER


def test_a_users_weights_whose_rows_do_not_sum_to_one_are_not_doubly_stochastic() -> None:
    topology, mixing = gossip.from_weights([P_OF_USER]), mixing_from_weights([P_OF_USER])
    with pytest.raises(TopologyError, match="the shares that rank 1 receives sum to 1.5"):
        check_mixing(topology, mixing, doubly_stochastic=True)


@pytest.mark.parametrize(
    ("i", "j", "value", "words"),
    [
        (0, 0, 0.6, "the shares that rank 0 sends sum to 1.1"),
        (2, 1, -0.25, "negative"),
        (1, 1, 0.0, "or keeps nothing"),
    ],
)
def test_a_users_weights_that_do_not_preserve_the_sum_are_refused(
    i: int, j: int, value: float, words: str
) -> None:
    changed = [list(row) for row in P_OF_USER]
    changed[i][j] = value
    with pytest.raises(TopologyError, match=words):
        check_mixing(gossip.from_weights([changed]), mixing_from_weights([changed]))


def values(size: Any, dtype: Any = torch.float64, shape: Any = (5,)) -> Any:
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(size)]


def averaged(average: Any, own: Any, rounds: Any, topology: Any) -> Any:
    world = LockstepWorld(len(own))
    conversations = [average(x, rounds, rank, topology) for rank, x in enumerate(own)]
    return world.converse("average", conversations), world.meters


def mixed(topology: Any, mixing: Any, rounds: Any) -> Any:
    """The product of the mixing matrices of the first `rounds` rounds."""
    P = torch.eye(topology.size, dtype=torch.float64)
    for t in range(rounds):
        P = mixing_matrix(topology, mixing, t) @ P
    return P


def long_product(topology: Any, mixing: Any) -> Any:
    """The product of about 100 rounds per rank."""
    periods = -(-100 * topology.size // topology.period)
    return torch.linalg.matrix_power(mixed(topology, mixing, topology.period), periods)


AVERAGES = (gossip.push_pull_average, gossip.push_sum_average)


def test_push_pull_averages_as_push_sum_on_a_symmetric_graph() -> None:
    pull, push = (averaged(average, values(5), 7, gossip.ring(5, 2))[0][3] for average in AVERAGES)
    assert pull.allclose(push, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize("average", AVERAGES)
def test_an_average_of_integers_is_refused(average: Any, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"floating-point numbers, not {dtype}"):
        averaged(average, [torch.ones(3).to(dtype)] * 2, 2, gossip.full(2))


def test_an_average_sends_the_values_with_a_weight_to_each_peer() -> None:
    _, meters = averaged(gossip.push_sum_average, values(8, torch.float32, (100,)), 3, gossip.exponential(8, 2))
    assert [meter.payload_bytes for meter in meters] == [3 * 2 * (24 + 400 + 8)] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_average_has_the_type_of_the_values(dtype: torch.dtype) -> None:
    own = values(4, dtype, shape=(3, 1, 2))
    reached, _ = averaged(gossip.push_sum_average, own, 2, gossip.n_peer_exponential(4))
    for z in reached:
        assert z.dtype == dtype and z.shape == (3, 1, 2)
        torch.testing.assert_close(z.float(), (sum(x.float() for x in own) / 4), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_average_leaves_the_values_as_they_are(dtype: torch.dtype) -> None:
    own = values(4, dtype, shape=(3, 1, 2))
    kept = [x.clone() for x in own]
    averaged(gossip.push_sum_average, own, 2, gossip.n_peer_exponential(4))
    assert all(torch.equal(x, before) for x, before in zip(own, kept, strict=True))


def test_one_rank_has_its_own_value_as_average() -> None:
    (single,) = averaged(gossip.push_sum_average, [torch.tensor(2.5)], 3, gossip.full(1))[0]
    assert float(single) == 2.5


@pytest.mark.parametrize("power", range(1, 7))
def test_averages_of_a_power_of_two_of_ranks_are_exact_after_as_many_rounds(power: int) -> None:
    size = 2**power
    given = [torch.full((1,), float(rank), dtype=torch.float64) for rank in range(size)]
    reached, _ = averaged(gossip.push_sum_average, given, power, gossip.n_peer_exponential(size))
    assert all(float(z) == (size - 1) / 2 for z in reached), "sums of halves are exact"
    if power > 1:
        early, _ = averaged(gossip.push_sum_average, given, power - 1, gossip.n_peer_exponential(size))
        assert any(float(z) != (size - 1) / 2 for z in early)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("graph", [gossip.full, lambda size: gossip.n_peer_exponential(size, size - 1)])
def test_a_round_with_all_peers_is_exact(graph: Any, size: int) -> None:
    given = values(size)
    reached, _ = averaged(gossip.push_sum_average, given, 1, graph(size))
    for z in reached:
        torch.testing.assert_close(z, sum(given) / size, rtol=0, atol=1e-15)
        assert torch.equal(z, reached[0]), "added in one order"
