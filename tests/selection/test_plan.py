"""How many elements each tensor sends, and who gets the slots that others leave free."""

from typing import Any

import pytest
import torch
from selection.shapes import plan_of


def test_plan_rounds_up_and_sends_at_least_one() -> None:
    plan = plan_of(1, 10, 999, 1000, 1001, 0, ratio=0.001)
    assert plan.ks == (1, 1, 1, 1, 2, 0)
    assert plan.capacity == 6
    assert plan.per_tensor.bounds.tolist() == [0, 1, 11, 1010, 2010, 3011, 3011]


def test_plan_at_ratio_one_is_everything() -> None:
    assert plan_of(3, 70, ratio=1.0).ks == (3, 70)


@pytest.mark.parametrize(("ratio", "numel", "k"), [(0.07, 100, 7), (0.29, 100, 29), (1e-3, 1000, 1), (1e-9, 5, 1)])
def test_the_noise_of_floats_sends_nothing_more(ratio: Any, numel: Any, k: Any) -> None:
    """0.07 * 100 is 7.000000000000001."""
    assert plan_of(numel, ratio=ratio).ks == (k,)


# --- shared ----------------------------------------------------------------------------------------


def budget(plan: Any, *counts: Any) -> Any:
    return plan.shared(torch.tensor(counts)).ks.tolist()


def test_what_fits_is_kept() -> None:
    plan = plan_of(40, 40, 40, ratio=0.1)
    assert budget(plan, 0, 4, 3) == [0, 4, 3]


def test_free_slots_are_given_in_proportion_to_the_surplus() -> None:
    """4 slots each; the first leaves 4 free, the others have 6 and 3 too many."""
    assert budget(plan_of(40, 40, 40, ratio=0.1), 0, 10, 7) == [0, 4 + 4 * 6 // 9, 4 + 4 * 3 // 9]


def test_all_free_slots_are_given_where_they_suffice() -> None:
    assert budget(plan_of(40, 40, 40, ratio=0.1), 0, 6, 6) == [0, 6, 6]


def test_never_more_than_the_capacity() -> None:
    generator = torch.Generator().manual_seed(0)
    plan = plan_of(*[1000] * 9, ratio=0.01)
    for _ in range(200):
        counts = torch.randint(40, (9,), generator=generator)
        shared = plan.shared(counts)
        assert shared.capacity == plan.capacity >= int(shared.ks.sum()) and bool((shared.ks <= counts).all())


def test_large_tensors_do_not_overflow() -> None:
    """Free slots times surplus exceed 32 bits."""
    plan = plan_of(3_000_000, 3_000_000, ratio=0.5)
    assert budget(plan, 0, 3_000_000) == [0, 3_000_000]
    assert budget(plan, 10, 2_999_999) == [10, 2_999_990]


# --- history ---------------------------------------------------------------------------------------


def test_history_moves_to_other_buckets() -> None:
    one = plan_of(5, 6, 7, ratio=0.5)
    one.history["threshold"] = torch.tensor([1.0, 2.0, 3.0])
    two = plan_of(9, 9, ratio=0.5)
    two.take_history(one.rows_of_history())
    assert two.history["threshold"].tolist() == [1.0, 2.0]


def test_history_of_some_tensors_alone_is_not_used() -> None:
    one, two = plan_of(5, ratio=0.5), plan_of(5, 6, ratio=0.5)
    one.history["threshold"] = torch.tensor([1.0])
    two.take_history(one.rows_of_history())
    assert two.history == {}
