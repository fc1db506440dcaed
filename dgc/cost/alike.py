"""A rank of the last machine, without the others: every reply is as if all ranks did what this one does."""

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
    """A transport without a network. It plans and records what a rank of a cluster would do.

    Replies are not copied: one tensor stands for that of all ranks. A sum is the mean.

    Args:
        size: Number of ranks.
        local_size: Ranks of each machine. It must divide `size`.
        local_rank: Number of the rank on the last machine. None: the last one.

    Raises:
        ValueError: `local_size` does not divide `size`, or no rank has the number `local_rank`.

    Example:
        >>> from dgc.cost import AlikeRanks
        >>> AlikeRanks(size=4096, local_size=8).group_size("cross")
        512
    """

    point_to_point = True

    def __init__(self, size: int, local_size: int = 1, local_rank: int | None = None):
        if size < 1 or local_size < 1 or size % local_size:
            raise ValueError(f"local_size must divide the number of ranks, {size}, but it is {local_size}")
        self.size, self.local_size = size, local_size
        self.local_rank = local_size - 1 if local_rank is None else local_rank
        if not 0 <= self.local_rank < local_size:
            raise ValueError(f"local_rank must be from 0 to {local_size - 1}, not {local_rank}")
        self.rank = size - local_size + self.local_rank
        self._sent: dict[int, Tensor] = {}  # the last message from rank to rank, by length

    def group_size(self, group: Group) -> int:
        return {"world": self.size, "local": self.local_size, "cross": self.size // self.local_size}[group]

    def group_rank(self, group: Group) -> int:
        return {"world": self.rank, "local": self.local_rank, "cross": self.group_size("cross") - 1}[group]

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
        size, rank = self.group_size(request.group), self.group_rank(request.group)
        match request:
            case AllReduce(tensor) | Broadcast(tensor):
                return tensor
            case AllGather(tensor):
                return (tensor,) * size
            case ReduceScatter(tensor):
                return tensor[tensor.numel() // size * rank :][: tensor.numel() // size]
            case AllToAll(tensor, splits):
                own = tensor[sum(splits[:rank]) :][: splits[rank]]
                if any(n != splits[rank] for n in request.expected):
                    raise ValueError("an all-to-all whose parts differ in length cannot be recorded by one rank")
                return (own,) * size
            case Exchange(sends, receives):
                self._sent |= {t.numel(): t for to, t in sends.items() if to != rank}
                missing = sorted(n for n in {t.numel() for t in receives.values()} if n not in self._sent)
                if missing:
                    raise ValueError(
                        f"no message of {missing} elements was sent, so that the reply cannot be made: "
                        "record a power of two of ranks"
                    )
                return {source: self._sent[tensor.numel()] for source, tensor in receives.items()}
