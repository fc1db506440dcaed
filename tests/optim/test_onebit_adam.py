"""1-bit Adam: AdamW in the warm-up, then momentum in one bit; what it keeps, and what it refuses.

And DGC for Adam: AdamW in the warm-up, then DGC of preconditioned gradients.
"""

import copy
import warnings
from functools import partial
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from cases import case
from optim import nets
from refusals import check_refusals

from dgc import compression as methods
from dgc.comm.lockstep import LockstepWorld
from dgc.local import ZeroOneSteps
from dgc.memory import ResidualMemory
from dgc.optim import DGCAdam, DistributedOptimizer, OneBitAdam
from dgc.testing import Fleet
from dgc.wire.envelope import sealed_bytes

pytestmark = pytest.mark.usefixtures("no_type_checks")
WARM_UP = 4
SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def onebit_adam(model: Any, freeze_step: int = WARM_UP, kind: Any = OneBitAdam, **options: Any) -> Any:
    return kind(model.parameters(), **{"lr": 0.01, **options}, freeze_step=freeze_step)


dgc_adam = partial(onebit_adam, kind=DGCAdam)


def adamw(model: Any, **options: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), foreach=False, **options)


def wrapped(model: Any, transport: Any, make: Any = onebit_adam, **options: Any) -> Any:
    return nets.wrap(
        model, transport, make, **{"compression": methods.OneBitAdamCompressor(), "bucket_mb": 2e-4, **options}
    )


def wrapped_dgc(model: Any, transport: Any) -> Any:
    return wrapped(model, transport, dgc_adam, compression=methods.DGCAdamCompressor(0.2, vectors="sparse"))


both = pytest.mark.parametrize("wrapped", [wrapped, wrapped_dgc], ids=["1-bit Adam", "DGC for Adam"])


def moments(optimizer: Any, name: str) -> Any:
    return [optimizer.state[p][name].clone() for group in optimizer.param_groups for p in group["params"]]


def test_gradients_of_the_warm_up_in_half_the_bytes() -> None:
    """They are what FP16Compressor gives to AdamW."""

    def ends(make: Any, compression: Any) -> Any:
        sent = []

        def body(model: Any, transport: Any) -> None:
            optimizer = nets.wrap(model, transport, partial(make, **SETTINGS), compression=compression())
            nets.train(model, optimizer, range(WARM_UP - 1), transport.rank)
            sent.append(optimizer.meter.payload_bytes)

        return nets.values(nets.run(2, body)[0]).values(), sent[0]

    expected, half = ends(adamw, methods.FP16Compressor)
    sparse = partial(methods.DGCAdamCompressor, 0.1, vectors="sparse")
    for make, compressor in ((onebit_adam, methods.OneBitAdamCompressor), (dgc_adam, sparse)):
        for gradients, factor in ((methods.FP16Compressor(), 1), (None, 2)):
            found, nbytes = ends(make, partial(compressor, gradients=gradients))
            difference = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
            assert (difference < 1e-7) == (factor == 1) and nbytes == factor * half


def test_a_run_of_adamw_goes_on() -> None:
    model, other = nets.net(), nets.net()
    before = adamw(model, **SETTINGS)
    for step in range(3):
        before.zero_grad()
        nets.loss_of(model, step, 0).backward()
        before.step()
    other.load_state_dict(model.state_dict())
    saved = copy.deepcopy(before.state_dict())
    for make in (onebit_adam, dgc_adam):
        with pytest.raises(ValueError, match="has 3 steps, .* freeze_step is 3: .* set freeze_step to 4 or more"):
            make(other, 3).load_state_dict(saved)
        wrapper = nets.wrap(other, nets.alone(), partial(make, freeze_step=5))
        wrapper.load_state_dict(saved)
        wrapper.close()
        assert wrapper.inner.param_groups[0]["steps"] == 3
    after = onebit_adam(other, 5)
    after.load_state_dict(saved)
    assert after.param_groups[0].items() >= {**SETTINGS, "freeze_step": 5}.items()
    for step in (3, 4):
        for of, optimizer in ((model, before), (other, after)):
            optimizer.zero_grad()
            nets.loss_of(of, step, 0).backward()
            optimizer.step()
        nets.assert_same(other, model)
    assert after.exchanges_momentum
    for kind, options in ((torch.optim.AdamW, {"amsgrad": True}), (torch.optim.Adam, {"weight_decay": 0.1})):
        state = kind(model.parameters(), **options).state_dict()
        with case(options), pytest.raises(ValueError, match="from AdamW without amsgrad and maximize"):
            after.load_state_dict(state)
    del saved["state"][0]["step"]
    for state in (saved, torch.optim.SGD(model.parameters(), lr=0.1).state_dict()):
        with pytest.raises(ValueError, match="that of another optimizer than OneBitAdam"):
            after.load_state_dict(state)


