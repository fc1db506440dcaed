"""Averages by gossip: sums are preserved and the mean is reached, exactly where theory predicts it."""

from itertools import product
from typing import Any

import pytest
import torch
from cases import at_every_size
from gossip.table import ROWS, SIZES

from dgc import gossip
from dgc.comm.lockstep import LockstepWorld
from dgc.gossip import metropolis, push_pull_average, push_sum_average, push_sum_round, uniform
from dgc.gossip.average import initial_state
from dgc.gossip.topology import mixing_matrix


def values(size: Any, dtype: Any = torch.float64, shape: Any = (5,)) -> Any:
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(size)]


def averaged(average: Any, own: Any, rounds: Any, topology: Any) -> Any:
    world = LockstepWorld(len(own))
    conversations = [average(x, rounds, rank, topology) for rank, x in enumerate(own)]
    return world.converse("average", conversations), world.meters


def check_rounds(own: Any, topologies: Any) -> Any:
    """Rounds of push-sum with one topology after another keep both sums. Returns the states after them."""
    states = [initial_state(x) for x in own]
    for t, topology in enumerate(topologies):
        rounds = [push_sum_round(s, r, t, topology) for r, s in enumerate(states)]
        states = LockstepWorld(len(own)).converse("round", rounds)
    torch.testing.assert_close(sum(s.x for s in states), sum(own), rtol=0, atol=1e-12)
    assert float(sum(s.w for s in states)) == pytest.approx(len(own), abs=1e-12)
    return states


def mixed(topology: Any, mixing: Any, rounds: Any) -> Any:
    """The product of the mixing matrices of the first `rounds` rounds."""
    P = torch.eye(topology.size, dtype=torch.float64)
    for t in range(rounds):
        P = mixing_matrix(topology, mixing, t) @ P
    return P


@at_every_size(ROWS, SIZES)
def test_a_round_preserves_sums_and_equals_the_mixing_matrix(row: Any, size: Any) -> None:
    topology, own = row.make(size), values(size, shape=(3,))
    states = check_rounds(own, [topology] * 4)
    P = mixed(topology, uniform, 4)
    torch.testing.assert_close(torch.stack([s.x for s in states]), P @ torch.stack(own))
    torch.testing.assert_close(torch.stack([s.w for s in states]), P.sum(1))


def long_product(topology: Any, mixing: Any) -> Any:
    """The product of about 100 rounds per rank."""
    periods = -(-100 * topology.size // topology.period)
    return torch.linalg.matrix_power(mixed(topology, mixing, topology.period), periods)


@at_every_size(ROWS, SIZES)
def test_every_graph_converges_to_the_mean(row: Any, size: Any) -> None:
    P = long_product(row.make(size), uniform)
    z = P / P.sum(1, keepdim=True)
    torch.testing.assert_close(z, torch.full_like(z, 1 / size), rtol=0, atol=1e-6)
    assert row.pairs or not row.doubly_stochastic or bool((P.sum(1) - 1).abs().max() < 1e-9)


@at_every_size([row for row in ROWS if row.pairs], SIZES)
def test_symmetric_graphs_converge_to_the_mean_without_weights(row: Any, size: Any) -> None:
    P = long_product(row.make(size), metropolis)
    torch.testing.assert_close(P, torch.full_like(P, 1 / size), rtol=0, atol=1e-6)


def test_push_pull_is_push_sum_where_weights_stay_one_and_both_take_no_integers() -> None:
    averages = (push_pull_average, push_sum_average)
    pull, push = (averaged(average, values(5), 7, gossip.ring(5, 2))[0][3] for average in averages)
    assert pull.allclose(push, rtol=0, atol=1e-12)
    for average, dtype in product(averages, (torch.int64, torch.bool)):
        with pytest.raises(ValueError, match=f"floating-point numbers, not {dtype}"):
            averaged(average, [torch.ones(3).to(dtype)] * 2, 2, gossip.full(2))
    _, meters = averaged(push_sum_average, values(8, torch.float32, (100,)), 3, gossip.exponential(8, 2))
    assert [meter.payload_bytes for meter in meters] == [3 * 2 * (24 + 400 + 8)] * 8


def test_one_peer_exponential_is_exact_after_log2_n_rounds_and_one_of_all_after_one() -> None:
    for power in range(1, 7):
        size = 2**power
        own = [torch.full((1,), float(rank), dtype=torch.float64) for rank in range(size)]
        reached, _ = averaged(push_sum_average, own, power, gossip.n_peer_exponential(size))
        assert all(float(z) == (size - 1) / 2 for z in reached), "sums of halves are exact"
        if power > 1:
            early, _ = averaged(push_sum_average, own, power - 1, gossip.n_peer_exponential(size))
            assert any(float(z) != (size - 1) / 2 for z in early)
    for size in (2, 3, 4, 5, 8):
        own = values(size)
        for topology in (gossip.full(size), gossip.n_peer_exponential(size, size - 1)):
            reached, _ = averaged(push_sum_average, own, 1, topology)
            for z in reached:
                torch.testing.assert_close(z, sum(own) / size, rtol=0, atol=1e-15)
                assert torch.equal(z, reached[0]), "added in one order"


def test_a_change_of_peers_at_a_boundary_of_rounds_keeps_the_mean() -> None:
    """Two peers, one peer, and so on: shares and edges change together."""
    own = values(9)
    for state in check_rounds(own, [gossip.n_peer_exponential(9, 2), gossip.n_peer_exponential(9)] * 30):
        torch.testing.assert_close(state.z, sum(own) / 9, rtol=0, atol=1e-3)


def test_dtypes_shapes_and_unchanged_inputs() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        own = values(4, dtype, shape=(3, 1, 2))
        kept = [x.clone() for x in own]
        reached, _ = averaged(push_sum_average, own, 2, gossip.n_peer_exponential(4))
        assert all(torch.equal(x, before) for x, before in zip(own, kept, strict=True))
        for z in reached:
            assert z.dtype == dtype and z.shape == (3, 1, 2)
            torch.testing.assert_close(z.float(), (sum(x.float() for x in own) / 4), rtol=2e-2, atol=2e-2)
    (single,) = averaged(push_sum_average, [torch.tensor(2.5)], 3, gossip.full(1))[0]
    assert float(single) == 2.5
