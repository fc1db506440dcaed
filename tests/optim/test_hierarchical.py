"""DistributedOptimizer on two levels: what is on, training, saved states, and bytes between machines."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import Any

import pytest
import torch
from torch import nn

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import (
    DenseCompressor,
    DGCCompressor,
    FP16Compressor,
    NonFiniteGradientError,
    PowerSGDCompressor,
    Route,
    Rule,
    ThresholdCompressor,
)
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import DGCSGD, DistributedOptimizer

pytestmark = pytest.mark.usefixtures("no_type_checks")

METHODS: dict[str, Callable[[], Any]] = {
    "dgc": lambda: DGCCompressor(0.05, DGCSGDMemory(0.9)),
    "residual": lambda: DGCCompressor(0.05, ResidualMemory()),  # momentum is the optimizer's
    "dgc int8 vectors": lambda: DGCCompressor(0.05, DGCSGDMemory(0.9), dense_values="int8"),
    "powersgd": lambda: PowerSGDCompressor(2),
    "2bit": lambda: ThresholdCompressor(threshold=0.01),
    "dense": DenseCompressor,
    "route": lambda: Route([Rule(PowerSGDCompressor(1), min_dim=2, max_numel=500), Rule(METHODS["dgc"]())]),
}


class Run:
    """A model on one rank, with data of its machine or its own."""

    def __init__(self, transport: Any, compression: Any, hierarchical: Any, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5))
        self.optimizer = DistributedOptimizer(
            DGCSGD(self.model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3),
            self.model.named_parameters(),
            compression,
            transport=transport,
            hierarchical=hierarchical,
            bucket_mb=settings.pop("bucket_mb", 0.005),
            **settings,
        )

    def step(self, seeds: Any) -> None:
        """A step on the mean gradient of some batches, which are given by their seeds."""
        self.optimizer.zero_grad()
        for seed in seeds:
            inputs = torch.randn(6, 12, generator=torch.Generator().manual_seed(seed))
            (self.model(inputs).square().sum() / len(seeds)).backward()
        self.optimizer.step()

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def train(transport: Any, make: Any, hierarchical: Any, batches: Any, steps: int = 6) -> torch.Tensor:
    run = Run(transport, make(), hierarchical, backward_passes_per_step=len(batches(0, 0)))
    for step in range(steps):
        run.step(batches(transport.rank, step))
    return run.weights()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("machines", "local"), [(2, 2), (2, 3), (3, 2)])
def test_ranks_of_a_machine_train_as_one_rank_with_their_mean_gradient(
    name: str, machines: int, local: int
) -> None:
    """With shares of whole tensors the division into buckets differs, which sparse methods and 2bit do not see."""
    size = machines * local
    two = LockstepWorld(size, local).run(
        lambda t: train(t, METHODS[name], "on", lambda rank, step: [100 * step + rank])
    )
    assert all(torch.equal(two[0], other) for other in two)
    one = LockstepWorld(machines).run(
        lambda t: train(
            t, METHODS[name], "off", lambda rank, step: [100 * step + rank * local + i for i in range(local)]
        )
    )
    assert float((two[0] - one[0]).abs().max()) < 2e-5 * float(one[0].abs().max())


def test_on_off_and_auto() -> None:
    def is_on(transport: Any, hierarchical: Any, make: Any = METHODS["dgc"]) -> bool:
        return Run(transport, make(), hierarchical).optimizer.place is not None

    def choices(world: LockstepWorld) -> list[bool]:
        given = ("auto", "on", True, "off", False)
        found = world.run(lambda t: [is_on(t, value) for value in given])
        assert all(other == found[0] for other in found)
        return found[0]

    assert choices(LockstepWorld(4, 2)) == [True, True, True, False, False]
    for world in (LockstepWorld(2), LockstepWorld(2, 1)):
        assert choices(world) == [False, True, True, False, False]
    for stateless in (DenseCompressor, FP16Compressor):  # auto leaves an all-reduce to the transport
        for value, expected in (("auto", False), ("on", True)):
            found = LockstepWorld(4, 2).run(partial(is_on, hierarchical=value, make=stateless))
            assert found == [expected] * 4
    assert LockstepWorld(4, 2).run(lambda t: Run(t, None, "off").optimizer.part is None) == [True] * 4
    with pytest.raises(ValueError, match="hierarchical must be 'auto', 'on' or 'off', not 'yes'"):
        LockstepWorld(2).run(lambda t: is_on(t, "yes"))


class Uneven:
    """A transport of 3 ranks on two machines, of two ranks and one."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def group_size(self, group: str) -> int:
        sizes = {"world": (3, 3, 3), "local": (2, 2, 1), "cross": (2, 1, 2)}
        return sizes[group][self._transport.rank]


class WithoutGroups(Uneven):
    def group_size(self, group: str) -> int:
        if group != "world":
            raise ValueError(f"group {group!r} does not exist: use connect(hierarchical=True)")
        return int(self._transport.size)


