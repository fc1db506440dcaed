"""0/1 Adam: its dense steps, its local steps, what a checkpoint keeps, what NaN changes, what is refused."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from gossip.networks import Trained, check_that_a_saved_state_goes_on, check_that_means_stay, each, mean, on, same
from on_ranks import on_ranks
from optim.nets import alone, net, wrap
from refusals import check_refusals

from dgc.compression import DGCCompressor, FP16Compressor, OneBitAdamCompressor
from dgc.contrib import ZeroOneAdam, ZeroOneSteps
from dgc.contrib.zero_one_adam import ZeroOneSchedule
from dgc.local import OuterSteps
from dgc.optim import DistributedOptimizer, LocalOptimizer

pytestmark = pytest.mark.usefixtures("no_type_checks")
# T_v = {0, 1, 2, 4}; the gap is 1 up to step 7, then 2 for two steps, then 3: T_u has 0 to 7, 9, 12, 15, ..
NUMBERS = (6, 2, 2, 3)
N = 6 * 9 + 9 + 9 * 3 + 3  # elements of the model


def adam(parameters: Any, **options: Any) -> Any:
    return ZeroOneAdam(parameters, **{"lr": 0.02, "betas": (0.9, 0.99), **options})


def trained(transport: Any, numbers: Any = NUMBERS, dtype: Any = torch.float32, **options: Any) -> Trained:
    return Trained(transport, ZeroOneSteps(*numbers), partial(adam, **options), dtype)


def moments(own: Trained, name: str) -> Any:
    return [own.optimizer.state[p][name].clone() for p in own.model.parameters()]


@on_ranks(2)
def test_with_a_dense_mean_it_is_adamw_bit_for_bit(transport: Any) -> None:
    settings: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    own = trained(transport, (8, 8, 1, 1), floor=0.0, **settings)
    model = copy.deepcopy(own.model)
    adamw = torch.optim.AdamW(model.parameters(), foreach=False, **settings)
    dense = DistributedOptimizer(adamw, model.named_parameters(), transport=transport)
    for _ in range(8):
        own.step()
        dense.zero_grad()
        ((model(own.inputs) - own.targets) ** 2).mean().backward()
        dense.step()
    assert same(own.model.parameters(), model.parameters())


@on_ranks(2)
def test_weight_decay_goes_on_between_exchanges(transport: Any) -> None:
    """Without gradients, nothing but it moves a parameter. At each exchange x' is what x is."""
    decayed = trained(transport, weight_decay=0.5)
    start = decayed.z.clone()
    for step in range(1, 16):
        decayed.optimizer.zero_grad()
        sum(p.sum() * 0 for p in decayed.model.parameters()).backward()
        decayed.optimizer.step()
        assert torch.equal(decayed.z, start.mul_(1 - 0.02 * 0.5)), step


def test_a_step_sends_the_gradient_or_one_bit_or_nothing() -> None:
    def body(transport: Any) -> Any:
        own, found = trained(transport), []
        for _ in range(15):
            ratio, before = own.optimizer.compress_ratio, own.optimizer.meter.payload_bytes
            own.step()
            found.append((ratio, own.optimizer.meter.payload_bytes - before))
        return tuple(found)

    (found,) = set(on(2, body))
    ratios, sent = zip(*found, strict=True)
    assert [t for t in range(15) if sent[t] == 4 * N] == [0, 1, 2, 4]
    assert [t for t in range(15) if sent[t] == 0] == [8, 10, 11, 13, 14]
    counts = [ZeroOneSchedule(*NUMBERS).exchanges(steps) for steps in range(16)]
    assert counts == [sum(nbytes > 0 for nbytes in sent[:steps]) for steps in range(16)]
    # two chunks of 64 and 29: the larger has 3 pieces of 3, 27, 9 and 25 elements or so, in whole words
    assert {sent[t] for t in (3, 5, 6, 7, 9, 12)} == {sent[3]} and 0 < sent[3] < 4 * N / 2
    assert ratios == (1.0, 1.0, 1.0, 1 / 32, 1.0, *[1 / 32] * 3, *[1 / 64] * 2, *[1 / 96] * 5)


@on_ranks(2)
def test_gradients_of_the_second_moment_in_half_the_bytes(transport: Any) -> None:
    own = Trained(transport, ZeroOneSteps(*NUMBERS, gradients=FP16Compressor()), adam)
    own.step()
    gradients = [p.grad for p in own.model.parameters()]
    assert own.optimizer.meter.payload_bytes == 2 * N and same(gradients, [g.half().float() for g in gradients])


