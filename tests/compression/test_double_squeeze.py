"""DoubleSqueeze: both directions by hand, and residual that moves to other ranks and buckets."""

from typing import Any

import pytest
import torch
from cases import case
from compression.ranks import Ranks, normal
from states import assert_equal

from dgc.compression import DoubleSqueezeCompressor
from dgc.compression.double_squeeze import divide_into_chunks
from dgc.engine.redistribute import redistribute
from dgc.paper.onebit_adam import compress
from dgc.testing import flat, gradients

pytestmark = pytest.mark.usefixtures("no_type_checks")
SHAPES = ((7, 20), (33,), (0, 4), (5,), (2, 3, 8))
N = 140 + 33 + 5 + 48


def ranks_of(size: Any, **options: Any) -> Any:
    return Ranks(size, DoubleSqueezeCompressor, SHAPES, **options)


def test_both_directions_by_hand() -> None:
    """In plain torch, with one server error of all chunks."""
    for size in (1, 2, 3, 5, 9):
        ranks = ranks_of(size)
        pieces = divide_into_chunks(ranks.buckets[0], size, 0).bounds.diff().tolist()
        errors, served = [torch.zeros(N)] * size, torch.zeros(N)
        for step in range(6):
            own = [normal(N, 100 * step + rank) * (rank + 1) for rank in range(size)]
            v = [g + e for g, e in zip(own, errors, strict=True)]
            errors = [x - compress(x, pieces) for x in v]
            s = sum((compress(x, pieces) for x in v), served)
            served = s - compress(s, pieces)
            with case(size, step):
                torch.testing.assert_close(ranks.step(own), compress(s, pieces) / size, rtol=1e-5, atol=1e-6)
        together = sum(ranks.errors())
        torch.testing.assert_close(together, sum(errors) + served, rtol=1e-4, atol=1e-4 * size)


def test_chunks_are_whole_words_and_may_be_empty() -> None:
    bucket = ranks_of(1).buckets[0]
    for size, edges in ((2, [0, 128, 226]), (3, [0, 96, 192, 226]), (9, [*range(0, 225, 32), 226, 226])):
        chunks = divide_into_chunks(bucket, size, size - 1)
        assert chunks.edges == edges and chunks.own[-1] == edges[-1] - edges[-2]
        assert set(edges) | {0, 140, 173, 178} == set(chunks.bounds.tolist())


def test_a_dropped_step_leaves_the_errors_of_both_directions() -> None:
    ranks, before = state_of(3)
    own = [normal(N, 90 + rank) for rank in range(3)]
    own[1][5] = float("inf")
    assert all("p0 on rank 1 has NaN" in str(result.nonfinite) for result in ranks.exchange(own)[0])
    for rank, (states, bucket) in enumerate(zip(ranks.states, ranks.buckets, strict=True)):
        states.rollback(bucket)
        new, old = states.state_dict(), before[rank]
        assert_equal(new["server_errors"], old["server_errors"])
        returned = flat(list(old["errors"].values())) + own[rank].masked_fill(own[rank].isinf(), 0.0)
        assert torch.equal(flat(list(new["errors"].values())), returned)


def state_of(size: Any) -> Any:
    ranks = ranks_of(size)
    for step in range(4):
        ranks.step([flat(gradients(rank, step, SHAPES)) for rank in range(size)])
    return ranks, [c.state_dict() for c in ranks.states]


@pytest.mark.parametrize("new_size", [1, 2, 3, 4, 6])
def test_another_number_of_ranks_keeps_the_mean_of_the_errors(new_size: Any) -> None:
    """What a server keeps of chunks that are no longer its own, it sends as a worker."""
    ranks, states = state_of(3)
    expected = torch.stack(ranks.errors()).double().mean(0)
    others = ranks_of(new_size)
    for compressor, state in zip(others.states, redistribute(states, new_size), strict=True):
        compressor.load_state_dict(state)
    torch.testing.assert_close(torch.stack(others.errors()).double().mean(0), expected, rtol=0, atol=1e-6)
    for rank, compressor in enumerate(others.states):
        served = flat(list(compressor.state_dict()["server_errors"].values()))
        edges = divide_into_chunks(others.buckets[0], new_size, rank).edges
        served[slice(*edges[rank : rank + 2])] = 0.0
        assert not served.any()


def test_other_buckets_keep_the_errors() -> None:
    """Chunks lie elsewhere then. A state of another compressor is refused."""
    ranks, states = state_of(2)
    names = [f"p{i}" for i in range(len(SHAPES))]
    other = Ranks(2, DoubleSqueezeCompressor, dict(reversed(list(zip(names, SHAPES, strict=True)))))
    for compressor, state in zip(other.states, states, strict=True):
        compressor.load_state_dict(state)
    for before, after, bucket in zip(ranks.errors(), other.errors(), other.buckets, strict=True):
        parts = {s.name: s.of(after).reshape(-1) for s in bucket.segments}
        torch.testing.assert_close(flat([parts[name] for name in names]), before, rtol=0, atol=1e-6)
    state, compressor = states[0], other.states[0]
    for wrong in ({**state, "more": {"p0": 1}}, {k: state[k] for k in ("errors", "steps")}):
        with pytest.raises(ValueError, match="state of another compressor"):
            compressor.load_state_dict(wrong)
    state["server_errors"].pop("p0")
    with pytest.raises(ValueError, match=r"server_errors of another model: missing \['p0'\]"):
        compressor.load_state_dict(state)
