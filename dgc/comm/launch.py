"""Check that Horovod sees all processes that a launcher started. With torchrun, for example, it does not."""

from collections.abc import Mapping

# Environment variables with the number of ranks, of launchers that Horovod supports (Open MPI's mpirun, horovodrun
# over Gloo, PMI) and of all launchers
HOROVOD_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE", "PMI_SIZE")
ALL_VARIABLES = (*HOROVOD_VARIABLES, "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


class LaunchError(ValueError):
    """The launcher started more processes than Horovod sees. Each process would train a separate run."""


def check_launcher(environment: Mapping[str, str], size: int | None = None) -> None:
    """Check that Horovod sees all ranks of the launcher.

    Args:
        environment: Environment variables of the process, usually `os.environ`.
        size: Horovod's number of ranks. None before Horovod has started: the number then comes from the
            environment, or is 1 if the environment has none. Under PMIx alone it is not known yet, and nothing is
            checked.

    Raises:
        LaunchError: The launcher started more ranks than Horovod sees.
    """
    found = {name: int(environment[name]) for name in ALL_VARIABLES if environment.get(name, "").isdecimal()}
    supported = [found[name] for name in HOROVOD_VARIABLES if name in found]
    if size is None:
        if not supported and "PMIX_RANK" in environment:
            return
        size = max(supported, default=1)
    names = ["WORLD_SIZE", *HOROVOD_VARIABLES]
    if not supported:  # mpirun may start fewer ranks than the SLURM job has; a step may be smaller
        names.append("SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in found else "SLURM_NTASKS")
    for name in names:
        if (ranks := found.get(name, 0)) > size:
            cure = f"Start the ranks with horovodrun -np {ranks} or mpirun -np {ranks} in place of torchrun"
            if name.startswith("SLURM"):
                cure = f"Start the ranks with scripts/slurm.sh or mpirun -np {ranks}, or srun --mpi=pmix"
            raise LaunchError(
                f"{name} is {ranks}, but Horovod sees {size} rank{'s' * (size > 1)}: each process would train a "
                f"separate run. {cure}. To train on {size} nevertheless: env -u {name}"
            )


def may_span_machines(environment: Mapping[str, str]) -> bool:
    """Whether the launcher may have started ranks on several machines. False only where it is known not to have.

    Args:
        environment: Environment variables of the process, usually `os.environ`.
    """
    for size, local_size in (
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"),
    ):
        if size in environment:
            return environment.get(local_size) != environment[size]
    return "PMI_SIZE" in environment or "PMIX_RANK" in environment
