"""Whose state it is: only the state of this rank loads, and any other is refused by name."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gossip.networks import Trained, top_k
from on_ranks import on_ranks
from optim.nets import alone, dgc, dgc_sgd, loss_of, net, train, wrap
from refusals import refuse
from states import assert_equal
from torch.nn.parallel import DistributedDataParallel

from dgc.aggregate import Config, PowerSGD, optimizer_step
from dgc.comm import all_gather_object
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import PowerSGDCompressor, SparseCompressor
from dgc.contrib import ZeroOneAdam, ZeroOneSteps
from dgc.ddp import compress
from dgc.gossip import OSGP, SGP
from dgc.local import Nesterov, OuterSteps
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import broadcast_optimizer_state, redistribute

pytestmark = pytest.mark.usefixtures("no_type_checks")


class Adapter:
    def __init__(self, owner: Any, step: Callable[[int], object]) -> None:
        self.owner, self._step = owner, step
        prefix = "compression_" if hasattr(owner, "compression_state_dict") else ""
        self._save, self._load = (getattr(owner, f"{verb}{prefix}state_dict") for verb in ("", "load_"))

    def train(self, steps: Any) -> "Adapter":
        for number in steps:
            self._step(number)
        return self

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(self._save())

    def load(self, state: dict[str, Any], **options: Any) -> None:
        self._load(copy.deepcopy(state), **options)


def optimizer(transport: Any, **options: Any) -> Adapter:
    model = net()
    wrapped = wrap(model, transport, dgc_sgd, **{"compression": dgc(0.1), "hierarchical": "off", **options})
    return Adapter(wrapped, lambda number: train(model, wrapped, [number], transport.rank))


def aggregator(transport: Any) -> Adapter:
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    powersgd = PowerSGD(model.parameters(), Config(1, 1.0, start_compressing_after_num_steps=0), transport)

    def step(number: int) -> None:
        loss_of(model, number, transport.rank).backward()
        optimizer_step(sgd, powersgd)

    return Adapter(powersgd, step)


def gossiping(transport: Any, algorithm: Any, **options: Any) -> Adapter:
    own = Trained(transport, algorithm(), **options)
    return Adapter(own.optimizer, lambda number: own.step())


def zero_one(transport: Any, clipper: int = 2) -> Adapter:
    steps = partial(ZeroOneSteps, 2, 1, 1, clipper)
    return gossiping(transport, steps, make_optimizer=partial(ZeroOneAdam, lr=0.02))


def diloco(transport: Any, number: int, **options: Any) -> Adapter:
    return gossiping(transport, partial(OuterSteps, number, None, Nesterov(), **options))


ADAPTERS: dict[str, Any] = {
    "optimizer": optimizer,
    "two levels": partial(optimizer, hierarchical="on"),
    "aggregator": aggregator,
    "outer steps": partial(gossiping, algorithm=lambda: OuterSteps(2, compression=top_k())),
    "0/1 Adam": zero_one,
    "gossip": partial(gossiping, algorithm=SGP),
    "gossip with overlap": partial(gossiping, algorithm=OSGP),
}
OWN_PARTS = ("gossip with overlap", "0/1 Adam")  # messages and server errors have a place of their own on a rank


def world(name: str, size: int = 2) -> LockstepWorld:
    return LockstepWorld(2 * size, 2) if name == "two levels" else LockstepWorld(size)


def states_of(name: str, size: int) -> list[Any]:
    return world(name, size).run(lambda transport: ADAPTERS[name](transport).train(range(3)).state())


def without(state: Any, *keys: str) -> Any:
    return {key: value for key, value in state.items() if key not in keys}


@pytest.mark.parametrize("name", ADAPTERS)
def test_only_the_state_of_this_rank_loads(name: str) -> None:
    build, larger = ADAPTERS[name], states_of(name, 3)

    def body(transport: Any) -> None:
        rank, size = transport.rank, transport.size
        adapter = build(transport).train(range(3))
        state = adapter.state()
        states = all_gather_object(transport, state)
        assert state["identity"] | {"rank": rank, "size": size, "step": 3} == state["identity"]
        other = states[(rank + size // 2) % size]  # on two levels: of the same tensors on the other machine
        again = build(transport)
        again.load(state)
        assert_equal(again.state(), state)
        for foreign, whose in ((other, other["identity"]["rank"]), (larger[rank], rank)):
            words = f"from rank {whose} of {foreign['identity']['size']}, and rank {rank} of {size} loads it"
            with pytest.raises(ValueError, match=words) as told:
                again.load(foreign)
            cures = ("on every rank", "redistribute", "allow_other_rank=True")
            assert all(cure in str(told.value) for cure in cures)
        assert_equal(again.state(), state)  # a refused state changes nothing
        shard = {**state, "identity": {**state["identity"], "shard": 1, "shards": 2}}
        different = f"shard 1 of 2 on machine {rank} .*shards are different parts"
        refuse(different, again.load, shard, allow_other_rank=True)
        again.load(other, allow_other_rank=True)
        assert again.state()["identity"] == state["identity"]
        if name not in OWN_PARTS:
            assert_equal(*(without(its, "identity", "part") for its in (again.state(), other)))
        refuse("identity of the state is damaged", again.load, {**state, "identity": {"owner": 1}})
        for allowed in (False, True):
            refuse("the state has no identity", again.load, without(state, "identity"), allow_other_rank=allowed)
        again.train(range(3, 5))

    world(name).run(body)


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("steps", [{0: 3, 1: 2}, {0: 3, 1: 0}])
def test_states_of_different_steps_are_refused_before_anything_is_sent(name: str, steps: Any) -> None:
    def body(transport: Any) -> None:
        adapter, again = ADAPTERS[name](transport), ADAPTERS[name](transport)
        states = {number: adapter.train([number]).state() for number in (1, 2, 3)}
        if its := steps.get(transport.rank, 3):
            again.load(states[its])
        refuse(rf"ranks? 0.*: step 3; rank 1: step {steps[1]}\): .*on every rank", again.train, range(3, 4))

    world(name).run(body)


@on_ranks(2)
def test_a_state_of_powersgd_without_factors_on_one_rank_is_one_error_on_all(transport: Any) -> None:
    def build() -> Adapter:
        model = net()
        own = wrap(model, transport, compression=PowerSGDCompressor(2, min_compression_rate=0))
        return Adapter(own, lambda number: train(model, own, [number], transport.rank))

    state, again = build().train(range(3)).state(), build()
    tables = state["PowerSGDCompressor.0"]
    assert tables["P"] and tables["Q"]
    if transport.rank == 1:
        tables.update(P={}, Q={})
    again.load(state)
    refuse("ranks 0 and 1 have loaded states with factors of different parameters", again.train, range(3, 4))


def test_ddp() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def build() -> Adapter:
        model = DistributedDataParallel(net())
        sgd = dgc_sgd(model)
        exchange = compress(model, dgc(0.1), sgd, transport=alone())
        return Adapter(exchange, lambda number: train(model, sgd, [number]))

    state, again = build().train(range(3)).state(), build()
    again.load(state)
    assert again.train(range(3, 4)).state()["identity"]["step"] == 4
    foreign = {**state, "identity": {**state["identity"], "rank": 1, "size": 2}}
    refuse("from rank 1 of 2, and rank 0 of 1 loads it", again.load, foreign)
    again.load(foreign, allow_other_rank=True)
    optimizer(alone()).load(state)
    dist.destroy_process_group()


@on_ranks(2)
def test_settings_that_give_the_state_another_meaning_are_refused(transport: Any) -> None:
    in_parts = partial(diloco, number=4, fragment_mb=2.5e-4)
    for saved, loaded, message in (
        (partial(diloco, number=4), partial(diloco, number=3), "OuterSteps.0.average_every=4, and here it is 3"),
        (in_parts, partial(diloco, number=4), "OuterSteps.0.fragment_mb=0.00025, and here it is None"),
        (zero_one, partial(zero_one, clipper=4), "ZeroOneSteps.0.local_step_clipper=2, and here it is 4"),
    ):
        refuse(message, loaded(transport).load, saved(transport).train(range(3)).state(), allow_other_rank=True)


@pytest.mark.parametrize("bucket_mb", [25.0, 1e-4])
@pytest.mark.parametrize(
    ("ratio", "options"),
    [(0.5, {}), (0.1, {"fp16_values": True}), (0.1, {"int32_indices": True})],
    ids=["ratio", "values", "indices"],
)
@on_ranks(2)
def test_a_state_loads_with_another_ratio_format_or_bucket_size(
    transport: Any, ratio: float, options: Any, bucket_mb: float
) -> None:
    state = optimizer(transport).train(range(3)).state()
    other = optimizer(transport, compression=dgc(ratio, **options), bucket_mb=bucket_mb)
    other.load(state)
    for table in ("momentums", "velocities"):
        tables = [s["DGCCompressor.0"][table] for s in (state, other.state())]
        torch.testing.assert_close(*tables, rtol=0, atol=0)
    other.train(range(3, 4))


@pytest.mark.parametrize("name", ["optimizer", "aggregator"])
@pytest.mark.parametrize("new", [1, 2, 6])
def test_states_are_redistributed_by_their_identities(name: str, new: int) -> None:
    """In whatever order they are given."""
    states = states_of(name, 4)
    mixed = redistribute([states[2], states[0], states[3], states[1]], new)
    assert [state["identity"]["rank"] for state in mixed] == list(range(new))
    assert_equal(mixed, redistribute(states, new))


@pytest.mark.parametrize("name", ["optimizer", "aggregator"])
@pytest.mark.parametrize("new", [1, 2, 6])
def test_redistributed_states_load_with_their_mean_unchanged(name: str, new: int) -> None:
    states = states_of(name, 4)
    others = redistribute(states, new)

    def body(transport: Any) -> Any:
        adapter = ADAPTERS[name](transport)
        adapter.load(others[transport.rank])
        found = adapter.state()
        adapter.train(range(3, 4))
        return found

    def mean(states: Any) -> torch.Tensor:
        method, table = {"aggregator": ("PowerSGDCompressor", "errors")}.get(name, ("DGCCompressor", "velocities"))
        errors = [state[f"{method}.0"][table] for state in states]
        return torch.stack([torch.cat([e.flatten().double() for e in its.values()]) for its in errors]).mean(0)

    torch.testing.assert_close(mean(LockstepWorld(new).run(body)), mean(states), rtol=0, atol=1e-6)


def test_redistribute_needs_the_states_of_all_ranks_at_one_step() -> None:
    first, second, third = states = states_of("optimizer", 3)
    later = {**second, "identity": {**second["identity"], "step": 4}}
    once, steps = "pass the state of every rank once", "rank 0 of 3 is of step 3, the one of rank 1 of 3 of step 4"
    for wrong in (states[:2], [first, second, second], [*states, first]):
        refuse(once, redistribute, wrong, 2)
    refuse(steps, redistribute, [first, later, third], 1)
    refuse("the state has no identity", redistribute, [first, second, without(third, "identity")], 2)
    refuse("there are no states", redistribute, [], 2)


@pytest.fixture
def on_two_levels() -> list[Any]:
    """The states of 2 machines of 2 ranks that went on from the states of 3 ranks."""
    flat = states_of("optimizer", 3)

    def on_machines(transport: Any) -> Any:
        adapter = ADAPTERS["two levels"](transport)
        parts = all_gather_object(transport, adapter.owner.part)
        adapter.load(redistribute(flat, transport.size, parts)[transport.rank])
        return adapter.train(range(3, 4)).state()

    return LockstepWorld(4, 2).run(on_machines)


def test_states_are_redistributed_to_two_levels(on_two_levels: list[Any]) -> None:
    assert [state["identity"]["step"] for state in on_two_levels] == [4] * 4


def test_states_of_two_levels_are_redistributed_to_one(on_two_levels: list[Any]) -> None:
    states = redistribute(on_two_levels, 2)
    LockstepWorld(2).run(lambda transport: optimizer(transport).load(states[transport.rank]))


def test_shards_are_redistributed_among_machines() -> None:
    states: list[dict[str, Any]] = []
    for machine, shard in product(range(2), range(2)):
        identity = {"rank": machine, "size": 2, "step": 3, "shard": shard, "shards": 2, "settings": {}}
        states += [{"errors": {"w": torch.full((2,), 10.0 * shard + machine)}, "identity": identity}]
    one = redistribute(states[::-1], 2)
    assert [s["errors"]["w"][0].item() for s in one] == [0.5, 10.5]
    assert [[s["identity"][key] for key in ("rank", "size", "shard")] for s in one] == [[0, 1, 0], [0, 1, 1]]
    four = redistribute(states, 8)
    assert [s["errors"]["w"][0].item() for s in four] == [0.0, 10.0, 0.0, 10.0, 1.0, 11.0, 1.0, 11.0]
    refuse("3 ranks cannot have 2 shards on each machine", redistribute, states, 3)


@on_ranks(2)
def test_a_broadcast_of_the_optimizer_leaves_every_rank_its_residual(transport: Any) -> None:
    adapter = optimizer(transport).train(range(3))
    before = adapter.state()
    broadcast_optimizer_state(adapter.owner, transport=transport)
    assert_equal(adapter.state(), before)


def test_steps_of_asynchronous_ranks_are_not_compared() -> None:
    own = gossiping(alone(), type("Alone", (SGP,), {"is_synchronous": False})).owner
    assert own.compression_state_dict()["identity"]["step"] is None


def test_the_state_of_another_memory_is_refused() -> None:
    state = optimizer(alone(), compression=SparseCompressor(0.1, DGCSGDMemory())).state()
    found = r"state of another compressor: it has \['history', 'momentums', 'steps', 'velocities'\]"
    refuse(found, optimizer(alone(), compression=SparseCompressor(0.1, ResidualMemory())).load, state)
