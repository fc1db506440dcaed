"""DistributedOptimizer over a lockstep world: what it computes, and the habits of training scripts."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from nets import (  # noqa: E402
    SIZES,
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
    values,
    wrap,
)

from dgc.comm.lockstep import LockstepWorld  # noqa: E402
from dgc.compression import BF16, Dense, DGCCompressor, Route, Rule  # noqa: E402
from dgc.memory import ResidualMemory  # noqa: E402
from dgc.optim import DGCSGD, DistributedOptimizer, broadcast_optimizer_state, broadcast_parameters  # noqa: E402

# --- dense is single-process training on the whole batch -------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bucket_mb", [25.0, 1e-4])
@pytest.mark.parametrize("compression", [None, Dense], ids=str)
@pytest.mark.parametrize("op", ["average", "sum"])
def test_dense_equals_one_process(size, bucket_mb, compression, op):
    def body(model, transport):
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
def test_one_rank_is_the_plain_optimizer_bit_by_bit(make):
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
def test_dgc_at_ratio_one_is_momentum_sgd(size, options):
    def body(model, transport):
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
def test_dgc_keeps_replicas_equal_and_sends_less(size):
    meters = []

    def body(model, transport):
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
        assert meter.dense_bytes == 8 * 4 * numel
        assert meter.payload_bytes < meter.dense_bytes / 2
        assert set(meter.seconds) == {"compress", "launch", "wait", "decode", "step"}
    assert not torch.equal(models[0].first.weight, net().first.weight)


def test_sparse_steps_equal_steps_after_synchronize():
    """The direct application of sparse results, and the one through .grad."""
    results = []
    for through_gradients in (False, True):

        def body(model, transport, through_gradients=through_gradients):
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
def test_gradient_accumulation(size, forget):
    def body(model, transport):
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


def test_fewer_passes_than_planned_are_exchanged_at_step():
    def body(model, transport):
        optimizer = wrap(model, transport, backward_passes_per_step=4)
        loss_of(model, 0, transport.rank).backward()
        optimizer.step()

    reference = net()
    joint_loss(reference, 0, 2).backward()
    momentum_sgd(reference).step()
    assert_same(run(2, body)[0], reference)


def test_too_many_passes():
    model = net()
    optimizer = wrap(model, alone(), backward_passes_per_step=2)
    for part in range(2):
        loss_of(model, part).backward()
    with pytest.raises(RuntimeError, match="backward_passes_per_step=2"):
        loss_of(model, 2).backward()
    assert optimizer.exchange.in_flight


def test_bad_number_of_passes():
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        wrap(net(), alone(), backward_passes_per_step=0)


# --- zero_grad -------------------------------------------------------------------------------------

ZEROS = {
    "own": lambda model, optimizer: optimizer.zero_grad(),
    "none": lambda model, optimizer: optimizer.zero_grad(set_to_none=True),
    "zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "inner": lambda model, optimizer: optimizer.inner.zero_grad(),
}


@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("compression", [Dense, lambda: dgc(0.2)], ids=["dense", "dgc"])
def test_every_way_to_zero_gradients(zero, compression):
    def train(how):
        def body(model, transport):
            optimizer = wrap(model, transport, dgc_sgd, compression=compression(), bucket_mb=2e-4)
            for step in range(4):
                how(model, optimizer)
                loss_of(model, step, transport.rank).backward()
                optimizer.step()

        return run(2, body)[0]

    assert_same(train(ZEROS[zero]), train(ZEROS["own"]), exactly=True)


@pytest.mark.parametrize("keep", [True, False])
def test_own_zero_grad_clears_frozen_ones_and_keeps_views_if_asked(keep):
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


def test_zero_grad_in_flight():
    model = net()
    optimizer = wrap(model, alone())
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


# --- parameters of all kinds -----------------------------------------------------------------------


@pytest.mark.parametrize("zero", ["own", "model"])
def test_a_parameter_that_one_rank_does_not_use(zero):
    def body(model, transport):
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


def test_a_parameter_that_nobody_uses_stays():
    def body(model, transport):
        optimizer = wrap(model, transport)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, transport.rank, spare=False).backward()
            optimizer.step()

    (model, _) = run(2, body)
    assert torch.equal(model.spare.weight, net().spare.weight)
    assert not torch.equal(model.first.weight, net().first.weight)


def test_frozen_parameters_take_no_part():
    def body(model, transport):
        model.first.requires_grad_(False)
        optimizer = wrap(model, transport)
        names = [s.name for plan in optimizer.exchange.planned for s in plan.bucket.segments]
        assert names == ["last.bias", "last.weight", "spare.bias", "spare.weight"]
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, transport.rank).backward()
            optimizer.step()

    (model, _) = run(2, body)
    assert torch.equal(model.first.weight, net().first.weight)
    assert not torch.equal(model.last.weight, net().last.weight)


def test_a_parameter_that_thaws_after_wrapping_is_refused_until_wrapped_again():
    model = net()
    model.first.requires_grad_(False)
    world = LockstepWorld(1)
    optimizer = wrap(model, world.transports[0])
    model.first.requires_grad_(True)
    loss_of(model, 0).backward()
    with pytest.raises(ValueError, match="needs a gradient now"):
        optimizer.step()
    optimizer.close()
    optimizer = wrap(model, world.transports[0])
    loss_of(model, 1).backward()
    optimizer.step()
    assert not torch.equal(model.first.weight, net().first.weight)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6, bias=False)
        self.b.weight = self.a.weight
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.b(torch.tanh(self.a(x))))


@pytest.mark.parametrize("duplicates", [False, True])
def test_tied_parameters(duplicates):
    torch.manual_seed(0)
    reference = Tied()
    models = [copy.deepcopy(reference) for _ in range(2)]

    def body(model, transport):
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


def two_groups(model):
    return torch.optim.SGD(
        [
            {"params": list(model.last.parameters()), "lr": 0.5},
            {"params": [*model.first.parameters(), *model.spare.parameters()], "weight_decay": 0.1},
        ],
        lr=0.05,
        momentum=0.9,
    )


def test_groups_and_a_scheduler():
    def train(model, optimizer, loss):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        for step in range(5):
            optimizer.zero_grad()
            loss(step).backward()
            optimizer.step()
            scheduler.step()
        return [group["lr"] for group in optimizer.param_groups]

    def body(model, transport):
        optimizer = wrap(model, transport, two_groups)
        rates = train(model, optimizer, lambda step: loss_of(model, step, transport.rank))
        assert rates == pytest.approx([0.005, 0.0005])

    reference = net()
    train(reference, two_groups(reference), lambda step: joint_loss(reference, step, 2))
    assert_same(run(2, body)[0], reference)


def test_a_scheduler_of_the_inner_optimizer():
    model = net()
    inner = momentum_sgd(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda epoch: 0.5**epoch)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), transport=alone())
    loss_of(model, 0).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_closures():
    def body(model, transport):
        optimizer = wrap(model, transport)

        def closure():
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


def test_clipping_after_synchronize():
    def body(model, transport):
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


def test_step_after_synchronize_warns():
    model = net()
    optimizer = wrap(model, alone())
    loss_of(model, 0).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    loss_of(model, 1).backward()
    optimizer.step()


@pytest.mark.parametrize("zero", ["own", "model"])
def test_a_step_that_was_left_out_after_synchronize(zero):
    """As a loss scaler leaves it out on overflow: the next step exchanges again, without a warning."""

    def body(model, transport):
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


def test_sparse_embedding_gradients():
    torch.manual_seed(0)
    reference = nn.EmbeddingBag(20, 4, sparse=True)
    models = [copy.deepcopy(reference) for _ in range(2)]
    words = [torch.tensor([[1, 2], [3, 3]]), torch.tensor([[2, 5], [19, 0]])]

    def body(model, transport):
        optimizer = wrap(model, transport, lambda m: torch.optim.SGD(m.parameters(), lr=0.5))
        for _ in range(2):
            optimizer.zero_grad()
            model(words[transport.rank]).square().sum().backward()
            optimizer.step()

    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        (sum(reference(w).square().sum() for w in words) / 2).backward()
        optimizer.step()
    assert_same(run(2, body, models)[0], reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("compression", [Dense, BF16, lambda: dgc(0.2)], ids=["dense", "bf16", "dgc"])
def test_parameters_of_other_precision(dtype, compression):
    models = [net().to(dtype) for _ in range(2)]
    losses = []

    def body(model, transport):
        optimizer = wrap(model, transport, dgc_sgd, compression=compression())
        x, y = (t.to(dtype) for t in data(0, transport.rank))
        for _ in range(15):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    run(2, body, models)
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


def test_channels_last():
    def build():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 2))
        return model.to(memory_format=torch.channels_last)

    def images(rank):
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(rank))
        return x.to(memory_format=torch.channels_last)

    results = []
    for compression in (Dense, lambda: dgc(1.0), lambda: dgc(0.1)):
        models = [build() for _ in range(2)]

        def body(model, transport, compression=compression):
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


def test_create_graph():
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


# --- what is refused -------------------------------------------------------------------------------


def test_parameters_without_a_name():
    model = net()
    with pytest.raises(ValueError, match="lacks 2 parameters"):
        DistributedOptimizer(momentum_sgd(model), list(model.named_parameters())[:-2], transport=alone())


def test_two_parameters_of_one_name():
    model = net()
    named = [("same" if "bias" in name else name, p) for name, p in model.named_parameters()]
    with pytest.raises(ValueError, match="same"):
        DistributedOptimizer(momentum_sgd(model), named, transport=alone())


def test_no_names_at_all():
    model = net()
    optimizer = DistributedOptimizer(momentum_sgd(model), transport=alone())
    loss_of(model, 0).backward()
    optimizer.step()


@pytest.mark.parametrize("odd", ["shape", "name", "count", "compressor"])
def test_different_models_name_the_rank(odd):
    def body(transport):
        width = 5 if odd == "shape" and transport.rank == 1 else 4
        model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
        if odd == "count" and transport.rank == 1:
            model = nn.Sequential(*model, nn.Linear(2, 2))
        rename = "x" if odd == "name" and transport.rank == 1 else ""
        compression = BF16() if odd == "compressor" and transport.rank == 1 else Dense()
        named = [(rename + name, p) for name, p in model.named_parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        DistributedOptimizer(optimizer, named, compression, transport=transport)

    with pytest.raises(ValueError, match="rank [01] and rank [01] train different models"):
        LockstepWorld(2).run(body)


REFUSED = {
    "sgd with momentum": (momentum_sgd, lambda: dgc(), "DGCSGD"),
    "adam": (lambda m: torch.optim.Adam(m.parameters()), lambda: dgc(), "Adam"),
    "momentum": (dgc_sgd, lambda: dgc(momentum=0.8), "momentum=0.8"),
    "nesterov": (dgc_sgd, lambda: dgc(nesterov=True), "nesterov=True"),
    "nesterov of the optimizer": (lambda m: dgc_sgd(m, nesterov=True), lambda: dgc(), "nesterov=True"),
    "dampening": (lambda m: dgc_sgd(m, dampening=0.1), lambda: dgc(), "dampening"),
    "no momentum": (lambda m: DGCSGD(m.parameters(), lr=0.1), lambda: dgc(), "momentum=0.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_momentum_has_one_owner(case):
    make, compression, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        wrap(net(), alone(), make, compression=compression())


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"weight_decay": 0.1}], ids=str)
def test_parameters_that_travel_dense_get_momentum_once(options):
    """Beside compressed ones, with gradients that do not depend on these."""

    def body(model, transport):
        compression = dgc(0.05, nesterov=options.get("nesterov", False))
        optimizer = wrap(model, transport, lambda m: dgc_sgd(m, **options), compression=compression)
        for step in range(5):
            optimizer.zero_grad()
            sum((p * (step + transport.rank)).sum() for p in model.parameters()).backward()
            optimizer.step()

    reference = net()
    optimizer = momentum_sgd(reference, **options)
    for step in range(5):
        optimizer.zero_grad()
        sum((p * (step + 0.5)).sum() for p in reference.parameters()).backward()
        optimizer.step()
    (model, _) = run(2, body)
    for name, p in model.named_parameters():
        alike = torch.allclose(p, reference.get_parameter(name), rtol=1e-5, atol=1e-6)
        assert alike == (p.dim() == 1), name


def test_momentum_that_a_scheduler_cycles_has_two_owners():
    model = net()
    optimizer = wrap(model, alone(), dgc_sgd, compression=dgc())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, cycle_momentum=False)
    loss_of(model, 0).backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.param_groups[0]["momentum"] = 0.85
    with pytest.raises(ValueError, match="momentum of group 0 was 0.9.*now 0.85.*cycle_momentum=False"):
        optimizer.step()


@pytest.mark.parametrize("make", [momentum_sgd, lambda m: torch.optim.Adam(m.parameters())])
def test_a_memory_without_momentum_goes_with_any_optimizer(make):
    model = net()
    optimizer = wrap(model, alone(), make, compression=DGCCompressor(0.1, ResidualMemory()))
    loss_of(model, 0).backward()
    optimizer.step()


def test_sgd_without_momentum_warns_of_dense_parameters():
    with pytest.warns(UserWarning, match="travel dense"):
        wrap(net(), alone(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), compression=dgc())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"op": "adasum"}, "op must be"),
        ({"op": 2}, "op must be"),
        ({"bucket_mb": 0.0}, "bucket_mb"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ValueError, match=words):
        wrap(net(), alone(), **options)


@pytest.mark.parametrize(("op", "scale"), [(0, 1), (1, 2), ("Average", 1), ("SUM", 2), ("mean", 1)])
def test_horovods_constants(op, scale):
    def body(model, transport):
        optimizer = wrap(model, transport, op=op)
        loss_of(model, 0, transport.rank).backward()
        optimizer.synchronize()
        model.seen = model.first.weight.grad.clone()

    (model, _) = run(2, body)
    reference = net()
    (scale * joint_loss(reference, 0, 2)).backward()
    torch.testing.assert_close(model.seen, reference.first.weight.grad)


def test_groups_are_told_to_have_no_effect():
    with pytest.warns(UserWarning, match="bucket_mb"):
        wrap(net(), alone(), num_groups=2)


def test_no_new_groups():
    with pytest.raises(ValueError, match=r"cannot be added here: close\(\)"):
        wrap(net(), alone()).add_param_group({"params": [nn.Parameter(torch.ones(1))]})


# --- state -----------------------------------------------------------------------------------------


def test_begin_epoch_returns_the_ratio_in_force():
    optimizer = wrap(net(), alone(), dgc_sgd, compression=dgc(0.001, warmup_epochs=5))
    seen = [optimizer.begin_epoch(epoch) for epoch in (0, 1, 4, 9)]
    assert seen == pytest.approx([0.001**0.2, 0.001**0.4, 0.001, 0.001])
    assert optimizer.compress_ratio == seen[-1]
    assert wrap(net(), alone()).begin_epoch(0) == 1.0


def test_error_norm():
    model = net()
    assert wrap(model, alone()).error_norm() == 0.0
    model = net()
    optimizer = wrap(model, alone(), dgc_sgd, compression=dgc(0.1))
    loss_of(model, 0).backward()
    optimizer.step()
    velocities = optimizer.compression_state_dict()
    (state,) = (s for s in velocities.values() if s)
    squares = sum(float(v.double().square().sum()) for v in state["memory"]["velocities"].values())
    assert optimizer.error_norm() == pytest.approx(squares**0.5) and squares > 0


@pytest.mark.parametrize("other_bucket_mb", [25.0, 2e-4, 1e-5])
def test_saved_runs_continue_bit_by_bit(other_bucket_mb, tmp_path):
    """Also into other buckets: exact selection looks at each tensor alone."""

    def advance(model, optimizer, transport, steps):
        optimizer.begin_epoch(1)
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, step, transport.rank).backward()
            optimizer.step()

    def build(model, transport, bucket_mb):
        compression = dgc(0.1, sample_ratio=1, warmup_epochs=1)
        return wrap(model, transport, dgc_sgd, compression=compression, bucket_mb=bucket_mb)

    def save(model, transport):
        optimizer = build(model, transport, 25.0)
        advance(model, optimizer, transport, range(4))
        saved = model.state_dict(), optimizer.state_dict(), optimizer.compression_state_dict()
        torch.save(saved, tmp_path / f"{transport.rank}.pt")
        advance(model, optimizer, transport, range(4, 8))

    def resume(model, transport):
        optimizer = build(model, transport, other_bucket_mb)
        saved = torch.load(tmp_path / f"{transport.rank}.pt", weights_only=True)
        for owner, state in zip((model, optimizer), saved[:2], strict=True):
            owner.load_state_dict(state)
        optimizer.load_compression_state_dict(saved[2])
        advance(model, optimizer, transport, range(4, 8))

    assert_same(run(2, save)[0], run(2, resume, [net(seed) for seed in (1, 2)])[0], exactly=True)


def test_compression_state_of_another_run():
    dense, sparse = wrap(net(), alone()), wrap(net(), alone(), dgc_sgd, compression=dgc())
    with pytest.raises(ValueError, match="other compressors"):
        sparse.load_compression_state_dict(dense.compression_state_dict())


def horovods_broadcast_optimizer_state(optimizer):
    """What hvd.broadcast_optimizer_state does to an optimizer without state."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad:
                p.grad = p.data.new(p.size()).zero_()
    optimizer.step()


