"""Laws of outer steps: nothing is lost, replicas are equal, runs resume, a fragment at a time is in flight."""

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gossip.networks import IN_TWO_PARTS, Trained, adam, momentum, on, top_k
from torch import Tensor

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import (
    DGCCompressor,
    PowerSGDCompressor,
    QSGDCompressor,
    Route,
    Rule,
    ScaledSignCompressor,
    SparseCompressor,
)
from dgc.engine.redistribute import redistribute
from dgc.gossip import ADPSGD, OSGP, SGP, HierarchicalGossip, star
from dgc.local import Nesterov, OuterSteps, Ramp, SlowMo
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import LocalOptimizer
from dgc.wire import RiceIndices, TwoBitValues

pytestmark = pytest.mark.usefixtures("no_type_checks")


def two_bits() -> SparseCompressor:
    return SparseCompressor(0.1, ResidualMemory(), values=TwoBitValues(), indices=RiceIndices(), vectors="sparse")


def by_dimension() -> Route:
    return Route([Rule(PowerSGDCompressor(rank=1), min_dim=2), Rule(top_k())])


COMPRESSIONS: dict[str, Callable[[], Any]] = {
    "dense": lambda: None,
    "top-k": top_k,
    "2 bits": two_bits,
    "rank 1": lambda: PowerSGDCompressor(rank=1),
    "signs": ScaledSignCompressor,
    "by dimension": by_dimension,
}
every_compression = pytest.mark.parametrize("make", COMPRESSIONS.values(), ids=COMPRESSIONS)


class _Any:
    """Values of any type where another one is annotated."""

    def __getitem__(self, value: Any) -> Any:
        return value


ANY = _Any()
SIZES = [*((name, size) for name in COMPRESSIONS for size in (1, 3)), ("2 bits", 64)]


def named(own: Trained, flat: Tensor) -> dict[str, Tensor]:
    return {s.name: s.of(flat).double() for s in own.optimizer.model.segments}


def errors(own: Trained) -> dict[str, Tensor]:
    """The residual of a rank by parameter name; zeros for tensors without one."""
    found = named(own, torch.zeros_like(own.z))
    for states in own.algorithm.exchange.states:
        state = states.state_dict()
        for part in (state.get("errors"), state.get("residuals")):
            found |= {name: error.double() for name, error in (part or {}).items()}
    return found


def mean(parts: Any) -> Any:
    return sum(parts) / len(parts)


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_replicas_are_equal_and_nothing_is_lost(name: str, size: int) -> None:
    """Mean of d + mean of the old error = z0 before - z0 after + mean of the new error."""

    def body(transport: Any) -> Any:
        own = Trained(transport, OuterSteps(2, compression=COMPRESSIONS[name]()))
        found = []
        for _ in range(2):
            own.step()
            before, z0 = errors(own), {name: z.double() for name, z in z0_of(own).items()}
            local = recorded(own)
            own.step()
            del own.optimizer.inner.step
            found.append((z0, named(own, local[0]), before, named(own, own.z), errors(own), own.z.clone()))
        return found

    for step in zip(*on(size, body), strict=True):
        z0 = step[0][0]
        for tensor, z in z0.items():
            d = mean([z - local[tensor] for _, local, *_ in step])
            old, new = mean([s[2][tensor] for s in step]), mean([s[4][tensor] for s in step])
            torch.testing.assert_close(d + old, z - step[0][3][tensor] + new, rtol=0, atol=2e-6)
        assert all(torch.equal(s[5], step[0][5]) for s in step)


def recorded(own: Trained) -> list[Tensor]:
    """Becomes the model after each step of the inner optimizer, before an exchange."""
    models: list[Tensor] = []
    inner = own.optimizer.inner.step

    def step() -> None:
        inner()
        models.append(own.z.clone())

    own.optimizer.inner.step = step
    return models


def z0_of(own: Trained) -> dict[str, Tensor]:
    return own.algorithm.exchange.state_dict()["z0"]


def test_diloco_by_hand() -> None:
    """Against plain torch in float64, with the models that the ranks had before each exchange."""

    def body(transport: Any) -> Any:
        own = Trained(transport, OuterSteps(3, outer=Nesterov(0.7, 0.9)))
        first, models, afters = own.z.double(), recorded(own), []
        for _ in range(3):
            for _ in range(3):
                own.step()
            afters.append(own.z.double())
        return first, [z.double() for z in models[2::3]], afters

    found = on(4, body)
    z0, u = found[0][0], torch.zeros_like(found[0][0])
    for i in range(3):
        d = mean([z0 - locals_[i] for _, locals_, _ in found])
        u = 0.9 * u + d
        z0 = z0 - 0.7 * (d + 0.9 * u)
        assert all(float((afters[i] - z0).abs().max()) < 1e-5 for *_, afters in found)


