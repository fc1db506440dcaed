"""Adam and compression: the size of its steps, as described in docs/methods.md, 1-bit Adam, and DGC for Adam."""

import copy
import math
import re
import warnings
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from cases import case
from optim import nets
from refusals import check_refusals, refuse

from dgc import compression as methods
from dgc.comm.lockstep import LockstepWorld
from dgc.contrib import ZeroOneSteps
from dgc.core.envelope import sealed_bytes
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import DGCAdam, DistributedOptimizer, OneBitAdam
from dgc.testing import Fleet

pytestmark = pytest.mark.usefixtures("no_type_checks")


def travel(make: Any, steps: int = 160, **settings: Any) -> Any:
    """The distance that two ranks move with constant gradients, in units of learning rate and step."""

    def body(transport: Any) -> Any:
        p, slopes = torch.nn.Parameter(torch.zeros(20, 50)), torch.logspace(-1, 0, 1000).view(20, 50)
        adam = torch.optim.Adam([p], lr=1.0, **settings)
        wrapped = DistributedOptimizer(adam, [("p", p)], make(), transport=transport)
        for step in range(steps):
            if step == steps // 2:
                middle = p.detach().clone()
            wrapped.zero_grad()
            (p * slopes).sum().backward()
            wrapped.step()
        return (middle - p.detach()) / (steps - steps // 2)

    first, second = LockstepWorld(2).run(body)
    assert torch.equal(first, second)
    return first


@pytest.mark.filterwarnings("ignore:.* sends an element seldom")
@pytest.mark.parametrize("ratio", [0.25, 0.1])
def test_sparse_gradients_shorten_adams_steps_by_the_root_of_the_ratio(ratio: float) -> None:
    """An element sent every T steps is T times as large: the first moment stays g, the second becomes T g^2."""
    steps = travel(partial(methods.DGCCompressor, ratio, ResidualMemory()), betas=(0.9, 0.99))
    assert float(steps.mean()) == pytest.approx(math.sqrt(ratio), rel=0.35)
    assert float(steps.mean()) < 0.75
    assert ratio < 0.25 or bool((steps > 0.1).all())


@pytest.mark.filterwarnings("ignore:.* sends an element seldom")
@pytest.mark.parametrize(
    "make",
    [lambda: methods.QSGDCompressor(bits=8), lambda: methods.DGCCompressor(1.0, ResidualMemory())],
    ids=["8 bits", "ratio 1"],
)
def test_dense_gradients_do_not_change_adams_steps(make: Any) -> None:
    assert float(travel(make, steps=100).mean()) == pytest.approx(1.0, rel=0.05)


@pytest.mark.filterwarnings("ignore:ScaledSignCompressor ruins Adam's step")
def test_signs_with_one_scale_for_all_give_adam_steps_of_different_sizes() -> None:
    """Small elements alternate in sign, and have the second moment of the scale."""
    steps = travel(methods.ScaledSignCompressor, betas=(0.9, 0.99))
    assert bool((steps > 0).all()) and float(steps.max()) > 2 * float(steps.min())


@pytest.mark.filterwarnings("ignore:.* sends an element seldom")
def test_weight_decay_of_adamw_is_not_compressed() -> None:
    decaying = partial(adamw, lr=0.1, weight_decay=0.5)
    nothing = {"loss": lambda model, *_: sum((p * 0).sum() for p in model.parameters())}
    model = nets.trained(2, [0], decaying, lambda: methods.DGCCompressor(0.01, ResidualMemory()), training=nothing)
    for p, start in zip(model.parameters(), nets.net().parameters(), strict=True):
        assert torch.equal(p, start * (1 - 0.1 * 0.5))


OF_THEIR_OWN: list[Any] = [
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(partial(OneBitAdam, freeze_step=1), partial(DGCAdam, freeze_step=1)),
    partial(torch.optim.RMSprop, momentum=0.9),
]


HEAVY_BALL = partial(torch.optim.SGD, momentum=0.9)


@pytest.mark.parametrize(
    ("make", "beta", "warns"),
    [
        *((HEAVY_BALL, 0.5, True), (partial(torch.optim.RMSprop, momentum=0.9), 0.5, True)),
        *((HEAVY_BALL, 1.0, False), (torch.optim.SGD, 0.5, False)),
    ],
)
def test_momentum_of_ef21_gives_a_warning_where_the_optimizer_has_its_own(
    make: Any, beta: float, warns: bool
) -> None:
    def optimizer(model: Any) -> Any:
        return make(model.parameters(), lr=0.1)

    method = methods.EF21Compressor(methods.DGCCompressor(0.1, ResidualMemory()), beta)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nets.wrap(nets.net(), nets.alone(), optimizer, compression=method)
    words = "EF21Compressor has momentum, and .* applies its own again: set momentum=0.0"
    assert [bool(re.search(words, str(found.message))) for found in caught] == [True] * warns


@pytest.mark.filterwarnings("ignore:.* sends an element seldom")
def test_momentum_correction_is_refused_where_the_optimizer_has_momentum() -> None:
    for make in OF_THEIR_OWN:
        name = getattr(make, "func", make).__name__
        of_adam = "" if name == "RMSprop" else "DGCAdamCompressor.*OneBitAdamCompressor.*"
        words = f"{name} would apply it again.*{of_adam}DGCSGD.*ResidualMemory"
        wrapped = partial(nets.wrap, make=lambda model, make=make: make(model.parameters()))
        for compressor in (methods.DGCCompressor, methods.SparseCompressor, methods.ChunkCompressor):
            refuse(words, wrapped, nets.net(), nets.alone(), compression=compressor(0.01, DGCSGDMemory(0.9)))
            wrapped(nets.net(), nets.alone(), compression=compressor(0.01, ResidualMemory()))


WARM_UP = 4
SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def onebit_adam(model: Any, freeze_step: int = WARM_UP, kind: Any = OneBitAdam, **options: Any) -> Any:
    return kind(model.parameters(), **{"lr": 0.01, **options}, freeze_step=freeze_step)


dgc_adam = partial(onebit_adam, kind=DGCAdam)


def adamw(model: Any, **options: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), foreach=False, **options)


