"""What DistributedOptimizer refuses or warns about, and that momentum is applied once."""

from functools import partial
from typing import Any

import pytest
import torch
from cases import case
from optim.nets import alone, dgc, dgc_sgd, momentum_sgd, net, train, trained, values, wrap
from refusals import check_refusals
from torch import nn

from dgc.bucket import make_bucket
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.requests import AllReduce
from dgc.compression import DenseCompressor, DenseResult, DGCCompressor, Route, Rule
from dgc.compression.protocol import StatelessCompressor
from dgc.engine.options import as_route
from dgc.memory import DGCSGDMemory, MomentumCorrection, ResidualMemory
from dgc.optim import DGCSGD, DistributedOptimizer


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters())


@pytest.mark.usefixtures("no_type_checks")
def test_wrong_named_parameters() -> None:
    model = net()
    named = list(model.named_parameters())
    pairs = r"pairs of a name and a tensor.*model.named_parameters\(\)"
    wrong: list[tuple[Any, str]] = [
        (named[:-2], "lacks 2 parameters"),
        ([("same" if "bias" in name else name, p) for name, p in named], "same"),
        (model.parameters(), pairs),
        (list(model.state_dict()), pairs),
        ([("a", 1.0)], pairs),
        ([(p, name) for name, p in named], pairs),
    ]
    for given, words in wrong:
        # pairs are checked before anything is started
        with case(words), pytest.raises(ValueError, match=words):
            DistributedOptimizer(momentum_sgd(model), given, transport=None if words == pairs else alone())
    train(model, DistributedOptimizer(momentum_sgd(model), transport=alone()), [0])  # names may be left out


@pytest.mark.parametrize("odd", ["shape", "name", "count"])
def test_different_models_name_the_rank(odd: Any) -> None:
    def body(transport: Any) -> None:
        width = 5 if odd == "shape" and transport.rank == 1 else 4
        model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
        if odd == "count" and transport.rank == 1:
            model = nn.Sequential(*model, nn.Linear(2, 2))
        rename = "x" if odd == "name" and transport.rank == 1 else ""
        named = [(rename + name, p) for name, p in model.named_parameters()]
        DistributedOptimizer(sgd(model), named, transport=transport)

    with pytest.raises(ValueError, match="rank [01] and rank [01] train different models"):
        LockstepWorld(2).run(body)


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
        with case(words), pytest.raises(ValueError, match=words):
            trained(2, [0], compression=partial(Own, speak))
    trained(1, [0], compression=lambda: Own(DenseCompressor().reduce))  # a function that returns a generator


def test_bad_options() -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"op": "adasum"}, "op must be"),
        ({"op": 2}, "op must be"),
        ({"bucket_mb": 0.0}, "bucket_mb"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"nonfinite": "zero"}, "nonfinite must be 'skip' or 'raise', not 'zero'"),
    ]
    check_refusals(*((partial(wrap, net(), alone(), **options), words) for options, words in bad))
    with pytest.warns(UserWarning, match="bucket_mb"):
        wrap(net(), alone(), num_groups=2)
    kinds: tuple[Any, ...] = (DenseCompressor, DGCCompressor, Route)
    for kind in kinds:
        with pytest.raises(ValueError, match=rf"compression={kind.__name__} is a class: pass an instance"):
            as_route(kind)


def test_the_same_parameters_or_compressor_twice() -> None:
    transport, model = alone(), net()
    optimizer = wrap(model, transport)
    for again in (momentum_sgd, lambda m: optimizer):
        with pytest.raises(ValueError, match=r"first.weight belongs to another DistributedOptimizer.*close\(\)"):
            wrap(model, transport, again)
    optimizer.close()
    train(model, wrap(model, transport), [0])
    shared, stateless = DGCCompressor(0.1, ResidualMemory()), DenseCompressor()
    wrap(net(), alone(), compression=shared)
    with pytest.raises(ValueError, match="this DGCCompressor has the residual of another"):
        wrap(net(), alone(), compression=Route([Rule(shared)]))
    for _ in range(2):
        wrap(net(), alone(), compression=stateless)


def test_momentum_has_one_owner() -> None:
    refused: list[tuple[Any, Any, str]] = [
        (momentum_sgd, dgc(), "DGCSGD"),
        (momentum_sgd, DGCCompressor(0.1), "SGD would apply it again: use dgc.optim.DGCSGD"),
        (adam, dgc(), "Adam"),
        (dgc_sgd, dgc(momentum=0.8), "momentum=0.8"),
        (dgc_sgd, dgc(nesterov=True), "nesterov=True"),
        (
            dgc_sgd,
            DGCCompressor(0.1, DGCSGDMemory(nesterov=True)),
            "nesterov=True, the optimizer momentum=0.9, nesterov=False",
        ),
        (partial(dgc_sgd, nesterov=True), dgc(), "nesterov=True"),
        (partial(dgc_sgd, dampening=0.1), dgc(), "dampening"),
        (lambda m: DGCSGD(m.parameters(), lr=0.1), dgc(), "momentum=0.0"),
    ]
    for make, compression, words in refused:
        with case(words), pytest.raises(ValueError, match=words):
            wrap(net(), alone(), make, compression=compression)


@pytest.mark.filterwarnings("ignore:the memory applies momentum only to compressed parameters")
def test_momentum_that_a_scheduler_cycles_has_two_owners() -> None:
    """DGCSGD has the memory's. SGD has none, until the scheduler gives it some."""
    for make, before in ((dgc_sgd, 0.9), (sgd, 0)):
        model = net()
        optimizer = wrap(model, alone(), make, compression=dgc())
        train(model, optimizer, [0])
        optimizer.param_groups[0]["momentum"] = 0.85  # as OneCycleLR does
        words = f"momentum of group 0 was {before} and is now 0.85.*memory applies.*cycle_momentum=False"
        with pytest.raises(ValueError, match=words):
            train(model, optimizer, [1])


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_memory_without_a_momentum_of_its_own_takes_that_of_the_optimizer(nesterov: bool) -> None:
    def ends(memory: DGCSGDMemory | str) -> tuple[Any, DGCCompressor]:
        compression = DGCCompressor(0.1, memory)
        inner = partial(dgc_sgd, nesterov=nesterov)
        return values(trained(1, range(4), inner, lambda: compression)), compression

    taken, compression = ends("dgc")
    assert compression.correction == MomentumCorrection(0.9, nesterov)
    torch.testing.assert_close(taken, ends(DGCSGDMemory(0.9, nesterov))[0], rtol=0, atol=0)
    groups = [{"params": [p], "momentum": 0.9 - 0.1 * i} for i, p in enumerate(net().parameters())]
    with pytest.raises(ValueError, match=r"memory has momentum=0.9.*optimizer momentum=0\.[78].*must agree"):
        DistributedOptimizer(DGCSGD(groups, lr=0.1), None, DGCCompressor(0.1), transport=alone())
    with pytest.raises(ValueError, match=r"^DGCSGDMemory\(\) takes the momentum of an optimizer"):
        DGCCompressor(0.1).init(make_bucket("b", [("w", torch.zeros(4, 4))]), 1, 0)
    with pytest.warns(UserWarning, match="exchanged dense"):  # of SGD without momentum
        wrap(net(), alone(), sgd, compression=dgc())
