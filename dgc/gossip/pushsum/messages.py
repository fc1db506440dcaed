"""Messages of push-sum: an encoded share of x, followed by the share of w."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from dgc.gossip.formats import Bytes, Message, Vector
from dgc.memory.state import check_tensor

WEIGHT = 8  # bytes of an fp64 number


@dataclass(frozen=True, eq=False)
class Heard:
    """A neighbour's share of its x and w."""

    x: Tensor
    w: float


def length(message: Message, n: int, weighted: bool) -> int:
    """Bytes of a parcel."""
    return message.nbytes(n) + (WEIGHT if weighted else 0)


def pack(message: Message, z: Vector, factor: float, weighted: bool) -> tuple[Bytes, Vector]:
    """Encodes factor * z and, if weighted, appends factor as the share of w. Returns (parcel, decoded vector)."""
    body = message.nbytes(z.numel())
    parcel = torch.empty(length(message, z.numel(), weighted), dtype=torch.uint8, device=z.device)
    said = message.encode_(z, factor, parcel[:body])
    if weighted:
        parcel[body:].copy_(bytes_of_weight(torch.tensor(factor, dtype=torch.float64)))
    return parcel, said


def unpack(message: Message, parcel: Bytes, n: int, w: float | None) -> Heard:
    """Decodes a parcel. w: the weight, if the parcel has none."""
    body = message.nbytes(n)
    return Heard(message.decode(parcel[:body], n), float(weight_of(parcel)) if w is None else w)


def bytes_of_weight(w: Float64[Tensor, ""]) -> Bytes:
    return w.view(1).view(torch.uint8)


def weight_of(parcel: Bytes) -> Float64[Tensor, ""]:
    """The weight at the end of a parcel. The bytes are copied, because they may be unaligned."""
    return parcel[-WEIGHT:].cpu().clone().view(torch.float64)[0]


def state_of(heard: Mapping[int, Heard], rank: int, size: int) -> dict[str, Any]:
    """The state for a checkpoint, by distance from the sender.

    On most graphs the distances are the same on all ranks, so another number of ranks can load the state.
    """
    return {
        str((source - rank) % size): {"x": share.x.clone(), "w": torch.tensor(share.w, dtype=torch.float64)}
        for source, share in heard.items()
    }


def heard_of(state: Mapping[str, Any], rank: int, size: int, z: Vector) -> dict[int, Heard]:
    """The inverse of `state_of`: by sender, on the device of the model z.

    Raises:
        ValueError: if the state is not finite, or of another model.
    """
    for share in state.values():
        check_tensor("heard x", share["x"], z.shape)
        check_tensor("heard w", share["w"], (), torch.float64)
    return {
        (rank + int(distance)) % size: Heard(share["x"].to(z.device), float(share["w"]))
        for distance, share in state.items()
    }
