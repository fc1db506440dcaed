"""Requests: the collective operations that an algorithm can use.

An algorithm is a generator. It yields a tuple of requests, is resumed with the replies in the same order, and
returns its result. It does not depend on the transport. It can also yield a `Read` of numbers on its device.

After a request is launched, its tensor belongs to the transport, which may store the reply in it. Each request
names a group: `world` is all ranks, `local` the ranks of this machine, `cross` the ranks with this local rank.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

Group = Literal["world", "local", "cross"]
Op = Literal["mean", "sum", "min", "max"]
HOST = "cpu"


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Reduce tensors of one shape and dtype. Reply: the element-wise `op` of the group's tensors."""

    tensor: Tensor
    op: Op = "mean"
    group: Group = "world"


@dataclass(frozen=True, eq=False)
class AllGather:
    """Gather one-dimensional tensors of one length. Reply: a tuple of all of them, by rank in the group.

    into: memory for the whole reply on the tensor's device, which a transport may use.
    """

    tensor: Tensor
    group: Group = "world"
    into: Tensor | None = None


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Send the first `splits[0]` elements to rank 0, and so on. Reply: a tuple of the received parts, by rank.

    Args:
        tensor: One-dimensional tensor of sum(splits) elements.
        splits: Number of elements for each rank of the group.
        receives: Number of elements that each rank sends to this one. None: as in `splits`.
        into: As in AllGather.
    """

    tensor: Tensor
    splits: tuple[int, ...]
    group: Group = "world"
    receives: tuple[int, ...] | None = None
    into: Tensor | None = None

    @property
    def expected(self) -> tuple[int, ...]:
        return self.splits if self.receives is None else self.receives


@dataclass(frozen=True, eq=False)
class ReduceScatter:
    """Reduce a one-dimensional tensor whose length the group's size divides. Reply: this rank's share of it."""

    tensor: Tensor
    op: Op = "mean"
    group: Group = "world"


@dataclass(frozen=True, eq=False)
class Broadcast:
    """Broadcast a tensor. Reply: `root`'s tensor; `root` counts within the group."""

    tensor: Tensor
    root: int = 0
    group: Group = "world"


@dataclass(frozen=True, eq=False)
class Exchange:
    """Send one-dimensional contiguous tensors to some ranks and receive one from each rank in `receives`.

    Reply: a dict by sender. A point-to-point transport waits only for the ranks in `receives`.

    Args:
        sends: Tensors by receiving rank.
        receives: By sender, a tensor of the expected length and dtype. The transport may use its memory.
    """

    sends: dict[int, Tensor]
    receives: dict[int, Tensor]
    group: Group = "world"


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a uint8 view of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


Request: TypeAlias = AllReduce | AllGather | AllToAll | ReduceScatter | Broadcast | Exchange
Reply: TypeAlias = Any  # Tensor, tuple[Tensor, ...] or dict[int, Tensor], depending on the request


def reply_of_one(request: Request) -> Reply:
    """Return the reply to a request other than an Exchange in a group of one rank, where nothing is sent."""
    assert not isinstance(request, Exchange)
    return (request.tensor,) if isinstance(request, (AllGather, AllToAll)) else request.tensor


@dataclass(frozen=True, eq=False)
class Read:
    """Copy numbers from the device to the host. Reply: a list of them. No other rank takes part."""

    numbers: Tensor


T = TypeVar("T")
# replies: a tuple[Reply, ...] to requests, a list to a Read
Conversation: TypeAlias = Generator[tuple[Request, ...] | Read, Any, T]


def is_on_host(tensor: Tensor) -> bool:
    """Whether the host can read a tensor without waiting for a device."""
    return tensor.device.type == HOST


def on_host(numbers: Sequence[Any] | Tensor) -> list[int] | None:
    """Return the values of numbers, scalars or a tensor, that are in host memory. None: they are on a device."""
    if isinstance(numbers, Tensor):
        return numbers.tolist() if is_on_host(numbers) else None
    if not numbers or not isinstance(numbers[0], Tensor) or is_on_host(numbers[0]):
        return list(map(int, numbers))
    return None


def together(numbers: Sequence[Any] | Tensor) -> Tensor:
    """Return numbers on a device as one tensor, because each copy to the host waits."""
    return numbers if isinstance(numbers, Tensor) else torch.stack([scalar.int() for scalar in numbers])


def read(numbers: Sequence[Any] | Tensor) -> Conversation[list[int]]:
    """Return the values of numbers, scalars or a tensor. Those on a device are read together, by one `Read`."""
    known = on_host(numbers)
    if known is None:
        known = yield Read(together(numbers))
    assert known is not None
    return known


def next_requests(
    conversation: Conversation[Any], replies: tuple[Reply, ...] | None = None
) -> tuple[Request, ...]:
    """Continue a conversation, or start it, and wait for what it reads. Raises StopIteration at its end."""
    requests = conversation.send(replies)
    while isinstance(requests, Read):
        requests = conversation.send(requests.numbers.tolist())
    return requests


def between_machines(request: Request) -> Request:
    """Return a request of the group `world` for the group `cross`."""
    assert request.group == "world", "an algorithm that runs between machines may use only the group `world`"
    return replace(request, group="cross")
