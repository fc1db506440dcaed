"""Laws of training by gossip: the mean is preserved, ranks converge, and a resumed run continues bit for bit."""

from functools import partial
from typing import Any

import pytest
import torch
from cases import at_every_size, case
from gossip import networks as nets
from gossip.table import named
from on_ranks import on_ranks

from dgc import gossip
from dgc.comm import all_reduce
from dgc.gossip import DPSGD, OSGP, SGP, Int8Message
from dgc.local import Nesterov, OuterSteps, SlowMo
from dgc.optim import LocalOptimizer
from dgc.wire.envelope import sealed_bytes

ROUNDING = 2e-6
NEED_ZERO_GRAD = ("sgp", "osgp", "osgp, 2 steps", "osgp, 2 steps, after the step", "dpsgd", "choco", "slowmo")
pytestmark = pytest.mark.usefixtures("no_type_checks")


def check_the_mean(row: Any, size: Any, steps: Any) -> Any:
    """Steps without gradients keep it. Returns how far the models are from it at the end."""

    def body(transport: Any) -> Any:
        own = nets.Trained(transport, row.make()).scatter()
        start = own.z.double()
        for step in range(steps):
            own.optimizer.begin_epoch(3 * step // steps)
            own.only_gossip()
        in_flight = own.biased_parameters()
        z = own.finish().double()
        return start, in_flight, own.biased_parameters(), z, getattr(own.algorithm, "w", 1.0)

    starts, in_flight, ends, models, weights = zip(*nets.on(size, body), strict=True)
    wanted, scale = nets.mean(starts), max(float(s.abs().max()) for s in starts)
    assert max(nets.off(nets.mean(zs), wanted) for zs in (in_flight, ends)) < ROUNDING * scale
    assert sum(weights) == pytest.approx(size, abs=1e-9)
    return max(nets.off(z, wanted) for z in models) / scale


@at_every_size(nets.ROWS, nets.SIZES)
def test_without_gradients_the_mean_is_kept_and_all_agree(row: Any, size: Any) -> None:
    lossy = any(word in row.name for word in ("int8", "16"))
    assert check_the_mean(row, size, 45) < (0.05 if lossy else 1e-3)


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("row", nets.ROWS, ids=lambda row: row.name)
def test_many_ranks_keep_the_mean(row: Any, size: Any) -> None:
    check_the_mean(row, size, 12)


@pytest.mark.parametrize("row", nets.ROWS, ids=lambda row: row.name)
def test_training_learns_and_models_stay_close(row: Any) -> None:
    def body(transport: Any) -> Any:
        own = nets.Trained(transport, row.make())
        losses = []
        for step in range(60):
            own.optimizer.begin_epoch(step // 20)
            losses.append(own.step())
        with own.optimizer.consensus():
            return losses[0], float(own.loss().detach()), own.optimizer.consensus_distance, own.z.clone()

    before, ends, distances, models = zip(*nets.on(5 if row.takes(5) else 4, body), strict=True)
    assert nets.mean(ends) < 0.35 * nets.mean(before) and max(distances) < 2.0
    assert nets.same(models, [models[0]] * len(models))


@pytest.mark.parametrize("size", nets.SIZES)
def test_a_complete_graph_is_parameter_averaging(size: Any) -> None:
    """SGD with momentum on averaged gradients, every rank: the first oracle."""
    complete = partial(SGP, (lambda n: gossip.n_peer_exponential(n, n - 1)) if size > 1 else None)
    models = nets.after(20, complete, size)
    assert nets.same(models, [models[0]] * size)
    assert nets.off(models[0], nets.after_joint_steps(20, size)) < 1e-5


def test_a_complete_graph_takes_the_mean_of_the_steps_of_muon() -> None:
    def body(transport: Any) -> Any:
        """The parameters' means over the ranks after each step, without gossip."""
        own = nets.Trained(transport, OuterSteps(100), nets.muon)
        for step in range(6):
            own.step()
            own.z.copy_(all_reduce(transport, own.z.clone(), "mean", f"mean{step}"))
        return own.z

    expected = nets.on(4, body)
    for make in (partial(SGP, lambda n: gossip.n_peer_exponential(n, n - 1)), partial(DPSGD, gossip.full)):
        assert nets.farthest(nets.after(6, make, 4, make_optimizer=nets.muon), expected) < 1e-5


def test_one_peer_and_a_powers_of_two_lose_no_bit_and_the_biased_ablation_is_biased() -> None:
    def exact(transport: Any) -> Any:
        """Shares of 1/2, 4 ranks: sums of halves of small integers are exact."""
        own = nets.Trained(transport, OSGP(synch_freq=1))
        own.z.copy_(torch.arange(own.z.numel()) + 100.0 * transport.rank)
        own.only_gossip(9)
        return own.biased_parameters()

    def share(transport: Any, biased: Any) -> Any:
        """Half of a model is in flight while gradients are computed, and no weight corrects for it."""
        own = nets.Trained(transport, OSGP(biased=biased))
        start = own.z.clone()
        own.optimizer.zero_grad()
        return float(own.z.norm() / start.norm())

    total = sum(nets.on(4, exact))
    assert torch.equal(total, 4 * torch.arange(total.numel(), dtype=torch.float64) + 600)
    assert [nets.on(2, partial(share, biased=biased)) for biased in (False, True)] == [[1.0] * 2, [0.5] * 2]


KEPT = [row for row in (*nets.ROWS, *nets.OUTER) if not row.by_timing]
GO_ON: list[Any] = [(row.name, row.make, size, None) for row in KEPT for size in (1, 4)]
GO_ON += [(name, make, 3, None) for name, make in nets.MORE.items()]
GO_ON += [(f"{name}, machines", nets.of_machines(make), 4, 2) for name, make in nets.BASES.items()]
OF_MUON = ("sgp", "dpsgd", "powergossip", "slowmo", "diloco, top-k", "streaming, top-k", "local sgd, machines")


@pytest.mark.parametrize(("_", "make", "size", "local_size"), GO_ON, ids=named)
def test_it_goes_on_from_a_saved_state_bit_for_bit(_: str, make: Any, size: int, local_size: Any) -> None:
    nets.check_that_a_saved_state_goes_on(lambda own: nets.Trained(own, make()), size, 14, 7, local_size)


def test_muon_goes_on_from_a_saved_state_bit_for_bit() -> None:
    rows = [row for row in GO_ON if row[0] in OF_MUON]
    assert len(rows) == 2 * len(OF_MUON) - 1  # machines are of one size
    for name, make, *sizes in rows:

        def start(transport: Any, make: Any = make) -> Any:
            return nets.Trained(transport, make(), nets.muon)

        with case(name, sizes):
            nets.check_that_a_saved_state_goes_on(start, sizes[0], 14, 7, sizes[1])


def test_the_slow_momentum_of_muon_does_not_depend_on_the_group_that_is_first() -> None:
    """SlowMo reads the learning rate of one group. A schedule multiplies those of all by the same factor."""

    def body(transport: Any, is_first: bool) -> Any:
        slowmo = OuterSteps(2, None, SlowMo())
        own = nets.Trained(transport, slowmo, partial(nets.muon, is_first=is_first))
        for _ in range(8):
            for group in own.optimizer.param_groups:
                group["lr"] *= 0.8
            own.step()
        return own.finish()

    assert nets.farthest(*(nets.on(2, partial(body, is_first=first)) for first in (False, True))) < 1e-6


@pytest.mark.parametrize("new", [2, 3])
@pytest.mark.parametrize("algorithm", [SGP, OSGP])
def test_another_number_of_ranks_goes_on_from_the_same_mean(algorithm: Any, new: Any) -> None:
    """On a star of 4 ranks weights differ."""

    def seen(own: nets.Trained) -> Any:
        own.finish()
        return [own.biased_parameters()]

    for make in (nets.momentum, nets.muon):

        def start(transport: Any, make: Any = make) -> Any:
            return nets.Trained(transport, algorithm(gossip.star), make)

        nets.check_that_means_stay(start, seen, 3, new)


def test_slow_momentum_by_hand_and_an_outer_step_without_momentum() -> None:
    def second_step(outer: Any, key: str) -> float:
        z0 = torch.tensor([1.0])
        z0.grad, optimizer = torch.tensor([0.6]), outer([z0])
        optimizer.state[z0][key] = torch.tensor([2.0])
        optimizer.param_groups[0]["inner_lr"] = 0.1
        optimizer.step()
        return z0.item()

    assert second_step(SlowMo(0.5, 1.0), "u") == pytest.approx(1.0 - 0.1 * (0.5 * 2.0 + 0.6 / 0.1))
    nesterov = 1.0 - 0.7 * (0.6 + 0.9 * (1.8 + 0.6))
    assert second_step(Nesterov(0.7, 0.9), "momentum_buffer") == pytest.approx(nesterov)
    plain = nets.after(12, partial(OuterSteps, 3), 3)
    for outer in (SlowMo(0.0), Nesterov(1.0, 0.0)):
        assert nets.farthest(plain, nets.after(12, partial(OuterSteps, 3, None, outer), 3)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("make", "local_size"), [(SGP, None), (nets.of_machines(SGP), 2)])
def test_parameters_of_half_precision(dtype: Any, make: Any, local_size: Any) -> None:
    def body(transport: Any) -> Any:
        own = nets.Trained(transport, make(), lambda ps: torch.optim.SGD(ps, lr=0.05), dtype)
        losses, z = own.steps(60), own.finish()
        return losses[0], losses[-1], torch.cat([p.detach().flatten() for p in own.model.parameters()]), z

    found = nets.on(4, body, local_size)
    for first, last, parameters, z in found:
        assert last < 0.5 * first and parameters.dtype == dtype and torch.equal(parameters, z.to(dtype))
    if local_size:
        assert torch.equal(found[0][2], found[1][2]) and torch.equal(found[2][2], found[3][2])


def test_the_flat_model_moves_by_what_its_parameters_moved() -> None:
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))
    model = gossip.FlatModel([("p", p)])
    model.z.copy_(torch.tensor([1.001, -2.003, 1e-6]))
    model.scatter()
    model.gather()
    assert model.z.tolist() == torch.tensor([1.001, -2.003, 1e-6]).tolist()
    p.data.add_(0.5)
    model.gather()
    assert nets.off(model.z, torch.tensor([1.501, -1.503, 0.5])) < 1e-6


