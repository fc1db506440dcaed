"""DistributedOptimizer over a lockstep world: its results, in the ways in which training scripts use it."""

from typing import Any

import pytest
import torch
from optim.nets import (
    SIZES,
    ZEROS,
    alone,
    assert_same,
    dgc,
    dgc_sgd,
    joint_loss,
    loss_of,
    momentum_sgd,
    net,
    run,
    values,
    wrap,
)
from torch import nn

from dgc.compression import BF16Compressor, DenseCompressor, DGCCompressor, Route, Rule
from dgc.optim import DGCSGD, DistributedOptimizer

# --- dense is single-process training on the whole batch -------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bucket_mb", [25.0, 1e-4])
@pytest.mark.parametrize("compression", [None, DenseCompressor], ids=str)
@pytest.mark.parametrize("op", ["average", "sum"])
def test_dense_equals_one_process(size: Any, bucket_mb: Any, compression: Any, op: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, bucket_mb=bucket_mb, op=op, compression=compression and compression())
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step, transport.rank).backward()
            optimizer.step()

    reference = net()
    optimizer = momentum_sgd(reference)
    for step in range(5):
        optimizer.zero_grad()
        (joint_loss(reference, step, size) * (size if op == "sum" else 1)).backward()
        optimizer.step()
    assert_same(run(size, body)[0], reference)


@pytest.mark.parametrize(
    "make",
    [
        momentum_sgd,
        lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
        lambda m: DGCSGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    ],
)
def test_one_rank_is_the_plain_optimizer_bit_by_bit(make: Any) -> None:
    model, plain = net(), net()
    optimizer, reference = wrap(model, alone(), make), make(plain)
    for step in range(4):
        for m, o in ((model, optimizer), (plain, reference)):
            o.zero_grad()
            loss_of(m, step).backward()
            o.step()
    assert_same(model, plain, exactly=True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"weight_decay": 0.05}], ids=str)
def test_dgc_at_ratio_one_is_momentum_sgd(size: Any, options: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        compression = dgc(1.0, nesterov=options.get("nesterov", False))
        optimizer = wrap(model, transport, lambda m: dgc_sgd(m, **options), compression=compression)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, step, transport.rank).backward()
            optimizer.step()

    reference = net()
    optimizer = momentum_sgd(reference, **options)
    for step in range(6):
        optimizer.zero_grad()
        joint_loss(reference, step, size).backward()
        optimizer.step()
    assert_same(run(size, body)[0], reference)


@pytest.mark.parametrize("size", SIZES)
def test_dgc_keeps_replicas_equal_and_sends_less(size: Any) -> None:
    meters = []

    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, dgc_sgd, compression=dgc(0.05), bucket_mb=2e-4)
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, step, transport.rank).backward()
            optimizer.step()
        assert optimizer.error_norm() > 0
        meters.append(optimizer.meter)

    models = run(size, body)
    numel = sum(p.numel() for p in models[0].parameters())
    for meter in meters:
        assert meter.dense_wire_bytes == pytest.approx(8 * 4 * numel * 2 * (size - 1) / size)
        assert meter.payload_bytes < 8 * 4 * numel / 2
        assert set(meter.seconds) == {"compress", "launch", "wait", "decode", "step"}
    assert not torch.equal(models[0].first.weight, net().first.weight)


def test_sparse_steps_equal_steps_after_synchronize() -> None:
    """The direct application of sparse results, and the one through .grad."""
    results = []
    for through_gradients in (False, True):

        def body(model: Any, transport: Any, through_gradients: Any = through_gradients) -> None:
            optimizer = wrap(model, transport, dgc_sgd, compression=dgc(0.1), bucket_mb=2e-4)
            for step in range(5):
                optimizer.zero_grad()
                loss_of(model, step, transport.rank).backward()
                if through_gradients:
                    optimizer.synchronize()
                    with optimizer.skip_synchronize():
                        optimizer.step()
                else:
                    optimizer.step()

        results.append(run(2, body)[0])
    assert_same(*results)


# --- gradient accumulation -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("forget", [False, True])
def test_gradient_accumulation(size: Any, forget: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, backward_passes_per_step=3)
        for step in range(3):
            model.zero_grad() if forget else optimizer.zero_grad()
            for part in range(3):
                loss_of(model, 10 * step + part, transport.rank).backward()
            optimizer.step()

    reference = net()
    optimizer = momentum_sgd(reference)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(3):
            joint_loss(reference, 10 * step + part, size).backward()
        optimizer.step()
    assert_same(run(size, body)[0], reference)


