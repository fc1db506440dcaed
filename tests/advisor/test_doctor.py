"""python -m dgc.doctor: what it finds wrong in made-up facts, and how it collects facts."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dgc.advisor import doctor
from dgc.advisor.doctor import describe, diagnose, mpi_version
from dgc.advisor.probes import (
    PACKAGES,
    Facts,
    Probe,
    checkout_of,
    missing_requirements,
    run_probe,
    run_within,
    source_of_library,
)

Printed = pytest.CaptureFixture[str]
VERSIONS: dict[str, str | None] = dict.fromkeys(PACKAGES, "1.0")
NO_HOROVOD = {**VERSIONS, "horovod": None, "mpi4py": None}
BUILT = {"mpi": True, "gloo": True, "nccl": False, "cuda": False, "rocm": False}
WORKS = {"size": 2, "sum": 3.0, "multiple": True, "level": "MULTIPLE"}
LIBRARY = Facts(
    python=(3, 11, 2),
    versions=VERSIONS,
    cores=8,
    is_root=False,
    environment="/env",
    mpirun="Open MPI 4.1.8",
    has_mpi_wheel=True,
    torch=Probe({"cuda": None, "gpus": [], "backends": ["gloo"]}),
    kernels=Probe({"native": "native (avx2)"}),
    adapters=Probe({"ddp": "works", "fsdp": "works"}),
    torchvision=Probe({}),
    torch_ranks=Probe({"size": 2, "sum": 3.0}),
    horovod=Probe(BUILT),
    mpi4py=Probe({"library": "Open MPI v4.1.8, package: Open MPI"}),
    horovod_ranks=Probe(WORKS),
)
REPOSITORY = replace(LIBRARY, checkout="/here", imported_elsewhere="/here")
LATE = Probe(error="no answer after 300 s", timed_out=True)
ANYWHERE: dict[str, dict[str, Any]] = {
    "Python 3.9.1 is too old": {"python": (3, 9, 1)},
    "not installed: torch": {"versions": {**VERSIONS, "torch": None}},
    "another project of the name dgc": {"is_other_project": True},
    "torch does not load: libc10.so": {"torch": Probe(error="libc10.so: cannot open")},
    "plain PyTorch takes their place: not built": {"kernels": Probe(error="a\nnot built")},
    "dgc.fsdp does not load: too old": {"adapters": Probe({"ddp": "works", "fsdp": "too old"})},
    "the adapters do not load: no answer": {"adapters": Probe(error="no answer after 90 s")},
    "Lightning and transformers import: libjpeg": {"torchvision": Probe(error="a\nlibjpeg.so: cannot open")},
    "under torchrun failed: no route": {"torch_ranks": Probe(error="no route")},
    "over 1 ranks gave 1.0": {"torch_ranks": Probe({"size": 1, "sum": 1.0})},
    "extension is not built": {"horovod": Probe(error="Extension horovod.torch has not been built")},
    "built for another torch": {"horovod": Probe(error="undefined symbol: _ZN3c10")},
    "Horovod does not load: libcuda": {"horovod": Probe(error="libcuda.so: cannot open")},
    "without MPI": {"horovod": Probe({**BUILT, "mpi": False})},
    "without Gloo": {"horovod": Probe({**BUILT, "gloo": False})},
    "mpirun is not installed": {"mpirun": None},
    "not Open MPI's": {"mpirun": "HYDRA build details:"},
    "Open MPI 5": {"mpirun": "Open MPI 5.0.3", "mpi4py": Probe({"library": "Open MPI v5.0.3"})},
    "OPAL_PREFIX is /other": {"variables": {"OPAL_PREFIX": "/other"}},
    "mpi4py uses another MPI": {"mpi4py": Probe({"library": "MPICH Version: 4.2.0"})},
    "mpi4py does not load": {"mpi4py": Probe(error="cannot load MPI library")},
    "under mpirun failed: no answer": {"horovod_ranks": Probe(error="no answer after 90 s")},
    "size 1 instead of 2": {"horovod_ranks": Probe({**WORKS, "size": 1, "sum": 1.0})},
    "gave 2.0": {"horovod_ranks": Probe({**WORKS, "sum": 2.0})},
    "SERIALIZED": {"horovod_ranks": Probe({**WORKS, "multiple": False, "level": "SERIALIZED"})},
}
IN_THE_REPOSITORY: dict[str, dict[str, Any]] = {
    "not installed: mpi4py": {"versions": {**VERSIONS, "mpi4py": None}},
    "not installed: omegaconf": {"missing": ["omegaconf"]},
    "dgc comes from /there, not from this checkout (/here)": {"imported_elsewhere": "/there"},
}
NOTES_ANYWHERE: dict[str, dict[str, Any]] = {
    "Open MPI refuses to start for root": {"is_root": True},
    "do not repeat bitwise": {"variables": {"HOROVOD_FUSION_THRESHOLD": "67108864"}},
    "no NCCL": {"torch": Probe({"cuda": "13.0", "gpus": ["H100"], "backends": []})},
}
NOTES_IN_THE_REPOSITORY: dict[str, dict[str, Any]] = {
    "dgc is not installed": {"imported_elsewhere": None},
    "torch.distributed connects the ranks": {
        "versions": NO_HOROVOD,
        "mpirun": None,
        "cores": 2,
        "is_root": True,
        "horovod_ranks": Probe(),
        "horovod": Probe(error="No module named 'horovod'"),
        "mpi4py": Probe(error="No module named 'mpi4py'"),
    },
    "2 cores": {"cores": 2},
    "operator torchvision::nms": {"torchvision": Probe(error="operator torchvision::nms does not exist")},
}


@pytest.mark.parametrize("problem", ANYWHERE)
@pytest.mark.parametrize("healthy", [LIBRARY, REPOSITORY], ids=["library", "repository"])
def test_one_fault_gives_one_problem_with_a_cure(healthy: Facts, problem: str) -> None:
    (finding,) = diagnose(replace(healthy, **ANYWHERE[problem]))
    assert problem in finding.problem and finding.cure and not finding.note


@pytest.mark.parametrize("problem", IN_THE_REPOSITORY)
def test_the_repository_needs_more(problem: str) -> None:
    (finding,) = diagnose(replace(REPOSITORY, **IN_THE_REPOSITORY[problem]))
    assert problem in finding.problem and finding.cure and not finding.note


@pytest.mark.parametrize("problem", NOTES_ANYWHERE)
@pytest.mark.parametrize("healthy", [LIBRARY, REPOSITORY], ids=["library", "repository"])
def test_a_limitation_is_a_note(healthy: Facts, problem: str) -> None:
    (finding,) = diagnose(replace(healthy, **NOTES_ANYWHERE[problem]))
    assert problem in finding.problem and finding.cure and finding.note


@pytest.mark.parametrize("problem", NOTES_IN_THE_REPOSITORY)
def test_a_limitation_of_the_repository_is_a_note(problem: str) -> None:
    (finding,) = diagnose(replace(REPOSITORY, **NOTES_IN_THE_REPOSITORY[problem]))
    assert problem in finding.problem and finding.cure and finding.note


def test_a_library_without_horovod_is_complete() -> None:
    assert diagnose(replace(LIBRARY, versions=NO_HOROVOD, mpirun=None, is_root=True)) == []


def test_cures_of_the_library_name_no_command_of_the_repository() -> None:
    for change in ANYWHERE.values():
        (finding,) = diagnose(replace(LIBRARY, **change))
        assert "make " not in finding.cure, finding


def test_a_healthy_machine_has_no_finding() -> None:
    assert diagnose(LIBRARY) == [] and diagnose(REPOSITORY) == []
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    fine = {**as_root, "HOROVOD_FUSION_THRESHOLD": "0", "OPAL_PREFIX": "/env/"}
    assert diagnose(replace(REPOSITORY, is_root=True, variables=fine)) == []


def test_the_report_has_what_was_found() -> None:
    rows = dict(describe(replace(REPOSITORY, imported_elsewhere="/there")))
    assert rows["native kernels"] == "native (avx2)" and rows["MPI threading level"] == "MULTIPLE"
    assert rows["dgc comes from"] == "/there" and rows["2 ranks over Horovod"] == "work"


def test_an_environment_without_any_package_is_reported() -> None:
    probes: Any = dict.fromkeys(("torch", "kernels", "adapters", "torch_ranks"), Probe(error="No module named"))
    bare = Facts((3, 11, 2), dict.fromkeys(PACKAGES), 2, False, "/usr", checkout="/here", **probes)
    assert any("not installed: torch" in finding.problem for finding in diagnose(bare))
    assert dict(describe(bare))["torch"] == "not installed"


@pytest.mark.parametrize(
    "line, found",
    [
        ("Open MPI 4.1.8", ("Open MPI", 4)),
        ("mpirun (Open MPI) 4.1.4", ("Open MPI", 4)),
        ("HYDRA build details:", None),
        (None, None),
    ],
)
def test_the_version_of_mpi_is_read(line: str | None, found: tuple[str, int] | None) -> None:
    assert mpi_version(line) == found


def test_a_probe_that_takes_too_long_is_repeated_once_with_a_longer_limit(
    capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (20.04, 0.0, 0.0))
    late = subprocess.TimeoutExpired("probe", 90)
    monkeypatch.setattr("dgc.advisor.probes.run_within", Mock(side_effect=[late, (0, "{}", "")]))
    assert run_probe(["probe"]).answer == {}
    assert "doctor: no answer after 90 s, at a load average of 20.0 on" in capsys.readouterr().err
    monkeypatch.setattr("dgc.advisor.probes.run_within", Mock(side_effect=[late, late]))
    probe = run_probe(["probe"])
    assert probe.timed_out and probe.error.startswith("no answer after 300 s, at a load average of 20.0 on")


@pytest.mark.parametrize(
    "name", "torch kernels adapters torchvision torch_ranks horovod mpi4py horovod_ranks".split()
)
def test_the_cure_of_a_time_out_is_to_repeat_it(name: str) -> None:
    findings = diagnose(replace(REPOSITORY, **{name: LATE}))  # type: ignore[arg-type]
    assert findings[0].cure.startswith("repeat it when no other program uses this machine; if none does: ")


def test_a_probe_that_takes_too_long_ends_with_all_that_it_has_started() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_within(0.1, ["sh", "-c", "sleep 600 & wait"], None)  # the second process holds the output open


@pytest.mark.parametrize(
    "command, found",
    [
        (["sh", "-c", "echo noise; echo '{\"a\": 1}'"], Probe({"a": 1})),
        (["sh", "-c", "echo bad luck >&2; exit 3"], Probe(error="bad luck")),
        (["sh", "-c", "exit 3"], Probe(error="exit status 3")),
        (["no-such-program"], Probe(error="no-such-program not found")),
        (["sh", "-c", "printf '\\377' >&2; exit 3"], Probe(error="\ufffd")),
    ],
    ids=["answer", "error", "status", "missing", "encoding"],
)
def test_a_probe_tells_an_answer_from_a_failure(command: list[str], found: Probe) -> None:
    assert run_probe(command, dict(os.environ)) == found


def test_the_library_is_looked_for_as_the_script_of_another_folder_finds_it(tmp_path: Path) -> None:
    (tmp_path / "dgc").mkdir()
    (tmp_path / "dgc/__init__.py").touch()
    assert source_of_library({**os.environ, "PYTHONPATH": str(tmp_path)}) == str(tmp_path)


def test_a_checkout_is_told_from_an_installed_library(tmp_path: Path) -> None:
    (tmp_path / "dgc").mkdir()
    assert checkout_of(tmp_path / "dgc") is None
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/setup.sh").touch()
    assert checkout_of(tmp_path / "dgc") == tmp_path


def test_the_requirements_of_a_checkout_that_are_not_installed_are_named(tmp_path: Path) -> None:
    lines = ["# a comment==1", "torch==2.13.0", "no-such-package==1.0", 'no-such-other==1.0; python_version < "3"']
    (tmp_path / "requirements.txt").write_text("\n".join(lines) + "\n")
    assert missing_requirements(tmp_path) == ["no-such-package"]


@pytest.mark.proof  # ten seconds of processes
def test_the_doctor_examines_this_environment(capsys: Printed) -> None:
    assert doctor.main() == 0
    out = capsys.readouterr().out
    assert "2 ranks over torch      work" in out and "dgc.fsdp                works" in out
    assert "no problems found" in out
