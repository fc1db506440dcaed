"""Laws of outer steps: nothing is lost, replicas are equal, runs resume, a fragment at a time is in flight."""

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from gossip import networks as nets
from on_ranks import on_ranks
from optim.nets import alone
from refusals import check_refusals
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from dgc import compression as methods
from dgc import contrib
from dgc.comm.lockstep import LockstepWorld
from dgc.contrib import ZeroOneAdam, ZeroOneSteps
from dgc.gossip import ADPSGD, OSGP, SGP, HierarchicalGossip, star
from dgc.local import Nesterov, OuterSteps, Ramp, SlowMo
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import LocalOptimizer, MuonWithAdamW
from dgc.sparse.payloads import RiceIndices, TwoBitValues

pytestmark = pytest.mark.usefixtures("no_type_checks")


def two_bits() -> methods.SparseCompressor:
    return methods.SparseCompressor(0.1, ResidualMemory(), None, TwoBitValues(), RiceIndices(), vectors="sparse")


rank_1: Any = partial(methods.PowerSGDCompressor, rank=1)


def by_dimension() -> methods.Route:
    return methods.Route([methods.Rule(rank_1(), min_dim=2), methods.Rule(nets.top_k())])


COMPRESSIONS: dict[str, Callable[[], Any]] = {
    "dense": lambda: None,
    "top-k": nets.top_k,
    "2 bits": two_bits,
    "rank 1": rank_1,
    "signs": methods.ScaledSignCompressor,
    "4 bits": lambda: methods.TwoPhaseCompressor(4, 64),
    "by dimension": by_dimension,
}


def named(own: nets.Trained, flat: Tensor) -> dict[str, Tensor]:
    return {s.name: s.of(flat).double() for s in own.optimizer.model.segments}


def errors(own: nets.Trained) -> dict[str, Tensor]:
    """The residual of a rank, with the residual of its chunk as a server, by parameter name; zeros without one."""
    found = named(own, torch.zeros_like(own.z))
    for states in own.algorithm.exchange.states:
        state = states.state_dict()
        for table in ("errors", "residuals", "server_errors"):
            for name, error in state.get(table, {}).items():
                found[name] = found[name] + error.double()
    return found


def check_that_nothing_is_lost(found: Any) -> None:
    """Mean of d + mean of the old error = z0 before - z0 after + mean of the new error. found: of each rank z0, z
    before the exchange, the old error, z after it and the new error, by tensor.
    """
    for tensor, z0 in found[0][0].items():
        _, local, old, now, new = (nets.mean([of_rank[i][tensor].double() for of_rank in found]) for i in range(5))
        torch.testing.assert_close(z0 - local + old, z0 - now + new, rtol=0, atol=2e-6)


SIZES_OF = [(name, size) for name in COMPRESSIONS for size in ((1, 3, 64) if name == "2 bits" else (1, 3))]


@pytest.mark.parametrize(("name", "size"), SIZES_OF)
def test_replicas_stay_equal_without_loss(name: str, size: int) -> None:
    def body(own: Any) -> Any:
        found = []
        for _ in range(2):
            own.step()
            before, z0, local = errors(own), z0_of(own), recorded(own)
            own.step()
            del own.optimizer.inner.step
            found.append((z0, named(own, local[0]), before, named(own, own.z), errors(own), own.z.clone()))
        return found

    of_ranks = nets.each(size, lambda: OuterSteps(2, compression=COMPRESSIONS[name]()), body)
    for step in zip(*of_ranks, strict=True):
        check_that_nothing_is_lost(step)
        assert all(torch.equal(s[5], step[0][5]) for s in step)


def recorded(own: nets.Trained) -> list[Tensor]:
    """Becomes the model after each step of the inner optimizer, before an exchange."""
    models: list[Tensor] = []
    inner = own.optimizer.inner.step

    def step() -> None:
        inner()
        models.append(own.z.double())

    own.optimizer.inner.step = step
    return models


def z0_of(own: nets.Trained) -> dict[str, Tensor]:
    return {name: z.double() for name, z in own.algorithm.exchange.state_dict()["z0"].items()}


