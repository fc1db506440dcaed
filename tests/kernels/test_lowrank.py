"""Products of low-rank methods: every tier, instruction set and number of threads is close to fp64, and where bits
are promised they are the same.
"""

import pytest
import torch
from kernels.tiers import NAMES, tier

from dgc.kernels.lowrank.native import NativeLowRank
from dgc.kernels.lowrank.protocol import TorchLowRank
from dgc.kernels.selection.native import Native
from dgc.kernels.selection.protocol import TOO_LARGE

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
def kernels(request):
    with tier(request.param) as own:
        yield own


@pytest.fixture
def products(kernels):
    return NativeLowRank(kernels) if isinstance(kernels, Native) else TorchLowRank(kernels)


class Case:
    def __init__(self, B, n, m, R, r):
        generator = torch.Generator().manual_seed(n * m + R)

        def random(*shape):
            return torch.randn(*shape, generator=generator)

        self.M, self.U, self.W, self.g = random(B, n, m), random(B, R, n), random(B, R, m), random(B, n, m)
        self.X = {True: random(B, r, n), False: random(B, r, m)}

    def Y(self, even):
        B, n, m = self.M.shape
        return torch.full((B, self.X[even].shape[1], m if even else n), torch.nan)


def product(M, X, even):
    return torch.bmm(X.double(), M.double() if even else M.double().mT)


def assert_close(own, wanted, terms):
    assert float((own.double() - wanted).abs().max()) <= 1e-6 * terms * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_pass_is_subtraction_addition_and_product(products, shape, even):
    case = Case(*shape)
    expected = case.M.double() - torch.bmm(case.U.double().mT, case.W.double()) + case.g.double()
    M, Y = case.M.clone(), case.Y(even)
    found = products.refresh_(M, (case.U, case.W), [g.reshape(-1) for g in case.g], case.X[even], even, Y)
    assert int(found) == M.numel()
    assert_close(M, expected, shape[3])
    assert_close(Y, product(M, case.X[even], even), M[0].numel() ** 0.5)
    again = case.Y(even)
    products.multiply(M, case.X[even], even, again)
    assert torch.equal(Y, again)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_subtracted_has_the_same_bits_alone(products, shape):
    """An error state that is saved goes on exactly as one that is kept."""
    case = Case(*shape)
    alone, together = case.M.clone(), case.M.clone()
    products.subtract_(alone, case.U, case.W)
    alone += case.g
    g = [g.reshape(-1) for g in case.g]
    products.refresh_(together, (case.U, case.W), g, case.X[False], False, case.Y(False))
    assert torch.equal(alone, together)


def test_nothing_was_taken(products):
    case = Case(2, 9, 40, 1, 2)
    M, Y = case.M.clone(), case.Y(True)
    products.refresh_(M, None, [g.reshape(-1) for g in case.g], case.X[True], True, Y)
    assert torch.equal(M, case.M + case.g)
    assert_close(Y, product(M, case.X[True], True), 20)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, TOO_LARGE, -3e38])
@pytest.mark.parametrize("place", [0, 5, 129 * 515, 129 * 515 * 2 - 1])
@pytest.mark.parametrize("even", [True, False])
def test_what_is_not_finite_counts_as_zero_and_is_found(products, bad, place, even):
    case = Case(2, 129, 515, 1, 6)
    case.g.view(-1)[place] = bad
    case.g.view(-1)[place + 1 :][:7] = bad
    M, Y = case.M.clone(), case.Y(even)
    found = products.refresh_(M, None, [g.reshape(-1) for g in case.g], case.X[even], even, Y)
    assert int(found) == place
    assert torch.equal(M, case.M + torch.where(case.g.abs() < TOO_LARGE, case.g, 0.0))
    assert bool(Y.isfinite().all())


def test_pieces_that_are_no_matrices_leave_padding(products):
    """A bucket as one square: pieces of any length, and zeros behind them."""
    case = Case(1, 10, 10, 2, 1)
    g = case.g.view(-1)[:93]
    M, Y = case.M.clone(), case.Y(True)
    found = products.refresh_(M, (case.U, case.W), list(g.split([50, 40, 3])), case.X[True], True, Y)
    expected = case.M - torch.bmm(case.U.mT, case.W)
    assert int(found) == 93
    assert_close(M.view(-1)[:93], (expected.view(-1)[:93] + g).double(), 4)
    assert not M.view(-1)[93:].any()
    assert_close(Y, product(M, case.X[True], True), 10)


def test_half_precision_gradients(products):
    case = Case(3, 6, 35, 1, 1)
    g = case.g.to(torch.bfloat16)
    M = case.M.clone()
    products.refresh_(M, None, [piece.reshape(-1) for piece in g], case.X[True], True, case.Y(True))
    assert torch.equal(M, case.M + g.float())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outer_products_have_the_same_bits_everywhere(products, shape):
    """Replicas are made of them. Factors need not be contiguous."""
    case = Case(*shape)
    buffer = torch.full((case.M.numel() + 3,), torch.nan)
    out = list(buffer[3:].view(case.M.shape))
    products.outer(case.U.mT.contiguous().mT, case.W, out)
    expected = torch.zeros_like(case.M)
    for k in range(shape[3]):
        expected += case.U[:, k, :, None] * case.W[:, k, None, :]
    if isinstance(products, NativeLowRank):
        assert torch.equal(torch.stack(out), expected)
    else:
        assert_close(torch.stack(out), expected.double(), shape[3])
    assert bool(buffer[:3].isnan().all())