def wrapped(model: Any, transport: Any, make: Any = onebit_adam, **options: Any) -> Any:
    of_dgc = make is dgc_adam
    compression = methods.DGCAdamCompressor(0.2, vectors="sparse") if of_dgc else methods.OneBitAdamCompressor()
    return nets.wrap(model, transport, make, **{"compression": compression, "bucket_mb": 2e-4, **options})


both = pytest.mark.parametrize("make", [onebit_adam, dgc_adam], ids=["1-bit Adam", "DGC for Adam"])


def moments(optimizer: Any, name: str) -> Any:
    return [optimizer.state[p][name].clone() for group in optimizer.param_groups for p in group["params"]]


def test_the_warm_up_is_adamw_bit_for_bit_also_with_gradients_in_half_the_bytes() -> None:
    def ends(transport: Any, make: Any, compression: Any, steps: int) -> Any:
        model = nets.net()
        optimizer = nets.wrap(model, transport, partial(make, **SETTINGS), compression=compression())
        nets.train(model, optimizer, range(steps), transport.rank)
        return [*nets.values(model).values()], optimizer.meter.payload_bytes

    sparse = partial(methods.DGCAdamCompressor, 0.1, vectors="sparse")
    kinds = (onebit_adam, methods.OneBitAdamCompressor), (dgc_adam, sparse)
    for (make, compressor), gradients, later in product(kinds, (None, methods.FP16Compressor()), (False, True)):
        both = (
            (adamw, type(gradients or methods.DenseCompressor())),
            (make, partial(compressor, gradients=gradients)),
        )
        bodies = (partial(ends, make=m, compression=c, steps=WARM_UP + later) for m, c in both)
        (expected, nbytes), (found, sent) = (LockstepWorld(2).run(body)[0] for body in bodies)
        with case(compressor, gradients, later):
            assert (nets.same(found, expected) and sent == nbytes) == (not later)