@both
def test_a_saved_state_goes_on_bit_for_bit(wrapped: Any) -> None:
    for saved in (2, WARM_UP, WARM_UP + 3):
        for used in (0, WARM_UP + 2):
            with case(saved, used):
                nets.check_that_a_saved_state_goes_on(wrapped, saved, used)


@both
def test_a_dropped_step_never_was(wrapped: Any) -> None:
    """The model, the moments, the stage and the errors of both directions are as before, bit for bit."""

    def body(model: Any, transport: Any, steps: int) -> None:
        optimizer = wrapped(model, transport)
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

    for steps in (WARM_UP - 1, WARM_UP, WARM_UP + 2):
        with pytest.warns(UserWarning, match="rank 1 has NaN"):
            nets.run(2, partial(body, steps=steps))


@both
@nets.each_rank(2)
def test_a_tensor_without_gradients_in_the_warm_up_stays(model: Any, transport: Any, wrapped: Any) -> None:
    """Its second moment is zero: the scale that its signs stand for would be divided by eps."""
    optimizer = wrapped(model, transport)
    still = copy.deepcopy(model.spare)
    nets.train(model, optimizer, range(WARM_UP), transport.rank, spare=False)
    nets.train(model, optimizer, range(WARM_UP, WARM_UP + 5), transport.rank)
    assert nets.same(still.parameters(), model.spare.parameters())
    assert all(float(p.detach().abs().max()) < 2 for p in model.parameters())


def test_momentum_that_was_clipped_is_reported_once() -> None:
    def body(model: Any, transport: Any, first: int, limit: float) -> None:
        def clip(model: Any) -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)

        optimizer = wrapped(model, transport)
        nets.train(model, optimizer, range(first), transport.rank, finish=nets.through_gradients)
        finish = partial(nets.through_gradients, change=clip)
        nets.train(model, optimizer, range(first, 3 * WARM_UP), transport.rank, finish=finish)

    # clipped from the warm-up on; by a limit that is not reached; never
    for first, limit, reports in ((0, 1e-3, 1), (WARM_UP, 1e3, 0), (3 * WARM_UP, 1e-3, 0)):
        with case(first), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            nets.run(2, partial(body, first=first, limit=limit))
            assert [str(w.message) for w in said if "max_grad_norm=0" in str(w.message)] == [ANY] * reports


def test_the_warm_up_is_adamw_bit_for_bit() -> None:
    for steps, equal in ((5, True), (6, False)):
        onebit = nets.trained(
            2, range(steps), partial(onebit_adam, freeze_step=5, **SETTINGS), methods.OneBitAdamCompressor
        )
        expected = nets.trained(2, range(steps), partial(adamw, **SETTINGS), methods.DenseCompressor)
        assert nets.same(nets.values(expected).values(), nets.values(onebit).values()) == equal