def test_fewer_passes_than_planned_are_exchanged_at_step() -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, backward_passes_per_step=4)
        loss_of(model, 0, transport.rank).backward()
        optimizer.step()

    reference = net()
    joint_loss(reference, 0, 2).backward()
    momentum_sgd(reference).step()
    assert_same(run(2, body)[0], reference)


def test_too_many_passes() -> None:
    model = net()
    optimizer = wrap(model, alone(), backward_passes_per_step=2)
    for part in range(2):
        loss_of(model, part).backward()
    with pytest.raises(RuntimeError, match="backward_passes_per_step=2"):
        loss_of(model, 2).backward()
    assert optimizer._engine.in_flight


def test_bad_number_of_passes() -> None:
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        wrap(net(), alone(), backward_passes_per_step=0)


# --- zero_grad -------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("compression", [DenseCompressor, lambda: dgc(0.2)], ids=["dense", "dgc"])
def test_every_way_to_zero_gradients(zero: Any, compression: Any) -> None:
    def train(how: Any) -> Any:
        def body(model: Any, transport: Any) -> None:
            optimizer = wrap(model, transport, dgc_sgd, compression=compression(), bucket_mb=2e-4)
            for step in range(4):
                how(model, optimizer)
                loss_of(model, step, transport.rank).backward()
                optimizer.step()

        return run(2, body)[0]

    assert_same(train(ZEROS[zero]), train(ZEROS["own"]), exactly=True)


@pytest.mark.parametrize("keep", [True, False])
def test_own_zero_grad_clears_frozen_ones_and_keeps_views_if_asked(keep: Any) -> None:
    model = net()
    model.last.bias.requires_grad_(False)
    optimizer = wrap(model, alone())
    model.last.bias.grad = torch.ones(3)
    loss_of(model, 0).backward()
    optimizer.step()
    views = [model.first.weight.grad, model.first.bias.grad]
    optimizer.zero_grad(set_to_none=not keep)
    if keep:
        assert model.first.weight.grad is views[0] and model.first.bias.grad is views[1]
        assert not any(view.any() for view in views) and model.last.bias.grad is None
    else:
        assert all(p.grad is None for p in model.parameters())


def test_zero_grad_in_flight() -> None:
    model = net()
    optimizer = wrap(model, alone())
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


# --- groups, schedulers, closures, synchronize -----------------------------------------------------


def two_groups(model: Any) -> Any:
    return torch.optim.SGD(
        [
            {"params": list(model.last.parameters()), "lr": 0.5},
            {"params": [*model.first.parameters(), *model.spare.parameters()], "weight_decay": 0.1},
        ],
        lr=0.05,
        momentum=0.9,
    )


def test_groups_and_a_scheduler() -> None:
    def train(model: Any, optimizer: Any, loss: Any) -> Any:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        for step in range(5):
            optimizer.zero_grad()
            loss(step).backward()
            optimizer.step()
            scheduler.step()
        return [group["lr"] for group in optimizer.param_groups]

    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, two_groups)
        rates = train(model, optimizer, lambda step: loss_of(model, step, transport.rank))
        assert rates == pytest.approx([0.005, 0.0005])

    reference = net()
    train(reference, two_groups(reference), lambda step: joint_loss(reference, step, 2))
    assert_same(run(2, body)[0], reference)


def test_a_scheduler_of_the_inner_optimizer() -> None:
    model = net()
    inner = momentum_sgd(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda epoch: 0.5**epoch)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), transport=alone())
    loss_of(model, 0).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_closures() -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, 0, transport.rank)
            loss.backward()
            return loss.item()

        first = optimizer.step(closure)
        assert first == pytest.approx(loss_of(net(), 0, transport.rank).item())

    reference = net()
    joint_loss(reference, 0, 2).backward()
    momentum_sgd(reference).step()
    assert_same(run(2, body)[0], reference)


def test_clipping_after_synchronize() -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport)
        for step in range(3):
            optimizer.zero_grad()
            (30 * loss_of(model, step, transport.rank)).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            with optimizer.skip_synchronize():
                optimizer.step()

    reference = net()
    optimizer = momentum_sgd(reference)
    for step in range(3):
        optimizer.zero_grad()
        (30 * joint_loss(reference, step, 2)).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
    assert_same(run(2, body)[0], reference)


def test_step_after_synchronize_warns() -> None:
    model = net()
    optimizer = wrap(model, alone())
    loss_of(model, 0).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match=r"step\(\) called without optimizer.skip_synchronize\(\)"):
        optimizer.step()
    loss_of(model, 1).backward()
    optimizer.step()


