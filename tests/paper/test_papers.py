"""The definitions against what is known without them: momentum SGD, a distribution, MXNet's worked example."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from core.ranks import Ranks, normal
from optim.nets import run, train, values, wrap

from dgc import paper
from dgc.optim import DGCSGD

N = 40 * 5


def momentum_sgd(steps: Any, nesterov: Any, momentum: float = 0.9) -> Any:
    """The sum of what the optimizer subtracts from a parameter, with the mean of the ranks' gradients."""
    p = torch.zeros(N, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=1.0, momentum=momentum, nesterov=nesterov)
    for own in steps:
        p.grad = sum(g.double() for g in own) / len(own)
        optimizer.step()
    return -p.detach()


@pytest.mark.parametrize("ratio", [0.05, 1.0])
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_correction_loses_nothing(nesterov: bool, ratio: float) -> None:
    """Without masking what was sent and what waits add up to momentum SGD; all of it is sent at D = 1."""
    steps = [[normal(N, seed=10 * step + rank) for rank in range(2)] for step in range(10)]
    expected = momentum_sgd(steps, nesterov)
    ranks = Ranks(2, partial(paper.DGC, ratio, 0.9, nesterov, masking=False), [(40, 5)])
    sent = sum(ranks.step(own).double() for own in steps)
    waits = sum(error.double() for error in ranks.errors()) / 2
    torch.testing.assert_close(sent + waits, expected, rtol=0, atol=1e-4)
    assert bool(waits.any()) == (ratio < 1)


@pytest.mark.parametrize(
    ("masking", "waits", "momenta"), [(True, [0, 0, 1.5], [0, 0, 0.5]), (False, [2, 0, 1.5], [2, 1, 0.5])]
)
def test_masking_clears_the_momentum_of_what_was_sent(masking: bool, waits: Any, momenta: Any) -> None:
    """By hand: U = V = (4, 2, 1) sends 4. Then U = (0, 1, 0.5), V = (0, 3, 1.5); not masked: (2, ..), (2, ..)."""
    ranks = Ranks(1, partial(paper.DGC, 1 / 3, 0.5, masking=masking), [(3, 1)])
    assert ranks.step([torch.tensor([4.0, 2.0, 1.0])]).tolist() == [4, 0, 0]
    assert ranks.step([torch.zeros(3)]).tolist() == [0, 3, 0]
    assert ranks.errors()[0].tolist() == waits
    assert ranks.states[0].state_dict()["U"]["p0"].view(-1).tolist() == momenta


def test_clipping_limits_the_norm_of_each_tensor() -> None:
    ranks = Ranks(1, partial(paper.DGC, 1.0, 0.0, thr_G=1.0), [(2, 1), (1, 1)])
    torch.testing.assert_close(ranks.step([torch.tensor([3.0, 4.0, 0.5])]), torch.tensor([0.6, 0.8, 0.5]))


def test_the_ratio_falls_during_the_warm_up() -> None:
    compressor = paper.DGC(0.001, warmup_epochs=5)
    ratios = [compressor.in_epoch(epoch).compress_ratio for epoch in range(6)]
    assert ratios == [0.25, 0.0625, 0.015625, 0.00390625, 0.001, 0.001]


def test_the_laplace_threshold() -> None:
    """At the quantiles of a Laplace distribution the first estimate is accepted. Others take a search."""
    n, k = 10_000, 100
    a = -((torch.arange(n) + 0.5) / n).log()
    assert float(paper.LDTEBS(0.01, passes=1).threshold(a, k)) == pytest.approx(math.log(n / k), rel=1e-3)
    for other in (torch.rand(n), a**3, torch.cat([a[: n // 2], torch.zeros(n // 2)])):
        assert 0.8 * k <= int((other >= paper.LDTEBS(0.01, passes=40).threshold(other, k)).sum()) <= 1.25 * k


def test_the_worked_examples_of_mxnet() -> None:
    g = torch.tensor([0.75, 0.25, -0.625, 0.125, -0.5, 0.375])
    residual = torch.tensor([0.0, 0.125, -0.25, 0.375, 0.0, 0.0])
    two, one = (Ranks(1, partial(paper.Threshold, *s), [(6,)]) for s in ((2, 0.5), (1, 0.0)))
    for ranks in (two, one):
        ranks.states[0].load_state_dict({"method": "Threshold", "residual": {"p0": residual}, "steps": {"p0": 0}})
    assert two.step([g]).tolist() == [0.5, 0.0, -0.5, 0.5, -0.5, 0.0]
    assert two.errors()[0].tolist() == [0.25, 0.375, -0.375, 0.0, 0.0, 0.375]
    following = torch.tensor([0.0, 0.125, -0.125, 0.0, 0.0, 0.5])
    assert two.step([following]).tolist() == [0.0, 0.5, -0.5, 0.0, 0.0, 0.5]
    assert one.step([g]).tolist() == [1, 1, -1, 1, -1, 1]
    assert one.errors()[0].tolist() == [-0.25, -0.625, 0.125, -0.5, 0.5, -0.625]


def test_the_optimizer_takes_them() -> None:
    """As any compressor, and alike on every rank: `run` compares. The momentum of DGC is its own."""

    def trains(make: Any) -> Any:
        def body(model: Any, transport: Any) -> None:
            inner = DGCSGD(model.parameters(), lr=0.05, momentum=0.9 if make().correction else 0.0)
            optimizer = wrap(model, transport, lambda model: inner, compression=make())
            train(model, optimizer, range(5), transport.rank)

        return values(run(3, body)[0])["first.weight"]

    makes = partial(paper.DGC, 0.1), partial(paper.LDTEBS, 0.1), partial(paper.Threshold, 2, 0.1)
    assert len({tuple(trains(make).view(-1).tolist()) for make in makes}) == 3
