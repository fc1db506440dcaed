"""The reference operations against formulas in float64 and against each other's edge cases."""

from typing import Any

import pytest
import torch
from kernels.comparison import HALVES, REFERENCE, random

from dgc.kernels import PassInputs
from dgc.kernels.selection import TOO_LARGE, as_selection, first_tensor_nonfinite, largest, remove_nonfinite_


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("n", [0, 1, 1000])
def test_a_pass_follows_the_formulas_in_float64(n: int, momentum: float, nesterov: bool) -> None:
    u, v = random(n, 1), random(n, 2)
    u64, v64 = u.double(), v.double()
    for step in range(4):
        g = random(n, 10 + step)
        REFERENCE.accumulate_(PassInputs((g,), u, v, momentum, nesterov))
        u64 = momentum * (u64 + g.double()) if nesterov else momentum * u64 + g.double()
        v64 = v64 + u64 + (g.double() if nesterov else 0.0)
    torch.testing.assert_close(u, u64.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(v, v64.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float64], ids=str)
def test_gradients_of_other_types_leave_the_state_in_fp32(dtype: Any) -> None:
    u, v, g = torch.full((3,), 0.1), torch.full((3,), 0.2), torch.tensor([1.0, -2.0, 0.5]).to(dtype)
    REFERENCE.accumulate_(PassInputs((g,), u, v, 0.9, False))
    torch.testing.assert_close(u, torch.tensor([1.09, -1.91, 0.59]))
    torch.testing.assert_close(v, torch.tensor([1.29, -1.71, 0.79]))
    assert g.tolist() == [1.0, -2.0, 0.5]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("n", [1, 2, 63, 1000])
def test_largest_takes_the_k_largest(n: int, share: float) -> None:
    v, k = random(n, 0), int(share * n)
    chosen = largest(v, k)
    assert chosen.dtype == torch.int64 and chosen.numel() == k
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert k == 0 or v[chosen].abs().min() >= v.abs().index_fill(0, chosen, 0.0).max()


TIES, DENORMALS = [2.0, -2.0, 2.0, 1.0, 2.0, -2.0, 2.0, 2.0, 2.0], [0.0, 1e-42, -2e-42, 0.0]


@pytest.mark.parametrize(
    ("few", "k", "expected"),
    [
        ([1.0, -2.0], 5, [0, 1]),
        ([], 3, []),
        *(([0.0] * 4, k, []) for k in (0, 1, 3)),
        *(([0.0, -0.0, 3.0, 0.0], k, [2][:k]) for k in (0, 1, 3)),
        (TIES, 1, [0]),
        (TIES, 5, [0, 1, 2, 4, 5]),
        (TIES, 9, list(range(9))),
        (DENORMALS, 1, [2]),
        (DENORMALS, 4, [1, 2]),
    ],
)
def test_largest_takes_the_first_of_ties_among_those_that_are_not_zero(few: Any, k: int, expected: Any) -> None:
    chosen = largest(torch.tensor(few), k)
    assert chosen.tolist() == expected and chosen.dtype == torch.int64


def test_merge_mean_by_hand() -> None:
    def part(values: dict[int, float]) -> Any:
        v = torch.zeros(200)
        v[list(values)] = torch.tensor(list(values.values()))
        return as_selection(torch.tensor(list(values), dtype=torch.int64), v, 40)

    parts = [part({1: 3.0, 5: 1.0}), part({0: 6.0, 5: 2.0}), part({})]
    indices, values = REFERENCE.merge_mean(parts, 3, 200).valid()
    assert indices.tolist() == [0, 1, 5] and indices.dtype == torch.int64
    assert values.tolist() == [2.0, 1.0, 1.0] and values.dtype == torch.float32
    indices, values = REFERENCE.merge_mean([part({})] * 2, 2, 200).valid()
    assert indices.numel() == values.numel() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("position", "tensor"), [(0, 1), (3, 1), (4, 2), (8, 3), (9, 3)])
def test_the_first_tensor_with_a_nonfinite_value_is_numbered(bad: float, position: int, tensor: int) -> None:
    g = torch.arange(10.0) + 1
    expected = g.index_fill(0, torch.tensor([position, 9]), 0.0)
    g[[position, 9]] = bad
    assert first_tensor_nonfinite(g, [0, 4, 8]) == tensor
    assert remove_nonfinite_(g) == position and torch.equal(g, expected)


def test_no_tensor_with_a_nonfinite_value_has_the_number_0() -> None:
    assert first_tensor_nonfinite(torch.ones(3), [0, 2]) == 0
    assert remove_nonfinite_(torch.empty(0)) == 0 and first_tensor_nonfinite(torch.empty(0), []) == 0


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES, torch.float64], ids=str)
def test_usable_gradients_stay_as_they_are(dtype: Any) -> None:
    most = torch.tensor(min(torch.finfo(dtype).max, TOO_LARGE / 2), dtype=dtype)
    g = torch.stack([most, -most, -0.0 * most])
    before = g.clone()
    assert remove_nonfinite_(g) == 3 and torch.equal(g, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_gradient_that_is_too_large_becomes_zero(dtype: Any) -> None:
    g = torch.tensor([TOO_LARGE / 2, -TOO_LARGE, 0.0], dtype=dtype)
    assert remove_nonfinite_(g) == 1 and g.tolist() == [TOO_LARGE / 2, 0.0, 0.0]
