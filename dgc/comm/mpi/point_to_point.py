"""Point-to-point messages over MPI, for gossip. Another transport, usually Horovod's, carries everything else.

This uses the MPI that Horovod has started with MPI_THREAD_MULTIPLE, on a separate communicator. Messages are
matched by name (the tag) and, under one name, in the order of sending, as MPI guarantees. A flight is complete
when its receives are complete. It does not wait for neighbours to receive, so a slow rank delays only the ranks
that receive from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from zlib import crc32

from torch import Tensor

from dgc.comm.channel import Channel
from dgc.comm.mpi.channel import MPIChannel
from dgc.comm.mpi.runtime import running_mpi
from dgc.comm.requests import Exchange, Group, Reply, Request, as_bytes
from dgc.comm.transport import Transport

LIMIT = 2**31 - 1  # most elements of a message; MPI counts them in a C int


@runtime_checkable
class Grouped(Transport, Protocol):
    def members(self, group: Group) -> list[int]:
        """World ranks of this rank's group of that kind."""
        ...


@dataclass(eq=False)
class PointToPointFlight:
    """Either the inner transport's flight, or pending receives and the replies that they fill."""

    inner: Any
    replies: tuple[Reply, ...]
    receptions: list[Any]


class PointToPoint:
    """A transport that sends Exchange requests over MPI and all others over `inner`. Construction is collective.

    Args:
        inner: Transport that runs on MPI. Its ranks must equal MPI's.

    Raises:
        ValueError: `inner` does not run on MPI, or MPI has no threads, or the rank numbers differ.
    """

    def __init__(self, inner: Grouped):
        MPI = running_mpi()
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.local_rank, self.local_size = inner.local_rank, inner.local_size
        self._MPI, self._communicator = MPI, MPI.COMM_WORLD.Dup()
        if (self._communicator.rank, self._communicator.size) != (self.rank, self.size):
            raise ValueError(
                f"rank {self.rank} of {self.size} is rank {self._communicator.rank} of {self._communicator.size} "
                "to MPI: start all ranks with one mpirun"
            )
        self._tags: int = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        self._names: dict[int, str] = {}
        self._sent: list[tuple[Any, Tensor]] = []  # not known to be complete; MPI reads the tensor until then

    def group_size(self, group: Group) -> int:
        return self.inner.group_size(group)

    def group_rank(self, group: Group) -> int:
        return self.inner.group_rank(group)

    def channel(self) -> Channel:
        return MPIChannel()

    def launch(self, name: str, requests: Sequence[Request]) -> PointToPointFlight:
        if not any(isinstance(request, Exchange) for request in requests):
            return PointToPointFlight(self.inner.launch(name, requests), (), [])
        flight = PointToPointFlight(None, tuple(r.receives for r in requests if isinstance(r, Exchange)), [])
        self._sent = [(sending, tensor) for sending, tensor in self._sent if not sending.Test()]
        for i, request in enumerate(requests):
            if not isinstance(request, Exchange):
                raise ValueError(f"{name}: an Exchange travels with other exchanges alone")
            tag, members = self._tag(f"{name}.{i}"), self.inner.members(request.group)
            empty = {source: counted(into, self._MPI) for source, into in request.receives.items()}
            full = {to: counted(tensor, self._MPI) for to, tensor in request.sends.items()}
            for source, buffer in empty.items():
                flight.receptions.append(self._communicator.Irecv(buffer, members[source], tag))
            for to, buffer in full.items():
                self._sent.append((self._communicator.Isend(buffer, members[to], tag), request.sends[to]))
        return flight

    def poll(self, flight: PointToPointFlight) -> bool:
        if flight.inner is not None:
            return self.inner.poll(flight.inner)
        return bool(self._MPI.Request.Testall(flight.receptions))

    def wait(self, flight: PointToPointFlight) -> tuple[Reply, ...]:
        if flight.inner is not None:
            return self.inner.wait(flight.inner)
        self._MPI.Request.Waitall(flight.receptions)
        return flight.replies

    def _tag(self, name: str) -> int:
        tag = crc32(name.encode()) % self._tags
        if self._names.setdefault(tag, name) != name:
            raise ValueError(f"messages {name!r} and {self._names[tag]!r} would have one MPI tag: rename one")
        return tag


def counted(tensor: Tensor, MPI: Any) -> list[Any]:
    """Return MPI's buffer description of a contiguous tensor.

    MPI counts 4-byte units if the number of bytes is a multiple of 4, which allows larger messages, else bytes.

    Raises:
        ValueError: The tensor is too large for one message.
    """
    content = as_bytes(tensor).numpy()
    each, kind = (1, MPI.BYTE) if content.size % 4 else (4, MPI.INT32_T)
    if content.size > each * LIMIT:
        raise ValueError(
            f"a message of {content.size} bytes: MPI carries at most {LIMIT}, or {4 * LIMIT} if 4 divides them. "
            "Gossip about a smaller model, or with messages of fewer bytes"
        )
    return [content, content.size // each, kind]