@nets.each_rank(3)
def test_then_momentum_travels_in_one_bit_and_the_second_moment_stays(model: Any, transport: Any) -> None:
    optimizer = wrapped(model, transport, bucket_mb=25)
    ratios, sent = [], [0]
    for step in range(WARM_UP + 3):
        ratios.append(optimizer.compress_ratio)
        nets.train(model, optimizer, [step], transport.rank)
        sent.append(optimizer.meter.payload_bytes - sum(sent))
        if step == WARM_UP - 1:
            frozen = moments(optimizer, "exp_avg_sq")
    n = sum(p.numel() for p in model.parameters())
    assert n == 155 and ratios == [1.0] * WARM_UP + [1 / 32] * 3
    # Of 3 chunks of 64, 64 and 27 elements the first one has the most pieces: of 3, 24, 8 and 29 elements of
    # four tensors, in the order of backward. Each has a scale and a word of signs
    assert sent == [0] + [4 * n] * WARM_UP + [4 * sealed_bytes(4 * 8)] * 3
    assert nets.same(frozen, moments(optimizer, "exp_avg_sq"))
    assert nets.same(moments(optimizer, "exp_avg"), [p.grad for p in model.parameters()])


def test_small_second_moments_are_raised_at_the_end_of_the_warm_up() -> None:
    """The gradients of some elements begin late, or are tiny. All signs have one magnitude: with floor=0 these
    elements move by it, divided by next to nothing.
    """
    slopes = torch.ones(64)
    slopes[0], slopes[1] = 0.0, 1e-6

    def moved(transport: Any, **options: Any) -> Any:
        p = torch.nn.Parameter(torch.zeros(64))
        adam = OneBitAdam([p], lr=0.01, freeze_step=WARM_UP, **options)
        optimizer = DistributedOptimizer(adam, [("p", p)], methods.OneBitAdamCompressor(), transport=transport)
        for step in range(WARM_UP + 6):
            if step == WARM_UP:
                v = adam.state[p]["exp_avg_sq"].clone()
                slopes_now = slopes.index_fill(0, torch.tensor([0]), 1.0)
            optimizer.zero_grad()
            (p * (slopes if step < WARM_UP else slopes_now)).sum().backward()
            optimizer.step()
        return v, p.detach()

    for v, p in LockstepWorld(2).run(moved):
        assert float(v[:2].max()) == pytest.approx(0.01 * 62 / 64 * float(v[2]), rel=1e-3)
        assert float(p[0]) < -0.01 and float(p.abs().max()) < 1.0
    for v, p in LockstepWorld(2).run(partial(moved, floor=0.0)):
        assert v[0] == 0 and 0 < v[1] < 1e-11 * v[2]
        assert p[0] == 0 and p[1].abs() > 100


@nets.each_rank(2)
def test_other_compressors_send_gradients_to_it(model: Any, transport: Any) -> None:
    """Vectors go dense here. Their momentum is the optimizer's own, with the frozen second moment."""
    route = methods.Route(
        [methods.Rule(methods.OneBitAdamCompressor(), min_dim=2), methods.Rule(methods.DenseCompressor())]
    )
    optimizer = wrapped(model, transport, compression=route)
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


@nets.each_rank(2)
def test_groups_have_their_own_settings(model: Any, transport: Any) -> None:
    def groups(model: Any) -> Any:
        first = {"params": list(model.first.parameters()), "betas": (0.5, 0.9), "lr": 0.0}
        others = {"params": [*model.spare.parameters(), *model.last.parameters()]}
        return OneBitAdam([first, others], lr=0.01, freeze_step=2)

    optimizer, start = wrapped(model, transport, groups), nets.values(model)
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
    model = nets.net()
    optimizer = onebit_adam(model)
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
    """Of a quadratic, with noise. One element has no gradient until some steps after the warm-up."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    g = x - rank + torch.randn(SHAPE, generator=generator) / 4
    return g.index_fill(0, torch.tensor([0]), 0.0) if step < WARM_UP + 3 else g


def by_hand(size: int, ratio: float, correct: bool) -> Any:
    """The header's formulas, with all ranks in one place."""
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
                v = v.clamp(min=0.01 * v.mean())
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


