"""Products of low-rank methods: every backend, instruction set and number of threads is close to fp64, and where
bits are promised they are the same.
"""

from itertools import product
from typing import Any

import pytest
import torch
from cases import case

from dgc.kernels.lowrank import Batch, LowRank, SentUpdate
from dgc.kernels.native import NativeLowRank, NativeSelection
from dgc.kernels.selection import TOO_LARGE

# B, n, m, R, r: one row, one column, ends that fill no vector and no block of rows, ranks beyond the registers
SHAPES = [
    (1, 1, 1, 1, 1),
    (3, 5, 7, 2, 2),
    (2, 4, 16, 1, 3),
    (1, 33, 130, 4, 5),
    (4, 64, 27, 3, 7),
    (1, 700, 300, 2, 4),
    (5, 129, 515, 9, 1),
]


@pytest.fixture
def products(kernels: Any) -> Any:
    return NativeLowRank(kernels) if isinstance(kernels, NativeSelection) else LowRank(kernels)


class Given:
    def __init__(self, B: Any, n: Any, m: Any, R: Any, r: Any) -> None:
        generator = torch.Generator().manual_seed(n * m + R)
        shapes = (B, n, m), (B, R, n), (B, R, m), (B, n, m), (B, r, n), (B, r, m)
        self.M, self.U, self.W, self.g, *X = (torch.randn(shape, generator=generator) for shape in shapes)
        self.X = {True: X[0], False: X[1]}

    @property
    def pieces(self) -> Any:
        return pieces_of(self.g)

    def Y(self, even: Any) -> Any:
        B, n, m = self.M.shape
        return torch.full((B, self.X[even].shape[1], m if even else n), torch.nan)


def pieces_of(g: Any) -> Any:
    return [piece.reshape(-1) for piece in g]


def refresh(products: Any, M: Any, sent: Any, g: Any, X: Any, even: Any, Y: Any) -> int:
    """Of one batch."""
    (B, n, m), numel = M.shape, sum(piece.numel() for piece in g)
    batch = Batch(tuple(range(len(g))), 0, B, n, m, 1, numel)
    return int(products.refresh_(M.view(-1), [batch], sent and SentUpdate([sent]), g, [X], even, [Y]))


def multiplied(M: Any, X: Any, even: Any) -> Any:
    return torch.bmm(X.double(), M.double() if even else M.double().mT)


def assert_close(own: Any, wanted: Any, terms: Any) -> None:
    assert float((own.double() - wanted).abs().max()) <= 1e-6 * terms * max(1.0, float(wanted.abs().max()))


def test_one_pass_is_subtraction_addition_and_product(products: Any) -> None:
    for shape, even in product(SHAPES, (True, False)):
        with case(shape, even):
            given = Given(*shape)
            expected = given.M.double() - torch.bmm(given.U.double().mT, given.W.double()) + given.g.double()
            M, Y = given.M.clone(), given.Y(even)
            found = refresh(products, M, (given.U, given.W), given.pieces, given.X[even], even, Y)
            assert found == M.numel()
            assert_close(M, expected, shape[3])
            assert_close(Y, multiplied(M, given.X[even], even), M[0].numel() ** 0.5)
            again = given.Y(even)
            products.multiply(M, given.X[even], even, again)
            assert torch.equal(Y, again)


def test_nothing_was_taken_and_gradients_may_have_half_precision(products: Any) -> None:
    given = Given(2, 9, 40, 1, 2)
    for dtype in (torch.float32, torch.bfloat16):
        M, Y, g = given.M.clone(), given.Y(True), given.g.to(dtype)
        refresh(products, M, None, pieces_of(g), given.X[True], True, Y)
        assert torch.equal(M, given.M + g.float())
        assert_close(Y, multiplied(M, given.X[True], True), 20)


def test_what_is_not_finite_counts_as_zero_and_is_found(products: Any) -> None:
    bads, places = (torch.nan, torch.inf, -torch.inf, TOO_LARGE, -3e38), (0, 5, 129 * 515, 129 * 515 * 2 - 1)
    given = Given(2, 129, 515, 1, 6)
    spots = [*product(bads, places[:1]), *product(bads[:1], places[1:])]
    for (bad, place), even in product(spots, (True, False)):
        g = given.g.clone()
        g.view(-1)[place] = bad
        g.view(-1)[place + 1 :][:7] = bad
        M, Y = given.M.clone(), given.Y(even)
        found = refresh(products, M, None, pieces_of(g), given.X[even], even, Y)
        with case(bad, place, even):
            assert found == place
            assert torch.equal(M, given.M + torch.where(g.abs() < TOO_LARGE, g, 0.0))
            assert bool(Y.isfinite().all())


def test_pieces_that_are_no_matrices_leave_padding(products: Any) -> None:
    """A bucket as one square: pieces of any length, and zeros behind them."""
    given = Given(1, 10, 10, 2, 1)
    g = given.g.view(-1)[:93]
    M, Y = given.M.clone(), given.Y(True)
    found = refresh(products, M, (given.U, given.W), list(g.split([50, 40, 3])), given.X[True], True, Y)
    expected = given.M - torch.bmm(given.U.mT, given.W)
    assert found == 100
    assert_close(M.view(-1)[:93], (expected.view(-1)[:93] + g).double(), 4)
    assert not M.view(-1)[93:].any()
    assert_close(Y, multiplied(M, given.X[True], True), 10)


