"""Inputs of kernels, and comparison with what the reference makes of them."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from dgc.kernels.blocks import SIZES, BlockCode
from dgc.kernels.selection import Budget, SelectionKernels, TopKResult

REFERENCE = SelectionKernels()
CUTS = ((0, 0), (0, 1), (0, 0, 64, 64, 300, 777, 1000), (0, 5, 130, 40_000, 40_001, 70_001))
CODES = [BlockCode(bits, size, rotate) for bits, size, rotate in product((8, 4), SIZES, (False, True))]
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


# --- blocks with a scale each ---------------------------------------------------------------------


def numbers(n: int, seed: int) -> Any:
    """Of all magnitudes, with zeros, and blocks of zeros."""
    v = torch.ldexp(random(n, seed), torch.randint(-140, 60, (n,), generator=torch.Generator().manual_seed(n)))
    v[:70], v[5::13] = 0.0, -0.0
    return v


def encoded(blocks: Any, v: Any, bounds: Any, code: Any, rows: int, *keep: bool) -> Any:
    """In rows that are parts of longer ones."""
    nbytes = code.row_bytes(-(-code.blocks(bounds) // rows))
    whole = torch.zeros(rows, nbytes + 40, dtype=torch.uint8, device=v.device)
    room = whole[:, 24 : 24 + nbytes]
    kept = blocks.encode_(v, bounds, code, room, *keep)
    assert not whole[:, :24].any() and not whole[:, 24 + nbytes :].any()
    return room, kept
