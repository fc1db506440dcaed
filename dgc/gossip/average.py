"""Averages of any tensor by gossip, without training. In each round a rank exchanges with a few peers.

With P the mixing matrix of a round (`dgc.gossip.topology`), value x and push-sum weight w, initially 1, on
rank i:

    push-sum    x_i = sum over j of P_ij x_j;  w_i = sum over j of P_ij w_j;  z_i = x_i / w_i
                (Kempe, Dobra, Gehrke 2003; Assran et al. 2019, arXiv 1811.10792, Algorithm 1)
    push-pull   x_i = sum over j of P_ij x_j; the rows of P must sum to one as well

The columns of P sum to one. The sums of x and of w over the ranks are therefore preserved, and every z_i converges
to the mean. Push-sum always sends the weight, 8 bytes after x, and works on any graph.

Payload of a rank and round in bytes: number of peers times (24, bytes of x, and 8 for a weight, rounded up to 8).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from dgc.comm.requests import Conversation, as_bytes
from dgc.gossip.messages import WEIGHT_NBYTES, exchange, message_of, weight_from_bytes, weight_to_bytes
from dgc.gossip.topology import Mixing, Topology, uniform


class PushSum(NamedTuple):
    """State of push-sum on one rank. x: the biased value, any shape and floating-point dtype. w: fp64 scalar."""

    x: Tensor
    w: Float64[Tensor, ""]

    @property
    def z(self) -> Tensor:
        """The de-biased value."""
        return self.x / self.w.to(self.x.device, self.x.dtype)


def initial_state(x: Tensor) -> PushSum:
    check_floating_point(x)
    return PushSum(x, torch.ones((), dtype=torch.float64))


def check_floating_point(x: Tensor) -> None:
    if not x.is_floating_point():
        raise ValueError(f"gossip averages floating-point numbers, not {x.dtype}: their shares would be rounded")


def push_sum_round(
    state: PushSum, rank: int, round: int, topology: Topology, mixing: Mixing = uniform
) -> Conversation[PushSum]:
    """One round of push-sum. `state` is not changed. Values are added in rank order, including this rank's.

    Args:
        state (PushSum): this rank's state.
        rank (int): this rank.
        round (int): number of the round.
        topology (Topology): graph.
        mixing (Mixing): shares; default `uniform`.
    """
    shares = mixing(topology, rank, round)
    sent = {to: PushSum(state.x * share, state.w * share) for to, share in shares.items()}
    packed = {to: _pack(part) for to, part in sent.items()}
    sends = {to: message for to, message in packed.items() if to != rank}
    received = yield from _exchange(sends, packed[rank], topology, rank, round)
    parts = {source: _unpack(message, state.x) for source, message in received.items()} | {rank: sent[rank]}
    first, *rest = (parts[source] for source in sorted(parts))
    x, w = first.x.clone(), first.w.clone()
    for part in rest:
        x += part.x
        w += part.w
    return PushSum(x, w)


def push_sum_average(
    x: Tensor, rounds: int, rank: int, topology: Topology, mixing: Mixing = uniform, first: int = 0
) -> Conversation[Tensor]:
    """Returns z after some rounds of push-sum.

    Args:
        x (Tensor): this rank's value, of a floating-point dtype.
        rounds (int): number of rounds.
        rank (int): this rank.
        topology (Topology): graph.
        mixing (Mixing): shares; default `uniform`.
        first (int): number of the first round.

    Raises:
        ValueError: if x is not of a floating-point dtype.
    """
    state = initial_state(x)
    for round in range(first, first + rounds):
        state = yield from push_sum_round(state, rank, round, topology, mixing)
    return state.z


def push_pull_average(
    x: Tensor, rounds: int, rank: int, topology: Topology, mixing: Mixing = uniform, first: int = 0
) -> Conversation[Tensor]:
    """Returns x after some rounds of push-pull. It converges to the mean if
    `check_mixing(topology, mixing, doubly_stochastic=True)` passes.

    Args and errors are those of `push_sum_average`.
    """
    check_floating_point(x)
    for round in range(first, first + rounds):
        shares = mixing(topology, rank, round)
        sends = {to: (x * share).reshape(-1) for to, share in shares.items() if to != rank}
        received = yield from _exchange(sends, x.reshape(-1), topology, rank, round)
        others = {source: message.clone().view(x.dtype).view(x.shape) for source, message in received.items()}
        parts = others | {rank: x * shares[rank]}
        parts_in_order = [parts[source] for source in sorted(parts)]
        x = parts_in_order[0].clone()
        for part in parts_in_order[1:]:
            x += part
    return x


def _exchange(
    sends: dict[int, Tensor], like: Tensor, topology: Topology, rank: int, round: int
) -> Conversation[dict[int, Tensor]]:
    """Returns the bytes of the received tensors by sender. like: a tensor of their size and dtype."""
    messages = {to: message_of(tensor) for to, tensor in sends.items()}
    sizes = dict.fromkeys(topology.in_peers(rank, round), like.numel() * like.element_size())
    return (yield from exchange(messages, sizes, "a message of an average", like))


def _pack(part: PushSum) -> Tensor:
    return torch.cat([as_bytes(part.x.contiguous()), weight_to_bytes(part.w).to(part.x.device)])


def _unpack(message: Tensor, like: Tensor) -> PushSum:
    return PushSum(message[:-WEIGHT_NBYTES].clone().view(like.dtype).view(like.shape), weight_from_bytes(message))
