"""The products of low-rank methods in C++, for CPU tensors.

PowerSGD's work on its matrices before the first message is one pass over memory: 12 bytes per element at any rank.
"""

from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from dgc.kernels.library import FP32, Signatures, declare, load, pointer, pointers
from dgc.kernels.lowrank.protocol import Factor, Left, Matrices, Right, TorchLowRank
from dgc.kernels.selection.native import Native

_SIZES = (c_int64,) * 3
_PASS = (c_void_p, *_SIZES, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int, c_void_p, c_int)
_SIGNATURES: Signatures = {
    "dgc_lowrank": (c_int64, _PASS),
    "dgc_outer": (None, (c_void_p, c_void_p, *_SIZES, c_int64, c_void_p, c_int)),
}


class NativeLowRank(TorchLowRank):
    """Implements `dgc.kernels.lowrank.protocol.LowRank` on torch.get_num_threads() threads.

    Raises:
        KernelsMissing: See `dgc.kernels.library.load`.
    """

    name = "native"

    def __init__(self, kernels: Native) -> None:
        super().__init__(kernels)
        self._library = load()
        declare(self._library, _SIGNATURES)

    def subtract_(self, M: Matrices, U: Left, W: Right) -> None:
        self._pass(M, (U, W), (), None, False, None)

    def multiply(self, M: Matrices, X: Factor, even: bool, Y: Factor) -> None:
        self._pass(M, None, (), X, even, Y)

    def refresh_(
        self, M: Matrices, taken: tuple[Left, Right] | None, g: Sequence[Tensor], X: Factor, even: bool, Y: Factor
    ) -> Int64[Tensor, ""]:
        if list(map(Tensor.numel, g)) != [M[0].numel()] * M.shape[0]:
            return super().refresh_(M, taken, g, X, even, Y)
        first = self._pass(M, taken, list(map(Tensor.float, g)), X, even, Y)
        return torch.full((), first, dtype=torch.int64)

    def _pass(
        self,
        M: Matrices,
        taken: tuple[Left, Right] | None,
        g: Sequence[Tensor],
        X: Factor | None,
        even: bool,
        Y: Factor | None,
    ) -> int:
        U, W = (None, None) if taken is None else (taken[0].contiguous(), taken[1].contiguous())
        X = None if X is None else X.contiguous()
        first: int = self._library.dgc_lowrank(
            pointer(M, FP32),
            *M.shape,
            pointer(U, FP32),
            pointer(W, FP32),
            0 if U is None else U.shape[1],
            pointers(g, FP32) if g else None,
            pointer(X, FP32),
            0 if X is None else X.shape[1],
            even,
            pointer(Y, FP32),
            torch.get_num_threads(),
        )
        return first

    def outer(self, U: Left, W: Right, out: Sequence[Float32[Tensor, "n m"]]) -> None:
        (B, R, n), m = U.shape, W.shape[2]
        U, W = U.contiguous(), W.contiguous()
        threads = torch.get_num_threads()
        self._library.dgc_outer(pointer(U, FP32), pointer(W, FP32), B, R, n, m, pointers(out, FP32), threads)
