"""Products of low-rank methods: every backend, instruction set and number of threads is close to fp64, and where bits
are promised they are the same.
"""

from itertools import product
from typing import Any

import pytest
import torch
from cases import case
from kernels.backends import NAMES, backend

from dgc.kernels.lowrank import LowRank
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


@pytest.fixture(params=NAMES, scope="module")
def kernels(request: pytest.FixtureRequest) -> Any:
    with backend(request.param) as own:
        yield own


@pytest.fixture
def products(kernels: Any) -> Any:
    return NativeLowRank(kernels) if isinstance(kernels, NativeSelection) else LowRank(kernels)


class Given:
    def __init__(self, B: Any, n: Any, m: Any, R: Any, r: Any) -> None:
        generator = torch.Generator().manual_seed(n * m + R)

        def random(*shape: Any) -> Any:
            return torch.randn(*shape, generator=generator)

        self.M, self.U, self.W, self.g = random(B, n, m), random(B, R, n), random(B, R, m), random(B, n, m)
        self.X = {True: random(B, r, n), False: random(B, r, m)}

    def Y(self, even: Any) -> Any:
        B, n, m = self.M.shape
        return torch.full((B, self.X[even].shape[1], m if even else n), torch.nan)


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
            pieces = [g.reshape(-1) for g in given.g]
            found = products.refresh_(M, (given.U, given.W), pieces, given.X[even], even, Y)
            assert int(found) == M.numel()
            assert_close(M, expected, shape[3])
            assert_close(Y, multiplied(M, given.X[even], even), M[0].numel() ** 0.5)
            again = given.Y(even)
            products.multiply(M, given.X[even], even, again)
            assert torch.equal(Y, again)


def test_what_is_subtracted_has_the_same_bits_alone(products: Any) -> None:
    """A residual that is saved goes on exactly as one that is kept."""
    for shape in SHAPES:
        given = Given(*shape)
        alone, together = given.M.clone(), given.M.clone()
        products.subtract_(alone, given.U, given.W)
        alone += given.g
        g = [g.reshape(-1) for g in given.g]
        products.refresh_(together, (given.U, given.W), g, given.X[False], False, given.Y(False))
        assert torch.equal(alone, together), shape


def test_nothing_was_taken(products: Any) -> None:
    given = Given(2, 9, 40, 1, 2)
    M, Y = given.M.clone(), given.Y(True)
    products.refresh_(M, None, [g.reshape(-1) for g in given.g], given.X[True], True, Y)
    assert torch.equal(M, given.M + given.g)
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
        found = products.refresh_(M, None, [piece.reshape(-1) for piece in g], given.X[even], even, Y)
        with case(bad, place, even):
            assert int(found) == place
            assert torch.equal(M, given.M + torch.where(g.abs() < TOO_LARGE, g, 0.0))
            assert bool(Y.isfinite().all())


def test_pieces_that_are_no_matrices_leave_padding(products: Any) -> None:
    """A bucket as one square: pieces of any length, and zeros behind them."""
    given = Given(1, 10, 10, 2, 1)
    g = given.g.view(-1)[:93]
    M, Y = given.M.clone(), given.Y(True)
    found = products.refresh_(M, (given.U, given.W), list(g.split([50, 40, 3])), given.X[True], True, Y)
    expected = given.M - torch.bmm(given.U.mT, given.W)
    assert int(found) == 93
    assert_close(M.view(-1)[:93], (expected.view(-1)[:93] + g).double(), 4)
    assert not M.view(-1)[93:].any()
    assert_close(Y, multiplied(M, given.X[True], True), 10)


def test_half_precision_gradients(products: Any) -> None:
    given = Given(3, 6, 35, 1, 1)
    g = given.g.to(torch.bfloat16)
    M = given.M.clone()
    products.refresh_(M, None, [piece.reshape(-1) for piece in g], given.X[True], True, given.Y(True))
    assert torch.equal(M, given.M + g.float())


def test_outer_products_have_the_same_bits_everywhere(products: Any) -> None:
    """Replicas are made of them. Factors need not be contiguous."""
    for shape in SHAPES:
        with case(shape):
            given = Given(*shape)
            buffer = torch.full((given.M.numel() + 3,), torch.nan)
            out = list(buffer[3:].view(given.M.shape))
            products.outer(given.U.mT.contiguous().mT, given.W, out)
            expected = torch.zeros_like(given.M)
            for k in range(shape[3]):
                expected += given.U[:, k, :, None] * given.W[:, k, None, :]
            if isinstance(products, NativeLowRank):
                assert torch.equal(torch.stack(out), expected)
            else:
                assert_close(torch.stack(out), expected.double(), shape[3])
            assert bool(buffer[:3].isnan().all())
