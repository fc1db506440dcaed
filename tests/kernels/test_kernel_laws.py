"""Every backend gives the reference's bits, and sums close to fp64, whatever the threads and instructions."""

from collections.abc import Callable, Iterable
from functools import cache
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
import torch
from cases import case
from kernels.backends import NAMES, backend
from kernels.comparison import (
    HALVES,
    REFERENCE,
    Pass,
    assert_same_choice,
    budget_of,
    check_moments,
    check_tail,
    random,
    same,
)
from torch import Tensor

from dgc.kernels import Budget, PassInputs, SparseVector
from dgc.kernels.selection import TOO_LARGE, SelectionKernels, as_selection

FORMS = ("plain", "nesterov", "residual")


def wall(n: Any) -> Any:
    """Accumulated gradients as they really are: dense up to a wall, with a thin shoulder above it."""
    g = torch.Generator().manual_seed(n)
    v = torch.rand(n, generator=g) ** 0.5
    v = torch.where(torch.rand(n, generator=g) < 0.004, 1 + 0.05 * torch.rand(n, generator=g), v)
    return v * (2 * torch.randint(2, (n,), generator=g) - 1)


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
BUDGETS = [(0.001, 1), (0.001, 7), (0.01, 3), (0.1, 5), (1.0, 2), (0.0, 2), (0.03, 200)]


def budget_for(n: Any, ratio: Any, pieces: Any) -> Any:
    """Ranges of uneven sizes, empty ones included, with k = ceil(ratio * size)."""
    generator = torch.Generator().manual_seed(n + pieces)
    bounds = [0, *sorted(torch.randint(n + 1, (pieces - 1,), generator=generator).tolist()), n]
    ks = [-int(-(b - a) * ratio // 1) for a, b in pairwise(bounds)]
    return Budget(torch.tensor(bounds), torch.tensor(ks), sum(ks))


@cache
def selected(kind: Any, n: Any) -> Any:
    """v, and for each of BUDGETS what the reference chooses: it is the same for every backend."""
    v = DATA[kind](n)
    return v, [(budget, REFERENCE.select(v, budget)) for budget in (budget_for(n, *sizes) for sizes in BUDGETS)]


@pytest.mark.usefixtures("no_type_checks")
def test_a_selection_has_the_reference_s_elements(native: Any) -> None:
    for kind, n in product(DATA, SIZES):
        v, choices = selected(kind, n)
        for number, (budget, expected) in enumerate(choices):
            with case(kind, n, BUDGETS[number]):
                assert_same_choice(native.select(v, budget), expected)


@pytest.mark.usefixtures("no_type_checks")
def test_a_selection_digit_by_digit_has_the_reference_s_elements(native: Any) -> None:
    for kind, n in product(DATA, SIZES[:-1]):
        v, choices = selected(kind, n)
        for number, (budget, expected) in enumerate(choices):
            for each in (native, REFERENCE):
                with case(kind, n, BUDGETS[number]):
                    found, wanted = each.radix_select(v, budget), expected.elements
                    assert int(found.count) == int(wanted.count)
                    assert same(found.indices, wanted.indices) and same(found.values, wanted.values)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("floor", [0.5, 0.98, 1.0, 1.001, float("inf")])
def test_lower_bounds_change_no_selection(native: Any, floor: float) -> None:
    for kind, n in product(("wall", "levels"), (17, 70001)):
        v, choices = selected(kind, n)
        for number, (budget, expected) in enumerate(choices):
            with case(kind, n, BUDGETS[number]):
                assert_same_choice(native.select(v, budget, expected.thresholds * floor), expected)


def test_predicted_lower_bounds_follow_the_thresholds(native: Any) -> None:
    last = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0, 3.0, 1e-42, 1e38])
    before = torch.tensor([1.0, 0.0, 1.0, 2.0, 1.0, 0.0, 1e-42, 1e38])
    growth = torch.tensor([1.0, 1.0, 1.2, 0.97, 0.97, 1.2, 1.0, 1.0])
    assert torch.equal(native.predicted_lower_bounds(last, before, 0.98), last * growth * 0.98)
    many, fewer = random(1000, 9).abs(), random(1000, 10).abs()
    wanted = REFERENCE.predicted_lower_bounds(many, fewer, 0.95)
    assert torch.equal(native.predicted_lower_bounds(many, fewer, 0.95), wanted)


