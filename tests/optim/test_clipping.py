"""gradient_clipping of a memory also limits gradients that the compressor exchanges dense."""

from functools import partial
from typing import Any

import pytest
import torch
from cases import case
from optim.nets import alone
from torch import nn

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DenseCompressor, DGCCompressor, Route, Rule
from dgc.memory import ClipByGlobalNorm, ClipByNorm, ClipByValue, DGCSGDMemory
from dgc.optim import DGCSGD, DistributedOptimizer

SHAPES: dict[str, tuple[int, ...]] = {"weight": (10, 10), "bias": (100,), "empty": (0,)}


def moved(transport: Any, compression: Any, gradients: Any) -> Any:
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()})
    inner = DGCSGD(model.parameters(), lr=1.0, momentum=0.9)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), compression, transport=transport)
    sum((p * gradients[name]).sum() for name, p in model.items() if p.numel()).backward()
    optimizer.step()
    return {name: -p.detach() for name, p in model.items()}, optimizer


def normal(rank: Any, scale: float = 1.0) -> Any:
    generator = torch.Generator().manual_seed(rank)
    return {name: scale * torch.randn(SHAPES[name], generator=generator) for name in ("weight", "bias")}


def clipped(clipping: Any, ratio: float = 0.5, **options: Any) -> Any:
    compression = DGCCompressor(ratio, DGCSGDMemory(0.9, gradient_clipping=clipping), **options)
    compression.begin_epoch(0)
    return compression


def moved_together(compression: Any, gradients: Any) -> Any:
    return LockstepWorld(len(gradients)).run(lambda t: moved(t, compression(), gradients[t.rank])[0])


def test_a_bias_moves_no_further_than_the_limit_nor_does_a_matrix_in_a_dense_warm_up() -> None:
    for ratio, options in ((1.0, {}), (0.01, {}), (0.01, {"fp16_values": True})):
        with case(ratio, options):
            step, _ = moved(alone(), clipped(ClipByNorm(1.0), ratio, **options), normal(0, 100.0))
            assert float(step["weight"].norm()) < 1.001 and 0.99 < float(step["bias"].norm()) < 1.001

    for clipping in (ClipByNorm(1.0), ClipByGlobalNorm(1.0)):
        warming = partial(clipped, clipping, 0.01, warmup_epochs=1, warmup_coeff=[1.0])
        for step in moved_together(warming, [normal(rank, 100.0) for rank in range(2)]):
            assert float(step["weight"].norm()) < 1.001 and float(step["bias"].norm()) < 1.001


def test_the_mean_of_a_dense_tensor_is_clipped() -> None:
    """After averaging, per tensor, equally on every rank."""
    own = [normal(rank) for rank in range(3)]
    mean = sum(g["bias"] for g in own) / 3
    norm = mean.norm()
    limits = [
        (ClipByNorm(1.0), mean / (norm + 1e-6)),
        (ClipByNorm(100.0), mean),
        (ClipByNorm(0.5, float("inf")), mean * 0.5 / (mean.abs().max() + 1e-6)),
        (ClipByGlobalNorm(1.0), mean / (norm + 1e-6)),
        (ClipByValue(0.25), mean.clamp(-0.25, 0.25)),
    ]
    for clipping, expected in limits:
        with case(clipping):
            steps = moved_together(partial(clipped, clipping), own)
            torch.testing.assert_close(steps[0]["bias"], expected)
            assert all(torch.equal(step[name], steps[0][name]) for step in steps for name in step)


def test_a_dropped_step_stays_dropped_and_another_compressor_for_vectors_does_not_clip() -> None:
    bad = normal(0)
    bad["bias"][3] = float("nan")
    with pytest.warns(UserWarning, match="the gradient of bias on rank 0 has NaN or inf"):
        step, optimizer = moved(alone(), clipped(ClipByNorm(1.0)), bad)
    assert optimizer.dropped_steps == 1 and not any(p.any() for p in step.values())
    route = Route([Rule(DenseCompressor(), max_dim=1), Rule(clipped(ClipByNorm(1.0)))])
    step, _ = moved(alone(), route, normal(0, 100.0))
    torch.testing.assert_close(step["bias"], normal(0, 100.0)["bias"])
