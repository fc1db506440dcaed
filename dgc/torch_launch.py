"""The environment variables by which torch.distributed finds the other ranks, for each launcher."""

import re
import zlib
from collections.abc import Mapping

from dgc.launch import MPIRUN, SRUN, LaunchError, Started, started_by

PORTS = range(20000, 30000)  # below the range from which systems take the ports of outgoing connections


def torch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch.distributed reads, for a process of any launcher.

    RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are those of the launcher. MASTER_ADDR and MASTER_PORT are
    kept if they are set, and derived where that is safe: under srun, and if all ranks are on one machine. A single
    process needs none.

    Args:
        environment: Environment variables of the process, usually `os.environ`.

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
        address = _first_host(environment.get("SLURM_STEP_NODELIST", ""))
        address = address or environment.get("SLURM_LAUNCH_NODE_IPADDR", "")
        job = "".join(environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    elif str(started.size) == local_size:
        address, job = "127.0.0.1", environment.get(started.launcher.job, "")
    port = str(PORTS[zlib.crc32(job.encode()) % len(PORTS)]) if job else ""
    return {name: value for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if value}


def _first_host(nodes: str) -> str:
    """The first machine of a list in SLURM's notation: gpu03-ib of gpu[03-05,7]-ib,login1."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])
