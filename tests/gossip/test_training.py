"""Laws of training by gossip: the mean is preserved, ranks converge, and a resumed run continues bit for bit."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from cases import at_every_size, case
from gossip import networks as nets
from gossip.table import named
from noise import Noisy, flip, places
from on_ranks import on_ranks

from dgc import contrib, gossip
from dgc.comm import all_reduce
from dgc.core.envelope import sealed_bytes
from dgc.gossip import DPSGD, OSGP, SGP, Int8Message
from dgc.local import Nesterov, OuterSteps, SlowMo
from dgc.optim import LocalOptimizer

ROUNDING = 2e-6
NEED_ZERO_GRAD = ("sgp", "osgp", "osgp, 2 steps", "osgp, 2 steps, after the step", "dpsgd", "choco", "slowmo")
pytestmark = pytest.mark.usefixtures("no_type_checks")


def check_the_mean(row: Any, size: Any, steps: Any) -> Any:
    """Steps without gradients keep it. Returns the largest distance at the end, and its share of the first one."""

    def body(own: Any) -> Any:
        own.go_apart()
        start = own.scatter().z.double()
        for step in range(steps):
            own.optimizer.begin_epoch(3 * step // steps)
            own.only_gossip()
        in_flight = own.biased_parameters()
        z = own.finish().double()
        return start, in_flight, own.biased_parameters(), z, getattr(own.algorithm, "w", 1.0)

    starts, in_flight, ends, models, weights = zip(*nets.each(size, row.make, body), strict=True)
    wanted, scale = nets.mean(starts), max(float(s.abs().max()) for s in starts)
    assert max(nets.off(nets.mean(zs), wanted) for zs in (in_flight, ends)) < ROUNDING * scale
    assert sum(weights) == pytest.approx(size, abs=1e-9)
    before, now = (max(float((z - wanted).norm()) for z in zs) for zs in (starts, models))
    return max(nets.off(z, wanted) for z in models) / scale, now / before if size > 1 else 0.0


@at_every_size([*nets.ROWS, *nets.MORE], nets.SIZES)
def test_steps_without_gradients_converge_to_the_mean_of_the_models(row: Any, size: Any) -> None:
    if row in nets.MORE:
        assert check_the_mean(row, size, 80)[1] < 0.05
    else:
        is_lossy = any(word in row.name for word in ("int8", "16"))
        assert check_the_mean(row, size, 45)[0] < (0.05 if is_lossy else 1e-3)


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("row", nets.ROWS, ids=lambda row: row.name)
def test_many_ranks_keep_the_mean(row: Any, size: Any) -> None:
    check_the_mean(row, size, 12)


@pytest.mark.parametrize("row", nets.ROWS, ids=lambda row: row.name)
def test_training_learns_with_models_that_stay_close(row: Any) -> None:
    def body(own: Any) -> Any:
        losses = []
        for step in range(60):
            own.optimizer.begin_epoch(step // 20)
            losses.append(own.step())
        with own.optimizer.consensus():
            return losses[0], float(own.loss().detach()), own.optimizer.consensus_distance, own.z.clone()

    before, ends, distances, models = zip(*nets.each(5 if row.takes(5) else 4, row.make, body), strict=True)
    assert nets.mean(ends) < 0.35 * nets.mean(before) and max(distances) < 2.0
    assert nets.same(models, [models[0]] * len(models))


def test_a_complete_graph_is_parameter_averaging() -> None:
    """SGD with momentum on averaged gradients is the first oracle. Of Muon it takes the mean of the steps."""
    for size in nets.SIZES:
        models = nets.after(20, partial(SGP, gossip.full), size)
        assert nets.same(models, [models[0]] * size)
        assert nets.off(models[0], nets.after_joint_steps(20, size)) < 1e-5

    def body(own: Any) -> Any:
        """The parameters' means over the ranks after each step, without gossip."""
        for step in range(6):
            own.step()
            own.z.copy_(all_reduce(own.optimizer.transport, own.z.clone(), "mean", f"mean{step}"))
        return own.z

    expected = nets.each(4, partial(OuterSteps, 100), body, make_optimizer=nets.muon)
    for make in (partial(SGP, gossip.full), partial(DPSGD, gossip.full)):
        assert nets.farthest(nets.after(6, make, 4, make_optimizer=nets.muon), expected) < 1e-5


