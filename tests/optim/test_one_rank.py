"""One rank, whose adapters and methods check gradients as on more ranks."""

import contextlib
from functools import partial
from typing import Any

import pytest
from optim import nets
from optim.test_identity import ADAPTERS, diloco, gossiping
from optim.test_identity import optimizer as wrapped

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import (
    EF21Compressor,
    FP16Compressor,
    NonFiniteGradientError,
    PowerSGDCompressor,
    TwoPhaseCompressor,
)
from dgc.contrib import CHOCO

pytestmark = pytest.mark.usefixtures("no_type_checks")


def method(make: Any) -> Any:
    return lambda transport: wrapped(transport, compression=make())


ALONE = {
    **ADAPTERS,
    "PowerSGD": method(partial(PowerSGDCompressor, 1)),
    "fp16": method(FP16Compressor),
    "EF21": method(lambda: EF21Compressor(TwoPhaseCompressor(), 1.0)),
    "8 bits on two levels": lambda transport: wrapped(
        transport, compression=TwoPhaseCompressor(), hierarchical="on"
    ),
    "DiLoCo": partial(diloco, number=2),
    "CHOCO": partial(gossiping, algorithm=CHOCO),
}


@pytest.mark.filterwarnings("ignore:.*drops")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ALONE)
def test_a_nonfinite_gradient_changes_nothing(name: str, bad: float) -> None:
    (transport,) = LockstepWorld(1, 1).transports
    adapter = ALONE[name](transport).train(range(2))
    owner = adapter.owner
    parameters = owner.params if name == "aggregator" else [p for g in owner.param_groups for p in g["params"]]
    before = [p.detach().clone() for p in parameters]
    handle = parameters[0].register_hook(lambda gradient: gradient * bad)
    with pytest.raises(NonFiniteGradientError) if name == "aggregator" else contextlib.nullcontext():
        adapter.train([2])
    handle.remove()
    assert nets.same(parameters, before)
    assert owner.dropped_steps == 1
    adapter.train([3, 4])
    assert all(bool(p.isfinite().all()) for p in parameters) and not nets.same(parameters, before)
