"""What is installed, what is wrong, and its cure: python -m dgc.doctor

For the library in any environment; in the repository, `make doctor` looks at the trainer's packages. What loads a
native library runs in a process of its own, so that a library that aborts ends only that one. Nothing that may be
missing is imported here.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, files, version

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
PACKAGES = ("torch", "torchvision", "numpy", "jaxtyping", "horovod", "mpi4py", "triton")
LIMITS_S = (90.0, 300.0)  # of the first attempt and of the second: a busy machine takes longer
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")


@dataclass(frozen=True)
class Probe:
    """The answer of one probe. Without one: the last lines of its error output, or that it took too long."""

    answer: Mapping[str, object] | None = None
    error: str = ""
    timed_out: bool = False

    def cure(self, otherwise: str) -> str:
        """The cure of a time-out, or `otherwise`, that of the error."""
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
    """What the probes have found. Tests construct it directly."""

    versions: Mapping[str, str | None]
    torch: Probe
    other_project: bool = False
    kernels: Probe = Probe()
    adapters: Probe = Probe()
    torchvision: Probe = Probe()
    horovod: Probe = Probe()
    two_ranks: Probe = Probe()


def collect() -> Facts:
    """Runs all probes at the same time (about five seconds)."""

    def probe(code: str, *launcher: str) -> Probe:
        return run_probe([sys.executable, *launcher, *([sys.executable] if launcher else []), "-c", code])

    versions = {name: installed(name) for name in PACKAGES}
    with ThreadPoolExecutor() as pool:  # each thread waits for a process
        ranks = pool.submit(probe, TWO_RANKS, *TORCHRUN)
        torch, kernels, adapters = (pool.submit(probe, code) for code in (TORCH, KERNELS, ADAPTERS))
        horovod, torchvision = (
            Probe() if versions[name] is None else probe(code)
            for name, code in (("horovod", HOROVOD), ("torchvision", TORCHVISION))
        )
    facts = Facts(versions, torch.result(), is_other_project())
    if facts.torch.answer is None:  # the others fail for the same reason
        return facts
    return replace(
        facts,
        kernels=kernels.result(),
        adapters=adapters.result(),
        torchvision=torchvision,
        horovod=horovod,
        two_ranks=ranks.result(),
    )


def problems(facts: Facts) -> Iterator[tuple[str, str]]:
    """Each problem with its cure."""
    if facts.other_project:
        yield (
            "another project of the name dgc is installed, whose folder is also named dgc",
            "pip uninstall dgc, then pip install --force-reinstall --no-deps with the wheel of dgc-torch",
        )
    if facts.torch.answer is None:
        cure = facts.torch.cure("install PyTorch: https://pytorch.org/get-started")
        yield f"PyTorch does not load: {facts.torch.error}", cure
        return
    if facts.kernels.answer is None:
        yield (
            f"the kernels do not load, plain PyTorch takes their place: {facts.kernels.error.splitlines()[-1]}",
            facts.kernels.cure(
                "install a wheel of dgc-torch, or a C++ compiler and run python -m dgc.kernels.build"
            ),
        )
    if facts.adapters.answer is None:
        yield f"the adapters do not load: {facts.adapters.error}", facts.adapters.cure("see the message")
    for name, said in (facts.adapters.answer or {}).items():
        if not str(said).startswith("works"):
            yield f"dgc.{name} does not load: {said}", "install a PyTorch of the range that the message names"
    if facts.versions["torchvision"] is not None and facts.torchvision.answer is None:
        cure = facts.torchvision.cure("install the torchvision that fits torch: https://pytorch.org/get-started")
        reason = facts.torchvision.error.splitlines()[-1]
        yield f"torchvision does not load, which Lightning and transformers import: {reason}", cure
    if facts.versions["horovod"] is not None and facts.horovod.answer is None:
        cure = facts.horovod.cure("reinstall it; under torchrun dgc needs no Horovod")
        yield f"Horovod does not load: {facts.horovod.error}", cure
    ranks = facts.two_ranks.answer
    if ranks is None or (ranks["size"], ranks["sum"]) != (2, 3.0):
        yield (
            f"a test with two ranks under torchrun failed: {facts.two_ranks.error or ranks}",
            facts.two_ranks.cure("if this machine does not find its own name: export GLOO_SOCKET_IFNAME=lo"),
        )


def describe(facts: Facts) -> Iterator[tuple[str, str]]:
    """(name, value) rows of the report."""
    yield "Python", ".".join(map(str, sys.version_info[:3]))
    yield "dgc", f"{dgc.__version__} from {dgc.__path__[0]}"
    for name, number in facts.versions.items():
        yield name, number or "not installed"
    found = facts.torch.answer or {}
    for name, key in (("GPU", "gpus"), ("backends of torch", "backends")):
        values = found.get(key, [])
        assert isinstance(values, list)
        yield name, ", ".join(values) or "none"
    for name, value in (facts.kernels.answer or {"native": "missing"}).items():
        yield f"{name} kernels", str(value)
    for name, value in (facts.adapters.answer or {}).items():
        yield f"dgc.{name}", str(value)
    yield "2 ranks over torch", "work" if (facts.two_ranks.answer or {}).get("sum") == 3.0 else "fail"


def main() -> int:
    """Prints the report. Returns 1 if there is a problem."""
    facts = collect()
    for name, value in describe(facts):
        print(f"{name:20}{value}")
    found = list(problems(facts))
    for problem, cure in found:
        print(f"\nPROBLEM: {problem}\n  cure: {cure}")
    print("" if found else "\nno problems found")
    return 1 if found else 0
