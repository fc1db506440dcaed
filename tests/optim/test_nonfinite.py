"""NaN and inf in a gradient: all ranks drop the step, or raise, also with a GradScaler and in LocalOptimizer."""

import copy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from optim import nets
from refusals import refuse
from torch import nn
from torch.nn.utils import parameters_to_vector

from dgc import compression as methods
from dgc import contrib
from dgc.comm import all_gather_object
from dgc.comm.lockstep import LockstepWorld
from dgc.gossip import SGP
from dgc.memory import ResidualMemory
from dgc.optim import LocalOptimizer

COMPRESSIONS = {
    "dense": methods.DenseCompressor,
    "fp16": methods.FP16Compressor,
    "bf16": methods.BF16Compressor,
    "horovod": lambda: nets.Half,
    "two phases": lambda: methods.TwoPhaseCompressor(4),
    "dgc": lambda: nets.dgc(0.1),
    "dgc dense": lambda: nets.dgc(1.0),
    "dgc int8 vectors": lambda: nets.dgc(0.1, dense_values="int8"),
    "dgc fp16": lambda: nets.dgc(0.1, fp16_values=True, int32_indices=True),
}
every_compression = pytest.mark.parametrize("compression", COMPRESSIONS.values(), ids=COMPRESSIONS)


def spoilt(model: Any, step: Any, rank: Any, at: tuple[int, ...] = (1,), bad: float = float("nan")) -> Any:
    found = nets.loss_of(model, step, rank)
    return found + bad * model.spare.weight.sum() if rank == 1 and step in at else found


@every_compression
@pytest.mark.parametrize(("through", "bad"), [(False, float("nan")), (True, float("inf"))])
def test_a_step_is_dropped_on_every_rank(compression: Any, through: Any, bad: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = nets.wrap(model, transport, nets.dgc_sgd, compression=compression(), bucket_mb=2e-4)
        scheduler, is_nan = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), []

        def clip_and_note(model: Any) -> None:
            is_nan.append((optimizer.dropped_steps, bool(model.first.weight.grad.isnan().all())))
            nets.clip(model)

        def everything() -> Any:
            return [b.clone() for state in optimizer.state.values() for b in state.values()]

        finish = partial(nets.through_gradients, change=clip_and_note) if through else None
        for step in range(6):
            weights, kept = list(nets.values(model).values()), everything()
            nets.train(model, optimizer, [step], transport.rank, loss=spoilt, at=(2, 4), bad=bad, finish=finish)
            scheduler.step()
            assert nets.same(weights, nets.values(model).values()) == (step in (2, 4))
            assert step not in (2, 4) or nets.same(kept, everything())
        assert not through or is_nan == [(0, False), (0, False), (1, True), (1, False), (2, True), (2, False)]
        assert optimizer.dropped_steps == 2 and optimizer.error_norm() < float("inf")
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
        assert not optimizer._engine.in_flight

    with pytest.warns(UserWarning, match="gradient of spare.weight on rank 1 has NaN or inf, or is") as seen:
        nets.run(2, body)
    assert ["drops this step" in str(w.message) for w in seen].count(True) == 1


@every_compression
@nets.each_rank(2)
def test_a_raised_error_is_the_same_on_all_ranks(model: Any, transport: Any, compression: Any) -> None:
    optimizer = nets.wrap(model, transport, nets.dgc_sgd, compression=compression(), nonfinite="raise")
    nets.train(model, optimizer, [0], transport.rank)
    with pytest.raises(methods.NonFiniteGradientError) as error:
        nets.train(model, optimizer, [1], transport.rank, loss=spoilt)
    assert str(error.value) == "the gradient of spare.weight on rank 1 has NaN or inf, or is 2**64 or more"


@every_compression
@nets.each_rank(2)
def test_training_goes_on_after_a_raised_error(model: Any, transport: Any, compression: Any) -> None:
    optimizer = nets.wrap(model, transport, nets.dgc_sgd, compression=compression(), nonfinite="raise")
    nets.train(model, optimizer, [0], transport.rank)
    with pytest.raises(methods.NonFiniteGradientError):
        nets.train(model, optimizer, [1], transport.rank, loss=spoilt)
    nets.train(model, optimizer, range(2, 4), transport.rank)
    assert optimizer.dropped_steps == 1


