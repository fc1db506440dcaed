"""Adam after compression: the size of its steps, as described in docs/methods.md."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from optim.nets import alone

from dgc import compression as methods
from dgc.comm.lockstep import LockstepWorld
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import DistributedOptimizer, OneBitAdam

pytestmark = pytest.mark.usefixtures("no_type_checks")
STEPS = 160
SHAPE = (20, 50)
SLOPES = torch.logspace(-1, 0, SHAPE[0] * SHAPE[1]).view(SHAPE)


def travel(make: Any, optimizer: Any = torch.optim.Adam, steps: Any = STEPS, **settings: Any) -> Any:
    """The distance that two ranks move with constant gradients, in units of learning rate and step."""

    def body(transport: Any) -> Any:
        p = torch.nn.Parameter(torch.zeros(SHAPE))
        inner = optimizer([p], lr=1.0, **settings)
        wrapped = DistributedOptimizer(inner, [("p", p)], make(), transport=transport)
        for step in range(steps):
            if step == steps // 2:
                middle = p.detach().clone()
            wrapped.zero_grad()
            (p * SLOPES).sum().backward()
            wrapped.step()
        return (middle - p.detach()) / (steps - steps // 2)

    first, second = LockstepWorld(2).run(body)
    assert torch.equal(first, second)
    return first


@pytest.mark.parametrize("ratio", [0.25, 0.1])
def test_sparse_gradients_shorten_adams_steps_by_the_root_of_the_ratio(ratio: Any) -> None:
    """An element sent every T steps is T times as large: the first moment stays g, the second becomes T g^2.

    All elements converge though few are sent.
    """
    steps = travel(lambda: methods.DGCCompressor(ratio, ResidualMemory()), betas=(0.9, 0.99))
    assert float(steps.mean()) == pytest.approx(math.sqrt(ratio), rel=0.35)
    assert float(steps.mean()) < 0.75
    assert ratio < 0.25 or bool((steps > 0.1).all())


def test_dense_gradients_do_not_change_the_steps_and_scaled_signs_move_all_elements_alike() -> None:
    """With one scale for all, small gradients alternate in sign: their second moment is that of the scale."""
    for make in (lambda: methods.QSGDCompressor(bits=8), lambda: methods.DGCCompressor(1.0, ResidualMemory())):
        assert float(travel(make, steps=100).mean()) == pytest.approx(1.0, rel=0.05)
    steps = travel(methods.ScaledSignCompressor, betas=(0.9, 0.99))
    assert bool((steps > 0).all()) and float(steps.max()) > 2 * float(steps.min())


def test_weight_decay_of_adamw_is_not_compressed() -> None:
    def body(transport: Any) -> Any:
        p = torch.nn.Parameter(torch.ones(SHAPE))
        inner = torch.optim.AdamW([p], lr=0.1, weight_decay=0.5)
        top_k = methods.DGCCompressor(0.01, ResidualMemory())
        optimizer = DistributedOptimizer(inner, [("p", p)], top_k, transport=transport)
        optimizer.zero_grad()
        (p * 0).sum().backward()
        optimizer.step()
        return p.detach()

    assert torch.equal(LockstepWorld(2).run(body)[0], torch.full(SHAPE, 1 - 0.1 * 0.5))


MOMENTUM_OF_THEIR_OWN = [
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    partial(OneBitAdam, freeze_step=1),
    partial(torch.optim.RMSprop, momentum=0.9),
]


@pytest.mark.parametrize("make", MOMENTUM_OF_THEIR_OWN)
def test_momentum_correction_is_refused(make: Any) -> None:
    """Of every compressor that has it, by a message with the cure; plain error feedback is accepted."""

    def wrapped(memory: Any, compressor: Any) -> None:
        p = torch.nn.Parameter(torch.zeros(SHAPE))
        DistributedOptimizer(make([p]), [("p", p)], compressor(0.01, memory), transport=alone())

    name = getattr(make, "func", make).__name__
    of_adam = "" if name == "RMSprop" else "DGCAdamCompressor.*OneBitAdamCompressor.*"
    for compressor in (methods.DGCCompressor, methods.SparseCompressor, methods.ChunkCompressor):
        with pytest.raises(ValueError, match=f"{name} would apply it again.*{of_adam}DGCSGD.*ResidualMemory"):
            wrapped(DGCSGDMemory(0.9), compressor)
        wrapped(ResidualMemory(), compressor)