def test_diloco_is_as_computed_by_hand() -> None:
    """Against plain torch in float64, with the models that the ranks had before each exchange."""

    def body(own: Any) -> Any:
        first, models, afters = own.z.double(), recorded(own), []
        for _ in range(3):
            own.steps(3)
            afters.append(own.z.double())
        return first, models[2::3], afters

    found = nets.each(4, lambda: OuterSteps(3, outer=Nesterov(0.7, 0.9)), body)
    z0, u = found[0][0], torch.zeros_like(found[0][0])
    for i in range(3):
        d = nets.mean([z0 - locals_[i] for _, locals_, _ in found])
        u = 0.9 * u + d
        z0 = z0 - 0.7 * (d + 0.9 * u)
        assert all(nets.off(afters[i], z0) < 1e-5 for *_, afters in found)


def test_the_warm_up_is_synchronous_sgd_with_momentum() -> None:
    """Averages of models after each step, with momentum of their own, are SGD on the mean gradient."""
    first, *others = nets.after(12, lambda: OuterSteps(100, outer=Nesterov(), warmup_steps=12), 3)
    assert nets.off(first, nets.after_joint_steps(12, 3)) < 1e-5
    assert nets.same(others, [first, first])


def test_the_outer_learning_rate_follows_its_schedule() -> None:
    """z0 = z0 - 0.5 f(t) D, f of the step in which the exchange began, also after a state was loaded in flight."""

    def make() -> OuterSteps:
        return OuterSteps(4, outer=partial(torch.optim.SGD, lr=0.5), delay=2, outer_schedule=Ramp(0.4, 1.0, 10))

    def body(transport: Any) -> Any:
        own = nets.Trained(transport, make())
        before, local = own.z.double(), recorded(own)
        own.steps(5)
        own = nets.Trained(transport, make()).resume(own.state())
        own.step()
        first, more = own.z.double(), recorded(own)
        own.steps(4)
        return before, local[3], first, more[1], own.z.double()

    (z0, *_), *_ = found = nets.on(2, body)
    for i, factor in ((1, 0.64), (3, 0.88)):
        z0 = z0 - 0.5 * factor * nets.mean([z0 - of_rank[i] for of_rank in found])
        assert all(nets.off(of_rank[i + 1], z0) < 1e-5 for of_rank in found)


def test_outer_momentum_repeats_what_arrives_late() -> None:
    """The reason why SparseLoCo has none. Dense, the two end alike."""

    def loss(outer: Any, compression: Any) -> float:
        return nets.losses(120, lambda: OuterSteps(12, outer=outer, compression=compression()), 2)[1]

    late = loss(Nesterov(), nets.top_k)
    assert late > 2 * loss(None, nets.top_k) and late > 10 * loss(Nesterov(), lambda: None)


@pytest.mark.parametrize(("optimizer", "count"), [(nets.momentum, 93), (nets.muon, 81)])
def test_ranks_continue_from_the_mean_of_their_momenta(optimizer: Any, count: int) -> None:
    """The outer optimizer steps on the parameters alone. The state of an optimizer may be replaced."""

    def momenta(own: nets.Trained) -> Tensor:
        states = [own.optimizer.inner.state[p] for p in own.model.parameters()]
        return torch.cat([state["momentum_buffer"].view(-1) for state in states if "momentum_buffer" in state])

    def body(own: nets.Trained) -> Any:
        own.steps(3)
        inner, before = own.optimizer.inner, list[Tensor]()
        inner.load_state_dict(copy.deepcopy(inner.state_dict()))
        inner.register_step_post_hook(lambda *_: before.append(momenta(own).double()))
        own.step()
        return before[0], momenta(own)

    def make() -> OuterSteps:
        return OuterSteps(4, outer=Nesterov(), average_momentum=True)

    before, after = zip(*nets.each(3, make, body, make_optimizer=optimizer), strict=True)
    assert nets.off(after[0].double(), nets.mean(before)) < 1e-6 < nets.off(before[0], before[1])
    assert nets.same(after, [after[0]] * 3) and after[0].numel() == count


def momentum_of(optimizer: LocalOptimizer, p: Tensor) -> Tensor:
    return optimizer.inner.state[p]["momentum_buffer"].clone()


