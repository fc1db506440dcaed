"""A `Channel` over the MPI that Horovod runs on: messages on a communicator of its own, looked after by polling.

Horovod calls MPI from a thread of its own at any time. Nothing here blocks inside MPI after the start, so that
neither thread can keep the other from what it waits for.
"""

from typing import Any

from torch import Tensor

from dgc.comm.mpi import running_mpi


class MPIChannel:
    """Collective: every rank makes one at the same point of its program.

    ValueError where MPI does not run, as under Horovod's Gloo controller, or not with threads.
    """

    def __init__(self) -> None:
        MPI = running_mpi()
        self._communicator = MPI.COMM_WORLD.Dup()
        # an error is to be raised here, not to end the process without a word
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