def test_every_step_is_that_of_the_formulas_and_sends_the_planned_bytes() -> None:
    def body(transport: Any, ratio: float, correct: bool) -> Any:
        p = torch.nn.Parameter(torch.zeros(SHAPE))
        inner = DGCAdam([p], LR, BETAS, EPS, DECAY, freeze_step=WARM_UP, bias_correction=correct)
        compression = methods.DGCAdamCompressor(ratio, int32_indices=True)
        optimizer, sent = DistributedOptimizer(inner, [("p", p)], compression, transport=transport), [0]
        for step in range(STEPS):
            optimizer.zero_grad()
            p.grad = gradient(p.detach(), transport.rank, step)
            optimizer.step()
            sent.append(optimizer.meter.payload_bytes - sum(sent))
        return p.detach(), sent[1:]

    for size, ratio, correct in ((1, 0.1, True), (3, 0.05, True), (3, 0.1, False), (2, 0.999, True)):
        expected, n = by_hand(size, ratio, correct), SHAPE[0] * SHAPE[1]
        with case(size, ratio, correct):
            found, sent = zip(*LockstepWorld(size).run(partial(body, ratio=ratio, correct=correct)), strict=True)
            assert all(torch.equal(x, found[0]) for x in found)
            torch.testing.assert_close(found[0], expected, rtol=0, atol=2e-5)
            assert float(expected.abs().max()) > 0.1 or size == 1
            later = sealed_bytes(min(8 * round(ratio * n), 4 * n))
            assert sent == ([4 * n] * WARM_UP + [later] * (STEPS - WARM_UP),) * size


def test_what_does_not_fit_is_refused() -> None:
    def two_betas(model: Any) -> Any:
        others = {"params": [*model.spare.parameters(), *model.last.parameters()]}
        first = {"params": list(model.first.parameters()), "betas": (0.5, 0.9)}
        return DGCAdam([first, others], freeze_step=2)

    onebit, for_adam = methods.OneBitAdamCompressor(), methods.DGCAdamCompressor(0.1, vectors="sparse")
    refused: list[tuple[Any, Any, str]] = [
        (adamw, onebit, "AdamW does not share its own: use .*OneBitAdam"),
        (adamw, for_adam, "use .*DGCAdam"),
        (onebit_adam, for_adam, "OneBitAdam does not share its own: use dgc.optim.DGCAdam"),
        (dgc_adam, onebit, "DGCAdam takes updates in its place: use dgc.optim.OneBitAdam"),
        (onebit_adam, nets.dgc(), "OneBitAdam would apply it again"),
        (dgc_adam, nets.dgc(), "DGCAdam would apply it again"),
        (two_betas, for_adam, r"one beta1 to all parameters, not \[0.5, 0.9\]"),
    ]
    for make, compression, words in refused:
        with case(words), pytest.raises(ValueError, match=words):
            wrapped(nets.net(), nets.alone(), make, compression=compression)
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    a, b = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    groups = [{"params": [a]}, {"params": [b], "freeze_step": 5}]

    def freeze_apart(model: Any, transport: Any) -> None:
        wrapped(model, transport, partial(onebit_adam, freeze_step=WARM_UP + transport.rank))

    check_refusals(
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
        ({"lr": -1.0}, "lr must be 0 or more"),
        ({"eps": float("nan")}, "eps must be 0 or more"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers from 0 to below 1"),
        ({"floor": 1.5}, "floor must be a fraction from 0 to 1, not 1.5"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
    ]
    check_refusals(*((partial(onebit_adam, nets.net(), **options), words) for options, words in wrong))
    given: tuple[Any, ...] = (methods.FP16Compressor, methods.OneBitAdamCompressor())
    for gradients in given:
        for make in (
            methods.OneBitAdamCompressor,
            partial(methods.DGCAdamCompressor, 0.01),
            partial(ZeroOneSteps, 1),
        ):
            with pytest.raises(ValueError, match="gradients must be a compressor without state"):
                make(gradients=gradients)
    none = r"momentum of a dgc.optim.OneBitAdam, and has none.*DoubleSqueeze"
    check_refusals(
        (lambda: methods.DGCAdamCompressor(0.1, memory=ResidualMemory()), "has a memory of its own"),
        (
            lambda: Fleet(lambda: methods.DGCAdamCompressor(0.1), 1),
            "second moment of a dgc.optim.DGCAdam, and has none",
        ),
        (lambda: Fleet(methods.OneBitAdamCompressor, 1), none),
    )
