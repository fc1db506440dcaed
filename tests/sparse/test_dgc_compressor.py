"""DGCCompressor: its ways to send, its kinds of means, its seeds, and its states."""

from functools import partial
from typing import Any

import pytest
import torch
from core.ranks import Ranks, dense, normal

from dgc import paper
from dgc.comm.requests import AllGather, next_requests
from dgc.compression import DenseResult, DGCCompressor, SparseCompressor, SparseResult
from dgc.core.bucket import make_bucket
from dgc.kernels import SparseVector
from dgc.memory import ClipByGlobalNorm, DGCSGDMemory, NoMemory, ResidualMemory
from dgc.sparse.payloads import RiceIndices, SignValues, SparseFormat
from dgc.sparse.payloads.payload import PayloadPlan
from dgc.sparse.selectors import Exact, Laplace, quota_of
from dgc.sparse.sums import AllGatherExchange

SHAPES = {"first": (20, 10), "second": (6, 5, 2), "third": (3, 1)}
NUMEL = 200 + 60 + 3
MOMENTUM = partial(DGCSGDMemory, 0.9)


def gradients(size: Any, step: Any, n: int = NUMEL) -> Any:
    return [normal(n, seed=100 * step + rank) for rank in range(size)]


def dgc(ratio: float = 0.05, memory: Any = MOMENTUM, **options: Any) -> Any:
    return lambda: DGCCompressor(ratio, memory(), **options)


def test_global_clipping_takes_a_round_of_its_own() -> None:
    ranks = Ranks(3, dgc(memory=lambda: DGCSGDMemory(0.9, gradient_clipping=ClipByGlobalNorm(1.0))), SHAPES)
    ranks.exchange(gradients(3, 0))
    assert [meter.rounds for meter in ranks.world.meters] == [2, 2, 2]


def test_the_sum_of_a_dense_step_may_exceed_fp16() -> None:
    """Each value fits into fp16, and the sum of three does not."""
    ranks = Ranks(3, dgc(1.0, lambda: DGCSGDMemory(0.0), fp16_values=True), SHAPES)
    assert ranks.exchange([torch.full((NUMEL,), 40_000.0)] * 3)[1].isfinite().all()


def test_a_sum_that_overflows_is_named() -> None:
    """No gradients reach this through a memory, so the payloads are made by hand."""
    bucket, form = make_bucket("b", [("p", torch.zeros(10, 10))]), SparseFormat()
    quota, size = quota_of(bucket.segments, 0.01), 2
    one, none = torch.ones((), dtype=torch.int32), torch.tensor(bucket.numel)
    elements = SparseVector(torch.full((1,), 7, dtype=torch.int32), torch.full((1,), 3e38), one)
    payload = PayloadPlan(form, quota.per_tensor, bucket.numel, 0.01, "bucket b")
    exchange = AllGatherExchange(payload, size, 0, wants_sparse=True)
    conversation = exchange.mean(bucket, exchange.encode(elements, none))
    (message,) = next_requests(conversation)
    assert isinstance(message, AllGather)
    with pytest.raises(StopIteration) as ended:
        next_requests(conversation, ((message.tensor,) * size,))
    words = "the mean gradient of p overflows the dtype that carries it (no rank has NaN or inf)"
    assert ended.value.value[0].nonfinite == words


@pytest.mark.parametrize(
    ("size", "ratio", "sparse"), [(2, 0.3, True), (2, 0.4, False), (4, 0.16, True), (4, 0.2, False)]
)
def test_the_cheaper_way_is_taken(size: int, ratio: float, sparse: bool) -> None:
    """12 bytes per pair from N ranks against 4 bytes twice: even at ratio 2 * 4 / (12 N)."""
    ranks = Ranks(size, dgc(ratio), {"only": (100, 100)})
    (result, *_), _ = ranks.exchange(gradients(size, 0, 10_000))
    assert isinstance(result, SparseResult) == sparse
    both = (24 + 12 * round(ratio * 10_000)) * (size - 1), 2 * 40_000 * (size - 1) / size
    assert ranks.world.meters[0].wire_bytes <= min(both) + 24 * size


SMALL: Any = {"values": SignValues(), "indices": RiceIndices()}
RESIDUAL = partial(SparseCompressor, 0.01, ResidualMemory(), **SMALL)


@pytest.mark.parametrize(
    ("make", "dtype", "kind"),
    [
        pytest.param(RESIDUAL, torch.float32, DenseResult, id="residual"),
        pytest.param(RESIDUAL, torch.float16, SparseResult, id="residual, fp16 gradients"),
        pytest.param(dgc(0.01, **SMALL), torch.float32, SparseResult, id="dgc"),
    ],
)
def test_a_mean_is_sparse_only_where_it_can_be_used_so(make: Any, dtype: Any, kind: type) -> None:
    ranks = Ranks(2, make, [(40, 30), (700, 10)], dtype)
    results, mean = ranks.exchange([normal(8200, seed=r).to(dtype) for r in range(2)])
    assert [type(result) for result in results] == [kind, kind]
    assert 0 < int((mean != 0).sum()) <= 2 * 82
    for bucket, result in zip(ranks.buckets, results, strict=True):
        result.write_to(bucket)
        assert torch.equal(dense(DenseResult(), bucket).float(), mean.to(dtype).float())


