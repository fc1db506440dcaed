"""setup.py and scripts/wheels: which compiler builds a wheel, and its kernels where there is no compiler."""

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from environment import patient

from dgc.kernels.library import supported_isas
from scripts.wheels.check import FIRST_IMPORT, best_isa

ROOT = Path(__file__).parent.parent
FILES = ("dgc", "setup.py", "pyproject.toml", "README.md", "LICENSE", "scripts/wheels")


def build_wheel(folder: Path, env: Mapping[str, str]) -> Path:
    """The wheel that a copy of the checkout gives with the packages of this environment."""
    for name in FILES:
        source, copy = ROOT / name, folder / "source" / name
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(source, copy, ignore=ignored) if source.is_dir() else shutil.copy(source, copy)
    words = [sys.executable, "-c", f"import backend; backend.build_wheel({str(folder)!r})"]
    options: Any = {"cwd": folder / "source", "capture_output": True, "text": True, "timeout": patient(300)}
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": "scripts/wheels", **env}, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_compiler_is_the_one_asked_for_then_that_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert supported_isas()[-1] == best_isa()  # those that Linux reports
    monkeypatch.setenv("DGC_NATIVE", "0")
    names = runpy.run_path(str(shutil.copy(ROOT / "setup.py", tmp_path)))
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
    unknown = "DGC_NATIVE is 'yes'; it must be auto, require or 0"
    for wanted, message in (("require", "need a C"), ("yes", unknown)):
        monkeypatch.setenv("DGC_NATIVE", wanted)
        with pytest.raises(SystemExit, match=message):
            choose()


def test_zig_is_fetched_for_an_sdist_and_where_there_is_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only there: a checkout with a compiler needs no download of 90 MB."""
    backend = runpy.run_path(str(ROOT / "scripts/wheels/backend.py"))
    monkeypatch.setattr(backend["build_meta"], "get_requires_for_build_wheel", lambda settings: ["wheel"])
    monkeypatch.setattr(backend["platform"], "machine", lambda: "x86_64")
    monkeypatch.chdir(tmp_path)
    requires, zig = backend["get_requires_for_build_wheel"], backend["ZIG"]
    compiler, sdist = tmp_path / "c++", tmp_path / "PKG-INFO"
    monkeypatch.setenv("PATH", str(tmp_path))
    for files, variables, needed in (
        ([compiler], {}, ["wheel"]),
        ([], {}, ["wheel", zig]),
        ([compiler, sdist], {}, ["wheel", zig]),
        ([compiler, sdist], {"CXX": "g++"}, ["wheel"]),
        ([compiler, sdist], {"DGC_NATIVE": "0"}, ["wheel"]),
    ):
        for file in (compiler, sdist):
            file.touch(mode=0o755) if file in files else file.unlink(missing_ok=True)
        for name in ("CXX", "DGC_NATIVE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert requires() == needed


def test_a_wheel_without_kernels_is_for_every_platform(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, {"DGC_NATIVE": "0"})
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(ZipFile(wheel).namelist())
    files = [file for kind in ("py", "cpp", "h") for file in ROOT.glob(f"dgc/**/*.{kind}")]
    sources = {str(file.relative_to(ROOT)) for file in files}
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
