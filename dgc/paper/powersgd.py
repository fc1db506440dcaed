"""PowerSGD as its paper writes it: Vogels, Karimireddy, Jaggi, NeurIPS 2019, arXiv 1905.13727, Algorithms 1 and 2.

At worker w, gradient g_w is a matrix [n, m] with an error e_w, at first 0, and a factor Q [m, r], at first random:

    Delta_w = g_w + e_w                              Algorithm 2: error feedback
    P = mean of Delta_w Q;  P^ = orthogonalize(P)    Algorithm 1; the means are over all workers
    Q_w = Delta_w^T P^;     Q = mean of Q_w
    e_w = Delta_w - P^ Q_w^T                         the update is P^ Q^T

The fast implementation is `dgc.lowrank.powersgd` with mode="paper". Differences from the paper: r is at most n
and m. Momentum is the optimizer's. Dependent columns of P, and NaN or inf in a gradient, are not handled.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from dgc.comm.requests import AllReduce, Conversation
from dgc.core.bucket import Bucket
from dgc.core.protocol import Compressor
from dgc.core.results import DenseResult, Reduced
from dgc.core.state import State

Draw = Callable[[str, int, int, int], Tensor]  # of name, t, m and r: a random Q [m, r], the same on all workers


def orthogonalize(P: Float[Tensor, "n r"]) -> Float[Tensor, "n r"]:
    """By Gram-Schmidt, column by column."""
    columns: list[Tensor] = []
    for p in P.T:
        for q in columns:
            p = p - (q @ p) * q
        columns.append(p / p.norm())
    return torch.stack(columns, dim=1)


def compress_aggregate(M: Float[Tensor, "n m"], Q: Float[Tensor, "m r"]) -> Conversation[tuple[Tensor, ...]]:
    """Algorithm 1: (P^, this worker's Q_w, their mean Q)."""
    (P,) = yield (AllReduce(M @ Q),)
    P_hat = orthogonalize(P)
    Q_w = M.T @ P_hat
    (Q,) = yield (AllReduce(Q_w.clone()),)
    return P_hat, Q_w, Q


@dataclass(eq=False)
class Factors(State):
    """Q: of each matrix, by name. It is not saved. steps: t."""

    Q: dict[str, Tensor] = field(default_factory=dict)


class PowerSGD(Compressor):
    """rank: r. draw: see `Draw`. warm_start: begin with the Q of the step before. error_feedback: keep e_w."""

    def __init__(self, rank: int, draw: Draw, warm_start: bool = True, error_feedback: bool = True):
        self.rank, self.draw, self.warm_start, self.error_feedback = rank, draw, warm_start, error_feedback

    def init(self, bucket: Bucket, size: int, rank: int) -> Factors:
        return Factors(size, rank, errors={"e": torch.zeros_like(bucket.flat)})

    def reduce(self, bucket: Bucket, state: Factors) -> Conversation[Reduced]:
        new = state.next(errors={"e": torch.zeros_like(state.errors["e"])}, Q=dict(state.Q))
        for s in bucket.segments:
            g_w = s.of(bucket.flat)
            if g_w.dim() < 2:  # vectors are aggregated uncompressed
                (update,) = yield (AllReduce(g_w.clone()),)
            else:
                delta_w = (g_w + s.of(state.errors["e"])).flatten(1)
                (n, m), Q = delta_w.shape, state.Q.get(s.name)
                if Q is None or not self.warm_start:
                    Q = self.draw(s.name, state.steps, m, min(self.rank, n, m)).to(delta_w)
                P_hat, Q_w, new.Q[s.name] = yield from compress_aggregate(delta_w, Q)
                if self.error_feedback:
                    s.of(new.errors["e"]).copy_((delta_w - P_hat @ Q_w.T).view(s.shape))
                update = P_hat @ new.Q[s.name].T
            g_w.copy_(update.view(s.shape))
        return Reduced(DenseResult(), new)
