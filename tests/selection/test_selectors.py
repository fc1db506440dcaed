"""Which elements the selectors take, on data of many shapes, and how `fit` cuts and shares."""

import math
from functools import partial

import pytest
import torch

import dgc.selection.sampled as sampled_module
from dgc.bucket import Segment
from dgc.kernels import Accumulation
from dgc.kernels.reference import above, largest
from dgc.selection import Exact, Histogram, Plan, Predicted, Sampled, plan_selection
from dgc.selection.plan import fit


def rng(seed):
    return torch.Generator().manual_seed(seed)


def laplace(n, seed=0):
    uniform = torch.rand(n, generator=rng(seed), dtype=torch.float64) - 0.5
    return (-uniform.sign() * torch.log1p(-2 * uniform.abs())).float()


def plan_of(*numels, ratio):
    segments, offset = [], 0
    for i, n in enumerate(numels):
        segments.append(Segment(f"p{i}", offset, n, (n,), (1,)))
        offset += n
    return plan_selection(segments, ratio)


def check(indices, v, plan):
    """What every selector promises."""
    assert indices.dtype == torch.int64
    assert indices.numel() <= plan.capacity
    assert (indices.diff() > 0).all()
    assert (v[indices] != 0).all()
    if indices.numel():
        assert indices[0] >= 0 and indices[-1] < v.numel()


# --- plan ------------------------------------------------------------------------------------------


def test_plan_rounds_up_and_sends_at_least_one():
    plan = plan_of(1, 10, 999, 1000, 1001, 0, ratio=0.001)
    assert plan.ks == (1, 1, 1, 1, 2, 0)
    assert plan.capacity == 6
    assert plan.offsets == (0, 1, 11, 1010, 2010, 3011)


def test_plan_at_ratio_one_is_everything():
    assert plan_of(3, 70, ratio=1.0).ks == (3, 70)


@pytest.mark.parametrize(("ratio", "numel", "k"), [(0.07, 100, 7), (0.29, 100, 29), (1e-3, 1000, 1), (1e-9, 5, 1)])
def test_the_noise_of_floats_sends_nothing_more(ratio, numel, k):
    """0.07 * 100 is 7.000000000000001."""
    assert plan_of(numel, ratio=ratio).ks == (k,)


# --- Exact -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.001, 0.05, 1.0])
def test_exact_is_top_k_of_every_tensor(ratio):
    sizes = (1, 500, 37, 2000)
    plan = plan_of(*sizes, ratio=ratio)
    v = laplace(sum(sizes)) * torch.repeat_interleave(torch.tensor([1.0, 100.0, 0.01, 1.0]), torch.tensor(sizes))
    chosen = Exact().indices(v, plan, seed=0)
    expected, offset = [], 0
    for part, k in zip(v.split(sizes), plan.ks, strict=True):
        expected += sorted((torch.topk(part.abs(), k).indices + offset).tolist())
        offset += part.numel()
    assert chosen.tolist() == expected
    check(chosen, v, plan)


def test_exact_leaves_zeros_out():
    v = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    assert Exact().indices(v, plan_of(4, 2, ratio=0.5), seed=0).tolist() == [2]


# --- Sampled ---------------------------------------------------------------------------------------

WALL_THRESHOLD = 1.0


def wall(n, seed=0):
    """Accumulated gradients: dense right below last step's threshold, few above it."""
    generator = rng(seed)
    v = WALL_THRESHOLD * torch.rand(n, generator=generator).pow(0.3)
    v += 0.03 * torch.randn(n, generator=generator)
    return v * (torch.randint(2, (n,), generator=generator) * 2 - 1)


