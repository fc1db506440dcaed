"""The state of a DistributedOptimizer: saved, loaded, broadcast."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from optim.nets import (
    alone,
    assert_same,
    dgc,
    dgc_sgd,
    loss_of,
    momentum_sgd,
    net,
    run,
    train,
    wrap,
)
from torch import nn

from dgc.comm.collectives import broadcast_object
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import OneBitAdamCompressor
from dgc.optim import OneBitAdam, broadcast_optimizer_state, broadcast_parameters


def test_begin_epoch_returns_the_ratio_in_force() -> None:
    optimizer = wrap(net(), alone(), dgc_sgd, compression=dgc(0.001, warmup_epochs=5))
    seen = [optimizer.begin_epoch(epoch) for epoch in (0, 1, 4, 9)]
    assert seen == pytest.approx([0.001**0.2, 0.001**0.4, 0.001, 0.001])
    assert optimizer.compress_ratio == seen[-1]
    assert wrap(net(), alone()).begin_epoch(0) == 1.0


def test_error_norm() -> None:
    model = net()
    assert wrap(model, alone()).error_norm() == 0.0
    model = net()
    optimizer = wrap(model, alone(), dgc_sgd, compression=dgc(0.1))
    loss_of(model, 0).backward()
    optimizer.step()
    state = optimizer.compression_state_dict()["DGCCompressor.0"]
    squares = sum(float(v.double().square().sum()) for v in state["velocities"].values())
    assert optimizer.error_norm() == pytest.approx(squares**0.5) and squares > 0


@pytest.mark.parametrize("other_bucket_mb", [25.0, 2e-4, 1e-5])
def test_saved_runs_continue_bit_by_bit(other_bucket_mb: Any, tmp_path: Path) -> None:
    """Also into other buckets: exact selection acts on each tensor separately."""

    def advance(model: Any, optimizer: Any, transport: Any, steps: Any) -> None:
        optimizer.begin_epoch(1)
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, step, transport.rank).backward()
            optimizer.step()

    def build(model: Any, transport: Any, bucket_mb: Any) -> Any:
        compression = dgc(0.1, sample_ratio=1, warmup_epochs=1)
        return wrap(model, transport, dgc_sgd, compression=compression, bucket_mb=bucket_mb)

    def save(model: Any, transport: Any) -> None:
        optimizer = build(model, transport, 25.0)
        advance(model, optimizer, transport, range(4))
        saved = model.state_dict(), optimizer.state_dict(), optimizer.compression_state_dict()
        torch.save(saved, tmp_path / f"{transport.rank}.pt")
        advance(model, optimizer, transport, range(4, 8))

    def resume(model: Any, transport: Any) -> None:
        optimizer = build(model, transport, other_bucket_mb)
        saved = torch.load(tmp_path / f"{transport.rank}.pt", weights_only=True)
        for owner, state in zip((model, optimizer), saved[:2], strict=True):
            owner.load_state_dict(state)
        optimizer.load_compression_state_dict(saved[2])
        advance(model, optimizer, transport, range(4, 8))

    assert_same(run(2, save)[0], run(2, resume, [net(seed) for seed in (1, 2)])[0], exactly=True)


def test_compression_state_of_another_run() -> None:
    dense, sparse = wrap(net(), alone()), wrap(net(), alone(), dgc_sgd, compression=dgc())
    with pytest.raises(ValueError, match="other compressors"):
        sparse.load_compression_state_dict(dense.compression_state_dict())


def horovods_broadcast_optimizer_state(optimizer: Any, transport: Any) -> None:
    """As hvd.broadcast_optimizer_state: ranks without state create it by step(), then rank 0's is broadcast."""
    if not optimizer.state_dict()["state"]:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    p.grad = p.data.new(p.size()).zero_()
        optimizer.step()
    state = optimizer.state_dict()
    tensors = {f"{i}.{name}": t for i, own in state["state"].items() for name, t in own.items()}
    broadcast_parameters(tensors, transport=transport)
    options = [{key: v for key, v in group.items() if key != "params"} for group in state["param_groups"]]
    for group, values in zip(optimizer.param_groups, broadcast_object(transport, options), strict=True):
        group.update(values)


