"""DistributedOptimizer and parameters of all kinds: unused, frozen, tied, sparse, of other precision or layout."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from optim import horovods, nets
from refusals import check_refusals
from torch import nn

from dgc.comm import all_gather_object
from dgc.compression import BF16Compressor, DenseCompressor, DGCCompressor, PowerSGDCompressor
from dgc.core.bucket import make_bucket
from dgc.gossip.model import FlatModel
from dgc.memory import ResidualMemory
from dgc.optim import DistributedOptimizer, OneBitAdam


@pytest.mark.parametrize("zero", ["own", "model"])
@pytest.mark.parametrize("kind", nets.KINDS)
def test_parameters_unused_in_some_steps_on_some_ranks(zero: Any, kind: Any) -> None:
    def loss(model: Any, number: Any, rank: Any) -> Any:
        return nets.loss_of(model, number, rank, spare=(number + rank) % 3 == 0)

    def joint(model: Any, number: Any, size: Any) -> Any:
        unused = 0.0 * sum(p.sum() for p in model.spare.parameters())  # its gradient is zero, and momentum goes on
        return sum(loss(model, number, rank) for rank in range(size)) / size + unused

    training = {"loss": loss, "zero": zero}
    found = nets.trained(2, range(6), nets.dgc_sgd, nets.KINDS[kind], training=training, bucket_mb=2e-4)
    assert not torch.equal(found.spare.weight, nets.net().spare.weight)
    if kind != "dgc":
        nets.assert_same(found, nets.trained_alone(2, range(6), loss=joint))


def test_a_parameter_that_no_rank_uses_stays() -> None:
    model = nets.trained(2, range(3), training={"spare": False})
    assert torch.equal(model.spare.weight, nets.net().spare.weight)
    assert not torch.equal(model.first.weight, nets.net().first.weight)


def test_gradients_with_a_graph_of_their_own() -> None:
    optimizer = nets.wrap(model := nets.net(), nets.alone())
    with pytest.warns(UserWarning, match="create_graph"):
        nets.loss_of(model, 0).backward(create_graph=True)
    optimizer.step()
    assert not model.first.weight.grad.requires_grad
    nets.assert_same(model, nets.trained_alone(1, [0]), exactly=True)


def with_a_frozen_layer(model: Any, transport: Any, compression: Any) -> Any:
    """An optimizer after three steps in which the first layer was frozen."""
    model.first.requires_grad_(False)
    optimizer = nets.wrap(model, transport, nets.dgc_sgd, compression=compression())
    nets.train(model, optimizer, range(3), transport.rank)
    return optimizer


@nets.every_kind
@nets.each_rank(2)
def test_frozen_parameters_take_no_part(model: Any, transport: Any, compression: Any) -> None:
    optimizer = with_a_frozen_layer(model, transport, compression)
    names = {s.name for plan in optimizer.planned for s in plan.bucket.segments}
    assert names == {"last.bias", "last.weight", "spare.bias", "spare.weight"}
    assert torch.equal(model.first.weight, nets.net().first.weight)
    assert not torch.equal(model.last.weight, nets.net().last.weight)


@nets.every_kind
@nets.each_rank(2)
def test_parameters_that_are_unfrozen_are_refused_on_all_ranks(
    model: Any, transport: Any, compression: Any
) -> None:
    optimizer = with_a_frozen_layer(model, transport, compression)
    model.first.requires_grad_(True)
    with pytest.raises(ValueError, match=r"requires a gradient now.*close\(\) it and wrap") as error:
        nets.train(model, optimizer, [3], transport.rank)
    assert len(set(all_gather_object(transport, str(error.value)))) == 1


@nets.every_kind
@nets.each_rank(2)
def test_parameters_that_are_unfrozen_are_trained_once_wrapped_again(
    model: Any, transport: Any, compression: Any
) -> None:
    """What is frozen later stays until it is not."""
    optimizer = with_a_frozen_layer(model, transport, compression)
    model.first.requires_grad_(True)
    with pytest.raises(ValueError, match="requires a gradient now"):
        nets.train(model, optimizer, [3], transport.rank)
    optimizer.synchronize()  # completes the exchange, whose gradients are dropped
    optimizer.close()
    optimizer = nets.wrap(model, transport, partial(nets.dgc_sgd, weight_decay=0.1), compression=compression())
    nets.train(model, optimizer, range(4, 7), transport.rank)
    assert not torch.equal(model.first.weight, nets.net().first.weight)
    for frozen in (True, False):
        model.first.requires_grad_(not frozen)
        before = model.first.weight.detach().clone()
        nets.train(model, optimizer, range(7, 10), transport.rank)
        assert torch.equal(model.first.weight, before) == frozen


@pytest.mark.parametrize("duplicates", [False, True])
@pytest.mark.parametrize("ratio", [None, 0.1, 1.0])
def test_tied_parameters(duplicates: Any, ratio: Any) -> None:
    torch.manual_seed(0)
    reference: Any = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.Linear(6, 3))
    reference[2].weight = reference[0].weight

    def body(model: Any, transport: Any) -> None:
        named = model.named_parameters(remove_duplicate=not duplicates)
        inner, compression = (nets.dgc_sgd(model), nets.dgc(ratio)) if ratio else (nets.momentum_sgd(model), None)
        optimizer = DistributedOptimizer(inner, named, compression, transport=transport)
        assert sum(len(plan.bucket.segments) for plan in optimizer.planned) == 4
        nets.train(model, optimizer, range(3), transport.rank)

    (model, _) = nets.run(2, body, [copy.deepcopy(reference) for _ in range(2)])
    nets.trained_alone(2, range(3), model=reference)
    if ratio == 0.1:
        assert not torch.equal(model[0].weight, reference[0].weight)
    else:
        nets.assert_same(model, reference)


WORDS = [torch.tensor([[1, 2], [3, 3]]), torch.tensor([[2, 5], [19, 0]])]


@nets.every_kind
@pytest.mark.parametrize("passes", [1, 2])
def test_sparse_embedding_gradients(compression: Any, passes: Any) -> None:
    def loss(model: Any, number: Any, rank: Any) -> Any:
        return model(WORDS[rank]).square().sum().mul(0.01)

    def end(sparse: bool) -> Any:
        models = [nn.EmbeddingBag(20, 4, sparse=sparse, _weight=torch.ones(20, 4)) for _ in range(2)]
        training = {"loss": loss, "passes": passes}
        return nets.trained(2, range(3), nets.dgc_sgd, compression, models, training=training)

    nets.assert_same(end(True), end(False))


@pytest.mark.parametrize("compression", [None, lambda: DGCCompressor(1.0, ResidualMemory())])
def test_sparse_adam_steps_on_the_rows_of_all_ranks(compression: Any) -> None:
    torch.manual_seed(0)
    reference = nn.Embedding(20, 4, sparse=True)

    def adam(model: Any) -> Any:
        return torch.optim.SparseAdam(model.parameters())

    def body(model: Any, transport: Any) -> None:
        optimizer = nets.wrap(model, transport, adam, compression=compression and compression())
        horovods.broadcast_optimizer_state(optimizer, transport)
        for step in range(3):
            optimizer.zero_grad()
            if step == 0 or transport.rank == 0:
                model(WORDS[transport.rank]).square().sum().backward()
            optimizer.step()

    def joint(model: Any, step: Any, size: Any) -> Any:
        return sum(model(w).square().sum() for w in WORDS[: 2 if step == 0 else 1]) / size

    (model, _) = nets.run(2, body, [copy.deepcopy(reference) for _ in range(2)])
    nets.assert_same(model, nets.trained_alone(2, range(3), adam, reference, loss=joint))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("compression", [DenseCompressor, BF16Compressor, nets.KINDS["dgc"]])
def test_parameters_of_other_precision(dtype: Any, compression: Any) -> None:
    losses = []

    def loss(model: Any, number: Any, rank: Any) -> Any:
        x, y = (t.to(dtype) for t in nets.data(0, rank))
        losses.append((model(x) - y).square().mean())
        return losses[-1]

    models = [nets.net().to(dtype) for _ in range(2)]
    nets.trained(2, range(30), nets.dgc_sgd, compression, models, training={"loss": loss})
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


def test_channels_last() -> None:
    def build() -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 2))
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def loss(model: Any, number: Any, rank: Any) -> Any:
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(rank))
        return model(x.to(memory_format=torch.channels_last)).square().mean()

    def end(compression: Any) -> Any:
        training, models = {"loss": loss}, [build(), build()]
        model = nets.trained(2, range(4), nets.dgc_sgd, compression, models, training=training)
        assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
        return model

    dense, complete, sparse = end(DenseCompressor), end(lambda: nets.dgc(1.0)), end(lambda: nets.dgc(0.1))
    nets.assert_same(dense, complete)
    assert not torch.equal(sparse[0].weight, build()[0].weight)
    torch.testing.assert_close(sparse[0].weight, dense[0].weight, rtol=0.5, atol=0.1)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(6, 8, dtype=torch.complex64))
        self.shift = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.last = nn.Parameter(torch.randn(3, 8, dtype=torch.complex64).t())
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float32))

    def forward(self, x: Any) -> Any:
        x = x.to(torch.complex64) @ self.first + self.shift.conj()
        return torch.view_as_real(x @ self.last / 8).sum(2) * self.scale


@pytest.mark.parametrize("zero", ["own", "zero"])
def test_complex_parameters_are_exchanged_as_pairs_of_real_numbers(zero: Any) -> None:
    def body(model: Any, transport: Any, compression: Any) -> None:
        decaying = partial(nets.dgc_sgd, weight_decay=0.01)
        optimizer = nets.wrap(model, transport, decaying, compression=compression())
        for step in range(5):
            finish = nets.through_gradients if step % 2 else None
            nets.train(model, optimizer, [step], transport.rank, zero=zero, finish=finish)
            assert model.first.grad.dtype == torch.complex64

    expected = nets.trained_alone(2, range(5), partial(nets.momentum_sgd, weight_decay=0.01), Complex())
    dense: list[Any] = [DenseCompressor, lambda: nets.dgc(1.0)]
    for compression in (*dense, lambda: nets.dgc(0.2, vectors="sparse"), lambda: PowerSGDCompressor(1)):
        model = nets.run(2, partial(body, compression=compression), [Complex(), Complex()])[0]
        if compression in dense:
            nets.assert_same(model, expected)
        for p, before in zip(model.parameters(), Complex().parameters(), strict=True):
            assert not torch.equal(p.imag if p.is_complex() else p, before.imag if p.is_complex() else before)


def test_complex_parameters_are_refused_by_name_where_they_are_not_supported() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    named, only = [("phase", parameter)], "phase is complex, which only DistributedOptimizer and dgc.ddp.compress"
    check_refusals(
        (lambda: OneBitAdam([parameter], freeze_step=1), "OneBitAdam takes real parameters"),
        (lambda: make_bucket("b", named), only),  # FSDP2 and aggregators
        # gossip and outer steps
        (lambda: FlatModel(named), "gossip averages floating-point numbers, but phase has dtype"),
    )
