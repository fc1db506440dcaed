"""0/1 Adam, as defined by its paper: Lu, Li, Zhang, De Sa, He, ICLR 2023, arXiv 2202.06009, Algorithm 1. The
other implementation is `dgc.contrib.ZeroOneAdam` with `dgc.contrib.ZeroOneSteps`.

Worker i of n, with its own m, x and u, and C of 1-bit Adam. t' is the last step in T_u. In step t = 0, 1, ..

    always       m = beta_1 m + (1 - beta_1) g_i,   x = x - gamma_t m / (sqrt(v) + eta),   u = u + gamma_t m
    t in T_u     c_i = C[u + delta_i],  delta_i = u + delta_i - c_i                 the worker's error
                 s = 1/n sum over i of c_i + deltabar
                 ubar = C[s],           deltabar = s - ubar                         the server's error
                 m = ubar / (gamma_(t'+1) + .. + gamma_t),   x = x_(t'+1) - ubar / (sqrt(v) + eta),   u = 0
    t in T_v     g = 1/n sum over i of g_i,   v = beta_2 v + (1 - beta_2) g**2

Differences from the paper: the order within a step follows DeepSpeed's implementation. In a step of T_v, v is
updated first, and m takes the mean gradient: the workers then have the same u, and ubar = u. x and u take the m of
the same step. Where v is zero, so are m and ubar. An element of 0 has a negative sign.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from dgc.comm.requests import AllGather, AllReduce, Conversation
from dgc.paper.onebit_adam import Gradient, compress


def zero_one_adam(
    x: Float[Tensor, "d"],
    gradient: Gradient,
    gamma: Callable[[int], float],
    betas: tuple[float, float],
    eta: float,
    T_v: set[int],
    T_u: set[int],
    T: int,
    pieces: Sequence[int],
) -> Conversation[Tensor]:
    """T steps of Algorithm 1 at one worker, from x. pieces: lengths of the parts of x with their own scale."""
    beta_1, beta_2 = betas
    m, v, u, delta, deltabar = (torch.zeros_like(x) for _ in range(5))
    common, total = x, 0.0  # x_(t'+1), and the sum of gamma since t'
    for t in range(T):
        g = gradient(x, t)
        if t in T_v:
            (g,) = yield (AllReduce(g),)
            v = beta_2 * v + (1 - beta_2) * g**2
        m = (beta_1 * m + (1 - beta_1) * g) * (v > 0)
        x = x - gamma(t) * m / (v.sqrt() + eta)
        u, total = u + gamma(t) * m, total + gamma(t)
        if t in T_u:
            if t not in T_v:
                c = compress(u + delta, pieces)
                delta = u + delta - c
                (sent,) = yield (AllGather(c.clone()),)
                s = torch.stack(tuple(sent)).mean(0) + deltabar
                u = compress(s, pieces)
                deltabar = s - u
            m = u * (v > 0) / total
            common = x = common - u * (v > 0) / (v.sqrt() + eta)
            u, total = torch.zeros_like(u), 0.0
    return x


def variance_steps(kappa: int, F: int) -> set[int]:
    """T_v: k_0 = 0, k_(j+1) = k_j + 2**floor(j / kappa), all below F."""
    steps = [0]
    while (k := steps[-1] + 2 ** ((len(steps) - 1) // kappa)) < F:
        steps.append(k)
    return set(steps)


def synchronization_steps(F: int, scaler: int, clipper: int, T: int) -> set[int]:
    """T_u: all steps before F, then with gaps of 1, 2, 4, .. <= clipper, each for `scaler` steps."""
    steps = [*range(F)]
    for t in range(F, T):
        if t - steps[-1] >= min(clipper, 2 ** ((t - F) // scaler)):
            steps.append(t)
    return set(steps)
