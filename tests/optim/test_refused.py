"""What DistributedOptimizer refuses or warns about, and that momentum is applied once."""

from typing import Any

import pytest
import torch
from optim.nets import (
    alone,
    dgc,
    dgc_sgd,
    joint_loss,
    loss_of,
    momentum_sgd,
    net,
    run,
    wrap,
)
from torch import Tensor, nn

from dgc.bucket import make_bucket
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.requests import AllReduce
from dgc.compression import DenseCompressor, DenseResult, DGCCompressor
from dgc.compression.protocol import StatelessCompressor
from dgc.memory import DGCSGDMemory, MomentumCorrection, ResidualMemory
from dgc.optim import DGCSGD, DistributedOptimizer


def test_parameters_without_a_name() -> None:
    model = net()
    with pytest.raises(ValueError, match="lacks 2 parameters"):
        DistributedOptimizer(momentum_sgd(model), list(model.named_parameters())[:-2], transport=alone())


@pytest.mark.usefixtures("no_type_checks")
def test_parameters_in_place_of_named_parameters() -> None:
    """The error is raised before anything is started and needs no transport."""
    model = net()
    for wrong in (
        model.parameters(),
        list(model.state_dict()),
        [("a", 1.0)],
        [(p, n) for n, p in [*model.named_parameters()]],
    ):
        with pytest.raises(ValueError, match=r"pairs of a name and a tensor.*model.named_parameters\(\)"):
            DistributedOptimizer(momentum_sgd(model), wrong)  # type: ignore[arg-type]


class Own(StatelessCompressor):
    """A compressor of the user. speak: its reduce."""

    def __init__(self, speak: Any) -> None:
        self.speak = speak

    def reduce(self, bucket: Any, state: Any) -> Any:
        return self.speak(bucket, state)


def no_result(bucket: Any, state: Any) -> Any:
    (mean,) = yield (AllReduce(bucket.flat),)
    bucket.flat.copy_(mean)


@pytest.mark.usefixtures("no_type_checks")
def test_a_custom_compressor_that_is_no_generator() -> None:
    for speak, words in (
        (lambda bucket, state: None, "reduce of Own must be a generator.*yields.*not NoneType"),
        (lambda bucket, state: DenseResult(), "reduce of Own must be a generator.*not DenseResult"),
        (no_result, "reduce of Own must return a Reduced, not None"),
    ):

        def body(model: Any, transport: Any, speak: Any = speak) -> None:
            optimizer = wrap(model, transport, compression=Own(speak))
            loss_of(model, 0, transport.rank).backward()
            optimizer.step()

        with pytest.raises(ValueError, match=words):
            run(2, body)
    model = net()
    # a function that returns a generator
    optimizer = wrap(model, alone(), compression=Own(DenseCompressor().reduce))
    loss_of(model, 0).backward()
    optimizer.step()


def test_two_parameters_of_one_name() -> None:
    model = net()
    named = [("same" if "bias" in name else name, p) for name, p in model.named_parameters()]
    with pytest.raises(ValueError, match="same"):
        DistributedOptimizer(momentum_sgd(model), named, transport=alone())


def test_no_names_at_all() -> None:
    model = net()
    optimizer = DistributedOptimizer(momentum_sgd(model), transport=alone())
    loss_of(model, 0).backward()
    optimizer.step()


@pytest.mark.parametrize("odd", ["shape", "name", "count"])
def test_different_models_name_the_rank(odd: Any) -> None:
    def body(transport: Any) -> None:
        width = 5 if odd == "shape" and transport.rank == 1 else 4
        model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
        if odd == "count" and transport.rank == 1:
            model = nn.Sequential(*model, nn.Linear(2, 2))
        rename = "x" if odd == "name" and transport.rank == 1 else ""
        named = [(rename + name, p) for name, p in model.named_parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        DistributedOptimizer(optimizer, named, transport=transport)

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
def test_momentum_has_one_owner(case: Any) -> None:
    make, compression, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        wrap(net(), alone(), make, compression=compression())


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"weight_decay": 0.1}], ids=str)
def test_parameters_that_travel_dense_get_momentum_once(options: Any) -> None:
    """Next to compressed parameters, with gradients that do not depend on these."""

    def body(model: Any, transport: Any) -> None:
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


