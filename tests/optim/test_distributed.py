"""DistributedOptimizer over a lockstep world: its results, in the ways in which training scripts use it."""

from functools import partial
from typing import Any

import pytest
import torch
from optim import nets
from refusals import refuse
from torch import nn

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DenseCompressor, DGCCompressor, Route, Rule
from dgc.memory import ClipByGlobalNorm, ClipByNorm, DGCSGDMemory, NoMemory, ResidualMemory
from dgc.optim import DGCSGD, DistributedOptimizer


@pytest.mark.parametrize("size", nets.SIZES)
@pytest.mark.parametrize("compression", [None, DenseCompressor], ids=str)
@pytest.mark.parametrize("bucket_mb", [25.0, 1e-4])
@pytest.mark.parametrize("op", ["average", 0, "Average", "mean", "sum", 1, "SUM"])
def test_dense_equals_one_process(size: Any, compression: Any, bucket_mb: float, op: Any) -> None:
    """Of the ops, 0 and 1 are Horovod's constants."""
    scale = size if op in ("sum", 1, "SUM") else 1
    expected = nets.trained_alone(size, range(5), loss=lambda *given: nets.joint_loss(*given) * scale)
    nets.assert_same(nets.trained(size, range(5), compression=compression, bucket_mb=bucket_mb, op=op), expected)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(nets.momentum_sgd, id="SGD"),
        pytest.param(lambda model: torch.optim.Adam(model.parameters(), lr=0.01), id="Adam"),
        pytest.param(partial(nets.dgc_sgd, weight_decay=0.01), id="DGCSGD with decay"),
    ],
)
def test_one_rank_is_the_plain_optimizer_bit_by_bit(make: Any) -> None:
    nets.assert_same(nets.trained(1, range(4), make), nets.trained_alone(1, range(4), make), exactly=True)


@pytest.mark.parametrize("size", nets.SIZES)
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"weight_decay": 0.05}], ids=str)
def test_dgc_at_ratio_one_is_momentum_sgd(size: Any, options: Any) -> None:
    compression = partial(nets.dgc, 1.0, nesterov=options.get("nesterov", False))
    found = nets.trained(size, range(6), partial(nets.dgc_sgd, **options), compression)
    nets.assert_same(found, nets.trained_alone(size, range(6), partial(nets.momentum_sgd, **options)))


@pytest.mark.parametrize("zero", ["own", "model"])
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_are_accumulated_over_passes(size: int, zero: str) -> None:
    found = nets.trained(size, range(3), training={"passes": 3, "zero": zero})
    nets.assert_same(found, nets.trained_alone(size, range(3), passes=3))


@pytest.mark.parametrize("size", [1, 2])
def test_fewer_passes_than_planned_are_exchanged_by_step(size: int) -> None:
    nets.assert_same(nets.trained(size, [0], backward_passes_per_step=4), nets.trained_alone(size, [0]))


def test_more_passes_than_planned_are_refused() -> None:
    model = nets.net()
    optimizer = nets.wrap(model, nets.alone(), backward_passes_per_step=2)
    for part in range(2):
        nets.loss_of(model, part).backward()
    with pytest.raises(RuntimeError, match="backward_passes_per_step=2"):
        nets.loss_of(model, 2).backward()
    assert optimizer._engine.in_flight


def test_the_number_of_passes_changes_between_steps() -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = nets.wrap(model, transport)
        for first, last, passes in ((0, 2, 1), (1, 3, 2), (6, 8, 1)):
            optimizer.set_backward_passes_per_step(passes)
            assert optimizer.backward_passes_per_step == passes
            nets.train(model, optimizer, range(first, last), transport.rank, passes=passes)

    reference = nets.net()
    momentum = nets.momentum_sgd(reference)
    for steps, passes in ((range(2), 1), (range(1, 3), 2), (range(6, 8), 1)):
        nets.train(reference, momentum, steps, 2, loss=nets.joint_loss, passes=passes)
    nets.assert_same(nets.run(2, body)[0], reference)


def test_no_passes_are_refused() -> None:
    optimizer = nets.wrap(nets.net(), nets.alone())
    refuse("backward_passes_per_step must be", optimizer.set_backward_passes_per_step, 0)


@nets.each_rank(2)
def test_the_number_of_passes_does_not_change_after_backward(model: Any, transport: Any) -> None:
    optimizer = nets.wrap(model, transport)
    nets.loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"between backward and step\(\): call it after"):
        optimizer.set_backward_passes_per_step(2)