def test_machines_with_different_numbers_of_ranks() -> None:
    words = "needs the same number of ranks on every machine, not 1 to 2"
    with pytest.raises(ValueError, match=f"^hierarchical='on' {words}$"):
        LockstepWorld(3).run(lambda t: Run(Uneven(t), METHODS["dgc"](), "on"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        places = LockstepWorld(3).run(lambda t: Run(Uneven(t), METHODS["dgc"](), "auto").optimizer.place)
    assert places == [None] * 3
    (line,) = [str(warning.message) for warning in caught]
    assert words in line and "hierarchical='auto' treats all ranks alike" in line


def test_a_transport_without_groups() -> None:
    with pytest.raises(ValueError, match=r"use connect\(hierarchical=True\)"):
        LockstepWorld(2).run(lambda t: Run(WithoutGroups(t), METHODS["dgc"](), "on"))
    places = LockstepWorld(2).run(lambda t: Run(WithoutGroups(t), METHODS["dgc"](), "auto").optimizer.place)
    assert places == [None] * 2


def resumed(transport: Any, name: str, stop: bool) -> torch.Tensor:
    run = Run(transport, METHODS[name](), "on")
    for step in range(6):
        if stop and step == 3:
            state = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
            residual = copy.deepcopy(run.optimizer.compression_state_dict())
            run = Run(transport, METHODS[name](), "on")
            run.model.load_state_dict(state[0])
            run.optimizer.load_state_dict(state[1])
            run.optimizer.load_compression_state_dict(residual)
        run.step([10 * step + transport.rank])
    return run.weights()


@pytest.mark.parametrize("name", METHODS)
def test_a_saved_state_goes_on_bit_for_bit(name: str) -> None:
    for size, local in ((4, 2), (6, 3)):
        straight, stopped = (
            LockstepWorld(size, local).run(partial(resumed, name=name, stop=stop)) for stop in (False, True)
        )
        assert all(torch.equal(a, b) for a, b in zip(straight, stopped, strict=True))


def test_each_rank_holds_its_tensors_alone() -> None:
    def body(transport: Any) -> Any:
        run = Run(transport, METHODS["powersgd"](), "on")
        run.step([transport.rank])
        state = run.optimizer.compression_state_dict()
        return state["part"], set(state["PowerSGDCompressor.0"]["errors"])

    found = LockstepWorld(6, 3).run(body)
    every = {f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")}
    for machine in range(2):
        parts = found[3 * machine :][:3]
        assert [part["machine"] for part, _ in parts] == [machine] * 3 and parts[0][0]["machines"] == 2
        assert all(set(part["tensors"]) == names for part, names in parts)
        assert sorted(name for _, names in parts for name in names) == sorted(every)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"hierarchical": "on"}, {"hierarchical": "off"}),
        ({"hierarchical": "off"}, {"hierarchical": "on"}),
        ({"hierarchical": "on"}, {"hierarchical": "on", "bucket_mb": 25.0}),
    ],
)
def test_a_state_of_another_division_is_refused(first: Any, then: Any) -> None:
    states = LockstepWorld(4, 2).run(
        lambda t: Run(t, METHODS["dgc"](), **first).optimizer.compression_state_dict()
    )
    with pytest.raises(ValueError, match="redistribute it with dgc.optim.redistribute"):
        LockstepWorld(4, 2).run(
            lambda t: Run(t, METHODS["dgc"](), **then).optimizer.load_compression_state_dict(states[t.rank])
        )


def test_nan_on_one_rank_drops_the_step_everywhere() -> None:
    def body(transport: Any) -> Any:
        run = Run(transport, METHODS["dgc"](), "on", nonfinite="raise")
        run.step([transport.rank])
        before = run.weights()
        run.optimizer.zero_grad()
        run.model(torch.full((2, 12), float("nan") if transport.rank == 3 else 1.0)).sum().backward()
        with pytest.raises(NonFiniteGradientError) as raised:
            run.optimizer.step()
        assert torch.equal(run.weights(), before)
        run.step([transport.rank])
        return str(raised.value), run.weights(), float(run.optimizer.error_norm())

    found = LockstepWorld(4, 2).run(body)
    assert {text for text, _, _ in found} == {found[0][0]} and "on rank 3 has NaN" in found[0][0]
    assert all(torch.equal(weights, found[0][1]) and isfinite(norm) for _, weights, norm in found)


@pytest.mark.parametrize(("name", "share"), [("dgc", 0.5), ("residual", 0.5), ("2bit", 0.5), ("powersgd", 0.67)])
def test_bytes_between_machines(name: str, share: float) -> None:
    """On 2 machines of 2 ranks, an all-gather sends a third, and an all-reduce two thirds: its ring visits each
    machine once anyway.
    """

    def body(transport: Any, hierarchical: str) -> Any:
        run = Run(transport, METHODS[name](), hierarchical, bucket_mb=25.0)
        for step in range(5):
            run.step([transport.rank + step])
        return run.optimizer.meter

    two, one = (LockstepWorld(4, 2).run(partial(body, hierarchical=mode)) for mode in ("on", "off"))
    between = [sum(meter.cross_wire_bytes for meter in meters) for meters in (two, one)]
    assert 0 < between[0] <= between[1] * share
    assert all(meter.cross_wire_bytes < meter.wire_bytes for meter in (*two, *one))
    assert {meter.dense_cross_wire_bytes * 2 for meter in two} == {meter.dense_wire_bytes for meter in one}
