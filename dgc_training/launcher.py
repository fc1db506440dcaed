"""Rank and size of this process from the launcher's environment variables, before a transport exists."""

import os
import sys
import time

# Names of rank and size by launcher: mpirun, horovodrun over Gloo, an MPI that srun or Hydra starts through PMI,
# torchrun (which `dgc.comm.launch` refuses with one message), and srun alone. With SLURM the size is that of the
# job step: the batch script also has SLURM_PROCID and SLURM_NTASKS but is not a rank, and srun may start fewer
# tasks than the job allows.
LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


def _launched() -> tuple[int, int]:
    """Rank and size from the first launcher that sets both. Values of two launchers are never combined."""
    for names in LAUNCHERS:
        rank, size = (os.environ.get(name, "") for name in names)
        if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
            return int(rank), int(size)
    return 0, 1


def launched_rank() -> int:
    """The rank of this process; 0 without a launcher."""
    return _launched()[0]


def launched_size() -> int:
    """The number of ranks started; 1 without a launcher."""
    return _launched()[1]


def print_error(message: str, delay: float = 15.0) -> int:
    """Prints to stderr why nothing was started, and returns exit status 2.

    Usually every rank fails with the same message, and the launcher ends the others once rank 0 has exited. If
    rank 0 does not fail (a file is missing on one machine), the others print after `delay` seconds.
    """
    rank = launched_rank()
    if rank:
        time.sleep(delay)
        message = f"[rank {rank}] {message}"
    print(message, file=sys.stderr, flush=True)
    return 2
