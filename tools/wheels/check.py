"""Checks a built wheel: its size, its tag, the symbols that it needs, and that its kernels run without a compiler.

python tools/wheels/check.py dist/dgc_torch-*.whl     in an environment with torch and jaxtyping
"""

import os
import platform
import re
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from zipfile import ZipFile

MOST_BYTES = 1_000_000
NEWEST_GLIBC = 28
LIBRARY = "dgc/kernels/libdgc_kernels.so"
LEAVES = {"avx512": "avx512f avx512bw avx512dq avx512vl", "avx2": "avx2 f16c bmi1 bmi2 abm popcnt"}

FIRST_IMPORT = """
import torch, dgc
from dgc import kernels
print(dgc.__file__, kernels.describe(torch.device("cpu")), sep="\\n")
"""


def best_isa() -> str:
    """The best instruction set of this CPU, as Linux reports it."""
    flags = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text()))
    if platform.machine() != "x86_64" or not flags.issuperset(LEAVES["avx2"].split()):
        return "portable"
    return "avx512" if flags.issuperset(LEAVES["avx512"].split()) else "avx2"


def problems(wheel: Path, folder: Path) -> list[str]:
    """What is wrong with the wheel. It is unpacked into `folder`."""
    found = []
    if not fnmatch(wheel.name, f"dgc_torch-*-py3-none-manylinux_2_{NEWEST_GLIBC}_{platform.machine()}.whl"):
        found.append(f"its tag is not py3-none-manylinux_2_{NEWEST_GLIBC}_{platform.machine()}")
    if wheel.stat().st_size > MOST_BYTES:
        found.append(f"it has {wheel.stat().st_size} bytes, more than {MOST_BYTES}")
    with ZipFile(wheel) as archive:
        archive.extractall(folder)
    library = (folder / LIBRARY).read_bytes()
    if b"libstdc++.so" in library:
        found.append("it needs libstdc++")
    if (newest := max(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library))) > NEWEST_GLIBC:
        found.append(f"it needs glibc 2.{newest}")
    env = {"PYTHONPATH": str(folder), "PATH": "", "HOME": os.environ.get("HOME", "/")}
    words = [sys.executable, "-W", "error", "-c", FIRST_IMPORT]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    expected = [str(folder / "dgc/__init__.py"), f"native ({best_isa()})"]
    if done.stdout.splitlines() != expected or done.stderr:
        found.append(f"the first import gives {done.stdout!r}, not {expected}\n{done.stderr}")
    return found


def main() -> None:
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            if found := problems(Path(name), Path(folder).resolve()):
                sys.exit("\n".join([f"{name}:", *found]))
        print(f"{name}: {Path(name).stat().st_size} bytes, glibc up to 2.{NEWEST_GLIBC}, native ({best_isa()})")


if __name__ == "__main__":
    main()