def test_a_run_of_adamw_goes_on() -> None:
    model, other = nets.net(), nets.net()
    before = adamw(model, **SETTINGS)
    nets.train(model, before, range(3))
    other.load_state_dict(model.state_dict())
    saved = copy.deepcopy(before.state_dict())
    for make in (onebit_adam, dgc_adam):
        refuse("has 3 steps, .* freeze_step is 3: .* set freeze_step to 4", make(other, 3).load_state_dict, saved)
        wrapper = nets.wrap(other, nets.alone(), partial(make, freeze_step=5))
        wrapper.load_state_dict(saved)
        wrapper.close()
        assert wrapper.inner.param_groups[0]["steps"] == 3
    after = onebit_adam(other, 5)
    after.load_state_dict(saved)
    assert after.param_groups[0].items() >= {**SETTINGS, "freeze_step": 5}.items()
    for step in (3, 4):
        nets.train(model, before, [step])
        nets.train(other, after, [step])
        nets.assert_same(other, model)
    assert after.exchanges_momentum
    del saved["state"][0]["step"]
    others = [adamw(model, amsgrad=True), torch.optim.Adam(model.parameters(), weight_decay=0.1)]
    if "decoupled_weight_decay" not in others[1].defaults:  # before torch 2.7 its state is like one of AdamW
        others.pop()
    loaded, sgd = partial(partial, after.load_state_dict), nets.momentum_sgd(model)
    check_refusals(
        *((loaded(other.state_dict()), "from AdamW without amsgrad and maximize") for other in others),
        *((loaded(state), "from another optimizer than OneBitAdam") for state in (saved, sgd.state_dict())),
    )


@both
def test_a_saved_state_goes_on_bit_for_bit(make: Any) -> None:
    for saved, used in product((2, WARM_UP, WARM_UP + 3), (0, WARM_UP + 2)):
        with case(saved, used):
            nets.check_that_a_saved_state_goes_on(partial(wrapped, make=make), saved, used)


@both
@pytest.mark.parametrize("steps", [WARM_UP - 1, WARM_UP, WARM_UP + 2])
@pytest.mark.filterwarnings("ignore:.*rank 1 has NaN")
@nets.each_rank(2)
def test_a_dropped_step_never_was(model: Any, transport: Any, make: Any, steps: int) -> None:
    optimizer = wrapped(model, transport, make)
    nets.train(model, optimizer, range(steps), transport.rank)

    def everything() -> Any:
        # the velocity of DGC then has the finite gradients too
        own = optimizer.compression_state_dict().get("OneBitAdamCompressor.0", {})
        errors = [t.clone() for part in ("errors", "server_errors") for t in own.get(part, {}).values()]
        both = [*moments(optimizer, "exp_avg"), *moments(optimizer, "exp_avg_sq")]
        return [*nets.values(model).values(), *both, *errors]

    before, counted = everything(), optimizer.param_groups[0]["steps"]
    optimizer.zero_grad()
    (nets.loss_of(model, 9, transport.rank) * (float("nan") if transport.rank else 1.0)).backward()
    optimizer.step()
    assert optimizer.dropped_steps == 1 and optimizer.param_groups[0]["steps"] == counted == steps
    assert nets.same(before, everything())
    nets.train(model, optimizer, range(5), transport.rank)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@both
@nets.each_rank(2)
def test_a_tensor_without_gradients_in_the_warm_up_stays(model: Any, transport: Any, make: Any) -> None:
    """Its second moment is zero: the scale that its signs stand for would be divided by eps."""
    optimizer = wrapped(model, transport, make)
    still = copy.deepcopy(model.spare)
    nets.train(model, optimizer, range(WARM_UP), transport.rank, spare=False)
    nets.train(model, optimizer, range(WARM_UP, WARM_UP + 5), transport.rank)
    assert nets.same(still.parameters(), model.spare.parameters())
    assert all(float(p.detach().abs().max()) < 2 for p in model.parameters())


def test_momentum_that_was_clipped_is_reported_once() -> None:
    def body(model: Any, transport: Any, first: int, limit: float) -> None:
        optimizer = wrapped(model, transport)
        for step in range(3 * WARM_UP):
            clip = (lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), limit)) if step >= first else None
            finish = partial(nets.through_gradients, change=clip)
            nets.train(model, optimizer, [step], transport.rank, finish=finish)

    # clipped from the warm-up on; by a limit that is not reached; never
    for first, limit, reports in ((0, 1e-3, 1), (WARM_UP, 1e3, 0), (3 * WARM_UP, 1e-3, 0)):
        with case(first), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            nets.run(2, partial(body, first=first, limit=limit))
            assert ["max_grad_norm=0" in str(w.message) for w in said].count(True) == reports


