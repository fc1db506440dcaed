"""Arguments of a wrong type: one error that names the argument."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DGCCompressor, PowerSGDCompressor, QSGDCompressor, Route, Rule
from dgc.gossip import CHOCO, OSGP, SGP, FlatModel, TopK, from_weights, grid, ring
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import DistributedOptimizer, GossipOptimizer
from dgc.outer import Nesterov, OuterSteps, ZeroOneAdam
from dgc.selection import Sampled
from dgc.wire import SparseFormat

pytestmark = pytest.mark.usefixtures("no_type_checks")
Make = Callable[..., Any]
NO_STATES: tuple[Any, ...] = (None, [], {})
WRONG: list[tuple[str, Make, dict[str, Any]]] = [
    ("rank", PowerSGDCompressor, {"rank": "4"}),
    ("rank", PowerSGDCompressor, {"rank": math.nan}),
    ("error_feedback", QSGDCompressor, {"error_feedback": "no"}),
    ("block", QSGDCompressor, {"block": 512.5}),
    ("compressor", Rule, {"compressor": QSGDCompressor}),
    ("rules", Route, {"rules": [QSGDCompressor()]}),
    ("nesterov", DGCSGDMemory, {"nesterov": None}),
    ("sample_ratio", Sampled, {"sample_ratio": "0.1"}),
    ("values", SparseFormat, {"values": "fp16"}),
    ("synch_freq", OSGP, {"synch_freq": 2.5}),
    ("average_every", CHOCO, {"average_every": 2.5}),
    ("message", SGP, {"message": "fp16"}),
    ("graph", SGP, {"graph": "ring"}),
    ("ratio", TopK, {"ratio": math.nan}),
    ("named_parameters", FlatModel, {"named_parameters": None}),
    ("lr", ZeroOneAdam, {"params": [], "lr": "x"}),
    ("matrices", from_weights, {"matrices": torch.eye(2)}),
    ("size", ring, {"size": 4.0}),
    ("size", grid, {"size": True}),
]


@pytest.mark.parametrize(("name", "make", "arguments"), WRONG)
def test_arguments_of_a_wrong_type_are_named(name: str, make: Make, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must .*not "):
        make(**arguments)


def wrapped(**options: Any) -> DistributedOptimizer:
    model = nn.Linear(4, 4)
    transport = options.pop("transport", LockstepWorld(1).transports[0])
    compression = DGCCompressor(0.1, ResidualMemory(), warmup_epochs=3)
    sgd = options.pop("optimizer", None) or SGD(model.parameters(), lr=0.1)
    named = options.pop("named_parameters", model.named_parameters())
    return DistributedOptimizer(sgd, named, compression, transport=transport, **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backward_passes_per_step", 2.5),
        ("backward_passes_per_step", math.inf),
        ("transport", 0),
        ("grad_scaler", 1.0),
        ("optimizer", "sgd"),
        ("named_parameters", 3),
    ],
)
def test_options_of_the_optimizer(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must .*not "):
        wrapped(**{name: value})


@pytest.mark.parametrize("epoch", [math.nan, -1, 2.5, True, None])
def test_an_epoch_is_a_whole_number(epoch: Any) -> None:
    with pytest.raises(ValueError, match="^epoch must be a whole number of at least 0, not "):
        wrapped().begin_epoch(epoch)


def test_what_is_no_state_is_refused() -> None:
    optimizer, saved = wrapped(), wrapped().compression_state_dict()
    for state in (None, 3, "state"):
        with pytest.raises(ValueError, match="^state must be what compression_state_dict"):
            optimizer.load_compression_state_dict(state)  # type: ignore[arg-type]
    name = next(name for name in saved if name != "identity")
    counted = {**saved, name: {**saved[name], "steps": {"weight": None, "bias": 1}}}
    with pytest.raises(ValueError, match="steps"):
        optimizer.load_compression_state_dict(counted)
    for damage in ({"step": "two"}, {"step": 10**30}, {"settings": [1]}, {"rank": None}):
        with pytest.raises(ValueError, match="^identity of the state is damaged"):
            optimizer.load_compression_state_dict({**saved, "identity": {**saved["identity"], **damage}})


@pytest.mark.parametrize("wrap", [wrapped, lambda: with_gossip(SGP())])
def test_what_is_no_state_of_an_optimizer_and_no_closure(wrap: Any) -> None:
    for state in NO_STATES:
        with pytest.raises(ValueError, match="^state_dict must be what state_dict"):
            wrap().load_state_dict(state)
    with pytest.raises(ValueError, match="^closure must be a function, not 3"):
        wrap().step(3)


def with_gossip(gossip: Any) -> GossipOptimizer:
    model = nn.Linear(4, 4)
    sgd = SGD(model.parameters(), lr=0.1)
    transport = LockstepWorld(1).transports[0]
    return GossipOptimizer(sgd, model.named_parameters(), gossip, transport=transport)


def test_damaged_states_of_methods_are_named() -> None:
    def refused(optimizer: Any, message: str, value: Any, *path: str) -> None:
        def damaged(state: Any, key: str, *rest: str) -> Any:
            return {**state, key: damaged(state[key], *rest) if rest else value}

        method = next(name for name in optimizer.compression_state_dict() if name.endswith(".0"))
        state = damaged(optimizer.compression_state_dict(), method, *path)
        with pytest.raises(ValueError, match=message):
            optimizer.load_compression_state_dict(state)

    def on_rank(transport: Any) -> None:
        model = nn.Linear(4, 4)
        torch.nn.init.zeros_(model.weight)
        sgd = SGD(model.parameters(), lr=0.1)
        choco = GossipOptimizer(sgd, model.named_parameters(), CHOCO(), transport=transport)
        refused(choco, "^graph must be a whole number, not", torch.ones(2), "graph")
        refused(choco, "^copies_valid must be True or False, not", torch.ones(2), "copies_valid")

    refused(wrapped(), "^ratio of the history must be a number or None, not", torch.ones(2), "history", "ratio")
    outer = with_gossip(OuterSteps(2, outer=Nesterov()))
    buffer = {name: {"momentum_buffer": "text"} for name in ("weight", "bias")}
    refused(outer, "^outer momentum_buffer of weight is text: 'text'", buffer, "outer")
    LockstepWorld(2).run(on_rank)


def test_gossip_needs_an_algorithm_a_topology_and_shares() -> None:
    def start(gossip: Any) -> None:
        def on_rank(transport: Any) -> None:
            model = nn.Linear(4, 4)
            torch.nn.init.zeros_(model.weight)
            sgd = SGD(model.parameters(), lr=0.1)
            GossipOptimizer(sgd, model.named_parameters(), gossip(), transport=transport)

        LockstepWorld(2).run(on_rank)

    for gossip, message in (
        (lambda: SGP, "gossip must be an algorithm"),
        (lambda: SGP(graph=lambda size: None), "graph must return a Topology"),  # type: ignore[arg-type,return-value]
        (lambda: SGP(mixing=lambda *_: None), "mixing must return a share"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=message):
            start(gossip)