def test_making_state_on_zeros_moves_no_weight():
    def body(model, transport):
        compression = dgc(0.1)
        optimizer = wrap(model, transport, lambda m: dgc_sgd(m, weight_decay=0.1), compression=compression)
        if transport.rank == 0:  # nobody else steps: nothing may be exchanged
            horovods_broadcast_optimizer_state(optimizer)
        assert_same(model, net(), exactly=True)
        loss_of(model, 0, transport.rank).backward()
        optimizer.step()

    (model, _) = run(2, body)
    assert not torch.equal(model.first.weight, net().first.weight)


def test_broadcast_optimizer_state():
    models = [net(seed) for seed in range(3)]

    def body(transport):
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
def test_broadcast_parameters(root):
    def build(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)
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


def test_broadcast_named_parameters():
    models = [net(seed) for seed in range(2)]
    LockstepWorld(2).run(lambda t: broadcast_parameters(models[t.rank].named_parameters(), transport=t))
    assert_same(models[1], net(0), exactly=True)


# --- routes, several optimizers, Horovod's compressions --------------------------------------------


def test_a_route_of_compressors():
    def body(model, transport):
        route = Route([Rule(BF16(), name="last.*"), Rule(dgc(0.1), min_dim=2), Rule(Dense())])
        optimizer = wrap(model, transport, dgc_sgd, compression=route)
        kinds = {s.name: type(p.compressor) for p in optimizer.exchange.planned for s in p.bucket.segments}
        assert kinds == {
            "first.weight": DGCCompressor,
            "spare.weight": DGCCompressor,
            "first.bias": Dense,
            "spare.bias": Dense,
            "last.weight": BF16,
            "last.bias": BF16,
        }
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, transport.rank).backward()
            optimizer.step()

    run(2, body)