@cache
def accumulated(kind: Any, n: Any, number: Any) -> Pass:
    """Case `number`. What is right depends neither on the lower bounds nor on the backend."""
    nesterov = number % 2 == 1
    inputs = PassInputs((random(n, 11 if nesterov else 10),), random(n, 12), DATA[kind](n), 0.9, nesterov)
    return Pass(inputs, budget_for(n, *BUDGETS[number]))


LOWER_BOUNDS = (None, 0.0, 0.5, 0.98, 1.0, 2.0, float("inf"), float("nan"), -1.0)


@pytest.mark.parametrize("kind", ["normal", "wall", "heavy", "zeros", "levels"])
@pytest.mark.usefixtures("no_type_checks")
def test_a_pass_that_selects_has_the_reference_s_bits(native: Any, kind: Any) -> None:
    """Lower bounds that fit (0.98 of the threshold), are too low, too high or nonsense choose the same."""
    few = LOWER_BOUNDS if kind == "wall" else (None, 0.98, 2.0)
    for n, number in product((0, 1, 17, 4097, 70001), range(len(BUDGETS))):
        one = accumulated(kind, n, number)
        for lower_bound in few if n in (0, 70001) else LOWER_BOUNDS:
            with case(n, BUDGETS[number], lower_bound):
                one.check(native, None if lower_bound is None else one.expected.thresholds * lower_bound)


@cache
def passes() -> Any:
    """Of every dtype, size and form."""
    made = {}
    for dtype, n, form in product((torch.float32, *HALVES), SIZES, FORMS):
        u = None if form == "residual" else random(n, 21)
        inputs = PassInputs((random(n, 20).to(dtype),), u, random(n, 22), 0.9, form == "nesterov", decay=0.95)
        made[dtype, n, form] = Pass(inputs)
    return made


def test_a_pass_has_the_reference_s_bits(native: Any) -> None:
    for (dtype, n, form), one in passes().items():
        with case(dtype, n, form):
            assert int(one.check(native)) == n


def test_no_number_of_usable_gradients_overflows_the_state(native: Any) -> None:
    """At these bounds the largest usable gradient changes nothing more, and below them sums are no larger."""
    g = torch.nextafter(torch.tensor(TOO_LARGE), torch.tensor(0.0)).repeat(40)
    u, v = torch.full((40,), 2.0**90), torch.full((40,), 2.0**116)
    for form, momentum, sign in product(FORMS, (0.0, 0.9, 1 - 2.0**-24, 1.0), (1, -1)):
        own_u = None if form == "residual" else sign * u
        ours = PassInputs((sign * g,), own_u, sign * v, momentum, form == "nesterov")
        with case(form, momentum, sign):
            assert int(native.accumulate_(ours)) == 40
            assert torch.equal(ours.v, sign * v)
            assert ours.u is None or bool((ours.u.abs() <= u).all())


def test_the_gradients_of_a_pass_may_be_pieces_anywhere_in_memory(native: Any) -> None:
    """At any alignment, and shorter than a vector."""
    sizes = [1, 2, 0, 3, 30, 0, 17, 200_000, 4096, 100_000, 1, 0]
    elements, budget = sum(sizes), budget_of((200_010, sum(sizes) - 200_010), (700, 50))
    piecewise = Pass(PassInputs((random(elements, 14),), random(elements, 15), random(elements, 16), 0.9), budget)
    for lower_bounds in (None, piecewise.expected.thresholds * 0.98):
        piecewise.check(native, lower_bounds, sizes, 1)


def test_assign(native: Any) -> None:
    """Pieces of any type, from elsewhere or in their places, with elements that are not usable."""
    lengths = [1, 2, 0, 3, 30, 0, 17, 70_000, 4096, 1, 0]
    for dtype, bad in product((torch.float32, *HALVES), ([], [0], [40, 70_000], [74_148, 33_000])):
        g = random(sum(lengths), 17).to(dtype)
        g[bad] = torch.tensor([float("nan"), float("-inf")])[: len(bad)].to(dtype)
        ours, theirs = torch.ones(len(g)), torch.ones(len(g))
        places = [place.copy_(piece) for place, piece in zip(ours.split(lengths), g.split(lengths), strict=True)]
        pieces = [p if i % 3 or dtype in HALVES else places[i] for i, p in enumerate(g.split(lengths))]
        with case(dtype, bad):
            assert int(REFERENCE.assign_((g,), theirs)) == min(bad, default=len(g))
            assert same(theirs, torch.where(g.abs() < TOO_LARGE, g, 0.0).float())
            assert int(native.assign_(tuple(pieces), ours)) == min(bad, default=len(g)) and same(ours, theirs)
            assert int(native.assign_((ours,), ours)) == len(g) and same(ours, theirs)


