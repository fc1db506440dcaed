"""DistributedOptimizer and parameters of all kinds: unused, frozen, tied, sparse, of other precision or layout."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from optim.nets import (
    KINDS,
    alone,
    assert_same,
    data,
    dgc,
    dgc_sgd,
    every_kind,
    loss_of,
    momentum_sgd,
    net,
    run,
    through_gradients,
    train,
    trained,
    trained_alone,
    wrap,
)
from torch import nn

from dgc.bucket import make_bucket
from dgc.compression import BF16Compressor, DenseCompressor, DGCCompressor, PowerSGDCompressor
from dgc.gossip.model import FlatModel
from dgc.memory import ResidualMemory
from dgc.optim import DistributedOptimizer, OneBitAdam


@pytest.mark.parametrize("zero", ["own", "model"])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_unused_in_some_steps_on_some_ranks(zero: Any, kind: Any) -> None:
    def loss(model: Any, number: Any, rank: Any) -> Any:
        return loss_of(model, number, rank, spare=(number + rank) % 3 == 0)

    def joint(model: Any, number: Any, size: Any) -> Any:
        unused = 0.0 * sum(p.sum() for p in model.spare.parameters())  # its gradient is zero, and momentum goes on
        return sum(loss(model, number, rank) for rank in range(size)) / size + unused

    found = trained(2, range(6), dgc_sgd, KINDS[kind], training={"loss": loss, "zero": zero}, bucket_mb=2e-4)
    assert not torch.equal(found.spare.weight, net().spare.weight)
    if kind != "dgc":
        assert_same(found, trained_alone(2, range(6), loss=joint))


def test_a_parameter_that_no_rank_uses_stays() -> None:
    model = trained(2, range(3), training={"spare": False})
    assert torch.equal(model.spare.weight, net().spare.weight)
    assert not torch.equal(model.first.weight, net().first.weight)


def test_frozen_parameters_take_no_part() -> None:
    def body(model: Any, transport: Any) -> None:
        model.first.requires_grad_(False)
        optimizer = wrap(model, transport)
        names = [s.name for plan in optimizer.planned for s in plan.bucket.segments]
        assert names == ["last.bias", "last.weight", "spare.bias", "spare.weight"]
        train(model, optimizer, range(3), transport.rank)

    (model, _) = run(2, body)
    assert torch.equal(model.first.weight, net().first.weight)
    assert not torch.equal(model.last.weight, net().last.weight)


@every_kind
def test_unfrozen_parameters_are_refused_on_every_rank_until_wrapped_again(compression: Any) -> None:
    errors = []

    def body(model: Any, transport: Any) -> None:
        model.first.requires_grad_(False)
        optimizer = wrap(model, transport, dgc_sgd, compression=compression())
        train(model, optimizer, [0], transport.rank)
        model.first.requires_grad_(True)
        with pytest.raises(ValueError, match=r"requires a gradient now.*close\(\) it and wrap") as error:
            train(model, optimizer, [1], transport.rank)
        errors.append(str(error.value))
        optimizer.synchronize()  # completes the exchange, whose gradients are dropped
        optimizer.close()
        train(model, wrap(model, transport, dgc_sgd, compression=compression()), range(2, 5), transport.rank)

    (model, _) = run(2, body)
    assert len(errors) == 2 and errors[0] == errors[1]
    assert not torch.equal(model.first.weight, net().first.weight)


@every_kind
def test_parameters_that_are_frozen_later_stay_and_may_be_unfrozen(compression: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, partial(dgc_sgd, weight_decay=0.1), compression=compression())
        train(model, optimizer, range(3), transport.rank)
        model.first.requires_grad_(False)
        before = model.first.weight.detach().clone()
        train(model, optimizer, range(3, 6), transport.rank)
        assert torch.equal(model.first.weight, before)
        model.first.requires_grad_(True)
        train(model, optimizer, [6], transport.rank)
        assert not torch.equal(model.first.weight, before)

    run(2, body)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6, bias=False)
        self.b.weight = self.a.weight
        self.last = nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        return self.last(self.b(torch.tanh(self.a(x))))


@pytest.mark.parametrize("duplicates", [False, True])
@pytest.mark.parametrize("ratio", [None, 0.1, 1.0])
def test_tied_parameters(duplicates: Any, ratio: Any) -> None:
    """One gradient, exchanged once."""
    torch.manual_seed(0)
    reference = Tied()
    models = [copy.deepcopy(reference) for _ in range(2)]

    def body(model: Any, transport: Any) -> None:
        named = model.named_parameters(remove_duplicate=not duplicates)
        inner, compression = (dgc_sgd(model), dgc(ratio)) if ratio else (momentum_sgd(model), None)
        optimizer = DistributedOptimizer(inner, named, compression, transport=transport)
        assert sum(len(plan.bucket.segments) for plan in optimizer.planned) == 4
        train(model, optimizer, range(3), transport.rank)

    (model, _) = run(2, body, models)
    trained_alone(2, range(3), model=reference)
    if ratio == 0.1:
        assert not torch.equal(model.a.weight, reference.a.weight)
    else:
        assert_same(model, reference)


@every_kind
@pytest.mark.parametrize("passes", [1, 2])
def test_sparse_embedding_gradients(compression: Any, passes: Any) -> None:
    """sparse=True gives the same result as sparse=False, through the same buckets."""
    words = [torch.tensor([[1, 2], [3, 3]]), torch.tensor([[2, 5], [19, 0]])]

    def embedding(sparse: Any) -> Any:
        model = nn.EmbeddingBag(20, 4, sparse=sparse)
        nn.init.ones_(model.weight)
        return model

    def loss(model: Any, number: Any, rank: Any) -> Any:
        return model(words[rank]).square().sum().mul(0.01)

    sparse, dense = (
        trained(
            2,
            range(3),
            dgc_sgd,
            compression,
            [embedding(sparse) for _ in range(2)],
            {"loss": loss, "passes": passes},
        )
        for sparse in (True, False)
    )
    assert_same(sparse, dense)


@pytest.mark.parametrize("compression", [None, lambda: DGCCompressor(1.0, ResidualMemory())])
def test_sparse_adam_steps_on_the_rows_of_all_ranks(compression: Any) -> None:
    """Also where a rank does not use the table, or state is created for a broadcast."""
    torch.manual_seed(0)
    reference = nn.Embedding(20, 4, sparse=True)
    models = [copy.deepcopy(reference) for _ in range(2)]
    words = [torch.tensor([[1, 2], [3, 3]]), torch.tensor([[2, 5], [19, 0]])]

    def adam(model: Any) -> Any:
        return torch.optim.SparseAdam(model.parameters())

    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, adam, compression=compression and compression())
        for p in model.parameters():  # as hvd.broadcast_optimizer_state
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for step in range(3):
            optimizer.zero_grad()
            if step == 0 or transport.rank == 0:
                model(words[transport.rank]).square().sum().backward()
            optimizer.step()

    def joint(model: Any, step: Any, size: Any) -> Any:
        return sum(model(w).square().sum() for w in words[: 2 if step == 0 else 1]) / size

    expected = trained_alone(2, range(3), adam, reference, loss=joint)
    assert_same(run(2, body, models)[0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "compression", [DenseCompressor, BF16Compressor, lambda: dgc(0.2)], ids=["dense", "bf16", "dgc"]
)
def test_parameters_of_other_precision(dtype: Any, compression: Any) -> None:
    losses = []

    def loss(model: Any, number: Any, rank: Any) -> Any:
        x, y = (t.to(dtype) for t in data(0, rank))
        found = (model(x) - y).square().mean()
        losses.append(found.item())
        return found

    trained(2, range(60), dgc_sgd, compression, [net().to(dtype) for _ in range(2)], {"loss": loss})
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


def test_channels_last() -> None:
    def build() -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 2))
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def loss(model: Any, number: Any, rank: Any) -> Any:
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(rank))
        return model(x.to(memory_format=torch.channels_last)).square().mean()

    def finish(model: Any, optimizer: Any) -> None:
        assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
        optimizer.step()

    dense, complete, sparse = (
        trained(2, range(4), dgc_sgd, make, [build(), build()], {"loss": loss, "finish": finish})
        for make in (DenseCompressor, lambda: dgc(1.0), lambda: dgc(0.1))
    )
    assert_same(dense, complete)
    assert not torch.equal(sparse[0].weight, build()[0].weight)
    torch.testing.assert_close(sparse[0].weight, dense[0].weight, rtol=0.5, atol=0.1)


class Complex(nn.Module):
    """Complex parameters, one with another memory order, and a gradient that autograd stores conjugated."""

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
@pytest.mark.parametrize(
    ("compression", "is_dense"),
    [
        (DenseCompressor, True),
        (lambda: dgc(1.0), True),
        (lambda: dgc(0.2, vectors="sparse"), False),
        (lambda: PowerSGDCompressor(1), False),
    ],
)
def test_complex_parameters_are_exchanged_as_pairs_of_real_numbers(
    zero: Any, compression: Any, is_dense: bool
) -> None:
    def check(model: Any) -> None:
        assert model.first.grad.dtype == torch.complex64

    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, partial(dgc_sgd, weight_decay=0.01), compression=compression())
        for step in range(5):
            finish = partial(through_gradients, change=check) if step % 2 else None
            train(model, optimizer, [step], transport.rank, zero=zero, finish=finish)

    model = run(2, body, [Complex(), Complex()])[0]
    if is_dense:
        sgd = partial(momentum_sgd, weight_decay=0.01)
        assert_same(model, trained_alone(2, range(5), sgd, Complex()))
    for p, before in zip(model.parameters(), Complex().parameters(), strict=True):
        assert not torch.equal(p.imag if p.is_complex() else p, before.imag if p.is_complex() else before)


def test_complex_parameters_are_refused_by_name_where_they_are_not_supported() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="OneBitAdam takes real parameters"):
        OneBitAdam([parameter], freeze_step=1)
    with pytest.raises(ValueError, match="phase is complex, which only DistributedOptimizer and dgc.ddp.compress"):
        make_bucket("b", [("phase", parameter)])  # FSDP2 and aggregators
    with pytest.raises(ValueError, match="gossip averages floating-point numbers, but phase has dtype"):
        FlatModel([("phase", parameter)])  # gossip and outer steps


def test_create_graph() -> None:
    model = net()
    optimizer = wrap(model, alone())
    with pytest.warns(UserWarning, match="create_graph"):
        loss_of(model, 0).backward(create_graph=True)
    optimizer.step()
    assert not model.first.weight.grad.requires_grad
    assert_same(model, trained_alone(1, [0]), exactly=True)
