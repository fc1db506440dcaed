"""The products of low-rank methods: many matrices of one shape, and factors with few rows.

Plain torch defines the results. Other backends add in another order, so their products differ by rounding.

M [B, n, m] is contiguous. Factors are stored in rows, U [B, R, n] and W [B, R, m], all fp32. `even` selects the
half step. Even: Y = M^T X, with X [B, r, n] and Y [B, r, m]. Odd: Y = M X, with X [B, r, m] and Y [B, r, n]. Y is
contiguous.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from dgc.kernels.selection import PassInputs, SelectionKernels

Matrices = Float32[Tensor, "B n m"]
Left = Float32[Tensor, "B R n"]
Right = Float32[Tensor, "B R m"]
Factor = Float32[Tensor, "B r _"]


class LowRank:
    """Products with low-rank factors, in plain torch. `refresh_` takes three passes over M.

    Args:
        kernels: Adds the gradients.
    """

    def __init__(self, kernels: SelectionKernels):
        self._kernels = kernels

    def subtract_(self, M: Matrices, U: Left, W: Right) -> None:
        """M -= U^T W"""
        M.baddbmm_(U.mT, W, alpha=-1)

    def multiply(self, M: Matrices, X: Factor, even: bool, Y: Factor) -> None:
        """Y = M^T X if even, else Y = M X."""
        torch.bmm(X, M if even else M.mT, out=Y)

    def refresh_(
        self, M: Matrices, taken: tuple[Left, Right] | None, g: Sequence[Tensor], X: Factor, even: bool, Y: Factor
    ) -> Int64[Tensor, ""]:
        """Do M -= U^T W, then M += g, then multiply M by X into Y.

        Args:
            M: The matrices.
            taken: U and W. The subtraction gives the same bits as subtract_. None: nothing is subtracted.
            g: Consecutive contiguous pieces of one dtype, in M's memory order. NaN and TOO_LARGE (see
                `dgc.kernels.selection`) count as zero. The rest of M is padding, and zero afterwards.
            X: Factor to multiply by.
            even: The half step.
            Y: Receives the product.

        Returns:
            The index of the first element of g that is NaN or TOO_LARGE, or g's length.
        """
        own = M.view(-1)[: sum(piece.numel() for piece in g)]
        if taken is not None:
            self.subtract_(M, *taken)
            M.view(-1)[own.numel() :].zero_()
        found = self._kernels.accumulate_(PassInputs(tuple(g), None, own))
        self.multiply(M, X, even, Y)
        return found

    def outer(self, U: Left, W: Right, out: Sequence[Float32[Tensor, "n m"]]) -> None:
        """Write U^T W of each matrix to its contiguous tensor in `out`. The R terms are added in order."""
        if len(out) == 1:
            torch.mm(U[0].T, W[0], out=out[0])
            return
        for place, product in zip(out, torch.bmm(U.mT, W), strict=True):
            place.copy_(product)
