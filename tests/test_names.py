"""The names of dgc, the versions of torch that its adapters refuse, and arguments of a wrong type."""

import ast
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from optim.nets import alone
from refusals import refuse
from torch import nn
from torch.optim import SGD

import dgc
import dgc.fsdp
import dgc.optim
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DGCCompressor, PowerSGDCompressor, QSGDCompressor, Route, Rule
from dgc.contrib import CHOCO, TopK, ZeroOneAdam
from dgc.gossip import OSGP, SGP, FlatModel, from_weights, grid, ring
from dgc.local import Nesterov, OuterSteps
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import DistributedOptimizer, LocalOptimizer, redistribute
from dgc.sparse.payloads import SparseFormat
from dgc.sparse.selectors import Sampled
from dgc.versions import TorchRange

pytestmark = pytest.mark.usefixtures("no_type_checks")
WRONG_STATES: tuple[Any, ...] = (None, 3, "text", [1], torch.ones(2))
WRONG: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    *((PowerSGDCompressor, {"rank": rank}) for rank in ("4", math.nan)),
    *((QSGDCompressor, wrong) for wrong in ({"error_feedback": "no"}, {"block": 512.5})),
    *((Rule, {"compressor": QSGDCompressor}), (Route, {"rules": [QSGDCompressor()]})),
    *((DGCSGDMemory, {"nesterov": "no"}), (Sampled, {"sample_ratio": "0.1"}), (SparseFormat, {"values": "fp16"})),
    *((OSGP, {"synch_freq": 2.5}), (CHOCO, {"average_every": 2.5}), (TopK, {"ratio": math.nan})),
    *((SGP, wrong) for wrong in ({"message": "fp16"}, {"graph": "ring"})),
    *((FlatModel, {"named_parameters": None}), (ZeroOneAdam, {"lr": "x", "params": []})),
    *((from_weights, {"matrices": torch.eye(2)}), (ring, {"size": 4.0}), (grid, {"size": True})),
]
WITHOUT_FSDP2 = """
import os, torch, dgc, dgc.ddp
from torch.distributed import fsdp
for change in (
    lambda: fsdp.__dict__.pop("FSDPModule"),
    lambda: delattr(fsdp.FSDPModule, "_get_fsdp_state"),
    lambda: fsdp._fully_shard._fsdp_common.__dict__.pop("DDPMeshInfo"),
    lambda: setattr(torch, "__version__", "2.9.1+cpu"),
):
    if os.fork() == 0:  # torch is imported once for all of them
        change()
        try:
            import dgc.fsdp
        except ImportError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize("name", dgc._PACKAGE_OF)
def test_a_name_is_that_of_its_package(name: str) -> None:
    assert getattr(dgc, name) is getattr(sys.modules[dgc._PACKAGE_OF[name]], name) and name in dir(dgc)


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'dgc' has no attribute 'DGCCompresor'"):
        _ = dgc.DGCCompresor


def test_type_checkers_see_the_same_names() -> None:
    assert 20 <= len(dgc._PACKAGE_OF) <= 30
    (block,) = (node for node in ast.parse(Path(dgc.__file__).read_text()).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert seen == {**dgc._PACKAGE_OF, "Transport": "dgc.comm.transport"}


def test_the_package_loads_nothing_until_a_name_is_used() -> None:
    """And no name loads what only some programs use and is slow to import."""
    code = """
import sys, dgc
print(sorted(m for m in sys.modules if m.startswith('dgc.') or m == 'torch'))
assert all(getattr(dgc, name) for name in dgc._PACKAGE_OF)
print(sorted({'horovod', 'mpi4py', 'scipy', 'torch._dynamo'} & {*sys.modules}))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split("\n") == ["[]", "[]", ""]


def test_a_star_import_has_the_names_of_the_list_alone() -> None:
    found: dict[str, Any] = {}
    exec("from dgc import *", found)
    del found["__builtins__"]
    assert found == {name: getattr(dgc, name) for name in [*dgc._PACKAGE_OF, "init"]}


