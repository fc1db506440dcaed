"""Sums over segments: of every backend against fp64, and the same bits whatever the threads and instructions."""

from functools import cache
from typing import Any

import torch
from kernels.backends import NAMES, backend
from kernels.comparison import random, same
from kernels.test_kernel_laws import DATA, SIZES

INF = float("inf")
# of the largest magnitude in a segment; 1 reaches it, more does not
LOWER_BOUNDS = (0.0, 1e-3, 0.3, 1.0, 1.01)


@cache
def given(n: Any) -> Any:
    """A buffer of all kinds of data, n elements each. A segment is one kind, or a part of one, maybe empty.

    For each way to cut it: (buffer, bounds, sums of v, of |v| and of squares, largest, tails). A tail is
    (lower bounds, counts, sums).
    """
    v, made = torch.cat([make(n) for make in DATA.values()]), []
    whole = torch.arange(0, n * len(DATA) + 1, n) if n else torch.zeros(len(DATA) + 1, dtype=torch.int64)
    cuts = torch.randint(n * len(DATA) + 1, (20,), generator=torch.Generator().manual_seed(n))
    for bounds in whole, torch.cat([whole, cuts]).msort():
        parts, tails = v.double().split(bounds.diff().tolist()), []
        largest = torch.stack([part.abs().max() if part.numel() else part.sum() for part in parts])
        for lower_bounds in (largest.float() * factor for factor in LOWER_BOUNDS):
            limits = zip(parts, lower_bounds.tolist(), strict=True)
            over = [part.abs()[(part.abs() >= limit) & (part != 0)] for part, limit in limits]
            counts, sums = [part.numel() for part in over], torch.stack([part.sum() for part in over])
            tails.append((lower_bounds, counts, sums))
        of_all = (torch.stack([of(part).sum() for part in parts]) for of in (torch.clone, torch.abs, torch.square))
        made.append((v, bounds, *of_all, largest, tails))
    return made


def assert_near(sums: Any, expected: Any, scale: Any = None) -> None:
    """Within 1e-9 of the sum, or of the scale that a sum of terms of both signs is judged by."""
    assert ((sums - expected).abs() <= 1e-9 * (expected if scale is None else scale)).all()


def test_moments(kernels: Any) -> None:
    # a rank that serves no part of a small bucket has no segment
    nothing = kernels.moments(torch.empty(0, dtype=torch.float32), torch.tensor([0]))
    assert [x.shape for x in vars(nothing).values()] == [(0,)] * 4
    for n in SIZES:
        for v, bounds, values, magnitudes, squares, largest, _ in given(n):
            found = kernels.moments(v, bounds)
            assert_near(found.sums, values, magnitudes)
            assert_near(found.magnitudes, magnitudes)
            assert_near(found.squares, squares)
            assert torch.equal(found.largest.double(), largest)


def test_tail(kernels: Any) -> None:
    """A lower bound of 0 leaves out zeros alone; one that is the magnitude of an element lets it through."""
    for n in SIZES:
        for v, bounds, *_, tails in given(n):
            for lower_bounds, counts, sums in tails:
                found = kernels.tail(v, bounds, lower_bounds)
                assert found.counts.tolist() == counts
                assert_near(found.sums, sums)


def test_every_lane_counts(kernels: Any) -> None:
    """Ranges of n elements, each with one that is not zero, in a place of its own."""
    for n in (*range(1, 19), 31, 32, 33, 39):
        v, bounds = torch.eye(n).view(-1) * -3, torch.arange(0, n * n + 1, n)
        found = kernels.moments(v, bounds)
        for result, each in ((found.sums, -3), (found.magnitudes, 3), (found.squares, 9), (found.largest, 3)):
            assert result.tolist() == [each] * n
        tail = kernels.tail(v, bounds, torch.full((n,), 3.0))
        assert tail.counts.tolist() == [1] * n and tail.sums.tolist() == [3] * n
        assert not kernels.tail(v, bounds, torch.full((n,), 3.0000002)).counts.any()


def test_squares_neither_overflow_nor_vanish(kernels: Any) -> None:
    for value in (3e38, -3e38, 1e-45, -1e-40):
        v, wide = torch.full((1000,), value), float(torch.tensor(value))
        found = kernels.moments(v, torch.tensor([0, 1000]))
        assert_near(found.sums, 1000 * wide, 1000 * abs(wide))
        assert_near(found.squares, 1000 * wide * wide)
        assert float(found.largest) == abs(wide), value


def test_ranges_whose_floor_is_inf_are_not_read(kernels: Any) -> None:
    v = torch.cat([random(40_000, 1), torch.full((40_000,), float("nan")), random(40_000, 2)])
    bounds = torch.tensor([0, 40_000, 80_000, 120_000])
    found = kernels.tail(v, bounds, torch.tensor([1.0, INF, 0.5]))
    assert found.counts.tolist() == [int((v[:40_000].abs() >= 1).sum()), 0, int((v[80_000:].abs() >= 0.5).sum())]
    assert found.sums[1] == 0
    nothing = kernels.tail(v, bounds, torch.full((3,), INF))
    assert not nothing.counts.any() and not nothing.sums.any()


def test_threads_addresses_and_instructions_change_no_bit() -> None:
    """Several units of a segment, in different threads; another range before it shifts its address."""
    v = DATA["heavy"](200_003)
    results = []
    for name in NAMES[1:]:
        with backend(name) as native:
            for shift in (0, 1, 5):
                shifted = torch.cat([random(shift, 3), v])
                bounds, lower_bounds = torch.tensor([0, shift, len(shifted)]), torch.tensor([0.0, 0.7])
                found, tail = native.moments(shifted, bounds), native.tail(shifted, bounds, lower_bounds)
                results.append((found.sums, found.magnitudes, found.squares, tail.sums))
    for result in results:
        assert all(same(ours[1:], first[1:]) for ours, first in zip(result, results[0], strict=True))
