"""Two phases: bytes on the wire, and errors that move to other ranks and buckets."""

from functools import partial
from typing import Any

import pytest
import torch
from cases import case
from compression.ranks import Ranks, normal

from dgc.comm.meter import all_reduce_wire_bytes
from dgc.compression import TwoPhaseCompressor
from dgc.engine.redistribute import redistribute
from dgc.testing import flat, gradients

pytestmark = pytest.mark.usefixtures("no_type_checks")
SHAPES = ((70, 20), (33,), (0, 4), (5,), (2, 30, 8))
MAKES = [partial(TwoPhaseCompressor, 8, 64), partial(TwoPhaseCompressor, 4, 64, hadamard=True)]


def test_wire_bytes_hardly_depend_on_the_ranks() -> None:
    """Of one tensor, beside an all-reduce in fp32: with as many blocks for each rank, without headers."""
    n = 16 * 256 * 64
    for bits, block, fewer in (8, 256, 3.97), (4, 128, 7.76), (4, 64, 7.53):
        for size in (2, 4, 8, 16):
            ranks = Ranks(size, partial(TwoPhaseCompressor, bits, block), [(n,)])
            ranks.step([normal(n, rank) for rank in range(size)])
            headers = 2 * (size - 1) * 24
            for meter in ranks.world.meters:
                with case(bits, block, size):
                    exact = 2 * (size - 1) / size * n * (bits / 8 + 2 / block)
                    assert meter.wire_bytes == exact + headers
                    assert round(all_reduce_wire_bytes(4 * n, size) / exact, 2) == fewer


def state_of(make: Any, size: int) -> Any:
    ranks = Ranks(size, make, SHAPES)
    for step in range(4):
        ranks.step([flat(gradients(rank, step, SHAPES)) for rank in range(size)])
    return ranks, [states.state_dict() for states in ranks.states]


def test_another_number_of_ranks_or_other_buckets_keep_the_mean_of_the_errors() -> None:
    """What a rank keeps of a chunk that is no longer its own, it sends with its gradient."""
    for make in MAKES:
        ranks, states = state_of(make, 3)
        expected = torch.stack(ranks.errors()).double().mean(0)
        for size in (1, 2, 3, 4, 6):
            others = Ranks(size, make, SHAPES)
            for own, state in zip(others.states, redistribute(states, size), strict=True):
                own.load_state_dict(state)
            with case(size):
                torch.testing.assert_close(
                    torch.stack(others.errors()).double().mean(0), expected, rtol=0, atol=1e-6
                )
        names = [f"p{i}" for i in range(len(SHAPES))]
        other = Ranks(3, make, dict(reversed(list(zip(names, SHAPES, strict=True)))))
        for own, state in zip(other.states, states, strict=True):
            own.load_state_dict(state)
        for before, after, bucket in zip(ranks.errors(), other.errors(), other.buckets, strict=True):
            parts = {s.name: s.of(after).reshape(-1) for s in bucket.segments}
            torch.testing.assert_close(flat([parts[name] for name in names]), before, rtol=0, atol=1e-6)


def test_errors_stay_away_without_feedback_and_hadamard_spreads_a_large_element() -> None:
    ranks = Ranks(2, partial(TwoPhaseCompressor, error_feedback=False), SHAPES)
    own = [flat(gradients(rank, 0, SHAPES)) for rank in range(2)]
    first = ranks.step(own)
    assert torch.equal(ranks.step(own), first) and list(ranks.states[0].errors()) == []
    torch.testing.assert_close(first, sum(own) / 2, rtol=0, atol=0.05)
    v = normal(64, 1)
    v[7] = 40.0  # a level of 4 bits is then 40 / 7 without the transform
    plain, turned = (
        Ranks(1, partial(TwoPhaseCompressor, 4, 64, 8, hadamard=hadamard), [(64,)]).step([v])
        for hadamard in (False, True)
    )
    others = torch.arange(64) != 7
    assert (turned - v)[others].norm() < 0.7 * (plain - v)[others].norm()


def test_steps_use_the_same_memory_whether_they_count_or_are_dropped() -> None:
    """Two residuals take turns. The one that a dropped step keeps is not overwritten before the next step ends."""
    for make in (*MAKES, partial(TwoPhaseCompressor, error_feedback=False)):
        (ranks, _), before, seen = state_of(make, 2), [set[int]()] * 2, list[int]()
        for step in range(4, 9):
            ranks.step([flat(gradients(rank, step, SHAPES)) for rank in range(2)])
            if step == 6:
                for states, bucket in zip(ranks.states, ranks.buckets, strict=True):
                    states.rollback(bucket)
            for rank, (states, bucket) in enumerate(zip(ranks.states, ranks.buckets, strict=True)):
                state = states[bucket]
                own = [state.errors.get("errors"), getattr(state, "served", None), *state.scratch.values()]
                places = [tensor.data_ptr() for tensor in own if tensor is not None]
                assert len(set(places)) == len(places) and (step == 4 or set(places) == before[rank]), step
                before[rank] = set(places)
                seen.append(len(places))
        assert set(seen) == {6 if ranks.compressors[0].error_feedback else 2}


def test_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"bits": 2}, "bits must be 8 or 4, not 2"),
        ({"answer_bits": 16}, "answer_bits must be 8 or 4, not 16"),
        ({"block": 100}, "block must be one of 64, 128, 256, 512, not 100"),
    ]
    for settings, message in refused:
        with pytest.raises(ValueError, match=message):
            TwoPhaseCompressor(**settings)
