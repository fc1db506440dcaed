"""What every selector promises, on data of every shape, and what a real run sends; plans, and their free slots."""

import math
from functools import cache, partial
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cases import case
from refusals import check_refusals
from sparse.shapes import SHAPES, indices_of, laplace, plan_of, rng, wall

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


@pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)
def test_nothing_a_single_element_equal_ones_all_of_them_nan_and_inf(selector: Any) -> None:
    def chosen(v: Any, *sizes: int, ratio: float) -> Any:
        return indices_of(selector, v, plan_of(*sizes, ratio=ratio), 0)

    assert chosen(torch.empty(0), 0, ratio=0.1).numel() == 0
    assert chosen(torch.ones(3), 0, 3, ratio=0.1).numel() == 1
    for value in (1e-45, -1.0, 3e38):
        assert chosen(torch.tensor([value]), 1, ratio=0.001).tolist() == [0]
    assert chosen(torch.full((30_000,), 2.0), 30_000, ratio=0.001).numel() == 30, "equal ones fill the plan"
    assert chosen(laplace(5000), 5000, ratio=1.0).numel() >= 0.8 * 5000
    # gradients with NaN never reach v; a tensor of one's own may hold them: they count as the largest
    for bad in (math.nan, math.inf, -math.inf):
        v = laplace(30_000)
        v[[17, 12_345]] = bad
        found = chosen(v, 10_000, 20_000, ratio=0.01)
        assert found.numel() <= 300 and {17, 12_345} <= set(found.tolist()), bad


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Any:
    library, made = kernels.of(torch.empty(0)).selection, Mock()
    for name in ("moments", "tail"):
        made.attach_mock(Mock(wraps=getattr(library, name)), name)
        monkeypatch.setattr(library, name, getattr(made, name))
    return made


def estimates(selector: Any, v: Any, ratio: Any, steps: int = 1) -> Any:
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
    (selectors.Trimmed(), "heavy tails", 1, (1.0, 1.0), 6),
]


@pytest.mark.parametrize("ratio", [0.001, 0.01])
def test_estimates_where_they_should_hold(ratio: Any, passes: Any) -> None:
    for selector, shape, steps, counts, most in FITS:
        passes.reset_mock()
        with case(selector, shape):
            assert counts[0] <= estimates(selector, SHAPES[shape](N, 3), ratio, steps) <= counts[1]
            assert len(passes.mock_calls) <= most


def test_a_warm_start_begins_at_the_last_threshold(passes: Any) -> None:
    v, plan, selector = SHAPES["wall"](N), plan_of(N, ratio=0.001), Laplace(warm_start=True)
    for scale in (1.0, 8.0):
        selector.estimate(Ranges(scale * v, plan, 0))
        passes.reset_mock()
        selector.estimate(Ranges(scale * v, plan, 0))
        assert [name for name, *_ in passes.mock_calls] == ["moments", "tail"]  # the first count is accepted


