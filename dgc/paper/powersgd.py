"""PowerSGD as its paper writes it: Vogels, Karimireddy, Jaggi, NeurIPS 2019, arXiv 1905.13727, Algorithms 1 and 2.
The fast implementation is `dgc.compression.powersgd` with mode="paper"; its other modes are not here.

At worker w, gradient g_w is a matrix [n, m] with an error e_w, at first 0, and a factor Q [m, r], at first random:

    Delta_w = g_w + e_w                              Algorithm 2: error feedback
    P = mean of Delta_w Q;  P^ = orthogonalize(P)    Algorithm 1; the means are over all workers
    Q_w = Delta_w^T P^;     Q = mean of Q_w
    e_w = Delta_w - P^ Q_w^T                         the update is P^ Q^T

Differences from the paper: r is at most n and m. Momentum, the end of Algorithm 2, is the optimizer's. Dependent
columns of P, and NaN or inf in a gradient, are not handled. Of the compressor protocol there is `reduce` alone.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from dgc.bucket import Bucket
from dgc.comm.requests import AllReduce, Conversation
from dgc.compression.protocol import DenseResult, Result

Draw = Callable[[str, int, int, int], Tensor]


def orthogonalize(P: Float[Tensor, "n r"]) -> Float[Tensor, "n r"]:
    """By Gram-Schmidt, column by column."""
    columns: list[Tensor] = []
    for p in P.T:
        for q in columns:
            p = p - (q @ p) * q
        columns.append(p / p.norm())
    return torch.stack(columns, dim=1)


def compress_aggregate(
    M: Float[Tensor, "n m"], Q: Float[Tensor, "m r"]
) -> Conversation[tuple[Tensor, Tensor, Tensor]]:
    """Algorithm 1: (P^, this worker's Q_w, their mean Q)."""
    (P,) = yield (AllReduce(M @ Q),)
    P_hat = orthogonalize(P)
    Q_w = M.T @ P_hat
    (Q,) = yield (AllReduce(Q_w.clone()),)
    return P_hat, Q_w, Q


def decompress(P_hat: Float[Tensor, "n r"], Q: Float[Tensor, "m r"]) -> Float[Tensor, "n m"]:
    return P_hat @ Q.T


class PowerSGD:
    """Algorithm 2. rank: r. draw(name, t, m, r): a random Q [m, r] for step t, the same on all workers.
    warm_start: begin with the Q of the step before. error_feedback: keep e_w.
    """

    def __init__(self, rank: int, draw: Draw, warm_start: bool = True, error_feedback: bool = True):
        self.rank, self.draw, self.warm_start, self.error_feedback = rank, draw, warm_start, error_feedback
        self.t = 0
        self.e: dict[str, Tensor] = {}
        self.Q: dict[str, Tensor] = {}

    def reduce(self, bucket: Bucket) -> Conversation[Result]:
        for s in bucket.segments:
            g_w = s.of(bucket.flat)
            if g_w.dim() < 2:  # vectors are aggregated uncompressed
                (update,) = yield (AllReduce(g_w.clone()),)
            else:
                delta_w = (g_w + self.e.get(s.name, 0)).flatten(1)
                if not self.warm_start or s.name not in self.Q:
                    n, m = delta_w.shape
                    self.Q[s.name] = self.draw(s.name, self.t, m, min(self.rank, n, m)).to(delta_w)
                P_hat, Q_w, self.Q[s.name] = yield from compress_aggregate(delta_w, self.Q[s.name])
                if self.error_feedback:
                    self.e[s.name] = (delta_w - decompress(P_hat, Q_w)).view(s.shape)
                update = decompress(P_hat, self.Q[s.name])
            g_w.copy_(update.view(s.shape))
        self.t += 1
        return DenseResult()
