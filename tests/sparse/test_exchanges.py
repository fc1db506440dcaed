"""Exchanges of sparse payloads: what is dealt to whom, what returns, and how many bytes that takes."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from core.ranks import Ranks, normal
from sparse.held import Held
from sparse.payloads import selection_of
from sparse.shapes import quota_for

from dgc.comm.lockstep import LockstepError
from dgc.comm.meter import all_gather_wire_bytes
from dgc.comm.requests import next_requests
from dgc.compression import DenseResult, DGCCompressor, SparseResult
from dgc.core.bucket import make_bucket
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.sparse.payloads import CastValues, PayloadError, PlainIndices, SparseFormat
from dgc.sparse.payloads.payload import PayloadPlan
from dgc.sparse.sums import BLOCK, EXCHANGES, divide_into_regions, largest_region

INT32 = SparseFormat(CastValues(), PlainIndices("int32"))


def payload_of(numel: Any, ratio: Any) -> Any:
    return PayloadPlan(INT32, quota_for(numel, ratio=ratio).per_tensor, numel, ratio)


def wire_bytes(exchange: Any, payload: Any, size: Any) -> Any:
    return min(kind.wire_bytes(payload, size) for kind in EXCHANGES[exchange])


def ranks_of(
    size: int, exchange: str = "reduce_scatter", ratio: float = 0.05, shape: Any = (40, 100), **rest: Any
) -> Any:
    return Ranks(size, lambda: DGCCompressor(ratio, ResidualMemory(), exchange=exchange, **rest), [shape])


@pytest.mark.parametrize("numel", [0, 1, 12, 13, 14, 1000, 4011])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_element_has_one_place_in_the_regions(size: int, numel: int) -> None:
    offsets, found = sorted({0, min(5, numel), numel // 2, numel}), []
    regions = divide_into_regions(torch.tensor(offsets), numel, size)
    for r in range(size):
        end = int(regions.bounds[r, -1])
        assert end <= regions.numel == largest_region(numel, size)
        index = regions.index_of(torch.arange(end), r)
        assert torch.equal(index, index.sort().values)  # the order is kept
        assert bool(((index // BLOCK) % size == r).all())
        for s, (start, stop) in enumerate(pairwise(offsets)):
            own = index[int(regions.bounds[r, s]) : int(regions.bounds[r, s + 1])]
            assert torch.equal(own, index[(index >= start) & (index < stop)])
        found.append(index)
    assert torch.equal(torch.cat(found).sort().values, torch.arange(numel))


@pytest.mark.parametrize("size", [2, 8, 64])
def test_regions_are_balanced_where_columns_differ(size: int) -> None:
    """Rows of a power of two, of which the first eighth is selected."""
    selected = torch.arange(512 * 512).view(512, 512)[:, :64].reshape(-1)
    counts = (selected // BLOCK % size).bincount(minlength=size)
    assert float((counts.max() - counts.min()) / counts.float().mean()) < 0.15


def dealt() -> tuple[Any, Any, Any]:
    """Two regions with the elements that each has received. Blocks 0, 2 and 4 are of region 0, the others of 1."""
    regions = divide_into_regions(torch.tensor([0, 5 * BLOCK]), 5 * BLOCK, 2)
    indices = [0, 3, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 7, 3 * BLOCK, 4 * BLOCK + 2]
    first, second = regions.deal(selection_of(indices, [1.0, -5.0, 0.5, 2.0, -2.0, 0.1, 4.0], 9), 3)
    return regions, first, second


def test_the_largest_of_each_region_are_dealt() -> None:
    _, first, second = dealt()
    assert first.indices.tolist() == [3, BLOCK, 2 * BLOCK + 2] and first.values.tolist() == [-5.0, 2.0, 4.0]
    assert second.indices.tolist() == [1, BLOCK, 0] and second.count == 2


def test_what_was_dealt_is_joined_in_order() -> None:
    regions, first, second = dealt()
    joined = regions.join([first, second])
    assert joined.indices.tolist() == [3, BLOCK + 1, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK + 2, 0] and joined.count == 5
    assert joined.values.tolist() == [-5.0, 0.5, 2.0, pytest.approx(0.1), 4.0, 0.0]


def test_what_a_full_payload_does_not_have_waits_on_the_rank_that_selected_it() -> None:
    """All that a rank selects lies in the region of one rank."""
    size, numel = 4, 4 * BLOCK * 10
    gradient = 1e-3 * torch.rand(numel, generator=torch.Generator().manual_seed(0)) + 1e-3
    crowded = torch.arange(40) % 10 + (torch.arange(40) // 10) * BLOCK * size  # of region 0, in four blocks
    gradient[crowded] = torch.arange(40).float() + 1
    ranks = ranks_of(size, "reduce_scatter", 40 / numel, (numel, 1))
    sent, left = crowded[-13:], crowded[:-13]  # 40/4 and a deviation in round 1, twice 40/4 in round 2
    assert torch.equal(ranks.step([gradient] * size).nonzero().view(-1), sent)
    for error in ranks.errors():
        assert torch.equal(error[left], gradient[left]) and not error[sent].any()


def test_what_the_result_does_not_have_waits_on_the_rank_that_selected_it() -> None:
    """Every rank selects k elements of its own. The result has 2 k of all."""
    size, k, own = 8, 200, torch.zeros(8, 4000)
    for rank in range(size):
        own[rank, rank * 300 + torch.arange(k)] = 1.0 + rank
    ranks = ranks_of(size)
    mean = ranks.step(list(own))
    assert 1.9 * k < int(mean.count_nonzero()) <= 2 * k
    for gradient, error in zip(own, ranks.errors(), strict=True):
        assert torch.equal(error, torch.where(mean == 0, gradient, 0.0))


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("size", [3, 8, 11, 16])
def test_as_many_bytes_are_sent_as_planned(size: int) -> None:
    """Of the rank that sends most; laws/table.py has the formulas of payloads."""
    ranks = ranks_of(size, int32_indices=True)
    ranks.step([normal(4000, seed=rank) for rank in range(size)])
    found = {(meter.wire_bytes, meter.rounds) for meter in ranks.world.meters}
    assert found == {(wire_bytes("reduce_scatter", payload_of(4000, 0.05), size), 2)}


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(("ratio", "kind"), [(0.36, DenseResult), (0.3, SparseResult)])
@pytest.mark.parametrize("size", [4, 16])
def test_a_bucket_goes_dense_where_that_is_cheaper(size: int, ratio: float, kind: type) -> None:
    ranks = ranks_of(size, "reduce_scatter", ratio, (300, 100), int32_indices=True)
    results, _ = ranks.exchange([normal(30_000, seed=rank) for rank in range(size)])
    assert all(isinstance(result, kind) for result in results)
    dense = 2 * 4 * 30_000 * (size - 1) / size + all_gather_wire_bytes(24, size)
    assert ranks.world.meters[0].wire_bytes <= dense


@pytest.fixture(scope="module")
def of_resnet50() -> PayloadPlan:
    """The payload of a bucket of ResNet-50's size at 0.1 %."""
    return payload_of(25_557_032, 0.001)


