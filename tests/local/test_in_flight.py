"""Exchanges in flight: states that are loaded meanwhile, ranks that drift apart, models in another order."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gossip.networks import IN_TWO_PARTS, Trained, each, same, top_k
from on_ranks import on_ranks

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import FP16Compressor, PowerSGDCompressor, QSGDCompressor, RandomKCompressor
from dgc.gossip import HierarchicalGossip
from dgc.local import Nesterov, OuterSteps, SlowMo, ZeroOneAdam, ZeroOneSteps

pytestmark = pytest.mark.usefixtures("no_type_checks")

PERIOD = 6
STREAMING: dict[str, Callable[[], Any]] = {
    "alpha": lambda: OuterSteps(PERIOD, outer=Nesterov(), **IN_TWO_PARTS, delay=2, alpha=0.5),
    "top-k": lambda: OuterSteps(PERIOD, compression=top_k(), **IN_TWO_PARTS, delay=2),
    "stochastic": lambda: OuterSteps(PERIOD, compression=QSGDCompressor(), **IN_TWO_PARTS, delay=2),
    "random k": lambda: OuterSteps(PERIOD, compression=RandomKCompressor(0.2), **IN_TWO_PARTS, delay=1),
    "rank 1": lambda: OuterSteps(PERIOD, compression=PowerSGDCompressor(rank=1), **IN_TWO_PARTS, delay=3),
    "whole": lambda: OuterSteps(PERIOD, outer=Nesterov(), compression=FP16Compressor(), delay=5),
    "islands": lambda: HierarchicalGossip(OuterSteps(PERIOD, compression=top_k(), **IN_TWO_PARTS, delay=2)),
}


@pytest.mark.parametrize("name", STREAMING)
@on_ranks(2, 1)
def test_a_state_loaded_at_any_position_goes_on_bit_for_bit(transport: Any, name: str) -> None:
    """The exchange in flight, if any, is received and given up. It changes nothing of what was loaded."""
    own = Trained(transport, STREAMING[name]())
    saved, models = [], []
    for step in range(3 * PERIOD):
        if PERIOD <= step < 2 * PERIOD:
            saved.append((step, own.state()))
        own.step()
        models.append(own.z.clone())
    for position in range(PERIOD):
        other = Trained(transport, STREAMING[name]()).scatter(3)
        other.steps(PERIOD + position)
        for step, state in saved:  # the next state is loaded at another position
            other.resume(copy.deepcopy(state))
            found = []
            for _ in range(PERIOD + 1):
                other.step()
                found.append(other.z.clone())
            assert same(found, models[step : step + PERIOD + 1]), (position, step)


def zero_one(transport: Any) -> Trained:
    return Trained(transport, ZeroOneSteps(2, local_step_scaler=2, local_step_clipper=4), ZeroOneAdam)


DRIFTING: dict[str, tuple[Callable[[Any], Trained], str]] = {
    "slowmo": (lambda t: Trained(t, OuterSteps(4, outer=SlowMo())), "lr"),
    "streaming": (lambda t: Trained(t, OuterSteps(6, outer=SlowMo(), **IN_TWO_PARTS, delay=2)), "lr"),
    "0/1 adam": (zero_one, r"param_groups\[0\]\['lr'\]"),
}


@pytest.mark.parametrize("name", DRIFTING)
@on_ranks(3)
def test_a_learning_rate_that_drifts_on_one_rank_is_an_error_of_every_rank(transport: Any, name: str) -> None:
    """As a ReduceLROnPlateau does that sees the losses of its own rank. Nothing else is exchanged afterwards."""
    make, path = DRIFTING[name]
    own = make(transport)
    own.steps(8)
    before = own.optimizer.param_groups[0]["lr"]
    if transport.rank == 1:
        own.optimizer.param_groups[0]["lr"] = before / 10
    with pytest.raises(ValueError, match=rf"{path} is {before} on rank 0 and {before / 10} on rank 1: .*Plateau"):
        own.steps(8)
    with pytest.raises(RuntimeError, match=f"ended with an exception.*{path} is {before}.*checkpoint"):
        own.steps(8)


def test_ranks_may_have_their_own_learning_rate_if_no_outer_step_reads_it() -> None:
    def body(own: Trained) -> Any:
        for step in range(8):
            own.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step + own.rank)
            own.step()
        return own.z.clone()

    for outer in (None, Nesterov()):
        assert torch.equal(*each(2, partial(OuterSteps, 4, outer=outer), body))


def one_streams(transport: Any) -> Trained:
    """Every second model of a rank."""
    transport.models = getattr(transport, "models", -1) + 1
    return Trained(transport, OuterSteps(2, delay=transport.models % 2, alpha=0.5))


ORDERS: dict[str, Callable[[Any], Trained]] = {
    "local sgd": lambda t: Trained(t, OuterSteps(2, compression=top_k())),
    "streaming": lambda t: Trained(t, OuterSteps(2, delay=1, alpha=0.5)),
    "0/1 adam": zero_one,
    "one streaming": one_streams,
    "islands": lambda t: Trained(t, HierarchicalGossip(OuterSteps(2, compression=top_k()))),
}


@pytest.mark.parametrize("name", ORDERS)
def test_two_models_stepped_in_another_order_are_an_error_of_every_rank(name: str) -> None:
    """Whether messages are matched by their order or by their names."""

    def body(transport: Any) -> None:
        models = [ORDERS[name](transport) for _ in range(2)]
        for _ in range(4):
            for model in models:
                model.step()
        with pytest.raises(ValueError, match="optimizer is dgc0.* on rank 0 and dgc1.* on rank 1: .* same order"):
            for _ in range(4):
                for model in models if transport.rank != 1 else reversed(models):
                    model.step()

    for strict in (True, False):
        LockstepWorld(2, 1, strict=strict).run(body)