PARTS = [
    *product((1, 2, 3, 7), [(1, 1), (300, 100)]),
    *product((1, 3), [(70001, 500), (200_000, 20), (300_000, 40_000)]),
]


@pytest.mark.parametrize(("ranks", "size"), PARTS)
def test_merge_mean_has_the_reference_s_bits(kernels: Any, ranks: int, size: tuple[int, int]) -> None:
    (n, capacity), parts = size, []
    for rank in range(ranks):
        count = 0 if rank == 1 else capacity - rank if capacity > rank else capacity
        order = torch.randperm(n, generator=torch.Generator().manual_seed(rank))
        parts.append(as_selection(order[:count].sort().values, random(n, 60 + rank), capacity))
    merged = kernels.merge_mean(parts, ranks, n)
    (indices, values), expected = merged.valid(), REFERENCE.merge_mean(parts, ranks, n).valid()
    assert not merged.values[len(values) :].any()
    assert same(indices, expected[0]) and same(values, expected[1])
    dense = torch.zeros(n, dtype=torch.float64)
    for part in parts:
        count = int(part.count)
        dense.index_add_(0, part.indices[:count].long(), part.values[:count].double())
    torch.testing.assert_close(torch.zeros(n).index_put_((indices,), values), (dense / ranks).float())


def test_merge_mean_adds_in_the_order_of_the_parts(kernels: Any) -> None:
    """(1e8 + 1) - 1e8 is 0 in fp32, (1e8 - 1e8) + 1 is 1."""
    big, one, minus = (as_selection(torch.tensor([2]), torch.tensor([0, 0, x]), 1) for x in (1e8, 1.0, -1e8))
    assert kernels.merge_mean([big, one, minus], 1, 3).values.tolist() == [0.0]
    assert kernels.merge_mean([big, minus, one], 1, 3).values.tolist() == [1.0]


FEW = torch.tensor([0, 2, 3, 5, 100, 402, 403, 419, 420])
MANY = torch.cat([torch.arange(0, 299_999, 7), torch.tensor([299_999])])


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("sizes", "indices"), [((3, 0, 400, 17, 1), FEW), ((100, 0, 199_901, 99_998, 1), MANY)], ids=["few", "many"]
)
def test_subtract_at_has_the_reference_s_bits(native: Any, sizes: Any, indices: Tensor, dtype: Any) -> None:
    bounds = torch.tensor([0, *sizes]).cumsum(0)
    values, factors = random(len(indices), 70), (0.1, 1.0, 0.01, 3.0, 0.5)
    ours = [random(size, 80 + size).to(dtype) for size in sizes]
    theirs = [target.clone() for target in ours]
    native.subtract_at_(ours, bounds, indices, values, factors)
    REFERENCE.subtract_at_(theirs, bounds, indices, values, factors)
    assert all(map(torch.equal, ours, theirs))
    assert ours[4] == random(1, 81).to(dtype) - (values[-1] * 0.5).to(dtype)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [0, 1, 17, 5000])
def test_decay_has_the_reference_s_bits(native: Any, n: int, dtype: Any, nesterov: bool) -> None:
    ours = [random(n, 90).to(dtype), random(n, 91).to(dtype)]
    others = p, buffer = ours[0].clone(), ours[1].clone()
    for _ in range(3):
        native.decay_(*ours, 0.1, 1e-4, 0.9, nesterov)
        REFERENCE.decay_(p, buffer, 0.1, 1e-4, 0.9, nesterov)
    assert all(map(torch.equal, ours, others))


# where blocks, units of threads and the buffer begin and end
EDGES = (0, 1, 15, 16, 255, 256, 257, 511, 512, 8191, 8192, 32767, 32768, 32769, 65535, 65536)