@pytest.mark.parametrize("stop", [3, 9, 11])
def test_it_goes_on_from_a_saved_state_bit_for_bit(stop: int) -> None:
    """In both stages, and in the middle of an interval. The last step is one after which models differ."""
    check_that_a_saved_state_goes_on(lambda transport: trained(transport, weight_decay=0.1), 3, 15, stop)


@pytest.mark.parametrize("new", [2, 6])
def test_another_number_of_ranks_goes_on_from_the_same_means(new: int) -> None:
    """To the step after which all ranks have one model."""
    models = check_that_means_stay(trained, lambda own: [own.z.double()], 11, new)
    assert same(models, [models[0]] * new) and bool(models[0].isfinite().all())


def test_groups_have_their_own_settings() -> None:
    """With a learning rate of zero a group does not move."""

    def groups(parameters: Any) -> Any:
        first, second, *others = parameters
        return adam([{"params": [first, second], "lr": 0.0}, {"params": others, "betas": (0.5, 0.9)}])

    def body(own: Any) -> Any:
        start = [p.detach().clone() for p in own.model.parameters()]
        own.steps(8)
        moved = [not torch.equal(p, q) for p, q in zip(own.model.parameters(), start, strict=True)]
        assert moved == [False, False, True, True] and not moments(own, "exp_avg")[0].any()
        return moments(own, "exp_avg")[2]

    first, second = each(2, partial(ZeroOneSteps, *NUMBERS), body, make_optimizer=groups)
    assert torch.equal(first, second) and bool(first.any())


def test_a_model_may_have_parameters_without_elements() -> None:
    model = torch.nn.ModuleList([net(), torch.nn.ParameterList([torch.zeros(0, 3)])])
    optimizer = wrapped(adam, ZeroOneSteps(1), model)
    before = [p.clone() for p in model.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        torch.cat([p.flatten() for p in model.parameters()]).sum().backward()
        optimizer.step()
    assert all(bool((p != old).all()) for p, old in zip(model.parameters(), before, strict=True))


def test_parameters_of_half_precision_learn_from_an_fp32_model() -> None:
    def body(transport: Any) -> Any:
        own = trained(transport, dtype=torch.bfloat16)
        losses = own.steps(46)
        assert own.z.dtype == torch.float32 and {p.dtype for p in own.model.parameters()} == {torch.bfloat16}
        return losses[0], losses[-1], own.z.clone()

    firsts, lasts, models = zip(*on(2, body), strict=True)
    assert torch.equal(*models) and mean(lasts) < 0.6 * mean(firsts)


@pytest.mark.parametrize(
    ("steps", "in_variance_step"), [(4, True), (8, False), (10, False)], ids=["gradient", "local", "later"]
)
def test_a_gradient_that_is_not_finite_is_dropped(steps: int, in_variance_step: bool) -> None:
    """In a step of T_v nobody moves. In another step its rank alone leaves out its part."""

    def all_of(own: Trained) -> Any:
        return [own.z.clone(), *moments(own, "exp_avg"), *moments(own, "exp_avg_sq")]

    def body(transport: Any) -> Any:
        own = trained(transport)
        own.steps(steps)
        before = all_of(own)
        own.optimizer.zero_grad()
        (own.loss() * (float("nan") if transport.rank == 1 else 1.0)).backward()
        own.optimizer.step()
        assert same(before, all_of(own)) == (in_variance_step or transport.rank == 1)
        assert own.optimizer.metrics()["dropped_exchanges"] == float(in_variance_step)
        own.steps(13 - own.algorithm.adam.steps)
        return own.z.clone()

    with pytest.warns(UserWarning, match="rank 1 has NaN"):
        first, second = on(2, body)
    assert torch.equal(first, second) and bool(first.isfinite().all())


def test_a_rank_that_diverges_drops_the_last_steps_of_all() -> None:
    def diverges(transport: Any) -> Any:
        own = trained(transport)
        own.steps(8)
        common = own.z.clone()
        own.step()
        if transport.rank == 1:
            own.algorithm.exchange.parts["0.bias"][2] = float("inf")
        own.step()
        assert torch.equal(own.z, common) and not any(m.any() for m in moments(own, "exp_avg"))
        assert own.optimizer.metrics()["dropped_exchanges"] == 1.0
        own.steps(3)
        return own.z.clone()

    with pytest.warns(UserWarning, match=r"0.bias on rank 1 has NaN or inf.*dropped_exchanges"):
        first, second = on(2, diverges)
    assert torch.equal(first, second) and bool(first.isfinite().all())


def wrapped(optimizer: Any, algorithm: Any, model: Any = None) -> Any:
    model = model or net()
    return LocalOptimizer(optimizer(model.parameters()), model.named_parameters(), algorithm, transport=alone())


def test_what_cannot_be_is_refused() -> None:
    half: Any = 1.5
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    onebit = partial(wrap, net(), alone(), lambda model: adam(model.parameters()))
    floors = r"\['floor'\] is 0.0 on rank 0 and 0.1 on rank 1"
    check_refusals(
        (lambda: wrapped(torch.optim.AdamW, ZeroOneSteps(1)), "AdamW does not share its own"),
        (lambda: wrapped(adam, OuterSteps(2, ZeroOneSteps(1))), "ZeroOneSteps needs a ZeroOneAdam"),
        (lambda: ZeroOneSteps(1, compression=DGCCompressor(0.1)), "ResidualMemory"),
        (lambda: ZeroOneSteps(0), "var_freeze_step must be a whole number of at least 1, not 0"),
        (lambda: ZeroOneSteps(1, local_step_clipper=half), "local_step_clipper must be a whole number"),
        (lambda: adam(net().parameters(), lr=-1.0), "lr must be a finite number of 0 or more, not -1.0"),
        (lambda: adam(net().parameters(), betas=(0.9, 1.0)), "betas must be two numbers from 0 to below 1"),
        (lambda: adam(net().parameters(), floor=2.0), "floor must be a fraction from 0 to 1"),
        (lambda: adam(net().parameters()).step(), "ZeroOneAdam steps only within ZeroOneSteps"),
        (lambda: onebit(compression=OneBitAdamCompressor()), "does not share its own"),
        (lambda: on(2, lambda t: trained(t, floor=0.1 * t.rank)), floors),
        (lambda: on(2, lambda t: trained(t, (1, 1 + t.rank))), "var_update_scaler is 1 on rank 0 and 2 on rank 1"),
        (lambda: wrapped(adam, ZeroOneSteps(1), embedding).step(), "takes dense gradients: set sparse=False"),
    )
    own = trained(alone())
    own.step()
    state = own.optimizer.compression_state_dict()["ZeroOneSteps.0"]
    bad = {name: u.fill_(torch.nan) for name, u in copy.deepcopy(state["u"]).items()}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"z": {}}, "z of another model"),
        ({"rates": []}, "state of 0 parameter groups, not 1"),
        ({"compression": {}}, "state of other compressors"),
        ({"other": 1}, "state of another algorithm"),
        ({"u": bad}, "has NaN or inf"),
    ]
    check_refusals(*((partial(own.algorithm.load_state_dict, {**state, **new}), words) for new, words in changes))


