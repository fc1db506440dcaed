"""What carries messages between ranks: Horovod, MPI, or N ranks simulated in one process."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from dgc.comm.requests import Group, Reply, Request


@runtime_checkable
class Transport(Protocol):
    """Requests of different ranks meet by name, never by the order of launching.

    A name may be used again as soon as its flight has been waited for.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...

    def group_size(self, group: Group) -> int:
        """Number of ranks in this rank's group of that kind."""
        ...

    def group_rank(self, group: Group) -> int:
        """This rank's number within its group of that kind."""
        ...

    def launch(self, name: str, requests: Sequence[Request]) -> Any:
        """Start the requests and return a flight at once."""
        ...

    def poll(self, flight: Any) -> bool:
        """Whether `wait` would return without waiting."""
        ...

    def wait(self, flight: Any) -> tuple[Reply, ...]:
        """The replies, in the order of the requests. Each flight is waited for once."""
        ...
