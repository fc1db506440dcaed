"""Sums over segments: of every backend against fp64, and the same bits whatever the threads and instructions."""

from functools import cache
from typing import Any

import torch
from cases import case
from kernels.backends import NAMES, backend
from kernels.comparison import check_moments, check_tail, random, same
from kernels.test_kernel_laws import DATA, SIZES

INF = float("inf")


@cache
def given(n: Any) -> Any:
    """A buffer of all kinds of data, n elements each. A segment is one kind, or a part of one, maybe empty."""
    v = torch.cat([make(n) for make in DATA.values()])
    whole = torch.arange(0, n * len(DATA) + 1, n) if n else torch.zeros(len(DATA) + 1, dtype=torch.int64)
    cuts = torch.randint(n * len(DATA) + 1, (20,), generator=torch.Generator().manual_seed(n))
    return [(v, whole), (v, torch.cat([whole, cuts]).msort())]


def test_moments_and_tails(kernels: Any) -> None:
    # a rank that serves no part of a small bucket has no segment
    nothing = kernels.moments(torch.empty(0, dtype=torch.float32), torch.tensor([0]))
    assert [x.shape for x in vars(nothing).values()] == [(0,)] * 4
    for n in SIZES:
        for v, bounds in given(n):
            with case(n, len(bounds)):
                found = check_moments(kernels, v, bounds)
                for factor in (0.0, 1e-3, 0.3, 1.0, 1.01):  # 1 reaches the largest magnitude, more does not
                    check_tail(kernels, v, bounds, found.largest * factor)


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
        found = check_moments(kernels, torch.full((1000,), value), torch.tensor([0, 1000]))
        assert found.squares.isfinite().all() and found.squares > 0


def test_ranges_whose_floor_is_inf_are_not_read(kernels: Any) -> None:
    v = torch.cat([random(40_000, 1), torch.full((40_000,), float("nan")), random(40_000, 2)])
    bounds = torch.tensor([0, 40_000, 80_000, 120_000])
    for lower_bounds in ([1.0, INF, 0.5], [INF] * 3):
        check_tail(kernels, v, bounds, torch.tensor(lower_bounds))


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