def test_outer_products_have_the_same_bits_everywhere(products: Any) -> None:
    """Replicas are made of them. Factors need not be contiguous."""
    for shape in SHAPES:
        with case(shape):
            given = Given(*shape)
            buffer = torch.full((given.M.numel() + 3,), torch.nan)
            out = list(buffer[3:].view(given.M.shape))
            products.outer([(given.U.mT.contiguous().mT, given.W)], [out], torch.empty(0), [])
            expected = torch.zeros_like(given.M)
            for k in range(shape[3]):
                expected += given.U[:, k, :, None] * given.W[:, k, None, :]
            if isinstance(products, NativeLowRank):
                assert torch.equal(torch.stack(out), expected)
            else:
                assert_close(torch.stack(out), expected.double(), shape[3])
            assert bool(buffer[:3].isnan().all())


class Whole:
    """The batches of a bucket, with `rest` elements behind them."""

    def __init__(self, rest: int) -> None:
        self.parts, self.batches, end = [Given(*shape) for shape in SHAPES], [], 0
        for part in self.parts:
            B, n, m = part.M.shape
            self.batches.append(Batch(tuple(range(B)), end, B, n, m, 1, part.M.numel()))
            end += part.M.numel()
        self.rest, self.errors = torch.arange(rest) / 8, torch.arange(rest) / 4
        self.v = torch.cat([*(part.M.view(-1) for part in self.parts), -self.rest])
        self.g = [g for part in self.parts for g in part.pieces] + list(self.rest.split([rest - 3, 3]))

    def factors(self, even: bool) -> Any:
        """(X, Y) of all batches."""
        return [part.X[even] for part in self.parts], [part.Y(even) for part in self.parts]


def test_a_whole_bucket_is_its_batches_and_its_rest(products: Any) -> None:
    """What is subtracted has the same bits alone: a residual that is saved goes on exactly as one that is kept."""
    for even, sends, errors in [(True, True, True), (False, True, False), (True, False, False)]:
        whole = Whole(70)
        sent, removed = [(part.U, part.W) for part in whole.parts] if sends else None, whole.v.clone()
        X, Y = whole.factors(even)
        update = None if sent is None else SentUpdate(sent, whole.errors if errors else None)
        if update is not None:
            products.remove_(removed, whole.batches, update)
        assert int(products.refresh_(whole.v, whole.batches, update, whole.g, X, even, Y)) == len(whole.v)
        for b, (part, batch) in enumerate(zip(whole.parts, whole.batches, strict=True)):
            with case(even, sends, errors, b):
                M, y = part.M.clone(), part.Y(even)
                refresh(products, M, sent and sent[b], part.pieces, X[b], even, y)
                assert torch.equal(batch.of(whole.v), M) and torch.equal(Y[b], y)
                assert torch.equal(batch.of(removed) + part.g, M)
        before = (whole.errors if errors else torch.zeros(70)) if sends else -whole.rest
        assert torch.equal(removed[-70:], before) and torch.equal(whole.v[-70:], before + whole.rest)


def test_the_first_element_that_is_not_finite_is_found_anywhere_in_a_bucket(products: Any) -> None:
    whole = Whole(9)
    edges = [*(batch.offset for batch in whole.batches), len(whole.v) - 9, len(whole.v) - 3, len(whole.v)]
    for place in [place for edge in edges for place in (edge - 1, edge) if 0 <= place < len(whole.v)]:
        g = torch.cat(whole.g)
        g[place], g[-1] = torch.nan, torch.inf
        pieces = list(g.split([piece.numel() for piece in whole.g]))
        X, Y = whole.factors(True)
        assert int(products.refresh_(whole.v.clone(), whole.batches, None, pieces, X, True, Y)) == place


def test_all_outer_products_and_the_rest_are_written_at_once(products: Any) -> None:
    parts = [Given(*shape) for shape in SHAPES]
    for dtype in (torch.float32, torch.bfloat16):
        mean, rest = torch.arange(12.0), [torch.zeros(7, dtype=dtype), torch.zeros(5, dtype=dtype)]
        together, alone = ([torch.full_like(part.M, torch.nan) for part in parts] for _ in range(2))
        products.outer([(part.U, part.W) for part in parts], list(map(list, together)), mean, rest)
        for part, M, own in zip(parts, together, alone, strict=True):
            products.outer([(part.U, part.W)], [list(own)], torch.empty(0), [])
            assert torch.equal(M, own)
        assert torch.equal(torch.cat(rest), mean.to(dtype))


def test_rows_of_length_one_have_the_same_bits_on_every_cpu(products: Any) -> None:
    """Of rows without a length, and with numbers that do not fit, the caller learns."""
    xs = [part.X[even] for part in map(lambda shape: Given(*shape), SHAPES) for even in (True, False)]
    xs += [1e-15 * torch.ones(1, 1, 9), 1e15 * torch.ones(1, 2, 9)]
    units, usable = products.unit_rows(xs)
    for x, unit in zip(xs, units, strict=True):
        wide = x.double()
        assert_close(unit, wide / wide.norm(dim=2, keepdim=True), 4)
        if isinstance(products, NativeLowRank):
            squares = torch.nn.functional.pad(wide.square(), (0, -x.shape[2] % 8)).unflatten(2, (-1, 8))
            lanes = torch.zeros_like(squares[:, :, 0])
            for i in range(squares.shape[2]):
                lanes += squares[:, :, i]
            total = torch.zeros_like(lanes[:, :, 0])
            for lane in range(8):
                total += lanes[:, :, lane]
            assert torch.equal(unit, x / total.sqrt().float()[:, :, None])
    assert usable == [True] * len(xs)
    for bad in (0.0, torch.nan, torch.inf):
        x = torch.ones(2, 3, 5)
        x[1, 2] = bad
        assert products.unit_rows([xs[0], x, xs[1]])[1] == [True, False, True], bad
