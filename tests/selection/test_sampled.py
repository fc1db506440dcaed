"""The sampled threshold: its sample, its adaptation, and what that selects."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from cases import case
from selection.shapes import SHAPES, indices_of, laplace, plan_of, rng, wall

from dgc.kernels.selection import largest
from dgc.selection import Sampled
from dgc.selection.estimators import Ranges


def estimate(selector: Any, v: Any, ratio: Any, seed: int = 0) -> Any:
    """How many elements reach the threshold of one tensor, before anything is cut to fit."""
    return int(selector.estimate(Ranges(v, plan_of(v.numel(), ratio=ratio), seed))[1])


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1])
def test_count_on_laplace_data(ratio: Any) -> None:
    """Before the cut candidates lie within the bounds. torch's generator is left alone."""
    n, before = 100_000, torch.get_rng_state()
    plan = plan_of(n, ratio=ratio)
    for seed in range(5):
        v = laplace(n, seed)
        for strided in (True, False):
            count = indices_of(Sampled(strided_sample=strided), v, plan, seed).numel()
            assert 0.8 * plan.capacity <= count <= plan.capacity
        assert 0.8 * n * ratio <= estimate(Sampled(), v, ratio, seed) <= 1.3 * math.ceil(n * ratio)
    assert torch.equal(torch.get_rng_state(), before)


def test_count_on_the_wall_and_of_a_single_outlier() -> None:
    """Resampling cuts an over-full selection to k; a thin one adapts until it holds 0.8 k.

    A sample that misses the outlier gives threshold 0, which takes what is not zero and no more.
    """
    n, plan = 100_000, plan_of(100_000, ratio=0.001)
    counts = [indices_of(Sampled(), wall(n, seed), plan, seed).numel() for seed in range(10)]
    assert all(80 <= count <= 100 for count in counts)
    v, plan = SHAPES["outlier"](30_000), plan_of(30_000, ratio=0.001)
    assert all(indices_of(Sampled(), v, plan, seed).tolist() == [10_000] for seed in range(5))


def test_tiny_tensors_send_at_least_one() -> None:
    """Where the sample would be the whole tensor, the selection is exact."""
    for n in (1, 2, 5, 100, 1999):
        v = laplace(n) + 0.01
        chosen = indices_of(Sampled(), v, plan_of(n, ratio=0.001), 0)
        assert torch.equal(chosen, largest(v, math.ceil(n / 1000))), n


@pytest.mark.parametrize("n", [2001, 4096, 10_000, 65_536, 99_999, 300_001])
def test_strided_samples(n: Any) -> None:
    """Enough of them, an odd stride, and a start that varies."""
    v = torch.arange(n, dtype=torch.float64)
    for ratio, sample_ratio in product((0.001, 0.01, 0.25), (0.01, 0.3)):
        wanted = max(math.ceil(n * sample_ratio), math.ceil(2 / ratio))
        starts = set()
        with case(ratio, sample_ratio):
            for seed in range(8):
                samples = Sampled(sample_ratio=sample_ratio)._sample(v, ratio, rng(seed))
                strides = samples.diff()
                assert samples.numel() >= min(wanted, n)
                assert (strides == strides[0]).all() and strides[0] % 2 == 1
                starts.add(samples[0].item())
            assert len(starts) > 1 or strides[0] == 1


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """How many elements each pass counted."""
    found, count = [], Ranges.count

    def noted(self: Any, t: Any, where: Any) -> Any:
        counts = count(self, t, where)
        found.append(int(counts))
        return counts

    monkeypatch.setattr(Ranges, "count", noted)
    return found


class FixedSample(Sampled):
    """Its sample is a constant, so that the first threshold is known."""

    threshold = 1.0

    def _sample(self, v: Any, ratio: Any, generator: Any) -> Any:
        return torch.full((10,), self.threshold)


class High(FixedSample):
    threshold = 9.95


class Low(FixedSample):
    threshold = 0.5


# |v| >= t holds 100 (10 - t) elements
RAMP = torch.arange(1000) * 0.01 + 0.005


def test_too_few_lowers_the_threshold_step_by_step(counted: Any) -> None:
    """9.95, 7.96, 6.368: 5, 204, 363 elements for k = 400, where 320 are enough."""
    assert estimate(High(), RAMP, 0.4) == 363
    assert counted == [5, 204, 363]


def test_too_many_are_resampled_or_raise_the_threshold(counted: Any) -> None:
    assert indices_of(Low(), RAMP, plan_of(1000, ratio=0.1), 0).tolist() == list(range(900, 1000))
    assert counted == [950], "resampled at once"
    counted.clear()
    assert estimate(Low(resample=False), RAMP, 0.6) == counted[-1]
    assert counted == pytest.approx([100 * (10 - 0.5 * 1.3**i) for i in range(7)], abs=1)
    assert counted[-2] > 1.3 * 600 >= counted[-1]


def test_adaptation_ends_after_its_iterations_or_within_the_bounds(counted: Any) -> None:
    estimate(Low(resample=False, max_adaptation_iters=3), RAMP, 0.001)
    assert len(counted) == 4
    counted.clear()
    estimate(High(max_adaptation_iters=0), RAMP, 0.4)
    estimate(FixedSample(), RAMP, 0.85)
    assert counted == [5, 900]
