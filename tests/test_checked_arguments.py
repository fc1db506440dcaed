"""Arguments of a wrong type: one error that names the argument."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import case
from torch import nn
from torch.optim import SGD

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DGCCompressor, PowerSGDCompressor, QSGDCompressor, Route, Rule
from dgc.gossip import CHOCO, OSGP, SGP, FlatModel, TopK, from_weights, grid, ring
from dgc.local import Nesterov, OuterSteps, ZeroOneAdam
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import DistributedOptimizer, LocalOptimizer, redistribute
from dgc.selection import Sampled
from dgc.wire import SparseFormat

pytestmark = pytest.mark.usefixtures("no_type_checks")
Make = Callable[..., Any]
WRONG: list[tuple[Make, dict[str, Any]]] = [
    *((PowerSGDCompressor, {"rank": rank}) for rank in ("4", math.nan)),
    *((QSGDCompressor, wrong) for wrong in ({"error_feedback": "no"}, {"block": 512.5})),
    *((Rule, {"compressor": QSGDCompressor}), (Route, {"rules": [QSGDCompressor()]})),
    *((DGCSGDMemory, {"nesterov": "no"}), (Sampled, {"sample_ratio": "0.1"}), (SparseFormat, {"values": "fp16"})),
    *((OSGP, {"synch_freq": 2.5}), (CHOCO, {"average_every": 2.5}), (TopK, {"ratio": math.nan})),
    *((SGP, wrong) for wrong in ({"message": "fp16"}, {"graph": "ring"})),
    *((FlatModel, {"named_parameters": None}), (ZeroOneAdam, {"lr": "x", "params": []})),
    *((from_weights, {"matrices": torch.eye(2)}), (ring, {"size": 4.0}), (grid, {"size": True})),
]


def test_arguments_of_a_wrong_type_are_named() -> None:
    for make, arguments in WRONG:
        with case(arguments), pytest.raises(ValueError, match=rf"^{next(iter(arguments))} must .*not "):
            make(**arguments)


def model_and_sgd() -> tuple[nn.Linear, SGD]:
    """Equal on all ranks."""
    model = nn.Linear(4, 4)
    nn.init.zeros_(model.weight)
    return model, SGD(model.parameters(), lr=0.1)


def alone() -> Any:
    return LockstepWorld(1).transports[0]


def wrapped(**options: Any) -> DistributedOptimizer:
    model, sgd = model_and_sgd()
    compression = DGCCompressor(0.1, ResidualMemory(), warmup_epochs=3)
    given = {"transport": alone(), "compression": compression, **options}
    named = given.pop("named_parameters", model.named_parameters())
    return DistributedOptimizer(given.pop("optimizer", sgd), named, **given)


def local(method: Any, transport: Any = None) -> LocalOptimizer:
    model, sgd = model_and_sgd()
    return LocalOptimizer(sgd, model.named_parameters(), method, transport=transport or alone())


def damaged(state: Any, value: Any, key: str, *rest: str) -> Any:
    return {**state, key: damaged(state[key], value, *rest) if rest else value}


def test_what_is_no_option_epoch_state_and_closure() -> None:
    optimizers: Any = (wrapped(), local(SGP()))
    no_states: Any = (None, [], {})
    for optimizer in optimizers:
        for state in no_states:
            with pytest.raises(ValueError, match="^state_dict must be what state_dict"):
                optimizer.load_state_dict(state)
        with pytest.raises(ValueError, match="^closure must be a function, not 3"):
            optimizer.step(3)
    for name, value in (
        *(("backward_passes_per_step", value) for value in (2.5, math.inf)),
        *(("grad_scaler", value) for value in (1.0, torch.amp.GradScaler)),
        *(("transport", 0), ("optimizer", "sgd"), ("named_parameters", 3)),
    ):
        with pytest.raises(ValueError, match=f"^{name} must .*not "):
            wrapped(**{name: value})
    epochs: tuple[Any, ...] = (math.nan, -1, 2.5, True, None)
    for epoch in epochs:
        with case(epoch), pytest.raises(ValueError, match="^epoch must be a whole number of at least 0, not "):
            wrapped().begin_epoch(epoch)


def test_what_is_no_state_is_refused() -> None:
    optimizer, saved = wrapped(), wrapped().compression_state_dict()
    for state in (None, 3, "state"):
        with pytest.raises(ValueError, match="^state must be what compression_state_dict"):
            optimizer.load_compression_state_dict(state)  # type: ignore[arg-type]
    name = next(name for name in saved if name != "identity")
    with pytest.raises(ValueError, match="steps"):
        optimizer.load_compression_state_dict(damaged(saved, {"weight": None, "bias": 1}, name, "steps"))
    for key, value in (("step", "two"), ("step", 10**30), ("settings", [1]), ("rank", None)):
        with pytest.raises(ValueError, match="^identity of the state is damaged"):
            optimizer.load_compression_state_dict(damaged(saved, value, "identity", key))


def test_damaged_states_of_methods_are_named() -> None:
    def refused(optimizer: Any, message: str, value: Any, *path: str) -> None:
        state = optimizer.compression_state_dict()
        method = next(name for name in state if name.endswith(".0"))
        with pytest.raises(ValueError, match=message):
            optimizer.load_compression_state_dict(damaged(state, value, method, *path))

    def on_rank(transport: Any) -> None:
        choco = local(CHOCO(), transport)
        refused(choco, "^graph must be a whole number of 0 or more, not", torch.ones(2), "graph")
        refused(choco, "^copies_valid must be True or False, not", torch.ones(2), "copies_valid")

    LockstepWorld(2).run(on_rank)
    message = "^history of weight: ratio must be a number, not"
    refused(wrapped(), message, {"ratio": torch.ones(2)}, "history", "weight")
    outer = local(OuterSteps(2, outer=Nesterov()))
    buffer = {name: {"momentum_buffer": "text"} for name in ("weight", "bias")}
    refused(outer, "^outer momentum_buffer of weight is text: 'text'", buffer, "outer")
    refused(outer, "^outer state of weight must be a mapping, not 3", {"weight": 3, "bias": {}}, "outer")
    refused(outer, "^dropped must be a whole number", None, "dropped")
    for key in ("z0", "outer", "compression"):
        refused(outer, f"^{key} must be a mapping, not ", [], key)


@pytest.mark.parametrize("value", [None, 3, "text", [1], torch.ones(2)])
def test_what_must_be_a_mapping_in_a_state(value: Any) -> None:
    """In any place of a state, an error names the place."""

    def places(state: Any) -> Iterator[list[str]]:
        for key, part in state.items():
            if isinstance(part, dict) and key != "identity":
                yield [key]
                yield from ([key, *place] for place in places(part))

    for compression in (
        DGCCompressor(0.1, ResidualMemory()),
        PowerSGDCompressor(1, high_rank=2, min_compression_rate=0),
        QSGDCompressor(),
    ):
        optimizer = wrapped(compression=compression)
        state = optimizer.compression_state_dict()
        for place in places(state):
            if isinstance(value, int) and place[-1] in ("steps", "half_steps"):
                continue  # older states have one number for all tensors
            with pytest.raises(ValueError, match=rf"{place[-1]}|memory|must be a mapping|another memory"):
                optimizer.load_compression_state_dict(damaged(state, value, *place))
    optimizer, dense = wrapped(), wrapped(compression=None)
    saved, of_dense = optimizer.compression_state_dict(), dense.compression_state_dict()
    with pytest.raises(ValueError, match="^state of other compressors: it has"):
        dense.load_compression_state_dict({"identity": of_dense["identity"], "weight": torch.ones(2)})
    with pytest.raises(ValueError, match="^identity of the state is damaged"):
        optimizer.load_compression_state_dict(damaged(saved, {"a": torch.ones(2)}, "identity", "settings"))
    with pytest.raises(ValueError, match="^state must be what compression_state_dict"):
        redistribute([saved, value], 1)


def test_damaged_states_of_the_wrapped_optimizer_and_algorithms_are_named() -> None:
    model = nn.Linear(4, 4)
    adam = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    adam.step()
    state = adam.state_dict()
    gossip = LocalOptimizer(adam, model.named_parameters(), SGP(), transport=alone())
    whole = gossip.compression_state_dict()
    for message, damage in (
        ("state of the optimizer's state must have a mapping for each parameter", {"state": {0: None}}),
        ("param_groups of the optimizer's state must be a list of mappings", {"param_groups": None}),
        ("the state of the optimizer is damaged, .* refuses it with KeyError", {"state": {0: {"a": 1}}}),
        ("the state of the optimizer is damaged, .* refuses it with ValueError", {"param_groups": []}),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            gossip.load_state_dict({**state, **damage})
        with pytest.raises(ValueError, match=f"^{message}"):
            gossip.load_compression_state_dict({**whole, "optimizer": {**state, **damage}})
    # gossip needs an algorithm, a topology and shares
    for algorithm, message in (
        (lambda: SGP, "method must be an algorithm"),
        (lambda: SGP(graph=lambda size: None), "graph must return a Topology"),  # type: ignore[arg-type,return-value]
        (lambda: SGP(mixing=lambda *_: None), "mixing must return a share"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=message):
            LockstepWorld(2).run(lambda transport: local(algorithm(), transport))  # noqa: B023