@nets.each_rank(3)
def test_momentum_is_sent_in_one_bit_after_the_warm_up(model: Any, transport: Any) -> None:
    optimizer = wrapped(model, transport, bucket_mb=25)
    ratios, sent = [], [0]
    for step in range(WARM_UP + 3):
        ratios.append(optimizer.compress_ratio)
        nets.train(model, optimizer, [step], transport.rank)
        sent.append(optimizer.meter.payload_bytes - sum(sent))
    n = sum(p.numel() for p in model.parameters())
    assert n == 155 and ratios == [1.0] * WARM_UP + [1 / 32] * 3
    # of 3 chunks the first has the most pieces: of four tensors, each with a scale and a word of signs
    assert sent == [0] + [4 * n] * WARM_UP + [4 * sealed_bytes(4 * 8)] * 3
    assert nets.same(moments(optimizer, "exp_avg"), [p.grad for p in model.parameters()])


@nets.each_rank(3)
def test_the_second_moment_stays_as_it_is_after_the_warm_up(model: Any, transport: Any) -> None:
    optimizer = wrapped(model, transport, bucket_mb=25)
    nets.train(model, optimizer, range(WARM_UP), transport.rank)
    frozen = moments(optimizer, "exp_avg_sq")
    nets.train(model, optimizer, range(WARM_UP, WARM_UP + 3), transport.rank)
    assert nets.same(frozen, moments(optimizer, "exp_avg_sq"))


@pytest.mark.filterwarnings("ignore:.* sends an element seldom")
@nets.each_rank(2)
def test_other_compressors_send_gradients_to_it(model: Any, transport: Any) -> None:
    """Vectors go dense here. Their momentum is the optimizer's own, with the frozen second moment."""
    rules = [methods.Rule(methods.OneBitAdamCompressor(), min_dim=2), methods.Rule(methods.DenseCompressor())]
    optimizer = wrapped(model, transport, compression=methods.Route(rules))
    assert not optimizer.receives_momentum
    nets.train(model, optimizer, range(WARM_UP + 2), transport.rank)
    assert optimizer.receives_momentum
    before = {p: optimizer.state[p]["exp_avg"].clone() for p in model.parameters()}
    nets.train(model, optimizer, [7], transport.rank)
    for p in model.parameters():
        expected = p.grad if p.dim() > 1 else before[p].lerp(p.grad, 1 - 0.9)
        assert torch.equal(optimizer.state[p]["exp_avg"], expected)
    sparse = wrapped(nets.net(), nets.alone(), compression=methods.DGCCompressor(0.1, ResidualMemory()))
    nets.train(nets.net(), sparse, range(2))


def two_groups(model: Any, kind: Any = OneBitAdam, **first: Any) -> Any:
    groups = [{"params": list(model.first.parameters()), "betas": (0.5, 0.9), **first}]
    groups += [{"params": [*model.spare.parameters(), *model.last.parameters()]}]
    return kind(groups, lr=0.01, freeze_step=2)


@nets.each_rank(2)
def test_groups_have_their_own_settings(model: Any, transport: Any) -> None:
    optimizer, start = wrapped(model, transport, partial(two_groups, lr=0.0)), nets.values(model)
    nets.train(model, optimizer, range(2), transport.rank)
    p = model.first.weight
    ((beta1, momentum),) = optimizer.inner.momentum_of([p])
    assert beta1 == 0.5 and momentum is optimizer.state[p]["exp_avg"]
    nets.train(model, optimizer, range(2, 6), transport.rank)
    moved = {name for name, value in nets.values(model).items() if not torch.equal(value, start[name])}
    assert moved == {name for name in start if not name.startswith("first")}