@pytest.mark.filterwarnings("ignore:.*drops this step")
@pytest.mark.parametrize("ratio", [0.1, 1.0])
@nets.each_rank(2)
def test_what_was_sent_in_any_bucket_returns(model: Any, transport: Any, ratio: Any) -> None:
    """A flag in one bucket drops all buckets: their residual keeps the whole gradient."""
    optimizer = nets.wrap(model, transport, nets.dgc_sgd, compression=nets.dgc(ratio), bucket_mb=1e-5)
    assert len(optimizer.planned) == 6
    nets.train(model, optimizer, [1], transport.rank, loss=spoilt)
    nets.loss_of(twin := nets.net(), 1, transport.rank).backward()
    if transport.rank == 1:
        twin.spare.weight.grad.zero_()
    expected = {name: p.grad for name, p in twin.named_parameters() if p.dim() > 1}
    memory = optimizer.compression_state_dict()["DGCCompressor.0"]
    for table in ("velocities", "momentums"):
        torch.testing.assert_close(dict(memory[table]), expected, rtol=0, atol=0)


def test_an_overflow_of_the_wire_alone_names_no_rank() -> None:
    """Finite gradients beyond fp16: the mean is inf, though no rank has a gradient that is not finite."""
    training = {"loss": lambda *given: 1e6 * nets.loss_of(*given)}
    with pytest.raises(methods.NonFiniteGradientError, match="overflows the dtype that carries it"):
        nets.trained(2, [0], compression=methods.FP16Compressor, training=training, nonfinite="raise")


LARGE = [(1, 32, True, 0.1), (2, 32, True, 1.0), (2, 32, False, 0.1)]
LARGE += [(2, 16, True, 0.1), (2, 16, False, 1.0), (1, 16, True, 1.0)]


@pytest.mark.parametrize(("size", "bits", "fp16", "ratio"), LARGE)
def test_large_gradients_arrive_in_the_end(size: Any, bits: Any, fp16: Any, ratio: Any) -> None:
    """Gradients of 6e4 in three steps, then none: messages are limited to fp16, so the rest is sent later."""
    dtype, lr = (torch.float32, 1e-6) if bits == 32 else (torch.float16, 1e-3)
    models = [nn.Linear(20, 10, bias=False).to(dtype) for _ in range(size)]

    def body(model: Any, transport: Any) -> None:
        nn.init.zeros_(model.weight)
        compression = methods.DGCCompressor(ratio, ResidualMemory(), fp16_values=fp16)
        sgd = torch.optim.SGD(model.parameters(), lr=lr)
        optimizer = nets.wrap(model, transport, lambda m: sgd, compression=compression)
        for step in range(60):
            optimizer.zero_grad()
            if step < 3:
                (model.weight.sum(dtype=torch.float32) * 6e4).backward()
            optimizer.step()
            assert model.weight.isfinite().all()
        assert optimizer.dropped_steps == 0 and optimizer.error_norm() < 60
        expected = torch.full((10, 20), -3 * 6e4 * lr)
        torch.testing.assert_close(model.weight.float(), expected, rtol=0.02, atol=0.02 * 3 * 6e4 * lr)

    nets.run(size, body, models)


SOME = ("dense", "bf16", "dgc", "dgc dense")
some_compressions = pytest.mark.parametrize("name", SOME)


@pytest.mark.filterwarnings("ignore:.*drops this step")
@pytest.mark.parametrize("size", [2, (4, 2)])
@pytest.mark.parametrize(
    "inner", [partial(methods.QSGDCompressor, error_feedback=True), partial(contrib.RandomKCompressor, 0.5)]
)
def test_a_state_of_ef21_that_is_saved_after_a_dropped_step_goes_on_with_the_same_random_numbers(
    inner: Any, size: Any
) -> None:
    def body(model: Any, transport: Any) -> None:
        def wrapped(model: Any) -> Any:
            sgd = partial(torch.optim.SGD, lr=0.1)
            return nets.wrap(
                model, transport, lambda m: sgd(m.parameters()), compression=methods.EF21Compressor(inner(), 0.5)
            )

        optimizer, other = wrapped(model), copy.deepcopy(model)
        nets.train(model, optimizer, range(2), transport.rank, loss=spoilt)
        resumed = wrapped(other)
        other.load_state_dict(model.state_dict())
        resumed.load_compression_state_dict(optimizer.compression_state_dict())
        for one, own in ((other, resumed), (model, optimizer)):
            nets.train(one, own, range(2, 6), transport.rank)
        nets.assert_same(model, other, exactly=True)

    nets.run(size, body)


def new_scaler(**options: Any) -> Any:
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**16, "growth_interval": 1000, **options})


def plain(scaler: Any, optimizer: Any, model: Any) -> None:
    scaler.step(optimizer)
    scaler.update()


def explicit(scaler: Any, optimizer: Any, model: Any) -> None:
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    nets.clip(model, 0.5)
    with optimizer.skip_synchronize():
        plain(scaler, optimizer, model)


every_recipe = pytest.mark.parametrize("recipe", [explicit, plain])


def scaled_step(scaler: Any, optimizer: Any, model: Any, recipe: Any, loss: Any) -> None:
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    recipe(scaler, optimizer, model)


