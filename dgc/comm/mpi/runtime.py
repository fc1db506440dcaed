"""The MPI that Horovod has started. No other file imports mpi4py."""

from typing import Any


def running_mpi() -> Any:
    """Return mpi4py's MPI as Horovod started it.

    Raises:
        ValueError: mpi4py is missing, MPI is not running, or it was started without threads.
    """
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
