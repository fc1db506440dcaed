"""DGCCompressor against its paper's algorithm in dgc/paper, bit for bit."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compression.ranks import Ranks, dense
from torch import Tensor

from dgc import paper
from dgc.bucket import make_bucket
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DenseResult, DGCCompressor, SparseResult
from dgc.engine.state import BucketStates
from dgc.memory import ClipByGlobalNorm, DGCSGDMemory, NoMemory, ResidualMemory, SparseState
from dgc.selection import Exact, Laplace, Predicted
from dgc.testing import checked_mean
from dgc.wire import CastValues, Int8Values, PackedIndices, PlainIndices, RiceIndices, SignValues

SHAPES = {"first": (20, 10), "second": (6, 5, 2), "third": (3, 1)}
NUMEL = 200 + 60 + 3


def gradients(size: Any, step: Any, scale: float = 1.0) -> Any:
    generator = torch.Generator().manual_seed(100 * step + size)
    return [scale * torch.randn(NUMEL, generator=generator) for _ in range(size)]


def ranks_of(size: Any, make: Any, shapes: Any = SHAPES, **options: Any) -> Any:
    return Ranks(size, make, shapes, **options)


def algorithm_1(own_by_step: Any, size: Any, *options: Any, dtype: Any = torch.float32) -> Any:
    """Yields the mean of what is sent in each step. options: of `paper.DGC`."""
    ranks = Ranks(size, lambda: paper.DGC(*options), SHAPES, dtype)
    for own in own_by_step:
        yield ranks.exchange(own)[1]


def test_global_clipping_takes_a_round_of_its_own() -> None:
    memory = [DGCSGDMemory(0.9, gradient_clipping=ClipByGlobalNorm(1.0)) for _ in range(3)]
    ranks = ranks_of(3, lambda: DGCCompressor(0.05, memory.pop(), 1))
    ranks.exchange(gradients(3, 0))
    assert [meter.rounds for meter in ranks.world.meters] == [2, 2, 2]


def test_fp16_values_keep_what_they_round() -> None:
    ranks = ranks_of(2, lambda: DGCCompressor(0.05, ResidualMemory(), 1, fp16_values=True))
    own = gradients(2, 0, scale=1e5)
    mean = ranks.exchange(own)[1]
    assert mean.isfinite().all() and mean.abs().max() > 65504
    waiting = sum(ranks.errors()) / 2
    torch.testing.assert_close(mean + waiting, sum(own) / 2, rtol=1e-6, atol=1e-2)


def test_fp16_values_do_not_overflow_when_a_dense_step_adds_them() -> None:
    """Each value fits into fp16; the sum of three does not."""
    ranks = ranks_of(3, lambda: DGCCompressor(1.0, DGCSGDMemory(0.0), fp16_values=True))
    mean = ranks.exchange([torch.full((NUMEL,), 40_000.0) for _ in range(3)])[1]
    assert mean.isfinite().all()


# --- dense steps -----------------------------------------------------------------------------------


def torch_directions(steps: Any, size: Any, nesterov: Any) -> Any:
    p = torch.zeros(NUMEL, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=1.0, momentum=0.9, nesterov=nesterov)
    for own in steps:
        before = p.detach().clone()
        p.grad = sum(g.double() for g in own) / size
        optimizer.step()
        yield before - p.detach()


@pytest.mark.parametrize(
    ("size", "nesterov", "ratio"),
    [(1, False, 1.0), (1, True, 0.9), (2, True, 1.0), (2, False, 0.9), (3, False, 1.0), (3, True, 0.9)],
)
def test_dense_steps_are_momentum_sgd(size: Any, nesterov: Any, ratio: Any) -> None:
    """At ratio 0.9 a pair of value and index costs more than the value alone."""
    steps = [gradients(size, step) for step in range(5)]
    ranks = ranks_of(size, lambda: DGCCompressor(ratio, DGCSGDMemory(0.9, nesterov)))
    for own, expected in zip(steps, torch_directions(steps, size, nesterov), strict=True):
        results, mean = ranks.exchange(own)
        assert all(isinstance(result, DenseResult) for result in results)
        torch.testing.assert_close(mean.double(), expected, rtol=1e-5, atol=1e-5)
    assert all(not error.any() for s in ranks.states for error in s.errors())


@pytest.mark.parametrize(
    ("size", "ratio", "sparse"), [(2, 0.3, True), (2, 0.4, False), (4, 0.16, True), (4, 0.2, False)]
)
def test_the_cheaper_way_is_taken(size: Any, ratio: Any, sparse: Any) -> None:
    """12 bytes per pair from N ranks against 4 bytes twice: even at ratio 2 * 4 / (12 N)."""
    shapes = {"only": (100, 100)}
    ranks = ranks_of(size, lambda: DGCCompressor(ratio, DGCSGDMemory(0.9)), shapes)
    generator = torch.Generator().manual_seed(0)
    (result, *_), _ = ranks.exchange([torch.randn(10_000, generator=generator) for _ in range(size)])
    assert isinstance(result, SparseResult) == sparse
    meter = ranks.world.meters[0]
    both = (24 + 12 * round(ratio * 10_000)) * (size - 1), 2 * 40_000 * (size - 1) / size
    assert meter.wire_bytes <= min(both) + 24 * size


def test_what_waits_leaves_with_a_dense_step() -> None:
    """Sparse first, then at ratio 1: all of v is sent."""
    ranks = ranks_of(2, lambda: DGCCompressor(0.01, DGCSGDMemory(0.9)))
    ranks.exchange(gradients(2, 0))
    waiting = [error.clone() for error in ranks.errors()]
    momenta = [s.state_dict()["momentums"] for s in ranks.states]
    assert all(w.any() for w in waiting)
    for compressor in ranks.compressors:
        compressor.compress_ratio = 1.0
    own = gradients(2, 1)
    mean = ranks.exchange(own)[1]
    flat = [torch.cat([u[name].reshape(-1) for name in SHAPES]) for u in momenta]
    expected = sum(w + 0.9 * u + g for w, u, g in zip(waiting, flat, own, strict=True)) / 2
    torch.testing.assert_close(mean, expected)


@dataclass(eq=False, kw_only=True)
class WatchedState(SparseState):
    """Copies what is sent to `then`."""

    then: list[Tensor]

    def after(self, sent: Any, returned: Any = None) -> Any:
        self.then[:] = [sent.indices.clone(), sent.values.clone(), sent.count.clone()]
        return super().after(sent, returned)


class Watching(DGCSGDMemory):
    """Whether what was sent is still the same when the next pass takes it out."""

    def __init__(self) -> None:
        super().__init__(0.9)
        self.then: list[Tensor] = []
        self.kept: list[bool] = []

    def init(self, bucket: Any, size: Any, rank: Any) -> Any:
        return WatchedState(**vars(super().init(bucket, size, rank)), then=self.then)

    def pass_inputs(self, bucket: Any, state: Any) -> Any:
        inputs = super().pass_inputs(bucket, state)
        if inputs.sent is not None:
            now = inputs.sent.indices, inputs.sent.values, inputs.sent.count
            self.kept.append(all(torch.equal(a, b) for a, b in zip(self.then, now, strict=True)))
        return inputs


VALUES = [CastValues("fp32"), CastValues("fp16"), Int8Values(), SignValues()]
INDICES = [PlainIndices("int32"), PlainIndices("int64"), PackedIndices(), RiceIndices()]


@pytest.mark.parametrize(("shift", "selector"), [(0, Predicted()), (1, Exact()), (2, Laplace())])
def test_what_was_sent_stays_until_the_next_pass(shift: Any, selector: Any) -> None:
    """Every pair of formats with one of the selectors or, for a quarter of the pairs, with none."""
    for values, indices in zip(VALUES, INDICES[shift:] + INDICES[:shift], strict=True):

        def make(values: Any = values, indices: Any = indices) -> Any:
            return DGCCompressor(0.05, Watching(), selector=selector, values=values, indices=indices)

        ranks = ranks_of(2, make)
        for step in range(4):
            ranks.exchange(gradients(2, step))
        assert all(c.memory.kept == [True] * 3 for c in ranks.compressors), (values, indices)


# --- odds and ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.001, 1000])
def test_above_one_the_ratio_is_a_factor(ratio: Any) -> None:
    assert DGCCompressor(ratio, NoMemory()).compress_ratio == pytest.approx(0.001)


@pytest.mark.parametrize("ratio", [0, -0.1, float("nan"), float("inf")])
def test_bad_ratio(ratio: Any) -> None:
    with pytest.raises(ValueError, match="compress_ratio"):
        DGCCompressor(ratio, NoMemory())


def test_shuffled_ranks_and_repeats_give_the_same_bits() -> None:
    def run(seed: Any) -> Any:
        ranks = ranks_of(3, lambda: DGCCompressor(0.03, DGCSGDMemory(0.9)), seed=seed)
        return [ranks.exchange(gradients(3, step))[1] for step in range(5)]

    first = run(0)
    assert all(torch.equal(a, b) for seed in (1, 2) for a, b in zip(run(seed), first, strict=True))


def big(size: Any, step: Any) -> Any:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(12_000, generator=generator) for _ in range(size)]


def test_the_seed_option_changes_the_sample() -> None:
    def run(seed: Any) -> Any:
        ranks = ranks_of(1, lambda: DGCCompressor(0.002, DGCSGDMemory(0.9), 0.01, seed=seed), {"w": (120, 100)})
        return tuple(int(ranks.exchange(big(1, step))[1].count_nonzero()) for step in range(8))

    assert len({run(seed) for seed in range(4)}) > 1


def test_every_step_has_another_seed() -> None:
    seeds = []

    class Noting(Exact):
        def select(self, due: Any, plan: Any, seed: Any) -> Any:
            seeds.append(seed)
            return super().select(due, plan, seed)

    ranks = ranks_of(1, lambda: DGCCompressor(0.03, DGCSGDMemory(0.9), selector=Noting()))
    for step in range(4):
        ranks.exchange(gradients(1, step))
    assert len(set(seeds)) == 4


def test_state_continues_bit_by_bit_where_a_bucket_was_dense_at_first() -> None:
    """At ratio 0.3 one bucket is sparse; 250 single elements, of which each is sent, make the other dense."""
    large = [("large", torch.zeros(50, 60))]
    mixed = [("mixed", torch.zeros(60, 50)), *((f"s{i}", torch.zeros(1, 1)) for i in range(250))]

    def make() -> Any:
        compressor = DGCCompressor(0.01, DGCSGDMemory(0.9), warmup_epochs=1, warmup_coeff=[0.3])
        compressor.begin_epoch(0)
        buckets = [make_bucket(f"b{i}", named) for i, named in enumerate((large, mixed))]
        states = BucketStates(compressor)
        for bucket in buckets:
            states.add(bucket, 2, 0)
        return states, buckets

    def step(states: Any, buckets: Any, number: Any) -> Any:
        results = []
        for i, bucket in enumerate(buckets):
            generator = torch.Generator().manual_seed(10 * number + i)
            bucket.flat.copy_(torch.randn(bucket.numel, generator=generator))
            results += LockstepWorld(1).converse("b", [states.reduce(bucket)])
        vectors = [dense(result, bucket) for result, bucket in zip(results, buckets, strict=True)]
        return [type(result) for result in results], torch.cat(vectors)

    compressor, buckets = make()
    for number in range(3):
        assert step(compressor, buckets, number)[0] == [SparseResult, DenseResult]
    other, other_buckets = make()
    other.load_state_dict(compressor.state_dict())
    compressor.begin_epoch(1)
    other.begin_epoch(1)
    for number in range(3, 11):
        kinds, expected = step(compressor, buckets, number)
        assert kinds == [SparseResult, SparseResult]
        assert torch.equal(step(other, other_buckets, number)[1], expected)


def test_a_selectors_history_is_kept_with_the_state_and_belongs_to_its_ratio() -> None:
    """A threshold that is remembered is the first one tried, and the one found depends on that."""

    def make(**others: Any) -> Any:
        selector = Laplace(warm_start=True)
        return ranks_of(1, lambda: DGCCompressor(0.1, ResidualMemory(), selector=selector, **others))

    def steps(ranks: Any, numbers: Any) -> Any:
        return [ranks.exchange(gradients(1, number))[1] for number in numbers]

    def reloaded(states: Any, state: Any = None, **others: Any) -> Any:
        other = make(**others)
        other.states[0].begin_epoch(0)
        other.states[0].load_state_dict(state or states.state_dict())
        return other

    whole = make()
    steps(whole, range(4))
    state = whole.states[0].state_dict()
    assert set(state["history"]) == set(SHAPES)
    assert all(rows["ratio"] == 0.1 for rows in state["history"].values())
    forgetful = {**state, "history": {}}
    again = reloaded(reloaded(whole.states[0]).states[0])
    expected = steps(whole, range(4, 10))
    assert all(map(torch.equal, steps(again, range(4, 10)), expected))
    assert not all(map(torch.equal, steps(reloaded(None, forgetful), range(4, 10)), expected))
    warm = {"warmup_epochs": 1, "warmup_coeff": [0.2]}
    assert all(
        map(torch.equal, steps(reloaded(None, state, **warm), [4]), steps(reloaded(None, forgetful, **warm), [4]))
    )


def test_another_compressors_state() -> None:
    with pytest.raises(ValueError, match="another compressor"):
        BucketStates(DGCCompressor(0.01, NoMemory())).load_state_dict({"steps": {"w": 1}})


@pytest.mark.parametrize(
    ("ratio", "culprit", "bad"), [(0.05, 0, float("nan")), (0.05, 2, float("inf")), (1.0, 2, float("nan"))]
)
def test_a_nonfinite_gradient_is_named_on_every_rank(ratio: Any, culprit: Any, bad: Any) -> None:
    ranks = ranks_of(3, lambda: DGCCompressor(ratio, DGCSGDMemory(0.9), 1))
    own = gradients(3, 0)
    own[culprit][230] = bad
    for bucket, gradient in zip(ranks.buckets, own, strict=True):
        bucket.flat.copy_(gradient)
    together = zip(ranks.states, ranks.buckets, strict=True)
    results = ranks.world.converse("b", [s.reduce(b) for s, b in together])
    reason = f"the gradient of second on rank {culprit} has NaN or inf, or is 2**64 or more"
    assert [r.nonfinite for r in results] == [reason] * 3
    assert all(error.isfinite().all() for s in ranks.states for error in s.errors())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients(dtype: Any) -> None:
    ranks = ranks_of(2, lambda: DGCCompressor(0.05, DGCSGDMemory(0.9), 1), dtype=dtype)
    steps = [gradients(2, step) for step in range(4)]
    for own, expected in zip(steps, algorithm_1(steps, 2, 0.05, 0.9, dtype=dtype), strict=True):
        assert torch.equal(ranks.exchange(own)[1].to(dtype), expected)


def test_it_takes_matrices_unless_told_otherwise() -> None:
    compressor = DGCCompressor(0.01, NoMemory())
    named = [("w", torch.zeros(3, 4)), ("b", torch.zeros(4)), ("x", torch.zeros(()))]
    segments = make_bucket("b", named).segments
    assert [compressor.accepts(s) for s in segments] == [True, False, False]
    compressor.initialize([named[1]])
    assert [compressor.accepts(s) for s in segments] == [False, True, False]


# --- numbers at the end of the range ---------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.05, 1.0])
def test_finite_gradients_whose_mean_is_not_are_named(ratio: Any) -> None:
    """Their sum is not in range: the step must not reach the parameters, nor the residual keep them."""
    ranks = ranks_of(2, lambda: DGCCompressor(ratio, DGCSGDMemory(0.0)))
    for bucket in ranks.buckets:
        bucket.flat.fill_(3e38)
    reduced = [checked_mean(s, b) for s, b in zip(ranks.states, ranks.buckets, strict=True)]
    for _, nonfinite in ranks.world.converse("b", reduced):
        assert nonfinite is not None and "of first on rank 0 has" in nonfinite
