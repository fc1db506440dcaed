"""Inputs of kernels, and comparison with what the reference makes of them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from dgc.kernels.codes.blocks import SIZES, BlockCode, Blocks
from dgc.kernels.codes.halves import HalfCode, Halves
from dgc.kernels.selection import TOO_LARGE, Budget, PassInputs, SelectionKernels, TopKResult

REFERENCE = SelectionKernels()
CUTS = ((0, 0), (0, 1), (0, 0, 64, 64, 300, 777, 1000), (0, 5, 130, 40_000, 40_001, 70_001))
CODES = [BlockCode(bits, size, rotate) for bits, size, rotate in product((8, 4), SIZES, (False, True))]
HALF_CODES = [HalfCode(), HalfCode(random=True, seed=2**32 - 1)]
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


def segments_of(v: Tensor, bounds: Tensor) -> tuple[Tensor, ...]:
    """In fp64."""
    return v.cpu().double().split(bounds.diff().tolist())


def check_moments(kernels: Any, v: Tensor, bounds: Tensor) -> Any:
    """Sums are close to those in fp64, within 1e-9 of the sum of magnitudes. The largest is exact."""
    found, parts = kernels.moments(v, bounds), segments_of(v, bounds)
    kinds = (torch.clone, torch.abs, torch.square)
    sums, magnitudes, squares = (torch.stack([of(part).sum() for part in parts]) for of in kinds)
    for own, wanted, scale in (
        (found.sums, sums, magnitudes),
        (found.magnitudes, magnitudes, magnitudes),
        (found.squares, squares, squares),
    ):
        assert ((own.cpu() - wanted).abs() <= 1e-9 * scale).all()
    assert found.largest.tolist() == [float(part.abs().max()) if part.numel() else 0.0 for part in parts]
    return found


def check_tail(kernels: Any, v: Tensor, bounds: Tensor, lower_bounds: Tensor) -> Any:
    """A lower bound of 0 leaves out zeros alone; one that is the magnitude of an element lets it through."""
    limits = zip(segments_of(v, bounds), lower_bounds.tolist(), strict=True)
    over = [part[(part.abs() >= limit) & (part != 0)].abs() for part, limit in limits]
    found, sums = kernels.tail(v, bounds, lower_bounds), torch.stack([part.sum() for part in over])
    assert found.counts.tolist() == [part.numel() for part in over]
    assert ((found.sums.cpu() - sums).abs() <= 1e-9 * sums).all()
    return found


def at(tensor: Tensor, offset: int) -> Tensor:
    """A copy that begins `offset` elements after where cache lines do."""
    return torch.cat([tensor.new_zeros(offset), tensor])[offset:]


class Pass:
    """What a pass starts from, and what the reference makes of it: what was sent is taken out before it begins."""

    def __init__(self, start: PassInputs, budget: Budget | None = None) -> None:
        self.start, self.budget = start, budget
        self.left = replace(self.inputs(), sent=None)
        if start.sent is not None:
            REFERENCE.remove_sent_(start.sent, self.left.u if start.masking else None, self.left.v)
        self.expected = self.of(REFERENCE, self.left, None)

    def of(self, kernels: Any, inputs: PassInputs, lower_bounds: Tensor | None) -> Any:
        if self.budget is None:
            return kernels.accumulate_(inputs)
        return kernels.accumulate_and_select_(inputs, self.budget, lower_bounds)

    def inputs(self, pieces: list[int] | None = None, offset: int = 0) -> PassInputs:
        u, (g,) = self.start.u, self.start.g
        own_g = tuple(at(piece, (offset + i) % 8) for i, piece in enumerate(g.split(pieces or [g.numel()])))
        return replace(self.start, g=own_g, u=None if u is None else at(u, offset), v=at(self.start.v, offset))

    def check(self, kernels: Any, lower_bounds: Any = None, pieces: Any = None, offset: int = 0) -> Any:
        """A pass of these kernels over copies has the reference's results, and leaves the same. Returns them."""
        ours = self.inputs(pieces, offset)
        found = self.of(kernels, ours, lower_bounds)
        if self.budget is None:
            assert int(found) == int(self.expected)
        else:
            assert_same_choice(found, self.expected)
        assert same(ours.v, self.left.v) and same(ours.u, self.left.u)
        return found


# --- blocks with a scale each ---------------------------------------------------------------------


def numbers(n: int, seed: int) -> Any:
    """Of all magnitudes, with zeros, and blocks of zeros."""
    v = torch.ldexp(random(n, seed), torch.randint(-140, 60, (n,), generator=torch.Generator().manual_seed(n)))
    v[:70], v[5::13] = 0.0, -0.0
    return v