@nets.each_rank((4, 2))
def test_machines_exchange_momentum_between_them(model: Any, transport: Any) -> None:
    optimizer = wrapped(model, transport, hierarchical="on")
    nets.train(model, optimizer, range(WARM_UP + 4), transport.rank)
    assert optimizer.compress_ratio == 1 / 32 and optimizer.error_norm() > 0


def test_alone_it_is_adamw_with_a_constant_second_moment() -> None:
    optimizer = onebit_adam(model := nets.net())
    nets.train(model, optimizer, range(WARM_UP))
    assert optimizer.exchanges_momentum and not optimizer.receives_momentum
    m, v = moments(optimizer, "exp_avg"), moments(optimizer, "exp_avg_sq")
    nets.train(model, optimizer, [WARM_UP])
    expected = [a.lerp(p.grad, 1 - 0.9) for a, p in zip(m, model.parameters(), strict=True)]
    assert nets.same(expected, moments(optimizer, "exp_avg")) and nets.same(v, moments(optimizer, "exp_avg_sq"))
    optimizer.zero_grad()
    optimizer.step()  # without gradients it is no step
    assert optimizer.param_groups[0]["steps"] == WARM_UP + 1


STEPS, SHAPE = 40, (6, 10)
LR, BETAS, EPS, DECAY = 0.05, (0.8, 0.9), 1e-6, 0.1


def gradient(x: Any, rank: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(100 * step + rank)
    g = x - rank + torch.randn(SHAPE, generator=generator) / 4
    return g.index_fill(0, torch.tensor([0]), 0.0) if step < WARM_UP + 3 else g


def by_hand(size: int, ratio: float, correct: bool, floor: float) -> Any:
    x, m, v = (torch.zeros(SHAPE) for _ in range(3))
    us, errors = ([torch.zeros(SHAPE) for _ in range(size)] for _ in range(2))
    (beta1, beta2), k = BETAS, round(ratio * x.numel())
    for step in range(STEPS):
        t, gs = step + 1, [gradient(x, rank, step) for rank in range(size)]
        c1, c2 = (1 - beta1**t, 1 - beta2 ** min(t, WARM_UP)) if correct else (1.0, 1.0)
        if t <= WARM_UP:
            g = sum(gs) / size
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            if t == WARM_UP:
                v = v.clamp(min=floor * v.mean())
                root = (v / (1 - beta2**WARM_UP if correct else 1.0)).sqrt() + EPS
            x = x * (1 - LR * DECAY) - LR / c1 * m / ((v / c2).sqrt() + EPS)
            continue
        mean = torch.zeros(SHAPE)
        for rank, g in enumerate(gs):
            us[rank] = beta1 * us[rank] + g / root
            errors[rank] = errors[rank] + us[rank]
            chosen = errors[rank].view(-1).abs().topk(k).indices
            sent = torch.zeros(x.numel()).index_put((chosen,), errors[rank].view(-1)[chosen]).view(SHAPE)
            errors[rank], mean = errors[rank] - sent, mean + sent / size
        m = beta1 * m
        x = x * (1 - LR * DECAY) - LR / c1 * ((1 - beta1) * mean + m / root)
    return x


def steps_of_dgc_adam(size: int, ratio: float, correct: bool, floor: float) -> tuple[Any, Any]:
    """By rank the parameter at the end, and the bytes of each step."""

    def body(transport: Any) -> Any:
        p = torch.nn.Parameter(torch.zeros(SHAPE))
        inner = DGCAdam([p], LR, BETAS, EPS, DECAY, freeze_step=WARM_UP, bias_correction=correct, floor=floor)
        compression = methods.DGCAdamCompressor(ratio, int32_indices=True)
        optimizer, sent = DistributedOptimizer(inner, [("p", p)], compression, transport=transport), [0]
        for step in range(STEPS):
            optimizer.zero_grad()
            p.grad = gradient(p.detach(), transport.rank, step)
            optimizer.step()
            sent.append(optimizer.meter.payload_bytes - sum(sent))
        return p.detach(), sent[1:]

    found, sent = zip(*LockstepWorld(size).run(body), strict=True)
    return found, sent


of_dgc_adam = pytest.mark.parametrize(
    ("size", "ratio", "correct", "floor"),
    [(1, 0.1, True, 0.01), (3, 0.05, True, 0.01), (3, 0.1, False, 0.5), (2, 0.999, True, 0.1)],
)


@of_dgc_adam
def test_steps_of_dgc_for_adam_follow_the_formulas(size: int, ratio: float, correct: bool, floor: float) -> None:
    expected, (found, _) = by_hand(size, ratio, correct, floor), steps_of_dgc_adam(size, ratio, correct, floor)
    assert all(torch.equal(x, found[0]) for x in found)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=2e-5)
    assert float(expected.abs().max()) > 0.1 or size == 1