@pytest.mark.skipif(torch.__version__ < "2.13", reason="the changes are made to a torch that has FSDP2")
def test_the_import_refuses_fsdp_alone() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_FSDP2], capture_output=True, text=True)
    refusal = "dgc.fsdp works with torch 2.13 to 2.15, and not with torch 2."
    assert [line.startswith(refusal) for line in done.stdout.splitlines()] == [True] * 4, done


def test_a_version_is_older_by_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    supported = TorchRange("ddp", "2.4", "2.15")
    for version in ("2.4.0a0+git", "2.10.1", "2.16.0+cpu", "3.0"):
        monkeypatch.setattr(torch, "__version__", version)
        supported.check_version()
    monkeypatch.setattr(torch, "__version__", "2.3.1")
    with pytest.raises(ImportError, match="dgc.ddp works with torch 2.4 to 2.15, and not with torch 2.3.1"):
        supported.check_version()
    with pytest.raises(ImportError, match=", whose object has no absent"):
        supported.check(object(), ["__class__", "absent"])


def wrapped(**options: Any) -> DistributedOptimizer:

    model = nn.Linear(4, 4)
    given = {"transport": alone(), "compression": DGCCompressor(0.1, ResidualMemory(), warmup_epochs=3), **options}
    named = given.pop("named_parameters", model.named_parameters())
    return DistributedOptimizer(given.pop("optimizer", SGD(model.parameters(), lr=0.1)), named, **given)


def local(method: Any, transport: Any = None) -> LocalOptimizer:
    model = nn.Linear(4, 4)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)  # equal on all ranks
    inner = SGD(model.parameters(), lr=0.1)
    return LocalOptimizer(inner, model.named_parameters(), method, transport=transport or alone())


def damaged(state: Any, value: Any, key: str, *rest: str) -> Any:
    return {**state, key: damaged(state[key], value, *rest) if rest else value}


@pytest.mark.parametrize(("make", "arguments"), WRONG)
def test_an_argument_of_a_wrong_type_is_named(make: Any, arguments: dict[str, Any]) -> None:
    refuse(rf"^{next(iter(arguments))} must .*not ", make, **arguments)


OPTIMIZERS = pytest.mark.parametrize("make", [lambda: wrapped(), lambda: local(SGP())], ids=["wrapped", "local"])


@OPTIMIZERS
@pytest.mark.parametrize("state", [None, [], {}])
def test_a_state_of_a_wrong_type_is_named(make: Any, state: Any) -> None:
    refuse("^state_dict must be what state_dict", make().load_state_dict, state)


@OPTIMIZERS
def test_a_closure_of_a_wrong_type_is_named(make: Any) -> None:
    refuse("^closure must be a function, not 3", make().step, 3)


WRONG_OPTIONS: list[tuple[str, Any]] = [
    *(("backward_passes_per_step", value) for value in (2.5, math.inf)),
    *(("grad_scaler", value) for value in (1.0, torch.amp.GradScaler)),
    *(("transport", 0), ("optimizer", "sgd"), ("named_parameters", 3)),
]


@pytest.mark.parametrize(("name", "value"), WRONG_OPTIONS)
def test_an_option_of_a_wrong_type_is_named(name: str, value: Any) -> None:
    refuse(f"^{name} must .*not ", wrapped, **{name: value})


@pytest.mark.parametrize("epoch", [math.nan, -1, 2.5, True, None])
def test_an_epoch_that_is_no_whole_number_is_named(epoch: Any) -> None:
    refuse("^epoch must be a whole number of at least 0, not ", wrapped().begin_epoch, epoch)


def test_what_is_no_state_is_refused() -> None:
    optimizer, dense = wrapped(), wrapped(compression=None)
    saved, identity = optimizer.compression_state_dict(), dense.compression_state_dict()["identity"]
    load, whole = optimizer.load_compression_state_dict, "^state must be what compression_state_dict"
    for value in WRONG_STATES:
        refuse(whole, redistribute, [saved, value], 1)
        if not isinstance(value, list | torch.Tensor):
            refuse(whole, load, value)
    name = next(name for name in saved if name != "identity")
    refuse("steps", load, damaged(saved, {"weight": None, "bias": 1}, name, "steps"))
    settings = (("settings", value) for value in ([1], {"a": torch.ones(2)}))
    for key, value in (("step", "two"), ("step", 10**30), ("rank", None), *settings):
        refuse("^identity of the state is damaged", load, damaged(saved, value, "identity", key))
    other = {"identity": identity, "weight": torch.ones(2)}
    refuse("^state of other compressors: it has", dense.load_compression_state_dict, other)