def test_a_rank_that_has_not_stepped_on_a_parameter_gets_the_mean_of_its_momentum() -> None:
    """Because its gradient had NaN or was missing, as in a layer that only some ranks use."""

    def body(make: Any, missing: bool, transport: Any) -> Any:
        p, mean = nn.Parameter(torch.eye(4, 3)), []
        optimizer = LocalOptimizer(
            make([p]), [("p", p)], OuterSteps(2, average_momentum=True), transport=transport
        )
        for step in range(3):
            optimizer.zero_grad()
            if transport.rank == 0 or step == 2 or not missing:
                p.grad = torch.full((4, 3), 1.0 if transport.rank == 0 or step == 2 else math.nan)
            if step == 2:
                mean.append(optimizer.model.z[12:].view(4, 3).clone())
            optimizer.step()
        return mean[0], momentum_of(optimizer, p)

    muon = partial(MuonWithAdamW, momentum=0.9, ns_precision="fp32")
    for missing in (False, True):
        for make, share in (
            (partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5), 0.5),
            (lambda ps: muon([{"params": ps, "muon": True}]), 0.1),
        ):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = LockstepWorld(2).run(partial(body, make, missing))
            (mean, momentum), (same_mean, other) = found
            assert mean.any() and mean.equal(same_mean) and momentum.equal(other)
            assert torch.allclose(momentum, 0.9 * mean + share)


@pytest.fixture
def with_loaded_momenta() -> Any:
    """By rank of 2, a trained optimizer, one with its state, one around an inner optimizer with its momenta."""

    def body(transport: Any) -> Any:
        def make() -> nets.Trained:
            return nets.Trained(transport, OuterSteps(4, average_momentum=True))

        own, loaded, resumed = make(), make(), make()
        own.steps(4)
        loaded.optimizer.load_state_dict(own.optimizer.state_dict())
        resumed.resume(loaded.state())
        given = nets.momentum(own.model.parameters())
        given.load_state_dict(own.optimizer.state_dict())
        outer = OuterSteps(4, average_momentum=True)
        wrapped = LocalOptimizer(given, own.model.named_parameters(), outer, transport=transport)
        return own, resumed, wrapped

    return LockstepWorld(2).run(body)


def test_a_momentum_that_was_loaded_is_saved(with_loaded_momenta: Any) -> None:
    for own, resumed, _ in with_loaded_momenta:
        momentum = momentum_of(own.optimizer, own.model[0].weight)
        assert torch.equal(momentum_of(resumed.optimizer, resumed.model[0].weight), momentum)


def test_a_momentum_that_was_loaded_is_sent(with_loaded_momenta: Any) -> None:
    for own, _, wrapped in with_loaded_momenta:
        p = own.model[0].weight
        momentum = momentum_of(own.optimizer, p)
        assert torch.equal(momentum_of(wrapped, p), momentum)
        assert torch.equal(wrapped.model.z[93 : 93 + p.numel()].view_as(p), momentum)


def test_a_saved_momentum_has_memory_of_its_own(with_loaded_momenta: Any) -> None:
    """Not of all momenta together, in which it was averaged."""
    for own, *_ in with_loaded_momenta:
        saved = own.optimizer.state_dict()["state"][0]["momentum_buffer"]
        assert saved.untyped_storage().nbytes() == 4 * own.model[0].weight.numel()


def test_means_of_models_with_their_momenta_in_every_step_are_means_of_gradients() -> None:
    ends = nets.after(6, lambda: OuterSteps(1, average_momentum=True), 3)
    assert nets.off(ends[0][:93], nets.after_joint_steps(6, 3)) < 1e-6


def test_a_step_sends_at_most_the_largest_fragment() -> None:
    def body(own: Any) -> Any:
        sent = [0]
        for _ in range(13):
            own.step()
            sent.append(own.optimizer.meter.payload_bytes - sum(sent))
        return sent[1:]

    streaming = partial(OuterSteps, 6, **nets.IN_TWO_PARTS, delay=2)
    (whole,), (parts,) = (nets.each(1, make, body) for make in (partial(OuterSteps, 6), streaming))
    assert whole == [0, 0, 0, 0, 0, 4 * 93] * 2 + [0]
    # fragments of 63 and 30 elements, three steps apart
    assert parts == [0, 0, 4 * 30, 0, 0, 4 * 63] * 2 + [0]