@pytest.mark.parametrize("zero", ["own", "model"])
def test_a_step_that_was_left_out_after_synchronize(zero: Any) -> None:
    """A loss scaler skips step() on overflow: the next step exchanges again, without a warning."""

    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport)
        for step in range(3):
            ZEROS[zero](model, optimizer)
            loss_of(model, step, transport.rank).backward()
            if step == 1:
                optimizer.synchronize()
                continue
            optimizer.step()

    reference = net()
    optimizer = momentum_sgd(reference)
    for step in (0, 2):
        optimizer.zero_grad()
        joint_loss(reference, step, 2).backward()
        optimizer.step()
    assert_same(run(2, body)[0], reference)


# --- routes, several optimizers, Horovod's compressions --------------------------------------------


def test_a_route_of_compressors() -> None:
    def body(model: Any, transport: Any) -> None:
        route = Route([Rule(BF16Compressor(), name="last.*"), Rule(dgc(0.1), min_dim=2), Rule(DenseCompressor())])
        optimizer = wrap(model, transport, dgc_sgd, compression=route)
        kinds = {s.name: type(p.compressor) for p in optimizer.planned for s in p.bucket.segments}
        assert kinds == {
            "first.weight": DGCCompressor,
            "spare.weight": DGCCompressor,
            "first.bias": DenseCompressor,
            "spare.bias": DenseCompressor,
            "last.weight": BF16Compressor,
            "last.bias": BF16Compressor,
        }
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, transport.rank).backward()
            optimizer.step()

    run(2, body)


def test_two_optimizers_on_one_transport() -> None:
    def body(model: Any, transport: Any) -> None:
        def part(module: Any, prefix: Any) -> Any:
            inner = torch.optim.SGD(module.parameters(), lr=0.1)
            return DistributedOptimizer(inner, module.named_parameters(prefix), transport=transport)

        optimizers = [part(model.first, "a"), part(model.last, "b")]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, step, transport.rank).backward()
            for optimizer in optimizers:
                optimizer.step()

    (model, _) = run(2, body)
    assert not torch.equal(model.first.weight, net().first.weight)


class HalfLike:
    @staticmethod
    def compress(tensor: Any) -> Any:
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor.to(ctx)


def test_a_horovod_compression() -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, compression=HalfLike)
        loss_of(model, 0, transport.rank).backward()
        optimizer.step()

    reference = net()
    joint_loss(reference, 0, 2).backward()
    momentum_sgd(reference).step()
    (model, _) = run(2, body)
    torch.testing.assert_close(values(model), values(reference), rtol=1e-3, atol=1e-3)


def test_dgc_learns() -> None:
    """A quadratic with a different minimum on each of two ranks."""

    def train(compression: Any) -> Any:
        models = [nn.Linear(20, 10, bias=False) for _ in range(2)]
        target = torch.randn(10, 20, generator=torch.Generator().manual_seed(9))

        def body(model: Any, transport: Any) -> None:
            nn.init.zeros_(model.weight)
            make = lambda m: DGCSGD(m.parameters(), lr=0.05, momentum=0.5)  # noqa: E731
            optimizer = wrap(model, transport, make, compression=compression())
            for _ in range(100):
                optimizer.zero_grad()
                ((model.weight - target * (1 + transport.rank)).square().sum() / 2).backward()
                optimizer.step()

        run(2, body, models)
        return (models[0].weight.detach() - 1.5 * target).norm() / target.norm()

    assert train(DenseCompressor) < 1e-2
    assert train(lambda: dgc(0.1, momentum=0.5)) < 0.3  # it begins at 1.5


def test_buckets_start_in_the_order_in_which_backward_fills_them() -> None:
    """From the second step on. In the first one it is the reverse order of registration."""

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(4, 1, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x))

    models = [Crossed(), Crossed()]
    models[1].load_state_dict(models[0].state_dict())
    started: list[list[str]] = [[], []]

    def body(model: Any, transport: Any) -> None:
        launch, own = transport.launch, started[transport.rank]

        def recording(name: str, requests: Any, communicator: str = "") -> Any:
            own.append(name)
            return launch(name, requests, communicator)

        optimizer = wrap(model, transport, bucket_mb=1e-6)
        transport.launch = recording
        for _ in range(2):
            own.append("step")
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()

    run(2, body, models)
    for own in started:
        buckets = [name.split(".")[1] if name.startswith("dgc0.") else name for name in own]
        assert [name for name in buckets if not name.startswith("dgc")] == ["step", "0", "1", "step", "1", "0"]
