"""HierarchicalGossip: ranks of a machine have equal models, as single ranks with the mean gradient would have."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gossip.networks import Trained

from dgc import gossip
from dgc.comm.lockstep import LockstepWork, LockstepTransport, LockstepWorld
from dgc.comm.meter import TrafficMeter
from dgc.comm.requests import AllReduce
from dgc.comm.transport import CrossMachineTransport
from dgc.engine.options import unique_prefix
from dgc.gossip import ADPSGD, CHOCO, DPSGD, OSGP, SGP, HierarchicalGossip, Int8Message
from dgc.local import OuterSteps, SlowMo
from dgc.wire.envelope import sealed_bytes

pytestmark = pytest.mark.usefixtures("no_type_checks")

BASES = {
    "sgp": SGP,
    "sgp on a star, blocking": lambda: SGP(gossip.star, blocking=True),
    "osgp": OSGP,
    "osgp, int8": lambda: OSGP(message=Int8Message(16)),
    "dpsgd": lambda: DPSGD(gossip.full),
    "choco": lambda: CHOCO(gossip.grid),
    "local sgd": lambda: OuterSteps(3),
    "slowmo": lambda: OuterSteps(3, SGP(), SlowMo(0.2)),
}
SIZES = [(6, 2), (6, 3)]
each_base = pytest.mark.parametrize("base", BASES.values(), ids=BASES)
each_size = pytest.mark.parametrize(("size", "local"), SIZES)


def scattered(own: Any, machine: Any) -> Any:
    """Another model on every machine."""
    own.z.add_(torch.randn(own.z.numel(), generator=torch.Generator().manual_seed(machine)))
    own.optimizer.model.scatter()
    return own


def off(a: Any, b: Any) -> Any:
    return float((a - b).abs().max())


@pytest.mark.parametrize("base", [base for name, base in BASES.items() if name != "slowmo"])
@each_size
def test_without_gradients_the_mean_over_machines_is_kept(base: Any, size: Any, local: Any) -> None:
    def body(transport: Any) -> Any:
        own = scattered(Trained(transport, HierarchicalGossip(base())), transport.rank // local)
        start = own.z.double()
        for _ in range(7):
            own.only_gossip()
        between = own.biased_parameters()
        own.optimizer.synchronize_messages()
        return start, between, own.z.clone()

    starts, between, ends = zip(*LockstepWorld(size, local).run(body), strict=True)
    wanted = sum(starts) / size
    assert off(sum(between) / size, wanted) < 1e-5
    assert all(torch.equal(ends[rank], ends[rank - rank % local]) for rank in range(size))
    spread = [max(off(z, wanted) for z in models) for models in (starts, ends)]
    assert spread[1] < spread[0]


@each_base
@pytest.mark.parametrize(("size", "local"), [(6, 3)])
def test_it_learns_and_a_machine_has_one_model(base: Any, size: Any, local: Any) -> None:
    def body(transport: Any) -> Any:
        own = Trained(transport, HierarchicalGossip(base()))
        models, losses = [], []
        for _ in range(40):
            own.optimizer.zero_grad()
            models.append(own.z.clone())
            losses.append(own.step())
        with own.optimizer.consensus():
            loss = ((own.model(own.inputs) - own.targets) ** 2).mean()
        buffers = [own.optimizer.inner.state[p]["momentum_buffer"] for p in own.model.parameters()]
        return losses[0], float(loss.detach()), models, torch.cat([b.flatten() for b in buffers]), own.z.clone()

    found = LockstepWorld(size, local).run(body)
    assert sum(after for _, after, *_ in found) < 0.4 * sum(before for before, *_ in found)
    for rank, (_, _, models, buffers, own) in enumerate(found):
        first = found[rank - rank % local]
        assert all(torch.equal(a, b) for a, b in zip(models, first[2], strict=True))
        assert torch.equal(buffers, first[3]) and torch.equal(own, first[4])


@pytest.mark.parametrize("base", [SGP, OSGP, lambda: OuterSteps(3, SGP()), lambda: DPSGD(gossip.full)])
@each_size
def test_machines_are_ranks_with_the_mean_gradient(base: Any, size: Any, local: Any) -> None:
    def on_machines(transport: Any) -> Any:
        own = Trained(transport, HierarchicalGossip(base()))
        for _ in range(12):
            own.step()
        own.optimizer.synchronize_messages()
        return own.z.clone()

    data = LockstepWorld(size).run(lambda t: (own := Trained(t, OuterSteps(1))) and (own.inputs, own.targets))

    def alone(transport: Any) -> Any:
        own = Trained(transport, base())
        here = data[transport.rank * local :][:local]
        own.inputs, own.targets = (torch.cat(parts) for parts in zip(*here, strict=True))
        for _ in range(12):
            own.step()
        own.optimizer.synchronize_messages()
        return own.z.clone()

    def averaged_before(transport: Any) -> Any:
        own = Trained(transport, HierarchicalGossip(base(), averages_gradients=False))
        here = data[transport.rank // local * local :][:local]
        own.inputs, own.targets = (torch.cat(parts) for parts in zip(*here, strict=True))
        for _ in range(12):
            own.step()
        own.optimizer.synchronize_messages()
        return own.z.clone()

    ranks = LockstepWorld(size // local).run(alone)
    for body in (on_machines, averaged_before):
        machines = LockstepWorld(size, local).run(body)
        assert max(off(machines[rank], ranks[rank // local]) for rank in range(size)) < 1e-5


@each_base
def test_it_goes_on_from_a_saved_state_bit_for_bit(base: Any) -> None:
    def body(transport: Any, stop: Any) -> Any:
        own = Trained(transport, HierarchicalGossip(base()))
        for step in range(9):
            if step == 4:
                state = copy.deepcopy(own.optimizer.compression_state_dict())
                if stop:
                    own = scattered(Trained(transport, HierarchicalGossip(base())), 5 + transport.rank)
                    own.optimizer.load_compression_state_dict(state)
            own.step()
        own.optimizer.synchronize_messages()
        return own.z.clone()

    straight, stopped = (LockstepWorld(4, 2).run(partial(body, stop=stop)) for stop in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(straight, stopped, strict=True))


@pytest.mark.parametrize("base", [lambda: SGP(blocking=True), lambda: OuterSteps(1)])
def test_slices_are_put_together_before_each_step_or_it_is_an_error(base: Any) -> None:
    def body(transport: Any) -> None:
        own = Trained(transport, HierarchicalGossip(base()))
        own.step()
        own.model(own.inputs).sum().backward()
        with pytest.raises(RuntimeError, match="call the optimizer's zero_grad"):
            own.optimizer.step()

    LockstepWorld(4, 2).run(body)


@pytest.mark.parametrize(("size", "local"), [(3, 1), (3, 3), (1, 1)])
def test_one_rank_per_machine_and_one_machine(size: Any, local: Any) -> None:
    """The first is the base itself, the second all-reduce SGD."""

    def body(transport: Any, algorithm: Any) -> Any:
        own = Trained(transport, algorithm)
        for _ in range(8):
            own.step()
        own.optimizer.synchronize_messages()
        return own.z.clone()

    machines = LockstepWorld(size, local).run(lambda t: body(t, HierarchicalGossip(SGP())))
    other: Callable[[], SGP] = SGP if local == 1 else partial(SGP, None)
    plain = LockstepWorld(size).run(lambda t: body(t, other()))
    assert max(off(a, b) for a, b in zip(machines, plain, strict=True)) < 1e-5


def test_bytes_are_those_of_the_formula() -> None:
    def body(transport: Any) -> Any:
        own = Trained(transport, HierarchicalGossip(SGP()))
        for _ in range(3):
            own.step()
        own.optimizer.synchronize_messages()
        return own.z.numel(), own.algorithm._slice, own.optimizer.meter.payload_bytes

    for n, own, payload in LockstepWorld(8, 4).run(body):
        between = sealed_bytes(4 * (own.stop - own.start) + 8)
        # slices are put together before the first step, too, and once more at the end
        assert payload == 3 * (between + 4 * (n + 4)) + 4 * 4 * -(-n // 4)


def test_a_gradient_that_is_not_finite_drops_the_step_of_its_machine() -> None:
    def body(transport: Any) -> Any:
        own = Trained(transport, HierarchicalGossip(OuterSteps(100)))
        for step in range(3):
            own.optimizer.zero_grad()
            before = own.z.clone()
            ((own.model(own.inputs) - own.targets) ** 2).mean().backward()
            if step == 1 and transport.rank == 1:
                own.model[0].bias.grad[2] = float("nan")
            own.optimizer.step()
            if step == 1:
                moved = not torch.equal(before, own.z)
        return moved, own.z.clone()

    with pytest.warns(UserWarning, match="bias on rank 1 has NaN"):
        found = LockstepWorld(4, 2).run(body)
    assert [moved for moved, _ in found] == [False, False, True, True]
    assert torch.equal(found[0][1], found[1][1]) and bool(found[0][1].isfinite().all())


def test_gradients_that_some_ranks_lack() -> None:
    def body(transport: Any) -> Any:
        own = Trained(transport, HierarchicalGossip(SGP()))
        own.optimizer.zero_grad()
        own.model(own.inputs).sum().backward()
        own.model[0].bias.grad = None
        if transport.rank % 2:
            own.model[2].bias.grad = None
        before = [p.detach().clone() for p in own.model.parameters()]
        mine = before[3] if own.model[2].bias.grad is None else own.model[2].bias.grad.clone()
        own.optimizer.step()
        kept = [torch.equal(p, old) for p, old in zip(own.model.parameters(), before, strict=True)]
        return kept, mine, own.model[2].bias.grad

    found = LockstepWorld(4, 2).run(body)
    assert all(kept == [False, True, False, False] for kept, *_ in found)
    for rank, (_, _, grad) in enumerate(found):
        assert off(grad, found[rank - rank % 2][1] / 2) < 1e-6


def test_parameters_of_half_precision() -> None:
    def body(transport: Any) -> Any:
        own = Trained(
            transport, HierarchicalGossip(SGP()), lambda ps: torch.optim.SGD(ps, lr=0.05), torch.bfloat16
        )
        losses = [own.step() for _ in range(60)]
        own.optimizer.synchronize_messages()
        return losses[0], losses[-1], torch.cat([p.detach().flatten() for p in own.model.parameters()])

    found = LockstepWorld(4, 2).run(body)
    assert all(last < 0.5 * first for first, last, _ in found)
    assert torch.equal(found[0][2], found[1][2]) and torch.equal(found[2][2], found[3][2])


def test_optimizers_between_machines_have_names_of_their_own() -> None:
    def prefixes(transport: Any) -> list[str]:
        transports = [*(CrossMachineTransport(transport) for _ in range(2)), transport]
        return [unique_prefix(t) for t in transports]

    assert LockstepWorld(2, 1).run(prefixes) == [["dgc0", "dgc1", "dgc2"]] * 2


class InPlaceTransport(LockstepTransport):
    """Stores the reply to an all-reduce in the tensor of the request, as Horovod and torch.distributed do."""

    def wait(self, work: LockstepWork) -> tuple[Any, ...]:
        replies = super().wait(work)
        for request, reply in zip(work.requests[self.rank], replies, strict=True):
            if isinstance(request, AllReduce):
                request.tensor.copy_(reply)
        return replies


@pytest.mark.parametrize("kind", [LockstepTransport, InPlaceTransport])
def test_gradients_that_nobody_averages_are_refused(kind: Any) -> None:
    def body(transport: Any) -> None:
        own = Trained(kind(transport._world, transport.rank), HierarchicalGossip(SGP(), averages_gradients=False))
        own.step()

    with pytest.raises(ValueError, match="the ranks of a machine have different gradients"):
        LockstepWorld(4, 2).run(body)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="ADPSGD is asynchronous"):
        HierarchicalGossip(ADPSGD())

    def tiny(transport: Any) -> None:
        model = torch.nn.Linear(1, 1)
        flat = gossip.FlatModel(list(model.named_parameters()))
        HierarchicalGossip(SGP()).start(flat, transport, TrafficMeter())

    with pytest.raises(ValueError, match="2 elements cannot be divided into 4 slices"):
        LockstepWorld(4).run(tiny)
    states = LockstepWorld(4, 2).run(lambda t: Trained(t, HierarchicalGossip(SGP())).algorithm.state_dict())
    with pytest.raises(ValueError, match="another slice of the model"):
        LockstepWorld(4).run(
            lambda t: Trained(t, HierarchicalGossip(SGP())).algorithm.load_state_dict(states[t.rank])
        )
