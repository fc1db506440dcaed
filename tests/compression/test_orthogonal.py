"""Orthonormal rows, for each matrix of a batch by itself."""

from typing import Any

import pytest
import torch

from dgc.compression import matrices

every_way = pytest.mark.parametrize("way", ["auto", "qr", "gram_schmidt", "cholesky_qr"])


def normal(*shape: Any, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def orthonormalize(x: Any, *options: Any, **named: Any) -> Any:
    return matrices.orthonormalize([x], *options, **named)[0]


def assert_orthonormal(x: Any, tolerance: float = 2e-6) -> None:
    eye = torch.eye(x.shape[1]).expand(len(x), -1, -1)
    torch.testing.assert_close(x @ x.mT, eye, rtol=0, atol=tolerance)


@every_way
def test_rows_are_orthonormal_and_span_the_same(way: Any) -> None:
    for shape in ((1, 1, 1), (4, 1, 7), (3, 2, 50), (2, 5, 5), (5, 7, 1000)):
        x = normal(*shape) * torch.logspace(-6, 6, shape[0])[:, None, None]
        basis = orthonormalize(x, way)
        assert_orthonormal(basis)
        for k in range(1, shape[1] + 1):
            part, first = basis[:, :k], x[:, :k]
            outside = first - first @ part.mT @ part
            norms = first.flatten(1).norm(dim=1)
            assert bool((outside.flatten(1).norm(dim=1) <= 1e-5 * norms).all())
        for scale in (1e-30, 1e30):
            assert_orthonormal(orthonormalize(normal(*shape) * scale, way))
    # a matrix does not depend on the others of its batch
    x = normal(6, 1, 40) * torch.tensor([1e-8, 1.0, 1e8, 3.0, 0.1, 7.0])[:, None, None]
    together = orthonormalize(x, way)
    for i in range(6):
        torch.testing.assert_close(together[i : i + 1], orthonormalize(x[i : i + 1], way))


@every_way
def test_zeros_become_random_directions(way: Any) -> None:
    for r in (1, 3):
        x, noise = normal(3, r, 30), normal(3, r, 30, seed=5)
        x[1] = 0
        basis, found = orthonormalize(x, way), orthonormalize(x, way, noise=lambda b: noise)  # noqa: B023
        assert_orthonormal(basis)
        assert_orthonormal(found)
        assert float((found[1] @ noise[1].T @ noise[1]).norm()) > 1
        torch.testing.assert_close(found[0], basis[0])


@every_way
def test_dependent_rows_keep_what_there_is(way: Any) -> None:
    x = normal(2, 4, 30)
    x[0, 1] = 2 * x[0, 0]
    x[0, 2] = x[0, 0] + 1e-5 * x[0, 3]
    x[1, 0] = 0
    basis = orthonormalize(x, way, epsilon=1e-6)
    assert_orthonormal(basis)
    for i in range(2):
        rows = x[i] / x[i].norm(dim=1, keepdim=True).clamp(min=1e-30)
        outside = rows - rows @ basis[i].T @ basis[i]
        assert float(outside.norm(dim=1)[[0, 1, 3]].max()) < 1e-4