@some_compressions
@every_recipe
def test_scaling_by_powers_of_two_changes_no_bit(name: Any, recipe: Any) -> None:
    """Neither the weights nor the residual: it is unscaled while the scale grows."""

    def unscaled(scaler: Any, optimizer: Any, model: Any) -> None:
        nets.through_gradients(model, optimizer, partial(nets.clip, norm=0.5) if recipe is explicit else None)

    def ends(transport: Any, is_scaled: Any) -> Any:
        model, scaler = nets.net(), new_scaler(enabled=is_scaled, growth_interval=3)
        options = {"compression": COMPRESSIONS[name](), "grad_scaler": scaler}
        optimizer = nets.wrap(model, transport, nets.dgc_sgd, **options)
        for step in range(8):
            loss = nets.loss_of(model, step, transport.rank)
            scaled_step(scaler, optimizer, model, recipe if is_scaled else unscaled, loss)
        assert scaler.get_scale() == (2.0**18 if is_scaled else 1.0)
        state = optimizer.compression_state_dict()
        return nets.values(model), {key: {**part, "method": None} for key, part in state.items()}

    found, expected = (LockstepWorld(2).run(partial(ends, is_scaled=scaled)) for scaled in (True, False))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


OVERFLOWS = [*product(SOME, (explicit, plain), (True,)), ("dense", explicit, False)]


@pytest.mark.parametrize(("name", "recipe", "is_passed"), OVERFLOWS)
@pytest.mark.filterwarnings("ignore:.*on rank 1")
@nets.each_rank(2)
def test_an_overflow_of_a_rank_halves_the_scale_of_all(
    model: Any, transport: Any, name: Any, recipe: Any, is_passed: Any
) -> None:
    """is_passed: dense and explicit works without, as in Horovod: every scaler finds NaN after a dropped step."""
    scaler, options = new_scaler(), {"compression": COMPRESSIONS[name](), "bucket_mb": 2e-4}
    optimizer = nets.wrap(model, transport, nets.dgc_sgd, grad_scaler=scaler if is_passed else None, **options)
    for step in range(5):
        before, factor = nets.values(model), 1e36 if (step, transport.rank) == (2, 1) else 1.0
        scaled_step(scaler, optimizer, model, recipe, nets.loss_of(model, step, transport.rank) * factor)
        assert nets.same(before.values(), nets.values(model).values()) == (step == 2)
        assert scaler.get_scale() == 2.0 ** (16 if step < 2 else 15)
        assert optimizer.error_norm() < 10
    assert optimizer.dropped_steps == 1


@every_recipe
@nets.each_rank(2)
def test_fp16_autocast_finds_its_scale(model: Any, transport: Any, recipe: Any) -> None:
    scaler, losses = new_scaler(init_scale=2.0**30), []
    optimizer = nets.wrap(model, transport, nets.dgc_sgd, compression=nets.dgc(0.3), grad_scaler=scaler)
    for _ in range(80):
        with torch.autocast("cpu", torch.float16):
            loss = nets.loss_of(model, 0, transport.rank)
        scaled_step(scaler, optimizer, model, recipe, loss)
        losses.append(loss.item())
    assert optimizer.dropped_steps > 3 and scaler.get_scale() < 2.0**30
    assert min(losses[-5:]) < 0.7 * losses[0]


