"""What every selector promises, on data of every shape, and what a real run sends; quotas and their free slots."""

import math
from functools import cache, partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cases import case
from refusals import refuse
from sparse.shapes import SHAPES, indices_of, laplace, quota_for, rng, wall

import dgc.kernels as kernels
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DGCCompressor
from dgc.kernels import PassInputs
from dgc.kernels.selection import largest
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD, DistributedOptimizer
from dgc.sparse import selectors
from dgc.sparse.payloads import PackedIndices, RiceIndices
from dgc.sparse.selectors import Laplace, Sampled
from dgc.sparse.selectors.estimators import Estimator, Ranges
from dgc.sparse.selectors.selector import share
from dgc_datasets import Digits
from dgc_models import DigitsCNN

pytestmark = pytest.mark.usefixtures("no_type_checks")
SELECTORS = {
    "exact": selectors.Exact(),
    "exact of the bucket": selectors.Exact(per_bucket=True),
    "radix": selectors.Radix(),
    "predicted": selectors.Predicted(),
    "trimmed": selectors.Trimmed(),
    "sampled": Sampled(),
    "half sampled": Sampled(sample_ratio=0.5),
    "sampled at random": Sampled(strided_sample=False),
    "sampled without resampling": Sampled(resample=False),
    "sampled without adaptation": Sampled(max_adaptation_iters=0),
    "sampled tightly": Sampled(compress_upper_bound=1.0, compress_lower_bound=1.0, resample=False),
    "laplace": Laplace(),
    "laplace, redsync": Laplace(stop="redsync"),
    "laplace, exact": Laplace(stop="exact"),
    "laplace, secant": Laplace(method="secant"),
    "laplace, warm": Laplace(warm_start=True),
}
# These send the k largest of every tensor, whatever the numbers.
EXACT = ("exact", "radix", "predicted", "trimmed")


def chosen_by(selector: Any, v: Any, quota: Any, seed: Any) -> Any:
    """By the whole pass, of a gradient of zeros."""
    selection = selector.select(PassInputs((torch.zeros_like(v),), None, v.clone()), quota, seed).elements
    return selection.indices[: int(selection.count)].long()


def check(selector: str, indices: Any, v: Any, quota: Any) -> None:
    assert indices.dtype == torch.int64
    assert indices.numel() <= quota.capacity
    assert (indices.diff() > 0).all()
    assert (v[indices] != 0).all()
    if indices.numel():
        assert indices[0] >= 0 and indices[-1] < v.numel()
    if selector == "exact of the bucket":
        return
    for segment, part, k in zip(quota.segments, quota.split(v), quota.ks, strict=True):
        start = segment.offset
        own = indices[(indices >= start) & (indices < start + segment.numel)] - start
        assert own.numel() >= min(1, int(part.count_nonzero()))
        if selector in EXACT:
            assert torch.equal(own, largest(part, k))
        assert own.numel() == 0 or part[own].abs().min() >= part.abs().index_fill(0, own, 0.0).max()


SOME_SIZES = (4000, 20_000, 0, 3, 1)
WHOLE = ("laplace", "zeros", "half zeros", "ties", "tiny", "huge")
ON_SHAPES = [*((shape, 0.001) for shape in SHAPES), *((shape, 1.0) for shape in WHOLE)]
on_every_shape = pytest.mark.parametrize(("shape", "ratio"), ON_SHAPES)


@pytest.mark.parametrize("selector", SELECTORS)
@on_every_shape
def test_the_largest_are_sent_within_capacity(selector: Any, shape: str, ratio: float) -> None:
    """No zero, and something of every tensor that has anything."""
    quota = quota_for(*SOME_SIZES, ratio=ratio)
    for step in range(2):
        v = SHAPES[shape](sum(SOME_SIZES), step)
        with case("step", step):
            check(selector, chosen_by(SELECTORS[selector], v, quota, step), v, quota)


@pytest.mark.parametrize("selector", SELECTORS)
@on_every_shape
def test_a_selection_is_repeatable(selector: Any, shape: str, ratio: float) -> None:
    quotas = [quota_for(*SOME_SIZES, ratio=ratio) for _ in range(2)]
    for step in range(2):
        v = SHAPES[shape](sum(SOME_SIZES), step)
        chosen, again = (chosen_by(SELECTORS[selector], v, quota, step) for quota in quotas)
        with case("step", step):
            assert torch.equal(chosen, again)


