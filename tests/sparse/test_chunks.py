"""ChunkCompressor against its algorithm written with lists, and its own laws."""

from functools import partial
from typing import Any

import pytest
import torch
from cases import case
from core.ranks import Ranks, normal
from optim.nets import alone, dgc_sgd, wrap

from dgc.compression import ChunkCompressor, DenseCompressor, DenseResult, FP16Compressor, SparseResult
from dgc.memory import DGCSGDMemory, NoMemory, ResidualMemory
from dgc.sparse.chunks import divide, largest
from dgc.sparse.payloads import PayloadError
from dgc.testing import flat

SHAPES = {"first": (20, 10), "second": (6, 5, 2), "third": (3, 1)}
NUMEL = 200 + 60 + 3  # 17 chunks of 16, of which the last has 7
SIZE = 16


def ranks_of(size: int, ratio: float = 0.2, memory: Any = ResidualMemory, dtype: str = "fp32", **rest: Any) -> Any:
    return Ranks(size, lambda: ChunkCompressor(ratio, memory(), SIZE, dtype, **rest), SHAPES)


def gradients(size: Any, step: Any) -> Any:
    """Of other magnitude in every chunk, so that each is sent at some time."""
    scales = torch.linspace(1, 2, 17).repeat_interleave(SIZE)[:NUMEL]
    return [normal(NUMEL, seed=10 * step + rank) * scales for rank in range(size)]


def chunks_by_hand(vs: Any, k: Any) -> Any:
    """Slices of the k chunks with the largest sums of magnitudes over all ranks, in their order."""
    slices = [slice(start, min(start + SIZE, NUMEL)) for start in range(0, NUMEL, SIZE)]
    sums = [sum(v[s].abs().double().sum().item() for v in vs) for s in slices]
    order = sorted(range(len(slices)), key=lambda c: (-sums[c], c))
    return [slices[c] for c in sorted(order[:k])]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_chunks_of_largest_sum_are_sent_by_all(size: int) -> None:
    """4 of 17 chunks. They cross the bounds of tensors, and each has its turn, the short one included."""
    ranks, vs, turns = ranks_of(size), [torch.zeros(NUMEL) for _ in range(size)], set()
    for step in range(20):
        own = gradients(size, step)
        vs = [v + g for v, g in zip(vs, own, strict=True)]
        results, mean = ranks.exchange(own)
        expected = torch.zeros(NUMEL)
        for s in chunks_by_hand(vs, 4):
            turns.add(s.start)
            expected[s] = sum(v[s] for v in vs) / size
            for v in vs:
                v[s] = 0
        assert torch.equal(mean, expected)
        assert all(map(torch.equal, ranks.errors(), vs))
        for result in results:
            assert isinstance(result, SparseResult) and result.indices.dtype == torch.int64
            assert bool((result.indices.diff() > 0).all()) and result.values.dtype == torch.float32
    assert turns == set(range(0, NUMEL, SIZE))
    assert {meter.rounds for meter in ranks.world.meters} == {40}


@pytest.mark.parametrize("masking", [True, False])
def test_the_momentum_of_chunks_that_are_sent_is_masked_if_asked_for(masking: bool) -> None:
    ranks = ranks_of(2, memory=lambda: DGCSGDMemory(0.5, momentum_masking=masking))
    own, sent = gradients(2, 0), torch.zeros(NUMEL, dtype=torch.bool)
    for s in chunks_by_hand(own, 4):
        sent[s] = True
    assert torch.equal(ranks.exchange(own)[1], torch.where(sent, sum(own) / 2, 0.0))
    for states, gradient in zip(ranks.states, own, strict=True):
        state = states.state_dict()
        momentum, velocity = (flat(list(state[name].values())) for name in ("momentums", "velocities"))
        assert torch.equal(velocity, torch.where(sent, 0.0, gradient))
        assert torch.equal(momentum, torch.where(sent, 0.0, gradient) if masking else gradient)


@pytest.mark.parametrize("numel", [0, 1, 2, 6, 7, 8, 99, 100, 101, 1000, 1001])
@pytest.mark.parametrize("chunk_size", [1, 2, 7, 16, 100, 1000])
def test_chunks_have_nearly_one_length(chunk_size: int, numel: int) -> None:
    chunks = divide(numel, chunk_size, 0.001)
    lengths = chunks.bounds(torch.device("cpu")).diff().tolist()
    assert sum(lengths) == numel and len(lengths) == chunks.number
    assert max(lengths, default=0) <= chunk_size
    assert all(length == chunks.length for length in lengths[:-1])
    assert min(lengths, default=1) > max(0, chunks.length - chunks.number)
    assert chunks.sent == min(1, numel) or chunks.number > 1000


@pytest.mark.parametrize(
    ("sums", "k", "expected"),
    [
        (torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0]), 4, [0, 1, 2, 3]),
        (torch.ones(2000), 70, list(range(70))),
        (torch.zeros(3), 1, [0]),
    ],
    ids=["some equal", "ones", "zeros"],
)
def test_the_first_of_equal_chunks_are_sent(sums: Any, k: int, expected: list[int]) -> None:
    assert largest(sums, k).tolist() == expected


@pytest.mark.parametrize(("ratio", "sent"), [(0.001, 1), (1 / 17, 1), (0.06, 2), (0.5, 9), (0.9, 16)])
def test_as_many_chunks_are_sent_as_the_ratio_plans(ratio: float, sent: int) -> None:
    assert divide(NUMEL, SIZE, ratio).sent == sent


