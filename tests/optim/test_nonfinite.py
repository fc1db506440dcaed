"""NaN and inf in a gradient: every rank drops the step, or every rank raises. The residual stays finite.

With a GradScaler, both of its recipes.
"""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from optim.nets import (
    Half,
    alone,
    assert_same,
    dgc,
    dgc_sgd,
    loss_of,
    net,
    run,
    same,
    through_gradients,
    train,
    trained,
    trained_alone,
    values,
    wrap,
)
from torch import nn

from dgc.compression import (
    BF16Compressor,
    DenseCompressor,
    DGCCompressor,
    FP16Compressor,
    NonFiniteGradientError,
)
from dgc.memory import ResidualMemory

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


def spoilt(*at: int, bad: float = float("nan")) -> Any:
    """A loss whose gradient of spare.weight is `bad` on rank 1 in these steps."""

    def loss(model: Any, step: Any, rank: Any) -> Any:
        found = loss_of(model, step, rank)
        return found + bad * model.spare.weight.sum() if rank == 1 and step in at else found

    return loss


@every_compression
@pytest.mark.parametrize(("through", "bad"), [(False, float("nan")), (True, float("inf"))])
def test_a_step_is_dropped_on_every_rank(compression: Any, through: Any, bad: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, dgc_sgd, compression=compression(), bucket_mb=2e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        is_nan = []

        def clip(model: Any) -> None:
            is_nan.append((optimizer.dropped_steps, bool(model.first.weight.grad.isnan().all())))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        def buffers() -> Any:
            return [b.clone() for state in optimizer.state.values() for b in state.values()]

        finish = partial(through_gradients, change=clip) if through else None
        for step in range(6):
            weights, kept = list(values(model).values()), buffers()
            train(model, optimizer, [step], transport.rank, loss=spoilt(2, bad=bad), finish=finish)
            scheduler.step()
            assert same(weights, values(model).values()) == (step == 2)
            assert step != 2 or same(kept, buffers())
        assert not through or is_nan == [(0, False)] * 2 + [(1, True)] + [(1, False)] * 3
        assert optimizer.dropped_steps == 1 and optimizer.error_norm() < float("inf")
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
        assert not optimizer._engine.in_flight

    with pytest.warns(UserWarning, match="gradient of spare.weight on rank 1 has NaN or inf, or is"):
        run(2, body)


@every_compression
def test_it_warns_once(compression: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, dgc_sgd, compression=compression())
        train(model, optimizer, range(4), transport.rank, loss=spoilt(*range(4)))
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
            try:
                train(model, optimizer, [step], transport.rank, loss=spoilt(1))
            except NonFiniteGradientError as error:
                messages.append((step, str(error)))
        assert optimizer.dropped_steps == 0

    run(2, body)
    assert messages == [(1, "the gradient of spare.weight on rank 1 has NaN or inf, or is 2**64 or more")] * 2


@pytest.mark.parametrize("ratio", [0.1, 1.0])
def test_what_was_sent_in_any_bucket_returns(ratio: Any) -> None:
    """A flag in one bucket drops all buckets: their residual keeps the whole gradient."""

    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, dgc_sgd, compression=dgc(ratio), bucket_mb=1e-5)
        assert len(optimizer.planned) == 6
        train(model, optimizer, [0], transport.rank, loss=spoilt(0))
        twin = net()
        loss_of(twin, 0, transport.rank).backward()
        memory = optimizer.compression_state_dict()["DGCCompressor.0"]
        for name, gradient in ((name, p.grad) for name, p in twin.named_parameters() if p.dim() > 1):
            if transport.rank == 1 and name == "spare.weight":
                gradient = torch.zeros_like(gradient)
            assert torch.equal(memory["velocities"][name], gradient), name
            assert torch.equal(memory["momentums"][name], gradient), name

    with pytest.warns(UserWarning, match="drops this step"):
        run(2, body)


def test_an_overflow_of_the_wire_alone_names_no_rank() -> None:
    """Finite gradients beyond fp16: the mean is inf, though no rank has a gradient that is not finite."""

    def loss(model: Any, step: Any, rank: Any) -> Any:
        return 1e6 * loss_of(model, step, rank)

    with pytest.raises(NonFiniteGradientError, match="overflows the dtype that carries it"):
        trained(2, [0], compression=FP16Compressor, training={"loss": loss}, nonfinite="raise")


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
    lr = 1e-6 if dtype == torch.float32 else 1e-3

    def body(model: Any, transport: Any) -> None:
        nn.init.zeros_(model.weight)
        compression = DGCCompressor(ratio, ResidualMemory(), fp16_values=fp16_values)
        sgd = torch.optim.SGD(model.parameters(), lr=lr)
        optimizer = wrap(model, transport, lambda m: sgd, compression=compression)
        for step in range(60):
            optimizer.zero_grad()
            if step < 3:
                (model.weight.sum(dtype=torch.float32) * 6e4).backward()
            optimizer.step()
            assert model.weight.isfinite().all()
        assert optimizer.dropped_steps == 0
        assert optimizer.error_norm() < 1e-3 * 6e4
        expected = torch.full((10, 20), -3 * 6e4 * lr)
        torch.testing.assert_close(model.weight.float(), expected, rtol=0.02, atol=0.02 * 3 * 6e4 * lr)

    run(size, body, models)


# --- loss scaling and autocast: both recipes of a GradScaler, on ranks of which one overflows ------

some_compressions = pytest.mark.parametrize("name", ["dense", "bf16", "dgc", "dgc dense"])


def new_scaler(**options: Any) -> Any:
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**16, "growth_interval": 1000, **options})


