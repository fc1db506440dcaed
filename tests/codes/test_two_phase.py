"""Compression in both directions: by hand, bytes on the wire, and errors that move to other ranks and buckets."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from cases import case
from core.ranks import Ranks, normal
from states import redistributed

from dgc.codes.chunked_signs import divide_into_chunks
from dgc.compression import TwoPhaseCompressor
from dgc.contrib import DoubleSqueezeCompressor
from dgc.paper.onebit_adam import compress
from dgc.testing import Fleet, flat, gradients

pytestmark = pytest.mark.usefixtures("no_type_checks")
SMALL, N = ((7, 20), (33,), (0, 4), (5,), (2, 3, 8)), 226
SHAPES = ((70, 20), (33,), (0, 4), (5,), (2, 30, 8))
TWO_PHASES = [partial(TwoPhaseCompressor, 8, 64), partial(TwoPhaseCompressor, 4, 64, hadamard=True)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_double_squeeze_is_what_plain_torch_computes_with_one_server_error(size: int) -> None:
    ranks = Ranks(size, DoubleSqueezeCompressor, SMALL)
    pieces = divide_into_chunks(ranks.buckets[0], size, 0).bounds.diff().tolist()
    errors, chunk_errors = [torch.zeros(N)] * size, torch.zeros(N)
    for step in range(6):
        own = [normal(N, seed=100 * step + rank) * (rank + 1) for rank in range(size)]
        v = [g + e for g, e in zip(own, errors, strict=True)]
        errors = [x - compress(x, pieces) for x in v]
        s = sum((compress(x, pieces) for x in v), chunk_errors)
        chunk_errors = s - compress(s, pieces)
        with case("step", step):
            torch.testing.assert_close(ranks.step(own), compress(s, pieces) / size, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sum(ranks.errors()), sum(errors) + chunk_errors, rtol=1e-4, atol=1e-4 * size)


@pytest.mark.parametrize(
    ("size", "edges"),
    [(2, [0, 128, 226]), (3, [0, 96, 192, 226]), (9, [*range(0, 225, 32), 226, 226])],
    ids=["2", "3", "9, of which the last is empty"],
)
def test_chunks_of_double_squeeze_are_whole_words(size: int, edges: list[int]) -> None:
    bucket = Ranks(1, DoubleSqueezeCompressor, SMALL).buckets[0]
    chunks = divide_into_chunks(bucket, size, size - 1)
    assert chunks.edges == edges and chunks.own[-1] == edges[-1] - edges[-2]
    assert set(edges) | {0, 140, 173, 178} == set(chunks.bounds.tolist())


def trained(make: Any, size: int) -> Any:
    ranks = Ranks(size, make, SHAPES)
    for step in range(4):
        ranks.step([flat(gradients(rank, step, SHAPES)) for rank in range(size)])
    return ranks


def loaded(make: Any, shapes: Any, states: Any) -> Any:
    ranks = Ranks(len(states), make, shapes)
    for own, state in zip(ranks.states, states, strict=True):
        own.load_state_dict(state)
    return ranks


TWO_DIRECTIONS = {
    "double squeeze": DoubleSqueezeCompressor,
    "8 bits": TWO_PHASES[0],
    "4 bits, turned": TWO_PHASES[1],
}
with_two_directions = pytest.mark.parametrize("make", TWO_DIRECTIONS.values(), ids=TWO_DIRECTIONS)
SIZES = (1, 2, 3, 4, 6)


@pytest.mark.parametrize("size", SIZES)
@with_two_directions
def test_another_number_of_ranks_keeps_the_mean_of_the_errors(make: Any, size: int) -> None:
    ranks = trained(make, 3)
    others = loaded(make, SHAPES, redistributed([own.state_dict() for own in ranks.states], size))
    now, before = (torch.stack(own.errors()).double().mean(0) for own in (others, ranks))
    torch.testing.assert_close(now, before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_keeps_server_errors_of_its_own_chunk_alone(size: int) -> None:
    """What a rank keeps of a chunk that is another rank's, it sends with its gradient."""
    states = [own.state_dict() for own in trained(DoubleSqueezeCompressor, 3).states]
    others = loaded(DoubleSqueezeCompressor, SHAPES, redistributed(states, size))
    for rank, own in enumerate(others.states):
        chunk_errors = flat(list(own.state_dict()["server_errors"].values()))
        chunk_errors[slice(*divide_into_chunks(others.buckets[0], size, rank).edges[rank : rank + 2])] = 0.0
        assert not chunk_errors.any()


@with_two_directions
def test_other_buckets_keep_the_errors(make: Any) -> None:
    ranks = trained(make, 3)
    states = [own.state_dict() for own in ranks.states]
    names = [f"p{i}" for i in range(len(SHAPES))]
    other = loaded(make, dict(reversed(list(zip(names, SHAPES, strict=True)))), states)
    for before, after, bucket in zip(ranks.errors(), other.errors(), other.buckets, strict=True):
        parts = {s.name: s.of(after).reshape(-1) for s in bucket.segments}
        torch.testing.assert_close(flat([parts[name] for name in names]), before, rtol=0, atol=1e-6)