def with_outer_steps() -> Trained:
    return Trained(alone(), OuterSteps(2), partial(torch.optim.AdamW, lr=0.02))


def with_zero_one_steps() -> Trained:
    return trained(alone())


@pytest.mark.parametrize(
    ("make", "other"),
    [(with_outer_steps, with_zero_one_steps), (with_zero_one_steps, with_outer_steps)],
    ids=["into AdamW", "into 0/1 Adam"],
)
def test_the_state_of_another_optimizer_is_refused_before_anything_is_loaded(make: Any, other: Any) -> None:
    """Alone and with the algorithm. A step would otherwise fail with KeyError."""
    own, saved = make(), other()
    saved.step()
    for load, state, words in (
        (own.optimizer.load_state_dict, saved.optimizer.state_dict(), "from another optimizer than"),
        (own.optimizer.load_compression_state_dict, saved.optimizer.compression_state_dict(), "state"),
    ):
        with pytest.raises(ValueError, match=words):
            load(state)
    own.step()
    groups = own.optimizer.param_groups
    assert len(groups) == 1 and groups[0].keys() == make().optimizer.param_groups[0].keys()


def test_a_state_with_the_keys_of_a_scheduler_is_loaded() -> None:
    own, saved = (Trained(alone(), OuterSteps(2)) for _ in range(2))
    torch.optim.lr_scheduler.OneCycleLR(saved.optimizer, max_lr=0.1, total_steps=9, cycle_momentum=False)
    saved.step()
    older = saved.optimizer.state_dict()
    for group in older["param_groups"]:
        del group["foreach"]  # as an earlier version of torch saves it
    own.optimizer.load_state_dict(older)
    own.step()