def sent_of(n: int, indices: Iterable[int]) -> SparseVector:
    """As a payload of fp16 leaves it. What lies behind the last one has no meaning, and shows if it is used."""
    tail = torch.zeros(3, dtype=torch.int64)
    entries = torch.tensor(sorted(set(indices)), dtype=torch.int64)
    values = torch.cat([random(n, 5)[entries].half().float(), tail + 7.0])
    count = torch.tensor(entries.numel(), dtype=torch.int32)
    return SparseVector(torch.cat([entries, tail]).int(), values, count)


def some(n: int, share: float) -> tuple[int, ...]:
    return tuple(torch.randperm(n, generator=torch.Generator().manual_seed(n))[: int(n * share)].tolist())


def pass_of(n: int, form: str, masking: bool, sent: Any, budget: Any = None, nan: tuple[int, ...] = ()) -> Pass:
    g, u = random(n, 1), None if form == "residual" else random(n, 2)
    g[list(nan)] = float("nan")
    return Pass(PassInputs((g,), u, random(n, 3), 0.9, form == "nesterov", sent, masking, decay=0.95), budget)


@cache
def sending_passes(n: int, budget: Budget | None, *chosen: tuple[int, ...]) -> list[tuple[str, Pass]]:
    """Of every form, with and without masking, whatever was sent."""
    made = []
    for form, masking, indices in product(FORMS, (True, False), chosen):
        one = pass_of(n, form, masking, sent_of(n, indices), budget)
        made.append((f"{form}, masking {masking}, {len(indices)} of {n}", one))
    return made


@pytest.mark.parametrize("n", [1, 16, 17, 300, 70_001])
def test_a_pass_takes_out_what_was_sent(kernels: SelectionKernels, n: int) -> None:
    edges = tuple(i for i in EDGES if i < n)
    for name, one in sending_passes(n, None, (), (0, n - 1), edges, some(n, 0.01), tuple(range(n))):
        with case(name):
            assert int(one.check(kernels)) == n


@pytest.mark.parametrize("offset", [0, 1, 7])
def test_a_pass_takes_out_what_was_sent_of_pieces_at_any_address(kernels: SelectionKernels, offset: int) -> None:
    n = sum(PIECES)
    edges = (0, *(i for start in accumulate(PIECES) for i in (start - 1, start) if i < n))
    for name, one in sending_passes(n, None, edges + some(n, 0.01)):
        with case(name):
            assert int(one.check(kernels, None, PIECES, offset)) == n


PIECES = [1, 2, 0, 3, 30, 0, 0, 70_000, 7, 33_000, 1, 0]


BUDGET, N = budget_of((40_003, 0, 97, 69_900, 10), (400, 0, 3, 200, 0)), 110_010


def test_a_pass_that_selects_takes_out_what_was_sent(kernels: SelectionKernels) -> None:
    """Lower bounds that fit, and such that a second pass over v is needed, which may take nothing out again."""
    edges = tuple(i for b in BUDGET.bounds.tolist() for i in (b - 1, b) if 0 <= i < N)
    for name, one in sending_passes(N, BUDGET, edges + some(N, 0.01), some(N, 0.2)):
        for lower_bound in (None, 0.0, 0.98, 1.001, 1e-30, float("inf")):
            with case(name, lower_bound):
                chosen = one.check(kernels, None if lower_bound is None else one.expected.thresholds * lower_bound)
                assert int(chosen.missed) > 0 or lower_bound != 1.001 or kernels.name == "reference"


def test_a_nonfinite_gradient_where_something_was_sent_counts_as_zero(kernels: SelectionKernels) -> None:
    one = pass_of(1000, "plain", True, sent_of(1000, [3, 500]), nan=(3, 500))
    assert int(one.check(kernels)) == 3
    assert one.left.u is not None and one.left.u[3] == 0 and one.left.v.isfinite().all()


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize(
    ("n", "indices"),
    [(1, (0,)), (5000, some(5000, 0.01)), (100_000, some(100_000, 0.2)), (9, ())],
    ids=["all", "few", "many", "none"],
)
def test_what_was_sent_is_taken_out_without_a_pass(
    kernels: SelectionKernels, n: int, indices: tuple[int, ...], masking: bool
) -> None:
    sent, u, v = sent_of(n, indices), random(n, 2), random(n, 3)
    kernels.remove_sent_(sent, u if masking else None, v)
    where, values = sent.indices[: len(indices)].long(), sent.values[: len(indices)]
    assert same(v, random(n, 3).index_put((where,), random(n, 3)[where] - values))
    assert same(u, random(n, 2).index_fill(0, where, 0.0) if masking else random(n, 2))