def test_one_peer_loses_no_bit_of_small_integers() -> None:
    """Shares of 1/2, 4 ranks: sums of halves of small integers are exact."""

    def exact(own: Any) -> Any:
        own.z.copy_(torch.arange(own.z.numel()) + 100.0 * own.rank)
        own.only_gossip(9)
        return own.biased_parameters()

    total = sum(nets.each(4, partial(OSGP, synch_freq=1), exact))
    assert torch.equal(total, 4 * torch.arange(total.numel(), dtype=torch.float64) + 600)


@pytest.mark.parametrize(("biased", "expected"), [(False, 1.0), (True, 0.5)])
def test_the_biased_ablation_computes_gradients_at_half_of_the_model(biased: bool, expected: float) -> None:
    """Half of a model is in flight while gradients are computed, and no weight corrects for it."""

    def share(own: Any) -> Any:
        start = own.z.clone()
        own.optimizer.zero_grad()
        return float(own.z.norm() / start.norm())

    assert nets.each(2, partial(OSGP, biased=biased), share) == [expected] * 2


KEPT = [row for row in (*nets.ROWS, *nets.OUTER) if not row.by_timing]
GO_ON: list[Any] = [(row.name, row.make, 4, None) for row in KEPT]
GO_ON += [(row.name, row.make, 1, None) for row in KEPT if row.name in ("osgp", "choco", "slowmo")]
GO_ON += [(row.name, row.make, 3, None) for row in nets.MORE]
GO_ON += [(f"{name}, machines", nets.of_machines(make), 4, 2) for name, make in nets.BASES.items()]
OF_MUON = ("sgp", "dpsgd", "powergossip", "slowmo", "diloco, top-k", "streaming, top-k", "local sgd, machines")


@pytest.mark.parametrize(("_", "make", "size", "local_size"), GO_ON, ids=named)
def test_it_goes_on_from_a_saved_state_bit_for_bit(_: str, make: Any, size: int, local_size: Any) -> None:
    nets.check_that_a_saved_state_goes_on(lambda own: nets.Trained(own, make()), size, 14, 7, local_size)


def test_muon_goes_on_from_a_saved_state_bit_for_bit() -> None:
    rows = [row for row in GO_ON if row[0] in OF_MUON]
    assert {row[0] for row in rows} == {*OF_MUON}
    for name, make, *sizes in rows:
        start: Any = partial(lambda make, t: nets.Trained(t, make(), nets.muon), make)
        with case(name, sizes):
            nets.check_that_a_saved_state_goes_on(start, sizes[0], 14, 7, sizes[1])


def test_slow_momentum_of_muon_does_not_depend_on_which_group_is_first() -> None:
    """SlowMo reads the learning rate of one group. A schedule multiplies the rates of all by the same factor."""

    def body(own: Any) -> Any:
        for _ in range(8):
            for group in own.optimizer.param_groups:
                group["lr"] *= 0.8
            own.step()
        return own.finish()

    optimizers = (partial(nets.muon, is_first=is_first) for is_first in (False, True))
    make = partial(OuterSteps, 2, None, SlowMo())
    assert nets.farthest(*(nets.each(2, make, body, make_optimizer=muon) for muon in optimizers)) < 1e-6


@pytest.mark.parametrize(
    ("outer", "key", "expected"),
    [
        (SlowMo(0.5, 1.0), "u", 1.0 - 0.1 * (0.5 * 2.0 + 0.6 / 0.1)),
        (Nesterov(0.7, 0.9), "momentum_buffer", 1.0 - 0.7 * (0.6 + 0.9 * (1.8 + 0.6))),
    ],
    ids=["SlowMo", "Nesterov"],
)
def test_the_second_outer_step_is_as_computed_by_hand(outer: Any, key: str, expected: float) -> None:
    z0 = torch.tensor([1.0])
    z0.grad, optimizer = torch.tensor([0.6]), outer([z0])
    optimizer.state[z0][key] = torch.tensor([2.0])
    optimizer.param_groups[0]["inner_lr"] = 0.1
    optimizer.step()
    assert z0.item() == pytest.approx(expected)


