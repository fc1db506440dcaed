"""The interface of a transport, which carries messages between ranks.

Implementations use Horovod, MPI, torch.distributed, or N simulated ranks in one process.

Horovod and MPI match the requests of different ranks by name. torch.distributed matches the collectives of a
process group by the order in which they are launched. An algorithm works with all of them if every rank launches
the collectives of a communicator in the same order. A communicator is a sequence of requests with an order of its
own, as in MPI. A request whose place among the others depends on timing is launched on a separate one. An Exchange
is matched by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from dgc.comm.requests import Group, Reply, Request, between_machines


@runtime_checkable
class Transport(Protocol):
    """Carries requests between ranks. A name may be reused once `wait` has returned for its work."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...

    @property
    def timeout(self) -> float | None:
        """Seconds that the program gave for operations that some ranks never join. None: it gave none."""
        ...

    @property
    def point_to_point(self) -> bool:
        """Whether an Exchange, also of tensors of the transport's own device, goes straight from rank to rank."""
        ...

    def group_size(self, group: Group) -> int:
        """Number of ranks in this rank's group of that kind."""
        ...

    def group_rank(self, group: Group) -> int:
        """This rank's number within its group of that kind."""
        ...

    def open_communicator(self, communicator: str, kinds: Sequence[Group] | None = None) -> None:
        """Prepare a communicator. Collective. The default communicator, "", is always open.

        kinds: The groups in which it will have requests. None: all groups.
        """
        ...

    def launch(self, name: str, requests: Sequence[Request], communicator: str = "") -> Any:
        """Start the requests on a communicator and return a work without blocking."""
        ...

    def poll(self, work: Any) -> bool:
        """Whether `wait` would return without blocking."""
        ...

    def wait(self, work: Any) -> tuple[Reply, ...]:
        """Block until the replies are there and return them in the order of the requests. Call once per work."""
        ...


class GroupedTransport(ABC):
    """Base class of transports that list the ranks of each group, and need no preparation of communicators."""

    rank: int
    timeout: float | None = None

    @abstractmethod
    def members(self, group: Group) -> list[int]:
        """World ranks of this rank's group of that kind."""

    def group_size(self, group: Group) -> int:
        return len(self.members(group))

    def group_rank(self, group: Group) -> int:
        return self.members(group).index(self.rank)

    def open_communicator(self, communicator: str, kinds: Sequence[Group] | None = None) -> None:
        """Communicators have no effect where requests are matched by name."""
        return None


class Groups:
    """The groups of a rank, by the ranks of each machine. Machines may have different numbers of ranks.

    across: The groups between machines. None: of the ranks with one local rank.
    """

    def __init__(self, rank: int, machines: list[list[int]], across: list[list[int]] | None = None):
        if across is None:
            local_ranks = range(max(map(len, machines)))
            across = [[ranks[i] for ranks in machines if i < len(ranks)] for i in local_ranks]
        world = [sorted(rank for ranks in machines for rank in ranks)]
        self.partition: dict[Group, list[list[int]]] = {"world": world, "local": machines, "cross": across}
        self.members = {kind: next(ranks for ranks in of if rank in ranks) for kind, of in self.partition.items()}


class WrappingTransport:
    """Base class of transports that send over another one, `inner`."""

    def __init__(self, inner: Transport):
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.local_rank, self.local_size = inner.local_rank, inner.local_size
        self.timeout, self.point_to_point = inner.timeout, inner.point_to_point

    def group_size(self, group: Group) -> int:
        return self.inner.group_size(group)

    def group_rank(self, group: Group) -> int:
        return self.inner.group_rank(group)

    def open_communicator(self, communicator: str, kinds: Sequence[Group] | None = None) -> None:
        self.inner.open_communicator(communicator, kinds)


class CrossMachineTransport(WrappingTransport):
    """A transport between the ranks of one local rank, one on each machine, which are its world.

    `inner` connects all ranks, with groups between machines. They share its communicators.
    """

    def __init__(self, inner: Transport):
        super().__init__(inner)
        self.rank, self.size = inner.group_rank("cross"), inner.group_size("cross")
        self.local_rank, self.local_size = 0, 1

    def group_size(self, group: Group) -> int:
        return self.size

    def group_rank(self, group: Group) -> int:
        return self.rank

    def open_communicator(self, communicator: str, kinds: Sequence[Group] | None = None) -> None:
        self.inner.open_communicator(communicator, ("cross",))

    def launch(self, name: str, requests: Sequence[Request], communicator: str = "") -> Any:
        return self.inner.launch(name, [between_machines(request) for request in requests], communicator)

    def poll(self, work: Any) -> bool:
        return self.inner.poll(work)

    def wait(self, work: Any) -> tuple[Reply, ...]:
        return self.inner.wait(work)
