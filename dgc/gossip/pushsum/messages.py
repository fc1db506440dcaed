"""Messages of push-sum: an encoded share of x, followed by the share of w."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from dgc.gossip.envelope import blank, content
from dgc.gossip.formats import Bytes, Message, Vector
from dgc.memory.state import check_tensor

WEIGHT_NBYTES = 8  # fp64


@dataclass(frozen=True, eq=False)
class ReceivedShare:
    """A neighbour's share of its x and w."""

    x: Tensor
    w: float


def message_nbytes(encoding: Message, n: int, weighted: bool) -> int:
    """Bytes of the content of a message with n elements."""
    return encoding.nbytes(n) + (WEIGHT_NBYTES if weighted else 0)


def pack(encoding: Message, z: Vector, factor: float, weighted: bool) -> tuple[Bytes, Vector]:
    """Encodes factor * z and, if weighted, appends factor as the share of w.

    Returns (message for `dgc.gossip.envelope.exchange`, decoded vector).
    """
    end, nbytes = encoding.nbytes(z.numel()), message_nbytes(encoding, z.numel(), weighted)
    message = blank(nbytes, z)
    section = content(message, nbytes)
    decoded = encoding.encode_(z, factor, section[:end])
    if weighted:
        section[end:].copy_(weight_to_bytes(torch.tensor(factor, dtype=torch.float64)))
    return message, decoded


def unpack(encoding: Message, message: Bytes, n: int, w: float | None) -> ReceivedShare:
    """Decodes the content of a message. w: the weight, if the message has none."""
    end = encoding.nbytes(n)
    return ReceivedShare(encoding.decode(message[:end], n), float(weight_from_bytes(message)) if w is None else w)


def weight_to_bytes(w: Float64[Tensor, ""]) -> Bytes:
    return w.view(1).view(torch.uint8)


def weight_from_bytes(message: Bytes) -> Float64[Tensor, ""]:
    """The weight at the end of a message. The bytes are copied, because they may be unaligned."""
    return message[-WEIGHT_NBYTES:].cpu().clone().view(torch.float64)[0]


def shares_to_state(shares: Mapping[int, ReceivedShare], rank: int, size: int) -> dict[str, Any]:
    """Converts received shares, by sender, to a state for a checkpoint, by distance from the sender.

    On most graphs the distances are the same on all ranks, so another number of ranks can load the state.
    """
    return {
        str((source - rank) % size): {"x": share.x.clone(), "w": torch.tensor(share.w, dtype=torch.float64)}
        for source, share in shares.items()
    }


def shares_from_state(state: Mapping[str, Any], rank: int, size: int, z: Vector) -> dict[int, ReceivedShare]:
    """The inverse of `shares_to_state`, on the device of the model z.

    Raises:
        ValueError: if the state is not finite, or of another model.
    """
    for distance, share in state.items():
        if share.keys() != {"x", "w"}:
            raise ValueError(f"received {distance} has {sorted(share)}, not ['w', 'x']")
        check_tensor("received x", share["x"], z.shape)
        check_tensor("received w", share["w"], (), torch.float64)
    return {
        (rank + int(distance)) % size: ReceivedShare(share["x"].to(z.device), float(share["w"]))
        for distance, share in state.items()
    }