@pytest.mark.parametrize("outer", [SlowMo(0.0), Nesterov(1.0, 0.0)], ids=["SlowMo", "Nesterov"])
def test_without_momentum_an_outer_optimizer_takes_the_mean(outer: Any) -> None:
    plain = nets.after(12, partial(OuterSteps, 3), 3)
    assert nets.farthest(plain, nets.after(12, partial(OuterSteps, 3, None, outer), 3)) < 1e-5


@pytest.mark.parametrize("algorithm", [SGP, OSGP])
def test_another_number_of_ranks_goes_on_from_the_same_mean(algorithm: Any) -> None:
    """On a star of 4 ranks weights differ."""

    def seen(own: nets.Trained) -> Any:
        own.finish()
        return [own.biased_parameters()]

    for make, new in product((nets.momentum, nets.muon), (2, 3)):
        start: Any = partial(lambda make, t: nets.Trained(t, algorithm(gossip.star), make), make)
        nets.check_that_means_stay(start, seen, 3, new)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("make", "local_size"), [(SGP, None), (nets.of_machines(SGP), 2)])
def test_parameters_of_half_precision(dtype: Any, make: Any, local_size: Any) -> None:
    def body(own: Any) -> Any:
        losses, z = own.steps(60), own.finish()
        return losses[0], losses[-1], torch.cat([p.detach().flatten() for p in own.model.parameters()]), z

    found = nets.each(4, make, body, local_size, make_optimizer=partial(torch.optim.SGD, lr=0.05), dtype=dtype)
    for rank, (first, last, parameters, z) in enumerate(found):
        assert last < 0.5 * first and parameters.dtype == dtype and torch.equal(parameters, z.to(dtype))
        assert local_size is None or torch.equal(parameters, found[rank // 2 * 2][2])


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

    def body(own: Any) -> Any:
        weights = []
        for _ in range(4):
            own.step()
            weights.append(own.optimizer.metrics()["weight"])
        own.finish()
        return weights, own.algorithm.w

    for make in (SGP, partial(SGP, None), DPSGD):
        assert all(weights == [1.0] * 4 for weights, _ in nets.each(4, make, body))
    star, blocking = (nets.each(4, partial(SGP, gossip.star, blocking=b), body) for b in (False, True))
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


@on_ranks(4)
def test_a_rank_waits_for_a_message_after_synch_freq_steps(transport: Any) -> None:
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

    def refused(own: Any, steps: int = 1) -> None:
        own.steps(steps)
        own.loss().backward()
        with pytest.raises(RuntimeError, match="call the optimizer's zero_grad"):
            own.optimizer.step()

    def taken(own: Any) -> None:
        for _ in range(4):
            own.loss().backward()
            own.optimizer.step()
        own.finish()

    for row in (*nets.ROWS, *nets.OUTER):
        if row.name in NEED_ZERO_GRAD:
            with case(row.name):
                nets.each(2, row.make, refused)
    nets.each(2, OSGP, partial(refused, steps=0))
    for base in (partial(SGP, blocking=True), partial(OuterSteps, 1)):
        nets.each(4, nets.of_machines(base), refused, 2)
    for make, size in ((partial(SGP, blocking=True), 3), (partial(OuterSteps, 2), 3), (OSGP, 1)):
        nets.each(size, make, taken)


def test_zero_grad_twice_is_as_once() -> None:
    def twice(own: Any) -> Any:
        for _ in range(5):
            own.optimizer.zero_grad()
            own.optimizer.zero_grad()
            own.step()
        return own.finish()

    assert nets.same(nets.each(3, OSGP, twice), nets.after(5, OSGP, 3))


def test_gradients_add_up_over_the_passes_of_a_step() -> None:
    def in_passes(own: Any) -> Any:
        inputs, targets = own.inputs.split(10), own.targets.split(10)
        for _ in range(4):
            own.optimizer.zero_grad()
            for own.inputs, own.targets in zip(inputs, targets, strict=True):
                (own.loss() / 4).backward()
            own.optimizer.step()
        return own.finish()

    assert nets.farthest(nets.each(3, SGP, in_passes), nets.after(4, SGP, 3)) < 1e-5


def test_close_waits_for_all_ranks() -> None:
    seen = []

    def body(own: Any) -> None:
        own.step()
        own.finish()
        seen.append("closes")
        own.optimizer.close()
        seen.append("closed")

    nets.each(4, partial(SGP, gossip.ring), body)
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
    def body(own: Any, scaled: Any) -> Any:
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

    plain, scaled = (nets.each(2, SGP, partial(body, scaled=scaled)) for scaled in (False, True))
    assert [s[1:] for s in scaled] == [(1, 2.0**9)] * 2
    assert nets.farthest([z for z, *_ in plain], [z for z, *_ in scaled]) < 1e-5


N = 6 * 9 + 9 + 9 * 3 + 3  # elements of the model
KS = 6 + 1 + 3 + 1  # a tenth of the elements of each tensor
RANK_1, RANK_2 = [4 * (12 + 12), 4 * 15], [4 * (12 + 24), 4 * 30]  # the larger and the smaller factors
MESSAGES: list[tuple[Any, int, list[int]]] = [
    (SGP, 4, [4 * N + 8]),
    (partial(SGP, gossip.full), 4, [4 * N + 8] * 3),
    (partial(DPSGD, gossip.bipartite_exponential), 4, [4 * N]),
    (partial(SGP, message=Int8Message(16)), 4, [N + 4 * -(-N // 16) + 8]),
    (contrib.CHOCO, 8, [8 * KS]),
    (partial(contrib.CHOCO, quantizer=contrib.TopK(0.1, "fp16")), 8, [6 * KS + 4]),
    (partial(contrib.CHOCO, quantizer=contrib.Sign()), 8, [4 * 4 + -(-N // 8)]),
    (contrib.PowerGossip, 8, RANK_1),
    (partial(contrib.PowerGossip, rank=2), 8, RANK_2),
    (partial(contrib.PowerGossip, num_iters_per_step=1), 4, [4 * (12 + 12), 4 * (12 + 15)]),
]


def test_bytes_are_those_of_the_formula() -> None:
    def body(own: Any) -> Any:
        own.steps(4)
        own.finish()
        meter = own.optimizer.meter
        return own.algorithm, meter.payload_bytes, meter.wire_bytes, meter.dense_wire_bytes

    for make, times, messages in MESSAGES:
        for algorithm, payload, wire, dense in nets.each(4, make, body):
            assert payload == wire == times * sum(map(sealed_bytes, messages)), make
            assert dense == 1.5 * 16 * N  # an all-reduce over 4 ranks
            if isinstance(algorithm, contrib.CHOCO | contrib.PowerGossip):
                assert algorithm.compress_ratio == pytest.approx(payload / (2 * 16 * N))

    def of_slices(own: Any) -> Any:
        own.steps(3)
        return own.finish().numel(), own.algorithm._slice, own.optimizer.meter.payload_bytes

    for n, own, payload in nets.each(8, nets.of_machines(SGP), of_slices, 4):
        between = sealed_bytes(4 * (own.stop - own.start) + 8)
        # slices are put together before the first step, too, and once more at the end
        assert payload == 3 * (between + 4 * (n + 4)) + 4 * 4 * -(-n // 4)


@on_ranks(2)
def test_ranks_with_other_models_are_told_apart(transport: Any) -> None:
    model = torch.nn.Linear(2 + transport.rank, 1)
    inner, other = torch.optim.SGD(model.parameters(), lr=0.1), 1 - transport.rank
    message = rf"rank {other} and rank {transport.rank} train different .*\('weight', \(1, {2 + other}\)"
    with pytest.raises(ValueError, match=message):
        LocalOptimizer(inner, model.named_parameters(), SGP(), transport=transport)


@pytest.mark.parametrize("row", [*nets.ROWS, *nets.OUTER], ids=lambda row: row.name)
def test_a_flipped_bit_of_a_message_is_an_error_that_names_the_sender(row: Any) -> None:
    """In the first and last message, at all places of the first algorithm's and at three of the others'."""

    def body(transport: Any) -> None:
        own = nets.Trained(transport, row.make())
        own.steps(6)
        own.finish()

    clean, unnoticed = Noisy(4), []
    clean.run(body)
    for number in {0, len(clean.messages) - 1} if clean.messages else ():  # some only reduce
        for byte in places(clean.messages[number])[:: 1 if row is nets.ROWS[0] else 4]:
            try:
                Noisy(4, None, flip(byte), number).run(body)
            except RuntimeError as error:
                assert str(error).startswith("rank 1 sent ") and "wrong checksum" in str(error), error
            else:
                unnoticed.append(f"message {number}, byte {byte} of {clean.messages[number]}")
    assert unnoticed == []
