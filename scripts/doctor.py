"""`make doctor`: prints what is installed, the problems found, and a remedy for each.

The exit status is 1 if there is a problem. A note is not a problem: it describes a limitation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dgc.advisor.doctor import Probe
from dgc.terminal import escape_unprintable
from scripts.facts import Facts, collect
from scripts.launch import ROOT_VARIABLES

DEMO_RANKS = 4
HOROVOD = ("horovod", "mpi4py")  # not needed without Horovod
REBUILD = "remove Horovod's wheel from the cache (docs/install.md), then make clean setup"


@dataclass(frozen=True)
class Finding:
    """A problem with its remedy, or only a note if `note` is set."""

    problem: str
    remedy: str
    note: bool = False


Check = Callable[[Facts], Iterator[Finding]]


def mpi_version(line: str | None) -> tuple[str, int] | None:
    """(name, major version) from `mpirun --version`; None if it is missing or not Open MPI."""
    found = re.search(r"(Open MPI|OpenRTE|PRRTE)\)?\s+v?(\d+)\.", line or "")
    return (found[1], int(found[2])) if found else None


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def check_python(facts: Facts) -> Iterator[Finding]:
    if facts.python < (3, 10):
        yield Finding(f"Python {dotted(facts.python)} is too old", "make setup PYTHON=/path/to/a/newer/one")


def check_packages(facts: Facts) -> Iterator[Finding]:
    horovod = facts.versions.get("horovod") is not None
    needed = {name: version for name, version in facts.versions.items() if horovod or name not in HOROVOD}
    missing = [name for name, version in needed.items() if version is None]
    if not horovod:
        yield Finding(
            "Horovod is not installed: torch.distributed connects the ranks, which torchrun starts",
            "make setup HOROVOD=1 installs Horovod and MPI",
            note=True,
        )
    if missing:
        yield Finding(f"not installed: {', '.join(missing)}", "make setup")
    elif facts.torch.answer is None:
        yield Finding(f"torch does not load: {facts.torch.error}", facts.torch.cure("make clean setup"))


def check_library(facts: Facts) -> Iterator[Finding]:
    if facts.dgc is None:
        yield Finding("dgc is not installed: only scripts of this checkout can import it", "make setup", note=True)
    elif facts.dgc != facts.checkout:
        yield Finding(
            f"dgc comes from {facts.dgc}, not from this checkout ({facts.checkout})",
            "make setup VENV=another/path creates another environment for this checkout, make setup TAKE_OVER=1 "
            "uses this one; unset PYTHONPATH if it contains the other checkout",
        )


def check_horovod(facts: Facts) -> Iterator[Finding]:
    if facts.versions.get("horovod") is None or facts.torch.answer is None:
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
        yield Finding(f"{problem}: {error}", facts.horovod.cure(REBUILD))
        return
    for controller, name in (("mpi", "MPI"), ("gloo", "Gloo")):
        if not built[controller]:
            yield Finding(
                f"Horovod was built without {name}",
                "pip uninstall horovod, then make setup, which builds it",
            )
    gpus = facts.torch.answer["gpus"]
    if gpus and not built["nccl"]:
        yield Finding("there is a GPU, but Horovod has no NCCL operations", "make setup GPU=1", note=True)


def check_mpi(facts: Facts) -> Iterator[Finding]:
    if facts.versions.get("horovod") is None:
        return
    if facts.mpirun is None:
        yield Finding("mpirun is not installed", "make setup, or put your Open MPI's bin folder on PATH")
        return
    found = mpi_version(facts.mpirun)
    if found is None:
        yield Finding(f"mpirun is not Open MPI's: {facts.mpirun}", "make setup SYSTEM_MPI=0")
    elif found[1] >= 5:
        yield Finding(
            f"Open MPI {found[1]}: horovodrun passes options that it does not support",
            "make setup SYSTEM_MPI=0 (Open MPI 4.1), or start runs with mpirun instead of horovodrun",
        )


def check_prefix(facts: Facts) -> Iterator[Finding]:
    prefix = facts.variables.get("OPAL_PREFIX")
    if facts.wheel_mpi and prefix and prefix.rstrip("/") != facts.prefix.rstrip("/"):
        yield Finding(f"OPAL_PREFIX is {prefix}, which is not this environment's Open MPI", "unset OPAL_PREFIX")


def check_mpi4py(facts: Facts) -> Iterator[Finding]:
    if facts.versions.get("mpi4py") is None:
        return
    if facts.mpi4py.answer is None:
        yield Finding(f"mpi4py does not load: {facts.mpi4py.error}", facts.mpi4py.cure("make setup"))
        return
    library = str(facts.mpi4py.answer["library"])
    release = re.search(r"\d+\.\d+\.\d+", facts.mpirun or "")
    if release and release[0] not in library:
        yield Finding(
            f"mpi4py uses another MPI ({library.split(',')[0]}) than mpirun ({facts.mpirun})",
            "pip install --force-reinstall --no-binary mpi4py mpi4py, with the right mpicc on PATH",
        )


def check_hello(facts: Facts) -> Iterator[Finding]:
    if facts.mpirun is None or facts.horovod.answer is None:
        return  # already reported, with the cause
    answer = facts.hello.answer
    if answer is None:
        yield Finding(
            f"a test with two ranks under mpirun failed: {facts.hello.error}",
            facts.hello.cure("if a firewall separates the ranks: mpirun --mca btl_tcp_if_include lo"),
        )
    elif answer["size"] != 2:
        yield Finding(
            f"each rank under mpirun has size {answer['size']} instead of 2: Horovod uses another MPI",
            REBUILD,
        )
    elif answer["sum"] != 3.0:
        yield Finding(f"an allreduce of 1 and 2 gave {answer['sum']}", "make clean setup")
    elif not answer["multiple"]:
        yield Finding(
            f"MPI's threading level is {answer.get('level', 'too low')}: gossip beside Horovod may crash",
            "use an Open MPI built with thread support, and unset HOROVOD_MPI_THREADS_DISABLE",
        )


def check_torchrun(facts: Facts) -> Iterator[Finding]:
    if facts.torch.answer is None:
        return
    answer = facts.torch_hello.answer
    if answer is None:
        yield Finding(
            f"a test with two ranks under torchrun failed: {facts.torch_hello.error}",
            facts.torch_hello.cure("if this machine does not find its own name: export GLOO_SOCKET_IFNAME=lo"),
        )
    elif (answer["size"], answer["sum"]) != (2, 3.0):
        yield Finding(
            f"torchrun with two ranks: an allreduce of 1 and 2 over {answer['size']} ranks gave {answer['sum']}",
            "make clean setup",
        )


def check_kernels(facts: Facts) -> Iterator[Finding]:
    if facts.torch.answer is not None and facts.kernels.answer is None:
        reason = facts.kernels.error.splitlines()[-1]
        cure = facts.kernels.cure("make setup")
        yield Finding(f"the native kernels do not load ({reason}); compression will be slow", cure)


def check_torchvision(facts: Facts) -> Iterator[Finding]:
    if facts.versions.get("torchvision") is None or facts.torchvision.answer is not None:
        return
    if "torchvision::nms" in facts.torchvision.error:
        yield Finding(
            "torchvision was built for a torch with CUDA (operator torchvision::nms does not exist)",
            "the trainer works all the same; for your own scripts: python dgc_datasets/torchvision_compat.py",
            note=True,
        )
    else:
        cure = facts.torchvision.cure("make clean setup")
        yield Finding(f"torchvision does not load: {facts.torchvision.error}", cure)


def check_surroundings(facts: Facts) -> Iterator[Finding]:
    horovod = facts.versions.get("horovod") is not None
    if horovod and facts.root and not all(facts.variables.get(name) for name in ROOT_VARIABLES):
        exports = "export " + " ".join(f"{name}=1" for name in ROOT_VARIABLES)
        yield Finding("Open MPI refuses to start for root by default", f"{exports} (make does it)", note=True)
    if horovod and facts.cores < DEMO_RANKS:
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
    check_horovod,
    check_mpi,
    check_prefix,
    check_mpi4py,
    check_hello,
    check_torchrun,
    check_kernels,
    check_torchvision,
    check_surroundings,
)


def diagnose(facts: Facts) -> list[Finding]:
    """The problems, then the notes."""
    findings = [finding for check in CHECKS for finding in check(facts)]
    return sorted(findings, key=lambda finding: finding.note)


def describe(facts: Facts) -> list[tuple[str, str]]:
    """(name, value) rows of the report."""

    def names(probe: Probe, keys: tuple[str, ...]) -> str:
        return ", ".join(key for key in keys if probe.answer and probe.answer[key]) or "none"

    rows = [("Python", dotted(facts.python)), ("environment", facts.prefix)]
    rows.append(("dgc comes from", facts.dgc or "not installed"))
    rows += [(name, version or "missing") for name, version in facts.versions.items()]
    rows.append(("mpirun", facts.mpirun or "missing"))
    hello = facts.hello.answer or {}
    level = hello.get("level", "MULTIPLE" if hello.get("multiple") else "unknown")
    rows.append(("MPI threading level", str(level)))
    rows.append(("Horovod's controllers", names(facts.horovod, ("mpi", "gloo"))))
    rows.append(("Horovod's operations", names(facts.horovod, ("mpi", "gloo", "nccl", "cuda", "rocm"))))
    gpus = facts.torch.answer["gpus"] if facts.torch.answer else []
    assert isinstance(gpus, list)
    rows.append(("GPU", ", ".join(gpus) or "none"))
    kernels = facts.kernels.answer or {"native": "missing"}
    rows.append(("kernels of the CPU", str(kernels["native"])))
    rows.append(("cores", str(facts.cores)))
    rows.append(("OPAL_PREFIX", facts.variables.get("OPAL_PREFIX", "not set (set by mpirun and train.py)")))
    torch_hello = facts.torch_hello.answer or {}
    works = "works" if hello.get("sum") == 3.0 else "fails"
    rows.append(("2 ranks over Horovod", works if facts.versions.get("horovod") else "not installed"))
    rows.append(("2 ranks over torch", "works" if torch_hello.get("sum") == 3.0 else "fails"))
    return rows


def main() -> int:
    """Prints the report. Returns 1 if there is a problem."""
    facts = collect()
    for name, value in describe(facts):
        print(f"{name:24}{value}")
    findings = diagnose(facts)
    for finding in findings:
        print(f"\n{'note' if finding.note else 'PROBLEM'}: {finding.problem}\n  remedy: {finding.remedy}")
    problems = sum(not finding.note for finding in findings)
    print(f"\n{problems} problems: see above" if problems else "\nno problems found")
    return 1 if problems else 0


if __name__ == "__main__":
    escape_unprintable()
    raise SystemExit(main())