every_selector = pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)


def chosen(selector: Any, v: Any, *sizes: int, ratio: float) -> Any:
    return indices_of(selector, v, quota_for(*sizes, ratio=ratio), 0)


@every_selector
def test_of_an_empty_bucket_nothing_is_sent(selector: Any) -> None:
    assert chosen(selector, torch.empty(0), 0, ratio=0.1).numel() == 0


@every_selector
def test_of_an_empty_tensor_nothing_is_sent(selector: Any) -> None:
    assert chosen(selector, torch.ones(3), 0, 3, ratio=0.1).numel() == 1


@every_selector
@pytest.mark.parametrize("value", [1e-45, -1.0, 3e38])
def test_a_single_element_is_sent_whatever_its_size(selector: Any, value: float) -> None:
    assert chosen(selector, torch.tensor([value]), 1, ratio=0.001).tolist() == [0]


@every_selector
def test_equal_elements_fill_the_plan(selector: Any) -> None:
    assert chosen(selector, torch.full((30_000,), 2.0), 30_000, ratio=0.001).numel() == 30


@every_selector
def test_at_ratio_1_most_elements_are_sent(selector: Any) -> None:
    assert chosen(selector, laplace(5000), 5000, ratio=1.0).numel() >= 0.8 * 5000


@every_selector
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_elements_that_are_not_finite_count_as_the_largest(selector: Any, bad: float) -> None:
    """Gradients with NaN never reach v; a tensor of one's own may hold them."""
    v = laplace(30_000)
    v[[17, 12_345]] = bad
    found = chosen(selector, v, 10_000, 20_000, ratio=0.01)
    assert found.numel() <= 300 and {17, 12_345} <= set(found.tolist())


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Any:
    library, made = kernels.of(torch.empty(0)).selection, Mock()
    for name in ("moments", "tail"):
        made.attach_mock(Mock(wraps=getattr(library, name)), name)
        monkeypatch.setattr(library, name, getattr(made, name))
    return made


def estimates(selector: Any, v: Any, ratio: Any, steps: int = 1) -> Any:
    quota = quota_for(v.numel(), ratio=ratio)
    for _ in range(steps):
        t, counts = selector.estimate(Ranges(v, quota, 0))
        assert int(counts) <= int((v.abs() >= t).sum())
    return int(counts) / quota.ks[0]


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
    (selectors.Trimmed(), "heavy tails", 1, (1.0, 1.0), 6),
]


@pytest.mark.parametrize("ratio", [0.001, 0.01])
@pytest.mark.parametrize(
    ("selector", "shape", "steps", "counts", "most"),
    FITS,
    ids=[f"{number}, {shape}" for number, (_, shape, *_) in enumerate(FITS)],
)
def test_an_estimate_holds_where_it_should(
    ratio: float, selector: Any, shape: str, steps: int, counts: Any, most: int, passes: Any
) -> None:
    assert counts[0] <= estimates(selector, SHAPES[shape](N, 3), ratio, steps) <= counts[1]
    assert len(passes.mock_calls) <= most


def test_a_warm_start_begins_at_the_last_threshold(passes: Any) -> None:
    v, quota, selector = SHAPES["wall"](N), quota_for(N, ratio=0.001), Laplace(warm_start=True)
    for scale in (1.0, 8.0):
        selector.estimate(Ranges(scale * v, quota, 0))
        passes.reset_mock()
        selector.estimate(Ranges(scale * v, quota, 0))
        assert [name for name, *_ in passes.mock_calls] == ["moments", "tail"]  # the first count is accepted