def test_metrics_have_the_weight_that_the_gradient_was_computed_with() -> None:
    """Not the weight that remains while messages are in flight."""

    def body(transport: Any, make: Any) -> Any:
        own, weights = nets.Trained(transport, make()), []
        for _ in range(4):
            own.step()
            weights.append(own.optimizer.metrics()["weight"])
        own.finish()
        return weights, own.algorithm.w

    for make in (SGP, partial(SGP, None), DPSGD):
        assert all(weights == [1.0] * 4 for weights, _ in nets.on(4, partial(body, make=make)))
    stars = (partial(SGP, gossip.star, blocking=blocking) for blocking in (False, True))
    star, blocking = (nets.on(4, partial(body, make=make)) for make in stars)
    assert star == blocking and star[0][0][1] > 1.5
    for step in range(4):
        assert sum(weights[step] for weights, _ in star) == pytest.approx(4)


@on_ranks(4)
def test_a_new_graph_begins_at_its_first_round(transport: Any) -> None:
    own, rounds = nets.Trained(transport, SGP(graph_from_epoch={1: gossip.exponential})), []
    for epoch in range(2):
        own.optimizer.begin_epoch(epoch)
        rounds.append(own.algorithm.round)
        own.steps(3)
    own.finish()
    assert rounds == [0, 0]


