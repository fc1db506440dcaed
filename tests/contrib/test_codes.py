"""TernGrad, natural compression, 1-bit SGD, random k and SVD, each against its definition."""

from functools import partial
from typing import Any

import pytest
import torch
from codes.test_quantized import STOCHASTIC, N, once
from core.ranks import Ranks, normal

from dgc import contrib
from dgc.contrib.onebit import rows_of
from dgc.contrib.svd import inclusion


def test_one_bit_sgd_sends_the_mean_of_each_side_of_each_row() -> None:
    g = normal(12 * 40, seed=1).view(12, 40)
    sent = once(contrib.OneBitCompressor, g)
    for row, got in zip(g, sent, strict=True):
        for side in (row > 0, row <= 0):
            torch.testing.assert_close(got[side], row[side].mean().expand(int(side.sum())))
    assert (g - sent).norm() < (g - g.sign() * g.abs().mean()).norm()


def test_the_rows_of_one_bit_sgd_are_the_outermost_dimension() -> None:
    segments = Ranks(1, contrib.OneBitCompressor, [(5, 3, 2), (7,), (), (0, 4)]).buckets[0].segments
    assert [rows_of(s) for s in segments] == [5, 1, 1, 1]


def test_terngrad_sends_zero_or_the_largest_magnitude() -> None:
    g = normal(N, seed=5)
    assert set(once(STOCHASTIC["terngrad"], g).abs().tolist()) == {0.0, float(g.abs().max())}


def test_terngrad_clips_to_standard_deviations() -> None:
    g = normal(N, seed=5)
    clipped = once(partial(contrib.TernGradCompressor, clip=2.5), g).abs().max()
    torch.testing.assert_close(clipped, 2.5 * g.std(correction=0), rtol=1e-5, atol=0)


def test_terngrad_does_not_clip_equal_elements() -> None:
    equal = torch.full((7,), -0.3)
    assert torch.equal(once(contrib.TernGradCompressor, equal), equal)


LARGEST = 2.0**63  # below what counts as unusable in a gradient
POWERS = [
    ([1.0, -1.4375, 1.5, -(2.0**-125)], [1.0, -1.0, 2.0, -(2.0**-125)]),
    ([1.0, 2.0**-126, -1e-45], [1.0, 0.0, 0.0]),  # the smallest power has no code beside 1
    ([8e-39, -(2.0**-126), 3e-39], [2.0**-126, -(2.0**-126), 0.0]),
    ([LARGEST, -2.0, 2.0**-70], [LARGEST, -2.0, 0.0]),
]


@pytest.mark.parametrize(("given", "sent"), POWERS)
def test_natural_compression_rounds_to_powers_within_2_to_the_126_of_the_largest(given: Any, sent: Any) -> None:
    found = once(partial(contrib.NaturalCompressor, random=False), torch.tensor(given))
    assert torch.equal(found, torch.tensor(sent))


def test_natural_compression_sends_powers_at_random_too() -> None:
    powers = once(contrib.NaturalCompressor, normal(N, seed=5)).abs().log2()
    assert (powers == powers.round()).all()


def test_random_k_takes_one_of_each_stretch_the_same_on_all_ranks() -> None:
    ranks = Ranks(3, partial(contrib.RandomKCompressor, 0.1), [(100,), (7,)])
    mean = ranks.step([torch.ones(107) * r for r in (1, 2, 3)])
    chosen = mean.nonzero().view(-1)
    assert [int(i) // 10 for i in chosen if i < 100] == list(range(10)) and int((chosen >= 100).sum()) == 1
    assert (mean[chosen] == 2).all()


def test_a_ratio_of_random_k_above_1_is_read_as_the_factor_saved() -> None:
    with pytest.warns(UserWarning, match="compress_ratio=20 is read as the factor saved: a share of 0.05 is sent"):
        assert contrib.RandomKCompressor(20).compress_ratio == 1 / 20


def test_a_random_block_is_one_stretch_which_goes_on_around_the_end() -> None:
    ranks, starts = Ranks(1, partial(contrib.RandomBlockCompressor, 0.3, error_feedback=False), [(10,)]), set()
    for _ in range(60):
        chosen = ranks.step([torch.ones(10)]).nonzero().view(-1).tolist()
        start = next(i for i in range(10) if i in chosen and (i - 1) % 10 not in chosen)
        assert sorted((start + j) % 10 for j in range(3)) == chosen
        starts.add(start)
    assert starts == set(range(10))


@pytest.mark.parametrize("rank", [1, 3])
def test_svd_is_the_best_approximation(rank: int) -> None:
    M = normal(20 * 30, seed=8).view(20, 30)
    U, s, Vh = torch.linalg.svd(M.double())  # in fp32 some CPUs' LAPACK is a hundred times less exact than ours
    best = U[:, :rank] * s[:rank] @ Vh[:rank]
    found = once(partial(contrib.SVDCompressor, rank), M).double()
    torch.testing.assert_close(found, best, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("shape", "accepted"),
    [((3, 40), True), ((2, 2), False), ((40,), False), ((), False), ((0, 4), False), ((30, 4, 5), True)],
)
def test_svd_accepts_matrices_that_are_larger_than_their_factors(shape: tuple[int, ...], accepted: bool) -> None:
    (segment,) = Ranks(1, contrib.SVDCompressor, [shape]).buckets[0].segments
    assert contrib.SVDCompressor(2).accepts(segment) == accepted


@pytest.mark.parametrize(
    ("s", "r", "expected"),
    [
        ([1.0, 1, 1, 1], 2, [0.5] * 4),
        ([100.0, 1, 1], 2, [1, 0.5, 0.5]),
        ([100.0, 10, 1, 1], 3, [1, 1, 0.5, 0.5]),
        ([3.0, 2, 1], 3, [1, 1, 1]),
        ([1.0, 0, 0], 2, [1, 0.5, 0.5]),
        ([0.0, 0], 1, [0.5, 0.5]),
    ],
)
def test_the_probabilities_of_atomo_add_up_to_the_rank(s: list[float], r: int, expected: list[float]) -> None:
    assert inclusion(torch.tensor(s), r).tolist() == pytest.approx(expected, abs=1e-6)