def test_a_mean_is_merged_by_alpha_after_the_delay() -> None:
    """It is the mean of the step in which the exchange began. Steps since then stay with a share of alpha."""

    def merged(own: Any) -> Any:
        local = recorded(own)
        own.steps(6)
        return local, own.z.double()

    found = nets.each(3, partial(OuterSteps, 4, delay=2, alpha=0.25), merged)
    z0 = nets.mean([local[3] for local, _ in found])
    for local, z in found:
        torch.testing.assert_close(z, 0.25 * local[5] + 0.75 * z0, rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", COMPRESSIONS.values(), ids=COMPRESSIONS)
def test_a_rank_that_diverges_drops_the_outer_step_of_all(make: Any) -> None:
    def body(own: Any) -> Any:
        own.steps(2)
        common = own.z.clone()
        own.step()
        if own.rank == 1:
            own.optimizer.inner.step = lambda: own.z[7].fill_(float("nan"))
        own.step()
        assert torch.equal(own.z, common)
        if own.rank == 1:
            del own.optimizer.inner.step
        own.steps(2)
        assert own.optimizer.metrics()["dropped_outer_steps"] == 1.0
        return own.z.clone()

    with pytest.warns(UserWarning, match="0.weight on rank 1 has NaN or inf") as caught:
        models = nets.each(3, lambda: OuterSteps(2, outer=Nesterov(), compression=make()), body)
    assert len([w for w in caught if "dropped_outer_steps" in str(w.message)]) == 1
    assert bool(models[0].isfinite().all()) and nets.same(models, [models[0]] * 3)


@pytest.mark.filterwarnings("ignore:.*has NaN or inf")
@pytest.mark.parametrize("make", [nets.top_k, two_bits, methods.ScaledSignCompressor])
@on_ranks(2)
def test_what_a_dropped_exchange_has_sent_is_an_error_again(transport: Any, make: Any) -> None:
    """e + d of each rank, where NaN counts as zero."""
    own = nets.Trained(transport, OuterSteps(2, compression=make()))
    own.steps(2)
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


@pytest.mark.parametrize("new", [2, 3, 6])
def test_states_can_be_redistributed_so_that_means_are_unchanged(new: int) -> None:
    """As for algorithms with a base. Without one, ranks keep their states: see test_replica_groups.py."""

    def make(transport: Any) -> nets.Trained:
        return nets.Trained(transport, streaming(outer=Nesterov(), compression=nets.top_k()))

    # after 10 steps the second exchange of the second fragment is in flight
    models = nets.check_that_means_stay(make, lambda own: [own.z.double(), *errors(own).values()], 10, new)
    assert all(bool(z.isfinite().all()) for z in models)


def test_what_cannot_be_is_refused() -> None:
    ef21 = methods.EF21Compressor(nets.top_k())
    with_momentum = methods.DGCCompressor(0.1, DGCSGDMemory(0.9))
    steps, ramp, slowmo = cast(Any, (OuterSteps, Ramp, SlowMo))  # arguments of another type than annotated

    failing, never = "outer_schedule returned {} at step 2", "average_every must .* at least 1 step, not {!r}"
    rows: list[tuple[Any, str]] = [
        *((partial(steps, H), never.format(H)) for H in (0, 2.5, math.nan, True, "2")),
        (lambda: steps(2, delay=0.5), "delay must be a whole number of 0 steps or more, not 0.5"),
        (lambda: steps(2, warmup_steps=None), "warmup_steps must be a whole number of 0 steps or more"),
        (lambda: steps(2, average_momentum=1), "average_momentum must be True or False, not 1"),
        (lambda: steps(2, SGP(), average_momentum=True), "leave out the base"),
        (lambda: steps(2, **nets.IN_TWO_PARTS, average_momentum=True), "leave out fragment_mb"),
        (lambda: steps(2, alpha="0"), "alpha must be a number, not '0'"),
        (lambda: steps(2, fragment_mb="1"), "fragment_mb must be a number, or None for one fragment"),
        (lambda: steps(2, bucket_mb="1"), "bucket_mb must be a number, not '1'"),
        (lambda: steps(2, Nesterov()), "base must be a gossip algorithm such as"),
        *((partial(steps, 2, outer=outer), "outer must make an optimizer") for outer in (Nesterov, 0.7)),
        (lambda: steps(2, outer=len), "outer must return an optimizer of torch"),
        *((partial(steps, 2, outer_schedule=f), "outer_schedule must return a factor") for f in (Ramp, 0.4)),
        *((partial(steps, 2, outer_schedule=lambda _, f=f: f), failing.format(f)) for f in (math.nan, -1.0, None)),
        (lambda: ramp(steps=2.5), "steps must be a whole number of at least 1, not 2.5"),
        (lambda: ramp(math.inf), "Ramp needs first and last above 0 and finite, not inf"),
        (lambda: slowmo(beta="0.5"), "beta must be a number, not '0.5'"),
        (lambda: SlowMo(alpha=math.inf), "SlowMo needs beta in"),
        (lambda: Nesterov(math.inf), "Nesterov needs momentum in"),
        (lambda: steps(2, ADPSGD()), "asynchronous"),
        (lambda: steps(2, outer=SlowMo(), outer_schedule=Ramp()), "_SlowMomentum has none"),
        (lambda: ramp(0.0), "Ramp needs first and last above 0"),
        (lambda: steps(2, fragment_mb=0), "fragment_mb must be positive"),
        (lambda: steps(2, delay=-1), "delay must be a whole number of 0 steps or more, not -1"),
        (lambda: steps(2, alpha=1.0), r"alpha must be in \[0, 1\)"),
        (lambda: steps(2, delay=2), "with alpha=0 what a rank learns in these steps is dropped"),
        (lambda: steps(2, compression=by_dimension(), alpha=0.5), "PowerSGDCompressor sends later what it"),
        (lambda: steps(2, warmup_steps=-1), "warmup_steps must be a whole number of 0 steps or more"),
        (lambda: steps(2, OSGP(), delay=1), "OSGP mixes whole models"),
        (lambda: steps(2, compression=with_momentum), r"memory=ResidualMemory\(\)"),
        (lambda: steps(2, compression=ef21), "EF21Compressor applies momentum to pse"),
        (lambda: steps(1, **nets.IN_TWO_PARTS), "2 fragments, but average_every=1"),
        (lambda: steps(6, **nets.IN_TWO_PARTS, delay=4), "an exchange begins 3 steps after"),
        (lambda: steps(2, compression=nets.top_k), "compression must be a compressor"),
    ]
    with_momenta = partial(nets.Trained, alone(), OuterSteps(2, average_momentum=True))
    own = with_momenta(make_optimizer=lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9))
    own.optimizer.inner.step = lambda: own.optimizer.inner.state[own.model[0].weight].update(exp_avg=1)

    def of_other_momenta(transport: Any) -> None:
        model = nn.Linear(2, 2)
        inner = nets.momentum(model.parameters())
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + transport.rank)
        inner.step()
        for p in model.parameters():
            p.data.fill_(1.0)
        LocalOptimizer(inner, model.named_parameters(), OuterSteps(2, average_momentum=True), transport=transport)

    check_refusals(
        (lambda: with_momenta(make_optimizer=nets.adam), "of SGD or Muon, and AdamW has none: set its momentum"),
        (
            own.step,
            r"a momentum_buffer and nothing else, .*: SGD keeps \['exp_avg'\] of 0.weight",
        ),
        (
            partial(LockstepWorld(2).run, of_other_momenta),
            r"another model or momentum.*broadcast_optimizer_st",
        ),
    )
    starts = (lambda make=make: nets.Trained(alone(), make()) for make, _ in rows)
    check_refusals(*((start, words) for start, (_, words) in zip(starts, rows, strict=True)))