@of_dgc_adam
def test_steps_of_dgc_for_adam_send_the_planned_bytes(
    size: int, ratio: float, correct: bool, floor: float
) -> None:
    n, (_, sent) = 60, steps_of_dgc_adam(size, ratio, correct, floor)
    later = sealed_bytes(min(8 * round(ratio * n), 4 * n))
    assert sent == ([4 * n] * WARM_UP + [later] * (STEPS - WARM_UP),) * size


def test_what_does_not_fit_is_refused() -> None:
    def freeze_apart(model: Any, transport: Any) -> None:
        wrapped(model, transport, partial(onebit_adam, freeze_step=WARM_UP + transport.rank))

    onebit, for_adam = methods.OneBitAdamCompressor(), methods.DGCAdamCompressor(0.1, vectors="sparse")
    refused: list[tuple[Any, Any, str]] = [
        (adamw, onebit, "AdamW does not share its own: use .*OneBitAdam"),
        (adamw, for_adam, "use .*DGCAdam"),
        (onebit_adam, for_adam, "OneBitAdam does not share its own: use dgc.optim.DGCAdam"),
        (dgc_adam, onebit, "DGCAdam takes updates in its place: use dgc.optim.OneBitAdam"),
        (partial(two_groups, kind=DGCAdam), for_adam, r"one beta1 to all parameters, not \[0.5, 0.9\]"),
    ]
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    a, b = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    groups = [{"params": [a]}, {"params": [b], "freeze_step": 5}]
    check_refusals(
        *((partial(wrapped, nets.net(), nets.alone(), m, compression=c), words) for m, c, words in refused),
        (
            lambda: nets.run(2, partial(wrapped, op="sum")),
            "Compressor exchanges means of momentum: use op='average'",
        ),
        (lambda: OneBitAdam(groups, freeze_step=4), "freeze_step is 4 in group 0 and 5 in group 1"),
        (lambda: nets.run(2, freeze_apart), r"param_groups\[0\]\['freeze_step'\] is 4 on rank 0 and 5 on rank 1"),
        (onebit_adam(embedding).step, "OneBitAdam takes dense gradients: set sparse=False"),
    )


def test_wrong_arguments() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"freeze_step": 0}, "freeze_step must be a whole number of at least 1, not 0"),
        ({"freeze_step": 1.5}, "freeze_step must be a whole number"),
        ({"lr": -1.0}, "lr must be a finite number of 0 or more"),
        ({"eps": float("nan")}, "eps must be a finite number of 0 or more"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers from 0 to below 1"),
        ({"floor": 1.5}, "floor must be a fraction from 0 to 1, not 1.5"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
    ]
    onebit, for_adam = methods.OneBitAdamCompressor, partial(methods.DGCAdamCompressor, 0.01)
    kinds: list[Any] = [onebit, for_adam, partial(ZeroOneSteps, 1)]
    no_gradients: list[Any] = [methods.FP16Compressor, methods.OneBitAdamCompressor()]
    stateless = [partial(make, gradients=given) for make, given in product(kinds, no_gradients)]
    check_refusals(
        *((partial(onebit_adam, nets.net(), **options), words) for options, words in wrong),
        *((make, "gradients must be a compressor without state") for make in stateless),
        (partial(for_adam, memory=ResidualMemory()), "has a memory of its own"),
        (lambda: Fleet(for_adam, 1), "second moment of a dgc.optim.DGCAdam, and has none"),
        (lambda: Fleet(onebit, 1), r"momentum of a dgc.optim.OneBitAdam, and has none.*TwoPhase"),
    )
