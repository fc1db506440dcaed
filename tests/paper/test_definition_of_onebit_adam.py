"""dgc/paper is the definition: the fast 1-bit Adam does the same over 50 steps.

Both round to fp32 in another order. A sign would differ if a value were that near to zero, which none here is.
"""

from typing import Any

import pytest
import torch
from torch import nn

from dgc.bucket import make_bucket
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import OneBitAdamCompressor
from dgc.compression.double_squeeze import divide_into_chunks
from dgc.optim import DistributedOptimizer, OneBitAdam
from dgc.paper.onebit_adam import onebit_adam

STEPS, WARM_UP = 50, 10
SHAPES = ((7, 5), (50,), (3, 2, 4))
NUMELS = [torch.Size(shape).numel() for shape in SHAPES]
GAMMA, BETAS, ETA = 0.05, (0.9, 0.99), 1e-6


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
    adam = OneBitAdam(parts, GAMMA, BETAS, ETA, freeze_step=WARM_UP, bias_correction=False, floor=0.0)
    # backward fills buckets from the last tensor to the first: named in that order, they lie as in x
    named = [(f"p{i}", p) for i, p in reversed(list(enumerate(parts)))]
    optimizer = DistributedOptimizer(adam, named, OneBitAdamCompressor(), transport=transport)
    gradient, models = gradient_of(transport.rank), []
    for t in range(STEPS):
        x = torch.cat([p.detach().view(-1) for p in parts])
        models.append(x)
        optimizer.zero_grad()
        for p, g in zip(parts, gradient(x, t).split(NUMELS), strict=True):
            p.grad = g.view(p.shape)
        optimizer.step()
    return torch.stack([*models, torch.cat([p.detach().view(-1) for p in parts])])


def start() -> Any:
    return normal(sum(NUMELS), seed=1)


@pytest.mark.usefixtures("no_type_checks")
def test_onebit_adam() -> None:
    for size in (1, 2, 3):
        bucket = make_bucket("b", [(str(n), torch.zeros(n)) for n in NUMELS])
        pieces = divide_into_chunks(bucket, size, 0).bounds.diff().tolist()
        assert len(pieces) > len(NUMELS) or size == 1
        seen: list[list[Any]] = [[] for _ in range(size)]

        def recorded(rank: Any, seen: Any = seen) -> Any:
            gradient = gradient_of(rank)
            return lambda x, t: (seen[rank].append(x), gradient(x, t))[1]

        workers = [
            onebit_adam(start(), recorded(rank), GAMMA, BETAS, ETA, WARM_UP, STEPS, pieces) for rank in range(size)
        ]
        ends = LockstepWorld(size).converse("definition", workers)
        expected = torch.stack([*seen[0], ends[0]])
        for found in LockstepWorld(size).run(fast):
            assert torch.equal(found[:, 0], start()[0].expand(STEPS + 1))  # v is zero
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
        assert float((expected[-1] - expected[WARM_UP]).abs().max()) > 0.1
