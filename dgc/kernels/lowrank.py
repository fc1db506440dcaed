"""The products of low-rank methods: many matrices of one shape, and factors of few rows. Plain torch says what
they are; other tiers sum in another order, so that products differ by rounding.

M [B, n, m] is contiguous, its matrices one after another. Factors lie in rows, U [B, R, n] and W [B, R, m], all
fp32. "even" names the half step: Y = M^T X as Y [B, r, m] from X [B, r, n]; odd, Y = M X as Y [B, r, n] from
X [B, r, m]. Y is contiguous.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from dgc.kernels.protocol import Accumulation, Kernels

Matrices = Float32[Tensor, "B n m"]
Left = Float32[Tensor, "B R n"]
Right = Float32[Tensor, "B R m"]
Factor = Float32[Tensor, "B r _"]


@runtime_checkable
class LowRank(Protocol):
    name: str

    def subtract_(self, M: Matrices, U: Left, W: Right) -> None:
        """M -= U^T W"""
        ...

    def multiply(self, M: Matrices, X: Factor, even: bool, Y: Factor) -> None:
        """Y = M^T X, or M X, into Y."""
        ...

    def refresh_(
        self, M: Matrices, taken: tuple[Left, Right] | None, g: Sequence[Tensor], X: Factor, even: bool, Y: Factor
    ) -> Int64[Tensor, ""]:
        """M -= U^T W, of taken, bit for bit as subtract_; M += g; and the product of M and X into Y.

        g: contiguous pieces of one dtype, one after another in the order of M's memory, of which NaN and TOO_LARGE
        (see `protocol`) count as zero. What lies behind them is padding, and zero afterwards. Returns the place of
        the first that counts as zero, g's length where there is none.
        """
        ...

    def outer(self, U: Left, W: Right, out: Sequence[Float32[Tensor, "n m"]]) -> None:
        """U^T W of each matrix into its own place, contiguous; added up in the order of the R terms."""
        ...


class TorchLowRank:
    """kernels: who adds gradients."""

    name = "torch"

    def __init__(self, kernels: Kernels):
        self._kernels = kernels

    def subtract_(self, M: Matrices, U: Left, W: Right) -> None:
        M.baddbmm_(U.mT, W, alpha=-1)

    def multiply(self, M: Matrices, X: Factor, even: bool, Y: Factor) -> None:
        torch.bmm(X, M if even else M.mT, out=Y)

    def refresh_(
        self, M: Matrices, taken: tuple[Left, Right] | None, g: Sequence[Tensor], X: Factor, even: bool, Y: Factor
    ) -> Int64[Tensor, ""]:
        return refresh_in_turn_(self, self._kernels, M, taken, g, X, even, Y)

    def outer(self, U: Left, W: Right, out: Sequence[Float32[Tensor, "n m"]]) -> None:
        if len(out) == 1:
            torch.mm(U[0].T, W[0], out=out[0])
            return
        for place, product in zip(out, torch.bmm(U.mT, W), strict=True):
            place.copy_(product)


def refresh_in_turn_(
    products: LowRank,
    kernels: Kernels,
    M: Matrices,
    taken: tuple[Left, Right] | None,
    g: Sequence[Tensor],
    X: Factor,
    even: bool,
    Y: Factor,
) -> Int64[Tensor, ""]:
    """LowRank.refresh_ as three passes over M."""
    own = M.view(-1)[: sum(piece.numel() for piece in g)]
    if taken is not None:
        products.subtract_(M, *taken)
        M.view(-1)[own.numel() :].zero_()
    found = kernels.accumulate_(Accumulation(tuple(g), None, own))
    products.multiply(M, X, even, Y)
    return found
