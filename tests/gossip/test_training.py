"""Laws of training by gossip: the mean is preserved, ranks converge, and a resumed run continues bit for bit."""

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from cases import at_every_size
from gossip.networks import OUTER, ROWS, SIZES, Trained, momentum, on

from dgc import gossip
from dgc.comm.lockstep import LockstepWorld
from dgc.compression.protocol import NonFiniteGradientError
from dgc.engine.redistribute import redistribute
from dgc.gossip import DPSGD, OSGP, SGP, Int8Message, TopologyError
from dgc.local import Nesterov, OuterSteps, SlowMo
from dgc.optim import LocalOptimizer
from dgc.wire.envelope import sealed_bytes

ROUNDING = 2e-6
NEED_ZERO_GRAD = ("sgp", "osgp", "osgp, 2 steps", "osgp, 2 steps, after the step", "dpsgd", "choco", "slowmo")
pytestmark = pytest.mark.usefixtures("no_type_checks")


def mean(parts: Any) -> Any:
    return sum(parts) / len(parts)


def without_gradients(transport: Any, row: Any, steps: Any, per_epoch: Any) -> Any:
    """A rank after steps of gossip alone, its model before them, and its x with messages in flight."""
    own = Trained(transport, row.make()).scatter()
    start = own.z.double()
    for step in range(steps):
        own.optimizer.begin_epoch(step // per_epoch)
        own.only_gossip()
    return own, start, own.biased_parameters()


@at_every_size(ROWS, SIZES)
def test_without_gradients_the_mean_is_kept_and_all_agree(row: Any, size: Any) -> None:
    def body(transport: Any) -> Any:
        own, start, between = without_gradients(transport, row, 45, 15)
        own.optimizer.synchronize_messages()
        return start, between, own.biased_parameters(), own.z.double(), getattr(own.algorithm, "w", 1.0)

    starts, between, ends, models, weights = zip(*on(size, body), strict=True)
    wanted, scale = mean(starts), max(float(s.abs().max()) for s in starts)
    assert float((mean(between) - wanted).abs().max()) < ROUNDING * scale  # with messages in flight
    assert float((mean(ends) - wanted).abs().max()) < ROUNDING * scale
    assert sum(weights) == pytest.approx(size, abs=1e-9)
    spread = max(float((z - wanted).abs().max()) for z in models)
    lossy = any(word in row.name for word in ("int8", "16"))
    assert spread < (0.05 if lossy else 1e-3) * scale


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_many_ranks_keep_the_mean(row: Any, size: Any) -> None:
    def body(transport: Any) -> Any:
        own, start, between = without_gradients(transport, row, 12, 4)
        own.optimizer.synchronize_messages()
        return start, between, float(own.algorithm.w) if hasattr(own.algorithm, "w") else 1.0

    starts, between, weights = zip(*on(size, body), strict=True)
    scale = max(float(s.abs().max()) for s in starts)
    assert float((mean(between) - mean(starts)).abs().max()) < ROUNDING * scale
    assert sum(weights) == pytest.approx(size, abs=1e-9)


@pytest.mark.parametrize("size", [5])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_training_learns_and_models_stay_close(row: Any, size: Any) -> None:
    if not row.takes(size):
        size = 4

    def body(transport: Any) -> Any:
        own = Trained(transport, row.make())
        losses = []
        for step in range(60):
            own.optimizer.begin_epoch(step // 20)
            losses.append(own.step())
        with own.optimizer.consensus():
            loss = ((own.model(own.inputs) - own.targets) ** 2).mean()
            common = own.z.clone()
        return losses[0], float(loss.detach()), own.optimizer.consensus_distance, common

    found = on(size, body)
    assert mean([after for _, after, _, _ in found]) < 0.35 * mean([before for before, *_ in found])
    assert all(torch.equal(common, found[0][3]) for *_, common in found)
    assert max(distance for _, _, distance, _ in found) < 2.0


@pytest.mark.parametrize("size", SIZES)
def test_a_complete_graph_is_parameter_averaging(size: Any) -> None:
    """SGD with momentum on averaged gradients, every rank: the first oracle."""

    def complete(n: Any) -> Any:
        return gossip.n_peer_exponential(n, n - 1)

    def body(transport: Any) -> Any:
        own = Trained(transport, SGP(complete if size > 1 else None))
        for _ in range(20):
            own.step()
        own.optimizer.synchronize_messages()
        return own.z.clone()

    models = on(size, body)
    assert all(torch.equal(z, models[0]) for z in models)

    ranks = on(size, lambda transport: Trained(transport, SGP()))
    one = ranks[0]
    optimizer = momentum(one.model.parameters())
    for _ in range(20):
        optimizer.zero_grad()
        sum(((one.model(r.inputs) - r.targets) ** 2).mean() for r in ranks).div(size).backward()
        optimizer.step()
    assert float((models[0] - one.z).abs().max()) < 1e-5


@pytest.mark.parametrize("size", [2, 4, 8, 32])
def test_the_one_peer_exponential_graph_agrees_after_log2_n_rounds(size: Any) -> None:
    def body(transport: Any) -> Any:
        own = Trained(transport, SGP()).scatter()
        start = own.z.clone()
        for _ in range(size.bit_length() - 1):
            own.only_gossip()
        own.optimizer.synchronize_messages()
        return start, own.z.clone()

    starts, ends = zip(*on(size, body), strict=True)
    wanted = torch.stack(starts).double().mean(0)
    assert max(float((z - wanted).abs().max()) for z in ends) < ROUNDING * 4


def test_one_peer_and_a_powers_of_two_lose_no_bit() -> None:
    """Shares of 1/2, 4 ranks: sums of halves of small integers are exact."""

    def body(transport: Any) -> Any:
        own = Trained(transport, OSGP(synch_freq=1))
        own.z.copy_(torch.arange(own.z.numel()) + 100.0 * transport.rank)
        for _ in range(9):
            own.only_gossip()
        return own.biased_parameters()

    total = sum(on(4, body))
    assert torch.equal(total, 4 * torch.arange(total.numel(), dtype=torch.float64) + 600)


@pytest.mark.parametrize("make", [lambda: SGP(gossip.star), lambda: OSGP(gossip.star), OSGP])
def test_weight_decay_acts_on_z_for_every_weight(make: Any) -> None:
    """With no gradient but decay, lr d, every rank's model shrinks by 1 - lr d where x moves as z does."""

    def body(transport: Any) -> Any:
        decay = Trained(transport, make(), lambda ps: torch.optim.SGD(ps, lr=0.5, weight_decay=0.1))
        start = decay.z.clone()
        for p in decay.model.parameters():
            p.grad = torch.zeros_like(p)
        decay.optimizer.method.begin_step()
        w, z = decay.algorithm.w, decay.z.clone()
        decay.optimizer.step()
        return start, float((decay.z - z * (1 - 0.05 / (w if decay.algorithm.overlap else 1.0))).abs().max())

    assert all(error < 1e-6 for _, error in on(4, body))


def test_any_optimizer_may_step() -> None:
    def body(transport: Any, make: Any) -> Any:
        own = Trained(transport, OSGP(), make)
        losses = [own.step() for _ in range(60)]
        return losses[0], losses[-1]

    for make in (lambda p: torch.optim.AdamW(p, lr=0.02), lambda p: torch.optim.SGD(p, 0.05, 0.9, nesterov=True)):
        found = on(4, partial(body, make=make))
        assert mean([b for _, b in found]) < 0.3 * mean([a for a, _ in found])


@pytest.mark.parametrize("row", [r for r in (*ROWS, *OUTER) if not r.by_timing], ids=lambda row: row.name)
@pytest.mark.parametrize("size", [1, 4])
def test_it_goes_on_from_a_saved_state_bit_for_bit(row: Any, size: Any) -> None:
    def body(transport: Any, stop: Any) -> Any:
        own = Trained(transport, row.make())
        for step in range(14):
            own.optimizer.begin_epoch(step // 5)
            if step == 7:
                state = copy.deepcopy(own.optimizer.compression_state_dict())
                if stop:
                    own.optimizer.close()
                    own = Trained(transport, row.make()).scatter(3)
                    own.optimizer.load_compression_state_dict(state)
                    own.optimizer.begin_epoch(step // 5)
            own.step()
        own.optimizer.synchronize_messages()
        return own.z.clone()

    straight, stopped = on(size, lambda t: body(t, False)), on(size, lambda t: body(t, True))
    assert all(torch.equal(a, b) for a, b in zip(straight, stopped, strict=True))


@pytest.mark.parametrize("new", [2, 3])
@pytest.mark.parametrize("algorithm", [SGP, OSGP])
def test_another_number_of_ranks_goes_on_from_the_same_mean(algorithm: Any, new: Any) -> None:
    """On a star of 4 ranks weights differ."""

    def before(transport: Any) -> Any:
        own = Trained(transport, algorithm(gossip.star))
        for _ in range(3):
            own.step()
        own.optimizer.synchronize_messages()
        return own.optimizer.compression_state_dict(), own.biased_parameters(), own.algorithm.w

    states, biased, weights = zip(*on(4, before), strict=True)
    assert max(weights) - min(weights) > 0.5

    def after(transport: Any) -> Any:
        own = Trained(transport, algorithm(gossip.star))
        own.optimizer.load_compression_state_dict(redistribute(states, new)[transport.rank])
        return own.biased_parameters()

    assert float((mean(on(new, after)) - mean(biased)).abs().max()) < 1e-6


@pytest.mark.parametrize("outer", [SlowMo(0.0), Nesterov(1.0, 0.0)])
def test_an_outer_step_without_momentum_is_the_mean(outer: Any) -> None:
    def body(transport: Any, algorithm: Any) -> Any:
        own = Trained(transport, algorithm)
        for _ in range(12):
            own.step()
        return own.z.clone()

    plain, outer = on(3, lambda t: body(t, OuterSteps(3))), on(3, lambda t: body(t, OuterSteps(3, None, outer)))
    assert all(float((a - b).abs().max()) < 1e-5 for a, b in zip(plain, outer, strict=True))


def test_slow_momentum_by_hand() -> None:
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


def test_the_biased_ablation_is_biased() -> None:
    """Half of a model is in flight while gradients are computed, and no weight corrects for it."""

    def body(transport: Any, biased: Any) -> Any:
        own = Trained(transport, OSGP(biased=biased))
        start = own.z.clone()
        own.optimizer.zero_grad()
        return float(own.z.norm() / start.norm())

    assert on(2, lambda t: body(t, False)) == [1.0, 1.0] and on(2, lambda t: body(t, True)) == [0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_of_half_precision(dtype: Any) -> None:
    def body(transport: Any) -> Any:
        own = Trained(transport, SGP(), lambda ps: torch.optim.SGD(ps, lr=0.05), dtype)
        losses = [own.step() for _ in range(60)]
        own.optimizer.synchronize_messages()
        return losses[0], losses[-1], torch.cat([p.detach().flatten() for p in own.model.parameters()]), own.z

    for first, last, parameters, z in on(4, body):
        assert last < 0.5 * first and parameters.dtype == dtype and torch.equal(parameters, z.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_of_half_precision_are_averaged_in_fp32(dtype: Any) -> None:
    def body(transport: Any) -> Any:
        own = Trained(transport, SGP(gossip.ring), dtype=dtype).scatter()
        before = own.z.double()
        for _ in range(60):
            own.only_gossip()
        return before, own.biased_parameters()

    before, after = zip(*on(8, body), strict=True)
    assert float((mean(after) - mean(before)).abs().max()) < 1e-5


def test_the_flat_model_moves_by_what_its_parameters_moved() -> None:
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))
    model = gossip.FlatModel([("p", p)])
    model.z.copy_(torch.tensor([1.001, -2.003, 1e-6]))
    model.scatter()
    model.gather()
    assert model.z.tolist() == torch.tensor([1.001, -2.003, 1e-6]).tolist()
    p.data.add_(0.5)
    model.gather()
    assert float((model.z - torch.tensor([1.501, -1.503, 0.5])).abs().max()) < 1e-6


def test_metrics_have_the_weight_that_the_gradient_was_computed_with() -> None:
    """Not the weight that remains while messages are in flight."""

    def body(transport: Any, make: Any) -> Any:
        own, weights = Trained(transport, make()), []
        for _ in range(4):
            own.step()
            weights.append(own.optimizer.metrics()["weight"])
        own.optimizer.synchronize_messages()
        return weights, own.algorithm.w

    for make in (SGP, lambda: SGP(None), DPSGD):
        assert all(weights == [1.0] * 4 for weights, _ in on(4, partial(body, make=make)))
    star = on(4, lambda t: body(t, lambda: SGP(gossip.star)))
    assert star == on(4, lambda t: body(t, lambda: SGP(gossip.star, blocking=True)))
    for step in range(4):
        assert sum(weights[step] for weights, _ in star) == pytest.approx(4)
    assert star[0][0][1] > 1.5


def test_a_new_graph_begins_at_its_first_round() -> None:
    def body(transport: Any) -> Any:
        own, rounds = Trained(transport, SGP(graph_from_epoch={1: gossip.exponential})), []
        for epoch in range(2):
            own.optimizer.begin_epoch(epoch)
            rounds.append(own.algorithm.round)
            for _ in range(3):
                own.step()
        own.optimizer.synchronize_messages()
        return rounds

    assert on(4, body) == [[0, 0]] * 4


def test_a_rank_waits_after_as_many_steps_as_synch_freq() -> None:
    """Messages that seem never to arrive are waited for in every third step."""

    def body(transport: Any) -> Any:
        own, staleness = Trained(transport, OSGP(synch_freq=2)), []
        transport.poll = lambda work: False
        for _ in range(7):
            own.step()
            staleness.append(own.optimizer.metrics()["staleness"])
        del transport.poll
        own.optimizer.synchronize_messages()
        return staleness

    assert on(2, body) == [[0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 0.0]] * 2


# --- what users do ---------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [r for r in (*ROWS, *OUTER) if r.name in NEED_ZERO_GRAD], ids=lambda row: row.name)
def test_a_step_without_zero_grad_before_it_is_an_error(row: Any) -> None:
    def body(transport: Any) -> None:
        own = Trained(transport, row.make())
        own.step()
        own.model(own.inputs).sum().backward()
        with pytest.raises(RuntimeError, match="call the optimizer's zero_grad"):
            own.optimizer.step()

    on(2, body)


def test_messages_that_overlap_need_zero_grad_before_the_first_step() -> None:
    def body(transport: Any) -> None:
        own = Trained(transport, OSGP())
        own.model(own.inputs).sum().backward()
        with pytest.raises(RuntimeError, match="call the optimizer's zero_grad"):
            own.optimizer.step()

    on(2, body)


@pytest.mark.parametrize("make", [lambda: SGP(blocking=True), lambda: OuterSteps(2), OSGP])
def test_zero_grad_may_be_missing_if_no_message_is_in_flight(make: Any) -> None:
    def body(transport: Any) -> Any:
        own = Trained(transport, make())
        for _ in range(4):
            own.model(own.inputs).sum().backward()
            own.optimizer.step()
        own.optimizer.synchronize_messages()
        return own.z.clone()

    on(1 if make is OSGP else 3, body)


def test_no_rank_leaves_before_all_have_closed() -> None:
    """The first rank that exits would end MPI on ranks that still train."""
    seen = []

    def body(transport: Any) -> None:
        own = Trained(transport, SGP(gossip.ring))
        own.step()
        own.optimizer.synchronize_messages()
        seen.append("closes")
        own.optimizer.close()
        seen.append("closed")

    on(4, body)
    assert seen == ["closes"] * 4 + ["closed"] * 4


def test_zero_grad_twice_is_once() -> None:
    def body(transport: Any, times: Any) -> Any:
        own = Trained(transport, OSGP())
        for _ in range(5):
            for _ in range(times - 1):
                own.optimizer.zero_grad()
            own.step()
        own.optimizer.synchronize_messages()
        return own.z.clone()

    once, often = on(3, lambda t: body(t, 1)), on(3, lambda t: body(t, 3))
    assert all(torch.equal(a, b) for a, b in zip(once, often, strict=True))


def test_gradients_add_up_over_passes() -> None:
    def body(transport: Any, passes: Any) -> Any:
        own = Trained(transport, SGP())
        for _ in range(4):
            own.optimizer.zero_grad()
            for part in range(passes):
                chosen = slice(part * 40 // passes, (part + 1) * 40 // passes)
                loss = ((own.model(own.inputs[chosen]) - own.targets[chosen]) ** 2).mean() / passes
                loss.backward()
            own.optimizer.step()
        own.optimizer.synchronize_messages()
        return own.z.clone()

    for a, b in zip(on(3, lambda t: body(t, 1)), on(3, lambda t: body(t, 4)), strict=True):
        assert float((a - b).abs().max()) < 1e-5


def test_a_gradient_that_is_not_finite_stays_with_its_rank() -> None:
    def body(transport: Any) -> Any:
        own = Trained(transport, SGP())
        for step in range(6):
            own.optimizer.zero_grad()
            ((own.model(own.inputs) - own.targets) ** 2).mean().backward()
            if step == 3 and transport.rank == 1:
                own.model[0].bias.grad[2] = float("nan")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                own.optimizer.step()
            if step == 3:
                warned = [str(w.message) for w in caught]
        own.optimizer.synchronize_messages()
        return own.optimizer.dropped_steps, warned, bool(own.z.isfinite().all())

    found = on(3, body)
    assert [dropped for dropped, _, _ in found] == [0, 1, 0] and all(finite for *_, finite in found)
    assert "gradient of 0.bias on rank 1 has NaN or inf" in found[1][1][0] and not found[0][1]


def test_a_gradient_that_is_not_finite_raises_if_asked() -> None:
    transport = LockstepWorld(1).transports[0]
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = LocalOptimizer(inner, model.named_parameters(), SGP(), transport=transport, nonfinite="raise")
    model(torch.full((1, 2), float("inf"))).sum().backward()
    with pytest.raises(NonFiniteGradientError, match="gradient of weight on rank 0"):
        optimizer.step()


def test_a_gradient_scaler_scales_each_rank_s_gradients() -> None:
    def body(transport: Any, scaled: Any) -> Any:
        own = Trained(transport, SGP())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        for step in range(5):
            own.optimizer.zero_grad()
            loss = ((own.model(own.inputs) - own.targets) ** 2).mean()
            scaler.scale(loss).backward()
            if scaled and step == 2:
                own.model[0].bias.grad[0] = float("inf")
            elif step == 2:
                own.optimizer.zero_grad()
            scaler.step(own.optimizer)
            scaler.update()
        own.optimizer.synchronize_messages()
        return own.z.clone(), own.optimizer.dropped_steps, scaler.get_scale()

    plain, scaled = on(2, lambda t: body(t, False)), on(2, lambda t: body(t, True))
    assert [s[1:] for s in scaled] == [(1, 2.0**9)] * 2
    assert all(float((a[0] - b[0]).abs().max()) < 1e-5 for a, b in zip(plain, scaled, strict=True))


def test_bytes_are_those_of_the_formula() -> None:
    world = LockstepWorld(4)
    for algorithm, peers, each in (
        (SGP, 1, lambda n: sealed_bytes(4 * n + 8)),
        (lambda: SGP(gossip.full), 3, lambda n: sealed_bytes(4 * n + 8)),
        (lambda: DPSGD(gossip.bipartite_exponential), 1, lambda n: sealed_bytes(4 * n)),
        (lambda: SGP(message=Int8Message(16)), 1, lambda n: sealed_bytes(n + 4 * -(-n // 16) + 8)),
    ):

        def body(transport: Any, algorithm: Any = algorithm) -> Any:
            own = Trained(transport, algorithm())
            for _ in range(3):
                own.step()
            own.optimizer.synchronize_messages()
            meter = own.optimizer.meter
            return own.z.numel(), meter.payload_bytes, meter.wire_bytes, meter.dense_wire_bytes

        for n, payload, wire, dense in world.run(body):
            assert (payload, wire, dense) == (3 * peers * each(n), 3 * peers * each(n), 1.5 * 12 * n)


def refused(algorithm: Any, size: Any, match: Any, kind: Any = ValueError) -> None:
    with pytest.raises(kind, match=match):
        on(size, lambda transport: Trained(transport, algorithm()))


def test_what_cannot_be_is_refused() -> None:
    refused(lambda: DPSGD(gossip.star), 4, "the shares that rank 0 receives sum to", TopologyError)
    refused(lambda: SGP(gossip.bipartite_exponential), 3, "even number of ranks", TopologyError)
    refused(lambda: SGP(lambda n: gossip.ring(n + 1)), 3, "is for 4 ranks, not for 3", TopologyError)
    refused(lambda: OSGP(synch_freq=-1), 1, "synch_freq must be 0 or more")
    refused(lambda: SGP(graph_from_epoch={-1: None}), 1, "counts epochs from 0")
    refused(lambda: OuterSteps(0), 1, "at least 1 step")


def test_ranks_with_other_models_are_told_apart() -> None:
    def body(transport: Any) -> None:
        model = torch.nn.Linear(2 + transport.rank, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        other = 1 - transport.rank
        message = rf"rank {other} and rank {transport.rank} train different .*\('weight', \(1, {2 + other}\)"
        with pytest.raises(ValueError, match=message):
            LocalOptimizer(inner, model.named_parameters(), SGP(), transport=transport)
        raise ValueError("done")

    with pytest.raises(ValueError, match="done"):
        LockstepWorld(2).run(body)
