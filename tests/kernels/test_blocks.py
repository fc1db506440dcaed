"""Codes with a scale for each block: all backends, instruction sets and threads give the reference's bits."""

from itertools import product
from typing import Any

import pytest
import torch
from cases import case
from kernels.comparison import CODES, CUTS, encoded, numbers, random, same

from dgc.kernels.blocks import GROUP, Blocks, rotated
from dgc.kernels.native import NativeBlocks

REFERENCE = Blocks()


@pytest.mark.usefixtures("no_type_checks")
def test_tiers_agree_bit_for_bit(kernels: Any) -> None:
    blocks = REFERENCE if kernels.name == "reference" else NativeBlocks()
    for cuts, code, rows in product(CUTS, CODES, (1, 3)):
        bounds, n, more = torch.tensor(cuts), cuts[-1], []
        for v in random(n, 1), numbers(n, 2):
            before, (coded, rest) = v.clone(), encoded(REFERENCE, v, bounds, code, rows)
            with case(cuts, code, rows):
                ours, kept = encoded(blocks, v, bounds, code, rows)
                assert same(ours, coded) and same(kept, rest) and same(v, before)
                alone, nothing = encoded(blocks, v, bounds, code, rows, False)
                assert same(alone, coded) and not nothing.numel()
                out, expected = torch.empty(n), torch.empty(n)
                for size in (1, 3):
                    blocks.decode(coded.unbind(), bounds, code, size, out)
                    REFERENCE.decode(coded.unbind(), bounds, code, size, expected)
                    assert same(out, expected)
                    assert size == 3 or same(v - out, rest)
            more.append(coded[-1])
        total = random(coded.shape[1] // code.row_bytes(1) * code.size, 3)
        expected = total.clone()
        blocks.add_sum_(more, code, total)
        REFERENCE.add_sum_(more, code, expected)
        with case(cuts, code, rows):
            assert same(total, expected)


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
