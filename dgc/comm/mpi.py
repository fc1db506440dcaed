"""Messages from rank to rank over the MPI that Horovod has started. No other file uses mpi4py.

Each transport and each channel has a communicator of its own.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dgc.comm.channel import Channel, MessageTags
from dgc.comm.meeting import named
from dgc.comm.requests import Exchange, Reply, Request, as_bytes
from dgc.comm.transport import Transport, WrappingTransport

MAX_COUNT = 2**31 - 1  # of elements in a message: a C int


@dataclass(eq=False)
class PointToPointWork:
    """Pending receives with the ranks that send, and the replies that they fill."""

    replies: tuple[Reply, ...]
    receives: list[Any] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)


class PointToPointTransport(WrappingTransport):
    """A transport that sends Exchange requests over MPI and all others over `inner`. Construction is collective.

    Messages are matched by name (the tag) and, under one name, in the order of sending. A work is complete when
    its receives are: a slow rank delays only the ranks that receive from it.

    Raises:
        ValueError: As `running_mpi`, or the rank numbers of `inner` differ from MPI's.
    """

    inner: Any  # its `members` lists the ranks of a group, and its `in_vain` says which of them is gone

    def __init__(self, inner: Transport):
        MPI = running_mpi()
        super().__init__(inner)
        self.point_to_point = True
        self._MPI, self._communicator = MPI, MPI.COMM_WORLD.Dup()
        if (self._communicator.rank, self._communicator.size) != (self.rank, self.size):
            raise ValueError(
                f"rank {self.rank} of {self.size} is MPI rank {self._communicator.rank} of "
                f"{self._communicator.size}: start all ranks with one mpirun"
            )
        self._tags = MessageTags(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB))
        self._pending_sends: list[tuple[Any, Tensor]] = []  # MPI may still read their tensors

    def channel(self) -> Channel:
        return MPIChannel()

    def launch(self, name: str, requests: Sequence[Request], communicator: str = "") -> Any:
        if not any(isinstance(request, Exchange) for request in requests):
            return self.inner.launch(name, requests, communicator)
        work = PointToPointWork(tuple(r.receives for r in requests if isinstance(r, Exchange)))
        self._pending_sends = [(sending, tensor) for sending, tensor in self._pending_sends if not sending.Test()]
        for i, request in enumerate(requests):
            if not isinstance(request, Exchange):
                raise ValueError(f"{name}: an Exchange cannot be launched together with requests of other kinds")
            tag, members = self._tags.of(f"{name}.{i}"), self.inner.members(request.group)
            receives = {source: mpi_buffer(tensor, self._MPI) for source, tensor in request.receives.items()}
            sends = {to: mpi_buffer(tensor, self._MPI) for to, tensor in request.sends.items()}
            for source, buffer in receives.items():
                work.receives.append(self._communicator.Irecv(buffer, members[source], tag))
                work.sources.append(members[source])
            for to, buffer in sends.items():
                self._pending_sends.append((self._communicator.Isend(buffer, members[to], tag), request.sends[to]))
        return work

    def poll(self, work: Any) -> bool:
        if not isinstance(work, PointToPointWork):
            return bool(self.inner.poll(work))
        return bool(self._MPI.Request.Testall(work.receives))

    def wait(self, work: Any) -> tuple[Reply, ...]:
        if not isinstance(work, PointToPointWork):
            return tuple(self.inner.wait(work))
        if self.timeout is None:
            self._MPI.Request.Waitall(work.receives)
            return work.replies
        end = time.monotonic() + self.timeout
        while not self._MPI.Request.Testall(work.receives):  # it yields the core, as Waitall does
            if time.monotonic() >= end:
                pairs = zip(work.receives, work.sources, strict=True)
                missing = sorted({source for receive, source in pairs if not receive.Test()})
                raise self.inner.in_vain(missing, f"An Exchange with {named(missing)}")
        return work.replies


def mpi_buffer(tensor: Tensor, MPI: Any) -> list[Any]:
    """Return MPI's description of a contiguous tensor. Raises ValueError if it is too large for a message."""
    content = as_bytes(tensor).numpy()
    # a larger unit allows larger messages
    unit, datatype = (1, MPI.BYTE) if content.size % 4 else (4, MPI.INT32_T)
    if content.size > unit * MAX_COUNT:
        raise ValueError(
            f"a message of {content.size} bytes is too large: MPI carries at most {MAX_COUNT}, or "
            f"{4 * MAX_COUNT} if the number is a multiple of 4. Use a smaller model or message format"
        )
    return [content, content.size // unit, datatype]


class MPIChannel:
    """A `Channel` over MPI, with polling. Construction is collective, and raises what `running_mpi` does.

    Horovod calls MPI from its own thread at any time. After construction, no method blocks inside MPI, so the two
    threads cannot block each other.
    """

    def __init__(self) -> None:
        MPI = running_mpi()
        self._communicator = MPI.COMM_WORLD.Dup()
        # raise errors: by default MPI ends the process without a message
        self._communicator.Set_errhandler(MPI.ERRORS_RETURN)
        self._any = MPI.ANY_SOURCE
        self.rank: int = self._communicator.Get_rank()
        self.size: int = self._communicator.Get_size()

    def isend(self, to: int, message: Tensor, tag: int) -> Any:
        return self._communicator.Isend(message.numpy(), dest=to, tag=tag)

    def irecv(self, buffer: Tensor, tag: int) -> Any:
        return self._communicator.Irecv(buffer.numpy(), source=self._any, tag=tag)

    def test(self, handle: Any) -> bool:
        return bool(handle.Test())


def running_mpi() -> Any:
    """Return mpi4py's MPI as Horovod started it. Raises ValueError if there is none, or it has no threads."""
    cure = "start the ranks with mpirun or horovodrun --mpi, and let Horovod and mpi4py use one MPI"
    try:
        import mpi4py
    except ModuleNotFoundError as error:
        raise ValueError(
            f"point-to-point messages need mpi4py, which is not installed ({error}): pip install mpi4py"
        ) from None
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    if not MPI.Is_initialized():
        raise ValueError(f"point-to-point messages need MPI, but this run does not use it (Gloo?): {cure}")
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ValueError(
            "MPI was started without MPI_THREAD_MULTIPLE: unset HOROVOD_MPI_THREADS_DISABLE, and start Horovod "
            "before anything else starts MPI"
        )
    return MPI
