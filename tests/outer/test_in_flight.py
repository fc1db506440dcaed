"""Exchanges in flight: states that are loaded meanwhile, ranks that drift apart, models in another order."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gossip.networks import IN_TWO_PARTS, Trained, top_k

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import FP16Compressor, PowerSGDCompressor, QSGDCompressor, RandomKCompressor
from dgc.gossip import HierarchicalGossip
from dgc.outer import Nesterov, OuterSteps

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
def test_a_state_loaded_at_any_position_goes_on_bit_for_bit(name: str) -> None:
    """The exchange in flight, if any, is received and given up. It changes nothing of what was loaded."""

    def body(transport: Any) -> None:
        own = Trained(transport, STREAMING[name]())
        saved, models = [], []
        for step in range(3 * PERIOD):
            if PERIOD <= step < 2 * PERIOD:
                saved.append((step, copy.deepcopy(own.optimizer.compression_state_dict())))
            own.step()
            models.append(own.z.clone())
        for position in range(PERIOD):
            other = Trained(transport, STREAMING[name]()).scatter(3)
            for _ in range(PERIOD + position):
                other.step()
            for step, state in saved:  # the next state is loaded at another position
                other.optimizer.load_compression_state_dict(copy.deepcopy(state))
                found = []
                for _ in range(PERIOD + 1):
                    other.step()
                    found.append(other.z.clone())
                expected = models[step : step + PERIOD + 1]
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (position, step)

    LockstepWorld(2, 1).run(body)
