"""Collectives in one process: compute the replies from the requests of all ranks, in rank order."""

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

ADVICE = "; give every rank the same settings, and call begin_epoch(epoch) with the same epoch on every rank"


class LockstepError(RuntimeError):
    """Ranks disagree about a message, or a message is missing."""


@torch.no_grad()
def spoil(launched: Iterable[Request]) -> None:
    """Fill launched floating-point tensors with NaN: they belong to the transport, which may overwrite them."""
    for request in launched:
        for tensor in request.sends.values() if isinstance(request, Exchange) else (request.tensor,):
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))


def check_agreement(name: str, together: Mapping[int, Request], shapes: bool = True) -> None:
    """Check that the ranks' requests match.

    Kind and group must be equal on all ranks. With `shapes`, dtype, operation and root must be equal, too, and
    shape where the kind requires it. Different groups may differ in these.

    Raises:
        LockstepError: A request differs. The message names both ranks.
    """
    (first, wanted), *others = ((rank, _described(request, shapes)) for rank, request in together.items())
    for rank, found in others:
        if found != wanted:
            raise LockstepError(f"{name}: rank {rank} sent {found}, rank {first} sent {wanted}{ADVICE}")


def _described(request: Request, shapes: bool) -> tuple[object, ...]:
    """The properties that must be equal on all ranks."""
    kind = (type(request).__name__, request.group)
    if not shapes:
        return kind
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


def carry(together: Sequence[Any]) -> list[Reply]:
    """Return the replies to one request of each rank, ordered by rank in the group."""
    size = len(together)
    match together[0]:
        case AllReduce(_, op):
            total = reduce_in_order([r.tensor for r in together], op)
            return [total.clone() for _ in together]
        case AllGather():
            return [tuple(r.tensor.clone() for r in together) for _ in together]
        case ReduceScatter(_, op):
            total = reduce_in_order([r.tensor for r in together], op)
            if total.numel() % size:
                raise LockstepError(f"{total.numel()} elements cannot be scattered over {size} ranks")
            return [share.clone() for share in total.chunk(size)]
        case Broadcast(_, root):
            return [together[root].tensor.clone() for _ in together]
        case AllToAll():
            shares = [r.tensor.split(list(r.splits)) for r in together]
            return [tuple(shares[source][to].clone() for source in range(size)) for to in range(size)]
        case Exchange():
            for to, request in enumerate(together):
                for source in range(size):
                    if (to in together[source].sends) != (source in request.receives):
                        raise LockstepError(f"rank {source}'s sends and rank {to}'s receives do not match")
            for to, request in enumerate(together):
                for source, into in request.receives.items():
                    sent = together[source].sends[to]
                    if (into.shape, into.dtype) != (sent.shape, sent.dtype):
                        raise LockstepError(
                            f"rank {source} sends {tuple(sent.shape)} {sent.dtype} to rank {to}, which expects "
                            f"{tuple(into.shape)} {into.dtype}"
                        )
                    into.copy_(sent)
            return [request.receives for request in together]
    raise AssertionError(together[0])