def test_what_fp16_cannot_hold_stays() -> None:
    """Its limit keeps sums in range; what it rounds off stays too."""
    ranks, own = ranks_of(3, dtype="fp16"), [g * 1e5 for g in gradients(3, 0)]
    mean, limit = ranks.step(own), torch.finfo(torch.float16).max / 6
    assert mean.abs().max() <= limit * 1.001 and (mean.abs() > limit / 2).any()
    for error, gradient in zip(ranks.errors(), own, strict=True):
        values = gradient.clamp(-limit, limit).half().float()
        assert torch.equal(error, torch.where(mean != 0, gradient - values, gradient))


def overflow(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any]:
    """Ranks without the limit of fp16 after a sum that overflows, with their results and their gradients."""
    ranks = ranks_of(2, dtype="fp16")
    monkeypatch.setattr(type(ranks.compressors[0].cast), "quantize", lambda self, values, *_: values.half())
    own = [torch.where(torch.arange(NUMEL) < 205, 1.0, 60_000.0)] * 2
    return ranks, ranks.exchange(own)[0], own


def test_a_sum_of_chunks_that_overflows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _, results, _ = overflow(monkeypatch)
    reason = "the mean gradient of second overflows the dtype that carries it (no rank has NaN or inf)"
    assert [result.nonfinite for result in results] == [reason] * 2


def test_a_sum_of_chunks_that_overflows_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, _, own = overflow(monkeypatch)
    for states, bucket in zip(ranks.states, ranks.buckets, strict=True):
        states.rollback(bucket)
    assert all(map(torch.equal, ranks.errors(), own))


def test_no_chunks_are_sent_after_nan() -> None:
    ranks, own = ranks_of(3), gradients(3, 0)
    own[1][230] = float("nan")
    for bucket, gradient in zip(ranks.buckets, own, strict=True):
        bucket.flat.copy_(gradient)
    ranks.world.converse("b", [c.reduce(b) for c, b in zip(ranks.states, ranks.buckets, strict=True)])
    own[1][230] = 0.0
    assert all(meter.rounds == 1 for meter in ranks.world.meters) and all(map(torch.equal, ranks.errors(), own))


@pytest.mark.parametrize(("ratio", "sparse"), [(0.8, True), (0.85, False), (1.0, False)])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_cheaper_way_is_taken(size: int, ratio: float, sparse: bool) -> None:
    """2 bytes per element of 17 chunks against 4 per sum and 2 per sent element, whatever the number of ranks."""
    ranks = ranks_of(size, ratio, dtype="fp16")
    (result, *_), _ = ranks.exchange(gradients(size, 0))
    assert isinstance(result, SparseResult) == sparse
    chunks, meter = divide(NUMEL, SIZE, ratio), ranks.world.meters[0]
    payload = 24 + (4 * 17 + 2 * chunks.sent * chunks.length if sparse else 2 * NUMEL)
    assert meter.payload_bytes == payload
    assert meter.wire_bytes == pytest.approx(2 * (payload - 24) * (size - 1) / size + 24 * (size - 1))


def test_the_cheaper_way_is_taken_in_each_epoch_of_the_warm_up() -> None:
    ranks = ranks_of(2, 0.05, partial(DGCSGDMemory, 0.9), warmup_epochs=2, warmup_coeff=[1, 0.3])
    for epoch, numbers in ((0, NUMEL), (1, 6 * SIZE), (2, SIZE)):
        for states in ranks.states:
            states.begin_epoch(epoch)
        (result, *_), mean = ranks.exchange([torch.arange(NUMEL, 0, -1).float()] * 2)
        with case("epoch", epoch):
            assert isinstance(result, DenseResult) == (epoch == 0)
            assert int(mean.count_nonzero()) == numbers
            assert all(states.dense_share == float(epoch == 0) for states in ranks.states)


def test_a_rank_in_another_epoch_of_the_warm_up_is_named() -> None:
    ranks = ranks_of(3, 0.05, warmup_epochs=2, warmup_coeff=[0.3, 0.2])
    for rank, states in enumerate(ranks.states):
        states.begin_epoch(rank // 2)
    with pytest.raises(PayloadError, match="rank 2 encoded bucket b at compress_ratio 0.2, this rank at 0.3"):
        ranks.exchange(gradients(3, 0))


@pytest.mark.usefixtures("no_type_checks")
def test_it_takes_matrices() -> None:
    compressor = ChunkCompressor(10, NoMemory())
    segments = Ranks(1, lambda: compressor, {"w": (3, 4), "b": (4,)}).buckets[0].segments
    assert [compressor.accepts(s) for s in segments] == [True, False]
    assert compressor.compress_ratio == 0.1


@pytest.mark.usefixtures("no_type_checks")
def test_it_sends_vectors_dense_in_its_dtype() -> None:
    assert isinstance(ChunkCompressor(10, NoMemory()).fallback, FP16Compressor)
    assert isinstance(ChunkCompressor(0.1, NoMemory(), dtype="fp32").fallback, DenseCompressor)


@pytest.mark.usefixtures("no_type_checks")
def test_a_step_of_dgcsgd_is_sparse_for_matrices_alone() -> None:
    model, inputs = torch.nn.Linear(16, 12), normal(32, seed=0).view(2, 16)
    weight, bias = (p.detach().clone() for p in model.parameters())
    method = ChunkCompressor(0.3, DGCSGDMemory(0.9), SIZE, "fp32")
    optimizer = wrap(model, alone(), dgc_sgd, compression=method)
    model(inputs).square().sum().backward()
    dw, db = torch.autograd.grad(model(inputs).square().sum(), [*model.parameters()])
    optimizer.step()
    rows = dw.abs().sum(1).topk(4).indices  # one chunk per row
    torch.testing.assert_close(model.weight.detach(), weight.index_add(0, rows, dw[rows], alpha=-0.1))
    torch.testing.assert_close(model.bias.detach(), bias - 0.1 * db)
