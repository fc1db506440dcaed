"""Settings of the optimizers of this library that are out of range, at construction, in a group and in a state."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from optim import nets
from refusals import refuse

from dgc.contrib import ZeroOneAdam
from dgc.optim import DGCSGD, DGCAdam, MuonWithAdamW, OneBitAdam, muon_groups

pytestmark = pytest.mark.usefixtures("no_type_checks")


def muon(model: Any, **options: Any) -> Any:
    return MuonWithAdamW(muon_groups(model, ["last.*"]), **options)


def of_all(kind: Any, **always: Any) -> Callable[..., Any]:
    return lambda model, **options: kind(model.parameters(), **{**always, **options})


MAKERS: dict[str, Callable[..., Any]] = {
    "DGCSGD": of_all(DGCSGD),
    "OneBitAdam": of_all(OneBitAdam, freeze_step=3),
    "DGCAdam": of_all(DGCAdam, freeze_step=3),
    "ZeroOneAdam": of_all(ZeroOneAdam),
}
if hasattr(torch.optim, "Muon"):
    MAKERS["MuonWithAdamW"] = muon
ADAMS = tuple(name for name in MAKERS if name != "DGCSGD")
WRONG: list[tuple[str, Any]] = [
    *(("lr", value) for value in (-1.0, math.nan, math.inf, "0.1", None, True, torch.tensor([0.1, 0.2]))),
    *(("weight_decay", value) for value in (-1.0, math.nan, math.inf, "0.1")),
]
OF_ADAMS: list[tuple[str, Any]] = [
    *(("eps", value) for value in (-1.0, math.nan, math.inf, "1e-8")),
    *(("betas", value) for value in ((0.9, 1.0), (0.9,), ("0.9", "0.99"), (0.9, math.nan), "ab", 0.9)),
]
ROWS = [
    *((name, *wrong) for name in MAKERS for wrong in WRONG),
    *((name, *wrong) for name in ADAMS for wrong in OF_ADAMS),
    *(("DGCSGD", key, value) for key in ("momentum", "dampening") for value in (math.nan, "0.9")),
    *((name, "freeze_step", value) for name in ("OneBitAdam", "DGCAdam") for value in (0, 2.5, "3", None)),
    *((name, "floor", value) for name in ADAMS[:3] for value in (-1.0, 2.0, math.nan, "0.1")),
]


@pytest.mark.parametrize(("name", "key", "value"), ROWS)
def test_a_setting_out_of_range_is_refused_at_construction(name: str, key: str, value: Any) -> None:
    refuse(f"{key} must be", MAKERS[name], nets.net(), **{key: value})


@pytest.mark.parametrize(("name", "key", "value"), ROWS)
def test_a_setting_out_of_range_is_refused_in_a_group(name: str, key: str, value: Any) -> None:
    optimizer = MAKERS[name](nets.net())
    refuse(f"{key} must be", optimizer.add_param_group, {"params": [torch.zeros(2)], key: value})
    assert len(optimizer.param_groups) == len(MAKERS[name](nets.net()).param_groups)


def stepped(name: str) -> Any:
    """A state with moments, and another optimizer to load it."""
    optimizers = []
    for seed in (0, 1):
        model = nets.net()
        optimizer = MAKERS[name](model)
        if name == "ZeroOneAdam":
            optimizer.buffers = {p: torch.zeros_like(p) for p in model.parameters()}
            optimizer.advance(True)
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + seed)
        optimizer.step()
        optimizers.append(optimizer)
    return copy.deepcopy(optimizers[0].state_dict()), optimizers[1]


def check_refused(words: str, state: Any, optimizer: Any) -> None:
    before = copy.deepcopy(optimizer.state_dict())
    refuse(words, optimizer.load_state_dict, state)
    after = optimizer.state_dict()
    assert repr(after["param_groups"]) == repr(before["param_groups"])
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)


@pytest.mark.parametrize(("name", "key", "value"), ROWS)
def test_a_state_with_a_setting_out_of_range_is_refused_before_anything_changes(
    name: str, key: str, value: Any
) -> None:
    state, optimizer = stepped(name)
    state["param_groups"][0][key] = value
    check_refused(f"group 0 of the optimizer's state cannot be loaded: {key} must be", state, optimizer)


OF_MUON = [
    *(("ns_steps", value, "whole number|Muon needs") for value in (0, 100, 2.5, "5")),
    *(("momentum", value, "a number|Muon needs") for value in (1.0, -0.1, math.nan, "0.9")),
    *(("ns_coefficients", value, "must be three numbers") for value in ((1.0, 2.0), "abc", (1.0, 2.0, math.nan))),
    ("nesterov", "no", "must be True or False"),
    ("ns_precision", "fp16", "ns_precision must be one of"),
    ("adjust_lr_fn", "rms", "adjust_lr_fn must be one of"),
]
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9")


@needs_muon
@pytest.mark.parametrize(("key", "value", "words"), OF_MUON)
def test_a_state_with_a_setting_of_muon_out_of_range_is_refused(key: str, value: Any, words: str) -> None:
    state, optimizer = stepped("MuonWithAdamW")
    state["param_groups"][1][key] = value
    check_refused(f"group 1 of the optimizer's state cannot be loaded: .*({words})", state, optimizer)


@needs_muon
@pytest.mark.parametrize("to_muon", [False, True], ids=["momentum for AdamW", "moments for Muon"])
def test_the_state_of_a_parameter_of_the_other_optimizer_is_refused(to_muon: bool) -> None:
    state, optimizer = stepped("MuonWithAdamW")
    (of_adamw, *_), (of_muon, *_) = (group["params"] for group in state["param_groups"])
    source, target = (of_adamw, of_muon) if to_muon else (of_muon, of_adamw)
    state["state"][target] = state["state"][source]
    kind = "Muon" if to_muon else "AdamW"
    check_refused(f"parameter {target} of the state is of {kind}, which needs", state, optimizer)


@needs_muon
def test_a_learning_rate_as_tensor_has_the_bits_of_the_two_optimizers() -> None:
    model, other = nets.net(), nets.net()
    vectors = [other.first.bias, other.spare.bias, *other.last.parameters()]
    matrices = [other.first.weight, other.spare.weight]
    rate: Any = partial(torch.tensor, 0.01)
    two = [
        torch.optim.AdamW(vectors, rate(), (0.9, 0.95), weight_decay=0.1),
        torch.optim.Muon(matrices, rate() * 2.0, adjust_lr_fn="match_rms_adamw"),
    ]
    own = muon(model, lr=rate(), ns_precision="bf16")
    for step in range(3):
        for net, optimizers in ((model, [own]), (other, two)):
            net.zero_grad()
            nets.loss_of(net, step).backward()
            for optimizer in optimizers:
                optimizer.step()
                for group in optimizer.param_groups:
                    group["lr"].mul_(0.5)  # in place, as schedulers do
        nets.assert_same(model, other, exactly=True)
