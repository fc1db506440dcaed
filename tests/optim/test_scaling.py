"""Loss scaling and autocast: both recipes of a GradScaler, on ranks of which one overflows."""

from typing import Any

import pytest
import torch
from optim.nets import (
    alone,
    assert_same,
    dgc,
    dgc_sgd,
    loss_of,
    net,
    run,
    through_gradients,
    train,
    trained_alone,
    values,
    wrap,
)
from torch import nn

from dgc.compression import BF16Compressor, DenseCompressor

COMPRESSIONS = {
    "dense": DenseCompressor,
    "bf16": BF16Compressor,
    "dgc": lambda: dgc(0.1),
    "dgc dense": lambda: dgc(1.0),
}
every_compression = pytest.mark.parametrize("compression", COMPRESSIONS.values(), ids=COMPRESSIONS)


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


@every_compression
@every_recipe
def test_scaling_by_powers_of_two_changes_no_bit(compression: Any, recipe: Any) -> None:
    """Neither the weights nor the residual: it is unscaled while the scale grows."""

    def ends(is_scaled: Any) -> Any:
        states = {}

        def unscaled(scaler: Any, optimizer: Any, model: Any) -> None:
            through_gradients(model, optimizer, clip if recipe is explicit else None)

        def body(model: Any, transport: Any) -> None:
            scaler = new_scaler(enabled=is_scaled, growth_interval=3)
            optimizer = wrap(model, transport, dgc_sgd, compression=compression(), grad_scaler=scaler)
            for step in range(8):
                loss = loss_of(model, step, transport.rank)
                scaled_step(scaler, optimizer, model, recipe if is_scaled else unscaled, loss)
            assert scaler.get_scale() == (2.0**18 if is_scaled else 1.0)
            states[transport.rank] = optimizer.compression_state_dict()

        return run(2, body)[0], states

    (model, states), (reference, expected) = ends(True), ends(False)
    assert_same(model, reference, exactly=True)
    torch.testing.assert_close(states, expected, rtol=0, atol=0)


@every_compression
@every_recipe
def test_an_overflow_of_one_rank_halves_the_scale_of_all(compression: Any, recipe: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        scaler = new_scaler()
        optimizer = wrap(model, transport, dgc_sgd, compression=compression(), grad_scaler=scaler, bucket_mb=2e-4)
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


@every_compression
def test_bf16_autocast_needs_no_scaler(compression: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        losses = []

        def loss(model: Any, step: Any, rank: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                found = loss_of(model, 0, rank)
            losses.append(found.item())
            return found

        optimizer = wrap(model, transport, dgc_sgd, compression=compression())
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