def plain_of(code: BlockCode) -> Blocks:
    return Halves() if isinstance(code, HalfCode) else Blocks()


def encoded(blocks: Any, v: Any, bounds: Any, code: Any, rows: int, *keep: bool) -> Any:
    """In rows that are parts of longer ones."""
    nbytes = code.row_bytes(-(-code.blocks(bounds) // rows))
    whole = torch.zeros(rows, nbytes + 40, dtype=torch.uint8, device=v.device)
    room = whole[:, 24 : 24 + nbytes]
    kept = blocks.encode_(v, bounds, code, room, *keep)
    assert not whole[:, :24].any() and not whole[:, 24 + nbytes :].any()
    return room, kept


def check_blocks(blocks: Any, v: Tensor, bounds: Tensor, code: BlockCode, rows: int) -> list[Tensor]:
    """All operations have the reference's bits. Returns the rows of v."""
    plain, before, lengths = plain_of(code), v.clone(), bounds.diff().tolist()
    coded, rest = encoded(plain, v, bounds, code, rows)
    (ours, kept), (alone, nothing) = (encoded(blocks, v, bounds, code, rows, keep) for keep in (True, False))
    assert same(ours, coded) and same(kept, rest) and same(alone, coded) and not nothing.numel()
    out, expected = torch.empty_like(v), torch.empty_like(v)
    for size, pieces in ((1, (out,)), (3, (out,)), (3, out.zero_().split(lengths))):
        blocks.decode(coded.unbind(), bounds, code, size, pieces)
        plain.decode(coded.unbind(), bounds, code, size, (expected,))
        assert same(out, expected) and (size == 3 or same(v - out, rest))
    chunk_errors = random(coded.shape[1] // code.row_bytes(1) * code.size, 3, str(v.device))
    total, right = chunk_errors.clone(), chunk_errors.clone()
    blocks.add_sum_(coded.unbind(), code, total)
    plain.add_sum_(coded.unbind(), code, right)
    assert same(total, right) and same(v, before)
    return list(coded.unbind())


def check_one_pass(blocks: Any, v: Tensor, bounds: Tensor, code: BlockCode, coded: list[Tensor]) -> None:
    """Adding a gradient and answering codes have the bits of the operations one after the other."""
    plain, n, device = plain_of(code), v.numel(), str(v.device)
    g = random(n, 6, device)
    for i, bad in ((997, float("nan")), (700, -TOO_LARGE), (777, float("inf"))):
        g[i : i + 1] = bad
    both = v + torch.where(g.abs() < TOO_LARGE, g, 0.0)
    right, rest = encoded(plain, both, bounds, code, len(coded))
    for pieces, kept in (((g,), torch.empty_like(v)), (g.split(bounds.diff().tolist()), None)):
        room, added = torch.zeros_like(right), v.clone()
        first = blocks.add_encode_(pieces, added, bounds, code, room, kept)
        assert int(first) == min(n, 700) and same(room, right) and same(added, both)
        assert kept is None or same(kept, rest)
        alone, room = torch.zeros_like(right), torch.zeros_like(right)
        usable, first = (
            torch.where(g.abs() < TOO_LARGE, g, 0.0),
            blocks.encode_gradient_(pieces, added, bounds, code, room),
        )
        plain.encode_into_(usable, bounds, code, alone, None)
        assert int(first) == min(n, 700) and same(room, alone)
    chunk_errors = random(coded[0].numel() // code.row_bytes(1) * code.size, 8, device)
    chunk, real = torch.tensor([0, chunk_errors.numel()], device=device), torch.where(chunk_errors > -1, 1.0, 0.0)
    codes = [BlockCode(bits, code.size, code.rotate) for bits in (8, 4)]
    masks: list[Tensor | None] = [real, None]
    if isinstance(code, HalfCode):
        codes, masks = [code.seeded(5)] * 2, [None, None]
    for second_code, given, mask in zip(codes, (chunk_errors, None), masks, strict=True):
        total = torch.zeros_like(chunk_errors)
        if given is not None:
            total.copy_(given)
        plain.add_sum_(coded, code, total)
        expected, rest = encoded(plain, total if mask is None else total * mask, chunk, second_code, 1)
        for left in (torch.empty_like(chunk_errors), None):
            row = torch.zeros_like(expected)
            blocks.second_phase_(coded, code, given, mask, chunk, second_code, row, left)
            assert same(row, expected) and (left is None or same(left, rest))