@on_ranks(2)
def test_a_rank_waits_after_as_many_steps_as_synch_freq(transport: Any) -> None:
    """Messages that seem never to arrive are waited for in every third step."""
    own, staleness = nets.Trained(transport, OSGP(synch_freq=2)), []
    transport.poll = lambda work: False
    for _ in range(7):
        own.step()
        staleness.append(own.optimizer.metrics()["staleness"])
    del transport.poll
    own.finish()
    assert staleness == [0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 0.0]


def test_a_step_without_zero_grad_before_it_is_an_error_unless_no_message_is_in_flight() -> None:
    """Messages that overlap need it before the first step too. The slices of a machine are put together by it."""

    def refused(transport: Any, make: Any, steps: int) -> None:
        own = nets.Trained(transport, make())
        own.steps(steps)
        own.loss().backward()
        with pytest.raises(RuntimeError, match="call the optimizer's zero_grad"):
            own.optimizer.step()

    def taken(transport: Any, make: Any) -> None:
        own = nets.Trained(transport, make())
        for _ in range(4):
            own.loss().backward()
            own.optimizer.step()
        own.finish()

    for row in (*nets.ROWS, *nets.OUTER):
        if row.name in NEED_ZERO_GRAD:
            with case(row.name):
                nets.on(2, partial(refused, make=row.make, steps=1))
    nets.on(2, partial(refused, make=OSGP, steps=0))
    for base in (partial(SGP, blocking=True), partial(OuterSteps, 1)):
        nets.on(4, partial(refused, make=nets.of_machines(base), steps=1), 2)
    for make, size in ((partial(SGP, blocking=True), 3), (partial(OuterSteps, 2), 3), (OSGP, 1)):
        nets.on(size, partial(taken, make=make))


