"""The arithmetic of the library's optimizers inside torch.autocast: the same bits as outside of it."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from optim import nets
from torch.overrides import TorchFunctionMode

from dgc import compression as methods
from dgc.comm.lockstep import LockstepWorld
from dgc.contrib import ZeroOneAdam, ZeroOneSteps
from dgc.gossip import SGP
from dgc.local import Nesterov, OuterSteps, SlowMo
from dgc.optim import DGCSGD, DGCAdam, LocalOptimizer, MuonWithAdamW, OneBitAdam, muon_groups

pytestmark = pytest.mark.usefixtures("no_type_checks")
Make = Callable[[Any, Any], Any]


def wrapped(inner: Callable[[Any], Any], compression: Any) -> Make:
    return lambda model, transport: nets.wrap(model, transport, inner, compression=compression())


def muon(model: Any, **options: Any) -> Any:
    return MuonWithAdamW(muon_groups(model, ["last.*"], {"spare*": 2}), lr=0.01, **options)


def adam(kind: Any) -> Callable[[Any], Any]:
    return lambda model: kind(model.parameters(), lr=0.01, weight_decay=0.1, freeze_step=2)


def sgd(model: Any) -> Any:
    return DGCSGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def local(inner: Callable[[Any], Any], method: Callable[[], Any]) -> Make:
    return lambda model, transport: LocalOptimizer(
        inner(model), model.named_parameters(), method(), transport=transport
    )


MAKERS: dict[str, Make] = {
    "DGCSGD": wrapped(sgd, nets.dgc),
    "OneBitAdam": wrapped(adam(OneBitAdam), methods.OneBitAdamCompressor),
    "DGCAdam": wrapped(adam(DGCAdam), partial(methods.DGCAdamCompressor, 0.1)),
    "ZeroOneAdam": local(
        lambda model: ZeroOneAdam(model.parameters(), lr=0.01), partial(ZeroOneSteps, var_freeze_step=2)
    ),
    "SlowMo": local(nets.momentum_sgd, lambda: OuterSteps(2, base=SGP(), outer=SlowMo())),
    "Nesterov": local(nets.momentum_sgd, lambda: OuterSteps(2, outer=Nesterov())),
}
if hasattr(torch.optim, "Muon"):
    for precision in ("bf16", "fp32"):
        MAKERS[f"Muon, {precision}"] = wrapped(partial(muon, ns_precision=precision), methods.DenseCompressor)
    MAKERS["Muon, local"] = local(partial(muon, ns_precision="fp32"), lambda: OuterSteps(2, outer=Nesterov()))


def weights(make: Make, inside: bool) -> list[Any]:
    """Those of both ranks."""

    def body(transport: Any) -> list[Any]:
        model = nets.net()
        optimizer = make(model, transport)
        for step in range(5):
            optimizer.zero_grad()
            nets.loss_of(model, step, transport.rank).backward()
            with torch.autocast("cpu", torch.bfloat16) if inside else nullcontext():
                optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    return [p for of_rank in LockstepWorld(2).run(body) for p in of_rank]


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_inside_autocast_has_the_bits_of_one_outside(name: str) -> None:
    assert nets.same(weights(MAKERS[name], inside=True), weights(MAKERS[name], inside=False))


class Watch(TorchFunctionMode):
    """Notes the functions of torch that are called with autocast on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_autocast_enabled("cpu") and getattr(func, "__name__", "").rstrip("_") in ARITHMETIC:
            self.seen.add(func.__name__)
        return func(*args, **(kwargs or {}))


ARITHMETIC = {"add", "addcdiv", "addcmul", "addmm", "lerp", "matmul", "mul", "norm", "sqrt", "sub", "sum"}
ALONE: dict[str, Callable[[Any], Any]] = {"DGCSGD": sgd, "OneBitAdam": adam(OneBitAdam), "DGCAdam": adam(DGCAdam)}
if hasattr(torch.optim, "Muon"):
    ALONE["Muon"] = partial(muon, ns_precision="fp32")


@pytest.mark.parametrize("name", ALONE)
def test_no_arithmetic_of_an_optimizer_runs_with_autocast_on(name: str) -> None:
    """A GPU's list of operations that autocast converts has more of them than a CPU's."""
    model = nets.net()
    optimizer = ALONE[name](model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with torch.autocast("cpu", torch.bfloat16), Watch() as watch:
        optimizer.step()
    assert watch.seen == set()


@pytest.mark.parametrize("name", ALONE)
def test_the_closure_of_a_step_inside_autocast_runs_with_autocast_on(name: str) -> None:
    model = nets.net()

    def closure() -> Any:
        assert model(torch.ones(2, 6)).dtype is torch.bfloat16
        return 1.0

    with torch.autocast("cpu", torch.bfloat16):
        assert ALONE[name](model).step(closure) == 1.0
