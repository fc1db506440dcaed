"""Builds the native kernels into the wheel. pyproject.toml has everything else.

    python -m build        sdist, and from it a wheel for glibc 2.28 or later: Zig's Clang builds the kernels.
                           It needs `pip install build`
    pip install .          kernels by the local compiler; by Zig's Clang if there is none
    pip install -e .       no kernels: `python -m dgc.kernels.build` builds them in the checkout

The kernels have a C interface, so that one wheel serves every Python: py3-none-manylinux_2_28_x86_64.

CXX=g++-13            the compiler, in all three cases
DGC_NATIVE=require    an error if there is no compiler, in place of a warning and a wheel without kernels
DGC_NATIVE=0          a wheel without kernels, for every platform
"""

import os
import platform
import re
import runpy
import shlex
import shutil
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
KERNELS = Path("dgc", "kernels")
OLDEST_GLIBC = "2.28"
ZIG = [sys.executable, "-m", "ziglang", "c++", "-target", f"{platform.machine()}-linux-gnu.{OLDEST_GLIBC}", "-s"]


def choose_compiler() -> list[str]:
    """The command of the compiler; empty for a wheel without kernels."""
    wanted = os.environ.get("DGC_NATIVE", "auto")
    if wanted not in ("auto", "require", "0"):
        sys.exit(f"DGC_NATIVE is {wanted!r}; it must be auto, require or 0")
    is_sdist = (ROOT / "PKG-INFO").exists()  # its wheel may go to other machines
    by_zig = ZIG if find_spec("ziglang") else []
    local = ["c++"] if shutil.which("c++") else []
    try:
        given = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        sys.exit(f"CXX is {os.environ['CXX']!r}, which is no command: {error}")
    found = given or (is_sdist and by_zig) or local or by_zig
    if wanted == "0" or sys.platform != "linux":
        return []
    if not found or not shutil.which(found[0]):
        missing = f"the native kernels need a C++ compiler, and {shlex.join(found) or 'c++'} was not found"
        if wanted == "require":
            sys.exit(missing)
        warnings.warn(
            f"{missing}; the wheel has none, and dgc will use plain PyTorch, which is slower", stacklevel=1
        )
        return []
    return found


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if COMPILER and not self.editable_mode:
            os.environ["CXX"] = shlex.join(COMPILER)
            runpy.run_path(str(Path(self.build_lib, KERNELS, "build.py")))["build"]()


class WheelForEveryPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        library = Path(self.get_finalized_command("build").build_lib, KERNELS, "libdgc_kernels.so")
        if not COMPILER or not library.exists():  # an editable installation has none
            return "py3", "none", "any"
        content = library.read_bytes()
        tag = f"linux_{platform.machine()}"
        if b"libstdc++.so" not in content:  # a local compiler's belongs to its machine
            needed = max(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", content))
            tag = f"many{tag.replace('_', f'_2_{max(needed, int(OLDEST_GLIBC[2:]))}_', 1)}"
        return "py3", "none", tag


class LibraryWithKernels(Distribution):
    def has_ext_modules(self) -> bool:
        return bool(COMPILER)


COMPILER = choose_compiler()

if __name__ == "__main__":
    setup(
        distclass=LibraryWithKernels,
        cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelForEveryPython},
    )
