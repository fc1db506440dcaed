"""Stochastic Gradient Push as its paper writes it: Assran, Loizou, Ballas, Rabbat, ICML 2019, arXiv 1811.10792,
Algorithm 1 (SGP) and Algorithm 2 (overlap SGP). The fast ones are `dgc.gossip.sgp` and `osgp`.

Node i has biased parameters x_i, a weight w_i, at first 1, and the model z_i = x_i / w_i. In step k it sends to
each out-neighbour j the share p_ji of x_i and w_i, and keeps the share p_ii. Its shares sum to one.

    SGP    x_i = x_i - gamma grad(z_i)
           x_i = sum over j of p_ij x_j;   w_i = sum over j of p_ij w_j;   z_i = x_i / w_i
    OSGP   send p_ji x_i, p_ji w_i;        keep x_i = p_ii x_i, w_i = p_ii w_i
           x_i = x_i - gamma grad(z_i)     while messages travel
           receive p_ij x_j, p_ij w_j;     add them to x_i and w_i;                 z_i = x_i / w_i

Differences from the paper: `gradient` may give any optimizer's direction, as momentum. OSGP waits in every step
for the messages of that step, as the authors' program does with synch_freq = 0; there is no other delay here.
`biased` is the paper's ablation of OSGP, without weights: z_i = x_i. NaN and inf in a gradient are not handled.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from dgc.comm.requests import Conversation, Exchange
from dgc.gossip.topology import Mixing, Peers, Shares, Topology

Gradient = Callable[[Tensor, int], Tensor]  # of z and k


def messages(x: Float[Tensor, "d"], w: Tensor, p: Shares, i: int, sources: Peers) -> tuple[Exchange, Exchange]:
    """(p_ji x_i, p_ji w_i) to each out-neighbour j, and as much from each in-neighbour."""
    x_out, w_out = ({j: p[j] * value for j in p if j != i} for value in (x, w))
    x_in, w_in = ({j: torch.empty_like(value) for j in sources} for value in (x, w))
    return Exchange(x_out, x_in), Exchange(w_out, w_in)


def total(parts: dict[int, Tensor]) -> Tensor:
    """In the order of nodes."""
    first, *rest = (parts[j] for j in sorted(parts))
    return sum(rest, first)


def sgp(
    x: Float[Tensor, "d"], gradient: Gradient, gamma: float, topology: Topology, mixing: Mixing, i: int, K: int
) -> Conversation[Tensor]:
    """Algorithm 1 at node i, from x, the same on all nodes, for K steps. Returns z_i."""
    w, z = torch.ones(1, dtype=torch.float64), x
    for k in range(K):
        p = mixing(topology, i, k)
        x = x - gamma * gradient(z, k)
        xs, ws = yield messages(x, w, p, i, topology.in_peers(i, k))
        x = total({i: p[i] * x, **xs})
        w = total({i: p[i] * w, **ws})
        z = x / w.item()
    return z


def osgp(
    x: Float[Tensor, "d"],
    gradient: Gradient,
    gamma: float,
    topology: Topology,
    mixing: Mixing,
    i: int,
    K: int,
    biased: bool = False,
) -> Conversation[Tensor]:
    """Algorithm 2 at node i."""
    w = torch.ones(1, dtype=torch.float64)
    for k in range(K):
        p = mixing(topology, i, k)
        sent = messages(x, w, p, i, topology.in_peers(i, k))
        x, w = p[i] * x, p[i] * w
        z = x if biased else x / w.item()
        x = x - gamma * gradient(z, k)
        xs, ws = yield sent
        x = total({i: x, **xs})
        w = total({i: w, **ws})
    return x if biased else x / w.item()
