"""What the launcher tells a process about itself, before any transport exists."""

import os
import sys
import time

# Rank and size as each launcher names them: mpirun, horovodrun over Gloo, an MPI that srun or Hydra starts
# through PMI, torchrun (which `dgc.comm.launch` refuses, with one message), and srun alone. SLURM's size is that
# of the step: a job's own script has SLURM_PROCID and SLURM_NTASKS too, but is no rank, and srun may start fewer
# tasks than the job has room for.
LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


def _launched() -> tuple[int, int]:
    """Rank and size from the first launcher that tells both: half of one and half of another would not fit."""
    for names in LAUNCHERS:
        rank, size = (os.environ.get(name, "") for name in names)
        if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
            return int(rank), int(size)
    return 0, 1


def launched_rank() -> int:
    """This process's rank; 0 where no launcher started it."""
    return _launched()[0]


def launched_size() -> int:
    """The number of ranks started; 1 where no launcher started them."""
    return _launched()[1]


def complain(message: str, patience: float = 15.0) -> int:
    """Tells once, on stderr, why nothing was started, and returns exit code 2.

    Usually every rank has the same complaint, and the launcher ends the others once rank 0 has left. A
    complaint that rank 0 does not have (a file missing on one machine) is told after `patience` seconds.
    """
    rank = launched_rank()
    if rank:
        time.sleep(patience)
        message = f"[rank {rank}] {message}"
    print(message, file=sys.stderr, flush=True)
    return 2