WRONG: list[tuple[Any, str, dict[str, Any]]] = [
    (Laplace, "stop is one of redsync, tight, exact", {"stop": "loose"}),
    (Laplace, "method is one of bisection, secant", {"method": "newton"}),
    (Laplace, "passes", {"passes": 0}),
    (selectors.Trimmed, "step", {"step": 0.0}),
    (selectors.Fixed, "threshold", {"threshold": 0.0}),
    (selectors.Predicted, "margin", {"margin": 0.0}),
    *((Sampled, "sample_ratio", {"sample_ratio": ratio}) for ratio in (0.0, 1.1)),
    (Sampled, "compress_upper_bound", {"compress_upper_bound": 0.9}),
    *((Sampled, "compress_lower_bound", {"compress_lower_bound": bound}) for bound in (0.0, 1.1)),
    (Sampled, "max_adaptation_iters", {"max_adaptation_iters": -1}),
    (selectors.TopKPerChunk, "chunk_size must be 1 element or more, not 0", {"chunk_size": 0}),
]


@pytest.mark.parametrize(("kind", "words", "options"), WRONG)
def test_an_option_out_of_range_is_refused(kind: Any, words: str, options: dict[str, Any]) -> None:
    refuse(words, kind, **options)


def test_every_estimator_is_in_the_table_of_selectors() -> None:
    estimators = {kind for base in Estimator.__subclasses__() for kind in (base, *base.__subclasses__())}
    of_product = {e.__name__ for e in estimators if e.__module__.startswith("dgc.")}
    # Fixed sends nothing where nothing reaches its threshold, which others never do
    assert of_product - {"Fixed"} <= {type(selector).__name__ for selector in SELECTORS.values()}


def seven_above_a_threshold() -> Any:
    v = torch.zeros(80)
    v[[3, 50, 51, 52, 53, 54, 55]] = torch.tensor([0.4, 0.5, -0.6, 0.7, 0.8, -0.9, 1.0])
    return v


def chosen_by_threshold(threshold: float, v: Any) -> list[int]:
    found: list[int] = indices_of(selectors.Fixed(threshold), v, quota_for(40, 40, ratio=0.1), 0).tolist()
    return found


def test_a_fixed_threshold_sends_what_reaches_it() -> None:
    assert chosen_by_threshold(0.5, seven_above_a_threshold()) == [50, 51, 52, 53, 54, 55]


def test_a_fixed_threshold_sends_nothing_where_nothing_reaches_it() -> None:
    assert chosen_by_threshold(2.0, seven_above_a_threshold()) == []


def test_a_fixed_threshold_sends_the_largest_where_too_many_reach_it() -> None:
    assert chosen_by_threshold(0.5, torch.arange(80.0) + 1) == [36, 37, 38, 39, 76, 77, 78, 79]


@pytest.mark.parametrize(
    ("chunk", "ratio"), [(4096, 64 / 4096), (64, 0.03), (7, 0.5), (2, 0.9), (10**6, 0.01), (1, 0.25)]
)
def test_the_largest_of_each_chunk_are_sent(chunk: int, ratio: float) -> None:
    numels = (8192, 20_000, 0, 3, 1)
    v = laplace(sum(numels))
    quota = quota_for(*numels, ratio=ratio)
    parts = zip(quota.segments, quota.split(v), strict=True)
    expected = [segment.offset + i for segment, part in parts for i in by_topk(part, chunk, ratio)]
    assert indices_of(selectors.TopKPerChunk(chunk), v, quota, 0).tolist() == expected
    assert len(expected) == quota.capacity


