"""CHOCO-SGD as its paper writes it: Koloskova, Stich, Jaggi, ICML 2019, arXiv 1902.00340, Algorithm 2, with two of
its operators Q. The other implementation is `dgc.contrib.choco`.

Worker i has a model x_i and a public copy xhat_j of its own model and of each neighbour's. With W symmetric, rows
summing to one, in step t:

    x_i = x_i - eta grad(x_i)
    q_i = Q(x_i - xhat_i)                 to and from all neighbours j
    xhat_j = xhat_j + q_j                 for all neighbours j, and j = i
    x_i = x_i + gamma sum over neighbours j of w_ij (xhat_j - xhat_i)

Differences from the paper: public copies begin as the model that all workers start with, not as zeros, which is
the same in coordinates whose origin is that model. `gradient` may give any optimizer's direction, as momentum.
NaN and inf in a gradient are not handled.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from dgc.comm.requests import Conversation, Exchange

Gradient = Callable[[Tensor, int], Tensor]  # of x and t


def choco_sgd(
    x: Float[Tensor, "d"],
    gradient: Gradient,
    eta: float,
    gamma: float,
    Q: Callable[[Tensor], Tensor],
    w: dict[int, float],
    i: int,
    T: int,
) -> Conversation[Tensor]:
    """Algorithm 2 at worker i, from x, the same on all workers. w: row i of W, by j, i included. T: steps.
    Returns x_i.
    """
    neighbours = [j for j in w if j != i]
    xhat = dict.fromkeys(w, x)
    for t in range(T):
        x = x - eta * gradient(x, t)
        q = Q(x - xhat[i])
        sends, receives = ({j: make(q) for j in neighbours} for make in (torch.clone, torch.empty_like))
        (received,) = yield (Exchange(sends, receives),)
        for j, q_j in {i: q, **received}.items():
            xhat[j] = xhat[j] + q_j
        x = x + gamma * sum(w[j] * (xhat[j] - xhat[i]) for j in w)
    return x


def top_k(v: Float[Tensor, "d"], k: int) -> Float[Tensor, "d"]:
    """The k elements of largest magnitude; zeros elsewhere."""
    largest = v.abs().topk(k).indices
    return torch.zeros_like(v).index_copy(0, largest, v[largest])


def scaled_sign(v: Float[Tensor, "d"]) -> Float[Tensor, "d"]:
    """|v|_1 / d times the signs. The sign of zero is negative."""
    scale = v.abs().mean(dtype=torch.float64).to(v.dtype)
    return torch.where(v > 0, scale, -scale)
