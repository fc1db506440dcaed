"""The reference operations against formulas in float64 and against each other's edge cases."""

from typing import Any

import pytest
import torch

from dgc.kernels import PassInputs
from dgc.kernels.selection import (
    TOO_LARGE,
    SelectionKernels,
    as_selection,
    first_tensor_nonfinite,
    largest,
    remove_nonfinite_,
)

REFERENCE = SelectionKernels()


def random(n: Any, seed: int = 0) -> Any:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


# --- accumulate_ -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 1000])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_formulas_in_float64(n: Any, momentum: Any, nesterov: Any) -> None:
    u, v = random(n, 1), random(n, 2)
    u64, v64 = u.double(), v.double()
    for step in range(4):
        g = random(n, 10 + step)
        REFERENCE.accumulate_(PassInputs((g,), u, v, momentum, nesterov))
        if nesterov:
            u64 = momentum * (u64 + g.double())
            v64 = v64 + u64 + g.double()
        else:
            u64 = momentum * u64 + g.double()
            v64 = v64 + u64
    torch.testing.assert_close(u, u64.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(v, v64.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_other_types_leave_the_state_in_fp32(dtype: Any) -> None:
    u, v, g = torch.full((3,), 0.1), torch.full((3,), 0.2), torch.tensor([1.0, -2.0, 0.5]).to(dtype)
    REFERENCE.accumulate_(PassInputs((g,), u, v, 0.9, False))
    assert u.dtype == v.dtype == torch.float32
    torch.testing.assert_close(u, torch.tensor([1.09, -1.91, 0.59]))
    torch.testing.assert_close(v, torch.tensor([1.29, -1.71, 0.79]))
    assert g.tolist() == [1.0, -2.0, 0.5]


# --- largest ---------------------------------------------------------------------------------------

DENORMAL = 1e-42


@pytest.mark.parametrize("n", [1, 2, 63, 1000])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_largest_takes_the_k_largest(n: Any, share: Any) -> None:
    v, k = random(n), int(share * n)
    chosen = largest(v, k)
    assert chosen.dtype == torch.int64 and chosen.numel() == k
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    rest = torch.ones(n, dtype=torch.bool)
    rest[chosen] = False
    if 0 < k < n:
        assert v[chosen].abs().min() >= v[rest].abs().max()


def test_largest_takes_all_when_k_is_more() -> None:
    assert largest(torch.tensor([1.0, -2.0]), 5).tolist() == [0, 1]


@pytest.mark.parametrize("k", [0, 1, 3])
def test_largest_never_takes_a_zero(k: Any) -> None:
    assert largest(torch.zeros(4), k).tolist() == []
    assert largest(torch.tensor([0.0, -0.0, 3.0, 0.0]), k).tolist() == [2][:k]


def test_largest_of_nothing() -> None:
    chosen = largest(torch.empty(0), 3)
    assert chosen.shape == (0,) and chosen.dtype == torch.int64


@pytest.mark.parametrize("k", [1, 5, 9])
def test_largest_of_ties_is_still_k(k: Any) -> None:
    v = torch.tensor([2.0, -2.0, 2.0, 1.0, 2.0, -2.0, 2.0, 2.0, 2.0])
    chosen = largest(v, k)
    assert chosen.numel() == k and (k == 9) == (3 in chosen.tolist())


def test_denormals_count_as_non_zero() -> None:
    v = torch.tensor([0.0, DENORMAL, -2 * DENORMAL, 0.0])
    assert largest(v, 1).tolist() == [2]
    assert largest(v, 4).tolist() == [1, 2]


# --- merge_mean ------------------------------------------------------------------------------------


N = 200


def part(pairs: Any) -> Any:
    pairs = list(pairs)
    v = torch.zeros(N)
    for i, x in pairs:
        v[i] = x
    return as_selection(torch.tensor([i for i, _ in pairs], dtype=torch.int64), v, 40)


def merge_mean(parts: Any, size: Any) -> Any:
    return REFERENCE.merge_mean(parts, size, N).valid()


def test_merge_mean_by_hand() -> None:
    indices, values = merge_mean([part([(1, 3.0), (5, 1.0)]), part([(0, 6.0), (5, 2.0)]), part([])], 3)
    assert indices.tolist() == [0, 1, 5] and indices.dtype == torch.int64
    assert values.tolist() == [2.0, 1.0, 1.0] and values.dtype == torch.float32


def test_merge_mean_of_nothing() -> None:
    indices, values = merge_mean([part([]), part([])], 2)
    assert indices.numel() == values.numel() == 0


def test_values_of_one_index_are_added_in_the_order_of_the_parts() -> None:
    """In fp32 (1e8 + 1) - 1e8 is 0 and (1e8 - 1e8) + 1 is 1."""
    big, one, minus = part([(3, 1e8)]), part([(3, 1.0)]), part([(3, -1e8)])
    assert merge_mean([big, one, minus], 1)[1].tolist() == [0.0]
    assert merge_mean([big, minus, one], 1)[1].tolist() == [1.0]


# --- remove_nonfinite_ -----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("position", "tensor"), [(0, 1), (3, 1), (4, 2), (8, 3), (9, 3)])
def test_the_first_tensor_with_a_nonfinite_value_is_numbered(bad: Any, position: Any, tensor: Any) -> None:
    g = torch.arange(10.0) + 1
    expected = g.clone()
    g[position] = expected[position] = 0.0
    g[position] = bad
    assert first_tensor_nonfinite(g, [0, 4, 8]) == tensor
    assert remove_nonfinite_(g) == position
    assert torch.equal(g, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_usable_gradients_stay_as_they_are(dtype: Any) -> None:
    largest = torch.tensor(min(torch.finfo(dtype).max, TOO_LARGE / 2), dtype=dtype)
    g = torch.stack([largest, -largest, -0.0 * largest])
    before = g.clone()
    assert remove_nonfinite_(g) == 3 and torch.equal(g, before)
    if dtype != torch.float16:
        g[1] = -TOO_LARGE
        assert remove_nonfinite_(g) == 1 and torch.equal(g, before * torch.tensor([1, 0, 1]))
    assert first_tensor_nonfinite(torch.ones(3), [0, 2]) == 0
    assert remove_nonfinite_(torch.empty(0)) == 0 and first_tensor_nonfinite(torch.empty(0), []) == 0


def test_all_nonfinite_values_go() -> None:
    g = torch.tensor([1.0, float("nan"), float("inf"), 2.0, -float("inf")])
    assert remove_nonfinite_(g) == 1 and g.tolist() == [1.0, 0.0, 0.0, 2.0, 0.0]
