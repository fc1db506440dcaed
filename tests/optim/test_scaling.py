"""Loss scaling and autocast: both recipes of a GradScaler, on ranks of which one overflows."""

from typing import Any

import pytest
import torch
from optim.nets import alone, assert_same, dgc, dgc_sgd, loss_of, momentum_sgd, net, run, values, wrap
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
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**16, "growth_interval": 3, **options})


def explicit(scaler: Any, optimizer: Any, model: Any) -> None:
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()


def plain(scaler: Any, optimizer: Any, model: Any) -> None:
    scaler.step(optimizer)
    scaler.update()


RECIPES = {"explicit": explicit, "plain": plain}


@every_compression
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_scaling_by_powers_of_two_changes_no_bit(compression: Any, recipe: Any) -> None:
    """Neither the weights nor the residual: it is unscaled while the scale grows."""

    def train(scaled: Any) -> Any:
        states = {}

        def body(model: Any, transport: Any) -> None:
            scaler = new_scaler(enabled=scaled)
            optimizer = wrap(model, transport, dgc_sgd, compression=compression(), grad_scaler=scaler)
            for step in range(8):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, step, transport.rank)).backward()
                if not scaled:
                    optimizer.synchronize()
                    if recipe is explicit:
                        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    with optimizer.skip_synchronize():
                        optimizer.step()
                else:
                    recipe(scaler, optimizer, model)
            assert scaler.get_scale() == (2.0**18 if scaled else 1.0)
            states[transport.rank] = optimizer.compression_state_dict()

        return run(2, body)[0], states

    (model, states), (reference, expected) = train(True), train(False)
    assert_same(model, reference, exactly=True)
    torch.testing.assert_close(states, expected, rtol=0, atol=0)


@every_compression
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_an_overflow_of_one_rank_halves_the_scale_of_all(compression: Any, recipe: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        scaler = new_scaler(growth_interval=1000)
        optimizer = wrap(model, transport, dgc_sgd, compression=compression(), grad_scaler=scaler, bucket_mb=2e-4)
        for step in range(5):
            optimizer.zero_grad()
            before = values(model)
            loss = loss_of(model, step, transport.rank)
            if (step, transport.rank) == (2, 1):
                loss = loss * 1e36
            scaler.scale(loss).backward()
            recipe(scaler, optimizer, model)
            moved = any(not torch.equal(old, values(model)[name]) for name, old in before.items())
            assert moved == (step != 2)
            assert scaler.get_scale() == 2.0 ** (16 if step < 2 else 15)
            assert optimizer.error_norm() < 10
        assert optimizer.dropped_steps == 1

    run(2, body)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_fp16_autocast_finds_its_scale(recipe: Any) -> None:
    """The first scale is so large that every step overflows fp16."""

    def body(model: Any, transport: Any) -> None:
        scaler = new_scaler(init_scale=2.0**30, growth_interval=1000)
        optimizer = wrap(model, transport, dgc_sgd, compression=dgc(0.3), grad_scaler=scaler)
        losses = []
        for _ in range(150):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model, 0, transport.rank)
            scaler.scale(loss).backward()
            recipe(scaler, optimizer, model)
            losses.append(loss.item())
        assert optimizer.dropped_steps > 3 and scaler.get_scale() < 2.0**30
        assert min(losses[-5:]) < 0.7 * losses[0]

    run(2, body)


@every_compression
def test_bf16_autocast_needs_no_scaler(compression: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, dgc_sgd, compression=compression())
        losses = []
        for _ in range(100):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, 0, transport.rank)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        assert min(losses[-5:]) < 0.8 * losses[0]

    run(2, body)


def test_horovods_recipe_without_passing_the_scaler() -> None:
    """Dense, as in Horovod: it works because every scaler finds NaN after a dropped step."""

    def body(model: Any, transport: Any) -> None:
        scaler = new_scaler(growth_interval=1000)
        optimizer = wrap(model, transport)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, step, transport.rank)
            scaler.scale(loss * 1e36 if (step, transport.rank) == (1, 1) else loss).backward()
            explicit(scaler, optimizer, model)
        assert scaler.get_scale() == 2.0**15 and optimizer.dropped_steps == 1

    with pytest.warns(UserWarning, match="on rank 1"):
        run(2, body)


def scaled_backward(scaler: Any, optimizer: Any, model: Any) -> None:
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 0)).backward()


def test_a_scaler_that_was_not_passed_is_refused_in_the_plain_recipe() -> None:
    model, scaler = net(), new_scaler()
    optimizer = wrap(model, alone())
    scaled_backward(scaler, optimizer, model)
    with pytest.raises(RuntimeError, match="pass it as grad_scaler="):
        scaler.step(optimizer)


def test_a_step_without_the_scaler_is_refused() -> None:
    model, scaler = net(), new_scaler()
    optimizer = wrap(model, alone(), grad_scaler=scaler)
    scaled_backward(scaler, optimizer, model)
    with pytest.raises(RuntimeError, match=r"call grad_scaler.step\(optimizer\)"):
        optimizer.step()


def test_unscaling_before_averaging_is_refused() -> None:
    model, scaler = net(), new_scaler()
    optimizer = wrap(model, alone(), grad_scaler=scaler)
    scaled_backward(scaler, optimizer, model)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="first average the gradients"):
        scaler.step(optimizer)


def test_parameters_in_fp16_have_no_scaler() -> None:
    model = net().half()
    with pytest.raises(ValueError, match="first.weight|last.bias"):
        wrap(model, alone(), grad_scaler=new_scaler())


def test_a_scaler_drops_steps_and_cannot_be_used_with_raise() -> None:
    with pytest.raises(ValueError, match="it needs nonfinite='skip'"):
        wrap(net(), alone(), grad_scaler=new_scaler(), nonfinite="raise")


def test_a_disabled_scaler_counts_as_none() -> None:
    model, reference, scaler = net(), net(), torch.amp.GradScaler("cpu", enabled=False)
    optimizer, other = wrap(model, alone(), grad_scaler=scaler), momentum_sgd(reference)
    scaled_backward(scaler, optimizer, model)
    scaler.step(optimizer)
    scaler.update()
    loss_of(reference, 0).backward()
    other.step()
    assert_same(model, reference, exactly=True)
