"""Builds the native kernels: all files in `dgc/kernels/cpp` become one shared library in this folder.

    python -m dgc.kernels.build

It needs only a C++17 compiler ($CXX, else c++): the library has a C interface and does not use torch. Files named
*_avx2.cpp and *_avx512.cpp may use those instructions. All others must run on any CPU. A kernel's variant is
selected when it is called. Contraction to FMA is disabled, because all backends must give the same bits.
The library contains a stamp of its sources and compiler. Building again does nothing while the stamp matches.
"""

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "cpp"
LIBRARY = Path(__file__).parent / "libdgc_kernels.so"

FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra")
AVX2 = ("-mavx2", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mpopcnt")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def flags_of(source: Path) -> tuple[str, ...]:
    """Return the compiler flags for `source`. Its name decides which instructions it may use."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return FLAGS
    if source.stem.endswith("_avx512"):
        return (*FLAGS, *AVX512)
    if source.stem.endswith("_avx2"):
        return (*FLAGS, *AVX2)
    return FLAGS


def sources_digest() -> str:
    """Return a digest of the sources."""
    digest = hashlib.sha256()
    for file in sorted(SOURCES.rglob("*.[ch]*")):
        digest.update(str(file.relative_to(SOURCES)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def commands_digest() -> str:
    """Return a digest of the compiler command and version, the flags and the machine type."""
    words = [*compiler(), *FLAGS, *AVX2, *AVX512, platform.machine()]
    version = subprocess.run([*compiler(), "--version"], check=True, capture_output=True, text=True).stdout
    return hashlib.sha256("\0".join([*words, version]).encode()).hexdigest()[:20]


def stamp(sources: str, commands: str = "") -> str:
    return f"dgc-kernels:{sources}:{commands}"


def build() -> bool:
    """Build LIBRARY from the present sources if it is out of date. Returns whether it was built.

    Raises:
        RuntimeError: There is no compiler, or compilation failed.
    """
    try:
        expected = stamp(sources_digest(), commands_digest())
    except FileNotFoundError:
        missing = shlex.join(compiler())
        raise RuntimeError(f"no C++ compiler: {missing} was not found; install one or set CXX") from None
    if LIBRARY.exists() and expected.encode() in LIBRARY.read_bytes():
        return False
    files = sorted(SOURCES.rglob("*.cpp"))
    # In the library's folder: a rename within one file system is atomic.
    with tempfile.TemporaryDirectory(dir=LIBRARY.parent, prefix=".build-") as scratch:
        objects = [Path(scratch, f"{file.parent.name}_{file.stem}.o") for file in files]
        extra = [f"-I{SOURCES}", f'-DDGC_STAMP="{expected}"']
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [
                pool.submit(_run, [*compiler(), *flags_of(file), *extra, "-c", str(file), "-o", str(object_)])
                for file, object_ in zip(files, objects, strict=True)
            ]
            for job in jobs:
                job.result()
        linked = Path(scratch, LIBRARY.name)
        _run([*compiler(), *FLAGS, "-shared", *map(str, objects), "-o", str(linked)])
        linked.replace(LIBRARY)
    return True


def _run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)}\n{done.stderr}")


def main() -> None:
    try:
        if build():
            print(f"built {LIBRARY}")
    except RuntimeError as error:
        sys.exit(f"the native kernels could not be built: {error}")


if __name__ == "__main__":
    main()