def test_two_optimizers_on_one_transport():
    def body(model, transport):
        def part(module, prefix):
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
    def compress(tensor):
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx)


def test_a_horovod_compression():
    def body(model, transport):
        optimizer = wrap(model, transport, compression=HalfLike)
        loss_of(model, 0, transport.rank).backward()
        optimizer.step()

    reference = net()
    joint_loss(reference, 0, 2).backward()
    momentum_sgd(reference).step()
    (model, _) = run(2, body)
    torch.testing.assert_close(values(model), values(reference), rtol=1e-3, atol=1e-3)


def test_dgc_learns():
    """A quadratic, on which two ranks pull apart."""

    def train(compression):
        models = [nn.Linear(20, 10, bias=False) for _ in range(2)]
        target = torch.randn(10, 20, generator=torch.Generator().manual_seed(9))

        def body(model, transport):
            nn.init.zeros_(model.weight)
            make = lambda m: DGCSGD(m.parameters(), lr=0.05, momentum=0.5)  # noqa: E731
            optimizer = wrap(model, transport, make, compression=compression())
            for _ in range(100):
                optimizer.zero_grad()
                ((model.weight - target * (1 + transport.rank)).square().sum() / 2).backward()
                optimizer.step()

        run(2, body, models)
        return (models[0].weight.detach() - 1.5 * target).norm() / target.norm()

    assert train(Dense) < 1e-2
    assert train(lambda: dgc(0.1, momentum=0.5)) < 0.1
