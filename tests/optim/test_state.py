"""The state of a DistributedOptimizer: saved, loaded, broadcast."""

import copy
import io
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from optim.nets import (
    alone,
    assert_same,
    check_that_a_saved_state_goes_on,
    dgc,
    dgc_sgd,
    every_kind,
    loss_of,
    momentum_sgd,
    net,
    run,
    train,
    trained,
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
    assert wrap(net(), alone()).error_norm() == 0.0
    model = net()
    optimizer = wrap(model, alone(), dgc_sgd, compression=dgc(0.1))
    train(model, optimizer, [0])
    state = optimizer.compression_state_dict()["DGCCompressor.0"]
    squares = sum(float(v.double().square().sum()) for v in state["velocities"].values())
    assert optimizer.error_norm() == pytest.approx(squares**0.5) and squares > 0


@pytest.mark.parametrize("other_bucket_mb", [25.0, 2e-4, 1e-5])
def test_saved_runs_continue_bit_by_bit(other_bucket_mb: Any) -> None:
    """Also into other buckets: exact selection acts on each tensor separately."""

    def build(model: Any, transport: Any, bucket_mb: Any) -> Any:
        compression = dgc(0.1, sample_ratio=1, warmup_epochs=1)
        optimizer = wrap(model, transport, dgc_sgd, compression=compression, bucket_mb=bucket_mb)
        optimizer.begin_epoch(1)
        return optimizer

    check_that_a_saved_state_goes_on(
        partial(build, bucket_mb=25.0), saved=4, again=partial(build, bucket_mb=other_bucket_mb)
    )


@every_kind
def test_copying_the_optimizer_is_an_error_with_a_cure(compression: Any) -> None:
    optimizer = wrap(net(), alone(), dgc_sgd, compression=compression())
    for copied in (copy.deepcopy, copy.copy, pickle.dumps, lambda o: torch.save(o, io.BytesIO())):
        with pytest.raises(TypeError, match="cannot be copied or pickled: save state_dict"):
            copied(optimizer)


@every_kind
def test_copies_of_the_model_are_free_of_hooks(compression: Any) -> None:
    """A model with hooks can be deep-copied, for an average of weights, and saved whole."""

    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, dgc_sgd, compression=compression())
        train(model, optimizer, [0], transport.rank)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert_same(twin, model, exactly=True)
            loss_of(twin, 0).backward()
            assert not optimizer._engine.in_flight
        train(model, optimizer, [1], transport.rank)

    run(2, body)


@every_kind
def test_state_moves_to_a_new_optimizer(compression: Any) -> None:
    """The replacement for a copy: training continues bit for bit."""
    check_that_a_saved_state_goes_on(lambda m, t: wrap(m, t, dgc_sgd, compression=compression()), saved=3)


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


HOROVODS: dict[str, tuple[Any, Any]] = {
    "adam": (lambda m: torch.optim.AdamW(m.parameters(), weight_decay=0.1), lambda: None),
    "sgd": (partial(momentum_sgd, weight_decay=0.1, dampening=0.1), lambda: None),
    "dgc": (partial(dgc_sgd, weight_decay=0.1), lambda: dgc(0.1)),
    "1-bit adam": (lambda m: OneBitAdam(m.parameters(), freeze_step=2), OneBitAdamCompressor),
    "stateless": (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), lambda: None),
}


@pytest.mark.parametrize("name", HOROVODS)
def test_horovods_broadcast_of_optimizer_state(name: Any) -> None:
    """On a fresh start it changes nothing. If only rank 0 has loaded a checkpoint, every rank goes on with it."""
    make, compression = HOROVODS[name]
    checkpoints: list[Any] = [None, None]

    def fresh(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, make, compression=compression())
        horovods_broadcast_optimizer_state(optimizer, transport)
        assert_same(model, net(), exactly=True)
        assert optimizer.meter.payload_bytes == 0
        train(model, optimizer, range(3), transport.rank)
        states = [model.state_dict(), optimizer.state_dict(), optimizer.compression_state_dict()]
        checkpoints[transport.rank] = copy.deepcopy(states)
        train(model, optimizer, range(3, 6), transport.rank)

    def resumed(model: Any, transport: Any, everywhere: bool) -> None:
        optimizer = wrap(model, transport, make, compression=compression())
        weights, state, errors = copy.deepcopy(checkpoints[transport.rank])
        if everywhere:
            horovods_broadcast_optimizer_state(optimizer, transport)
        if everywhere or transport.rank == 0:
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        if not everywhere:
            broadcast_parameters(model.state_dict(), transport=transport)
            horovods_broadcast_optimizer_state(optimizer, transport)
        optimizer.load_compression_state_dict(errors)
        train(model, optimizer, range(3, 6), transport.rank)

    expected = trained(2, range(6), make, compression)
    assert_same(run(2, fresh)[0], expected, exactly=True)
    for everywhere in (True, False):
        (model, _) = run(2, partial(resumed, everywhere=everywhere), [net(seed) for seed in range(2)])
        assert_same(model, expected, exactly=True)


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
    copies = [build(7), models[root]]
    LockstepWorld(2).run(lambda t: broadcast_parameters(copies[t.rank].named_parameters(), 1, transport=t))
    assert_same(*copies, exactly=True)
    for model in models:
        torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0)
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