def test_a_model_in_ddp_is_warned_of() -> None:
    """DDP would average the gradients of local steps. A group of one rank averages none."""
    try:
        for size in (2, 1):
            torch.distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
            model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
            others = nn.Linear(2, 2)
            for trained in (others, model):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    own = torch.optim.SGD(trained.parameters(), 0.1)
                    LocalOptimizer(own, trained.named_parameters(), OuterSteps(2), transport=alone())
                words = "averages the gradients of 2 ranks in every step: exchanging models in place of gradients"
                assert [words in str(each.message) for each in caught] == [True] * (trained is model and size == 2)
            del model, trained
            torch.distributed.destroy_process_group()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@on_ranks(2)
def test_a_schedule_that_fails_later_is_an_error_before_anything_is_sent(transport: Any) -> None:
    own = nets.Trained(transport, OuterSteps(2, outer_schedule=lambda step: 1.0 if step < 4 else math.nan))
    own.steps(3)
    sent = own.optimizer.meter.payload_bytes
    with pytest.raises(ValueError, match="outer_schedule returned nan at step 4"):
        own.step()
    assert own.optimizer.meter.payload_bytes == sent
    # models that differ at the start would differ for ever, since ranks exchange changes only
    with pytest.raises(ValueError, match="rank 1 has another model at the start than rank 0: call .*broadcast"):
        weight = torch.nn.Parameter(torch.full((2,), float(transport.rank)))
        LocalOptimizer(nets.adam([weight]), [("weight", weight)], OuterSteps(2), transport=transport)