SHAPES = {
    "laplace": laplace,
    "normal": lambda n, seed=0: torch.randn(n, generator=rng(seed)),
    "heavy tails": lambda n, seed=0: torch.empty(n).cauchy_(generator=rng(seed)).clamp(-1e30, 1e30),
    "wall": wall,
    "zeros": lambda n, seed=0: torch.zeros(n),
    "equal": lambda n, seed=0: torch.full((n,), -0.5),
    "outlier": lambda n, seed=0: torch.zeros(n).index_fill_(0, torch.tensor([n // 3]), 1e20),
    "half zeros": lambda n, seed=0: laplace(n, seed) * torch.randint(2, (n,), generator=rng(seed)),
    "tiny": lambda n, seed=0: laplace(n, seed) * 1e-40,
    "huge": lambda n, seed=0: laplace(n, seed) * 1e36,
    "one sign": lambda n, seed=0: laplace(n, seed).abs(),
    "ties": lambda n, seed=0: torch.randn(n, generator=rng(seed)).round(),
    "sorted": lambda n, seed=0: laplace(n, seed).sort().values,
}
SELECTORS = {
    "default": Sampled(),
    "random": Sampled(strided_sample=False),
    "no resample": Sampled(resample=False),
    "no adaptation": Sampled(max_adaptation_iters=0),
    "tight": Sampled(compress_upper_bound=1.0, compress_lower_bound=1.0, resample=False),
    "half": Sampled(sample_ratio=0.5),
}


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ratio", [0.001, 0.05])
def test_promises_on_every_shape(selector, shape, ratio):
    sizes = (7000, 20000, 3, 1)
    plan = plan_of(*sizes, ratio=ratio)
    v = SHAPES[shape](sum(sizes))
    for seed in range(2):
        chosen = SELECTORS[selector].indices(v, plan, seed)
        check(chosen, v, plan)
        assert torch.equal(chosen, SELECTORS[selector].indices(v, plan, seed))
        assert chosen.numel() > 0 or not v.any() or v.count_nonzero() == 1


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("strided", [True, False])
def test_count_on_laplace_data(ratio, strided):
    n = 100_000
    plan = plan_of(n, ratio=ratio)
    for seed in range(5):
        count = Sampled(strided_sample=strided).indices(laplace(n, seed), plan, seed).numel()
        assert 0.8 * plan.capacity <= count <= plan.capacity


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1])
def test_candidates_before_the_cut_lie_within_the_bounds(ratio):
    n = 100_000
    k = math.ceil(n * ratio)
    for seed in range(5):
        count = Sampled()._select_one(laplace(n, seed), k, ratio, rng(seed)).numel()
        assert 0.8 * k <= count <= 1.3 * k


def test_count_on_the_wall():
    """Resampling cuts an over-full selection to k; a thin one adapts until it holds 0.8 k."""
    n, plan = 100_000, plan_of(100_000, ratio=0.001)
    counts = [Sampled().indices(wall(n, seed), plan, seed).numel() for seed in range(10)]
    assert all(80 <= count <= 100 for count in counts)


def test_the_selection_holds_the_largest():
    """Every element left behind is smaller than any that was taken."""
    v, plan = laplace(50_000), plan_of(50_000, ratio=0.01)
    chosen = Sampled().indices(v, plan, 3)
    rest = v.clone()
    rest[chosen] = 0
    assert v[chosen].abs().min() >= rest.abs().max()


def test_a_single_outlier_is_found():
    """A sample that misses it gives threshold 0, which takes what is not zero and no more."""
    v, plan = SHAPES["outlier"](30_000), plan_of(30_000, ratio=0.001)
    for seed in range(5):
        assert Sampled().indices(v, plan, seed).tolist() == [10_000]


def test_all_equal_fills_the_plan():
    plan = plan_of(30_000, ratio=0.001)
    assert Sampled().indices(torch.full((30_000,), 2.0), plan, 0).numel() == plan.capacity == 30


@pytest.mark.parametrize("n", [1, 2, 5, 100, 1999])
def test_tiny_tensors_send_at_least_one(n):
    """Where the sample would be the whole tensor, the selection is exact."""
    v = laplace(n) + 0.01
    chosen = Sampled().indices(v, plan_of(n, ratio=0.001), 0)
    assert torch.equal(chosen, largest(v, math.ceil(n / 1000)))


def test_an_empty_tensor_sends_nothing():
    assert Sampled().indices(torch.empty(0), plan_of(0, ratio=0.1), 0).numel() == 0
    assert Sampled().indices(torch.ones(3), plan_of(0, 3, ratio=0.1), 0).numel() == 1


def test_seeds_differ():
    v, plan = laplace(60_000), plan_of(60_000, ratio=0.005)
    different = {tuple(Sampled().indices(v, plan, seed).tolist()) for seed in range(6)}
    assert len(different) > 1


def test_torchs_global_generator_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for selector in (Sampled(), Sampled(strided_sample=False)):
        selector.indices(laplace(20_000), plan_of(20_000, ratio=0.01), 1)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("n", [2001, 4096, 10_000, 65_536, 99_999, 300_001])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.25])