def clip(model: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def explicit(scaler: Any, optimizer: Any, model: Any) -> None:
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    clip(model)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()


def plain(scaler: Any, optimizer: Any, model: Any) -> None:
    scaler.step(optimizer)
    scaler.update()


every_recipe = pytest.mark.parametrize("recipe", [explicit, plain])


def scaled_step(scaler: Any, optimizer: Any, model: Any, recipe: Any, loss: Any) -> None:
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    recipe(scaler, optimizer, model)


@some_compressions
@every_recipe
def test_scaling_by_powers_of_two_changes_no_bit(name: Any, recipe: Any) -> None:
    """Neither the weights nor the residual: it is unscaled while the scale grows."""

    def ends(is_scaled: Any) -> Any:
        states = {}

        def unscaled(scaler: Any, optimizer: Any, model: Any) -> None:
            through_gradients(model, optimizer, clip if recipe is explicit else None)

        def body(model: Any, transport: Any) -> None:
            scaler = new_scaler(enabled=is_scaled, growth_interval=3)
            optimizer = wrap(model, transport, dgc_sgd, compression=COMPRESSIONS[name](), grad_scaler=scaler)
            for step in range(8):
                loss = loss_of(model, step, transport.rank)
                scaled_step(scaler, optimizer, model, recipe if is_scaled else unscaled, loss)
            assert scaler.get_scale() == (2.0**18 if is_scaled else 1.0)
            states[transport.rank] = optimizer.compression_state_dict()

        return run(2, body)[0], states

    (model, states), (reference, expected) = ends(True), ends(False)
    assert_same(model, reference, exactly=True)
    torch.testing.assert_close(states, expected, rtol=0, atol=0)


@some_compressions
@every_recipe
def test_an_overflow_of_one_rank_halves_the_scale_of_all(name: Any, recipe: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        scaler = new_scaler()
        optimizer = wrap(
            model, transport, dgc_sgd, compression=COMPRESSIONS[name](), grad_scaler=scaler, bucket_mb=2e-4
        )
        for step in range(5):
            before, factor = values(model), 1e36 if (step, transport.rank) == (2, 1) else 1.0
            scaled_step(scaler, optimizer, model, recipe, loss_of(model, step, transport.rank) * factor)
            moved = any(not torch.equal(old, values(model)[name]) for name, old in before.items())
            assert moved == (step != 2)
            assert scaler.get_scale() == 2.0 ** (16 if step < 2 else 15)
            assert optimizer.error_norm() < 10
        assert optimizer.dropped_steps == 1

    run(2, body)


@every_recipe
def test_fp16_autocast_finds_its_scale(recipe: Any) -> None:
    """The first scale is so large that every step overflows fp16."""

    def body(model: Any, transport: Any) -> None:
        scaler = new_scaler(init_scale=2.0**30)
        optimizer = wrap(model, transport, dgc_sgd, compression=dgc(0.3), grad_scaler=scaler)
        losses = []
        for _ in range(150):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model, 0, transport.rank)
            scaled_step(scaler, optimizer, model, recipe, loss)
            losses.append(loss.item())
        assert optimizer.dropped_steps > 3 and scaler.get_scale() < 2.0**30
        assert min(losses[-5:]) < 0.7 * losses[0]

    run(2, body)


@some_compressions
def test_bf16_autocast_needs_no_scaler(name: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        losses = []

        def loss(model: Any, step: Any, rank: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                found = loss_of(model, 0, rank)
            losses.append(found.item())
            return found

        optimizer = wrap(model, transport, dgc_sgd, compression=COMPRESSIONS[name]())
        train(model, optimizer, range(100), transport.rank, loss=loss)
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        assert min(losses[-5:]) < 0.8 * losses[0]

    run(2, body)


def test_horovods_recipe_without_passing_the_scaler() -> None:
    """Dense, as in Horovod: it works because every scaler finds NaN after a dropped step."""

    def body(model: Any, transport: Any) -> None:
        scaler, optimizer = new_scaler(), wrap(model, transport)
        for step in range(3):
            factor = 1e36 if (step, transport.rank) == (1, 1) else 1.0
            scaled_step(scaler, optimizer, model, explicit, loss_of(model, step, transport.rank) * factor)
        assert scaler.get_scale() == 2.0**15 and optimizer.dropped_steps == 1

    with pytest.warns(UserWarning, match="on rank 1"):
        run(2, body)


def step_alone(scaler: Any, optimizer: Any, model: Any) -> None:
    optimizer.step()


def unscale_first(scaler: Any, optimizer: Any, model: Any) -> None:
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


@pytest.mark.parametrize(
    ("is_passed", "recipe", "words"),
    [
        (False, plain, "pass it as grad_scaler="),
        (True, step_alone, r"call grad_scaler.step\(optimizer\)"),
        (True, unscale_first, "first average the gradients"),
    ],
)
def test_wrong_recipes_are_refused(is_passed: bool, recipe: Any, words: str) -> None:
    model, scaler = net(), new_scaler()
    optimizer = wrap(model, alone(), grad_scaler=scaler if is_passed else None)
    with pytest.raises(RuntimeError, match=words):
        scaled_step(scaler, optimizer, model, recipe, loss_of(model, 0))


def test_what_has_no_scaler() -> None:
    with pytest.raises(ValueError, match="first.weight|last.bias"):
        wrap(net().half(), alone(), grad_scaler=new_scaler())
    with pytest.raises(ValueError, match="it needs nonfinite='skip'"):
        wrap(net(), alone(), grad_scaler=new_scaler(), nonfinite="raise")


def test_a_disabled_scaler_counts_as_none() -> None:
    model, scaler = net(), new_scaler(enabled=False)
    scaled_step(scaler, wrap(model, alone(), grad_scaler=scaler), model, plain, loss_of(model, 0))
    assert_same(model, trained_alone(1, [0]), exactly=True)