def test_a_chunk_of_small_elements_has_its_share() -> None:
    quota, v = quota_for(3 * 4096, ratio=64 / 4096), laplace(3 * 4096)
    v[4096:8192] *= 1e-3
    found = indices_of(selectors.TopKPerChunk(4096), v, quota, 0)
    assert torch.bincount(found // 4096).tolist() == quota.per_chunk(4096).ks.tolist() == [64] * 3


def test_no_zeros_of_a_chunk_are_sent() -> None:
    v = torch.zeros(100).index_fill(0, torch.tensor([55]), -2.0)
    assert indices_of(selectors.TopKPerChunk(10), v, quota_for(100, ratio=0.1), 0).tolist() == [55]


DRAWS, LENGTH, RATIO, DECILES = 60, 20_000, 0.01, 10
# chi-square with 9 degrees of freedom exceeds this once in 10 ** 6 draws
LIMIT = 45.0
drawn = cache(laplace)


class WidePlan(Sampled):
    """Takes some 30 percent too many before the cut, as adaptation may."""

    def estimate(self, segments: Any) -> Any:
        k = math.ceil(1.29 * int(segments.k))
        return segments.v.abs().topk(k).values.min().view(1), torch.tensor([k])


def chi_square(cut: Any) -> Any:
    """Of the counts per tenth of the tensor, over many draws of data without any order."""
    quota, counts = quota_for(LENGTH, ratio=RATIO), torch.zeros(DECILES)
    for seed in range(DRAWS):
        indices = cut(drawn(LENGTH, 1000 + seed), quota, seed)
        counts += torch.bincount(indices * DECILES // LENGTH, minlength=DECILES)
    expected = counts.sum() / DECILES
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("selector", [*SELECTORS.values(), WidePlan()])
def test_no_positional_bias(selector: Any) -> None:
    assert chi_square(partial(chosen_by, selector)) < LIMIT


def test_the_cut_in_index_order_would_fail() -> None:
    """What the original does with a selection between k and 1.3 k."""
    assert chi_square(lambda v, quota, seed: largest(v, math.ceil(1.29 * quota.ks[0]))[: quota.ks[0]]) > 10 * LIMIT


def reaching(selector: Any, v: Any, ratio: Any, seed: int = 0) -> Any:
    return int(selector.estimate(Ranges(v, quota_for(v.numel(), ratio=ratio), seed))[1])


@pytest.mark.parametrize("strided", [True, False], ids=["strided", "at random"])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1])
def test_a_sample_of_laplace_data_fills_most_of_the_plan(ratio: Any, strided: bool) -> None:
    quota = quota_for(100_000, ratio=ratio)
    for seed in range(5):
        count = indices_of(Sampled(strided_sample=strided), laplace(100_000, seed), quota, seed).numel()
        assert 0.8 * quota.capacity <= count <= quota.capacity, seed


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1])
def test_candidates_lie_within_the_bounds_before_the_cut(ratio: Any) -> None:
    n = 100_000
    for seed in range(5):
        reached = reaching(Sampled(), laplace(n, seed), ratio, seed)
        assert 0.8 * n * ratio <= reached <= 1.3 * math.ceil(n * ratio), seed


@pytest.mark.parametrize("strided", [True, False], ids=["strided", "at random"])
def test_sampling_leaves_torch_s_generator_alone(strided: bool) -> None:
    v, before = laplace(100_000, 0), torch.get_rng_state()
    for ratio in (0.001, 0.01, 0.1):
        indices_of(Sampled(strided_sample=strided), v, quota_for(100_000, ratio=ratio), 0)
        reaching(Sampled(strided_sample=strided), v, ratio)
    assert torch.equal(torch.get_rng_state(), before)


def test_on_a_wall_most_of_the_plan_is_filled() -> None:
    """Resampling cuts an over-full selection to k; a thin one adapts until it holds 0.8 k."""
    quota = quota_for(100_000, ratio=0.001)
    assert all(80 <= indices_of(Sampled(), wall(100_000, seed), quota, seed).numel() <= 100 for seed in range(10))


def test_a_single_outlier_is_sent() -> None:
    """A sample without it gives threshold 0, which takes what is not zero."""
    v, quota = SHAPES["outlier"](30_000), quota_for(30_000, ratio=0.001)
    assert all(indices_of(Sampled(), v, quota, seed).tolist() == [10_000] for seed in range(5))


@pytest.mark.parametrize("n", [1, 2, 5, 100, 1999])
def test_the_sample_of_a_tiny_tensor_is_all_of_it(n: int) -> None:
    v = laplace(n) + 0.01
    found = indices_of(Sampled(), v, quota_for(n, ratio=0.001), 0)
    assert torch.equal(found, largest(v, math.ceil(n / 1000)))


@pytest.mark.parametrize("sample_ratio", [0.01, 0.3])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.25])
@pytest.mark.parametrize("n", [2001, 4096, 10_000, 65_536, 99_999, 300_001])
def test_strided_samples(n: Any, ratio: float, sample_ratio: float) -> None:
    v = torch.arange(n, dtype=torch.float64)
    samples = [Sampled(sample_ratio=sample_ratio)._sample(v, ratio, rng(seed)) for seed in range(8)]
    strides = [sample.diff().unique().tolist() for sample in samples]
    wanted = max(math.ceil(n * sample_ratio), math.ceil(2 / ratio))
    assert all(sample.numel() >= min(wanted, n) for sample in samples)
    assert all(len(own) == 1 and own[0] % 2 == 1 for own in strides)
    assert len({sample[0].item() for sample in samples}) > 1 or strides[-1] == [1]


