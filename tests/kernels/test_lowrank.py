"""Products of low-rank methods: every backend is close to fp64, and where bits are promised they are the same."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from cases import case
from kernels.products import Given, multiplied

from dgc.kernels.lowrank import LowRank, SentUpdate
from dgc.kernels.lowrank.native import NativeLowRank
from dgc.kernels.selection import TOO_LARGE
from dgc.kernels.selection.native import NativeSelection

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


def assert_close(own: Any, wanted: Any, terms: Any) -> None:
    assert float((own.double() - wanted).abs().max()) <= 1e-6 * terms * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize(
    ("sends", "errors"),
    [(True, True), (True, False), (False, False)],
    ids=["all sent", "factors sent", "none sent"],
)
def test_one_pass_takes_the_place_of_single_operations(
    products: Any, even: bool, sends: bool, errors: bool
) -> None:
    """Subtraction, addition and product. A batch, and what is subtracted, has the same bits alone: a residual that
    was saved goes on like a kept one.
    """
    given = Given(SHAPES, 70)
    update = SentUpdate(given.products, given.errors if errors else None) if sends else None
    removed, v, Y = given.v.clone(), given.v.clone(), given.Y(even)
    if update is not None:
        products.remove_(removed, given.batches, update)
    assert int(products.refresh_(v, given.batches, update, given.g, given.X[even], even, Y)) == len(v)
    assert torch.equal(v, removed + torch.cat(given.g))
    for b, (batch, (U, W), X) in enumerate(zip(given.batches, given.products, given.X[even], strict=True)):
        with case("batch", b):
            taken = torch.bmm(U.double().mT, W.double()) if sends else 0.0
            assert_close(batch.of(removed), batch.of(given.v).double() - taken, SHAPES[b][3])
            M, g = batch.of(v), [given.g[i] for i in batch.members]
            assert_close(Y[b], multiplied(M, X, even), M[0].numel() ** 0.5)
            again, own, alone = given.Y(even)[b], [given.Y(even)[b]], batch.of(given.v).clone()
            products.multiply(M, X, even, again)
            assert torch.equal(Y[b], again)
            one, sent = replace(batch, members=tuple(range(len(g))), offset=0), SentUpdate([(U, W)])
            products.refresh_(alone.view(-1), [one], sent if sends else None, g, [X], even, own)
            assert torch.equal(M, alone) and torch.equal(Y[b], own[0])
    before = (given.errors if errors else torch.zeros(70)) if sends else given.v[-70:]
    assert torch.equal(removed[-70:], before)


def test_gradients_may_have_half_precision(products: Any) -> None:
    given = Given([(2, 9, 40, 1, 2)])
    g, v, Y = [piece.bfloat16() for piece in given.g], given.v.clone(), given.Y(True)
    products.refresh_(v, given.batches, None, g, given.X[True], True, Y)
    assert torch.equal(v, given.v + torch.cat(g).float())
    assert_close(Y[0], multiplied(given.batches[0].of(v), given.X[True][0], True), 20)


def test_gradients_may_be_pieces_that_are_no_matrices(products: Any) -> None:
    """A bucket as one square: pieces of any length, and zeros behind them."""
    given = Given([(1, 10, 10, 2, 1)])
    g, v, Y = given.g[0][:93], given.v.clone(), given.Y(True)
    square = [replace(given.batches[0], members=(0, 1, 2), numel=93)]
    update = SentUpdate(given.products)
    found = products.refresh_(v, square, update, list(g.split([50, 40, 3])), given.X[True], True, Y)
    U, W = given.products[0]
    expected = (given.v.view(1, 10, 10) - torch.bmm(U.mT, W)).view(-1)
    assert int(found) == 100 and not v[93:].any()
    assert_close(v[:93], (expected[:93] + g).double(), 4)
    assert_close(Y[0], multiplied(v.view(1, 10, 10), given.X[True][0], True), 10)


def test_the_first_of_what_is_not_finite_is_found(products: Any) -> None:
    """All of it counts as zero."""
    given = Given(SHAPES, 9)
    n = len(given.v)
    edges = [*(batch.offset for batch in given.batches), n - 9, n - 5, n]
    places = [place for edge in edges for place in (edge - 1, edge) if 0 <= place < n]
    bads = (torch.inf, -torch.inf, TOO_LARGE, -3e38)
    for bad, place in [*((torch.nan, place) for place in places), *product(bads, (0, 129))]:
        g, v = torch.cat(given.g), given.v.clone()
        g[place : place + 7], g[-1] = bad, torch.inf
        for even in (True, False):
            pieces, Y = list(g.split([piece.numel() for piece in given.g])), given.Y(even)
            with case(bad, place, even):
                found = products.refresh_(v.copy_(given.v), given.batches, None, pieces, given.X[even], even, Y)
                assert int(found) == place and all(bool(y.isfinite().all()) for y in Y)
                assert torch.equal(v, given.v + torch.where(g.abs() < TOO_LARGE, g, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_rest_of_the_mean_is_written_with_the_outer_products(products: Any, dtype: Any) -> None:
    given = Given(SHAPES)
    mean, rest = torch.arange(12.0), [torch.zeros(7, dtype=dtype), torch.zeros(5, dtype=dtype)]
    together = [torch.full((b.count, b.n, b.m), torch.nan) for b in given.batches]
    products.outer(given.products, list(map(list, together)), mean, rest)
    assert torch.equal(torch.cat(rest), mean.to(dtype))
    for (U, W), M in zip(given.products, together, strict=True):
        assert_close(M, outer_product(U, W).double(), U.shape[1])


def outer_product(U: Any, W: Any) -> Any:
    expected = torch.zeros(U.shape[0], U.shape[2], W.shape[2])
    for k in range(U.shape[1]):
        expected += U[:, k, :, None] * W[:, k, None, :]
    return expected


def test_outer_products_have_the_same_bits_at_any_place(products: Any) -> None:
    """Replicas are made of them. Factors need not be contiguous."""
    given = Given(SHAPES)
    together = [torch.full((b.count, b.n, b.m), torch.nan) for b in given.batches]
    products.outer(given.products, list(map(list, together)), torch.empty(0), [])
    for (U, W), M in zip(given.products, together, strict=True):
        buffer = torch.full((M.numel() + 3,), torch.nan)
        out = list(buffer[3:].view(M.shape))
        products.outer([(U.mT.contiguous().mT, W)], [out], torch.empty(0), [])
        assert torch.equal(torch.stack(out), M) and bool(buffer[:3].isnan().all())
        if isinstance(products, NativeLowRank):
            assert torch.equal(M, outer_product(U, W))


def test_rows_of_length_one_have_the_same_bits_on_every_cpu(products: Any) -> None:
    """Of rows without a length, and with numbers that do not fit, the caller learns."""
    xs = [X for side in Given(SHAPES).X.values() for X in side]
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
