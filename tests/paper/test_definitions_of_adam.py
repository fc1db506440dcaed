"""dgc/paper is the definition: the fast 1-bit Adam and 0/1 Adam do the same over 60 steps, in both stages.

Both round to fp32 in another order. A sign would differ if a value were that near to zero, which none here is.
"""

from typing import Any

import pytest
import torch
from torch import nn

from dgc.codes.chunked_signs import divide_into_chunks
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import OneBitAdamCompressor
from dgc.contrib import ZeroOneAdam, ZeroOneSteps
from dgc.contrib.zero_one_adam import ZeroOneSchedule
from dgc.core.bucket import make_bucket
from dgc.optim import DistributedOptimizer, LocalOptimizer, OneBitAdam
from dgc.paper.onebit_adam import onebit_adam
from dgc.paper.zero_one_adam import synchronization_steps, variance_steps, zero_one_adam

STEPS = 60
SHAPES = ((7, 5), (50,), (3, 2, 4))
NUMELS = [torch.Size(shape).numel() for shape in SHAPES]
BETAS, ETA = (0.9, 0.99), 1e-6
each_size = pytest.mark.parametrize("size", [1, 2, 3])
pytestmark = pytest.mark.usefixtures("no_type_checks")


def normal(seed: int) -> Any:
    return torch.randn(sum(NUMELS), generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def gradient_of(rank: Any) -> Any:
    """Of a quadratic, with noise. The first element plays no part."""
    curvature, target = 0.5 + normal(10 + rank).abs() / 2, normal(20 + rank)

    def gradient(x: Any, t: Any) -> Any:
        g = curvature * (x - target) + normal(1000 * t + rank) / 4
        return g.index_fill(0, torch.tensor([0]), 0.0)

    return gradient


def pieces_of(size: int) -> list[int]:
    bucket = make_bucket("b", [(str(n), torch.zeros(n)) for n in NUMELS])
    return divide_into_chunks(bucket, size, 0).bounds.diff().tolist()


def defined(size: int, worker: Any) -> Any:
    """By rank: the models that worker(x, gradient) computed gradients at, and the last one."""
    seen: list[list[Any]] = [[] for _ in range(size)]

    def recorded(rank: int) -> Any:
        own = gradient_of(rank)

        def gradient(x: Any, t: Any) -> Any:
            seen[rank].append(x)
            return own(x, t)

        return gradient

    ends = LockstepWorld(size).converse("definition", [worker(normal(1), recorded(rank)) for rank in range(size)])
    return [torch.stack([*own, end]) for own, end in zip(seen, ends, strict=True)]


def fast(size: int, gamma: Any, Adam: Any, wrapped: Any, **settings: Any) -> Any:
    """The same of the fast one."""

    def body(transport: Any) -> Any:
        parts = [nn.Parameter(part.view(s)) for part, s in zip(normal(1).split(NUMELS), SHAPES, strict=True)]
        adam = Adam(parts, gamma(0), BETAS, ETA, bias_correction=False, floor=0.0, **settings)
        # backward fills buckets from the last tensor to the first: named in that order, they lie as in x
        optimizer = wrapped(adam, [(f"p{i}", p) for i, p in reversed(list(enumerate(parts)))], transport)
        gradient, models = gradient_of(transport.rank), []
        for t in range(STEPS):
            models.append(torch.cat([p.detach().view(-1) for p in parts]))
            optimizer.zero_grad()
            adam.param_groups[0]["lr"] = gamma(t)
            for p, g in zip(parts, gradient(models[-1], t).split(NUMELS), strict=True):
                p.grad = g.view(p.shape)
            optimizer.step()
        return torch.stack([*models, torch.cat([p.detach().view(-1) for p in parts])])

    return LockstepWorld(size).run(body)


def check(found: Any, expected: Any, begin: int) -> None:
    """Each step may round both parameters, by half a unit in the last place. begin: of the second stage."""
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours[:, 0], normal(1)[0].expand(STEPS + 1))  # v is zero
        atol = STEPS * float(theirs.abs().max()) * torch.finfo(torch.float32).eps
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
        assert float((theirs[-1] - theirs[begin]).abs().max()) > 0.1


@each_size
def test_onebit_adam(size: int) -> None:
    warm_up, gamma, pieces = 10, 0.05, pieces_of(size)
    assert len(pieces) > len(NUMELS) or size == 1
    expected = defined(size, lambda x, g: onebit_adam(x, g, gamma, BETAS, ETA, warm_up, STEPS, pieces))

    def wrapped(adam: Any, named: Any, transport: Any) -> Any:
        return DistributedOptimizer(adam, named, OneBitAdamCompressor(), transport=transport)

    check(fast(size, lambda t: gamma, OneBitAdam, wrapped, freeze_step=warm_up), expected[:1] * size, warm_up)


@each_size
def test_zero_one_adam(size: int) -> None:
    freeze, kappa, scaler, clipper = 20, 4, 12, 4
    T_v, T_u = variance_steps(kappa, freeze), synchronization_steps(freeze, scaler, clipper, STEPS)

    def gamma(t: int) -> float:
        return 0.02 / (1 + t / 40)

    pieces = pieces_of(size)
    expected = defined(size, lambda x, g: zero_one_adam(x, g, gamma, BETAS, ETA, T_v, T_u, STEPS, pieces))

    def wrapped(adam: Any, named: Any, transport: Any) -> Any:
        return LocalOptimizer(adam, named, ZeroOneSteps(freeze, kappa, scaler, clipper), transport=transport)

    found = fast(size, gamma, ZeroOneAdam, wrapped)
    check(found, expected, freeze)
    for step in range(STEPS):  # the ranks have one model after each step of T_u, and only then
        same = all(torch.equal(ours[step + 1], found[0][step + 1]) for ours in found)
        assert same == (step in T_u or size == 1), step


def test_the_schedule() -> None:
    """In closed form, as the recurrences of the definition."""
    for numbers in ((20, 4, 12, 4), (300, 1, 7, 16), (300, 16, 1, 3), (1, 2, 3, 1)):
        schedule, (freeze, kappa, scaler, clipper) = ZeroOneSchedule(*numbers), numbers
        assert {t for t in range(400) if schedule.updates_variance(t)} == variance_steps(kappa, freeze)
        steps, last = synchronization_steps(freeze, scaler, clipper, 400), -1
        for t in range(400):
            is_due = t - last >= schedule.interval(t)
            assert is_due == (t in steps), (numbers, t)
            last = t if is_due else last