def test_without_feedback_there_are_no_errors() -> None:
    ranks = Ranks(2, partial(TwoPhaseCompressor, error_feedback=False), SHAPES)
    own = [flat(gradients(rank, 0, SHAPES)) for rank in range(2)]
    first = ranks.step(own)
    assert torch.equal(ranks.step(own), first) and list(ranks.states[0].errors()) == []
    torch.testing.assert_close(first, sum(own) / 2, rtol=0, atol=0.05)


def test_hadamard_spreads_a_large_element() -> None:
    v, others = normal(64, seed=1), torch.arange(64) != 7
    v[7] = 40.0  # a level of 4 bits is then 40 / 7 without the transform
    makes = (partial(TwoPhaseCompressor, 4, 64, 8, hadamard=hadamard) for hadamard in (False, True))
    plain, turned = ((Ranks(1, make, [(64,)]).step([v]) - v)[others].norm() for make in makes)
    assert turned < 0.7 * plain


@pytest.mark.parametrize(
    "make",
    [*TWO_PHASES, partial(TwoPhaseCompressor, error_feedback=False)],
    ids=["8 bits", "4 bits, turned", "without feedback"],
)
def test_steps_use_the_same_memory_whether_they_count_or_are_dropped(make: Any) -> None:
    """Two residuals take turns. The one that a dropped step keeps is not overwritten before the next step ends."""
    ranks, before, seen = trained(make, 2), [set[int]()] * 2, list[int]()
    for step in range(4, 9):
        ranks.step([flat(gradients(rank, step, SHAPES)) for rank in range(2)])
        for rank, (states, bucket) in enumerate(zip(ranks.states, ranks.buckets, strict=True)):
            if step == 6:
                states.rollback(bucket)
            state = states[bucket]
            own = [state.errors.get("errors"), getattr(state, "chunk_errors", None), *state.scratch.values()]
            places = [tensor.data_ptr() for tensor in own if tensor is not None]
            assert len(set(places)) == len(places) and (step == 4 or set(places) == before[rank]), step
            before[rank] = set(places)
            seen.append(len(places))
    assert set(seen) == {6 if ranks.compressors[0].error_feedback else 2}


with_every_code = pytest.mark.parametrize(
    ("bits", "block", "hadamard"), [*product((8, 4), (64, 512), (False, True))]
)


def fp64_step(make: Any, size: int, value: float, last: float | None = None) -> Any:
    """Two steps of gradients of this value in fp64. last: The first element of the last rank's."""
    fleet = Fleet(make, size, [torch.zeros(shape, dtype=torch.float64) for shape in SMALL])
    for _ in range(2):
        own = [[torch.full(shape, value, dtype=torch.float64) for shape in SMALL] for _ in range(size)]
        if last is not None:
            own[-1][0][0, 0] = last
        means = fleet.step(own)
    return fleet, means


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("value", [1e-200, 1e-300, 1e-310, 1e-46])
@with_every_code
def test_fp64_gradients_below_the_range_of_fp32_are_zero(
    bits: int, block: int, hadamard: bool, value: float, size: int
) -> None:
    fleet, means = fp64_step(partial(TwoPhaseCompressor, bits, block, hadamard=hadamard), size, value)
    assert fleet.nonfinite == [None] * size
    assert all(mean.dtype == torch.float64 and not mean.any() for mean in means)
    assert not any(error.any() for error in fleet.errors())


@pytest.mark.parametrize("value", [1e-200, 1e-310])
@with_every_code
def test_an_ordinary_element_is_sent_beside_such_ones(bits: int, block: int, hadamard: bool, value: float) -> None:
    fleet, means = fp64_step(partial(TwoPhaseCompressor, bits, block, hadamard=hadamard), 3, value, last=0.75)
    errors = sum(fleet.errors())
    for mean in means:  # two steps: what is not in the mean is in the errors
        assert mean.isfinite().all() and abs(float(mean[0]) - 0.25) < 0.1
    assert errors.isfinite().all() and float(errors.abs().max()) < 0.75


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("value", [1e20, 1e39, 1e300])
@with_every_code
def test_fp64_gradients_beyond_the_range_drop_the_step(
    bits: int, block: int, hadamard: bool, value: float, size: int
) -> None:
    fleet, _ = fp64_step(partial(TwoPhaseCompressor, bits, block, hadamard=hadamard), size, 0.5, last=value)
    told = f"the gradient of p0 on rank {size - 1} has NaN or inf, or is 2**64 or more"
    assert fleet.nonfinite == [told] * size
    assert all(error.isfinite().all() for error in fleet.errors())