def train_gan(model: Any, transport: Any, wraps: Any) -> None:
    """The generator's loss does not reach the parameters of the discriminator."""
    generator, discriminator = wraps(model.first, transport), wraps(model.last, transport)
    for step in range(3):
        x, _ = nets.data(step, transport.rank)
        discriminator.zero_grad()
        model.last(model.first(x).detach()).square().mean().backward()
        discriminator.step()
        generator.zero_grad()
        model.last.requires_grad_(False)
        model.last(model.first(x)).mean().backward()
        model.last.requires_grad_(True)
        generator.step()


def test_a_gan_trains_as_with_plain_optimizers() -> None:
    found = nets.run(1, partial(train_gan, wraps=nets.wrap))[0]
    train_gan(expected := nets.net(), nets.alone(), lambda part, _: nets.momentum_sgd(part))
    nets.assert_same(found, expected, exactly=True)


def test_a_gan_trains_on_several_ranks() -> None:
    nets.run(2, partial(train_gan, wraps=nets.wrap))


@pytest.mark.parametrize("way", ["zero_grad", "backward"])
def test_a_loss_of_another_network_must_not_reach_the_parameters(way: str) -> None:
    """As the loss of a GAN's generator reaches the discriminator."""
    model = nets.net()
    optimizer = nets.wrap(model, nets.alone())
    nets.loss_of(model, 0).backward()
    words = r"GAN's generator .* would train the wrong network: call requires_grad_\(False\)"
    with pytest.raises(RuntimeError, match=words):
        optimizer.zero_grad() if way == "zero_grad" else nets.loss_of(model, 0).backward()


PLACES = [(1, None, 0), (1, None, 0.05), (2, 0.5, 0.05), (1, 0.5, 1.0), (2, None, 1.0)]


@pytest.mark.parametrize(("passes", "clipping", "ratio"), PLACES)
def test_every_way_to_zero_gradients(passes: Any, clipping: Any, ratio: Any) -> None:
    """Gradients are read where they are, in the bucket or outside of it: their place changes no bit."""

    def mixed(model: Any, optimizer: Any) -> None:
        step = optimizer.compression_state_dict()["identity"]["step"]
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step == 1:
            model.first.weight.grad = None
        if step == 2:
            model.last.weight.grad = torch.zeros_like(model.last.weight)

    def compression() -> Any:
        clip = clipping and ClipByGlobalNorm(clipping)
        return DGCCompressor(ratio, DGCSGDMemory(0.9, gradient_clipping=clip)) if ratio else DenseCompressor()

    own = partial(nets.trained, 2, range(4), nets.dgc_sgd, compression, bucket_mb=2e-4)
    first, *others = (own(training={"zero": zero, "passes": passes}) for zero in (*nets.ZEROS, mixed))
    for other in others:
        nets.assert_same(other, first, exactly=True)


def compressed_buckets() -> tuple[Any, Any, list[Any]]:
    """A model after three steps that were read from its gradients, its optimizer and the compressed buckets."""
    optimizer = nets.wrap(model := nets.net(), nets.alone(), nets.dgc_sgd, compression=nets.dgc(0.05))
    compressed = [plan.bucket for plan in optimizer.planned if isinstance(plan.compressor, DGCCompressor)]
    for step in range(3):
        optimizer.zero_grad()
        nets.loss_of(model, step).backward()
        own = model.first.weight.grad
        optimizer.step()
        assert model.first.weight.grad is own
        assert compressed and not any("_flat" in bucket.__dict__ for bucket in compressed)
    return model, optimizer, compressed


def test_a_compressed_bucket_has_no_memory_of_its_own() -> None:
    compressed_buckets()


def test_gradients_that_are_kept_by_zero_grad_lie_in_the_memory_of_a_bucket() -> None:
    _, optimizer, compressed = compressed_buckets()
    optimizer.zero_grad(set_to_none=False)
    assert any("_flat" in bucket.__dict__ for bucket in compressed)


def test_gradients_laid_out_in_another_way_are_copied() -> None:
    """A hook may replace a gradient by a transposed one. Its elements must keep their positions."""
    models = [nets.net() for _ in range(2)]
    for model in models:
        model.first.weight.register_hook(lambda g: g.t().contiguous().t())
    first, second = (nets.trained(2, range(4), nets.dgc_sgd, nets.dgc, own) for own in (models, None))
    nets.assert_same(first, second, exactly=True)


