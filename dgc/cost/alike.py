"""The last of N ranks, without the others: every reply is as if all ranks did what this one does."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dgc.comm.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    Group,
    ReduceScatter,
    Reply,
    Request,
)


class AlikeRanks:
    """A transport without a network. It plans and records what the last rank of a cluster would do.

    Replies are not copied: one tensor stands for that of all ranks. A sum is the mean.

    Args:
        size: Number of ranks.
        local_size: Ranks of each machine. It must divide `size`.

    Raises:
        ValueError: `local_size` does not divide `size`.

    Example:
        >>> from dgc.cost import AlikeRanks
        >>> AlikeRanks(size=4096, local_size=8).group_size("cross")
        512
    """

    point_to_point = True

    def __init__(self, size: int, local_size: int = 1):
        if size < 1 or local_size < 1 or size % local_size:
            raise ValueError(f"local_size must divide the number of ranks, {size}, but it is {local_size}")
        self.size, self.local_size = size, local_size
        self.rank, self.local_rank = size - 1, local_size - 1
        self._sent: dict[int, Tensor] = {}  # the last message from rank to rank, by length

    def group_size(self, group: Group) -> int:
        return {"world": self.size, "local": self.local_size, "cross": self.size // self.local_size}[group]

    def group_rank(self, group: Group) -> int:
        return self.group_size(group) - 1

    def open_lane(self, lane: str) -> None:
        """There is no order to keep."""

    def launch(self, name: str, requests: Sequence[Request], lane: str = "") -> Any:
        return tuple(self.reply(request) for request in requests)

    def poll(self, flight: Any) -> bool:
        return True

    def wait(self, flight: Any) -> tuple[Reply, ...]:
        replies: tuple[Reply, ...] = flight
        return replies

    @property
    def awaited(self) -> int:
        """Bytes of the longest message from rank to rank so far."""
        return max((tensor.nbytes for tensor in self._sent.values()), default=0)

    def reply(self, request: Request) -> Reply:
        """The reply of ranks that all contribute what this rank does.

        Raises:
            ValueError: It is not known, as this rank sends nothing like what it receives.
        """
        size = self.group_size(request.group)
        match request:
            case AllReduce(tensor) | Broadcast(tensor):
                return tensor
            case AllGather(tensor):
                return (tensor,) * size
            case ReduceScatter(tensor):
                return tensor[tensor.numel() // size * (size - 1) :]
            case AllToAll(tensor, splits):
                own = tensor[tensor.numel() - splits[-1] :]
                if any(n != splits[-1] for n in request.expected):
                    raise ValueError("an all-to-all whose parts differ in length cannot be recorded by one rank")
                return (own,) * size
            case Exchange(sends, receives):
                self._sent |= {t.numel(): t for to, t in sends.items() if to != size - 1}
                missing = sorted(n for n in {t.numel() for t in receives.values()} if n not in self._sent)
                if missing:
                    raise ValueError(
                        f"no message of {missing} elements was sent, so that the reply cannot be made: "
                        "record a power of two of ranks"
                    )
                return {rank: self._sent[tensor.numel()] for rank, tensor in receives.items()}
