"""PowerSGD with ranks that follow the norms of gradients."""

from typing import Any

import pytest
import torch
from core.ranks import normal
from states import assert_equal

from dgc.contrib import AccordionCompressor
from dgc.testing import Fleet

SHAPES = [(30, 40), (40, 30)]
STEADY, GROWING = "p0", "p1"  # the tensors


def fleet_of(every: int = 1) -> Fleet:
    like = [torch.zeros(shape, dtype=torch.float32) for shape in SHAPES]
    return Fleet(lambda: AccordionCompressor(1, 3, every=every, num_iters_per_step=2), 2, like)


def ranks_of(fleet: Fleet) -> tuple[int, int]:
    P = fleet.states[0].state_dict()["P"]
    return P[STEADY].shape[1], P[GROWING].shape[1]


def begin_epoch(fleet: Fleet, epoch: int) -> None:
    for states in fleet.states:
        states.begin_epoch(epoch)


def train(fleet: Fleet, epoch: int, steps: int = 3) -> Any:
    """One epoch, in which the gradients of the second tensor are three times as large as in the one before it."""
    begin_epoch(fleet, epoch)
    steady, growing = (normal(n, 1, seed=n) @ normal(1, m, seed=m) for n, m in SHAPES)
    for _ in range(steps):
        mean = fleet.step([[steady, 3.0**epoch * growing]] * 2)[0]
    return mean


@pytest.mark.parametrize(
    ("before", "norm", "rank"),
    [(None, 8.0, 3), (8.0, 3.0, 3), (3.0, 2.5, 1), (2.0, 1.0, 3), (2.0, 2.99, 1), (2.0, 3.0, 3), (0.0, 0.0, 3)],
)
def test_a_rank_is_high_if_the_norm_has_changed_by_half(before: Any, norm: float, rank: int) -> None:
    assert AccordionCompressor(1, 3, change=0.5).rank_after(before, norm) == rank


def test_all_ranks_are_high_until_two_intervals_are_known() -> None:
    fleet = fleet_of()
    for epoch in range(2):
        train(fleet, epoch)
        assert ranks_of(fleet) == (3, 3), epoch


def test_a_rank_falls_where_gradients_do_not_change() -> None:
    fleet = fleet_of()
    for epoch in range(3):
        train(fleet, epoch)
    assert ranks_of(fleet) == (1, 3)


def test_ranks_change_at_the_ends_of_intervals() -> None:
    fleet, changed, ranks = fleet_of(every=2), [], (3, 3)
    for epoch in range(6):
        train(fleet, epoch)
        if ranks != (ranks := ranks_of(fleet)):
            changed.append(epoch)
    assert changed == [4]


def test_an_epoch_that_begins_again_changes_nothing() -> None:
    fleet = fleet_of()
    for epoch in range(4):
        train(fleet, epoch)
    before = fleet.states[0].state_dict()
    begin_epoch(fleet, 3)
    assert_equal(fleet.states[0].state_dict(), before)


def test_a_resumed_run_chooses_the_same_ranks() -> None:
    fleet, other = fleet_of(), fleet_of()
    for epoch in range(4):
        train(fleet, epoch)
    for old, new in zip(fleet.states, other.states, strict=True):
        new.load_state_dict(old.state_dict())
    assert torch.equal(train(fleet, 4), train(other, 4))
    assert_equal(fleet.states[0].state_dict(), other.states[0].state_dict())


def test_a_dropped_step_does_not_count() -> None:
    fleet = fleet_of()
    train(fleet, 0)
    before = fleet.states[0].state_dict()["accordion"]
    fleet.step([[torch.full(shape, torch.nan) for shape in SHAPES] for _ in range(2)])
    assert fleet.states[0].state_dict()["accordion"] == before