@pytest.mark.parametrize("memory", [ResidualMemory, NoMemory, lambda: DGCSGDMemory(0.9)])
def test_sparse_steps_equal_steps_through_gradients(memory: Any) -> None:
    """If the memory does not correct momentum, DGCSGD equals SGD, and a sparse mean is treated as dense."""
    corrects = memory().correction is not None

    def body(model: Any, transport: Any, finish: Any) -> None:
        compression = DGCCompressor(0.05, memory())
        optimizer = nets.wrap(model, transport, nets.dgc_sgd, compression=compression, bucket_mb=2e-4)
        nets.train(model, optimizer, range(5), transport.rank, finish=finish)
        assert all("momentum_buffer" in optimizer.state[p] for p in model.parameters()) != corrects

    direct, through = (nets.run(2, partial(body, finish=end))[0] for end in (None, nets.through_gradients))
    nets.assert_same(direct, through, exactly=not corrects)


def test_a_memory_format_that_changes_after_wrapping() -> None:
    def result(finish: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 2))
        optimizer = nets.wrap(model, nets.alone(), nets.dgc_sgd, compression=nets.dgc(0.05))
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        training: Any = {"loss": lambda model, step, _: model(torch.full((2, 8, 3, 3), 1.0 + step)).square().sum()}
        nets.train(model, optimizer, range(3), finish=finish, **training)
        return model

    nets.assert_same(result(None), result(nets.through_gradients))


def before_zero_grad() -> tuple[Any, Any, list[Any]]:
    """A model with a frozen parameter that has a gradient, its optimizer after a step, and its gradients."""
    model = nets.net()
    model.last.bias.requires_grad_(False)
    optimizer = nets.wrap(model, nets.alone())
    model.last.bias.grad = torch.ones(3)
    nets.loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="zero_grad"):  # in flight
        optimizer.zero_grad()
    optimizer.step()
    return model, optimizer, [p.grad for p in model.first.parameters()]


@pytest.mark.parametrize("set_to_none", [False, True])
def test_own_zero_grad_clears_gradients_of_frozen_parameters(set_to_none: bool) -> None:
    model, optimizer, _ = before_zero_grad()
    optimizer.zero_grad(set_to_none=set_to_none)
    assert model.last.bias.grad is None


def test_own_zero_grad_keeps_views_if_asked() -> None:
    model, optimizer, views = before_zero_grad()
    optimizer.zero_grad(set_to_none=False)
    left = [p.grad for p in model.first.parameters()]
    assert all(own is view and not view.any() for own, view in zip(left, views, strict=True))


def test_own_zero_grad_clears_views_by_default() -> None:
    model, optimizer, _ = before_zero_grad()
    optimizer.zero_grad(set_to_none=True)
    assert [p.grad for p in model.first.parameters()] == [None] * 2


@pytest.mark.parametrize("kind", nets.KINDS)
def test_a_scheduler_changes_the_rates_of_groups(kind: Any) -> None:
    def groups(model: Any) -> Any:
        last = {"params": [*model.last.parameters()], "lr": 0.5}
        others = {"params": [*model.first.parameters(), *model.spare.parameters()], "weight_decay": 0.1}
        return DGCSGD([last, others], lr=0.05, momentum=0.9)

    def scheduled(model: Any, optimizer: Any, rank: Any, loss: Any = nets.loss_of) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        for step in range(5):
            nets.train(model, optimizer, [step], rank, loss=loss)
            scheduler.step()
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.005, 0.0005])

    wrapped, reference = partial(nets.wrap, make=groups), nets.net()
    (model, _) = nets.run(2, lambda m, t: scheduled(m, wrapped(m, t, compression=nets.KINDS[kind]()), t.rank))
    scheduled(reference, groups(reference), 2, nets.joint_loss)
    if kind != "dgc":
        nets.assert_same(model, reference)


@nets.each_rank(2)
def test_a_group_is_added_by_wrapping_again(model: Any, transport: Any) -> None:
    inner = torch.optim.SGD(model.first.parameters(), lr=0.1)
    optimizer = nets.wrap(model, transport, lambda _: inner)
    more = {"params": [*model.last.parameters()]}
    refuse(r"cannot be added here: close\(\) this optimizer, add the group", optimizer.add_param_group, more)
    optimizer.close()
    inner.add_param_group(more)
    nets.train(model, nets.wrap(model, transport, lambda _: inner), [0], transport.rank)
    assert not torch.equal(model.last.weight, nets.net().last.weight)


