"""The work on matrices of low rank in C++."""

from array import array
from ctypes import c_int, c_int64, c_void_p
from itertools import accumulate, chain
from math import prod

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from dgc.kernels.library import EACH_F32, F32, FP32, Native, Signatures
from dgc.kernels.lowrank import (
    Batches,
    Cast,
    Factor,
    FactorMessage,
    Factors,
    Left,
    LowRank,
    Matrices,
    Places,
    Products,
    Right,
    SentUpdate,
    Tensors,
    Vector,
)
from dgc.kernels.selection.native import NativeSelection

_SIZES = (c_int64, c_int64, c_int64)
_TABLE = (c_void_p, c_int64)

SIGNATURES: Signatures = {
    "dgc_lowrank": (None, (F32, *_SIZES, F32, F32, c_int64, F32, c_int64, c_int, F32, c_int)),
    "dgc_lowrank_first": (
        c_int64,
        (F32, c_int64, *_TABLE, EACH_F32, c_int, EACH_F32, c_void_p, c_int, c_int, F32, c_int),
    ),
    "dgc_unit_rows": (c_int, (F32, c_int64, c_int64, F32)),
    "dgc_outer": (None, (EACH_F32, *_TABLE, EACH_F32, F32, *_TABLE, c_int)),
}


class NativeLowRank(Native, LowRank):
    """PowerSGD's work on its matrices before the first message is one pass: 12 bytes per element at any rank."""

    signatures = SIGNATURES

    def __init__(self, kernels: NativeSelection) -> None:
        Native.__init__(self)
        LowRank.__init__(self, kernels)

    def subtract_(self, M: Matrices, U: Left, W: Right) -> None:
        sizes, threads = (*M.shape, U.contiguous(), W.contiguous(), U.shape[1]), torch.get_num_threads()
        self._library.dgc_lowrank(M, *sizes, None, 0, False, None, threads)

    def multiply(self, M: Matrices, X: Factor, even: bool, Y: Factor) -> None:
        product = (X.contiguous(), X.shape[1], even, Y)
        self._library.dgc_lowrank(M, *M.shape, None, None, 0, *product, torch.get_num_threads())

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
        sizes, members = array("q"), 0
        factors: list[Tensor | None] = []
        for b, batch in enumerate(batches):
            if (len(batch.members), batch.numel) != (batch.count, batch.count * batch.n * batch.m):  # no matrices
                return super().refresh_(v, batches, sent, g, X, even, Y)
            U, W = (None, None) if sent is None else map(Tensor.contiguous, sent.products[b])
            R = 0 if U is None else U.shape[1]
            sizes.extend((batch.offset, batch.count, batch.n, batch.m, R, X[b].shape[1]))
            factors += (U, W, X[b].contiguous(), Y[b])
            members += batch.count
        begins = array("q", accumulate(map(Tensor.numel, g[members:]), initial=0))
        pieces, table = list(map(Tensor.float, g)), (sizes.tobytes(), len(batches), factors, even)
        errors = (False, None) if sent is None else (True, sent.rounding_errors)
        rests = (begins.tobytes(), len(begins) - 1, *errors, torch.get_num_threads())
        first_nonfinite = self._library.dgc_lowrank_first(v, v.numel(), *table, pieces, *rests)
        return torch.full((), first_nonfinite, dtype=torch.int64)

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
        if cast.limit is not None or cast.rest_limit is not None:
            return super().begin_(v, batches, sent, g, X, even, cast)
        shapes = [(batch.count, batch.rank, batch.m if even else batch.n) for batch in batches]
        sizes, last = list(map(prod, shapes)), batches[-1] if batches else None
        end = 0 if last is None else last.offset + last.count * last.n * last.m
        flat = torch.empty(sum(sizes), dtype=FP32)
        Y = list(map(Tensor.view, flat.split_with_sizes(sizes), shapes))
        first_nonfinite = self.refresh_(v, batches, sent, g, X, even, Y)
        return FactorMessage(Y, torch.cat([flat, v[end:]]), None, first_nonfinite)

    def unit_rows(self, xs: Factors) -> tuple[list[Tensor], list[bool]]:
        units, usable = list(map(torch.empty_like, xs)), []
        for x, unit in zip(xs, units, strict=True):
            B, r, d = x.shape
            usable.append(bool(self._library.dgc_unit_rows(x.contiguous(), B * r, d, unit)))
        return units, usable

    def outer(
        self,
        products: Products,
        out: Places,
        mean: Vector,
        rest: Tensors,
        largest: Int32[Tensor, "1"] | None = None,
    ) -> None:
        if rest and rest[0].dtype != FP32:
            super().outer([], [], mean, rest)
            rest = ()
        sizes = array("q")
        factors: list[Tensor] = []
        for U, W in products:
            factors += (U.contiguous(), W.contiguous())
            sizes.extend((*U.shape, W.shape[2]))
        places = [*chain.from_iterable(out), *rest]
        rests = (mean, array("q", map(Tensor.numel, rest)).tobytes(), len(rest))
        table = (factors, sizes.tobytes(), len(products), places)
        self._library.dgc_outer(*table, *rests, torch.get_num_threads())