def test_bad_options_and_every_estimator_is_in_the_table() -> None:
    wrong: list[tuple[Any, str, dict[str, Any]]] = [
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
    check_refusals(*((partial(kind, **options), words) for kind, words, options in wrong))
    estimators = {kind for base in Estimator.__subclasses__() for kind in (base, *base.__subclasses__())}
    of_product = {e.__name__ for e in estimators if e.__module__.startswith("dgc.")}
    # Fixed sends nothing where nothing reaches its threshold, which others never do
    assert of_product - {"Fixed"} <= {type(selector).__name__ for selector in SELECTORS.values()}


def test_a_fixed_threshold_and_the_largest_of_each_chunk_but_no_zeros() -> None:
    plan, v = plan_of(40, 40, ratio=0.1), torch.zeros(80)
    v[[3, 50, 51, 52, 53, 54, 55]] = torch.tensor([0.4, 0.5, -0.6, 0.7, 0.8, -0.9, 1.0])
    assert indices_of(selectors.Fixed(0.5), v, plan, 0).tolist() == [50, 51, 52, 53, 54, 55]
    assert indices_of(selectors.Fixed(2.0), v, plan, 0).numel() == 0
    crowded = torch.arange(80.0) + 1
    assert indices_of(selectors.Fixed(0.5), crowded, plan, 0).tolist() == [36, 37, 38, 39, 76, 77, 78, 79]
    numels = (8192, 20_000, 0, 3, 1)
    v = laplace(sum(numels))
    for chunk, ratio in ((4096, 64 / 4096), (64, 0.03), (7, 0.5), (2, 0.9), (10**6, 0.01), (1, 0.25)):
        plan = plan_of(*numels, ratio=ratio)
        parts = zip(plan.segments, plan.split(v), strict=True)
        expected = [segment.offset + i for segment, part in parts for i in by_topk(part, chunk, ratio)]
        assert indices_of(selectors.TopKPerChunk(chunk), v, plan, 0).tolist() == expected, chunk
        assert len(expected) == plan.capacity
    plan, v = plan_of(3 * 4096, ratio=64 / 4096), laplace(3 * 4096)
    v[4096:8192] *= 1e-3
    chosen = indices_of(selectors.TopKPerChunk(4096), v, plan, 0)
    assert torch.bincount(chosen // 4096).tolist() == plan.per_chunk(4096).ks.tolist() == [64] * 3
    v = torch.zeros(100).index_fill(0, torch.tensor([55]), -2.0)
    assert indices_of(selectors.TopKPerChunk(10), v, plan_of(100, ratio=0.1), 0).tolist() == [55]


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
    plan, counts = plan_of(LENGTH, ratio=RATIO), torch.zeros(DECILES)
    for seed in range(DRAWS):
        indices = cut(drawn(LENGTH, 1000 + seed), plan, seed)
        counts += torch.bincount(indices * DECILES // LENGTH, minlength=DECILES)
    expected = counts.sum() / DECILES
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("selector", [*SELECTORS.values(), WidePlan()])
def test_no_positional_bias(selector: Any) -> None:
    assert chi_square(partial(chosen_by, selector)) < LIMIT


def test_the_cut_in_index_order_would_fail() -> None:
    """What the original does with a selection between k and 1.3 k."""
    assert chi_square(lambda v, plan, seed: largest(v, math.ceil(1.29 * plan.ks[0]))[: plan.ks[0]]) > 10 * LIMIT


def reaching(selector: Any, v: Any, ratio: Any, seed: int = 0) -> Any:
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
        assert 0.8 * n * ratio <= reaching(Sampled(), v, ratio, seed) <= 1.3 * math.ceil(n * ratio)
    assert torch.equal(torch.get_rng_state(), before)


def test_count_on_the_wall_of_a_single_outlier_and_of_tiny_tensors() -> None:
    """Resampling cuts an over-full selection to k; a thin one adapts until it holds 0.8 k. A sample without the
    outlier gives threshold 0, which takes what is not zero. That of a tiny tensor is all of it, and exact.
    """
    plan = plan_of(100_000, ratio=0.001)
    assert all(80 <= indices_of(Sampled(), wall(100_000, seed), plan, seed).numel() <= 100 for seed in range(10))
    v, plan = SHAPES["outlier"](30_000), plan_of(30_000, ratio=0.001)
    assert all(indices_of(Sampled(), v, plan, seed).tolist() == [10_000] for seed in range(5))
    for n in (1, 2, 5, 100, 1999):
        v = laplace(n) + 0.01
        chosen = indices_of(Sampled(), v, plan_of(n, ratio=0.001), 0)
        assert torch.equal(chosen, largest(v, math.ceil(n / 1000))), n


@pytest.mark.parametrize("n", [2001, 4096, 10_000, 65_536, 99_999, 300_001])
def test_strided_samples(n: Any) -> None:
    v = torch.arange(n, dtype=torch.float64)
    for ratio, sample_ratio in product((0.001, 0.01, 0.25), (0.01, 0.3)):
        samples = [Sampled(sample_ratio=sample_ratio)._sample(v, ratio, rng(seed)) for seed in range(8)]
        strides = [sample.diff().unique().tolist() for sample in samples]
        wanted = max(math.ceil(n * sample_ratio), math.ceil(2 / ratio))
        with case(ratio, sample_ratio):
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


def test_too_few_lower_the_threshold_too_many_raise_it_or_are_resampled_until_the_end(monkeypatch: Any) -> None:
    """9.95, 7.96, 6.368: 5, 204, 363 elements for k = 400, where 320 are enough."""
    counted, count = [], Ranges.count

    def noted(self: Any, t: Any, where: Any) -> Any:
        counts = count(self, t, where)
        counted.append(int(counts))
        return counts

    def counts_of(selector: Any, ratio: Any) -> Any:
        counted.clear()
        assert reaching(selector, RAMP, ratio) == counted[-1]
        return [*counted]

    monkeypatch.setattr(Ranges, "count", noted)
    assert indices_of(first_at(0.5), RAMP, plan_of(1000, ratio=0.1), 0).tolist() == list(range(900, 1000))
    assert counted == [950], "resampled at once"
    assert counts_of(first_at(9.95), 0.4) == [5, 204, 363]
    *_, last_but_one, last = found = counts_of(first_at(0.5, resample=False), 0.6)
    assert found == pytest.approx([100 * (10 - 0.5 * 1.3**i) for i in range(7)], abs=1)
    assert last_but_one > 1.3 * 600 >= last
    assert len(counts_of(first_at(0.5, resample=False, max_adaptation_iters=3), 0.001)) == 4
    assert counts_of(first_at(9.95, max_adaptation_iters=0), 0.4) == [5]
    assert counts_of(first_at(1.0), 0.85) == [900]


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


def test_as_many_elements_as_planned_and_codes_of_any_length_leave_few_behind() -> None:
    for per_bucket in (False, True):
        steady = shares(selector=selectors.Predicted(per_bucket=per_bucket))
        assert len(steady) >= STEPS - WARM and all(abs(share - 1) <= 0.02 for share in steady), per_bucket
    # Their plan has room for what is likely: now and then some elements wait for the next step.
    for indices in (RiceIndices(), PackedIndices()):
        steady = shares(indices=indices)
        assert 0.98 <= sum(steady) / len(steady) <= 1, indices


def test_plan_rounds_up_gives_free_slots_in_proportion_to_the_surplus_and_hands_its_history_on() -> None:
    plan = plan_of(1, 10, 999, 1000, 1001, 0, ratio=0.001)
    assert plan.ks == (1, 1, 1, 1, 2, 0) and plan.capacity == 6
    assert plan.per_tensor.bounds.tolist() == [0, 1, 11, 1010, 2010, 3011, 3011]
    assert plan_of(3, 70, ratio=1.0).ks == (3, 70)
    # the noise of floats sends nothing more: 0.07 * 100 is 7.000000000000001
    for ratio, numel, k in ((0.07, 100, 7), (0.29, 100, 29), (1e-3, 1000, 1), (1e-9, 5, 1)):
        assert plan_of(numel, ratio=ratio).ks == (k,)
    for sizes, ratio, counts, ks in (
        ([40] * 3, 0.1, [0, 4, 3], [0, 4, 3]),  # what fits is kept
        # 4 slots each; the first leaves 4 free, the others have 6 and 3 too many
        ([40] * 3, 0.1, [0, 10, 7], [0, 4 + 4 * 6 // 9, 4 + 4 * 3 // 9]),
        ([40] * 3, 0.1, [0, 6, 6], [0, 6, 6]),
        # free slots times surplus exceed 32 bits
        ([3_000_000] * 2, 0.5, [0, 3_000_000], [0, 3_000_000]),
        ([3_000_000] * 2, 0.5, [10, 2_999_999], [10, 2_999_990]),
    ):
        assert plan_of(*sizes, ratio=ratio).shared(torch.tensor(counts)).ks.tolist() == ks, counts
    generator, plan = torch.Generator().manual_seed(0), plan_of(*[1000] * 9, ratio=0.01)
    for _ in range(200):
        wanted = torch.randint(40, (9,), generator=generator)
        shared = plan.shared(wanted)
        assert shared.capacity == plan.capacity >= int(shared.ks.sum()) and bool((shared.ks <= wanted).all())
    # That of some tensors alone is not used.
    one, two, larger = plan_of(5, 6, 7, ratio=0.5), plan_of(9, 9, ratio=0.5), plan_of(5, 6, 7, 8, ratio=0.5)
    one.history["threshold"] = torch.tensor([1.0, 2.0, 3.0])
    two.take_history(one.rows_of_history())
    larger.take_history(one.rows_of_history())
    assert two.history["threshold"].tolist() == [1.0, 2.0] and larger.history == {}


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