@cache
def given(n: Any) -> Any:
    """A buffer of all kinds of data, n elements each. A segment is one kind, or a part of one, maybe empty."""
    v = torch.cat([make(n) for make in DATA.values()])
    whole = torch.arange(0, n * len(DATA) + 1, n) if n else torch.zeros(len(DATA) + 1, dtype=torch.int64)
    cuts = torch.randint(n * len(DATA) + 1, (20,), generator=torch.Generator().manual_seed(n))
    return [(v, whole), (v, torch.cat([whole, cuts]).msort())]


def test_a_rank_without_a_part_of_a_bucket_has_no_moments(kernels: Any) -> None:
    nothing = kernels.moments(torch.empty(0, dtype=torch.float32), torch.tensor([0]))
    assert [x.shape for x in vars(nothing).values()] == [(0,)] * 4


@pytest.mark.parametrize("n", SIZES)
def test_moments_with_their_tails_are_close_to_fp64(kernels: Any, n: int) -> None:
    for v, bounds in given(n):
        with case(len(bounds)):
            found = check_moments(kernels, v, bounds)
            for factor in (0.0, 1e-3, 0.3, 1.0, 1.01):  # 1 reaches the largest magnitude, more does not
                check_tail(kernels, v, bounds, found.largest * factor)


@pytest.mark.parametrize("lower_bounds", [[1.0, float("inf"), 0.5], [float("inf")] * 3], ids=["one", "all"])
def test_a_range_whose_lower_bound_is_inf_is_not_read(kernels: Any, lower_bounds: list[float]) -> None:
    v = torch.cat([random(40_000, 1), torch.full((40_000,), float("nan")), random(40_000, 2)])
    check_tail(kernels, v, torch.tensor([0, 40_000, 80_000, 120_000]), torch.tensor(lower_bounds))


@pytest.mark.parametrize("n", [*range(1, 19), 31, 32, 33, 39])
def test_every_lane_counts(kernels: Any, n: int) -> None:
    """Ranges of n elements, each with one that is not zero, in a place of its own."""
    v, bounds = torch.eye(n).view(-1) * -3, torch.arange(0, n * n + 1, n)
    found = kernels.moments(v, bounds)
    for result, each in ((found.sums, -3), (found.magnitudes, 3), (found.squares, 9), (found.largest, 3)):
        assert result.tolist() == [each] * n
    tail = kernels.tail(v, bounds, torch.full((n,), 3.0))
    assert tail.counts.tolist() == [1] * n and tail.sums.tolist() == [3] * n
    assert not kernels.tail(v, bounds, torch.full((n,), 3.0000002)).counts.any()


@pytest.mark.parametrize("value", [3e38, -3e38, 1e-45, -1e-40])
def test_squares_at_the_ends_of_fp32_are_positive_numbers(kernels: Any, value: float) -> None:
    found = check_moments(kernels, torch.full((1000,), value), torch.tensor([0, 1000]))
    assert found.squares.isfinite().all() and found.squares > 0


def test_moments_depend_on_no_thread_address_or_instruction() -> None:
    """Several units of a segment, in different threads; another range before it shifts its address."""
    v, results = DATA["heavy"](200_003), []
    for name in NAMES[1:]:
        with backend(name) as native:
            for shift in (0, 1, 5):
                shifted = torch.cat([random(shift, 3), v])
                bounds, lower_bounds = torch.tensor([0, shift, len(shifted)]), torch.tensor([0.0, 0.7])
                found, tail = native.moments(shifted, bounds), native.tail(shifted, bounds, lower_bounds)
                results.append((found.sums, found.magnitudes, found.squares, tail.sums))
    for result in results:
        assert all(same(ours[1:], first[1:]) for ours, first in zip(result, results[0], strict=True))