def test_zero_grad_twice_is_once_and_gradients_add_up_over_passes() -> None:
    def twice(transport: Any) -> Any:
        own = nets.Trained(transport, OSGP())
        for _ in range(5):
            own.optimizer.zero_grad()
            own.optimizer.zero_grad()
            own.step()
        return own.finish()

    def in_passes(transport: Any) -> Any:
        own = nets.Trained(transport, SGP())
        inputs, targets = own.inputs.split(10), own.targets.split(10)
        for _ in range(4):
            own.optimizer.zero_grad()
            for own.inputs, own.targets in zip(inputs, targets, strict=True):
                (own.loss() / 4).backward()
            own.optimizer.step()
        return own.finish()

    assert nets.same(nets.on(3, twice), nets.after(5, OSGP, 3))
    assert nets.farthest(nets.on(3, in_passes), nets.after(4, SGP, 3)) < 1e-5


def test_no_rank_leaves_before_all_have_closed() -> None:
    """The first rank that exits would end MPI on ranks that still train."""
    seen = []

    def body(transport: Any) -> None:
        own = nets.Trained(transport, SGP(gossip.ring))
        own.step()
        own.finish()
        seen.append("closes")
        own.optimizer.close()
        seen.append("closed")

    nets.on(4, body)
    assert seen == ["closes"] * 4 + ["closed"] * 4


@pytest.mark.filterwarnings("ignore:.*gradient of 0.bias on rank 1 has NaN or inf")
@on_ranks(3)
def test_a_gradient_that_is_not_finite_stays_with_its_rank(transport: Any) -> None:
    own = nets.Trained(transport, SGP())
    own.steps(3)
    own.optimizer.zero_grad()
    own.loss().backward()
    if transport.rank == 1:
        own.model[0].bias.grad[2] = float("nan")
    own.optimizer.step()
    own.steps(2)
    assert own.optimizer.dropped_steps == int(transport.rank == 1) and bool(own.finish().isfinite().all())


def test_a_gradient_scaler_scales_each_rank_s_gradients() -> None:
    def body(transport: Any, scaled: Any) -> Any:
        own = nets.Trained(transport, SGP())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        for step in range(5):
            own.optimizer.zero_grad()
            scaler.scale(own.loss()).backward()
            if scaled and step == 2:
                own.model[0].bias.grad[0] = float("inf")
            elif step == 2:
                own.optimizer.zero_grad()
            scaler.step(own.optimizer)
            scaler.update()
        return own.finish(), own.optimizer.dropped_steps, scaler.get_scale()

    plain, scaled = (nets.on(2, partial(body, scaled=scaled)) for scaled in (False, True))
    assert [s[1:] for s in scaled] == [(1, 2.0**9)] * 2
    assert nets.farthest([z for z, *_ in plain], [z for z, *_ in scaled]) < 1e-5


def test_bytes_are_those_of_the_formula() -> None:
    def body(transport: Any, make: Any) -> Any:
        own = nets.Trained(transport, make())
        own.steps(3)
        meter, n = own.optimizer.meter, own.finish().numel()
        return n, meter.payload_bytes, meter.wire_bytes, meter.dense_wire_bytes

    for make, peers, each in (
        (SGP, 1, lambda n: 4 * n + 8),
        (partial(SGP, gossip.full), 3, lambda n: 4 * n + 8),
        (partial(DPSGD, gossip.bipartite_exponential), 1, lambda n: 4 * n),
        (partial(SGP, message=Int8Message(16)), 1, lambda n: n + 4 * -(-n // 16) + 8),
    ):
        for n, payload, wire, dense in nets.on(4, partial(body, make=make)):
            assert payload == wire == 3 * peers * sealed_bytes(each(n)) and dense == 1.5 * 12 * n


@on_ranks(2)
def test_ranks_with_other_models_are_told_apart(transport: Any) -> None:
    model = torch.nn.Linear(2 + transport.rank, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    other = 1 - transport.rank
    message = rf"rank {other} and rank {transport.rank} train different .*\('weight', \(1, {2 + other}\)"
    with pytest.raises(ValueError, match=message):
        LocalOptimizer(inner, model.named_parameters(), SGP(), transport=transport)
