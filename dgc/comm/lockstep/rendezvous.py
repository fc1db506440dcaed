"""Collectives in one process: the replies are computed from the requests of all ranks, in rank order."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dgc.comm.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    Op,
    ReduceScatter,
    Reply,
    Request,
)

HINT = "; give every rank the same settings, and call begin_epoch(epoch) with the same epoch on every rank"


class LockstepError(RuntimeError):
    """The requests of ranks do not match, or a request is missing."""


@torch.no_grad()
def invalidate(launched: Iterable[Request]) -> None:
    """Fill launched floating-point tensors with NaN, because a transport may overwrite them."""
    for request in launched:
        for tensor in request.sends.values() if isinstance(request, Exchange) else (request.tensor,):
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))


def check_places(name: str, group: str, places: Mapping[int, Sequence[int]]) -> None:
    """Check that the ranks of a group have sent their requests to it at the same places among all requests.

    Transports name a request by its place.

    Raises:
        LockstepError: A place differs. The message names both ranks.
    """
    (first, expected), *others = places.items()
    for rank, own in others:
        if len(own) != len(expected):
            raise LockstepError(
                f"{name}: ranks sent different numbers of requests: rank {rank} sent {len(own)} to the group "
                f"{group!r}, rank {first} sent {len(expected)}{HINT}"
            )
        if own != expected:
            raise LockstepError(
                f"{name}: requests to the group {group!r} are at the places {own} of rank {rank}, and {expected} "
                f"of rank {first}"
            )


def check_agreement(name: str, requests: Mapping[int, Request]) -> None:
    """Check that the requests of a group's ranks match.

    Kind, dtype, operation and root must be equal, and the shape if the kind requires it.

    Raises:
        LockstepError: A request differs. The message names both ranks.
    """
    (first, expected), *others = ((rank, _signature(request)) for rank, request in requests.items())
    for rank, signature in others:
        if signature != expected:
            raise LockstepError(f"{name}: rank {rank} sent {signature}, rank {first} sent {expected}{HINT}")


def _signature(request: Request) -> tuple[object, ...]:
    """The properties that must be equal on all ranks."""
    kind = (type(request).__name__, request.group)
    match request:
        case AllReduce(tensor, op) | ReduceScatter(tensor, op):
            return (*kind, tuple(tensor.shape), tensor.dtype, op)
        case AllGather(tensor):
            return (*kind, tuple(tensor.shape), tensor.dtype)
        case Broadcast(tensor, root):
            return (*kind, tuple(tensor.shape), tensor.dtype, root)
        case AllToAll(tensor):
            return (*kind, tensor.dtype)
        case Exchange():
            return kind


def reduce_in_order(tensors: Sequence[Tensor], op: Op) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        if op in ("mean", "sum"):
            total += tensor
        else:
            total = torch.minimum(total, tensor) if op == "min" else torch.maximum(total, tensor)
    return total / len(tensors) if op == "mean" else total


def execute(requests: Sequence[Any]) -> list[Reply]:
    """Return the replies to one request of each rank, ordered by rank in the group."""
    size = len(requests)
    match requests[0]:
        case AllReduce(_, op):
            total = reduce_in_order([r.tensor for r in requests], op)
            return [total.clone() for _ in requests]
        case AllGather():
            return [tuple(r.tensor.clone() for r in requests) for _ in requests]
        case ReduceScatter(_, op):
            total = reduce_in_order([r.tensor for r in requests], op)
            if total.numel() % size:
                raise LockstepError(f"{total.numel()} elements cannot be scattered over {size} ranks")
            return [share.clone() for share in total.chunk(size)]
        case Broadcast(_, root):
            return [requests[root].tensor.clone() for _ in requests]
        case AllToAll():
            shares = [r.tensor.split(list(r.splits)) for r in requests]
            for to, request in enumerate(requests):
                for source, expected in enumerate(request.expected):
                    if (sent := shares[source][to].numel()) != expected:
                        raise LockstepError(
                            f"rank {source} sends {sent} elements to rank {to}, which expects {expected}{HINT}"
                        )
            return [tuple(shares[source][to].clone() for source in range(size)) for to in range(size)]
        case Exchange():
            for to, request in enumerate(requests):
                for source in range(size):
                    if (to in requests[source].sends) != (source in request.receives):
                        raise LockstepError(f"rank {source}'s sends and rank {to}'s receives do not match")
            for to, request in enumerate(requests):
                for source, buffer in request.receives.items():
                    sent = requests[source].sends[to]
                    if (buffer.shape, buffer.dtype) != (sent.shape, sent.dtype):
                        raise LockstepError(
                            f"rank {source} sends {tuple(sent.shape)} {sent.dtype} to rank {to}, which expects "
                            f"{tuple(buffer.shape)} {buffer.dtype}"
                        )
                    buffer.copy_(sent)
            return [request.receives for request in requests]
    raise AssertionError(requests[0])
