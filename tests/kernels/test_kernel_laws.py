"""Every backend gives the reference's bits, whatever the sizes, the numbers and the lower bounds."""

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from cases import case
from kernels.backends import NAMES, backend
from torch import Tensor

from dgc.kernels import Budget, PassInputs, TopKResult
from dgc.kernels.selection import TOO_LARGE, SelectionKernels, as_selection

REFERENCE = SelectionKernels()


@pytest.fixture(params=NAMES[1:], scope="module")
def kernels(request: pytest.FixtureRequest) -> Any:
    with backend(request.param) as chosen:
        yield chosen


def random(n: Any, seed: Any) -> Any:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def wall(n: Any) -> Any:
    """Accumulated gradients as they really are: dense up to a wall, with a thin shoulder above it."""
    g = torch.Generator().manual_seed(n)
    v = torch.rand(n, generator=g) ** 0.5
    return torch.where(torch.rand(n, generator=g) < 0.004, 1 + 0.05 * torch.rand(n, generator=g), v) * (
        2 * torch.randint(2, (n,), generator=g) - 1
    )


DATA: dict[str, Callable[[int], Tensor]] = {
    "normal": lambda n: random(n, 1),
    "heavy": lambda n: random(n, 2) / random(n, 3).abs().clamp(min=1e-6),
    "wall": wall,
    "zeros": torch.zeros,
    "equal": lambda n: torch.full((n,), -0.5),
    "few": lambda n: random(n, 4) * (torch.arange(n) % 97 == 0),
    "levels": lambda n: (random(n, 5) * 2).round() / 4,
    "denormal": lambda n: random(n, 6) * 1e-40,
    "huge": lambda n: random(n, 7) * 1e37,
    "ascending": lambda n: torch.arange(n) / max(n, 1),
    "outlier": lambda n: torch.cat([torch.tensor([1e30])[:n], random(max(n - 1, 0), 8)]),
    "signed zeros": lambda n: -torch.zeros(n),
}
SIZES = (0, 1, 15, 16, 17, 100, 1000, 4097, 70001)