@some_compressions
@nets.each_rank(2)
def test_bf16_autocast_needs_no_scaler(model: Any, transport: Any, name: Any) -> None:
    losses = []

    def loss(model: Any, step: Any, rank: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(nets.loss_of(model, 0, rank))
        return losses[-1]

    optimizer = nets.wrap(model, transport, nets.dgc_sgd, compression=COMPRESSIONS[name]())
    nets.train(model, optimizer, range(60), transport.rank, loss=loss)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert min(losses[-5:]) < 0.8 * losses[0]


def train_with(is_passed: bool, recipe: Any, **options: Any) -> Any:
    """A model after a step with a scaler, which the optimizer knows if is_passed."""
    model, scaler = nets.net(), new_scaler(**options)
    optimizer = nets.wrap(model, nets.alone(), grad_scaler=scaler if is_passed else None)
    scaled_step(scaler, optimizer, model, recipe, nets.loss_of(model, 0))
    return model


def unscale_first(scaler: Any, optimizer: Any, model: Any) -> None:
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def without_the_scaler(scaler: Any, optimizer: Any, model: Any) -> None:
    optimizer.step()


@pytest.mark.parametrize(
    ("is_passed", "recipe", "words"),
    [
        (False, plain, "pass it as grad_scaler="),
        (True, without_the_scaler, r"call grad_scaler.step\(optimizer\)"),
        (True, unscale_first, "first average the gradients"),
    ],
    ids=["not passed", "without the scaler", "unscaled first"],
)
def test_a_wrong_recipe_is_refused(is_passed: bool, recipe: Any, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        train_with(is_passed, recipe)


scaled = partial(nets.wrap, transport=nets.alone(), grad_scaler=new_scaler())


def test_a_scaler_of_parameters_in_half_precision_is_refused() -> None:
    refuse("first.weight|last.bias", scaled, nets.net().half())


def test_a_scaler_with_errors_for_dropped_steps_is_refused() -> None:
    refuse("it needs nonfinite='skip'", scaled, nets.net(), nonfinite="raise")


def test_a_disabled_scaler_counts_as_none() -> None:
    nets.assert_same(train_with(True, plain, enabled=False), nets.trained_alone(1, [0]), exactly=True)


def local(model: Any, transport: Any = None, **options: Any) -> Any:
    inner, named = torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    return LocalOptimizer(inner, named, SGP(), transport=transport or nets.alone(), **options)


def spoilt_embedding(value: float, **options: Any) -> tuple[Any, Any]:
    """A model whose sparse gradient has this value, with gossip."""
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = local(model, **options)
    (model(torch.tensor([1, 2, 1])) * value).sum().backward()
    return model, optimizer


every_bad_value = pytest.mark.parametrize("value", [float("nan"), float("inf")])


@every_bad_value
def test_gossip_raises_for_a_sparse_gradient_that_is_not_finite(value: float) -> None:
    model, optimizer = spoilt_embedding(value, nonfinite="raise")
    before = model.weight.detach().clone()
    with pytest.raises(methods.NonFiniteGradientError, match="the gradient of weight on rank 0"):
        optimizer.step()
    assert optimizer.dropped_steps == 1 and torch.equal(model.weight, before)


@every_bad_value
def test_gossip_drops_a_sparse_gradient_that_is_not_finite(value: float) -> None:
    model, optimizer = spoilt_embedding(value)
    before = model.weight.detach().clone()
    with pytest.warns(UserWarning, match="the gradient of weight on rank 0 has NaN or inf"):
        optimizer.step()
    assert optimizer.dropped_steps == 1 and torch.equal(model.weight, before)


def test_gradients_whose_sum_overflows_are_finite() -> None:
    linear = nn.Linear(4, 2, bias=False)
    before, optimizer = linear.weight.detach().clone(), local(linear)
    linear.weight.grad = torch.full((2, 4), 3e38)
    optimizer.step()
    assert optimizer.dropped_steps == 0 and not torch.equal(linear.weight, before)


def test_a_sparse_gradient_without_rows_is_finite() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = local(embedding)
    embedding(torch.empty(0, dtype=torch.long)).sum().backward()
    optimizer.step()
    assert optimizer.dropped_steps == 0


def with_an_empty_parameter() -> tuple[Any, Any]:
    """A model after a step."""
    empty = nn.ParameterList([nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(3))])
    optimizer = local(empty)
    (empty[0].sum() + empty[1].sum()).backward()
    optimizer.step()
    return empty, optimizer


def test_a_gradient_without_elements_is_finite() -> None:
    empty, optimizer = with_an_empty_parameter()
    assert optimizer.dropped_steps == 0 and empty[1].tolist() == pytest.approx([0.9] * 3)


def test_nan_beside_a_gradient_without_elements_is_named() -> None:
    empty, optimizer = with_an_empty_parameter()
    optimizer.zero_grad()
    (empty[0].sum() + empty[1].sum() * float("nan")).backward()
    with pytest.warns(UserWarning, match="the gradient of 1 on rank 0"):
        optimizer.step()


def test_gossip_of_a_parameter_that_is_unfrozen_after_wrapping_is_refused() -> None:
    model = nets.net()
    model.first.requires_grad_(False)
    optimizer = local(model)
    model.first.requires_grad_(True)
    nets.loss_of(model, 0).backward()
    refuse("requires a gradient now but did not when LocalOptimizer was built", optimizer.step)


@on_ranks(3)
def test_consensus_is_the_mean_of_all_models_for_a_while(transport: Any) -> None:
    model = nets.net()
    optimizer = local(model, transport)
    nets.train(model, optimizer, range(3), transport.rank)
    optimizer.method.flush()  # consensus() would receive what is in flight
    own = parameters_to_vector(model.parameters()).detach()
    mean = torch.stack(all_gather_object(transport, own)).mean(0)
    with optimizer.consensus():
        torch.testing.assert_close(parameters_to_vector(model.parameters()).detach(), mean)
    assert torch.equal(parameters_to_vector(model.parameters()), own) and not torch.equal(own, mean)
    assert optimizer.metrics()["consensus_distance"] == pytest.approx(float((own - mean).norm()))
