"""What every selector promises, on data of every shape, and where each is known to be weak."""

import math
from functools import cache, partial
from typing import Any

import pytest
import torch
from cases import case
from selection.shapes import SHAPES, indices_of, laplace, plan_of

import dgc.kernels as kernels
from dgc.kernels import PassInputs
from dgc.kernels.selection import largest
from dgc.selection import (
    Bisection,
    Exact,
    Exponential,
    Fixed,
    Gaussian,
    Histogram,
    Laplace,
    MSTopk,
    Predicted,
    Radix,
    Sampled,
    TopKPerChunk,
    Trimmed,
)
from dgc.selection.estimators import Estimator, Ranges

SELECTORS = {
    "exact": Exact(),
    "exact of the bucket": Exact(per_bucket=True),
    "radix": Radix(),
    "histogram": Histogram(),
    "predicted": Predicted(),
    "sampled": Sampled(),
    "sampled at random": Sampled(strided_sample=False),
    "sampled without resampling": Sampled(resample=False),
    "sampled without adaptation": Sampled(max_adaptation_iters=0),
    "sampled tightly": Sampled(compress_upper_bound=1.0, compress_lower_bound=1.0, resample=False),
    "half sampled": Sampled(sample_ratio=0.5),
    "trimmed": Trimmed(),
    "bisection": Bisection(),
    "mstopk": MSTopk(),
    "laplace": Laplace(),
    "laplace, redsync": Laplace(stop="redsync"),
    "laplace, exact": Laplace(stop="exact"),
    "laplace, secant": Laplace(method="secant"),
    "laplace, warm": Laplace(warm_start=True),
    "exponential": Exponential(),
    "gaussian": Gaussian(),
}
# These send the k largest of every tensor, whatever the numbers.
EXACT = ("exact", "radix", "histogram", "predicted", "trimmed", "mstopk")


def chosen_by(selector: Any, v: Any, plan: Any, seed: Any) -> Any:
    """By the whole pass, of a gradient of zeros."""
    selection = selector.select(PassInputs((torch.zeros_like(v),), None, v.clone()), plan, seed).elements
    return selection.indices[: int(selection.count)].long()


def check(selector: str, indices: Any, v: Any, plan: Any) -> None:
    assert indices.dtype == torch.int64
    assert indices.numel() <= plan.capacity
    assert (indices.diff() > 0).all()
    assert (v[indices] != 0).all()
    if indices.numel():
        assert indices[0] >= 0 and indices[-1] < v.numel()
    if selector == "exact of the bucket":
        return
    for segment, part, k in zip(plan.segments, plan.split(v), plan.ks, strict=True):
        start = segment.offset
        own = indices[(indices >= start) & (indices < start + segment.numel)] - start
        assert own.numel() >= min(1, int(part.count_nonzero()))
        if selector in EXACT:
            assert torch.equal(own, largest(part, k))
        assert own.numel() == 0 or part[own].abs().min() >= part.abs().index_fill(0, own, 0.0).max()


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.usefixtures("no_type_checks")
def test_promises_on_every_shape(selector: Any) -> None:
    """Within capacity, no zero, something of every tensor that has anything, the largest first, and repeatable."""
    sizes, whole = (4000, 20_000, 0, 3, 1), ("laplace", "zeros", "half zeros", "ties", "tiny", "huge")
    for shape, ratio in [*((shape, 0.001) for shape in SHAPES), *((shape, 1.0) for shape in whole)]:
        plans = [plan_of(*sizes, ratio=ratio) for _ in range(2)]
        for step in range(2):
            v = SHAPES[shape](sum(sizes), step)
            chosen, again = (chosen_by(SELECTORS[selector], v, plan, step) for plan in plans)
            with case(shape, ratio):
                assert torch.equal(chosen, again)
                check(selector, chosen, v, plans[0])


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.usefixtures("no_type_checks")
def test_nan_and_inf_end_in_a_choice(selector: Any) -> None:
    """Gradients with them never reach v; a tensor of one's own may hold them. They count as the largest."""
    for bad in (math.nan, math.inf, -math.inf):
        v, plan = laplace(30_000), plan_of(10_000, 20_000, ratio=0.01)
        v[[17, 12_345]] = bad
        chosen = indices_of(SELECTORS[selector], v, plan, 0)
        assert 2 <= chosen.numel() <= plan.capacity, bad
        assert {17, 12_345} <= set(chosen.tolist()), bad


@pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)
def test_nothing_a_single_element_equal_ones_and_all_of_them(selector: Any) -> None:
    def chosen(v: Any, *sizes: int, ratio: float) -> Any:
        return indices_of(selector, v, plan_of(*sizes, ratio=ratio), 0)

    assert chosen(torch.empty(0), 0, ratio=0.1).numel() == 0
    assert chosen(torch.ones(3), 0, 3, ratio=0.1).numel() == 1
    for value in (1e-45, -1.0, 3e38):
        assert chosen(torch.tensor([value]), 1, ratio=0.001).tolist() == [0]
    assert chosen(torch.full((30_000,), 2.0), 30_000, ratio=0.001).numel() == 30, "equal ones fill the plan"
    assert chosen(laplace(5000), 5000, ratio=1.0).numel() >= 0.8 * 5000


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The name of every pass over v that estimates make."""
    selection, made = kernels.of(torch.empty(0)).selection, []

    def noting(name: str, inner: Any) -> Any:
        return lambda *arguments: made.append(name) or inner(*arguments)  # type: ignore[func-returns-value]

    for name in ("moments", "tail"):
        monkeypatch.setattr(selection, name, noting(name, getattr(selection, name)))
    return made


def estimates(selector: Any, v: Any, ratio: Any, steps: int = 1) -> Any:
    """Elements that reach the estimated threshold, by k, in the last of several steps on the same numbers."""
    plan = plan_of(v.numel(), ratio=ratio)
    for _ in range(steps):
        t, counts = selector.estimate(Ranges(v, plan, 0))
        assert int(counts) <= int((v.abs() >= t).sum())
    return int(counts) / plan.ks[0]


N = 300_000
FITS = [
    # the selector, the data it assumes, steps until it has settled, counts by k, passes at most
    (Laplace(), "laplace", 1, (0.8, 1.25), 2),
    (Laplace(), "normal", 1, (0.8, 1.25), 9),
    (Laplace(), "wall", 1, (0.8, 1.25), 13),
    (Laplace(method="secant"), "wall", 1, (0.8, 1.25), 10),
    (Laplace(stop="redsync"), "normal", 1, (1.0, 2.0), 9),
    (Laplace(stop="exact", passes=40), "normal", 1, (1.0, 1.0), 30),
    (Laplace(warm_start=True), "wall", 2, (0.8, 1.25), 13 + 2),
    (Exponential(), "laplace", 1, (0.8, 1.25), 2),
    (Exponential(), "laplace", 30, (0.8, 1.25), 5 * 30),
    (Gaussian(), "normal", 1, (2 / 3, 4 / 3), 2),
    (Gaussian(), "laplace", 1, (2 / 3, 4 / 3), 5),
    (Bisection(), "laplace", 1, (1.0, 2.0), 11),
    (Bisection(), "wall", 1, (1.0, 2.0), 11),
    (MSTopk(), "normal", 1, (1.0, 1.0), 31),
    (Trimmed(), "heavy tails", 1, (1.0, 1.0), 6),
]


@pytest.mark.parametrize(("selector", "shape", "steps", "counts", "most"), FITS)
@pytest.mark.parametrize("ratio", [0.001, 0.01])
def test_estimates_where_they_should_hold(
    selector: Any, shape: Any, steps: Any, counts: Any, most: Any, ratio: Any, passes: Any
) -> None:
    assert counts[0] <= estimates(selector, SHAPES[shape](N, 3), ratio, steps) <= counts[1]
    assert len(passes) <= most


def test_the_fits_alone_miss_on_accumulated_gradients() -> None:
    """On the wall, Laplace's first threshold is above nearly everything: the correction is the algorithm."""
    v = SHAPES["wall"](N)
    for ratio in (0.001, 0.01):
        segments = Ranges(v, plan_of(N, ratio=ratio))
        first = float(-segments.mean * segments.density.log())
        assert int((v.abs() >= first).sum()) < 0.05 * N * ratio


def test_stages_rise_where_too_few_and_fall_where_too_many() -> None:
    """On the wall a single stage selects next to nothing: M grows, each period by one."""
    v, plan, selector = SHAPES["wall"](N), plan_of(N, ratio=0.01), Exponential()
    stages = []
    for _ in range(20):
        selector.estimate(Ranges(v, plan, 0))
        stages.append(int(plan.history["stages"][0, 0]))
    assert stages[:4] == [1] * 4 and stages[4:9] == [2] * 5 and max(stages) > 2
    assert all(1 <= m <= math.ceil(math.log2(100)) for m in stages)
    heavy = SHAPES["heavy tails"](N)
    for _ in range(60):
        selector.estimate(Ranges(heavy, plan, 0))
    assert int(plan.history["stages"][0, 0]) != stages[-1]


def test_a_stage_that_nothing_survives_leaves_the_threshold_where_it_is() -> None:
    v, plan = torch.full((10_000,), 0.5), plan_of(10_000, ratio=0.001)
    plan.history["stages"] = torch.tensor([[5.0, 0.0, 0.0]], dtype=torch.float64)
    t, counts = Exponential().estimate(Ranges(v, plan, 0))
    assert 0 < float(t) <= 0.5 and int(counts) == 10_000


