"""Set-up's refusals and its stamp, the launcher's command, and the doctor's judgement on made-up facts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import case

from dgc.doctor import Probe, run_probe
from scripts.doctor import describe, diagnose, mpi_version
from scripts.facts import PACKAGES, Facts, source_of_library
from scripts.launch import environment, mpirun, prepare, torchrun

ROOT = Path(__file__).parent.parent
BUILT = {"mpi": True, "gloo": True, "nccl": False, "cuda": False, "rocm": False}
HEALTHY = Facts(
    python=(3, 11, 2),
    versions=dict.fromkeys(PACKAGES, "1.0"),
    mpirun="Open MPI 4.1.8",
    cores=8,
    root=False,
    prefix="/env",
    wheel_mpi=True,
    torch=Probe({"cuda": None, "gpus": []}),
    torchvision=Probe({}),
    horovod=Probe(BUILT),
    mpi4py=Probe({"library": "Open MPI v4.1.8, package: Open MPI"}),
    kernels=Probe({"native": "native (avx2)"}),
    hello=Probe({"size": 2, "sum": 3.0, "multiple": True, "level": "MULTIPLE"}),
    torch_hello=Probe({"size": 2, "sum": 3.0}),
    checkout="/here",
    dgc="/here",
)
WITHOUT_HOROVOD = {
    "versions": {**HEALTHY.versions, "horovod": None, "mpi4py": None},
    "mpirun": None,
    "cores": 2,
    "root": True,
    "horovod": Probe(error="No module named 'horovod'"),
    "mpi4py": Probe(error="No module named 'mpi4py'"),
    "hello": Probe(),
}


def test_one_fault_gives_one_finding_with_a_cure() -> None:
    faults: list[tuple[Mapping[str, object], str]] = [
        ({"python": (3, 9, 1)}, "Python 3.9.1 is too old"),
        ({"versions": {**HEALTHY.versions, "mpi4py": None}}, "not installed: mpi4py"),
        ({"versions": {**HEALTHY.versions, "omegaconf": None}}, "not installed: omegaconf"),
        ({"torch": Probe(error="libc10.so: cannot open")}, "torch does not load"),
        ({"horovod": Probe(error="Extension horovod.torch has not been built")}, "extension is not built"),
        ({"horovod": Probe(error="undefined symbol: _ZN3c10")}, "built for another torch"),
        ({"horovod": Probe({**BUILT, "mpi": False})}, "without MPI"),
        ({"horovod": Probe({**BUILT, "gloo": False})}, "without Gloo"),
        ({"mpirun": None}, "mpirun is not installed"),
        ({"mpirun": "HYDRA build details:"}, "not Open MPI's"),
        ({"mpirun": "Open MPI 5.0.3", "mpi4py": Probe({"library": "Open MPI v5.0.3"})}, "Open MPI 5"),
        ({"variables": {"OPAL_PREFIX": "/other"}}, "OPAL_PREFIX is /other"),
        ({"mpi4py": Probe({"library": "MPICH Version: 4.2.0"})}, "mpi4py uses another MPI"),
        ({"mpi4py": Probe(error="cannot load MPI library")}, "mpi4py does not load"),
        ({"kernels": Probe(error="KernelsUnavailable: they are not built")}, "native kernels do not load"),
        ({"hello": Probe(error="no answer after 90 s")}, "under mpirun failed: no answer"),
        ({"hello": Probe({"size": 1, "sum": 1.0, "multiple": True})}, "size 1 instead of 2"),
        ({"hello": Probe({"size": 2, "sum": 2.0, "multiple": True})}, "gave 2.0"),
        ({"hello": Probe({"size": 2, "sum": 3.0, "multiple": False, "level": "SERIALIZED"})}, "SERIALIZED"),
        ({"torch_hello": Probe(error="no answer after 90 s")}, "under torchrun failed: no answer"),
        ({"torch_hello": Probe({"size": 1, "sum": 1.0})}, "over 1 ranks gave 1.0"),
        ({"torchvision": Probe(error="libjpeg.so: cannot open")}, "torchvision does not load"),
        ({"dgc": "/there"}, "dgc comes from /there, not from this checkout (/here)"),
    ]
    notes: list[tuple[Mapping[str, object], str]] = [
        ({"root": True}, "root"),
        ({"dgc": None}, "dgc is not installed"),
        (WITHOUT_HOROVOD, "torch.distributed connects the ranks"),
        ({"cores": 2}, "2 cores"),
        ({"variables": {"HOROVOD_FUSION_THRESHOLD": "67108864"}}, "do not repeat bitwise"),
        ({"torch": Probe({"cuda": "13.0", "gpus": ["H100"]})}, "no NCCL"),
        ({"torchvision": Probe(error="operator torchvision::nms does not exist")}, "torchvision::nms"),
    ]
    for change, named in (*faults, *notes):
        (finding,) = diagnose(replace(HEALTHY, **change))  # type: ignore[arg-type]
        assert named in finding.problem and finding.remedy and finding.note == ((change, named) in notes), change


def test_healthy_and_empty_machines() -> None:
    assert diagnose(HEALTHY) == []
    assert dict(describe(HEALTHY))["MPI threading level"] == "MULTIPLE"
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    fine = {**as_root, "HOROVOD_FUSION_THRESHOLD": "0", "OPAL_PREFIX": "/env/"}
    assert diagnose(replace(HEALTHY, root=True, variables=fine)) == []
    probes: Any = [Probe(error="No module named 'torch'")] * 7
    bare = Facts((3, 11, 2), dict.fromkeys(PACKAGES), None, 2, False, "/usr", False, *probes)
    assert any("not installed: torch" in finding.problem for finding in diagnose(bare))
    assert dict(describe(replace(HEALTHY, dgc="/there")))["dgc comes from"] == "/there"
    assert dict(describe(bare))["torch"] == "missing"
    assert mpi_version("Open MPI 4.1.8") == mpi_version("mpirun (Open MPI) 4.1.4") == ("Open MPI", 4)
    assert mpi_version("HYDRA build details:") is mpi_version(None) is None


def test_a_probe_tells_an_answer_from_a_failure(tmp_path: Path) -> None:
    env = dict(os.environ)
    assert run_probe(["sh", "-c", "echo noise; echo '{\"a\": 1}'"], env).answer == {"a": 1}
    assert run_probe(["sh", "-c", "echo bad luck >&2; exit 3"], env) == Probe(error="bad luck")
    assert run_probe(["sh", "-c", "exit 3"], env).error == "exit status 3"
    assert run_probe(["no-such-program"], env).error == "no-such-program not found"
    assert "no answer" in run_probe(["sleep", "600"], env, timeout_s=0.1).error
    # the library is looked for as the script of another folder finds it
    (tmp_path / "dgc").mkdir()
    (tmp_path / "dgc/__init__.py").touch()
    assert source_of_library({**env, "PYTHONPATH": str(tmp_path)}) == str(tmp_path)


def test_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """It oversubscribes only when it must, shares the cores, and keeps what the user set."""
    assert "--oversubscribe" not in mpirun(2, 2, ["train.py"])
    words = mpirun(4, 2, ["train.py", "--configs", "a"])
    assert "--oversubscribe" in words and words[-3:] == ["train.py", "--configs", "a"]
    with pytest.raises(ValueError, match="at least 1"):
        prepare(0, [])
    for installed, launcher in ((object(), "mpirun"), (None, "torchrun")):  # Horovod
        monkeypatch.setattr("scripts.launch.find_spec", lambda name, installed=installed: installed)
        words, _ = prepare(3, ["train.py", "--configs", "a"])
        assert words[0] == launcher and "3" in words
        assert words[-4:] == [sys.executable, "train.py", "--configs", "a"]
    assert torchrun(3, ["-c", "1"])[-3:] == [sys.executable, "-c", "1"]
    assert environment(4, 16, False, {})["OMP_NUM_THREADS"] == "4"
    assert environment(4, 2, False, {})["OMP_NUM_THREADS"] == "1"
    assert environment(4, 16, False, {"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"] == "2"
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in environment(4, 2, False, {})
    assert environment(4, 2, True, {})["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with what set-up reads and nothing else."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup.sh", tmp_path / "scripts")
    for file in ROOT.glob("requirements*.txt"):
        shutil.copy(file, tmp_path)
    return tmp_path


def setup_says(checkout: Path, **variables: str) -> str:
    """Run set-up where it must fail; its last line."""
    options = ("GPU", "SYSTEM_MPI", "HOROVOD", "CXX")
    env = {name: value for name, value in os.environ.items() if name not in options}
    env |= {"VENV": str(checkout / "env"), "PYTHON": "python3", **variables}
    done = subprocess.run(["bash", "scripts/setup.sh"], cwd=checkout, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def tools(checkout: Path) -> str:
    """A PATH that has no mpicc."""
    folder = checkout / "tools"
    folder.mkdir()
    names = "bash flock dirname mkdir cat sha256sum cut c++ mktemp rm touch date tail grep"
    for name in names.split():
        (folder / name).symlink_to(shutil.which(name) or "/bin/true")
    return str(folder)


def executable(file: Path, text: str) -> str:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_setup_names_what_is_missing_or_wrong(checkout: Path) -> None:
    path = tools(checkout)
    old = executable(checkout / "python3.8", '[ "$1" = --version ] && echo "Python 3.8.1" && exit 0\nexit 1')
    for message, variables in {
        "no python3.99 found; install Python 3.10": {"PYTHON": "python3.99"},
        "Python 3.8.1 is too old": {"PYTHON": old},
        "no C++ compiler found; install g++": {"CXX": "no-such-compiler"},
        "no mpicc on PATH": {"SYSTEM_MPI": "1", "PYTHON": sys.executable, "PATH": path},
        "HOROVOD is no; it must be 0 or 1": {"HOROVOD": "no"},
        "cannot write": {"VENV": "/dev/null/env"},
    }.items():
        with case(message):
            assert message in setup_says(checkout, **variables)
    # it needs no MPI without Horovod and remembers both; this python is new enough, and creates no environment
    python = executable(checkout / "python3", '[ "$1" != -m ]')
    (checkout / "env").mkdir(exist_ok=True)
    for options, message in (("0 1", "no mpicc"), ("0 1 1", "no mpicc"), ("0 1 0", "could not create an env")):
        (checkout / "env/.options").write_text(f"{options}\n")
        assert message in setup_says(checkout, PYTHON=python, PATH=path)
    assert "no mpicc" in setup_says(checkout, PYTHON=python, PATH=path, HOROVOD="1")


def test_setup_leaves_an_environment_of_another_checkout_alone(checkout: Path, tmp_path: Path) -> None:
    other = tmp_path / "another checkout"
    (other / "dgc").mkdir(parents=True)
    (other / "dgc/__init__.py").touch()
    further = "no python3.99 found"
    record = checkout / "env/lib/python3.11/site-packages/dgc_torch-0.1.0.dist-info/direct_url.json"
    record.parent.mkdir(parents=True)

    def said_of(source: Path, editable: bool = True, **variables: str) -> str:
        """Where the environment's dgc is installed from this folder."""
        record.write_text(json.dumps({"dir_info": {"editable": True} if editable else {}, "url": source.as_uri()}))
        return setup_says(checkout, PYTHON="python3.99", **variables)

    message = said_of(other)
    assert f"installed from the checkout {other}" in message
    assert "make setup VENV=" in message and "TAKE_OVER=1" in message
    assert other.as_uri() in record.read_text() and not (checkout / "env/.unfinished").exists()
    assert further in said_of(other, TAKE_OVER="1")
    assert further in said_of(checkout) and further in said_of(tmp_path / "removed")
    assert further in said_of(other, editable=False)  # a copy, installed from there


def test_train_takes_the_library_of_its_own_checkout(tmp_path: Path) -> None:
    """Also where the environment, or PYTHONPATH, has another one."""
    shutil.copy(ROOT / "train.py", tmp_path)
    (tmp_path / "dgc").mkdir()
    (tmp_path / "dgc/__init__.py").write_text("raise SystemExit(f'this is {__file__}')")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, str(tmp_path / "train.py"), "--configs", "configs/digits/cnn.py"]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stderr.strip() == f"this is {tmp_path / 'dgc/__init__.py'}"