@pytest.mark.filterwarnings("ignore:the memory applies momentum only to compressed parameters")
def test_momentum_that_a_scheduler_cycles_has_two_owners() -> None:
    """DGCSGD has the memory's. SGD has none, until the scheduler gives it some."""
    for make, before in ((dgc_sgd, 0.9), (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 0)):
        model = net()
        optimizer = wrap(model, alone(), make, compression=dgc())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=10, cycle_momentum=False
        )
        loss_of(model, 0).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.param_groups[0]["momentum"] = 0.85
        words = f"momentum of group 0 was {before} and is now 0.85.*memory applies.*cycle_momentum=False"
        with pytest.raises(ValueError, match=words):
            optimizer.step()


@pytest.mark.parametrize("make", [momentum_sgd, lambda m: torch.optim.Adam(m.parameters())])
def test_a_memory_without_momentum_goes_with_any_optimizer(make: Any) -> None:
    model = net()
    optimizer = wrap(model, alone(), make, compression=DGCCompressor(0.1, ResidualMemory()))
    loss_of(model, 0).backward()
    optimizer.step()


def test_sgd_without_momentum_warns_of_dense_parameters() -> None:
    with pytest.warns(UserWarning, match="exchanged dense"):
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
def test_bad_options(options: Any, words: Any) -> None:
    with pytest.raises(ValueError, match=words):
        wrap(net(), alone(), **options)


@pytest.mark.parametrize(("op", "scale"), [(0, 1), (1, 2), ("Average", 1), ("SUM", 2), ("mean", 1)])
def test_horovods_constants(op: Any, scale: Any) -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, op=op)
        loss_of(model, 0, transport.rank).backward()
        optimizer.synchronize()
        model.seen = model.first.weight.grad.clone()

    (model, _) = run(2, body)
    reference = net()
    (scale * joint_loss(reference, 0, 2)).backward()
    torch.testing.assert_close(model.seen, reference.first.weight.grad)


def test_groups_warn_that_they_have_no_effect() -> None:
    with pytest.warns(UserWarning, match="bucket_mb"):
        wrap(net(), alone(), num_groups=2)


def test_no_new_groups() -> None:
    with pytest.raises(ValueError, match=r"cannot be added here: close\(\)"):
        wrap(net(), alone()).add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_memory_without_a_momentum_of_its_own_takes_that_of_the_optimizer(nesterov: bool) -> None:
    def trained(memory: DGCSGDMemory | str) -> tuple[Tensor, DGCCompressor]:
        model, compression = net(), DGCCompressor(0.1, memory)
        inner = DGCSGD(model.parameters(), lr=0.1, momentum=0.8, nesterov=nesterov)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), compression, transport=alone())
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), compression

    taken, compression = trained("dgc")
    assert compression.correction == MomentumCorrection(0.8, nesterov)
    assert torch.equal(taken, trained(DGCSGDMemory(0.8, nesterov))[0])


def test_a_momentum_to_take_must_be_one_and_must_exist() -> None:
    model = net()
    groups = [{"params": [p], "momentum": 0.9 - 0.1 * i} for i, p in enumerate(model.parameters())]
    with pytest.raises(ValueError, match=r"memory has momentum=0.9.*optimizer momentum=0\.[78].*must agree"):
        DistributedOptimizer(DGCSGD(groups, lr=0.1), None, DGCCompressor(0.1), transport=alone())
    with pytest.raises(ValueError, match=r"nesterov=True, the optimizer momentum=0.9, nesterov=False"):
        memory = DGCSGDMemory(nesterov=True)
        DistributedOptimizer(dgc_sgd(model), None, DGCCompressor(0.1, memory), transport=alone())
    with pytest.raises(ValueError, match=r"SGD would apply it again: use dgc.optim.DGCSGD"):
        DistributedOptimizer(momentum_sgd(model), None, DGCCompressor(0.1), transport=alone())
    with pytest.raises(ValueError, match=r"^DGCSGDMemory\(\) takes the momentum of an optimizer"):
        DGCCompressor(0.1).init(make_bucket("b", [("w", torch.zeros(4, 4))]), 1, 0)
