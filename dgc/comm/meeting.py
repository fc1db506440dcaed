"""What becomes of one request of each rank when they meet in one process: the replies, in the order of ranks."""

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
    """Ranks that disagree about a message, or one that never came."""


@torch.no_grad()
def spoil(launched: Iterable[Request]) -> None:
    """NaN into floating-point tensors that were launched: they are the transport's, which may write to them."""
    for request in launched:
        for tensor in request.sends.values() if isinstance(request, Exchange) else (request.tensor,):
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))


def check_agreement(name: str, together: Mapping[int, Request], shapes: bool = True) -> None:
    """Raise unless the ranks' requests are of one kind and group and, if shapes, of one dtype and (where it must
    be) shape, in which groups may differ.
    """
    (first, wanted), *others = ((rank, _described(request, shapes)) for rank, request in together.items())
    for rank, found in others:
        if found != wanted:
            raise LockstepError(f"{name}: rank {rank} sent {found}, rank {first} sent {wanted}{ADVICE}")


def _described(request: Request, shapes: bool) -> tuple[object, ...]:
    """What must be the same on all ranks."""
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
    """The replies, by rank in the group, to one request of each rank."""
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