def budget_for(n: Any, ratio: Any, pieces: Any) -> Any:
    """Ranges of uneven sizes, empty ones included, with k = ceil(ratio * size)."""
    generator = torch.Generator().manual_seed(n + pieces)
    cuts = sorted(torch.randint(n + 1, (pieces - 1,), generator=generator).tolist())
    bounds = [0, *cuts, n]
    ks = [-int(-(b - a) * ratio // 1) for a, b in zip(bounds, bounds[1:], strict=False)]
    return Budget(torch.tensor(bounds), torch.tensor(ks), sum(ks))


BUDGETS = [(0.001, 1), (0.001, 7), (0.01, 3), (0.1, 5), (1.0, 2), (0.0, 2), (0.03, 200)]


def same(a: Any, b: Any) -> Any:
    """Equal bit for bit, the sign of zeros included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Any) -> Any:
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


def assert_same_choice(ours: TopKResult, expected: TopKResult) -> None:
    assert int(ours.elements.count) == int(expected.elements.count)
    assert same(ours.elements.indices, expected.elements.indices)
    assert same(ours.elements.values, expected.elements.values)
    assert same(ours.thresholds, expected.thresholds)
    assert int(ours.first_nonfinite) == int(expected.first_nonfinite)


@cache
def selected(kind: Any, n: Any) -> Any:
    """v, and for each of BUDGETS what the reference chooses: it is the same for every backend."""
    v = DATA[kind](n)
    plans = [budget_for(n, ratio, pieces) for ratio, pieces in BUDGETS]
    return v, [(budget, REFERENCE.select(v, budget)) for budget in plans]


@pytest.mark.usefixtures("no_type_checks")
def test_select(kernels: Any) -> None:
    for kind in DATA:
        for n in SIZES:
            v, choices = selected(kind, n)
            for number, (budget, expected) in enumerate(choices):
                with case(kind, n, BUDGETS[number]):
                    assert_same_choice(kernels.select(v, budget), expected)


@pytest.mark.usefixtures("no_type_checks")
def test_radix_digits_choose_the_same(kernels: Any) -> None:
    for kind in DATA:
        for n in SIZES[:-1]:
            v, choices = selected(kind, n)
            for number, (budget, expected) in enumerate(choices):
                for tier_ in (kernels, REFERENCE):
                    with case(kind, n, BUDGETS[number], tier_.name):
                        found, wanted = tier_.radix_select(v, budget), expected.elements
                        assert int(found.count) == int(wanted.count)
                        assert same(found.indices, wanted.indices) and same(found.values, wanted.values)


@pytest.mark.parametrize("lower_bound", [0.5, 0.98, 1.0, 1.001, float("inf")])
def test_floors_do_not_change_what_is_selected(kernels: Any, lower_bound: Any) -> None:
    for kind, n in (("wall", 17), ("wall", 70001), ("levels", 17), ("levels", 70001)):
        v, choices = selected(kind, n)
        for number, (budget, expected) in enumerate(choices):
            with case(kind, n, BUDGETS[number]):
                assert_same_choice(kernels.select(v, budget, expected.thresholds * lower_bound), expected)


@cache
def accumulated(kind: Any, n: Any, number: Any) -> Any:
    """Plan and inputs of case `number`, the state that the reference leaves and its choice.

    They depend neither on the lower bounds nor on the backend.
    """
    nesterov = number % 2 == 1
    budget = budget_for(n, *BUDGETS[number])
    g, u, v = random(n, 11 if nesterov else 10), random(n, 12), DATA[kind](n)
    theirs = PassInputs((g,), u.clone(), v.clone(), 0.9, nesterov)
    expected = REFERENCE.accumulate_and_select_(theirs, budget, None)
    return budget, PassInputs((g,), u, v, 0.9, nesterov), theirs, expected


LOWER_BOUNDS = (None, 0.0, 0.5, 0.98, 1.0, 2.0, float("inf"), float("nan"), -1.0)


@pytest.mark.parametrize("kind", ["normal", "wall", "heavy", "zeros", "levels"])
@pytest.mark.usefixtures("no_type_checks")
def test_accumulate_and_select(kernels: Any, kind: Any) -> None:
    """Lower bounds that fit (0.98 of the threshold), are too low, too high or nonsense choose the same."""
    few = LOWER_BOUNDS if kind == "wall" else (None, 0.98, 2.0)
    for n, lower_bounds in ((0, few), (1, LOWER_BOUNDS), (17, LOWER_BOUNDS), (4097, LOWER_BOUNDS), (70001, few)):
        for number in range(len(BUDGETS)):
            budget, start, theirs, expected = accumulated(kind, n, number)
            for lower_bound in lower_bounds:
                with case(n, BUDGETS[number], lower_bound):
                    ours = PassInputs(start.g, start.u.clone(), start.v.clone(), 0.9, start.nesterov)
                    bounds = None if lower_bound is None else expected.thresholds * lower_bound
                    assert_same_choice(kernels.accumulate_and_select_(ours, budget, bounds), expected)
                    assert same(ours.u, theirs.u) and same(ours.v, theirs.v)


def test_a_good_floor_is_not_missed_and_a_high_one_is(kernels: Any) -> None:
    v, budget = wall(70001), Budget(torch.tensor([0, 30000, 70001]), torch.tensor([30, 400]), 430)
    thresholds = REFERENCE.select(v, budget).thresholds
    for factor, missed in ((0.98, 0), (1.001, 2)):
        inputs = PassInputs((torch.zeros(70001),), None, v.clone())
        assert int(kernels.accumulate_and_select_(inputs, budget, thresholds * factor).missed) == missed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_accumulate(kernels: Any, dtype: Any) -> None:
    for n, form in product(SIZES, ("plain", "nesterov", "residual")):
        g = random(n, 20).to(dtype)
        u = None if form == "residual" else random(n, 21)
        theirs = PassInputs((g,), u, random(n, 22), 0.9, form == "nesterov")
        ours = PassInputs((g,), None if u is None else u.clone(), theirs.v.clone(), 0.9, form == "nesterov")
        with case(n, form):
            for _ in range(3):
                assert int(kernels.accumulate_(ours)) == int(REFERENCE.accumulate_(theirs)) == n
            assert same(ours.v, theirs.v) and (u is None or same(ours.u, theirs.u))


@cache
def spoiled(n: Any, where: Any, bad: Any) -> Any:
    """A budget, inputs with `bad` at `where` and at the end, what the reference leaves of them and its choice."""
    g = random(n, 30)
    g[where] = bad
    g[n - 1] = bad
    start = PassInputs((g,), random(n, 31), random(n, 32), 0.9)
    assert start.u is not None
    theirs = PassInputs((g.clone(),), start.u.clone(), start.v.clone(), 0.9)
    budget = budget_for(n, 0.1, 3)
    return budget, start, theirs, REFERENCE.accumulate_and_select_(theirs, budget, None)


@pytest.mark.usefixtures("no_type_checks")
def test_nonfinite_elements_count_as_zero(kernels: Any) -> None:
    for n, bad in product((1, 16, 33, 5000), (float("nan"), float("inf"), -float("inf"), TOO_LARGE, -3e38)):
        for where in {0, 1 % n, n // 2, n - 1, *(i for i in range(16, 33) if i < n)}:
            budget, start, theirs, expected = spoiled(n, where, bad)
            with case(n, bad, where):
                assert int(expected.first_nonfinite) == where
                ours = PassInputs(tuple(g.clone() for g in start.g), start.u.clone(), start.v.clone(), 0.9)
                lower_bounds = expected.thresholds * 0.9
                assert_same_choice(kernels.accumulate_and_select_(ours, budget, lower_bounds), expected)
                assert same(ours.u, theirs.u) and same(ours.v, theirs.v)
                assert torch.isfinite(ours.v).all()


def test_no_number_of_usable_gradients_overflows_the_state(kernels: Any) -> None:
    """At these bounds the largest usable gradient changes nothing more, and below them sums are no larger."""
    g = torch.nextafter(torch.tensor(TOO_LARGE), torch.tensor(0.0)).repeat(40)
    u, v = torch.full((40,), 2.0**90), torch.full((40,), 2.0**116)
    forms, factors = ("plain", "nesterov", "residual"), (0.0, 0.9, 1 - 2.0**-24, 1.0)
    for form, momentum, sign in product(forms, factors, (1, -1)):
        own_u = None if form == "residual" else sign * u
        ours = PassInputs((sign * g,), own_u, sign * v, momentum, form == "nesterov")
        with case(form, momentum, sign):
            assert int(kernels.accumulate_(ours)) == 40
            assert torch.equal(ours.v, sign * v)
            assert ours.u is None or bool((ours.u.abs() <= u).all())


def test_gradients_in_pieces(kernels: Any) -> None:
    """Pieces lie anywhere in memory, at any alignment."""
    whole = random(9000, 40)
    sizes = (1, 0, 3, 17, 4000, 4096, 883)
    pieces = tuple(torch.cat([torch.zeros(i + 1), part])[i + 1 :] for i, part in enumerate(whole.split(sizes)))
    budget = budget_for(9000, 0.01, 4)
    theirs = PassInputs((whole,), random(9000, 41), random(9000, 42), 0.9)
    assert theirs.u is not None
    ours = PassInputs(pieces, theirs.u.clone(), theirs.v.clone(), 0.9)
    expected = REFERENCE.accumulate_and_select_(theirs, budget, None)
    assert_same_choice(kernels.accumulate_and_select_(ours, budget, expected.thresholds * 0.98), expected)
    assert same(ours.v, theirs.v) and same(ours.u, theirs.u)


def test_merge_mean(kernels: Any) -> None:
    few, many = [(1, 1), (300, 100)], [(70001, 500), (200_000, 20)]
    for ranks, (n, capacity) in (*product((1, 2, 3, 7), few), *product((1, 3), many)):
        parts = []
        for rank in range(ranks):
            v = random(n, 60 + rank)
            count = 0 if rank == 1 else capacity - rank if capacity > rank else capacity
            order = torch.randperm(n, generator=torch.Generator().manual_seed(rank))
            parts.append(as_selection(order[:count].sort().values, v, capacity))
        merged = kernels.merge_mean(parts, ranks, n)
        (indices, values), expected = merged.valid(), REFERENCE.merge_mean(parts, ranks, n).valid()
        assert not merged.values[len(values) :].any()
        assert same(indices, expected[0]) and same(values, expected[1]), (ranks, n)
        dense = torch.zeros(n, dtype=torch.float64)
        for part in parts:
            count = int(part.count)
            dense.index_add_(0, part.indices[:count].long(), part.values[:count].double())
        torch.testing.assert_close(torch.zeros(n).index_put_((indices,), values), (dense / ranks).float())


def test_the_order_of_the_parts_is_the_order_of_addition(kernels: Any) -> None:
    """(1e8 + 1) - 1e8 is 0 in fp32, (1e8 - 1e8) + 1 is 1."""

    def part(value: Any) -> Any:
        return as_selection(torch.tensor([2]), torch.tensor([0, 0, value]), 1)

    assert kernels.merge_mean([part(1e8), part(1.0), part(-1e8)], 1, 3).values.tolist() == [0.0]
    assert kernels.merge_mean([part(1e8), part(-1e8), part(1.0)], 1, 3).values.tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_subtract_at(kernels: Any, dtype: Any) -> None:
    sizes = (3, 0, 400, 17, 1)
    bounds = torch.tensor([0, 3, 3, 403, 420, 421])
    indices = torch.tensor([0, 2, 3, 5, 100, 402, 403, 419, 420])
    values, factors = random(9, 70), (0.1, 1.0, 0.01, 3.0, 0.5)
    ours = [random(size, 80 + size).to(dtype) for size in sizes]
    theirs = [target.clone() for target in ours]
    kernels.subtract_at_(ours, bounds, indices, values, factors)
    REFERENCE.subtract_at_(theirs, bounds, indices, values, factors)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert ours[4] == random(1, 81).to(dtype) - (values[8] * 0.5).to(dtype)


def test_decay(kernels: Any) -> None:
    for dtype, nesterov, n in product((torch.float32, torch.bfloat16), (False, True), (0, 1, 17, 5000)):
        ours = [random(n, 90).to(dtype), random(n, 91).to(dtype)]
        theirs = p, buffer = ours[0].clone(), ours[1].clone()
        for _ in range(3):
            kernels.decay_(*ours, 0.1, 1e-4, 0.9, nesterov)
            REFERENCE.decay_(p, buffer, 0.1, 1e-4, 0.9, nesterov)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), (dtype, nesterov, n)


def test_floors_follow_the_thresholds(kernels: Any) -> None:
    last = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0, 3.0, 1e-42, 1e38])
    before = torch.tensor([1.0, 0.0, 1.0, 2.0, 1.0, 0.0, 1e-42, 1e38])
    lower_bounds = kernels.predicted_lower_bounds(last, before, 0.98)
    growth = torch.tensor([1.0, 1.0, 1.2, 0.97, 0.97, 1.2, 1.0, 1.0])
    assert torch.equal(lower_bounds, last * growth * 0.98)
    many, fewer = random(1000, 9).abs(), random(1000, 10).abs()
    wanted = REFERENCE.predicted_lower_bounds(many, fewer, 0.95)
    assert torch.equal(kernels.predicted_lower_bounds(many, fewer, 0.95), wanted)
