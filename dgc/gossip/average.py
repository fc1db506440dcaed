"""Averages of any tensor by gossip, without training. In each round a rank exchanges with a few peers.

P is the mixing matrix of a round (`dgc.gossip.topology`). Rank i has a value x and a weight w, initially 1:

    push-sum    x_i = sum over j of P_ij x_j;  w_i = sum over j of P_ij w_j;  z_i = x_i / w_i
                (Kempe, Dobra, Gehrke 2003; Assran et al. 2019, arXiv 1811.10792, Algorithm 1)
    push-pull   x_i = sum over j of P_ij x_j; the rows of P must sum to one as well

The columns of P sum to one. The sums of x and of w over the ranks are therefore preserved, and every z_i converges
to the mean.

Payload of a rank and round in bytes: number of peers times (24, bytes of x, and 8 for a weight, rounded up to 8).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from dgc.comm.requests import Conversation, as_bytes
from dgc.gossip.messages import WEIGHT_NBYTES, blank, exchange, weight_of
from dgc.gossip.topology import Mixing, Topology, uniform


class PushSum(NamedTuple):
    """State of push-sum on one rank. x: the biased value, any shape and floating-point dtype. w: fp64 scalar."""

    x: Tensor
    w: Float64[Tensor, ""]

    @property
    def z(self) -> Tensor:
        return self.x / self.w.to(self.x.device, self.x.dtype)


def initial_state(x: Tensor) -> PushSum:
    """The state before the first round."""
    if not x.is_floating_point():
        raise ValueError(f"gossip averages floating-point numbers, not {x.dtype}: their shares would be rounded")
    return PushSum(x, torch.ones((), dtype=torch.float64))


def push_sum_round(
    state: PushSum, rank: int, round: int, topology: Topology, mixing: Mixing = uniform, weighted: bool = True
) -> Conversation[PushSum]:
    """One round of push-sum, or of push-pull, which has no weights. Values are added in rank order."""
    parts = {to: PushSum(state.x * share, state.w * share) for to, share in mixing(topology, rank, round).items()}
    end = state.x.numel() * state.x.element_size()
    nbytes = end + (WEIGHT_NBYTES if weighted else 0)
    own, messages = parts.pop(rank), {}
    for to, part in parts.items():
        messages[to], content = blank(nbytes, state.x)
        content[:end].copy_(as_bytes(part.x.contiguous()))
        if weighted:
            content[end:].copy_(as_bytes(part.w))
    sizes = dict.fromkeys(topology.in_peers(rank, round), nbytes)
    contents = yield from exchange(messages, sizes, "a message of an average", state.x)
    parts = {rank: own}
    for source, content in contents.items():
        x = content[:end].clone().view(state.x.dtype).view(state.x.shape)
        parts[source] = PushSum(x, weight_of(content) if weighted else state.w)
    first, *rest = (parts[source] for source in sorted(parts))
    x, w = first.x.clone(), first.w.clone()
    for part in rest:
        x += part.x
        w += part.w
    return PushSum(x, w)


def push_sum_average(
    x: Tensor, rounds: int, rank: int, topology: Topology, mixing: Mixing = uniform
) -> Conversation[Tensor]:
    """Returns z after some rounds of push-sum, which begins with this rank's value x.

    Raises:
        ValueError: if x is not of a floating-point dtype.
    """
    state = initial_state(x)
    for round in range(rounds):
        state = yield from push_sum_round(state, rank, round, topology, mixing)
    return state.z


def push_pull_average(
    x: Tensor, rounds: int, rank: int, topology: Topology, mixing: Mixing = uniform
) -> Conversation[Tensor]:
    """Returns x after some rounds of push-pull. Arguments and errors are the same as for `push_sum_average`.

    It converges to the mean if `check_mixing(topology, mixing, doubly_stochastic=True)` passes.
    """
    state = initial_state(x)
    for round in range(rounds):
        state = yield from push_sum_round(state, rank, round, topology, mixing, weighted=False)
    return state.x
