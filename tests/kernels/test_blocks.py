"""Codes with a scale for each block: all backends, instruction sets and threads give the reference's bits."""

from itertools import product
from typing import Any

import pytest
import torch
from cases import case
from kernels.comparison import CODES, CUTS, check_blocks, check_one_pass, encoded, numbers, random, same

from dgc.kernels.blocks import GROUP, Blocks, rotated
from dgc.kernels.native import NativeBlocks

REFERENCE = Blocks()


@pytest.fixture
def blocks(kernels: Any) -> Any:
    return REFERENCE if kernels.name == "reference" else NativeBlocks()


@pytest.mark.usefixtures("no_type_checks")
def test_tiers_agree_bit_for_bit(blocks: Any) -> None:
    for cuts, code, rows in product(CUTS, CODES, (1, 3)):
        for v in random(cuts[-1], 1), numbers(cuts[-1], 2):
            with case(cuts, code, rows):
                coded = check_blocks(blocks, v, torch.tensor(cuts), code, rows)
        check_one_pass(blocks, v, torch.tensor(cuts), code, coded)


@pytest.mark.usefixtures("no_type_checks")
def test_a_scale_that_is_not_finite_and_positive_stands_for_zeros(blocks: Any) -> None:
    """Elements near the largest float round up to such a scale. They stay unsent."""
    for code in (code for code in CODES if not code.rotate):
        v, bounds, out = random(code.size, 1), torch.tensor([0, code.size]), torch.empty(code.size)
        v[3] = 3.4e38
        coded, kept = encoded(blocks, v, bounds, code, 1)
        assert same(kept, v) and not coded[:, 2:].any()
        for high in (0x7F, 0xFF, 0x80, 0xBF):  # inf, NaN and negative numbers
            for low in (0x80, 0xC0):
                coded[0, 0], coded[0, 1], coded[0, 2:] = low, high, 0x7F
                blocks.decode(coded.unbind(), bounds, code, 1, (out,))
                assert not out.any(), (code, high, low)


def test_levels_are_the_nearest_of_the_block() -> None:
    """Within half a step of the block, whose scale is its largest magnitude, rounded up to bfloat16."""
    for code in CODES:
        v, bounds = random(5000, 4), torch.tensor([0, 2000, 5000])
        _, rest = encoded(REFERENCE, v, bounds, code, 1)
        for s, e in zip(v.split([2000, 3000]), rest.split([2000, 3000]), strict=True):
            whole = len(s) // code.size * code.size
            blocks = [y[:whole].view(-1, code.size) for y in (s, e)]
            x, error = map(rotated, blocks) if code.rotate else blocks
            limits = x.abs().amax(1) * (1 + 2.0**-7) / code.levels / 2
            assert whole and (error.abs().amax(1) <= 1.0001 * limits).all()


def test_the_transform_keeps_lengths_and_is_its_own_inverse() -> None:
    x = random(4 * GROUP, 5)
    torch.testing.assert_close(rotated(rotated(x)), x)
    torch.testing.assert_close(rotated(x).norm(), x.norm())
    one = torch.zeros(GROUP)
    one[3] = 8.0
    assert same(rotated(one).abs(), torch.ones(GROUP))