def test_the_outer_learning_rate_follows_its_schedule() -> None:
    """z0 = z0 - 0.5 f(t) D, f of the step in which the exchange began, also after a state was loaded in flight."""

    def make() -> OuterSteps:
        return OuterSteps(4, outer=partial(torch.optim.SGD, lr=0.5), delay=2, outer_schedule=Ramp(0.4, 1.0, 10))

    def body(transport: Any) -> Any:
        own = Trained(transport, make())
        before, local = own.z.double(), recorded(own)
        for _ in range(5):
            own.step()
        state = copy.deepcopy(own.optimizer.compression_state_dict())
        own = Trained(transport, make())
        own.optimizer.load_compression_state_dict(state)
        own.step()
        after = own.z.double()
        more = recorded(own)
        for _ in range(4):
            own.step()
        return before, [z.double() for z in local], after, [z.double() for z in more], own.z.double()

    found = on(2, body)
    (z0, *_), *_ = found
    for locals_, ends, factor in (
        ([f[1][3] for f in found], [f[2] for f in found], 0.64),
        ([f[3][1] for f in found], [f[4] for f in found], 0.88),
    ):
        z0 = z0 - 0.5 * factor * mean([z0 - z for z in locals_])
        assert all(float((end - z0).abs().max()) < 1e-5 for end in ends)


@pytest.mark.parametrize("make", [top_k, two_bits, lambda: PowerSGDCompressor(rank=2), ScaledSignCompressor])
def test_compressed_local_sgd_learns(make: Any) -> None:
    def body(transport: Any, algorithm: Any) -> Any:
        own = Trained(transport, algorithm)
        losses = [own.step() for _ in range(60)]
        return losses[0], losses[-1]

    found = on(4, lambda t: body(t, OuterSteps(3, compression=make())))
    assert mean([after for _, after in found]) < 0.35 * mean([before for before, _ in found])


def test_outer_momentum_repeats_what_arrives_late() -> None:
    """The reason why SparseLoCo has none. Dense, the two end alike."""

    def loss(outer: Any, compression: Any) -> float:
        def body(transport: Any) -> float:
            own = Trained(transport, OuterSteps(12, outer=outer, compression=compression()))
            return [own.step() for _ in range(120)][-1]

        return float(mean(on(2, body)))

    late = loss(Nesterov(), top_k)
    assert late > 2 * loss(None, top_k) and late > 10 * loss(Nesterov(), lambda: None)


def test_steps_of_the_warm_up_are_synchronous_sgd_with_momentum() -> None:
    """Averages of models after each step, with momentum of their own, are SGD on the mean gradient."""

    def body(transport: Any) -> Any:
        own = Trained(transport, OuterSteps(100, outer=Nesterov(), warmup_steps=12))
        for _ in range(12):
            own.step()
        return own.z.clone()

    models = on(3, body)
    ranks = on(3, lambda transport: Trained(transport, OuterSteps(100)))
    one = ranks[0]
    optimizer = momentum(one.model.parameters())
    for _ in range(12):
        optimizer.zero_grad()
        sum(((one.model(r.inputs) - r.targets) ** 2).mean() for r in ranks).div(3).backward()
        optimizer.step()
    assert all(torch.equal(z, models[0]) for z in models)
    assert float((models[0] - one.z).abs().max()) < 1e-5


# --- fragments ------------------------------------------------------------------------------------


def test_a_step_sends_at_most_the_largest_fragment() -> None:
    def body(transport: Any, **options: Any) -> Any:
        own = Trained(transport, OuterSteps(6, **options))
        sent = [0]
        for _ in range(13):
            own.step()
            sent.append(own.optimizer.meter.payload_bytes)
        return [after - before for before, after in zip(sent, sent[1:], strict=False)]

    (whole,), (parts,) = on(1, body), on(1, partial(body, **IN_TWO_PARTS, delay=2))
    assert whole == [0, 0, 0, 0, 0, 4 * 93] * 2 + [0]
    # fragments of 63 and 30 elements, three steps apart
    assert parts == [0, 0, 4 * 30, 0, 0, 4 * 63] * 2 + [0]


