"""The products of low-rank methods: many matrices of one shape, and factors with few rows.

Plain torch defines the results. Other backends add in another order, so their products differ by rounding.

M [B, n, m] is contiguous. Factors are stored in rows, U [B, R, n] and W [B, R, m], all fp32. `even` selects the
half step. Even: Y = M^T X, with X [B, r, n] and Y [B, r, m]. Odd: Y = M X, with X [B, r, m] and Y [B, r, n]. Y is
contiguous. A vector v [V] holds the matrices of several batches one after another, and then the rest of a bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

from dgc.kernels.selection import PassInputs, SelectionKernels

Matrices = Float32[Tensor, "B n m"]
Left = Float32[Tensor, "B R n"]
Right = Float32[Tensor, "B R m"]
Factor = Float32[Tensor, "B r _"]
Vector = Float32[Tensor, "_"]
Tensors = Sequence[Tensor]
Factors = Sequence[Float32[Tensor, "_ _ _"]]  # by batch
Products = list[tuple[Float32[Tensor, "_ _ _"], Float32[Tensor, "_ _ _"]]]  # (U, W) of U^T W, by batch
Places = Sequence[Sequence[Tensor]]  # a contiguous tensor [n, m] for each matrix, by batch


@dataclass(frozen=True)
class Batch:
    """`count` matrices [n, m], stored from `offset` in v, of the tensors `members` of the bucket, which together
    have `numel` elements. The rest of a square matrix is padding.
    """

    members: tuple[int, ...]
    offset: int
    count: int
    n: int
    m: int
    rank: int
    numel: int

    def of(self, v: Vector) -> Matrices:
        end = self.offset + self.count * self.n * self.m
        return v[self.offset : end].view(self.count, self.n, self.m)

    def factor_shape(self, side: str) -> tuple[int, int, int]:
        """Shape of "P" or "Q"."""
        return self.count, self.rank, self.n if side == "P" else self.m


Batches = Sequence[Batch]


@dataclass(eq=False)
class SentUpdate:
    """The sent update: U and W by batch, and the uncompressed tensors except for their `rounding_errors` [D].

    It stays in v until the next step subtracts it in its pass over memory. A dropped step has nothing to restore.
    """

    products: Products = field(default_factory=list)
    rounding_errors: Vector | None = None  # None: zeros


@dataclass(frozen=True)
class Cast:
    """How numbers are sent: limited to `limit`, or to `rest_limit` outside of factors, and cast to `dtype`. None:
    as they are, in fp32.
    """

    dtype: torch.dtype
    limit: float | None
    rest_limit: float | None

    def of(self, x: Vector, limit: float | None) -> Float[Tensor, "_"]:
        return x if limit is None else x.clamp(-limit, limit).to(self.dtype)


@dataclass(frozen=True, eq=False)
class FactorMessage:
    """What a rank sends in one half step.

    Attributes:
        Y: The products as they are sent, in fp32, by batch.
        numbers: All of Y, and then the uncompressed tensors if they are sent. The transport may overwrite it.
        rounding_errors: What casting takes from the uncompressed tensors [D]. None: nothing.
        first_nonfinite: Index in v of the gradient's first element that is NaN or TOO_LARGE, or V. None: no
            gradient was read.
        largest: Zero, which `outer` sets. None: the caller finds it.
    """

    Y: Factors
    numbers: Vector
    rounding_errors: Vector | None = None
    first_nonfinite: Int64[Tensor, ""] | None = None
    largest: Int32[Tensor, "1"] | None = None


def consecutive(shapes: Sequence[tuple[int, int, int]], device: torch.device) -> tuple[Vector, list[Factor]]:
    """Return a new tensor, and its consecutive parts of these shapes."""
    sizes = list(map(prod, shapes))
    flat = torch.empty(sum(sizes), dtype=torch.float32, device=device)
    return flat, list(map(Tensor.view, flat.split_with_sizes(sizes), shapes))


class LowRank:
    """Products with low-rank factors, in plain torch. `refresh_` takes three passes over v.

    Args:
        kernels: Adds the gradients.

    Attributes:
        fused: Whether `outer` writes to tensors of any one dtype and finds the largest magnitude, and
            `orthonormal` finds bases. Otherwise only the tensors of `rest` may not be fp32, and the caller does
            both.
    """

    fused = False

    def __init__(self, kernels: SelectionKernels):
        self._kernels = kernels

    def subtract_(self, M: Matrices, U: Left, W: Right) -> None:
        """M -= U^T W"""
        M.baddbmm_(U.mT, W, alpha=-1)

    def remove_(self, v: Vector, batches: Batches, sent: SentUpdate) -> None:
        """Remove from v what was sent."""
        end = 0
        for batch, product in zip(batches, sent.products, strict=True):
            self.subtract_(batch.of(v), *product)
            end = batch.offset + batch.count * batch.n * batch.m
        v[end:].zero_() if sent.rounding_errors is None else v[end:].copy_(sent.rounding_errors)

    def multiply(self, M: Matrices, X: Factor, even: bool, Y: Factor) -> None:
        """Y = M^T X if even, else Y = M X."""
        torch.bmm(X, M if even else M.mT, out=Y)

    def refresh_(
        self,
        v: Vector,
        batches: Batches,
        sent: SentUpdate | None,
        g: Tensors,
        X: Factors,
        even: bool,
        Y: Factors,
    ) -> Int64[Tensor, ""]:
        """Remove from v what was sent, add the gradients, and multiply each batch M by its X into its Y.

        Args:
            v: The matrices and the rest.
            batches: Where the matrices lie.
            sent: The bits are the same as after `remove_`. None: nothing was sent.
            g: Contiguous pieces of one dtype, in v's order, one for each member of a batch. NaN and TOO_LARGE (see
                `dgc.kernels.selection`) count as zero. The padding of a matrix is zero afterwards.
            X: Factors to multiply by.
            even: The half step.
            Y: Receives the products.

        Returns:
            The index in v of the first element of g that is NaN or TOO_LARGE, or V.
        """
        numel = sum(map(Tensor.numel, g))
        own, padding = v[:numel], v[numel:]
        if sent is not None:
            self.remove_(v, batches, sent)
            padding.zero_()
        first_nonfinite = self._kernels.accumulate_(PassInputs(tuple(g), None, own))
        for batch, x, y in zip(batches, X, Y, strict=True):
            self.multiply(batch.of(v), x, even, y)
        if not padding.numel():
            return first_nonfinite
        return torch.where(first_nonfinite < numel, first_nonfinite, v.numel())

    def begin_(
        self,
        v: Vector,
        batches: Batches,
        sent: SentUpdate | None,
        g: Tensors,
        X: Factors,
        even: bool,
        cast: Cast,
    ) -> FactorMessage:
        """Do `refresh_`, and return the products and the rest of v as they are sent.

        Args:
            cast: How they are sent. The other arguments are as in `refresh_`.
        """
        flat, Y = consecutive([batch.factor_shape("Q" if even else "P") for batch in batches], v.device)
        first_nonfinite = self.refresh_(v, batches, sent, g, X, even, Y)
        rest = v[batches[-1].offset + batches[-1].count * batches[-1].n * batches[-1].m if batches else 0 :]
        as_sent = cast.of(rest, cast.rest_limit)
        errors = None if as_sent is rest else rest - as_sent
        return self._message(flat, Y, cast, (as_sent,), errors, first_nonfinite)

    def project(
        self, v: Vector, batches: Batches, products: Products, X: Factors, even: bool, cast: Cast
    ) -> FactorMessage:
        """Multiply the matrices of v, without the `products` that this step has sent, by X.

        Args:
            v: The matrices and the rest.
            batches: Where the matrices lie.
            products: By batch, or empty.
            X: Factors to multiply by.
            even: The half step.
            cast: How the results are sent.
        """
        flat, Y = consecutive([batch.factor_shape("Q" if even else "P") for batch in batches], v.device)
        for b, batch in enumerate(batches):
            self.multiply(batch.of(v), X[b], even, Y[b])
            if products:
                along, across = products[b] if even else products[b][::-1]
                Y[b].baddbmm_(X[b].bmm(along.mT), across, alpha=-1)
        return self._message(flat, Y, cast)

    def _message(
        self,
        flat: Vector,
        Y: Sequence[Factor],
        cast: Cast,
        rest: tuple[Float[Tensor, "_"], ...] = (),
        errors: Vector | None = None,
        first_nonfinite: Int64[Tensor, ""] | None = None,
    ) -> FactorMessage:
        as_sent = cast.of(flat, cast.limit)
        if as_sent is not flat:
            sizes = list(map(Tensor.numel, Y))
            parts = as_sent.float().split_with_sizes(sizes)
            Y = [part.view(y.shape) for part, y in zip(parts, Y, strict=True)]
        # a copy, because the transport owns the message
        return FactorMessage(Y, torch.cat([as_sent, *rest]), errors, first_nonfinite)

    def orthonormal(self, xs: Factors, whole: bool, epsilon: float, key: int) -> Factors:
        """Orthonormal rows with the span of the rows of each x, found without a choice by the host, if `fused`.

        Args:
            xs: Factors. What is not finite counts as zero.
            whole: Divide an x of rank 1 by the length of all its rows together, at least 1e-16, and no more.
            epsilon: Largest share of a row that determines no direction.
            key: Of the random rows that replace such rows, 32 bits.
        """
        raise NotImplementedError

    def unit_rows(self, xs: Factors) -> tuple[list[Tensor], list[bool]]:
        """Divide the rows of each x by their lengths. Return whether each x has only positive finite lengths."""
        norms = [torch.linalg.vector_norm(x, dim=2, keepdim=True) for x in xs]
        ranges = [norm.aminmax() for norm in norms]
        usable = torch.stack([(least > 0) & (largest < torch.inf) for least, largest in ranges])
        return [x / norm for x, norm in zip(xs, norms, strict=True)], usable.tolist()

    def outer(
        self,
        products: Products,
        out: Places,
        mean: Vector,
        rest: Tensors,
        largest: Int32[Tensor, "1"] | None = None,
    ) -> None:
        """Write each U^T W to `out`, its R terms added in order, and the consecutive parts of `mean` to the
        contiguous tensors of `rest`.

        largest: `FactorMessage.largest`. It becomes the bits of the largest magnitude in the factors and `mean`.
        """
        for part, place in zip(mean.split([place.numel() for place in rest]), rest, strict=True):
            place.copy_(part)
        for (U, W), places in zip(products, out, strict=True):
            if len(places) == 1:
                torch.mm(U[0].T, W[0], out=places[0])
                continue
            for place, product in zip(places, torch.bmm(U.mT, W), strict=True):
                place.copy_(product)
