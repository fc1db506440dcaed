"""The interface of a transport, which carries messages between ranks.

Implementations use Horovod, MPI, or N simulated ranks in one process.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from dgc.comm.requests import Group, Reply, Request


@runtime_checkable
class Transport(Protocol):
    """Carries requests between ranks.

    Requests of different ranks are matched by name, not by launch order. A name may be reused once `wait` has
    returned for its flight.
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
        """Start the requests and return a flight without blocking."""
        ...

    def poll(self, flight: Any) -> bool:
        """Whether `wait` would return without blocking."""
        ...

    def wait(self, flight: Any) -> tuple[Reply, ...]:
        """Block until the replies are there and return them in the order of the requests. Call once per flight."""
        ...