def first_at(threshold: float, **options: Any) -> Any:
    """Its sample is a constant, so that the first threshold is known."""

    class FixedSample(Sampled):
        def _sample(self, v: Any, ratio: Any, generator: Any) -> Any:
            return torch.full((10,), threshold)

    return FixedSample(**options)


# |v| >= t holds 100 (10 - t) elements
RAMP = torch.arange(1000) * 0.01 + 0.005


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements each threshold reached that was tried."""
    numbers, count = list[int](), Ranges.count

    def noted(self: Any, t: Any, where: Any) -> Any:
        counts = count(self, t, where)
        numbers.append(int(counts))
        return counts

    monkeypatch.setattr(Ranges, "count", noted)
    return numbers


def counts_of(counted: list[int], selector: Any, ratio: float) -> list[int]:
    assert reaching(selector, RAMP, ratio) == counted[-1]
    return counted


def test_too_many_elements_are_resampled_at_once(counted: list[int]) -> None:
    assert indices_of(first_at(0.5), RAMP, quota_for(1000, ratio=0.1), 0).tolist() == list(range(900, 1000))
    assert counted == [950]


def test_too_few_elements_lower_the_threshold(counted: list[int]) -> None:
    """9.95, 7.96, 6.368: 5, 204, 363 elements for k = 400, where 320 are enough."""
    assert counts_of(counted, first_at(9.95), 0.4) == [5, 204, 363]


def test_too_many_elements_raise_the_threshold_without_resampling(counted: list[int]) -> None:
    *_, last_but_one, last = found = counts_of(counted, first_at(0.5, resample=False), 0.6)
    assert found == pytest.approx([100 * (10 - 0.5 * 1.3**i) for i in range(7)], abs=1)
    assert last_but_one > 1.3 * 600 >= last


def test_the_threshold_is_adapted_as_often_as_is_allowed(counted: list[int]) -> None:
    assert len(counts_of(counted, first_at(0.5, resample=False, max_adaptation_iters=3), 0.001)) == 4


def test_without_adaptation_the_first_threshold_is_taken(counted: list[int]) -> None:
    assert counts_of(counted, first_at(9.95, max_adaptation_iters=0), 0.4) == [5]


def test_a_threshold_within_the_bounds_is_taken(counted: list[int]) -> None:
    assert counts_of(counted, first_at(1.0), 0.85) == [900]


WARM, STEPS = 20, 30


class Counting(DGCSGDMemory):
    def __init__(self) -> None:
        super().__init__(0.9)
        self.sent: list[float] = []

    def pass_inputs(self, bucket: Any, state: Any) -> Any:
        if state.sent is not None:
            self.sent.append(int(state.sent.count) / state.sent.indices.numel())
        return super().pass_inputs(bucket, state)


def shares(**settings: Any) -> Any:
    """Of rank 1, by step: elements sent for each one planned."""
    train: Any = Digits()["train"]
    data = [train[i] for i in range(len(train))]

    def body(transport: Any) -> Any:
        torch.manual_seed(0)
        model, memory = DigitsCNN(width=8), Counting()
        inner = DGCSGD(model.parameters(), lr=0.02, momentum=0.9)
        compression = DGCCompressor(0.01, memory, **settings)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), compression, transport=transport)
        generator = torch.Generator().manual_seed(transport.rank)
        for _ in range(STEPS + 1):
            chosen = torch.randint(len(data), (16,), generator=generator).tolist()
            images, labels = torch.stack([data[i][0] for i in chosen]), torch.tensor([data[i][1] for i in chosen])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        return memory.sent[WARM:]

    return LockstepWorld(2).run(body)[1]


@pytest.mark.parametrize("per_bucket", [False, True])
def test_as_many_elements_are_sent_as_planned(per_bucket: bool) -> None:
    steady = shares(selector=selectors.Predicted(per_bucket=per_bucket))
    assert len(steady) >= STEPS - WARM and all(abs(share - 1) <= 0.02 for share in steady)


@pytest.mark.parametrize("indices", [RiceIndices(), PackedIndices()], ids=["rice", "packed"])
def test_codes_of_any_length_leave_few_elements_behind(indices: Any) -> None:
    """Their plan has room for what is likely: now and then some elements wait for the next step."""
    steady = shares(indices=indices)
    assert 0.98 <= sum(steady) / len(steady) <= 1


def test_a_plan_rounds_up() -> None:
    quota = quota_for(1, 10, 999, 1000, 1001, 0, ratio=0.001)
    assert quota.ks == (1, 1, 1, 1, 2, 0) and quota.capacity == 6
    assert quota.per_tensor.bounds.tolist() == [0, 1, 11, 1010, 2010, 3011, 3011]


def test_a_plan_at_ratio_1_has_all_elements() -> None:
    assert quota_for(3, 70, ratio=1.0).ks == (3, 70)


@pytest.mark.parametrize(("ratio", "numel", "k"), [(0.07, 100, 7), (0.29, 100, 29), (1e-3, 1000, 1), (1e-9, 5, 1)])
def test_the_noise_of_floats_sends_nothing_more(ratio: float, numel: int, k: int) -> None:
    """0.07 * 100 is 7.000000000000001."""
    assert quota_for(numel, ratio=ratio).ks == (k,)


@pytest.mark.parametrize(
    ("sizes", "ratio", "counts", "ks"),
    [
        pytest.param([40] * 3, 0.1, [0, 4, 3], [0, 4, 3], id="what fits is kept"),
        # 4 slots each; the first leaves 4 free, the others have 6 and 3 too many
        pytest.param([40] * 3, 0.1, [0, 10, 7], [0, 4 + 4 * 6 // 9, 4 + 4 * 3 // 9], id="6 and 3 too many"),
        pytest.param([40] * 3, 0.1, [0, 6, 6], [0, 6, 6], id="2 and 2 too many"),
        # free slots times surplus exceed 32 bits
        pytest.param([3_000_000] * 2, 0.5, [0, 3_000_000], [0, 3_000_000], id="beyond 32 bits"),
        pytest.param([3_000_000] * 2, 0.5, [10, 2_999_999], [10, 2_999_990], id="nearly all in one"),
    ],
)
def test_free_slots_are_given_in_proportion_to_the_surplus(sizes: Any, ratio: float, counts: Any, ks: Any) -> None:
    assert quota_for(*sizes, ratio=ratio).shared_budget(torch.tensor(counts)).ks.tolist() == ks


def test_shared_slots_never_exceed_the_capacity() -> None:
    generator, quota = torch.Generator().manual_seed(0), quota_for(*[1000] * 9, ratio=0.01)
    for _ in range(200):
        wanted = torch.randint(40, (9,), generator=generator)
        shared = quota.shared_budget(wanted)
        assert shared.capacity == quota.capacity >= int(shared.ks.sum()) and bool((shared.ks <= wanted).all())


def history_taken_by(*sizes: int) -> Any:
    one, other = quota_for(5, 6, 7, ratio=0.5), quota_for(*sizes, ratio=0.5)
    one.history["threshold"] = torch.tensor([1.0, 2.0, 3.0])
    other.take_history(one.rows_of_history())
    return other.history


def test_a_plan_hands_its_history_on() -> None:
    assert history_taken_by(9, 9)["threshold"].tolist() == [1.0, 2.0]


def test_a_history_of_some_tensors_alone_is_not_used() -> None:
    assert history_taken_by(5, 6, 7, 8) == {}


def by_topk(part: Any, chunk: int, ratio: float) -> list[int]:
    n, k, chosen = part.numel(), share(part.numel(), ratio), list[int]()
    count = min(-(-n // chunk), k)
    for i in range(count):
        first, last = i * k // count, (i + 1) * k // count
        start, end = first * n // k, last * n // k
        largest = part[start:end].abs().topk(last - first).indices
        assert largest.numel() >= 1 and end - start <= max(chunk, n // k) + -(-n // k)
        chosen += (start + largest).sort().values.tolist()
    return chosen