def refuse_damaged(optimizer: Any, message: str, value: Any, *path: str) -> None:
    state = optimizer.compression_state_dict()
    method = next(name for name in state if name.endswith(".0"))
    refuse(message, optimizer.load_compression_state_dict, damaged(state, value, method, *path))


def test_damaged_states_of_methods_are_named() -> None:
    def on_rank(transport: Any) -> None:
        choco = local(CHOCO(), transport)
        refuse_damaged(choco, "^graph must be a whole number of 0 or more, not", torch.ones(2), "graph")
        refuse_damaged(choco, "^copies_valid must be True or False, not", torch.ones(2), "copies_valid")

    LockstepWorld(2).run(on_rank)
    message = "^history of weight: ratio must be a number, not"
    refuse_damaged(wrapped(), message, {"ratio": torch.ones(2)}, "history", "weight")
    outer = local(OuterSteps(2, outer=Nesterov()))
    buffer = {name: {"momentum_buffer": "text"} for name in ("weight", "bias")}
    refuse_damaged(
        outer, "^outer momentum_buffer of weight must be a number, a tensor or None, not 'text'", buffer, "outer"
    )
    refuse_damaged(outer, "^outer state of weight must be a mapping, not 3", {"weight": 3, "bias": {}}, "outer")
    refuse_damaged(outer, "^dropped must be a whole number", None, "dropped")
    for key in ("z0", "outer", "compression"):
        refuse_damaged(outer, f"^{key} must be a mapping, not ", [], key)


def places(state: Any) -> Iterator[list[str]]:
    for key, part in state.items():
        if isinstance(part, dict) and key != "identity":
            yield from ([key], *([key, *place] for place in places(part)))
    # what must be a mapping, in any place of a state
    power = PowerSGDCompressor(1, min_compression_rate=0)
    for compression in (DGCCompressor(0.1, ResidualMemory()), power, QSGDCompressor()):
        optimizer = wrapped(compression=compression)
        state = optimizer.compression_state_dict()
        for place, value in product(places(state), WRONG_STATES):
            message = rf"{place[-1]}|memory|must be a mapping|another memory"
            refuse(message, optimizer.load_compression_state_dict, damaged(state, value, *place))


BEGIN = "^the state of the optimizer is damaged, .* refuses it with"
DAMAGES: list[tuple[str, dict[str, Any]]] = [
    ("^state of the optimizer's state must have a mapping for each parameter", {"state": {0: None}}),
    ("^param_groups of the optimizer's state must be a list of mappings", {"param_groups": None}),
    (f"{BEGIN} KeyError", {"state": {0: {"a": 1}}}),
    (f"{BEGIN} ValueError", {"param_groups": []}),
]


@pytest.mark.parametrize(("message", "damage"), DAMAGES)
def test_a_damaged_state_of_the_wrapped_optimizer_is_named(message: str, damage: dict[str, Any]) -> None:
    model = nn.Linear(4, 4)
    adam = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    adam.step()
    state, gossip = adam.state_dict(), LocalOptimizer(adam, model.named_parameters(), SGP(), transport=alone())
    whole = gossip.compression_state_dict()
    refuse(message, gossip.load_state_dict, {**state, **damage})
    refuse(message, gossip.load_compression_state_dict, {**whole, "optimizer": {**state, **damage}})


NO_ALGORITHMS: dict[str, Any] = {
    "method must be an algorithm": lambda: SGP,
    "graph must return a Topology": lambda: SGP(graph=lambda size: None),  # type: ignore[arg-type,return-value]
    "mixing must return a share": lambda: SGP(mixing=lambda *_: None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("message", NO_ALGORITHMS)
def test_gossip_without_an_algorithm_a_topology_or_shares_is_refused(message: str) -> None:
    refuse(message, LockstepWorld(2).run, lambda transport: local(NO_ALGORITHMS[message](), transport))
