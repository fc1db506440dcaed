"""HierarchicalGossip: ranks of a machine have equal models, as single ranks with the mean gradient would have."""

from functools import partial
from typing import Any

import pytest
import torch
from gossip.networks import BASES, Trained, after, each, farthest, mean, of_machines, off, on, same
from refusals import check_refusals

from dgc import gossip
from dgc.comm.lockstep import LockstepTransport, LockstepWork, LockstepWorld
from dgc.comm.meter import TrafficMeter
from dgc.comm.requests import AllReduce
from dgc.comm.transport import CrossMachineTransport
from dgc.engine.options import unique_prefix
from dgc.gossip import ADPSGD, DPSGD, OSGP, SGP, HierarchicalGossip
from dgc.local import OuterSteps

pytestmark = pytest.mark.usefixtures("no_type_checks")
each_size = pytest.mark.parametrize(("size", "local"), [(6, 2), (6, 3)])


@pytest.mark.parametrize("base", [base for name, base in BASES.items() if name != "slowmo"])
@each_size
def test_without_gradients_the_mean_over_machines_is_kept(base: Any, size: Any, local: Any) -> None:
    def body(own: Any) -> Any:
        own.go_apart()
        start = own.scatter(of=own.rank // local).z.double()
        own.only_gossip(7)
        return start, own.biased_parameters(), own.finish()

    starts, between, ends = zip(*each(size, of_machines(base), body, local), strict=True)
    wanted = mean(starts)
    assert off(mean(between), wanted) < 1e-5
    assert all(torch.equal(ends[rank], ends[rank - rank % local]) for rank in range(size))
    assert max(off(z, wanted) for z in ends) < max(off(z, wanted) for z in starts)


def train_40_steps(own: Any) -> tuple[float, float, list[torch.Tensor]]:
    """The loss before and after them, and all models and momenta."""
    models, losses = [], []
    for _ in range(40):
        own.optimizer.zero_grad()
        models.append(own.z.clone())
        losses.append(own.step())
    with own.optimizer.consensus():
        loss = float(own.loss().detach())
    buffers = [own.optimizer.inner.state[p]["momentum_buffer"] for p in own.model.parameters()]
    return losses[0], loss, [*models, *buffers, own.z.clone()]


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_it_learns_with_one_model_per_machine(base: Any) -> None:
    before, ends, models = zip(*each(6, of_machines(base), train_40_steps, 3), strict=True)
    assert mean(ends) < 0.4 * mean(before)
    assert all(same(models[rank], models[rank - rank % 3]) for rank in range(6))


@pytest.mark.parametrize("base", [SGP, OSGP, lambda: OuterSteps(3, SGP()), lambda: DPSGD(gossip.full)])
@each_size
def test_machines_are_ranks_with_the_mean_gradient(base: Any, size: Any, local: Any) -> None:
    data = on(size, lambda t: (own := Trained(t, OuterSteps(1))) and (own.inputs, own.targets))

    def with_data_of_a_machine(transport: Any, make: Any, ranks: int = 1) -> Any:
        own = Trained(transport, make())
        here = data[transport.rank // ranks * local :][:local]
        own.inputs, own.targets = (torch.cat(parts) for parts in zip(*here, strict=True))
        own.steps(12)
        return own.finish()

    two_levels = partial(HierarchicalGossip, averages_gradients=False)
    averaged = partial(with_data_of_a_machine, make=lambda: two_levels(base()), ranks=local)
    single = on(size // local, partial(with_data_of_a_machine, make=base))
    for machines in (after(12, of_machines(base), size, local), on(size, averaged, local)):
        assert farthest(machines, [single[rank // local] for rank in range(size)]) < 1e-5


def test_optimizers_between_machines_have_names_of_their_own() -> None:
    transport = LockstepWorld(2, 1).transports[0]
    transports = (CrossMachineTransport(transport), CrossMachineTransport(transport), transport)
    assert [unique_prefix(t) for t in transports] == ["dgc0", "dgc1", "dgc2"]


def test_with_one_rank_per_machine_it_is_the_base() -> None:
    assert farthest(after(8, of_machines(SGP), 3, 1), after(8, SGP, 3)) < 1e-5


@pytest.mark.parametrize("size", [3, 1])
def test_on_one_machine_it_is_all_reduce_sgd(size: int) -> None:
    plain = after(8, SGP if size == 1 else partial(SGP, None), size)
    assert farthest(after(8, of_machines(SGP), size, size), plain) < 1e-5


def test_a_gradient_that_is_not_finite_drops_the_step_of_its_machine() -> None:
    def body(own: Any) -> Any:
        own.step()
        before = own.z.clone()
        own.optimizer.zero_grad()
        own.loss().backward()
        if own.rank == 1:
            own.model[0].bias.grad[2] = float("nan")
        own.optimizer.step()
        moved = not torch.equal(before, own.z)
        own.step()
        return moved, own.z.clone()

    with pytest.warns(UserWarning, match="bias on rank 1 has NaN"):
        found = each(4, of_machines(partial(OuterSteps, 100)), body, 2)
    assert [moved for moved, _ in found] == [False, False, True, True]
    assert torch.equal(found[0][1], found[1][1]) and bool(found[0][1].isfinite().all())


def test_a_gradient_that_is_missing_on_a_rank_counts_as_zero() -> None:
    """One that is missing on all ranks of a machine moves nothing."""

    def missing(own: Any) -> Any:
        own.optimizer.zero_grad()
        own.model(own.inputs).sum().backward()
        own.model[0].bias.grad = None
        if own.rank % 2:
            own.model[2].bias.grad = None
        before = [p.detach().clone() for p in own.model.parameters()]
        mine = before[3] if own.model[2].bias.grad is None else own.model[2].bias.grad.clone()
        own.optimizer.step()
        kept = [torch.equal(p, old) for p, old in zip(own.model.parameters(), before, strict=True)]
        return kept, mine, own.model[2].bias.grad

    found = each(4, of_machines(SGP), missing, 2)
    for rank, (kept, _, grad) in enumerate(found):
        assert kept == [False, True, False, False]
        assert off(grad, found[rank - rank % 2][1] / 2) < 1e-6


class InPlaceTransport(LockstepTransport):
    """Stores the reply to an all-reduce in the tensor of the request, as Horovod and torch.distributed do."""

    def wait(self, work: LockstepWork) -> tuple[Any, ...]:
        replies = super().wait(work)
        for request, reply in zip(work.requests[self.rank], replies, strict=True):
            if isinstance(request, AllReduce):
                request.tensor.copy_(reply)
        return replies


def test_what_cannot_be_is_refused() -> None:
    def not_averaged(transport: Any, kind: Any) -> None:
        Trained(kind(transport._world, transport.rank), HierarchicalGossip(SGP(), averages_gradients=False)).step()

    def tiny(transport: Any) -> None:
        flat = gossip.FlatModel(list(torch.nn.Linear(1, 1).named_parameters()))
        HierarchicalGossip(SGP()).start(flat, transport, TrafficMeter())

    def exchanged(own: Any) -> None:
        own.algorithm.load_state_dict(states[own.rank])

    make, words = of_machines(SGP), "ranks of a machine have different gradients"
    states = each(4, make, lambda own: own.algorithm.state_dict(), 2)
    check_refusals(
        (lambda: on(4, partial(not_averaged, kind=LockstepTransport), 2), words),
        (lambda: on(4, partial(not_averaged, kind=InPlaceTransport), 2), words),
        (lambda: HierarchicalGossip(ADPSGD()), "ADPSGD is asynchronous"),
        (lambda: on(4, tiny), "2 elements cannot be divided into 4 slices"),
        (lambda: each(4, make, exchanged), "another slice of the model"),
    )