@pytest.mark.parametrize("base", [lambda: SGP(star), lambda: HierarchicalGossip(SGP())])
def test_pseudo_gradients_of_weighted_models_are_as_small_as_the_changes(base: Any) -> None:
    """Compressors would otherwise send differences as large as the weights."""
    signs = methods.ScaledSignCompressor
    first, last = nets.losses(80, lambda: OuterSteps(4, base(), compression=signs()), 4, 2)
    assert last < 0.2 * first


def test_a_state_of_other_settings_is_refused() -> None:
    def algorithm(*settings: Any) -> Any:
        own = nets.Trained(alone(), OuterSteps(3, *settings))
        own.steps(4)
        return own.algorithm

    adam, top_k = nets.adam, nets.top_k
    state = algorithm(None, adam, top_k()).state_dict()
    bad = copy.deepcopy(state)
    bad["outer"]["0.weight"]["exp_avg"][0] = float("nan")
    rows: list[tuple[Any, Any, str]] = [
        ((None, adam), state, "state of other compressors"),
        ((OSGP(), adam, top_k()), state, "state of another algorithm"),
        ((None, adam, methods.QSGDCompressor()), state, "state of other compressors"),
        ((None, adam, top_k()), bad, "outer exp_avg of 0.weight has NaN"),
    ]
    check_refusals(*((partial(algorithm(*given).load_state_dict, of), words) for given, of, words in rows))


# --- exchanges in flight: states that are loaded meanwhile, ranks that drift apart, another order --------

PERIOD = 6


def streaming(**options: Any) -> OuterSteps:
    return OuterSteps(PERIOD, **nets.IN_TWO_PARTS, **{"delay": 2, **options})


STREAMING: dict[str, Callable[[], Any]] = {
    "alpha": lambda: streaming(outer=Nesterov(), alpha=0.5),
    "top-k": lambda: streaming(compression=nets.top_k()),
    "stochastic": lambda: streaming(compression=methods.QSGDCompressor()),
    "random k": lambda: streaming(compression=contrib.RandomKCompressor(0.2), delay=1),
    "rank 1": lambda: streaming(compression=rank_1(), delay=3),
    "momentum": lambda: OuterSteps(PERIOD, compression=nets.top_k(), delay=2, average_momentum=True),
    "whole": lambda: OuterSteps(PERIOD, outer=Nesterov(), compression=methods.FP16Compressor(), delay=5),
    "replica groups": lambda: HierarchicalGossip(streaming(compression=nets.top_k())),
}


@pytest.mark.parametrize("name", STREAMING)
@on_ranks(2, 1)
def test_a_state_loaded_at_any_position_goes_on_bit_for_bit(transport: Any, name: str) -> None:
    """The exchange in flight, if any, is received and given up. It changes nothing of what was loaded."""
    own, saved, models = nets.Trained(transport, STREAMING[name]()), [], []
    for step in range(3 * PERIOD):
        if PERIOD <= step < 2 * PERIOD:
            saved.append((step, own.state()))
        own.step()
        models.append(own.z.clone())
    for position in range(PERIOD):
        other = nets.Trained(transport, STREAMING[name]()).scatter(3, of=0)
        other.steps(PERIOD + position)
        for step, state in saved:  # the next state is loaded at another position
            other.resume(copy.deepcopy(state))
            found = []
            for _ in range(PERIOD + 1):
                other.step()
                found.append(other.z.clone())
            assert nets.same(found, models[step : step + PERIOD + 1]), (position, step)