HOROVODS = {
    "adam": lambda m, t: wrap(m, t, lambda m: torch.optim.AdamW(m.parameters(), weight_decay=0.1)),
    "sgd": lambda m, t: wrap(m, t, lambda m: momentum_sgd(m, weight_decay=0.1, dampening=0.1)),
    "dgc": lambda m, t: wrap(m, t, lambda m: dgc_sgd(m, weight_decay=0.1), compression=dgc(0.1)),
    "1-bit adam": lambda m, t: wrap(
        m, t, lambda m: OneBitAdam(m.parameters(), freeze_step=2), compression=OneBitAdamCompressor()
    ),
    "stateless": lambda m, t: wrap(m, t, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)),
}


@pytest.mark.parametrize("made", HOROVODS.values(), ids=HOROVODS.keys())
def test_horovods_broadcast_of_optimizer_state(made: Any) -> None:
    """On a fresh start it changes nothing. If only rank 0 has loaded a checkpoint, every rank goes on with it."""
    checkpoints: list[Any] = [None, None]

    def body(model: Any, transport: Any) -> None:
        optimizer = made(model, transport)
        horovods_broadcast_optimizer_state(optimizer, transport)
        assert_same(model, net(), exactly=True)
        train(model, optimizer, range(3), transport.rank)
        states = [model.state_dict(), optimizer.state_dict(), optimizer.compression_state_dict()]
        checkpoints[transport.rank] = copy.deepcopy(states)
        train(model, optimizer, range(3, 6), transport.rank)

    def load_everywhere(model: Any, transport: Any) -> None:
        optimizer = made(model, transport)
        horovods_broadcast_optimizer_state(optimizer, transport)
        weights, state, errors = copy.deepcopy(checkpoints[transport.rank])
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        optimizer.load_compression_state_dict(errors)
        train(model, optimizer, range(3, 6), transport.rank)

    def resume(model: Any, transport: Any) -> None:
        optimizer = made(model, transport)
        weights, state, errors = copy.deepcopy(checkpoints[transport.rank])
        if transport.rank == 0:
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        broadcast_parameters(model.state_dict(), transport=transport)
        horovods_broadcast_optimizer_state(optimizer, transport)
        optimizer.load_compression_state_dict(errors)
        train(model, optimizer, range(3, 6), transport.rank)

    def plain(model: Any, transport: Any) -> None:
        train(model, made(model, transport), range(6), transport.rank)

    expected = run(2, plain)[0]
    assert_same(run(2, body)[0], expected, exactly=True)
    assert_same(run(2, load_everywhere)[0], expected, exactly=True)
    assert_same(run(2, resume, [net(seed) for seed in range(2)])[0], expected, exactly=True)


def test_broadcast_optimizer_state() -> None:
    models = [net(seed) for seed in range(3)]

    def body(transport: Any) -> Any:
        model = models[transport.rank]
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (transport.rank + 1))
        if transport.rank == 1:
            loss_of(model, 0).backward()
            optimizer.step()
        broadcast_optimizer_state(optimizer, root=1, transport=transport)
        return optimizer.state_dict()

    states = LockstepWorld(3).run(body)
    assert all(state["param_groups"][0]["lr"] == 0.2 for state in states)
    expected = states[1]["state"]
    assert len(expected) == 6
    torch.testing.assert_close([s["state"] for s in states], [expected] * 3, rtol=0, atol=0)


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_parameters(root: Any) -> None:
    def build(seed: Any) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3))
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model.register_buffer("mask", torch.rand(5) > 0.5)
        model.register_buffer("narrow", torch.rand(3).bfloat16())
        model.register_buffer("empty", torch.zeros(0))
        model[1].num_batches_tracked += seed
        return model

    models = [build(seed) for seed in range(3)]
    expected = {name: t.clone() for name, t in models[root].state_dict().items()}
    LockstepWorld(3).run(lambda t: broadcast_parameters(models[t.rank].state_dict(), root, t))
    for model in models:
        torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0)
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_broadcast_named_parameters() -> None:
    models = [net(seed) for seed in range(2)]
    LockstepWorld(2).run(lambda t: broadcast_parameters(models[t.rank].named_parameters(), transport=t))
    assert_same(models[1], net(0), exactly=True)