def test_a_scheduler_of_the_inner_optimizer_changes_the_rate() -> None:
    model = nets.net()
    optimizer = nets.wrap(model, nets.alone())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.inner, lambda epoch: 0.5**epoch)
    nets.train(model, optimizer, [0])
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_a_step_after_synchronize_warns_once() -> None:
    """Warnings are errors in tests: the next step has none."""
    model = nets.net()
    optimizer = nets.wrap(model, nets.alone())
    nets.loss_of(model, 0).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match=r"step\(\) called without optimizer.skip_synchronize\(\)"):
        optimizer.step()
    nets.loss_of(model, 1).backward()
    optimizer.step()


def test_a_closure() -> None:
    def body(model: Any, transport: Any) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = nets.loss_of(model, 0, transport.rank)
            loss.backward()
            return loss.item()

        optimizer, loss = nets.wrap(model, transport), nets.loss_of(model, 0, transport.rank).item()
        assert optimizer.step(closure) == pytest.approx(loss)

    nets.assert_same(nets.run(2, body)[0], nets.trained_alone(2, [0]))


clipping = partial(nets.through_gradients, change=nets.clip)


def clipping_after_two(model: Any, optimizer: Any) -> None:
    optimizer.synchronize()
    clipping(model, optimizer)


@nets.every_kind
def test_synchronizing_twice_is_synchronizing_once(compression: Any) -> None:
    own = partial(nets.trained, 2, range(3), nets.dgc_sgd, compression)
    first, second = (own(training={"finish": finish}) for finish in (clipping_after_two, clipping))
    nets.assert_same(first, second, exactly=True)


def test_clipping_after_synchronize_clips_the_mean() -> None:
    def clipped_step(model: Any, optimizer: Any) -> None:
        nets.clip(model)
        optimizer.step()

    found = nets.trained(2, range(3), nets.dgc_sgd, DenseCompressor, training={"finish": clipping_after_two})
    nets.assert_same(found, nets.trained_alone(2, range(3), finish=clipped_step))


@pytest.mark.parametrize("zero", ["own", "model"])
def test_a_step_that_was_left_out_after_synchronize(zero: Any) -> None:
    """A loss scaler skips step() on overflow: the next step exchanges again, without a warning."""

    def body(model: Any, transport: Any) -> None:
        optimizer = nets.wrap(model, transport)
        for step, finish in enumerate((None, lambda model, own: own.synchronize(), None)):
            nets.train(model, optimizer, [step], transport.rank, zero=zero, finish=finish)

    nets.assert_same(nets.run(2, body)[0], nets.trained_alone(2, [0, 2]))


@pytest.mark.parametrize("masked", [0, 2])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_set_by_hand_are_exchanged_where_they_are_zero_on_one_rank_too(
    masked: int, set_to_none: bool
) -> None:
    """As of a masked loss, by autograd.grad: a rank that sent nothing would be a step behind the others."""

    def loss(model: Any, step: int, rank: int) -> Any:
        return nets.loss_of(model, step, rank) * (step != masked or rank == 0)

    def body(model: Any, transport: Any) -> None:
        optimizer = nets.wrap(model, transport)
        for step in range(4):
            optimizer.zero_grad(set_to_none)
            own = torch.autograd.grad(loss(model, step, transport.rank), [*model.parameters()])
            for p, gradient in zip(model.parameters(), own, strict=True):
                p.grad = gradient
            optimizer.step()

    def joint(model: Any, step: int, size: int) -> Any:
        return sum(loss(model, step, rank) for rank in range(size)) / size

    nets.assert_same(nets.run(2, body)[0], nets.trained_alone(2, range(4), loss=joint))


def test_a_state_after_synchronize_is_refused_until_the_step() -> None:
    model = nets.net()
    optimizer = nets.wrap(model, nets.alone())
    nets.loss_of(model, 0).backward()
    optimizer.synchronize()
    with pytest.raises(RuntimeError, match=r"between the exchange .*after step\(\), or after zero_grad\(\) if"):
        optimizer.compression_state_dict()
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.compression_state_dict()


def test_a_state_after_synchronize_is_taken_if_the_step_is_left_out() -> None:
    model = nets.net()
    optimizer = nets.wrap(model, nets.alone())
    nets.train(model, optimizer, [0])
    nets.loss_of(model, 1).backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    optimizer.compression_state_dict()


