"""A launcher that Horovod cannot see, such as torchrun, is refused: its processes would train unrelated runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dgc.comm.launch import LaunchError, check_launcher

REPOSITORY = Path(__file__).parents[2]


def test_launchers_that_start_more_ranks_than_horovod_sees_are_refused() -> None:
    refused = [
        ({"WORLD_SIZE": "4", "RANK": "1"}, None, "WORLD_SIZE is 4, but Horovod sees 1 rank.* horovodrun -np 4"),
        ({"WORLD_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "2"}, None, "WORLD_SIZE is 4, but Horovod sees 2 ranks"),
        ({"PMI_SIZE": "4"}, 1, "PMI_SIZE is 4, but Horovod sees 1 rank"),  # the mpirun of another MPI
        ({"SLURM_NTASKS": "8"}, None, "SLURM_NTASKS is 8, .* scripts/slurm.sh .* env -u SLURM_NTASKS"),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4"}, None, "SLURM_STEP_NUM_TASKS is 4, .* srun --mpi"),
        ({"SLURM_STEP_NUM_TASKS": "4", "PMIX_RANK": "0"}, 1, "SLURM_STEP_NUM_TASKS is 4"),
    ]
    for environment, size, message in refused:
        with pytest.raises(LaunchError, match=message):
            check_launcher(environment, size)
    taken = [
        ({}, None),
        ({}, 1),
        ({"WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "four", "SLURM_NTASKS": ""}, None),
        ({"WORLD_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({"WORLD_SIZE": "2"}, 4),
        ({"SLURM_NTASKS": "8", "OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({"SLURM_NTASKS": "8", "OMPI_COMM_WORLD_SIZE": "4"}, 4),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}, 1),  # srun -n 1 --pty bash
        ({"SLURM_STEP_NUM_TASKS": "4", "PMIX_RANK": "0"}, None),  # the number is not in the environment
    ]
    for environment, size in taken:
        check_launcher(environment, size)


def test_a_loop_of_the_users_own_under_torchrun_is_refused_before_horovod_starts() -> None:
    program = """
import horovod.torch as hvd
from dgc.comm.horovod import connect
try:
    connect()
except ValueError as error:
    print(hvd.is_initialized(), error)
"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RANK": "0", "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert re.match("False WORLD_SIZE is 2", done.stdout), done.stdout + done.stderr
