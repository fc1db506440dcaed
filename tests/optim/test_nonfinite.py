"""NaN and inf in a gradient: every rank drops the step, or every rank raises. The residual stays finite."""

import warnings
from typing import Any

import pytest
import torch
from optim.nets import alone, assert_same, dgc, dgc_sgd, loss_of, momentum_sgd, net, run, values, wrap
from torch import nn

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import (
    BF16Compressor,
    DenseCompressor,
    DGCCompressor,
    FP16Compressor,
    NonFiniteGradientError,
)
from dgc.memory import ResidualMemory


class Half:
    @staticmethod
    def compress(tensor: Any) -> Any:
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor.to(ctx)


COMPRESSIONS = {
    "dense": DenseCompressor,
    "fp16": FP16Compressor,
    "bf16": BF16Compressor,
    "horovod": lambda: Half,
    "dgc": lambda: dgc(0.1),
    "dgc dense": lambda: dgc(1.0),
    "dgc int8 vectors": lambda: dgc(0.1, dense_values="int8"),
    "dgc fp16": lambda: dgc(0.1, fp16_values=True, int32_indices=True),
}
every_compression = pytest.mark.parametrize("compression", COMPRESSIONS.values(), ids=COMPRESSIONS)


def spoilt(model: Any, step: Any, rank: Any, at: Any, bad: Any = float("nan")) -> None:
    """backward, with `bad` in spare.weight on the last of two ranks at step `at`."""
    hook = None
    if (step, rank) == (at, 1):
        hook = model.spare.weight.register_hook(lambda g: torch.full_like(g, bad))
    loss_of(model, step, rank).backward()
    if hook:
        hook.remove()


@every_compression
@pytest.mark.parametrize(("through_gradients", "bad"), [(False, float("nan")), (True, float("inf"))])
def test_a_step_is_dropped_on_every_rank(compression: Any, through_gradients: Any, bad: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, dgc_sgd, compression=compression(), bucket_mb=2e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        for step in range(6):
            optimizer.zero_grad()
            spoilt(model, step, transport.rank, at=2, bad=bad)
            before = values(model), [b.clone() for s in optimizer.state.values() for b in s.values()]
            if through_gradients:
                optimizer.synchronize()
                assert (optimizer.dropped_steps > 0 and step == 2) == bool(model.first.weight.grad.isnan().all())
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            scheduler.step()
            same = all(torch.equal(a, b) for a, b in zip(before[0].values(), values(model).values(), strict=True))
            assert same == (step == 2)
            after = [b for s in optimizer.state.values() for b in s.values()]
            if step == 2:
                assert all(torch.equal(a, b) for a, b in zip(before[1], after, strict=True))
        assert optimizer.dropped_steps == 1 and optimizer.error_norm() < float("inf")
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
        assert not optimizer._engine.in_flight

    with pytest.warns(UserWarning, match="gradient of spare.weight on rank 1 has NaN or inf, or is"):
        run(2, body)


@every_compression
def test_it_warns_once(compression: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, dgc_sgd, compression=compression())
        for step in range(4):
            optimizer.zero_grad()
            spoilt(model, step, transport.rank, at=step)
            optimizer.step()
        assert optimizer.dropped_steps == 4

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        (model, _) = run(2, body)
    assert len([w for w in seen if "drops this step" in str(w.message)]) == 1
    assert_same(model, net(), exactly=True)


@every_compression
def test_raise_is_one_error_on_every_rank_and_training_can_continue(compression: Any) -> None:
    messages = []

    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, dgc_sgd, compression=compression(), nonfinite="raise")
        for step in range(4):
            optimizer.zero_grad()
            spoilt(model, step, transport.rank, at=1)
            try:
                optimizer.step()
            except NonFiniteGradientError as error:
                assert step == 1
                messages.append(str(error))
        assert optimizer.dropped_steps == 0

    run(2, body)
    assert messages == ["the gradient of spare.weight on rank 1 has NaN or inf, or is 2**64 or more"] * 2


@pytest.mark.parametrize("ratio", [0.1, 1.0])
def test_what_was_sent_in_any_bucket_returns(ratio: Any) -> None:
    """A flag in one bucket drops all buckets: their residual keeps the whole gradient."""

    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, dgc_sgd, compression=dgc(ratio), bucket_mb=1e-5)
        assert len(optimizer.planned) == 6
        optimizer.zero_grad()
        spoilt(model, 0, transport.rank, at=0)
        twin = net()
        loss_of(twin, 0, transport.rank).backward()
        own = {name: p.grad for name, p in twin.named_parameters() if p.dim() > 1}
        optimizer.step()
        memory = optimizer.compression_state_dict()["DGCCompressor.0"]
        for name, gradient in own.items():
            if transport.rank == 1 and name == "spare.weight":
                gradient = torch.zeros_like(gradient)
            assert torch.equal(memory["velocities"][name], gradient), name
            assert torch.equal(memory["momentums"][name], gradient), name

    with pytest.warns(UserWarning, match="drops this step"):
        run(2, body)


def test_an_overflow_of_the_wire_alone_names_no_rank() -> None:
    """Finite gradients beyond fp16: the mean is inf, though no rank has a gradient that is not finite."""

    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, compression=FP16Compressor(), nonfinite="raise")
        (1e6 * loss_of(model, 0, transport.rank)).backward()
        optimizer.step()

    with pytest.raises(NonFiniteGradientError, match="overflows the dtype that carries it"):
        LockstepWorld(2).run(lambda t: body(net(), t))


@pytest.mark.parametrize(
    ("size", "dtype", "fp16_values", "ratio"),
    [
        (1, torch.float32, True, 0.1),
        (2, torch.float32, True, 1.0),
        (2, torch.float32, False, 0.1),
        (2, torch.float16, True, 0.1),
        (2, torch.float16, False, 1.0),
        (1, torch.float16, True, 1.0),
    ],
)
def test_large_gradients_stay_in_range_and_arrive_in_the_end(
    size: Any, dtype: Any, fp16_values: Any, ratio: Any
) -> None:
    """Gradients of 6e4 in three steps, then none: messages are limited to fp16, and the rest is sent later."""
    models = [nn.Linear(20, 10, bias=False).to(dtype) for _ in range(size)]

    def body(model: Any, transport: Any) -> None:
        nn.init.zeros_(model.weight)
        make = lambda m: torch.optim.SGD(m.parameters(), lr=1e-6 if dtype == torch.float32 else 1e-3)  # noqa: E731
        compression = DGCCompressor(ratio, ResidualMemory(), fp16_values=fp16_values)
        optimizer = wrap(model, transport, make, compression=compression)
        for step in range(60):
            optimizer.zero_grad()
            if step < 3:
                (model.weight.sum(dtype=torch.float32) * 6e4).backward()
            optimizer.step()
            assert model.weight.isfinite().all()
        assert optimizer.dropped_steps == 0
        assert optimizer.error_norm() < 1e-3 * 6e4
        total = 3 * 6e4 * optimizer.param_groups[0]["lr"]
        torch.testing.assert_close(
            model.weight.float(), torch.full((10, 20), -total), rtol=0.02, atol=0.02 * total
        )

    run(size, body, models)


def test_the_policy_is_one_of_two() -> None:
    with pytest.raises(ValueError, match="nonfinite must be 'skip' or 'raise', not 'zero'"):
        wrap(net(), alone(), momentum_sgd, nonfinite="zero")
