"""The state of all random generators: saved and restored, they continue."""

import io
import random
from typing import Any

import numpy as np
import torch

from dgc_training.random_state import random_state, restore_random_state, seed_everything, temporary_seed

CPU = torch.device("cpu")


def draw() -> Any:
    """Of normal variables too: of these, two generators keep every second one for later."""
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


def test_all_generators_continue() -> None:
    seed_everything(5)
    first = draw()
    file = io.BytesIO()
    torch.save(random_state(CPU), file)
    expected = [draw() for _ in range(3)]
    seed_everything(5)
    assert draw() == first
    file.seek(0)
    restore_random_state(torch.load(file, weights_only=True), CPU)
    assert [draw() for _ in range(3)] == expected


def test_a_temporary_seed_is_that_of_all_generators_and_leaves_them_alone() -> None:
    seed_everything(5)
    expected = draw()
    seed_everything(5)
    drawn = []
    for seed in (1, 1, 2):
        with temporary_seed(seed):
            drawn.append(draw())
    assert drawn[0] == drawn[1] and not {*drawn[0][:4]} & {*drawn[2][:4]}
    assert draw() == expected