def test_bytes_of_reduce_scatter_hardly_grow_with_the_number_of_ranks(of_resnet50: PayloadPlan) -> None:
    fewest, many = (wire_bytes("reduce_scatter", of_resnet50, size) for size in (8, 1024))
    assert many <= 1.5 * fewest and wire_bytes("all_gather", of_resnet50, 1024) > 300 * many


@pytest.mark.parametrize("size", [8, 16, 64, 256, 1024])
def test_reduce_scatter_sends_at_most_six_words_for_each_element(size: int, of_resnet50: PayloadPlan) -> None:
    assert wire_bytes("reduce_scatter", of_resnet50, size) <= 6 * 4 * of_resnet50.budget.capacity


@pytest.mark.parametrize(
    ("size", "scatters"), [(1, False), (2, False), (3, False), (4, True), (8, True), (1024, True)]
)
def test_auto_sends_the_fewest_bytes(size: int, scatters: bool, of_resnet50: PayloadPlan) -> None:
    exchanges = ("all_gather", "reduce_scatter", "auto")
    gathered, scattered, auto = (wire_bytes(name, of_resnet50, size) for name in exchanges)
    assert auto == min(gathered, scattered)
    assert (scattered < gathered) == scatters


def test_bytes_of_exchanges_are_those_of_the_docs(of_resnet50: PayloadPlan) -> None:
    text = Path(__file__).parents[2].joinpath("docs/methods.md").read_text()
    head = "| ranks | `all_gather` | `reduce_scatter` |\n|---:|---:|---:|\n"
    table = text.split(head)[1].split("\n\n")[0].splitlines()
    assert len(table) > 4
    for row in table:
        size = int(row.split("|")[1])
        planned = [wire_bytes(name, of_resnet50, size) for name in ("all_gather", "reduce_scatter")]
        assert row == f"| {size} | " + " | ".join(f"{nbytes / 1e6:.2f} MB" for nbytes in planned) + " |"


