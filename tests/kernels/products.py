"""Batches of matrices in a bucket, for the products of low-rank methods."""

from typing import Any

import torch
from kernels import comparison

from dgc.kernels.lowrank import Batch


def normal(*shape: Any, seed: int = 0, device: str = "cpu") -> Any:
    return comparison.random(torch.Size(shape).numel(), seed, device).view(shape)


class Given:
    """Batches of matrices M with `rest` elements behind them, the gradient of each tensor, U and W that were sent,
    and X to multiply with. shapes: (matrices, n, m, rows of U and W, rows of X) of each batch.
    """

    def __init__(self, shapes: Any, rest: int = 0, device: str = "cpu") -> None:
        self.batches, offset, place = [], 0, 0
        for B, n, m, _, r in shapes:
            self.batches.append(Batch(tuple(range(place, place + B)), offset, B, n, m, r, B * n * m))
            offset, place = offset + B * n * m, place + B
        self.v, self.errors = normal(offset + rest, device=device), normal(rest, seed=1, device=device)
        lengths = [b.n * b.m for b in self.batches for _ in b.members]
        g = normal(offset + rest, seed=2, device=device)
        self.g = list(g.split([*lengths, *((rest - 5, 5) if rest else ())]))
        sides = [(B, r, n) for B, n, _, _, r in shapes], [(B, r, m) for B, _, m, _, r in shapes]
        P, Q = ([normal(*shape, seed=3, device=device) for shape in side] for side in sides)
        self.X = {True: P, False: Q}
        sent = [(B, R, n, m) for B, n, m, R, _ in shapes]
        U = [normal(B, R, n, seed=4, device=device) for B, R, n, _ in sent]
        self.products = list(zip(U, (normal(B, R, m, seed=5, device=device) for B, R, _, m in sent), strict=True))

    def Y(self, even: bool) -> Any:
        pairs = zip(self.batches, self.X[even], strict=True)
        return [torch.full((b.count, X.shape[1], b.m if even else b.n), torch.nan) for b, X in pairs]


def multiplied(M: Any, X: Any, even: bool) -> Any:
    return torch.bmm(X.double(), M.double() if even else M.double().mT)
