"""gTop-k: what a step sends and keeps, by the definition in dense vectors, and from rank to rank."""

from functools import partial
from typing import Any

import pytest
import torch
from core.ranks import Ranks, normal
from optim.nets import alone, net, wrap

from dgc.comm.requests import next_requests
from dgc.compression import DGCCompressor, Route, Rule
from dgc.contrib import GTopKCompressor
from dgc.core.bucket import make_bucket
from dgc.memory import ResidualMemory
from dgc.sparse.payloads import PayloadError
from dgc_training.config import load
from dgc_training.startup.build import build_method, open_transport


def ranks_of(size: int, shape: Any = (40, 100)) -> Any:
    return Ranks(size, partial(GTopKCompressor, 0.05), [shape])


def top(x: Any, k: Any) -> Any:
    """The k largest magnitudes, of equal ones the first."""
    order = x.abs().argsort(descending=True, stable=True)[:k]
    return torch.zeros_like(x).index_copy(0, order, x[order])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_doubling_by_the_definition_in_dense_vectors(size: Any) -> None:
    k, ranks, errors = 200, ranks_of(size), [torch.zeros(4000) for _ in range(size)]
    for step in range(3):
        own = [normal(4000, seed=10 * step + rank) for rank in range(size)]
        due = [error + gradient for error, gradient in zip(errors, own, strict=True)]
        sent = [top(v, k) for v in due]
        power = 2 ** (size.bit_length() - 1)
        x = [top(sent[p] + sent[power + p], 2 * k) if power + p < size else sent[p] for p in range(power)]
        for j in range(size.bit_length() - 1):
            x = [top(x[r & ~(1 << j)] + x[r | 1 << j], 2 * k) for r in range(power)]
        assert torch.equal(ranks.step(own), x[0] / size)
        errors, waits = ranks.errors(), x[0] == 0
        assert all(torch.equal(error[waits], v[waits]) for v, error in zip(due, errors, strict=True))


def test_a_result_has_twice_as_many_elements_as_a_selection() -> None:
    size, k, own = 8, 200, torch.zeros(8, 4000)
    for rank in range(size):
        own[rank, rank * 300 + torch.arange(k)] = 1.0 + rank
    ranks = ranks_of(size)
    mean = ranks.step(list(own))
    assert 1.9 * k < int(mean.count_nonzero()) <= 2 * k
    for gradient, error in zip(own, ranks.errors(), strict=True):
        assert torch.equal(error, torch.where(mean == 0, gradient, 0.0))


def test_a_part_that_a_group_drops_of_an_element_of_the_result_stays_in_the_group() -> None:
    """Ranks 0 to 3 drop 2.5 at element 5, for elements 0 and 1. The result has what ranks 4 and 5 add there."""
    own, left = torch.zeros(8, 20), torch.zeros(8, 20)
    own[0, 0], own[1, 1], own[2, 5], own[3, 1] = 3.0, 4.0, 2.5, 1.0
    own[4, 5], own[5, 5], own[6, 6], own[7, 6] = 10.0, 1.0, 8.0, 1.0
    ranks = ranks_of(8, (20, 1))
    mean = ranks.step(list(own))
    assert (mean[5], mean[6]) == (11 / 8, 9 / 8) and mean.count_nonzero() == 2
    left[0, 0], left[0, 5], left[1, 1], left[3, 1] = 3.0, 2.5, 4.0, 1.0
    assert torch.equal(torch.stack(ranks.errors()), left)


@pytest.mark.parametrize("size", [3, 8, 11])
def test_every_rank_has_the_same_number_of_rounds(size: int) -> None:
    ranks = ranks_of(size)
    ranks.step([normal(4000, seed=rank) for rank in range(size)])
    doublings = size.bit_length() - 1
    rounds = 1 + doublings + (0 if size == 1 << doublings else 2)
    assert [meter.rounds for meter in ranks.world.meters] == [rounds] * size


def test_a_rank_with_another_ratio_is_named_before_anything_is_added() -> None:
    conversations = []
    for rank, ratio in enumerate((0.01, 0.02, 0.01)):
        bucket, compressor = make_bucket("b", [("w", torch.zeros(100, 100))]), GTopKCompressor(ratio)
        bucket.flat.copy_(normal(bucket.numel, seed=rank))
        conversations.append(compressor.reduce(bucket, compressor.init(bucket, 3, rank)))
    messages = [next_requests(conversation)[0] for conversation in conversations]
    words = "rank 1 encoded bucket b at compress_ratio 0.02, this rank at 0.01: call begin_epoch"
    with pytest.raises(PayloadError, match=words):
        conversations[2].send((tuple(message.tensor for message in messages),))  # type: ignore[union-attr]


@pytest.mark.parametrize("route", [False, True])
def test_a_transport_that_cannot_send_between_ranks_is_refused(route: bool) -> None:
    compressor, transport = GTopKCompressor(0.01), alone()
    transport.point_to_point = False
    with pytest.raises(ValueError, match="from rank to rank.*LockstepTransport does not: connect with"):
        wrap(net(), transport, compression=Route([Rule(compressor)]) if route else compressor)


NEEDS: list[tuple[Any, bool]] = [
    (partial(DGCCompressor, 0.01, ResidualMemory()), False),
    (partial(GTopKCompressor, 0.01), True),
]


@pytest.mark.parametrize(("make", "needs"), NEEDS)
def test_the_optimizer_asks_for_a_transport_between_ranks_if_the_method_needs_it(
    make: Any, needs: bool, monkeypatch: Any
) -> None:
    asked = []

    def connected(point_to_point: Any, **_: Any) -> Any:
        asked.append(point_to_point)
        return alone()

    monkeypatch.setattr("dgc.optim.distributed.default_transport", connected)
    wrap(net(), None, compression=make())
    assert asked == [needs]


@pytest.mark.parametrize(
    ("file", "needs"), [(None, False), ("dgc/wm0", False), ("contrib/gtopk", True), ("gossip/sgp", True)]
)
def test_the_trainer_asks_for_a_transport_between_ranks_if_the_method_needs_it(file: Any, needs: bool) -> None:
    asked = []

    def connected(point_to_point: Any, **_: Any) -> Any:
        asked.append(point_to_point)
        return alone()

    settings = load(["configs/digits/cnn", *([] if file is None else [f"configs/{file}"])]).train
    open_transport(settings, build_method(settings), connected)
    assert asked == [needs]