def test_what_waits_leaves_with_a_dense_step() -> None:
    """Sparse first, then at ratio 1: all of v is sent."""
    ranks = Ranks(2, dgc(0.01), SHAPES)
    ranks.exchange(gradients(2, 0))
    waiting, momenta = ranks.errors(), [s.state_dict()["momentums"] for s in ranks.states]
    assert all(w.any() for w in waiting)
    expected, own = torch.zeros(NUMEL), gradients(2, 1)
    for rank, states in enumerate(ranks.states):
        states.compressor = states.compressor.changed(ratio=1.0)
        u = torch.cat([momenta[rank][name].reshape(-1) for name in SHAPES])
        expected += (waiting[rank] + 0.9 * u + own[rank]) / 2
    torch.testing.assert_close(ranks.exchange(own)[1], expected)


def test_a_state_continues_after_dense_steps_of_a_bucket() -> None:
    """At ratio 0.3 one bucket is sparse; 250 single elements, of which each is sent, make the other dense."""
    mixed = {"mixed": (60, 50), **{f"s{i}": (1, 1) for i in range(250)}}

    def step(pair: Any, number: Any) -> Any:
        own = [normal(ranks.buckets[0].numel, seed=10 * number + i) for i, ranks in enumerate(pair)]
        results = [ranks.exchange([gradient]) for ranks, gradient in zip(pair, own, strict=True)]
        return [type(kind) for (kind,), _ in results], torch.cat([mean for _, mean in results])

    make, shapes = dgc(0.01, warmup_epochs=1, warmup_coeff=[0.3]), ({"large": (50, 60)}, mixed)
    pair, others = ([Ranks(1, make, of_bucket) for of_bucket in shapes] for _ in range(2))
    for ranks in (*pair, *others):
        ranks.states[0].begin_epoch(0)
    for number in range(3):
        assert step(pair, number)[0] == [SparseResult, DenseResult]
    for ranks, other in zip(pair, others, strict=True):
        other.states[0].load_state_dict(ranks.states[0].state_dict())
        ranks.states[0].begin_epoch(1)
        other.states[0].begin_epoch(1)
    for number in range(3, 11):
        kinds, later = step(pair, number)
        assert kinds == [SparseResult, SparseResult]
        assert torch.equal(step(others, number)[1], later)


def test_the_seed_option_changes_the_sample() -> None:
    def run(seed: Any) -> Any:
        ranks = Ranks(1, dgc(0.002, sample_ratio=0.01, seed=seed), {"w": (120, 100)})
        return tuple(int(ranks.exchange(gradients(1, step, 12_000))[1].count_nonzero()) for step in range(8))

    assert len({run(seed) for seed in range(4)}) > 1


def test_every_step_has_another_seed() -> None:
    seeds = []

    class Noting(Exact):
        def select(self, due: Any, quota: Any, seed: Any) -> Any:
            seeds.append(seed)
            return super().select(due, quota, seed)

    ranks = Ranks(1, dgc(selector=Noting()), SHAPES)
    for step in range(4):
        ranks.exchange(gradients(1, step))
    assert len(set(seeds)) == 4


def means(ranks: Any, numbers: Any) -> list[Any]:
    return [ranks.exchange(gradients(1, number))[1] for number in numbers]


def loaded_with_a_warm_start(state: Any, **warmup: Any) -> Any:
    """A threshold that is remembered is the first one tried, and the one found depends on that."""
    ranks = Ranks(1, dgc(0.1, ResidualMemory, selector=Laplace(warm_start=True), **warmup), SHAPES)
    ranks.states[0].begin_epoch(0)
    if state is not None:
        ranks.states[0].load_state_dict(state)
    return ranks


def with_a_history() -> tuple[Any, Any]:
    """A rank after four steps, with its state."""
    ranks = loaded_with_a_warm_start(None)
    means(ranks, range(4))
    return ranks, ranks.states[0].state_dict()


def test_a_state_has_the_selector_s_history_with_its_ratio() -> None:
    _, state = with_a_history()
    assert set(state["history"]) == set(SHAPES)
    assert all(rows["ratio"] == 0.1 for rows in state["history"].values())


def test_a_selector_s_history_is_loaded_with_the_state() -> None:
    whole, state = with_a_history()
    again = loaded_with_a_warm_start(loaded_with_a_warm_start(state).states[0].state_dict())
    assert all(map(torch.equal, means(again, range(4, 10)), means(whole, range(4, 10))))


def test_a_state_without_the_selector_s_history_selects_otherwise() -> None:
    whole, state = with_a_history()
    forgetful = loaded_with_a_warm_start({**state, "history": {}})
    assert not all(map(torch.equal, means(forgetful, range(4, 10)), means(whole, range(4, 10))))


def test_a_selector_s_history_is_not_used_at_another_ratio() -> None:
    _, state = with_a_history()
    warm: Any = {"warmup_epochs": 1, "warmup_coeff": [0.2]}
    one, other = (loaded_with_a_warm_start(given, **warm) for given in (state, {**state, "history": {}}))
    assert all(map(torch.equal, means(one, [4]), means(other, [4])))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients(dtype: Any) -> None:
    """As the paper's algorithm has them."""
    ranks = Ranks(2, dgc(sample_ratio=1), SHAPES, dtype)
    definition = Ranks(2, lambda: paper.DGC(0.05, 0.9), SHAPES, dtype)
    for step in range(4):
        own = gradients(2, step)
        assert torch.equal(ranks.exchange(own)[1].to(dtype), definition.exchange(own)[1])


def test_it_takes_matrices_unless_told_otherwise() -> None:
    compressor = DGCCompressor(0.01, NoMemory())
    named = [("w", torch.zeros(3, 4)), ("b", torch.zeros(4)), ("x", torch.zeros(()))]
    segments = make_bucket("b", named).segments
    assert [compressor.accepts(s) for s in segments] == [True, False, False]
    compressor.initialize([named[1]])
    assert [compressor.accepts(s) for s in segments] == [False, True, False]
