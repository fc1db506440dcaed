"""How this process was started: rank, number of ranks, and the transport that fits, by environment variables.

A launcher (torchrun, mpirun, horovodrun, srun) sets environment variables for the processes that it starts.
Nothing else is imported here, so they are known before PyTorch, Horovod or MPI is loaded.
"""

import os
import re
import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

TRANSPORTS = {"horovod": "Horovod", "torch": "torch.distributed"}
PORTS = range(20000, 30000)  # below the range from which systems take the ports of outgoing connections


class LaunchError(ValueError):
    """The transport does not connect the processes that the launcher started."""


@dataclass(frozen=True)
class Launcher:
    """The names of the environment variables that a launcher sets.

    Args:
        transport: The transport that its ranks use by default.
        rank, size, local_rank, local_size: Rank and number of ranks, in the run and on this machine. Empty: none.
        job: Differs between runs, and is the same on all ranks of one.
        marker: The launcher always sets it. It tells apart launchers that set the same rank and size.
    """

    name: str
    transport: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: str
    marker: str = ""


def _names(prefix: str) -> tuple[str, str, str, str]:
    return f"{prefix}_RANK", f"{prefix}_SIZE", f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE"


TORCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
MPIRUN = Launcher("mpirun", "horovod", *_names("OMPI_COMM_WORLD"), "PMIX_NAMESPACE")
HOROVODRUN = Launcher("horovodrun", "horovod", *_names("HOROVOD"), "HOROVOD_GLOO_RENDEZVOUS_PORT")
SRUN = Launcher("srun", "torch", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_JOB_ID")
BY_HAND = Launcher("RANK and WORLD_SIZE", "torch", *TORCH_NAMES)
# The innermost launcher first. mpirun and srun may start torchrun, once per machine, never the other way round.
# Inside a SLURM job mpirun starts its processes on other machines through srun. RANK and WORLD_SIZE without
# torchrun's marker may have been copied from mpirun's variables. With SLURM the size is the size of the job step:
# the batch script also has SLURM_PROCID and SLURM_NTASKS but is not a rank, and a step may have fewer tasks.
LAUNCHERS = (
    Launcher("torchrun", "torch", *TORCH_NAMES, marker="TORCHELASTIC_RUN_ID"),
    MPIRUN,
    HOROVODRUN,
    Launcher("PMI", "horovod", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID"),
    BY_HAND,
    SRUN,
)
# Variables with the number of ranks of the launchers that Horovod understands, and of all launchers
HOROVOD_VARIABLES = tuple(launcher.size for launcher in LAUNCHERS if launcher.transport == "horovod")
ALL_VARIABLES = (*HOROVOD_VARIABLES, "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


@dataclass(frozen=True)
class Started:
    """A process of a launcher."""

    launcher: Launcher
    rank: int
    size: int


def started_by(environment: Mapping[str, str]) -> Started | None:
    """Return the first launcher that sets both rank and size. Values of two launchers are never combined."""
    for launcher in LAUNCHERS:
        rank, size = environment.get(launcher.rank, ""), environment.get(launcher.size, "")
        marked = not launcher.marker or launcher.marker in environment
        if marked and rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
            return Started(launcher, int(rank), int(size))
    return None


def end_with_launcher(environment: Mapping[str, str], seconds: float = 1.0) -> bool:
    """Start a thread that ends this process when its launcher has been killed, and return whether it did.

    A launcher that is killed with SIGKILL cannot end its ranks, which would hold devices. Without a launcher,
    or where a script has set RANK and WORLD_SIZE, a parent may end before its rank. Process 1 is no launcher.
    """
    started, parent = started_by(environment), os.getppid()
    if started is None or started.launcher is BY_HAND or parent == 1:
        return False
    if started.launcher is SRUN and started.size == 1:  # srun --pty bash
        return False
    # horovodrun --mpi becomes a shell that waits for mpirun
    shell = _parent_of(parent)
    of_horovodrun = started.launcher is MPIRUN and _read(shell, "cmdline").startswith("/bin/sh\0-c\0mpirun ")

    def watch() -> None:
        # PR_SET_PDEATHSIG would end the rank with the thread that started it
        while os.getppid() == parent and (not of_horovodrun or _parent_of(parent) == shell):
            time.sleep(seconds)
        message = f"[rank {started.rank} of {started.size}] ends: its launcher (process {parent}) has ended\n"
        with suppress(OSError):
            os.write(2, message.encode())
        os._exit(1)

    threading.Thread(target=watch, name="dgc-launcher", daemon=True).start()
    return True


def _parent_of(process: int) -> int:
    fields = _read(process, "stat").rpartition(")")[2].split()  # the name in brackets may have spaces
    return int(fields[1]) if fields else 0


def _read(process: int, file: str) -> str:
    """The text of a file of /proc; empty if the process has ended."""
    with suppress(OSError), open(f"/proc/{process}/{file}", errors="replace") as text:
        return text.read()
    return ""


@dataclass(frozen=True)
class Choice:
    """A transport, "horovod" or "torch", and the reason for it."""

    transport: str
    reason: str

    def __str__(self) -> str:
        return f"{TRANSPORTS[self.transport]} ({self.reason})"


def choose(wanted: str, environment: Mapping[str, str], installed: bool, running: str | None = None) -> Choice:
    """Choose a transport: "horovod", "torch", or for "auto" by the other arguments.

    installed: whether Horovod is. running: the transport that this process has initialised already, if any.

    Raises:
        ValueError: `wanted` is none of these.

    Example:
        >>> print(choose("auto", {"RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}, installed=True))
        torch.distributed (started by torchrun)
        >>> print(choose("auto", {}, installed=True))
        Horovod (installed, and there is no launcher)
    """
    if wanted not in ("auto", *TRANSPORTS):
        raise ValueError(f"the transport must be auto, horovod or torch, not {wanted!r}")
    if wanted != "auto":
        return Choice(wanted, "as set")
    if running is not None:
        return Choice(running, "initialised already")
    started = started_by(environment)
    if started is None or (started.launcher is SRUN and started.size == 1):  # srun --pty bash
        transport, reason = "horovod", "installed, and there is no launcher"
    else:
        transport, reason = started.launcher.transport, f"started by {started.launcher.name}"
        if started.launcher is SRUN and "PMIX_RANK" in environment:
            transport, reason = "horovod", "started by srun with PMIx"
    if transport == "horovod" and not installed:
        reason = reason.removeprefix("installed, and ")
        return Choice("torch", f"{reason}; Horovod is not installed: `make setup` builds it")
    return Choice(transport, reason)


def check_restarts(environment: Mapping[str, str]) -> None:
    """Raise LaunchError if torchrun restarts ranks that could not connect again.

    It then keeps one store for all attempts, in which they find the addresses of ranks that have ended.
    """
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    shares_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shares_store and restarts not in ("", "0"):
        raise LaunchError(
            f"torchrun --max-restarts {restarts}: restarted ranks would not connect again (Gloo connectFullMesh "
            "failed, or a wait without end), because torchrun shares one store between all attempts. Set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun on every machine"
        )


def check_launcher(environment: Mapping[str, str], size: int | None = None, transport: str = "horovod") -> None:
    """Check that the transport connects all ranks of the launcher.

    size: the transport's number of ranks. None before it has started: it then comes from the environment, or is 1
    without any. For Horovod under PMIx alone it is not known yet, and nothing is checked.

    Raises:
        LaunchError: The launcher started more ranks than the transport connects, or torchrun may restart ranks
            that could not connect again (`check_restarts`).
    """
    if transport == "torch":
        check_restarts(environment)
    found = {name: int(environment[name]) for name in ALL_VARIABLES if environment.get(name, "").isdecimal()}
    horovod = transport == "horovod"
    supported = [found[name] for name in HOROVOD_VARIABLES if name in found]
    if size is None and horovod:
        if not supported and "PMIX_RANK" in environment:
            return
        size = max(supported, default=1)
    elif size is None:
        started = started_by(environment)
        size = 1 if started is None else started.size
    names = ["WORLD_SIZE", *HOROVOD_VARIABLES]
    # mpirun and torchrun may start fewer ranks than the SLURM job has; a step may be smaller
    if not supported and (horovod or "WORLD_SIZE" not in found):
        names.append("SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in found else "SLURM_NTASKS")
    for name in names:
        if (ranks := found.get(name, 0)) > size:
            raise LaunchError(
                f"{name} is {ranks}, but {TRANSPORTS[transport]} sees {size} rank{'s' * (size > 1)}: each process "
                f"would train a separate run. {_cure(name, ranks, horovod)}. To train on {size} nevertheless: "
                f"env -u {name}"
            )


def _cure(name: str, ranks: int, horovod: bool) -> str:
    slurm = name.startswith("SLURM")
    if not horovod:
        return f"Start the ranks with {f'srun -n {ranks} or ' * slurm}torchrun --nproc-per-node {ranks}"
    if slurm:
        cure = f"Start the ranks with scripts/slurm.sh or mpirun -np {ranks}, or srun --mpi=pmix"
    else:
        cure = f"Start the ranks with horovodrun -np {ranks} or mpirun -np {ranks} in place of torchrun"
    return f"{cure}, or use the transport torch (train.transport) in place of horovod"


def may_span_machines(environment: Mapping[str, str]) -> bool:
    """Whether there may be ranks on several machines. False only where it is known that there are none."""
    for launcher in (MPIRUN, HOROVODRUN):
        if launcher.size in environment:
            return environment.get(launcher.local_size) != environment[launcher.size]
    return "PMI_SIZE" in environment or "PMIX_RANK" in environment


def torch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch.distributed reads, for a process of any launcher.

    MASTER_ADDR and MASTER_PORT are kept if they are set, and derived where that is safe: under srun, and if all
    ranks are on one machine. A single process needs none.

    Raises:
        LaunchError: A variable is not set and cannot be derived.
    """
    started = started_by(environment)
    if started is None or (started.size == 1 and "RANK" not in environment):
        return {}
    launcher = started.launcher
    found = {"RANK": str(started.rank), "WORLD_SIZE": str(started.size)}
    for name, source in (("LOCAL_RANK", launcher.local_rank), ("LOCAL_WORLD_SIZE", launcher.local_size)):
        if environment.get(source, "").isdecimal():
            found[name] = environment[source]
    found |= _address(environment, started, found.get("LOCAL_WORLD_SIZE"))
    found |= {name: environment[name] for name in ("MASTER_ADDR", "MASTER_PORT") if environment.get(name)}
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in found]
    if missing:
        cure = "mpirun -x MASTER_ADDR=server0 -x MASTER_PORT=29500"
        if launcher is not MPIRUN:
            cure = "export MASTER_ADDR=server0 MASTER_PORT=29500"
        raise LaunchError(
            f"{launcher.name} started {started.size} ranks, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. torch.distributed needs the name of the machine of "
            f"rank 0 and a free port of it: {cure}"
        )
    return found


def _address(environment: Mapping[str, str], started: Started, local_size: str | None) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT, as far as they can be derived. Ports of different jobs usually differ."""
    if started.size == 1:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    address, job = "", ""
    if started.launcher is SRUN:
        # the first machine of a list in SLURM's notation: gpu03-ib of gpu[03-05,7]-ib,login1
        first = re.split(r",(?![^\[]*\])", environment.get("SLURM_STEP_NODELIST", ""))[0]
        address = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first) or environment.get("SLURM_LAUNCH_NODE_IPADDR", "")
        job = "".join(environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    elif str(started.size) == local_size:
        address, job = "127.0.0.1", environment.get(started.launcher.job, "")
    port = str(PORTS[zlib.crc32(job.encode()) % len(PORTS)]) if job else ""
    return {name: value for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if value}