def test_a_warm_start_begins_at_the_last_threshold(passes: Any) -> None:
    v, plan, selector = SHAPES["wall"](N), plan_of(N, ratio=0.001), Laplace(warm_start=True)
    for scale in (1.0, 8.0):
        selector.estimate(Ranges(scale * v, plan, 0))
        passes.clear()
        selector.estimate(Ranges(scale * v, plan, 0))
        assert passes == ["moments", "tail"]  # the first count is accepted


def test_the_gaussian_search_does_not_go_to_and_fro() -> None:
    """A count that doubles and halves around the accepted ones: 3 k at t, k/3 at 1.5 t."""
    v = torch.cat([torch.full((300,), 1.0), torch.full((30,), 1.4), torch.full((20,), 2.0), torch.zeros(99_650)])
    counts = estimates(Gaussian(passes=20), v, 0.0005)
    assert 2 / 3 <= counts <= 4 / 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (partial(Laplace, stop="loose"), "stop is one of redsync, tight, exact"),
        (partial(Laplace, method="newton"), "method is one of bisection, secant"),
        *((partial(kind, passes=0), "passes") for kind in (Laplace, Bisection, Gaussian)),
        (partial(Bisection, lower=1.5), "lower"),
        (partial(Exponential, period=0), "period"),
        (partial(Exponential, upper=0.9), "upper"),
        (partial(Trimmed, step=0.0), "step"),
        (partial(Fixed, 0.0), "threshold"),
        (partial(Predicted, margin=0.0), "margin"),
        *((partial(Sampled, sample_ratio=ratio), "sample_ratio") for ratio in (0.0, 1.1)),
        (partial(Sampled, compress_upper_bound=0.9), "compress_upper_bound"),
        *((partial(Sampled, compress_lower_bound=bound), "compress_lower_bound") for bound in (0.0, 1.1)),
        (partial(Sampled, max_adaptation_iters=-1), "max_adaptation_iters"),
        (partial(TopKPerChunk, 0), "chunk_size must be 1 element or more, not 0"),
    ],
    ids=str,
)
def test_bad_options(make: Any, words: Any) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_every_estimator_is_in_the_table() -> None:
    estimators = {kind for base in Estimator.__subclasses__() for kind in (base, *base.__subclasses__())}
    of_tests = {"FixedSample", "High", "Low", "WidePlan"}
    # Fixed sends nothing where nothing reaches its threshold, which others never do
    assert {e.__name__ for e in estimators} - of_tests - {"Fixed"} <= {
        type(selector).__name__ for selector in SELECTORS.values()
    }


def test_a_fixed_threshold() -> None:
    plan, v = plan_of(40, 40, ratio=0.1), torch.zeros(80)
    v[[3, 50, 51, 52, 53, 54, 55]] = torch.tensor([0.4, 0.5, -0.6, 0.7, 0.8, -0.9, 1.0])
    assert indices_of(Fixed(0.5), v, plan, 0).tolist() == [50, 51, 52, 53, 54, 55]
    assert indices_of(Fixed(2.0), v, plan, 0).numel() == 0
    crowded = torch.arange(80.0) + 1
    assert indices_of(Fixed(0.5), crowded, plan, 0).tolist() == [36, 37, 38, 39, 76, 77, 78, 79]


# no place in a tensor is worse than another
DRAWS, LENGTH, RATIO, DECILES = 60, 20_000, 0.01, 10
# chi-square with 9 degrees of freedom exceeds this once in 10 ** 6 draws
LIMIT = 45.0


class WidePlan(Sampled):
    """Takes some 30 percent too many before the cut, as adaptation may."""

    def estimate(self, segments: Any) -> Any:
        k = math.ceil(1.29 * int(segments.k))
        return segments.v.abs().topk(k).values.min().view(1), torch.tensor([k])


def chi_square(cut: Any) -> Any:
    """Of the counts per tenth of the tensor, over many draws of data without any order."""
    plan, counts = plan_of(LENGTH, ratio=RATIO), torch.zeros(DECILES)
    for seed in range(DRAWS):
        chosen = cut(drawn(seed), plan, seed)
        counts += torch.bincount(chosen * DECILES // LENGTH, minlength=DECILES)
    expected = counts.sum() / DECILES
    return float(((counts - expected) ** 2 / expected).sum())


def cut_in_index_order(v: Any, plan: Any, seed: Any) -> Any:
    """What the original does with a selection between k and 1.3 k."""
    (k,) = plan.ks
    return largest(v, math.ceil(1.29 * k))[:k]


@cache
def drawn(seed: int) -> Any:
    return laplace(LENGTH, 1000 + seed)


@pytest.mark.parametrize("selector", [*SELECTORS.values(), WidePlan()])
@pytest.mark.usefixtures("no_type_checks")
def test_no_positional_bias(selector: Any) -> None:
    assert chi_square(partial(chosen_by, selector)) < LIMIT


@pytest.mark.usefixtures("no_type_checks")
def test_the_cut_in_index_order_would_fail() -> None:
    assert chi_square(cut_in_index_order) > 10 * LIMIT