def test_a_state_after_synchronize_is_taken_if_a_scaler_leaves_the_step_out() -> None:
    model, scaler = nets.net(), torch.amp.GradScaler("cpu")
    scaled = nets.wrap(model, nets.alone(), grad_scaler=scaler)
    scaler.scale(nets.loss_of(model, 0)).backward()
    scaled.synchronize()
    model.last.bias.grad.fill_(float("inf"))  # beside the exchange, so that only the scaler leaves the step out
    with scaled.skip_synchronize():
        scaler.step(scaled)
    scaler.update()
    scaled.compression_state_dict()


@nets.each_rank(2)
def test_two_optimizers_on_one_transport(model: Any, transport: Any) -> None:
    first, last = (nets.wrap(module, transport) for module in (model.first, model.last))
    for step in range(3):
        first.zero_grad()
        nets.train(model, last, [step], transport.rank)
        first.step()
    assert not torch.equal(model.first.weight, nets.net().first.weight)


def test_a_horovod_compression() -> None:
    found, expected = nets.trained(2, [0], compression=lambda: nets.Half), nets.trained_alone(2, [0])
    torch.testing.assert_close(nets.values(found), nets.values(expected), rtol=1e-3, atol=1e-3)


SHAPES: dict[str, tuple[int, ...]] = {"weight": (10, 10), "bias": (100,), "empty": (0,)}


def moved(transport: Any, compression: Any, gradients: Any) -> Any:
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()})
    inner = DGCSGD(model.parameters(), lr=1.0, momentum=0.9)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), compression, transport=transport)
    sum((p * gradients[name]).sum() for name, p in model.items() if p.numel()).backward()
    optimizer.step()
    return {name: -p.detach() for name, p in model.items()}, optimizer


def normal(rank: Any, scale: float = 1.0) -> Any:
    generator = torch.Generator().manual_seed(rank)
    return {name: scale * torch.randn(SHAPES[name], generator=generator) for name in ("weight", "bias")}


def clipped(clipping: Any, ratio: float = 0.5, **options: Any) -> Any:
    compression = DGCCompressor(ratio, DGCSGDMemory(0.9, gradient_clipping=clipping), **options)
    compression.begin_epoch(0)
    return compression


def moved_far(compression: Any, transport: Any) -> Any:
    return moved(transport, compression(), normal(transport.rank, 100.0))[0]


@pytest.mark.parametrize(
    ("ratio", "options"), [(1.0, {}), (0.01, {}), (0.01, {"fp16_values": True})], ids=["dense", "sparse", "fp16"]
)
def test_a_bias_moves_no_further_than_the_limit_nor_a_matrix_at_first(ratio: float, options: Any) -> None:
    step, _ = moved(nets.alone(), clipped(ClipByNorm(1.0), ratio, **options), normal(0, 100.0))
    assert float(step["weight"].norm()) < 1.001 and 0.99 < float(step["bias"].norm()) < 1.001


@pytest.mark.parametrize("clipping", [ClipByNorm(1.0), ClipByGlobalNorm(1.0)], ids=["norm", "global norm"])
def test_a_dense_step_of_the_warm_up_moves_no_further_than_the_limit(clipping: Any) -> None:
    warming = partial(clipped, clipping, 0.01, warmup_epochs=1, warmup_coeff=[1.0])
    for step in LockstepWorld(2).run(partial(moved_far, warming)):
        assert float(step["weight"].norm()) < 1.001 and float(step["bias"].norm()) < 1.001


def test_a_dropped_step_stays_dropped_where_vectors_are_clipped() -> None:
    bad = normal(0)
    bad["bias"][3] = float("nan")
    with pytest.warns(UserWarning, match="the gradient of bias on rank 0 has NaN or inf"):
        step, optimizer = moved(nets.alone(), clipped(ClipByNorm(1.0)), bad)
    assert optimizer.dropped_steps == 1 and not any(p.any() for p in step.values())


def test_another_compressor_for_vectors_does_not_clip() -> None:
    route = Route([Rule(DenseCompressor(), max_dim=1), Rule(clipped(ClipByNorm(1.0)))])
    step, _ = moved(nets.alone(), route, normal(0, 100.0))
    torch.testing.assert_close(step["bias"], normal(0, 100.0)["bias"])
