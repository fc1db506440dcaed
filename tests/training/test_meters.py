"""Top-k accuracy."""

import math
from typing import Any

import pytest
import torch

from dgc_training.meters import TopKClassMeter

OUTPUTS = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.4, 0.35, 0.25]])
TARGETS = torch.tensor([1, 1, 0, 0])


@pytest.mark.parametrize(("k", "percent"), [(1, 50.0), (2, 75.0), (3, 100.0), (5, 100.0)])
def test_percentages(k: Any, percent: Any) -> None:
    meter = TopKClassMeter(k)
    meter.update(OUTPUTS[:3], TARGETS[:3])
    meter.update(OUTPUTS[3:], TARGETS[3:])
    assert meter.compute() == percent
    assert meter.data() == {"num_examples": 4, "num_correct": int(percent) * 4 // 100}


def test_sums_of_all_ranks_can_be_set() -> None:
    meter = TopKClassMeter(1)
    assert meter.data() == {"num_examples": 0, "num_correct": 0}
    assert math.isnan(meter.compute())
    meter.set({"num_examples": 8.0, "num_correct": 2.0})
    assert meter.compute() == 25.0


def test_k_below_one_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        TopKClassMeter(0)
