"""Orthonormal bases for the factors of low-rank methods, in fp32 and for each matrix of a batch.

Vectors are rows. For each of the B matrices in x [B, r, d] the result has r orthonormal rows of d elements with
the same span; its first k rows span the same space as the first k rows of x. The `share` of a row is the part of
its length that the rows before it do not explain. There are three methods, and a fourth that repeats other code:

    qr             Householder reflections; orthonormal for any x
    gram_schmidt   x_i = x_i / |x_i|;  x_j -= (x_j . x_i) x_i for j > i      (modified, Vogels et al. 2019)
    cholesky_qr    L L^T = x x^T in fp64;  L^-1 x

The last two lose orthogonality if rows are nearly dependent; then Householder replaces them. `auto` uses
Gram-Schmidt at rank 1, where only the norm is computed. Otherwise it uses qr on a CPU (the fastest of the three
for ResNet-18's matrices at ranks 2, 4 and 7) and cholesky_qr on a GPU, which has no fast QR of many small
matrices.

`authors` repeats what the authors' package, epfml/powersgd, does: at rank 1 x / max(|x|, 1e-16) with one norm |x|
of the whole batch, otherwise qr. The rows of B equal matrices of rank 1 then have a length of about 1 / sqrt(B),
not 1, so a step sends only a part of what it should. The error feedback keeps the rest.

A row that is zero, or has a share of at most epsilon, determines no direction and is replaced by a random row.
Without this, a gradient that was zero once (an unused layer) would never be compressed again, because its factor
would stay zero.

Differences from the paper: It adds epsilon to the norm instead, so such a row stays zero.
"""

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from dgc.wire.checks import read_scalars

Orthogonalization = Literal["auto", "qr", "gram_schmidt", "cholesky_qr", "authors"]
SAFE = 1e-2  # smallest share of a row at which the last two methods are accurate


def check_orthogonalization(name: str, epsilon: float) -> None:
    """Raises ValueError unless orthonormalize accepts the arguments."""
    if name not in get_args(Orthogonalization):
        ways = ", ".join(get_args(Orthogonalization))
        raise ValueError(f"orthogonalization must be one of {ways}, not {name!r}")
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon must lie between 0 and 1, not {epsilon}")


def orthonormalize(
    x: Float32[Tensor, "B r d"],
    way: str = "auto",
    epsilon: float = 1e-8,
    noise: Callable[[], Tensor] | None = None,
) -> Float32[Tensor, "B r d"]:
    """An orthonormal basis for each matrix. x is finite and r <= d.

    noise: returns [B, r, d] fp32, the source of rows that replace undetermined ones; it must be the same on all
    ranks. None: random numbers from a fixed seed.
    """
    return orthonormalize_each([x], way, epsilon, [noise])[0]


def orthonormalize_each(
    xs: Sequence[Float32[Tensor, "_ _ _"]],
    way: str,
    epsilon: float,
    noises: Sequence[Callable[[], Tensor] | None],
) -> list[Float32[Tensor, "_ _ _"]]:
    """Applies `orthonormalize` to each. If all rows determine a direction, the host waits for a GPU only once."""
    tried = [attempt(x, way, epsilon) for x in xs]
    accepted = read_scalars([valid for _, valid in tried])
    return [
        basis if accept else completed(x, epsilon, noise)
        for x, (basis, _), accept, noise in zip(xs, tried, accepted, noises, strict=True)
    ]


def attempt(
    x: Float32[Tensor, "B r d"], way: str, epsilon: float
) -> tuple[Float32[Tensor, "B r d"], Bool[Tensor, ""]]:
    """Returns (basis, whether it is valid): not if rows determine no direction or rounding has spoilt it."""
    if way == "authors" and x.shape[1] == 1:
        whole = torch.linalg.vector_norm(x)
        return x / whole.clamp(min=1e-16), whole.isfinite()
    if way == "authors":
        way = "qr"
    if way == "auto":
        way = "gram_schmidt" if x.shape[1] == 1 else "cholesky_qr" if x.is_cuda else "qr"
    if x.shape[1] == 1 and way == "gram_schmidt":  # the same result in fewer operations
        norm = torch.linalg.vector_norm(x, dim=2, keepdim=True)
        least, largest = norm.aminmax()
        return x / norm, (least > 0) & (largest < torch.inf)
    basis, share = {"qr": qr, "gram_schmidt": gram_schmidt, "cholesky_qr": cholesky_qr}[way](x)
    # the share of a zero row is NaN, and comparisons with NaN are false
    return basis, (share > (epsilon if way == "qr" or x.shape[1] == 1 else SAFE)).all()


def completed(
    x: Float32[Tensor, "B r d"], epsilon: float, noise: Callable[[], Tensor] | None
) -> Float32[Tensor, "B r d"]:
    """The basis by Householder reflections, with noise for rows that determine no direction."""
    basis, share = qr(x)
    lost = ~(share > epsilon)
    if bool(lost.any()):
        basis, _ = qr(replaced(x, lost, noise() if noise is not None else _noise_like(x)))
    return basis


def qr(x: Float32[Tensor, "B r d"]) -> tuple[Float32[Tensor, "B r d"], Float32[Tensor, "B r"]]:
    """Returns (basis, share), like the others. LAPACK expects columns: the transpose of x, which costs no copy."""
    q, r = torch.linalg.qr(x.mT)
    return q.mT, r.diagonal(dim1=1, dim2=2).abs() / torch.linalg.vector_norm(r, dim=1)


def gram_schmidt(x: Float32[Tensor, "B r d"]) -> tuple[Float32[Tensor, "B r d"], Float32[Tensor, "B r"]]:
    basis = x.clone()
    before = torch.linalg.vector_norm(x, dim=2)
    left = []
    for i in range(x.shape[1]):
        row, rest = basis[:, i : i + 1], basis[:, i + 1 :]
        norm = torch.linalg.vector_norm(row, dim=2, keepdim=True)
        left.append(norm.view(-1))
        row.div_(norm)
        if rest.shape[1]:
            rest.baddbmm_(rest.bmm(row.mT), row, alpha=-1)
    return basis, torch.stack(left, dim=1) / before


def cholesky_qr(x: Float32[Tensor, "B r d"]) -> tuple[Float32[Tensor, "B r d"], Float32[Tensor, "B r"]]:
    wide = x.double()
    gram = wide.bmm(wide.mT)
    L, info = torch.linalg.cholesky_ex(gram)
    identity = torch.eye(x.shape[1], dtype=wide.dtype, device=x.device).expand_as(gram)
    inverse = torch.linalg.solve_triangular(L, identity, upper=False)
    share = (L / gram.diagonal(dim1=1, dim2=2).sqrt()[:, :, None]).diagonal(dim1=1, dim2=2)
    return inverse.bmm(wide).float(), torch.where(info[:, None] == 0, share, 0.0).float()


def replaced(
    x: Float32[Tensor, "B r d"], lost: Bool[Tensor, "B r"], noise: Float32[Tensor, "B r d"]
) -> Float32[Tensor, "B r d"]:
    """x with the lost rows moved behind the others, which keep their span, and replaced by noise."""
    order = lost.int().argsort(dim=1, stable=True)[:, :, None].expand_as(x)
    return torch.where(lost[:, :, None], noise, x).gather(1, order)


def _noise_like(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(x.shape, generator=generator, dtype=torch.float32).to(x.device)
