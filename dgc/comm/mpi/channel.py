"""A `Channel` over the MPI that Horovod uses, with a separate communicator and polling.

Horovod calls MPI from its own thread at any time. After construction, no method blocks inside MPI, so the two
threads cannot block each other.
"""

from typing import Any

from torch import Tensor

from dgc.comm.mpi.runtime import running_mpi


class MPIChannel:
    """A channel over MPI. Construction is collective: every rank creates it at the same point of the program.

    Raises:
        ValueError: MPI is not running, as with Horovod's Gloo controller, or it was started without threads.
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