@pytest.mark.parametrize("sample_ratio", [0.01, 0.3])
def test_strided_samples(n, ratio, sample_ratio):
    """Enough of them, an odd stride, and a start that varies."""
    v = torch.arange(n, dtype=torch.float64)
    wanted = max(math.ceil(n * sample_ratio), math.ceil(2 / ratio))
    starts = set()
    for seed in range(8):
        samples = Sampled(sample_ratio=sample_ratio)._sample(v, ratio, rng(seed))
        strides = samples.diff()
        assert samples.numel() >= min(wanted, n)
        assert (strides == strides[0]).all() and strides[0] % 2 == 1
        starts.add(samples[0].item())
    assert len(starts) > 1 or strides[0] == 1


class Counting:
    """Counts calls and notes how many elements each found."""

    def __init__(self, function):
        self.function, self.found = function, []

    def __call__(self, *args):
        result = self.function(*args)
        self.found.append(result.numel())
        return result


@pytest.fixture
def calls(monkeypatch):
    counters = Counting(above), Counting(largest)
    monkeypatch.setattr(sampled_module, "above", counters[0])
    monkeypatch.setattr(sampled_module, "largest", counters[1])
    return counters


class FixedSample(Sampled):
    """Its sample is a constant, so that the first threshold is known."""

    def _sample(self, v, ratio, generator):
        return torch.full((10,), getattr(self, "threshold", 1.0))


class High(FixedSample):
    threshold = 9.95


class Low(FixedSample):
    threshold = 0.5


def ramp(n=1000):
    """Magnitudes 0.005, 0.015, ... 9.995: |v| >= t holds 100 (10 - t) elements."""
    return torch.arange(n) * 0.01 + 0.005


def test_too_few_lowers_the_threshold_step_by_step(calls):
    """9.95, 7.96, 6.368: 5, 204, 363 elements for k = 400, where 320 are enough."""
    chosen = High()._select_one(ramp(), 400, 0.4, rng(0))
    assert calls[0].found == [5, 204, 363] and calls[1].found == []
    assert chosen.numel() == 363


def test_too_many_are_resampled_at_once(calls):
    chosen = Low()._select_one(ramp(), 100, 0.1, rng(0))
    assert calls[0].found == [950] and calls[1].found == [100]
    assert chosen.tolist() == list(range(900, 1000))


def test_too_many_raise_the_threshold_without_resampling(calls):
    chosen = Low(resample=False)._select_one(ramp(), 600, 0.6, rng(0))
    thresholds = [0.5 * 1.3**i for i in range(7)]
    assert calls[1].found == []
    assert calls[0].found == pytest.approx([100 * (10 - t) for t in thresholds], abs=1)
    assert calls[0].found[-2] > 1.3 * 600 >= calls[0].found[-1] == chosen.numel()


def test_adaptation_ends_after_its_iterations(calls):
    Low(resample=False, max_adaptation_iters=3)._select_one(ramp(), 1, 0.001, rng(0))
    assert len(calls[0].found) == 4
    calls[0].found.clear()
    High(max_adaptation_iters=0)._select_one(ramp(), 400, 0.4, rng(0))
    assert calls[0].found == [5]


def test_within_the_bounds_nothing_adapts(calls):
    FixedSample()._select_one(ramp(), 850, 0.85, rng(0))
    assert len(calls[0].found) == 1 and calls[1].found == []


