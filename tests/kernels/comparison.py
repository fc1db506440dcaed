"""Inputs of the selection kernels, and comparison with what the reference makes of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dgc.kernels.selection import Budget, SelectionKernels, TopKResult

REFERENCE = SelectionKernels()
HALVES = (torch.float16, torch.bfloat16)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random(n: int, seed: int, device: str = "cpu") -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(device)


def budget_of(sizes: Sequence[int], ks: Sequence[int], device: str = "cpu") -> Budget:
    return Budget(torch.tensor([0, *sizes]).cumsum(0).to(device), torch.tensor(ks).to(device), sum(ks))


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, the sign of zeros included; or both are None."""
    if a is None or b is None:
        return a is b
    wide = INTEGERS[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(wide), b.view(wide))


def assert_same_choice(ours: TopKResult, expected: TopKResult) -> None:
    assert int(ours.elements.count) == int(expected.elements.count)
    assert same(ours.elements.indices, expected.elements.indices)
    assert same(ours.elements.values, expected.elements.values)
    assert same(ours.thresholds, expected.thresholds)
    assert int(ours.first_nonfinite) == int(expected.first_nonfinite)
    assert ours.missed.dtype == torch.int32 and ours.missed.shape == ()
