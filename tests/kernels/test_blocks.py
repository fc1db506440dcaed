"""Codes with a scale for each block: all backends, instruction sets and threads give the reference's bits."""

from itertools import product
from typing import Any

import pytest
import torch
from cases import case
from kernels.comparison import CODES, CUTS, encoded, numbers, random, same

from dgc.kernels.blocks import GROUP, BlockCode, Blocks, rotated
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
                    pieces = (out,) if size == 1 else out.split(bounds.diff().tolist())
                    blocks.decode(coded.unbind(), bounds, code, size, pieces)
                    REFERENCE.decode(coded.unbind(), bounds, code, size, (expected,))
                    assert same(out, expected)
                    assert size == 3 or same(v - out, rest)
            more.append(coded[-1])
        total = random(coded.shape[1] // code.row_bytes(1) * code.size, 3)
        expected = total.clone()
        blocks.add_sum_(more, code, total)
        REFERENCE.add_sum_(more, code, expected)
        with case(cuts, code, rows):
            assert same(total, expected)


@pytest.mark.usefixtures("no_type_checks")
def test_a_gradient_is_added_and_an_answer_formed_in_one_pass(kernels: Any) -> None:
    """With the bits of the operations one after the other. Unusable elements count as zero."""
    blocks = REFERENCE if kernels.name == "reference" else NativeBlocks()
    for cuts, code, rows in product(CUTS, CODES, (1, 3)):
        bounds, n = torch.tensor(cuts), cuts[-1]
        g, v = random(n, 6), random(n, 7)
        for i, bad in ((997, float("nan")), (700, -(2.0**64)), (777, float("inf"))):
            g[i : i + 1] = bad
        both = v + torch.where(g.abs() < 2.0**64, g, 0.0)
        coded, rest = encoded(REFERENCE, both, bounds, code, rows)
        for pieces in (g,), g.split(bounds.diff().tolist()):
            room, kept, added = torch.zeros_like(coded), torch.empty(n), v.clone()
            first = blocks.add_encode_(pieces, added, bounds, code, room, kept)
            with case(cuts, code, rows, len(pieces)):
                assert int(first) == min(n, 700)
                assert same(room, coded) and same(kept, rest) and same(added, both)
                blocks.add_encode_(pieces, added.copy_(v), bounds, code, room.zero_(), None)
                assert same(room, coded) and same(added, both)
        served = random(coded.shape[1] // code.row_bytes(1) * code.size, 8)
        chunk, real = torch.tensor([0, served.numel()]), torch.where(served > -1, 1.0, 0.0)
        for bits, given, mask in ((8, served, real), (4, None, None)):
            answer = BlockCode(bits, code.size, code.rotate)
            total = torch.zeros_like(served) if given is None else served.clone()
            REFERENCE.add_sum_(coded.unbind(), code, total)
            expected, rest = encoded(REFERENCE, total if mask is None else total * mask, chunk, answer, 1)
            row, kept = torch.zeros_like(expected), torch.empty_like(served)
            blocks.answer_(coded.unbind(), code, given, mask, chunk, answer, row, kept)
            alone = torch.zeros_like(expected)
            blocks.answer_(coded.unbind(), code, given, mask, chunk, answer, alone, None)
            with case(cuts, code, rows, bits):
                assert same(row, expected) and same(kept, rest) and same(alone, row)


@pytest.mark.usefixtures("no_type_checks")
def test_a_scale_that_is_not_finite_and_positive_stands_for_zeros(kernels: Any) -> None:
    """Elements near the largest float round up to such a scale. They stay unsent."""
    blocks = REFERENCE if kernels.name == "reference" else NativeBlocks()
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