@pytest.mark.parametrize(("masking", "u"), [(True, [0, 0, 0, 3, 4, 5]), (False, [0, 1, 2, 3, 4, 5])])
def test_between_steps_what_returns_is_added_once_to_what_this_rank_did_not_send(masking: Any, u: Any) -> None:
    """Momentum is masked where this rank sent, if asked for."""
    bucket, v = make_bucket("b", [("w", torch.zeros(6))]), [0, -1, 9, 3, 24, 5]
    memory = Held(DGCSGDMemory(0.5, momentum_masking=masking))
    memory.plan(bucket)

    def errors() -> Any:
        return [error.tolist() for error in memory.errors()]

    for dropped in (True, False):
        bucket.flat.copy_(torch.arange(6.0))
        inputs = memory.pass_inputs(bucket)
        assert inputs.sent is None and inputs.u is not None
        inputs.u.copy_(torch.arange(6.0))
        inputs.v.copy_(torch.arange(6.0))
        memory.sent_(bucket, selection_of([1, 2], [2.0, 3.0]), selection_of([2, 4], [10.0, 20.0], 3))
        state = memory.state_dict()
        assert errors() == [state["velocities"]["w"].tolist()] == [v] and state["momentums"]["w"].tolist() == u
        if dropped:
            memory.rollback(bucket)
            assert errors() == [[0, 1, 2, 3, 4, 5]]
    inputs = memory.pass_inputs(bucket)
    assert inputs.sent is None and inputs.u is not None and inputs.u.tolist() == u
    assert errors() == [inputs.v.tolist()] == [v]


def first_messages(exchange: str, settings: Any) -> Any:
    """The conversations of ranks with these settings, with the messages of their first round."""
    make, conversations = partial(DGCCompressor, memory=ResidualMemory(), int32_indices=True), []
    for rank, (ratio, dtype) in enumerate(settings):
        bucket = make_bucket("b", [("w", torch.zeros(100, 100))])
        bucket.flat.copy_(normal(bucket.numel, seed=rank))
        compressor = make(ratio, values=CastValues(dtype), exchange=exchange)
        conversations.append(compressor.reduce(bucket, compressor.init(bucket, len(settings), rank)))
    return conversations, [next_requests(conversation)[0] for conversation in conversations]


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ((0.02, "fp16"), "at compress_ratio 0.02, this rank at 0.01: call begin_epoch"),
        ((0.010001, "fp16"), "at compress_ratio 0.010001"),  # the payloads have equal sizes
        ((0.01, "bf16"), "in another format than this rank"),
    ],
    ids=["another ratio", "nearly the same ratio", "another dtype"],
)
def test_a_rank_with_other_settings_is_named(odd: Any, words: str) -> None:
    usual = (0.01, "fp16")
    conversations, messages = first_messages("reduce_scatter", [usual, odd, usual])
    for rank in (0, 2):
        received = tuple(message.tensor.split(list(message.splits))[rank] for message in messages)
        with pytest.raises(PayloadError, match=f"rank 1 encoded bucket b {words}"):
            conversations[rank].send((received,))


def test_a_simulated_rank_with_other_settings_is_told_the_cure() -> None:
    ratios, make = [0.01, 0.02], partial(DGCCompressor, memory=ResidualMemory(), exchange="reduce_scatter")
    ranks = Ranks(2, lambda: make(ratios.pop()), [(300, 100)])
    with pytest.raises(LockstepError, match=r"which expects .*; give every rank the same settings"):
        ranks.step([normal(30_000, seed=rank) for rank in range(2)])
