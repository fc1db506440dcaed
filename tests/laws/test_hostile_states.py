"""Damaged states: each is refused with ValueError and changes nothing, or it means the same as the valid one."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from cases import case
from laws.hostile import Path, hostile
from laws.table import TABLE
from optim import nets
from optim.test_identity import ADAPTERS, diloco, gossiping, optimizer, world
from states import assert_equal

from dgc import testing
from dgc.compression import PowerSGDCompressor, Route, Rule, TwoPhaseCompressor
from dgc.contrib import CHOCO, PowerGossip
from dgc.gossip import SGP, star
from dgc.local import OuterSteps, SlowMo

PARTIAL = {"history", "accordion", "received"}  # tables that need not have all parameters
LIKE = [torch.zeros(shape, dtype=torch.float32) for shape in ((6, 4), (3, 2, 5), (7,))]


OF_TORCH = "optimizer"  # the state of a torch optimizer, which torch does not check either


def several_methods(transport: Any) -> Any:
    """What one of them refuses changes none of the others."""
    rules = [
        Rule(nets.dgc(0.1), name="first*"),
        Rule(PowerSGDCompressor(1), min_dim=2),
        Rule(TwoPhaseCompressor()),
    ]
    return optimizer(transport, compression=Route(rules))


MORE = {
    **ADAPTERS,
    "several methods": several_methods,
    "CHOCO": partial(gossiping, algorithm=lambda: CHOCO(star)),
    "PowerGossip": partial(gossiping, algorithm=lambda: PowerGossip(star)),
    "outer steps over gossip": partial(gossiping, algorithm=lambda: OuterSteps(2, SGP(), SlowMo())),
    "DiLoCo in flight": partial(diloco, number=2, delay=1),
}
METHODS = [(row.name, row.make) for row in TABLE]


def is_known(path: Path, kind: str) -> bool:
    return path[:1] != (OF_TORCH,) and (kind != "missing" or not PARTIAL.intersection(path[:-1]))


def check(state: Any, now: Callable[[], Any], load: Callable[[Any], None], number: int, seed: int) -> int:
    """Load damaged states. now: the present state. Returns how many there were."""
    before, found = copy.deepcopy(now()), 0
    for what, damaged in hostile(state, number, seed, is_known):
        found += 1
        try:
            load(damaged)
        except ValueError:
            assert_equal(now(), before, what)
        else:
            assert_equal(now(), state, f"{what}: accepted")
            before = copy.deepcopy(now())
    return found


@pytest.mark.parametrize(("name", "make"), METHODS, ids=[name for name, _ in METHODS])
@pytest.mark.parametrize("number", [12, pytest.param(300, marks=pytest.mark.proof)])
def test_a_compressor_keeps_its_own_state_in_place_of_a_damaged_one(name: str, make: Any, number: int) -> None:
    fleet, other = testing.Fleet(make, 2, LIKE), testing.Fleet(make, 2, LIKE)
    for step in range(2):
        fleet.step([testing.gradients(rank, step, tuple(t.shape for t in LIKE)) for rank in range(2)])
    states, loads = fleet.states[1], other.states[1]
    assert check(states.state_dict(), loads.state_dict, loads.load_state_dict, number, len(name))


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("number", [40, pytest.param(1000, marks=pytest.mark.proof)])
def test_an_adapter_keeps_its_own_state_in_place_of_a_damaged_one(name: str, number: int) -> None:
    def body(transport: Any) -> int:
        state = MORE[name](transport).train(range(3)).state()
        own = MORE[name](transport)
        return check(state, own.state, own.load, number, transport.rank)

    assert all(world(name).run(body))


def test_a_compressor_refuses_the_states_of_all_other_methods() -> None:
    """Also where the tables have equal names, as in DoubleSqueeze and in two phases."""
    states = {}
    for name, make in METHODS:
        kept = testing.Fleet(make, 2, LIKE).states[1]
        states[kept.compressor.class_name] = name, kept, kept.state_dict()
    pairs = [(one, other) for one, other in product(states.values(), repeat=2) if one is not other]
    for (name, kept, own), (whose, _, foreign) in pairs:
        if own or foreign:
            with case(whose, "into", name), pytest.raises(ValueError, match="state of another compressor"):
                kept.load_state_dict(foreign)
            assert_equal(kept.state_dict(), own, name)
    assert len(pairs) > 200
