"""dgc/paper is the definition: the fast 0/1 Adam does the same over 60 steps, in both stages.

Both round to fp32 in another order. A sign would differ if a value were that near to zero, which none here is.
"""

from typing import Any

import pytest
import torch
from torch import nn

from dgc.bucket import make_bucket
from dgc.comm.lockstep import LockstepWorld
from dgc.compression.double_squeeze import divide_into_chunks
from dgc.local import ZeroOneAdam, ZeroOneSteps
from dgc.local.zero_one_steps import ZeroOneSchedule
from dgc.optim import LocalOptimizer
from dgc.paper.zero_one_adam import synchronization_steps, variance_steps, zero_one_adam

STEPS = 60
F, KAPPA, SCALER, CLIPPER = 20, 4, 12, 4
SHAPES = ((7, 5), (50,), (3, 2, 4))
NUMELS = [torch.Size(shape).numel() for shape in SHAPES]
BETAS, ETA = (0.9, 0.99), 1e-6


def gamma(t: int) -> float:
    return 0.02 / (1 + t / 40)


def normal(*shape: Any, seed: Any) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def gradient_of(rank: Any) -> Any:
    """Of a quadratic, with noise. The first element plays no part."""
    curvature, target = 0.5 + normal(sum(NUMELS), seed=10 + rank).abs() / 2, normal(sum(NUMELS), seed=20 + rank)

    def gradient(x: Any, t: Any) -> Any:
        g = curvature * (x - target) + normal(sum(NUMELS), seed=1000 * t + rank) / 4
        return g.index_fill(0, torch.tensor([0]), 0.0)

    return gradient


def fast(transport: Any) -> Any:
    parts = [nn.Parameter(part.view(s)) for part, s in zip(start().split(NUMELS), SHAPES, strict=True)]
    adam = ZeroOneAdam(parts, gamma(0), BETAS, ETA, bias_correction=False, floor=0.0)
    # buckets are filled from the last tensor to the first: named in that order, they lie as in x
    named = [(f"p{i}", p) for i, p in reversed(list(enumerate(parts)))]
    optimizer = LocalOptimizer(adam, named, ZeroOneSteps(F, KAPPA, SCALER, CLIPPER), transport=transport)
    gradient, models = gradient_of(transport.rank), []
    for t in range(STEPS):
        x = torch.cat([p.detach().view(-1) for p in parts])
        models.append(x)
        optimizer.zero_grad()
        adam.param_groups[0]["lr"] = gamma(t)
        for p, g in zip(parts, gradient(x, t).split(NUMELS), strict=True):
            p.grad = g.view(p.shape)
        optimizer.step()
    return torch.stack([*models, torch.cat([p.detach().view(-1) for p in parts])])


def start() -> Any:
    return normal(sum(NUMELS), seed=1)


@pytest.mark.usefixtures("no_type_checks")
def test_zero_one_adam() -> None:
    T_v, T_u = variance_steps(KAPPA, F), synchronization_steps(F, SCALER, CLIPPER, STEPS)
    for size in (1, 2, 3):
        bucket = make_bucket("b", [(str(n), torch.zeros(n)) for n in NUMELS])
        pieces = divide_into_chunks(bucket, size, 0).bounds.diff().tolist()
        seen: list[list[Any]] = [[] for _ in range(size)]

        def recorded(rank: Any, seen: Any = seen) -> Any:
            gradient = gradient_of(rank)
            return lambda x, t: (seen[rank].append(x), gradient(x, t))[1]

        workers = [
            zero_one_adam(start(), recorded(rank), gamma, BETAS, ETA, T_v, T_u, STEPS, pieces)
            for rank in range(size)
        ]
        ends = LockstepWorld(size).converse("definition", workers)
        fasts = LockstepWorld(size).run(fast)
        for rank, found in enumerate(fasts):
            expected = torch.stack([*seen[rank], ends[rank]])
            assert torch.equal(found[:, 0], start()[0].expand(STEPS + 1))  # v is zero
            torch.testing.assert_close(found, expected, rtol=0, atol=4e-6)
            assert float((expected[-1] - expected[F]).abs().max()) > 0.1
        for step in range(STEPS):  # the ranks have one model after each step of T_u, and only then
            same = all(torch.equal(found[step + 1], fasts[0][step + 1]) for found in fasts)
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
