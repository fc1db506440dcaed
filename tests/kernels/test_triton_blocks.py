"""Blocks with a scale each: Triton's kernels against plain torch, bit for bit, whatever the order of programs."""

import pytest
import torch
from cases import case
from kernels.comparison import CODES, CUTS, check_blocks, check_one_pass, numbers, random, same
from kernels.interpreter import DEVICE, ORDERS
from kernels.interpreter import interpreter as interpreter

from dgc.kernels.codec import Codec, Terms
from dgc.kernels.triton_blocks import TritonBlocks
from dgc.kernels.triton_codec import TritonCodec


def test_tiers_agree_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one launch for each operation, whatever the order of programs."""
    for number, code in enumerate(CODES):
        cuts, rows, make = CUTS[number % 3], (1, 3)[number // 3 % 2], (random, numbers)[number % 2]
        blocks, bounds, v = TritonBlocks(512 << number % 2), torch.tensor(cuts, device=DEVICE), make(cuts[-1], 1)
        for order in ORDERS if cuts == CUTS[2] else ORDERS[:1]:
            monkeypatch.setattr("triton.runtime.interpreter.range", order, raising=False)
            with case(cuts, code, rows, order):
                coded = check_blocks(blocks, v.to(DEVICE), bounds, code, rows)
        check_one_pass(blocks, v.to(DEVICE), bounds, code, coded)
        before, total = blocks.launches, torch.zeros(coded[0].numel() // code.row_bytes(1) * code.size).to(DEVICE)
        blocks.add_sum_(coded, code, total)
        blocks.decode(coded, bounds, code, 3, (torch.empty_like(v, device=DEVICE),))
        assert blocks.launches - before == 2 * (len(v) > 0)


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
