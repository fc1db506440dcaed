"""1-bit Adam as its paper writes it: Tang, Gan, Awan, Rajbhandari, Li, Lian, Liu, Zhang, He, ICML 2021, arXiv
2102.02888, Algorithm 1. The fast implementation is `dgc.optim.OneBitAdam` with an `OneBitAdamCompressor`.

Worker i of n, with the model x, the same on all workers, the learning rate gamma and C of `compress`:

    t < T_w      g = 1/n sum over i of g_i                             Adam, without bias correction
                 m = beta_1 m + (1 - beta_1) g
                 v = beta_2 v + (1 - beta_2) g**2
    t >= T_w     m_i = beta_1 m + (1 - beta_1) g_i                     v stays as it is
                 c_i = C[m_i + delta_i],  delta_i = m_i + delta_i - c_i           the worker's error
                 s = 1/n sum over i of c_i + deltabar
                 m = C[s],                deltabar = s - m                        the server's error
    always       x = x - gamma m / (sqrt(v) + eta)

The servers, one per chunk, are written here as one that each worker computes for itself from all c_i.

Differences from the paper: where v is zero, m is zero after the warm-up. An element of 0 has a negative sign.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from dgc.comm.requests import AllGather, AllReduce, Conversation

Gradient = Callable[[Tensor, int], Tensor]  # of x and t


def onebit_adam(
    x: Float[Tensor, "d"],
    gradient: Gradient,
    gamma: float,
    betas: tuple[float, float],
    eta: float,
    T_w: int,
    T: int,
    pieces: Sequence[int],
) -> Conversation[Tensor]:
    """Algorithm 1 at one worker, from x. T: steps. pieces: lengths of the parts with a scale of their own: those
    of a tensor in the chunk of a server. Returns x.
    """
    beta_1, beta_2 = betas
    m, v, delta, deltabar = (torch.zeros_like(x) for _ in range(4))
    for t in range(T):
        g = gradient(x, t)
        if t < T_w:
            (g,) = yield (AllReduce(g),)
            m = beta_1 * m + (1 - beta_1) * g
            v = beta_2 * v + (1 - beta_2) * g**2
        else:
            m = beta_1 * m + (1 - beta_1) * g + delta
            c = compress(m, pieces)
            delta = m - c
            (sent,) = yield (AllGather(c.clone()),)
            s = torch.stack(tuple(sent)).mean(0) + deltabar
            m = compress(s, pieces)
            deltabar = s - m
            m = m * (v > 0)
        x = x - gamma * m / (v.sqrt() + eta)
    return x


def compress(x: Float[Tensor, "d"], pieces: Sequence[int]) -> Float[Tensor, "d"]:
    """C: of each piece, its root mean square times the signs."""
    scales = [piece.square().mean(dtype=torch.float64).sqrt().to(x.dtype) for piece in x.split(list(pieces))]
    each = torch.repeat_interleave(torch.stack(scales), torch.tensor(pieces, dtype=torch.int64))
    return torch.where(x > 0, each, -each)
