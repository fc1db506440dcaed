"""Whether Horovod sees all the processes that a launcher started. It does not see those of torchrun, for one."""

from collections.abc import Mapping

# Variables with the number of ranks of launchers that Horovod works with: Open MPI's mpirun, horovodrun over Gloo,
# PMI. NAMES has those of other launchers too.
SIZES = ("OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE", "PMI_SIZE")
NAMES = (*SIZES, "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


class LaunchError(ValueError):
    """The launcher started more processes than Horovod sees: each would train a run of its own."""


def check_launcher(environment: Mapping[str, str], size: int | None = None) -> None:
    """LaunchError where a launcher started more ranks than Horovod sees.

    Args:
        environment: the process's variables, usually `os.environ`.
        size: Horovod's number of ranks. None before Horovod has started: it is then that of the environment, or 1
            where that has none. Under PMIx alone it cannot be known yet, and nothing is checked.
    """
    found = {name: int(environment[name]) for name in NAMES if environment.get(name, "").isdecimal()}
    known = [found[name] for name in SIZES if name in found]
    if size is None:
        if not known and "PMIX_RANK" in environment:
            return
        size = max(known, default=1)
    names = ["WORLD_SIZE", *SIZES]
    if not known:  # mpirun may start fewer ranks than its SLURM job has tasks; a step's size is not the job's
        names.append("SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in found else "SLURM_NTASKS")
    for name in names:
        if (ranks := found.get(name, 0)) > size:
            cure = f"Start the ranks with horovodrun -np {ranks} or mpirun -np {ranks} in place of torchrun"
            if name.startswith("SLURM"):
                cure = f"Start the ranks with scripts/slurm.sh or mpirun -np {ranks}, or srun --mpi=pmix"
            raise LaunchError(
                f"{name} is {ranks}, but Horovod sees {size} rank{'s' * (size > 1)}: each process would train a "
                f"run of its own. {cure}. If one run on {size} is what you want: env -u {name}"
            )