@pytest.mark.parametrize(
    "options",
    [
        {"sample_ratio": 0.0},
        {"sample_ratio": 1.1},
        {"compress_upper_bound": 0.9},
        {"compress_lower_bound": 1.1},
        {"compress_lower_bound": 0.0},
        {"max_adaptation_iters": -1},
    ],
)
def test_bad_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Sampled(**options)


# --- fit -------------------------------------------------------------------------------------------


def test_fit_keeps_what_fits():
    plan = Plan((0, 5), (5, 5), (2, 2), 0.4)
    kept = fit(torch.arange(10.0), [torch.tensor([1, 3]), torch.tensor([0])], plan)
    assert kept.tolist() == [1, 3, 5]


def test_fit_shares_free_slots_and_cuts_by_magnitude():
    """Tensor 0 leaves 3 slots; 1 and 2 want 4 and 2 more, so they get 2 and 1."""
    plan = Plan((0, 10, 20), (10, 10, 10), (3, 3, 3), 0.3)
    v = torch.arange(30.0) % 10 + 1
    candidates = [torch.tensor([], dtype=torch.int64), torch.arange(7), torch.arange(5)]
    assert fit(v, candidates, plan).tolist() == [12, 13, 14, 15, 16, 21, 22, 23, 24]


def test_fit_gives_all_free_slots_where_they_suffice():
    plan = Plan((0, 10), (10, 10), (4, 1), 0.25)
    kept = fit(torch.ones(20), [torch.tensor([2]), torch.arange(3)], plan)
    assert kept.tolist() == [2, 10, 11, 12]


@pytest.mark.usefixtures("no_type_checks")
def test_fit_never_exceeds_the_capacity():
    generator = rng(0)
    for _ in range(200):
        ks = tuple(torch.randint(1, 6, (4,), generator=generator).tolist())
        plan = Plan((0, 20, 40, 60), (20,) * 4, ks, 0.1)
        counts = torch.randint(0, 21, (4,), generator=generator).tolist()
        candidates = [torch.arange(c) for c in counts]
        kept = fit(torch.rand(80, generator=generator) + 1, candidates, plan)
        assert kept.numel() <= plan.capacity
        assert kept.numel() >= sum(min(c, k) for c, k in zip(counts, ks, strict=True))


# --- no place in a tensor is worse than another ----------------------------------------------------

DRAWS, N, RATIO, DECILES = 100, 20_000, 0.01, 10
# chi-square with 9 degrees of freedom exceeds this once in 10 ** 6 draws
LIMIT = 45.0


class WidePlan(Sampled):
    """Takes some 30 percent too many before the cut, as adaptation may."""

    def _select_one(self, v, k, ratio, generator):
        return largest(v, math.ceil(1.29 * k))


def chi_square(cut):
    """Of the counts per tenth of the tensor, over many draws of data without any order."""
    plan = plan_of(N, ratio=RATIO)
    counts = torch.zeros(DECILES)
    for seed in range(DRAWS):
        chosen = cut(laplace(N, 1000 + seed), plan, seed)
        counts += torch.bincount(chosen * DECILES // N, minlength=DECILES)
    expected = counts.sum() / DECILES
    return float(((counts - expected) ** 2 / expected).sum())


def chosen_by(selector, v, plan, seed):
    """By the whole pass: the data are the gradient, and v begins at zero."""
    selection = selector.select(Accumulation((v,), None, torch.zeros(N)), plan, seed).selection
    return selection.indices[: int(selection.count)].long()


def cut_in_index_order(v, plan, seed):
    """What the original does with a selection between k and 1.3 k."""
    (k,) = plan.ks
    return WidePlan()._select_one(v, k, plan.ratio, rng(seed))[:k]


@pytest.mark.parametrize(
    "selector",
    [
        Sampled(),
        Sampled(strided_sample=False),
        WidePlan(),
        Exact(),
        Exact(per_bucket=True),
        Histogram(),
        Predicted(),
        Predicted(per_bucket=True),
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_no_positional_bias(selector):
    assert chi_square(partial(chosen_by, selector)) < LIMIT


@pytest.mark.usefixtures("no_type_checks")
def test_the_cut_in_index_order_would_fail():
    assert chi_square(cut_in_index_order) > 10 * LIMIT
