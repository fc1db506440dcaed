"""How far a row of an embedding that never gets a gradient moves, as docs/methods.md says."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DenseCompressor, OneBitAdamCompressor, Route, Rule, SignSGDCompressor
from dgc.optim import DistributedOptimizer, OneBitAdam

pytestmark = pytest.mark.usefixtures("no_type_checks")
RATE, STEPS = 1e-3, 60


def moved(make: Callable[[Any], Any], compression: Callable[[], Any]) -> float:
    """The largest distance of an element of the row of `padding_idx` from its start, after `STEPS` steps."""

    def body(transport: Any) -> float:
        generator = torch.Generator().manual_seed(transport.rank)
        embedding = nn.Embedding(8, 4, padding_idx=0)
        with torch.no_grad():
            embedding.weight.copy_(torch.arange(32.0).view(8, 4) / 32)
        start = embedding.weight[0].detach().clone()
        optimizer = DistributedOptimizer(
            make(embedding.parameters()), embedding.named_parameters(), compression(), transport=transport
        )
        for _ in range(STEPS):
            optimizer.zero_grad()
            tokens = torch.randint(0, 8, (16,), generator=generator)
            (embedding(tokens) - torch.randn(16, 4, generator=generator)).square().mean().backward()
            optimizer.step()
        return float((embedding.weight[0].detach() - start).abs().max())

    return max(LockstepWorld(2).run(body))


def dense_embeddings(compressor: Callable[[], Any]) -> Any:
    return Route([Rule(DenseCompressor(), name="weight"), Rule(compressor())])


sgd = partial(torch.optim.SGD, lr=RATE)
adam = partial(OneBitAdam, lr=RATE, freeze_step=10)
SIGNS = [SignSGDCompressor, partial(SignSGDCompressor, 0.9)]


@pytest.mark.parametrize("make", SIGNS)
def test_votes_move_a_row_without_gradients_by_the_learning_rate_in_every_step(make: Any) -> None:
    assert moved(sgd, make) == pytest.approx(STEPS * RATE, rel=1e-3)


def test_onebit_adam_moves_a_row_without_gradients_to_and_fro() -> None:
    """The residual brings it back."""
    assert 0 < moved(adam, OneBitAdamCompressor) < (STEPS - 10) * RATE / 2


CURES = [
    (sgd, partial(dense_embeddings, SignSGDCompressor)),
    (partial(adam, floor=0.0), OneBitAdamCompressor),
    (adam, partial(dense_embeddings, OneBitAdamCompressor)),
]


@pytest.mark.parametrize(("make", "compression"), CURES)
def test_dense_embeddings_or_no_floor_keep_a_row_without_gradients(make: Any, compression: Any) -> None:
    assert moved(make, compression) == 0
