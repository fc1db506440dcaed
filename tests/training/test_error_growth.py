"""The monitor of the residual: no warning for a healthy one, one warning for unbounded growth."""

import math
import warnings
from typing import Any

import pytest
import torch

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import AtomoCompressor, DGCCompressor, SVDCompressor
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD, DistributedOptimizer
from dgc_training.faults.error_growth import ErrorGrowthMonitor


def warnings_of(norms: Any, ratio: float = 0.01, steps: int = 10) -> Any:
    monitor = ErrorGrowthMonitor()
    return [text for norm in norms if (text := monitor.update(norm, ratio, steps))]


def test_bounded_growth_is_healthy() -> None:
    for time_constant in (20, 100, 300):
        assert warnings_of([10 * (1 - math.exp(-10 * i / time_constant)) for i in range(1, 400)]) == []
    # a random walk until coordinates are sent
    assert warnings_of([math.sqrt(min(10 * i, 1000)) for i in range(1, 500)], ratio=0.001) == []
    # a high plateau
    assert warnings_of([1.0] * 40 + [50.0] * 9 + [49.0] * 200) == []
    # dense training
    assert warnings_of([float(i) for i in range(1, 600)], ratio=1.0) == []


def test_a_new_ratio_starts_a_new_reference() -> None:
    monitor = ErrorGrowthMonitor()
    for ratio, norm in ((0.25, 1.0), (0.063, 8.0), (0.016, 60.0), (0.001, 500.0)):
        assert not any(monitor.update(norm * (1 + i / 1000), ratio, 10) for i in range(200))


def test_unbounded_growth_and_a_nonfinite_norm_give_one_warning() -> None:
    for norms in ([1.02**i for i in range(1, 600)], [float(i) for i in range(1, 600)]):
        (text,) = warnings_of(norms)
        assert "residual's norm has grown from" in text and "compress_ratio 0.01" in text
    for norm in (math.nan, math.inf):
        (text,) = warnings_of([1.0, norm, norm])
        assert "not finite" in text


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("lr", [pytest.param(0.05, marks=pytest.mark.proof), 1.5])
def test_real_training(lr: Any) -> None:
    """A stable learning rate gives no warning in 1000 steps of DGC. A diverging one gives a warning."""

    def body(transport: Any) -> Any:
        torch.manual_seed(1)
        model = torch.nn.Linear(50, 40, bias=False)
        compression = DGCCompressor(0.01, DGCSGDMemory(momentum=0.9))
        inner = DGCSGD(model.parameters(), lr=lr, momentum=0.9)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), compression, transport=transport)
        generator = torch.Generator().manual_seed(transport.rank)
        weights = torch.randn(40, 50, generator=torch.Generator().manual_seed(9))
        monitor, found = ErrorGrowthMonitor(), []
        for step in range(1000):
            inputs = torch.randn(16, 50, generator=generator)
            optimizer.zero_grad()
            (model(inputs) - inputs @ weights.T).square().mean().backward()
            optimizer.step()
            if step % 10 == 9 and (text := monitor.update(optimizer.error_norm(), 0.01, 10)):
                found.append(text)
                break
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found in LockstepWorld(2).run(body):
            assert bool(found) == (lr > 1)


@pytest.mark.parametrize("make", [SVDCompressor, AtomoCompressor])
def test_low_rank_methods_are_monitored(make: Any) -> None:
    """Their compress_ratio is below 1. A ratio of 1 would turn the monitor off."""
    model = torch.nn.Linear(40, 60)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    transport = LockstepWorld(1).transports[0]
    optimizer = DistributedOptimizer(inner, model.named_parameters(), make(2), transport=transport)
    assert optimizer.compress_ratio == 2 * (40 + 60) / (40 * 60)
    (text,) = warnings_of([1.02**i for i in range(600)], ratio=optimizer.compress_ratio)
    assert "compress_ratio 0.0833" in text