def zero_one(transport: Any) -> nets.Trained:
    return nets.Trained(transport, ZeroOneSteps(2, local_step_scaler=2, local_step_clipper=4), ZeroOneAdam)


DRIFTING: dict[str, tuple[Callable[[Any], nets.Trained], str]] = {
    "slowmo": (lambda t: nets.Trained(t, OuterSteps(4, outer=SlowMo())), "lr"),
    "streaming": (lambda t: nets.Trained(t, streaming(outer=SlowMo())), "lr"),
    "0/1 adam": (zero_one, r"param_groups\[0\]\['lr'\]"),
}


@pytest.mark.parametrize("name", DRIFTING)
@on_ranks(3)
def test_a_learning_rate_that_drifts_on_one_rank_is_an_error_of_every_rank(transport: Any, name: str) -> None:
    """As a ReduceLROnPlateau does that sees the losses of its own rank. Nothing else is exchanged afterwards."""
    make, path = DRIFTING[name]
    own = make(transport)
    own.steps(8)
    before = own.optimizer.param_groups[0]["lr"]
    if transport.rank == 1:
        own.optimizer.param_groups[0]["lr"] = before / 10
    with pytest.raises(ValueError, match=rf"{path} is {before} on rank 0 and {before / 10} on rank 1: .*Plateau"):
        own.steps(8)
    with pytest.raises(RuntimeError, match=f"ended with an exception.*{path} is {before}.*checkpoint"):
        own.steps(8)


def test_ranks_may_have_their_own_learning_rate_if_no_outer_step_reads_it() -> None:
    def body(own: nets.Trained) -> Any:
        for step in range(8):
            own.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step + own.rank)
            own.step()
        return own.z.clone()

    for outer in (None, Nesterov()):
        assert torch.equal(*nets.each(2, partial(OuterSteps, 4, outer=outer), body))


def one_streams(transport: Any) -> nets.Trained:
    """Every second model of a rank."""
    transport.models = getattr(transport, "models", -1) + 1
    return nets.Trained(transport, OuterSteps(2, delay=transport.models % 2, alpha=0.5))


ORDERS: dict[str, Callable[[Any], nets.Trained]] = {
    "local sgd": lambda t: nets.Trained(t, OuterSteps(2, compression=nets.top_k())),
    "streaming": lambda t: nets.Trained(t, OuterSteps(2, delay=1, alpha=0.5)),
    "0/1 adam": zero_one,
    "one streaming": one_streams,
    "replica groups": lambda t: nets.Trained(t, HierarchicalGossip(OuterSteps(2, compression=nets.top_k()))),
}


@pytest.mark.parametrize("name", ORDERS)
def test_two_models_stepped_in_another_order_are_an_error_of_every_rank(name: str) -> None:
    """Whether messages are matched by their order or by their names."""

    def body(transport: Any) -> None:
        models = [ORDERS[name](transport) for _ in range(2)]
        for _ in range(4):
            for model in models:
                model.step()
        with pytest.raises(ValueError, match="optimizer is dgc0.* on rank 0 and dgc1.* on rank 1: .* same order"):
            for _ in range(4):
                for model in models if transport.rank != 1 else reversed(models):
                    model.step()

    for strict in (True, False):
        LockstepWorld(2, 1, strict=strict).run(body)


@pytest.mark.filterwarnings("ignore:.*has NaN or inf")
@pytest.mark.parametrize("after", [4, 5], ids=["in flight", "arrived"])
@pytest.mark.parametrize("is_finite", [True, False], ids=["used", "dropped"])
def test_an_epoch_may_begin_between_the_two_ends_of_an_exchange(after: int, is_finite: bool) -> None:
    """The state of the new epoch stays, also if the exchange is dropped."""
    compression = contrib.AccordionCompressor(1, 2)
    own = nets.Trained(alone(), OuterSteps(4, compression=compression, delay=2))
    own.optimizer.begin_epoch(0)
    own.steps(3)
    if not is_finite:
        own.z[:] = math.nan
        own.optimizer.model.scatter()
    own.steps(after - 3)
    own.optimizer.begin_epoch(1)
    own.steps(7 - after)
    states = next(s for s in own.algorithm.exchange.states if s.compressor.class_name == "AccordionCompressor")
    assert {state.epoch for _, state in states._of.values()} == {1}
