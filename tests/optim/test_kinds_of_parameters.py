"""DistributedOptimizer and parameters of all kinds: unused, frozen, tied, sparse, of other precision or layout."""

import copy
from typing import Any

import pytest
import torch
from optim.nets import (
    ZEROS,
    alone,
    assert_same,
    data,
    dgc,
    dgc_sgd,
    joint_loss,
    loss_of,
    momentum_sgd,
    net,
    run,
    wrap,
)
from torch import nn

from dgc.bucket import make_bucket
from dgc.compression import BF16Compressor, DenseCompressor, DGCCompressor, PowerSGDCompressor
from dgc.gossip.model import FlatModel
from dgc.memory import ResidualMemory
from dgc.optim import DistributedOptimizer, OneBitAdam


@pytest.mark.parametrize("zero", ["own", "model"])
def test_a_parameter_that_one_rank_does_not_use(zero: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport)
        for step in range(4):
            ZEROS[zero](model, optimizer)
            loss_of(model, step, transport.rank, spare=transport.rank == 0).backward()
            optimizer.step()

    reference = net()
    optimizer = momentum_sgd(reference)
    for step in range(4):
        optimizer.zero_grad()
        (sum(loss_of(reference, step, rank, spare=rank == 0) for rank in range(2)) / 2).backward()
        optimizer.step()
    assert_same(run(2, body)[0], reference)


def test_a_parameter_that_no_rank_uses_stays() -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, transport.rank, spare=False).backward()
            optimizer.step()

    (model, _) = run(2, body)
    assert torch.equal(model.spare.weight, net().spare.weight)
    assert not torch.equal(model.first.weight, net().first.weight)


def test_frozen_parameters_take_no_part() -> None:
    def body(model: Any, transport: Any) -> None:
        model.first.requires_grad_(False)
        optimizer = wrap(model, transport)
        names = [s.name for plan in optimizer.planned for s in plan.bucket.segments]
        assert names == ["last.bias", "last.weight", "spare.bias", "spare.weight"]
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, transport.rank).backward()
            optimizer.step()

    (model, _) = run(2, body)
    assert torch.equal(model.first.weight, net().first.weight)
    assert not torch.equal(model.last.weight, net().last.weight)


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
def test_tied_parameters(duplicates: Any) -> None:
    torch.manual_seed(0)
    reference = Tied()
    models = [copy.deepcopy(reference) for _ in range(2)]

    def body(model: Any, transport: Any) -> None:
        named = model.named_parameters(remove_duplicate=not duplicates)
        optimizer = DistributedOptimizer(momentum_sgd(model), named, transport=transport)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, transport.rank).backward()
            optimizer.step()

    optimizer = momentum_sgd(reference)
    for step in range(3):
        optimizer.zero_grad()
        joint_loss(reference, step, 2).backward()
        optimizer.step()
    assert_same(run(2, body, models)[0], reference)


@pytest.mark.parametrize("compression", [None, lambda: DGCCompressor(1.0, ResidualMemory())])
def test_sparse_adam_steps_on_the_rows_of_all_ranks(compression: Any) -> None:
    """Also where a rank does not use the table, or state is created for a broadcast."""
    torch.manual_seed(0)
    reference = nn.Embedding(20, 4, sparse=True)
    models = [copy.deepcopy(reference) for _ in range(2)]
    words = [torch.tensor([[1, 2], [3, 3]]), torch.tensor([[2, 5], [19, 0]])]

    def body(model: Any, transport: Any) -> None:
        own = None if compression is None else compression()
        optimizer = wrap(model, transport, lambda m: torch.optim.SparseAdam(m.parameters()), compression=own)
        for p in model.parameters():  # as hvd.broadcast_optimizer_state
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for step in range(3):
            optimizer.zero_grad()
            if step == 0 or transport.rank == 0:
                model(words[transport.rank]).square().sum().backward()
            optimizer.step()

    optimizer = torch.optim.SparseAdam(reference.parameters())
    for step in range(3):
        optimizer.zero_grad()
        (sum(reference(w).square().sum() for w in words[: 2 if step == 0 else 1]) / 2).backward()
        optimizer.step()
    assert_same(run(2, body, models)[0], reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "compression", [DenseCompressor, BF16Compressor, lambda: dgc(0.2)], ids=["dense", "bf16", "dgc"]
)
def test_parameters_of_other_precision(dtype: Any, compression: Any) -> None:
    models = [net().to(dtype) for _ in range(2)]
    losses = []

    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, dgc_sgd, compression=compression())
        x, y = (t.to(dtype) for t in data(0, transport.rank))
        for _ in range(60):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    run(2, body, models)
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


def test_channels_last() -> None:
    def build() -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 2))
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def images(rank: Any) -> Any:
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(rank))
        return x.to(memory_format=torch.channels_last)

    results = []
    for compression in (DenseCompressor, lambda: dgc(1.0), lambda: dgc(0.1)):
        models = [build() for _ in range(2)]

        def body(model: Any, transport: Any, compression: Any = compression) -> None:
            optimizer = wrap(model, transport, dgc_sgd, compression=compression())
            for _ in range(4):
                optimizer.zero_grad()
                model(images(transport.rank)).square().mean().backward()
                assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
                optimizer.step()

        results.append(run(2, body, models)[0])
    assert_same(results[0], results[1])
    assert not torch.equal(results[2][0].weight, build()[0].weight)
    torch.testing.assert_close(results[2][0].weight, results[0][0].weight, rtol=0.5, atol=0.1)


class Complex(nn.Module):
    """Complex parameters, one with another memory order, and a gradient that autograd stores conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 8, dtype=torch.complex64))
        self.shift = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.last = nn.Parameter(torch.randn(3, 8, dtype=torch.complex64).t())
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float32))

    def forward(self, x: Any) -> Any:
        x = x.to(torch.complex64) @ self.first + self.shift.conj()
        return torch.view_as_real(x @ self.last / 8).sum(2) * self.scale


def complex_net() -> Any:
    torch.manual_seed(0)
    return Complex()


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
    def make(model: Any) -> Any:
        return dgc_sgd(model, weight_decay=0.01)

    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, make, compression=compression())
        for step in range(5):
            ZEROS[zero](model, optimizer)
            loss_of(model, step, transport.rank).backward()
            if step % 2:
                optimizer.synchronize()
                assert model.first.grad.dtype == torch.complex64
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()

    reference = complex_net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(5):
        optimizer.zero_grad()
        joint_loss(reference, step, 2).backward()
        optimizer.step()
    model = run(2, body, [complex_net() for _ in range(2)])[0]
    if is_dense:
        assert_same(model, reference)
    for p, before in zip(model.parameters(), complex_net().parameters(), strict=True):
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
    plain = net()
    loss_of(plain, 0).backward()
    momentum_sgd(plain).step()
    assert_same(model, plain, exactly=True)
