"""Blocks with a scale each: Triton's kernels against plain torch, bit for bit, whatever the order of programs."""

from random import Random
from typing import Any

import pytest
import torch
from cases import case
from kernels.comparison import CODES, CUTS, encoded, numbers, random, same
from kernels.interpreter import DEVICE, INTERPRETED
from kernels.interpreter import interpreter as interpreter

from dgc.kernels.blocks import Blocks
from dgc.kernels.codec import Codec, Terms
from dgc.kernels.triton_blocks import TritonBlocks
from dgc.kernels.triton_codec import TritonCodec

REFERENCE = Blocks()
ORDERS: tuple[Any, ...] = (range,)
if INTERPRETED:  # a race would give other bits in another order
    ORDERS += (lambda *n: range(*n)[::-1], lambda *n: Random(0).sample(range(*n), len(range(*n))))


def test_tiers_agree_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one launch for each operation."""
    for number, code in enumerate(CODES):
        cuts, rows, make = CUTS[number % 3], (1, 3)[number // 3 % 2], (random, numbers)[number % 2]
        blocks, bounds, n = TritonBlocks(512 << number % 2), torch.tensor(cuts, device=DEVICE), cuts[-1]
        v = make(n, 1).to(DEVICE)
        coded, rest = encoded(REFERENCE, v, bounds, code, rows)
        total = random(coded.shape[1] // code.row_bytes(1) * code.size, 3).to(DEVICE)
        out, summed, expected, divided = torch.empty_like(v), total.clone(), total.clone(), torch.empty_like(v)
        REFERENCE.add_sum_(coded.unbind(), code, expected)
        REFERENCE.decode(coded.unbind(), bounds, code, 3, (divided,))
        for order in ORDERS if cuts == CUTS[2] else ORDERS[:1]:
            monkeypatch.setattr("triton.runtime.interpreter.range", order, raising=False)
            with case(cuts, code, rows, order):
                ours, kept = encoded(blocks, v, bounds, code, rows)
                assert same(ours, coded) and same(kept, rest)
                alone, nothing = encoded(blocks, v, bounds, code, rows, False)
                assert same(alone, coded) and not nothing.numel()
                before = blocks.launches
                summed.copy_(total)
                blocks.add_sum_(ours.unbind(), code, summed)
                blocks.decode(ours.unbind(), bounds, code, 3, (out,))
                assert same(summed, expected) and same(out, divided)
                assert blocks.launches - before == 2 * (n > 0)
        pieces = torch.zeros_like(out).split(bounds.diff().tolist())
        blocks.decode(ours.unbind(), bounds, code, 3, pieces)
        chunk = torch.tensor([0, total.numel()], device=DEVICE)
        answer, unserved = encoded(REFERENCE, expected, chunk, code, 1)
        row, left = torch.zeros_like(answer), torch.empty_like(unserved)
        blocks.answer_(ours.unbind(), code, total, None, chunk, code, row, left)
        made = []
        for tier in (blocks, REFERENCE):
            added, room, kept = v.clone(), torch.zeros_like(coded), torch.empty_like(v)
            made.append((tier.add_encode_((v,), added, bounds, code, room, kept), added, room, kept))
        with case(cuts, code, rows):
            assert same(torch.cat(pieces), divided) and same(row, answer) and same(left, unserved)
            assert all(same(a, b) for a, b in zip(*made, strict=True))


def test_rows_are_sealed_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no codes, and of more words than a program takes."""
    first, bounds = torch.tensor(7, device=DEVICE), torch.tensor([0, 5, 9], device=DEVICE)
    none, one = torch.tensor(0, dtype=torch.int32, device=DEVICE), torch.tensor(1.0, device=DEVICE)
    for nbytes in (24, 32, 20_000):
        given = torch.randint(256, (3, nbytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        expected, header = given.to(DEVICE), (none, first, bounds, one, Terms(0.5, 9))
        Codec().seal_rows_(expected, *header)
        for order in ORDERS:
            monkeypatch.setattr("triton.runtime.interpreter.range", order, raising=False)
            codec, ours = TritonCodec(), given.to(DEVICE, copy=True)
            codec.seal_rows_(ours, *header)
            assert same(ours, expected) and codec.launches == 1, nbytes
