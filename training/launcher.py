"""What the launcher tells a process about itself, before any transport exists."""

import os
import sys
import time

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "PMI_RANK", "SLURM_PROCID")
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def _first(variables: tuple[str, ...], default: int) -> int:
    for variable in variables:
        value = os.environ.get(variable, "")
        if value.isdecimal():
            return int(value)
    return default


def launched_rank() -> int:
    """This process's rank; 0 where no launcher started it."""
    return _first(RANK_VARIABLES, 0)


def launched_size() -> int:
    """The number of ranks started; 1 where no launcher started them."""
    return _first(SIZE_VARIABLES, 1)


def complain(message: str, patience: float = 5.0) -> int:
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
