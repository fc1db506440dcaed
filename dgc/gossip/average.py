"""Averages by gossip, of any tensor and without training: each rank talks to a few others in each round.

With P the mixing matrix of a round (`dgc.gossip.mixing`), on rank i with its value x and weight w, at first 1:

    push-sum    x_i = sum over j of P_ij x_j;  w_i = sum over j of P_ij w_j;  z_i = x_i / w_i
                (Kempe, Dobra, Gehrke 2003; Assran et al. 2019, arXiv 1811.10792, Algorithm 1)
    push-pull   x_i = sum over j of P_ij x_j, where the rows of P sum to one as well

The columns of P sum to one, so that the sums of x and of w over the ranks stay what they were, and every z_i tends
to the mean. Push-sum's weight always travels, 8 bytes behind x: any graph will do.

Payload of a rank and round in bytes: the number of its peers times the bytes of x, and 8 for a weight.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from dgc.comm.requests import Conversation, Exchange, as_bytes
from dgc.gossip.mixing import Mixing, uniform
from dgc.gossip.parcels import WEIGHT, bytes_of_weight, weight_of
from dgc.gossip.topology import Topology


class PushSum(NamedTuple):
    """x: the numerator, any shape, a floating-point dtype. w: fp64, of no dimensions."""

    x: Tensor
    w: Float64[Tensor, ""]

    @property
    def z(self) -> Tensor:
        """The de-biased value."""
        return self.x / self.w.to(self.x.device, self.x.dtype)


def begin(x: Tensor) -> PushSum:
    check_real(x)
    return PushSum(x, torch.ones((), dtype=torch.float64))


def check_real(x: Tensor) -> None:
    if not x.is_floating_point():
        raise ValueError(f"gossip averages real numbers, not {x.dtype}: shares of them would be rounded")


def push_sum_round(
    own: PushSum, rank: int, round: int, topology: Topology, mixing: Mixing = uniform
) -> Conversation[PushSum]:
    """One round; `own` is left alone. What is heard is added in the order of ranks, oneself among them."""
    shares = mixing(topology, rank, round)
    sent = {to: PushSum(own.x * share, own.w * share) for to, share in shares.items()}
    packed = {to: _pack(part) for to, part in sent.items()}
    sends = {to: message for to, message in packed.items() if to != rank}
    heard = yield from _exchange(sends, packed[rank], topology, rank, round)
    parts = {source: _unpack(message, own.x) for source, message in heard.items()} | {rank: sent[rank]}
    first, *rest = (parts[source] for source in sorted(parts))
    x, w = first.x.clone(), first.w.clone()
    for part in rest:
        x += part.x
        w += part.w
    return PushSum(x, w)


def push_sum_average(
    x: Tensor, rounds: int, rank: int, topology: Topology, mixing: Mixing = uniform, first: int = 0
) -> Conversation[Tensor]:
    """z after `rounds` rounds, of which the first has the number `first`."""
    own = begin(x)
    for round in range(first, first + rounds):
        own = yield from push_sum_round(own, rank, round, topology, mixing)
    return own.z


def push_pull_average(
    x: Tensor, rounds: int, rank: int, topology: Topology, mixing: Mixing = uniform, first: int = 0
) -> Conversation[Tensor]:
    """x after `rounds` rounds. That this tends to the mean needs `check_mixing(topology, mixing, doubly=True)`."""
    check_real(x)
    for round in range(first, first + rounds):
        shares = mixing(topology, rank, round)
        sends = {to: (x * share).reshape(-1) for to, share in shares.items() if to != rank}
        heard = yield from _exchange(sends, x.reshape(-1), topology, rank, round)
        parts = {source: message.view(x.shape) for source, message in heard.items()} | {rank: x * shares[rank]}
        parts_in_order = [parts[source] for source in sorted(parts)]
        x = parts_in_order[0].clone()
        for part in parts_in_order[1:]:
            x += part
    return x


def _exchange(
    sends: dict[int, Tensor], empty: Tensor, topology: Topology, rank: int, round: int
) -> Conversation[dict[int, Tensor]]:
    """empty: a tensor like those that come."""
    peers = topology.in_peers(rank, round)
    replies = yield (Exchange(sends, {source: torch.empty_like(empty) for source in peers}),)
    heard: dict[int, Tensor] = replies[0]
    return heard


def _pack(part: PushSum) -> Tensor:
    return torch.cat([as_bytes(part.x.contiguous()), bytes_of_weight(part.w).to(part.x.device)])


def _unpack(message: Tensor, like: Tensor) -> PushSum:
    return PushSum(message[:-WEIGHT].clone().view(like.dtype).view(like.shape), weight_of(message))
