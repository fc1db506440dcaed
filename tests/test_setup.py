"""Set-up's refusals and its stamp, the launcher's command, and wheels."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from environment import REPOSITORY, patient
from refusals import refuse

from dgc.kernels.library import supported_isas
from scripts.launch import environment, mpirun, prepare, torchrun
from tools.wheels.check import FIRST_IMPORT, best_isa

Patch = pytest.MonkeyPatch


def test_train_py_takes_the_library_of_its_own_checkout(tmp_path: Path) -> None:
    """Also where the environment, or PYTHONPATH, has another one."""
    shutil.copy(REPOSITORY / "train.py", tmp_path)
    (tmp_path / "dgc").mkdir()
    (tmp_path / "dgc/__init__.py").write_text("raise SystemExit(f'this is {__file__}')")
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    words = [sys.executable, str(tmp_path / "train.py"), "--configs", "configs/digits/cnn.py"]
    done = subprocess.run(words, cwd=REPOSITORY, env=env, capture_output=True, text=True)
    assert done.stderr.strip() == f"this is {tmp_path / 'dgc/__init__.py'}"


def test_the_launcher(monkeypatch: Patch) -> None:
    """It oversubscribes only when it must, shares the cores, and keeps what the user set."""
    assert "--oversubscribe" not in mpirun(2, 2, ["train.py"])
    words = mpirun(4, 2, ["train.py", "--configs", "a"])
    assert "--oversubscribe" in words and words[-3:] == ["train.py", "--configs", "a"]
    refuse("at least 1", prepare, 0, [])
    for installed, launcher in ((object(), "mpirun"), (None, "torchrun")):  # Horovod
        monkeypatch.setattr("scripts.launch.find_spec", lambda name, installed=installed: installed)
        words, _ = prepare(3, ["train.py", "--configs", "a"])
        assert words[0] == launcher and "3" in words
        assert words[-4:] == [sys.executable, "train.py", "--configs", "a"]
    assert torchrun(3, ["-c", "1"])[-3:] == [sys.executable, "-c", "1"]
    for cores, given, threads in ((16, {}, "4"), (2, {}, "1"), (16, {"OMP_NUM_THREADS": "2"}, "2")):
        assert environment(4, cores, False, given)["OMP_NUM_THREADS"] == threads
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in environment(4, 2, False, {})
    assert environment(4, 2, True, {})["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts/setup.sh", tmp_path / "scripts")
    for file in REPOSITORY.glob("requirements*.txt"):
        shutil.copy(file, tmp_path)
    return tmp_path


def setup_says(checkout: Path, **variables: str) -> str:
    options = ("GPU", "SYSTEM_MPI", "HOROVOD", "CXX")
    env = {name: value for name, value in os.environ.items() if name not in options}
    env |= {"VENV": str(checkout / "env"), "PYTHON": "python3", **variables}
    done = subprocess.run(["bash", "scripts/setup.sh"], cwd=checkout, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def executable(file: Path, text: str) -> str:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_setup_names_what_is_missing_or_wrong(checkout: Path) -> None:
    (folder := checkout / "tools").mkdir()  # a PATH that has no mpicc
    for name in "bash flock dirname mkdir cat sha256sum cut c++ mktemp rm touch date tail grep".split():
        (folder / name).symlink_to(shutil.which(name) or "/bin/true")
    old = executable(checkout / "python3.8", '[ "$1" = --version ] && echo "Python 3.8.1" && exit 0\nexit 1')
    for message, variables in {
        "no python3.99 found; install Python 3.10": {"PYTHON": "python3.99"},
        "Python 3.8.1 is too old": {"PYTHON": old},
        "no C++ compiler found; install g++": {"CXX": "no-such-compiler"},
        "no mpicc on PATH": {"SYSTEM_MPI": "1", "PYTHON": sys.executable, "PATH": str(folder)},
        "HOROVOD is no; it must be 0 or 1": {"HOROVOD": "no"},
        "cannot write": {"VENV": "/dev/null/env"},
    }.items():
        assert message in setup_says(checkout, **variables)
    # it needs no MPI without Horovod and remembers both; this python is new enough, and creates no environment
    python = executable(checkout / "python3", '[ "$1" != -m ]')
    (checkout / "env").mkdir(exist_ok=True)
    for options, message in (("0 1", "no mpicc"), ("0 1 1", "no mpicc"), ("0 1 0", "could not create an env")):
        (checkout / "env/.options").write_text(f"{options}\n")
        assert message in setup_says(checkout, PYTHON=python, PATH=str(folder))
    assert "no mpicc" in setup_says(checkout, PYTHON=python, PATH=str(folder), HOROVOD="1")


def test_setup_leaves_an_environment_of_another_checkout_alone(checkout: Path, tmp_path: Path) -> None:
    other, further = tmp_path / "another checkout", "no python3.99 found"
    (other / "dgc").mkdir(parents=True)
    (other / "dgc/__init__.py").touch()
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


def build_wheel(folder: Path, env: Mapping[str, str]) -> Path:
    """The wheel that a copy of the checkout gives with the packages of this environment."""
    for name in ("dgc", "setup.py", "pyproject.toml", "README.md", "LICENSE", "tools/wheels"):
        source, copy = REPOSITORY / name, folder / "source" / name
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(source, copy, ignore=ignored) if source.is_dir() else shutil.copy(source, copy)
    words = [sys.executable, "-c", f"import backend; backend.build_wheel({str(folder)!r})"]
    options: Any = {"cwd": folder / "source", "capture_output": True, "text": True, "timeout": patient(300)}
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": "tools/wheels", **env}, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_setup_prints_the_size_of_what_is_installed_while_the_log_stands_still(tmp_path: Path) -> None:
    (log := tmp_path / "setup.log").write_text("Collecting torch\n\n")
    source = (REPOSITORY / "scripts/setup.sh").read_text()
    functions = re.search(r"^log\(\).*?^run\(\)", source, re.M | re.S)
    assert functions is not None
    script = f"""
        LOG={log} VENV={tmp_path}
        sleep() {{ command sleep 0.1; }}
        {functions[0].removesuffix("run()")}
        command sleep 300 & waits=$!
        progress $waits | head -n 2
        kill $waits
    """
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert re.fullmatch(r"setup: \d s: Collecting torch", first)
    assert re.fullmatch(r"setup: \d s: installing, \d MB so far", second)


def test_the_compiler_is_the_one_asked_for_then_that_of_the_machine(tmp_path: Path, monkeypatch: Patch) -> None:
    assert supported_isas()[-1] == best_isa()  # those that Linux reports
    monkeypatch.setenv("DGC_NATIVE", "0")
    names = runpy.run_path(str(shutil.copy(REPOSITORY / "setup.py", tmp_path)))
    choose, zig = names["choose_compiler"], names["ZIG"]
    names["find_spec"] = choose.__globals__["find_spec"] = {"ziglang": "here"}.get
    assert choose() == []
    monkeypatch.delenv("DGC_NATIVE")
    monkeypatch.setenv("CXX", f"{sys.executable} -O1")
    assert choose() == [sys.executable, "-O1"]
    monkeypatch.delenv("CXX")
    if shutil.which("c++"):
        assert choose() == ["c++"]
    (tmp_path / "PKG-INFO").touch()
    assert choose() == zig
    monkeypatch.setenv("PATH", "")
    (tmp_path / "PKG-INFO").unlink()
    assert choose() == zig
    choose.__globals__["find_spec"] = {}.get
    with pytest.warns(UserWarning, match=r"need a C\+\+ compiler, and c\+\+ was not found; the wheel has none"):
        assert choose() == []
    for wanted, message in (("require", "need a C"), ("yes", "is 'yes'; it must be auto, require or 0")):
        monkeypatch.setenv("DGC_NATIVE", wanted)
        with pytest.raises(SystemExit, match=message):
            choose()


@pytest.mark.parametrize(
    ("has_compiler", "is_sdist", "variable", "is_fetched"),
    [
        (True, False, "NONE=", False),
        (False, False, "NONE=", True),
        (True, True, "NONE=", True),
        (True, True, "CXX=g++", False),
        (True, True, "DGC_NATIVE=0", False),
    ],
)
def test_zig_is_fetched_where_no_compiler_fits(
    has_compiler: bool, is_sdist: bool, variable: str, is_fetched: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    """For an sdist, or without a compiler: a checkout with a compiler needs no download of 90 MB."""
    backend = runpy.run_path(str(REPOSITORY / "tools/wheels/backend.py"))
    monkeypatch.setattr(backend["build_meta"], "get_requires_for_build_wheel", lambda settings: ["wheel"])
    monkeypatch.setattr(backend["platform"], "machine", lambda: "x86_64")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CXX", "DGC_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    if has_compiler:
        (tmp_path / "c++").touch(mode=0o755)
    if is_sdist:
        (tmp_path / "PKG-INFO").touch()
    monkeypatch.setenv(*variable.split("="))
    assert backend["get_requires_for_build_wheel"]() == ["wheel", *[backend["ZIG"]] * is_fetched]


def test_a_wheel_without_kernels_is_for_every_platform(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, {"DGC_NATIVE": "0"})
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(ZipFile(wheel).namelist())
    files = [file for kind in ("py", "cpp", "h") for file in REPOSITORY.glob(f"dgc/**/*.{kind}")]
    sources = {str(file.relative_to(REPOSITORY)) for file in files}
    assert sources | {"dgc/py.typed"} <= names  # the sources too: with a compiler they can be built later
    assert {name.split("/")[0] for name in names} == {"dgc", wheel.name.split("-py3")[0] + ".dist-info"}


@pytest.mark.proof
def test_the_kernels_of_a_wheel_run_where_there_is_no_compiler(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, {"DGC_NATIVE": "require"})
    assert "-py3-none-linux_" in wheel.name  # needs the libstdc++ of this machine
    ZipFile(wheel).extractall(tmp_path / "installed")
    env = {"PYTHONPATH": str(tmp_path / "installed"), "PATH": ""}
    words = [sys.executable, "-W", "error", "-c", FIRST_IMPORT]
    said = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [str(tmp_path / "installed/dgc/__init__.py"), f"native ({best_isa()})"]
