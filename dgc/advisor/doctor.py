"""What is installed, what is wrong, and its cure: python -m dgc.doctor

Of the library in any environment, with Horovod and MPI where they are installed; in the repository, also of what
the trainer needs. The exit status is 1 if there is a problem. A note is not a problem: it describes a limitation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import dgc
from dgc.advisor.probes import ROOT_VARIABLES, Facts, Probe, collect

DEMO_RANKS = 4
REQUIRED = ("torch", "numpy", "jaxtyping")
PYTORCH = "https://pytorch.org/get-started"


@dataclass(frozen=True)
class Finding:
    """A problem with its cure, or only a note if `note` is set."""

    problem: str
    cure: str
    note: bool = False


Check = Callable[[Facts], Iterator[Finding]]


def cure_of(facts: Facts, in_checkout: str, elsewhere: str) -> str:
    """The cure in the repository, or where only the library is installed."""
    return elsewhere if facts.checkout is None else in_checkout


def has_horovod(facts: Facts) -> bool:
    return facts.versions.get("horovod") is not None


def mpi_version(line: str | None) -> tuple[str, int] | None:
    """(name, major version) from `mpirun --version`; None if it is missing or not Open MPI."""
    found = re.search(r"(Open MPI|OpenRTE|PRRTE)\)?\s+v?(\d+)\.", line or "")
    return (found[1], int(found[2])) if found else None


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def check_python(facts: Facts) -> Iterator[Finding]:
    if facts.python < (3, 10):
        cure = cure_of(facts, "make setup PYTHON=/path/to/a/newer/one", "use Python 3.10 or newer")
        yield Finding(f"Python {dotted(facts.python)} is too old", cure)


def check_packages(facts: Facts) -> Iterator[Finding]:
    required = [name for name in REQUIRED if facts.versions.get(name) is None]
    if has_horovod(facts) and facts.versions.get("mpi4py") is None and facts.checkout is not None:
        required.append("mpi4py")
    missing = [*required, *(name for name in facts.missing if name not in required)]
    if missing:
        words = " ".join(missing)
        yield Finding(f"not installed: {', '.join(missing)}", cure_of(facts, "make setup", f"pip install {words}"))
    elif facts.torch.answer is None:
        cure = facts.torch.cure(cure_of(facts, "make clean setup", f"install PyTorch: {PYTORCH}"))
        yield Finding(f"torch does not load: {facts.torch.error}", cure)
    if facts.checkout is not None and not has_horovod(facts):
        yield Finding(
            "Horovod is not installed: torch.distributed connects the ranks, which torchrun starts",
            "make setup HOROVOD=1 installs Horovod and MPI",
            note=True,
        )


def check_library(facts: Facts) -> Iterator[Finding]:
    if facts.is_other_project:
        yield Finding(
            "another project of the name dgc is installed, whose folder is also named dgc",
            "pip uninstall dgc, then pip install --force-reinstall --no-deps with the wheel of dgc-torch",
        )
    if facts.checkout is None or facts.imported_elsewhere == facts.checkout:
        return
    if facts.imported_elsewhere is None:
        yield Finding("dgc is not installed: only scripts of this checkout can import it", "make setup", note=True)
    else:
        yield Finding(
            f"dgc comes from {facts.imported_elsewhere}, not from this checkout ({facts.checkout})",
            "make setup VENV=another/path creates another environment for this checkout, make setup TAKE_OVER=1 "
            "uses this one; unset PYTHONPATH if it contains the other checkout",
        )


def check_kernels(facts: Facts) -> Iterator[Finding]:
    if facts.torch.answer is not None and facts.kernels.answer is None:
        by_hand = "install a wheel of dgc-torch, or a C++ compiler and run python -m dgc.kernels.build"
        yield Finding(
            f"the kernels do not load, plain PyTorch takes their place: {facts.kernels.error.splitlines()[-1]}",
            facts.kernels.cure(cure_of(facts, "make setup", by_hand)),
        )


def check_adapters(facts: Facts) -> Iterator[Finding]:
    if facts.torch.answer is None:
        return
    if facts.adapters.answer is None:
        cure = facts.adapters.cure("see the message")
        yield Finding(f"the adapters do not load: {facts.adapters.error}", cure)
    for name, said in (facts.adapters.answer or {}).items():
        if not str(said).startswith("works"):
            cure = "install a PyTorch of the range that the message names"
            yield Finding(f"dgc.{name} does not load: {said}", cure)


def check_torchvision(facts: Facts) -> Iterator[Finding]:
    if facts.versions.get("torchvision") is None or facts.torchvision.answer is not None:
        return
    if facts.torch.answer is None:
        return
    if facts.checkout is not None and "torchvision::nms" in facts.torchvision.error:
        yield Finding(
            "torchvision was built for a torch with CUDA (operator torchvision::nms does not exist)",
            "the trainer works all the same; for your own scripts: python dgc_datasets/torchvision_compat.py",
            note=True,
        )
        return
    by_hand = f"install the torchvision that fits torch: {PYTORCH}"
    yield Finding(
        "torchvision does not load, which Lightning and transformers import: "
        + facts.torchvision.error.splitlines()[-1],
        facts.torchvision.cure(cure_of(facts, "make clean setup", by_hand)),
    )


def check_torchrun(facts: Facts) -> Iterator[Finding]:
    if facts.torch.answer is None:
        return
    answer = facts.torch_ranks.answer
    if answer is None:
        yield Finding(
            f"a test with two ranks under torchrun failed: {facts.torch_ranks.error}",
            facts.torch_ranks.cure("if this machine does not find its own name: export GLOO_SOCKET_IFNAME=lo"),
        )
    elif (answer["size"], answer["sum"]) != (2, 3.0):
        yield Finding(
            f"torchrun with two ranks: an allreduce of 1 and 2 over {answer['size']} ranks gave {answer['sum']}",
            cure_of(facts, "make clean setup", f"reinstall PyTorch: {PYTORCH}"),
        )


def rebuild(facts: Facts) -> str:
    cached = "remove Horovod's wheel from the cache (docs/install.md), then make clean setup"
    return cure_of(facts, cached, "reinstall Horovod; under torchrun dgc needs none")


def check_horovod(facts: Facts) -> Iterator[Finding]:
    if not has_horovod(facts) or facts.torch.answer is None:
        return
    built = facts.horovod.answer
    if built is None:
        error = facts.horovod.error
        if "has not been built" in error or "No module named" in error:
            problem = "Horovod is installed, but its torch extension is not built"
        elif "undefined symbol" in error:
            problem = "Horovod was built for another torch"
        else:
            problem = "Horovod does not load"
        yield Finding(f"{problem}: {error}", facts.horovod.cure(rebuild(facts)))
        return
    for controller, name in (("mpi", "MPI"), ("gloo", "Gloo")):
        if not built[controller]:
            again = cure_of(facts, "make setup, which builds it", f"build it with HOROVOD_WITH_{name.upper()}=1")
            yield Finding(f"Horovod was built without {name}", f"pip uninstall horovod, then {again}")
    gpus = facts.torch.answer["gpus"]
    if gpus and not built["nccl"]:
        cure = cure_of(facts, "make setup GPU=1", "build Horovod with HOROVOD_GPU_OPERATIONS=NCCL")
        yield Finding("there is a GPU, but Horovod has no NCCL operations", cure, note=True)


def check_mpi(facts: Facts) -> Iterator[Finding]:
    if not has_horovod(facts):
        return
    own = "put your Open MPI's bin folder on PATH"
    if facts.mpirun is None:
        yield Finding("mpirun is not installed", cure_of(facts, f"make setup, or {own}", own))
        return
    found = mpi_version(facts.mpirun)
    if found is None:
        yield Finding(f"mpirun is not Open MPI's: {facts.mpirun}", cure_of(facts, "make setup SYSTEM_MPI=0", own))
    elif found[1] >= 5:
        older = cure_of(facts, "make setup SYSTEM_MPI=0 (Open MPI 4.1)", "install Open MPI 4.1")
        yield Finding(
            f"Open MPI {found[1]}: horovodrun passes options that it does not support",
            f"{older}, or start runs with mpirun instead of horovodrun",
        )
    prefix = facts.variables.get("OPAL_PREFIX")
    if facts.has_mpi_wheel and prefix and prefix.rstrip("/") != facts.environment.rstrip("/"):
        yield Finding(f"OPAL_PREFIX is {prefix}, which is not this environment's Open MPI", "unset OPAL_PREFIX")


def check_mpi4py(facts: Facts) -> Iterator[Finding]:
    if facts.versions.get("mpi4py") is None:
        return
    reinstall = "pip install --force-reinstall --no-binary mpi4py mpi4py, with the right mpicc on PATH"
    if facts.mpi4py.answer is None:
        cure = facts.mpi4py.cure(cure_of(facts, "make setup", reinstall))
        yield Finding(f"mpi4py does not load: {facts.mpi4py.error}", cure)
        return
    library = str(facts.mpi4py.answer["library"])
    release = re.search(r"\d+\.\d+\.\d+", facts.mpirun or "")
    if release and release[0] not in library:
        yield Finding(f"mpi4py uses another MPI ({library.split(',')[0]}) than mpirun ({facts.mpirun})", reinstall)


def check_mpirun(facts: Facts) -> Iterator[Finding]:
    if facts.mpirun is None or facts.horovod.answer is None:
        return  # reported above, with the cause
    answer = facts.horovod_ranks.answer
    if answer is None:
        yield Finding(
            f"a test with two ranks under mpirun failed: {facts.horovod_ranks.error}",
            facts.horovod_ranks.cure("if a firewall separates the ranks: mpirun --mca btl_tcp_if_include lo"),
        )
    elif answer["size"] != 2:
        yield Finding(
            f"each rank under mpirun has size {answer['size']} instead of 2: Horovod uses another MPI",
            rebuild(facts),
        )
    elif answer["sum"] != 3.0:
        cure = cure_of(facts, "make clean setup", rebuild(facts))
        yield Finding(f"an allreduce of 1 and 2 gave {answer['sum']}", cure)
    elif not answer["multiple"]:
        yield Finding(
            f"MPI's threading level is {answer.get('level', 'too low')}: gossip beside Horovod may crash",
            "use an Open MPI built with thread support, and unset HOROVOD_MPI_THREADS_DISABLE",
        )


def check_surroundings(facts: Facts) -> Iterator[Finding]:
    if has_horovod(facts) and facts.is_root and not all(facts.variables.get(name) for name in ROOT_VARIABLES):
        exports = "export " + " ".join(f"{name}=1" for name in ROOT_VARIABLES)
        cure = cure_of(facts, f"{exports} (make does it)", exports)
        yield Finding("Open MPI refuses to start for root by default", cure, note=True)
    if has_horovod(facts) and facts.checkout is not None and facts.cores < DEMO_RANKS:
        yield Finding(
            f"{facts.cores} cores: more ranks need mpirun --oversubscribe",
            "python -m scripts.launch RANKS train.py ... sets it",
            note=True,
        )
    threshold = facts.variables.get("HOROVOD_FUSION_THRESHOLD", "0")
    if threshold != "0":
        yield Finding(
            f"HOROVOD_FUSION_THRESHOLD is {threshold}: with 3 ranks or more, runs do not repeat bitwise",
            "unset HOROVOD_FUSION_THRESHOLD",
            note=True,
        )


CHECKS: tuple[Check, ...] = (
    check_python,
    check_packages,
    check_library,
    check_kernels,
    check_adapters,
    check_torchvision,
    check_torchrun,
    check_horovod,
    check_mpi,
    check_mpi4py,
    check_mpirun,
    check_surroundings,
)


def diagnose(facts: Facts) -> list[Finding]:
    """The problems, then the notes."""
    findings = [finding for check in CHECKS for finding in check(facts)]
    return sorted(findings, key=lambda finding: finding.note)


def describe(facts: Facts) -> Iterator[tuple[str, str]]:
    """(name, value) rows of the report."""
    yield "Python", dotted(facts.python)
    yield "environment", facts.environment
    yield "dgc", f"{dgc.__version__} from {dgc.__path__[0]}"
    if facts.checkout is not None:
        yield "dgc comes from", facts.imported_elsewhere or "not installed"
    for name, number in facts.versions.items():
        yield name, number or "not installed"
    found = facts.torch.answer or {}
    for name, key in (("GPU", "gpus"), ("backends of torch", "backends")):
        values = found.get(key, [])
        assert isinstance(values, list)
        yield name, ", ".join(values) or "none"
    for name, value in (facts.kernels.answer or {"native": "missing"}).items():
        yield f"{name} kernels", str(value)
    adapters = facts.adapters.answer if facts.torch.answer is not None else None
    for name, value in (adapters or {}).items():
        yield f"dgc.{name}", str(value)
    yield "cores", str(facts.cores)
    yield "2 ranks over torch", works(facts.torch_ranks)
    if has_horovod(facts):
        yield "mpirun", facts.mpirun or "not installed"
        ranks = facts.horovod_ranks.answer or {}
        yield "MPI threading level", str(ranks.get("level", "MULTIPLE" if ranks.get("multiple") else "unknown"))
        yield "Horovod's controllers", true_of(facts.horovod, "mpi", "gloo")
        yield "Horovod's operations", true_of(facts.horovod, "mpi", "gloo", "nccl", "cuda", "rocm")
        yield "OPAL_PREFIX", facts.variables.get("OPAL_PREFIX", "not set (set by mpirun and train.py)")
        yield "2 ranks over Horovod", works(facts.horovod_ranks)


def works(ranks: Probe) -> str:
    """Whether two ranks have added 1 and 2."""
    return "work" if (ranks.answer or {}).get("sum") == 3.0 else "fail"


def true_of(probe: Probe, *keys: str) -> str:
    """The keys of an answer that are true."""
    return ", ".join(key for key in keys if probe.answer and probe.answer[key]) or "none"


def main() -> int:
    """Prints the report. Returns 1 if there is a problem."""
    facts = collect()
    for name, value in describe(facts):
        print(f"{name:24}{value}")
    findings = diagnose(facts)
    for finding in findings:
        print(f"\n{'note' if finding.note else 'PROBLEM'}: {finding.problem}\n  cure: {finding.cure}")
    problems = sum(not finding.note for finding in findings)
    print(f"\n{problems} problems: see above" if problems else "\nno problems found")
    return 1 if problems else 0