def test_a_fragment_is_used_after_the_delay_and_merged_by_alpha() -> None:
    """The mean is that of the step in which the exchange began. Steps since then stay with a share of alpha."""

    def body(transport: Any) -> Any:
        own = Trained(transport, OuterSteps(4, delay=2, alpha=0.25))
        local = recorded(own)
        for _ in range(6):
            own.step()
        return [z.double() for z in local], own.z.double()

    found = on(3, body)
    z0 = mean([local[3] for local, _ in found])
    for local, z in found:
        torch.testing.assert_close(z, 0.25 * local[5] + 0.75 * z0, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stop", [3, 4, 5, 7])
def test_a_state_saved_in_flight_goes_on_bit_for_bit(stop: int) -> None:
    def make() -> OuterSteps:
        how: Any = {"compression": None, "alpha": 0.5} if stop == 4 else {"compression": top_k()}
        return OuterSteps(6, outer=Nesterov(), **IN_TWO_PARTS, delay=2, **how)

    def body(transport: Any, resumes: bool) -> Any:
        own = Trained(transport, make())
        for step in range(13):
            if step == stop:
                state = copy.deepcopy(own.optimizer.compression_state_dict())
                if resumes:
                    own = Trained(transport, make()).scatter(3)
                    own.optimizer.load_compression_state_dict(state)
            own.step()
        return own.z.clone()

    straight, stopped = on(3, lambda t: body(t, False)), on(3, lambda t: body(t, True))
    assert all(torch.equal(a, b) for a, b in zip(straight, stopped, strict=True))


# --- faults, other numbers of ranks ----------------------------------------------------------------


@every_compression
def test_a_rank_that_diverges_drops_the_outer_step_of_all(make: Any) -> None:
    def body(transport: Any) -> Any:
        own = Trained(transport, OuterSteps(2, outer=Nesterov(), compression=make()))
        for _ in range(2):
            own.step()
        common = own.z.clone()
        own.step()
        if transport.rank == 1:
            own.optimizer.inner.step = lambda: own.z[7].fill_(float("nan"))
        own.step()
        back = torch.equal(own.z, common)
        if transport.rank == 1:
            del own.optimizer.inner.step
        for _ in range(2):
            own.step()
        return back, own.optimizer.metrics(), own.z.clone()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = on(3, body)
    assert all(back for back, *_ in found)
    assert all(metrics["dropped_outer_steps"] == 1.0 for _, metrics, _ in found)
    (warned,) = [str(w.message) for w in caught if "dropped_outer_steps" in str(w.message)]
    assert "0.weight on rank 1 has NaN or inf" in warned
    assert all(bool(z.isfinite().all()) and torch.equal(z, found[0][2]) for *_, z in found)


@pytest.mark.parametrize("make", [top_k, two_bits, ScaledSignCompressor])
def test_what_a_dropped_exchange_has_sent_is_an_error_again(make: Any) -> None:
    """e + d of each rank, where NaN counts as zero."""

    def body(transport: Any) -> Any:
        own = Trained(transport, OuterSteps(2, compression=make()))
        for _ in range(2):
            own.step()
        old, z0, local = errors(own), named(own, own.z), recorded(own)
        inner = own.optimizer.inner.step
        own.optimizer.inner.step = lambda: (inner(), own.z[7].fill_(float("nan")))
        own.algorithm.steps += 1
        own.step()
        for name, error in errors(own).items():
            expected = old[name] + z0[name] - named(own, local[0])[name]
            if name == "0.weight":
                expected.view(-1)[7] = old[name].view(-1)[7]
            torch.testing.assert_close(error, expected, rtol=0, atol=1e-6)

    with pytest.warns(UserWarning, match="has NaN or inf"):
        on(2, body)


@pytest.mark.parametrize("new", [2, 3, 6])
def test_states_can_be_redistributed_so_that_means_are_unchanged(new: int) -> None:
    """As for algorithms with a base. Without one, ranks keep their states: see test_islands.py."""

    def make() -> OuterSteps:
        return OuterSteps(6, None, Nesterov(), top_k(), **IN_TWO_PARTS, delay=2)

    def before(transport: Any) -> Any:
        own = Trained(transport, make())
        for _ in range(10):  # the second exchange of the second fragment is in flight
            own.step()
        return copy.deepcopy(own.optimizer.compression_state_dict()), own.z.double(), errors(own)

    states, models, old = zip(*on(4, before), strict=True)

    def after(transport: Any) -> Any:
        own = Trained(transport, make())
        own.optimizer.load_compression_state_dict(redistribute(states, new)[transport.rank])
        loaded = own.z.double(), errors(own)
        for _ in range(8):
            own.step()
        return *loaded, own.z.clone()[:63]

    loaded, found, ends = zip(*on(new, after), strict=True)
    torch.testing.assert_close(mean(loaded), mean(models), rtol=0, atol=1e-6)
    for name in old[0]:
        torch.testing.assert_close(mean([e[name] for e in found]), mean([e[name] for e in old]), rtol=0, atol=1e-6)
    assert all(bool(z.isfinite().all()) for z in ends)


def test_islands_average_gradients_inside_and_exchange_between() -> None:
    """Machines of two ranks, as HierarchicalGossip's base: one z0 for all, exchanged in slices."""

    def body(transport: Any) -> Any:
        own = Trained(transport, HierarchicalGossip(OuterSteps(3, compression=top_k())))
        losses = [own.step() for _ in range(60)]
        own.optimizer.synchronize_messages()
        return losses[0], losses[-1], own.z.clone()

    found = LockstepWorld(6, 2).run(body)
    assert all(torch.equal(z, found[0][2]) for *_, z in found)
    assert mean([after for _, after, _ in found]) < 0.35 * mean([before for before, *_ in found])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: OuterSteps(0), "at least 1 step"),
        (lambda: OuterSteps(ANY[2.5]), "average_every must be a whole number of at least 1 step, not 2.5"),
        (lambda: OuterSteps(ANY[math.nan]), "average_every must be a whole number of at least 1 step, not nan"),
        (lambda: OuterSteps(ANY[True]), "average_every must be a whole number of at least 1 step, not True"),
        (lambda: OuterSteps(ANY["2"]), "average_every must be a whole number of at least 1 step, not '2'"),
        (lambda: OuterSteps(2, delay=ANY[0.5]), "delay must be a whole number of 0 steps or more, not 0.5"),
        (lambda: OuterSteps(2, warmup_steps=ANY[None]), "warmup_steps must be a whole number of 0 steps or more"),
        (lambda: OuterSteps(2, alpha=ANY["0"]), "alpha must be a number, not '0'"),
        (lambda: OuterSteps(2, fragment_mb=ANY["1"]), "fragment_mb must be a number, or None for one fragment"),
        (lambda: OuterSteps(2, bucket_mb=ANY["1"]), "bucket_mb must be a number, not '1'"),
        (lambda: OuterSteps(2, ANY[Nesterov()]), "base must be a gossip algorithm such as"),
        (lambda: OuterSteps(2, outer=ANY[Nesterov]), "outer must make an optimizer"),
        (lambda: OuterSteps(2, outer=ANY[len]), "outer must return an optimizer of torch"),
        (lambda: OuterSteps(2, outer_schedule=ANY[Ramp]), "outer_schedule must return a factor"),
        (lambda: OuterSteps(2, outer_schedule=lambda step: math.nan), "outer_schedule returned nan at step 2: it"),
        (lambda: OuterSteps(2, outer_schedule=lambda step: -1.0), "outer_schedule returned -1.0 at step 2: it"),
        (lambda: OuterSteps(2, outer_schedule=ANY[lambda step: None]), "outer_schedule returned None at step 2"),
        (lambda: Ramp(steps=ANY[2.5]), "steps must be a whole number of at least 1, not 2.5"),
        (lambda: Ramp(math.inf), "Ramp needs first and last above 0 and finite, not inf"),
        (lambda: SlowMo(beta=ANY["0.5"]), "beta must be a number, not '0.5'"),
        (lambda: SlowMo(alpha=math.inf), "SlowMo needs beta in"),
        (lambda: Nesterov(math.inf), "Nesterov needs momentum in"),
        (lambda: OuterSteps(2, ADPSGD()), "asynchronous"),
        (lambda: OuterSteps(2, outer=0.7), "must make an optimizer"),  # type: ignore[arg-type]
        (lambda: OuterSteps(2, outer_schedule=0.4), "must return a factor"),  # type: ignore[arg-type]
        (lambda: OuterSteps(2, outer=SlowMo(), outer_schedule=Ramp()), "_SlowMomentum has none"),
        (lambda: OuterSteps(2, outer_schedule=Ramp(0.0)), "Ramp needs first and last above 0"),
        (lambda: OuterSteps(2, fragment_mb=0), "fragment_mb must be positive"),
        (lambda: OuterSteps(2, delay=-1), "delay must be a whole number of 0 steps or more, not -1"),
        (lambda: OuterSteps(2, alpha=1.0), r"alpha must be in \[0, 1\)"),
        (lambda: OuterSteps(2, delay=2), "with alpha=0 what a rank learns in these steps is dropped"),
        (lambda: OuterSteps(2, compression=by_dimension(), alpha=0.5), "PowerSGDCompressor sends later what it"),
        (lambda: OuterSteps(2, warmup_steps=-1), "warmup_steps must be a whole number of 0 steps or more"),
        (lambda: OuterSteps(2, OSGP(), delay=1), "OSGP mixes whole models"),
        (lambda: OuterSteps(2, compression=DGCCompressor(0.1, DGCSGDMemory(0.9))), r"memory=ResidualMemory\(\)"),
        (lambda: OuterSteps(1, **IN_TWO_PARTS), "2 fragments, but average_every=1"),
        (lambda: OuterSteps(6, **IN_TWO_PARTS, delay=4), "an exchange begins 3 steps after"),
        (lambda: OuterSteps(2, compression=top_k), "compression must be a compressor"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_refused(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        on(1, lambda transport: Trained(transport, make()))


def test_a_schedule_that_fails_later_is_an_error_before_anything_is_sent() -> None:
    def body(transport: Any) -> None:
        own = Trained(transport, OuterSteps(2, outer_schedule=lambda step: 1.0 if step < 4 else math.nan))
        for _ in range(3):
            own.step()
        sent = own.optimizer.meter.payload_bytes
        with pytest.raises(ValueError, match="outer_schedule returned nan at step 4"):
            own.step()
        assert own.optimizer.meter.payload_bytes == sent

    on(2, body)


def test_models_that_differ_at_the_start_are_refused() -> None:
    """Ranks exchange changes only, so that their models would differ for ever."""

    def body(transport: Any) -> None:
        torch.manual_seed(transport.rank)
        model = torch.nn.Linear(2, 2)
        LocalOptimizer(adam(list(model.parameters())), None, OuterSteps(2), transport=transport)

    with pytest.raises(ValueError, match="rank 1 has another model at the start than rank 0: call .*broadcast"):
        on(2, body)


@pytest.mark.parametrize("base", [lambda: SGP(star), lambda: HierarchicalGossip(SGP())])
def test_pseudo_gradients_of_weighted_models_are_as_small_as_the_changes(base: Any) -> None:
    """Compressors would otherwise send differences as large as the weights."""

    def body(transport: Any) -> Any:
        own = Trained(transport, OuterSteps(4, base(), compression=ScaledSignCompressor()))
        losses = [own.step() for _ in range(80)]
        return losses[0], losses[-1]

    found = LockstepWorld(4, 2).run(body)
    assert mean([last for _, last in found]) < 0.2 * mean([first for first, _ in found])


def test_a_compressor_of_another_optimizer_is_refused() -> None:
    shared = top_k()

    def body(transport: Any) -> None:
        Trained(transport, OuterSteps(2, compression=shared))
        Trained(transport, OuterSteps(2, compression=shared))

    with pytest.raises(ValueError, match="has the residual of another"):
        on(1, body)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (lambda: OuterSteps(3, None, adam), "state of other compressors"),
        (lambda: OuterSteps(3, OSGP(), adam, top_k()), "state of another algorithm"),
        (lambda: OuterSteps(3, None, adam, QSGDCompressor()), "state of other compressors"),
    ],
)
def test_a_state_of_other_settings_is_refused(other: Any, match: str) -> None:
    def body(transport: Any) -> None:
        own = Trained(transport, OuterSteps(3, None, adam, top_k()))
        for _ in range(4):
            own.step()
        state = own.optimizer.compression_state_dict()
        with pytest.raises(ValueError, match=match):
            Trained(transport, other()).algorithm.load_state_dict(state["OuterSteps.0"])
        state["OuterSteps.0"]["outer"]["0.weight"]["exp_avg"][0] = float("nan")
        with pytest.raises(ValueError, match="outer exp_avg of 0.weight has NaN"):
            Trained(transport, OuterSteps(3, None, adam, top_k())).algorithm.load_state_dict(state["OuterSteps.0"])

    on(1, body)
