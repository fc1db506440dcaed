"""Builds the native kernels: the C++ of all families, and what they share, become one library in this folder.

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
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent
LIBRARY = Path(__file__).parent / "libdgc_kernels.so"

FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra")
AVX2 = ("-mavx2", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mpopcnt")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")


def compiler() -> list[str]:
    """Return the command of the compiler. Raises RuntimeError if CXX is no command."""
    given = os.environ.get("CXX", "")
    try:
        return shlex.split(given) or ["c++"]
    except ValueError as error:
        raise RuntimeError(f"CXX is {given!r}, which is no command: {error}") from None


def flags_of(source: Path) -> tuple[str, ...]:
    """Return the compiler flags for `source`. Its name decides which instructions it may use."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return FLAGS
    if source.stem.endswith("_avx512"):
        return (*FLAGS, *AVX512)
    if source.stem.endswith("_avx2"):
        return (*FLAGS, *AVX2)
    return FLAGS


def sources() -> list[Path]:
    """Return the files that the library is built from."""
    return sorted([*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h")])


def include_flags() -> list[str]:
    """Return the compiler flags by which a family includes the headers of another family, and the common ones."""
    return [f"-I{folder}" for folder in [SOURCES, *sorted(SOURCES.glob("*/cpp"))]]


def sources_digest() -> str:
    """Return a digest of the sources."""
    digest = hashlib.sha256()
    for file in sources():
        digest.update(str(file.relative_to(SOURCES)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def commands_digest() -> str:
    """Return a digest of the compiler command and version, the flags and the machine type."""
    words = [*compiler(), *FLAGS, *AVX2, *AVX512, platform.machine()]
    version = _run([*compiler(), "--version"])
    return hashlib.sha256("\0".join([*words, version]).encode()).hexdigest()[:20]


def stamp(sources: str, commands: str = "") -> str:
    return f"dgc-kernels:{sources}:{commands}"


def is_whole(library: Path) -> bool:
    """Return whether a shared library has all bytes that the loader maps; without some, the process would end."""
    size = library.stat().st_size
    with library.open("rb") as file:
        head = file.read(64)
        if len(head) < 64:
            return False
        if head[:6] != b"\x7fELF\x02\x01":  # not ELF of 64 bits, little-endian: the loader refuses it
            return True
        (segments,), (width, count) = struct.unpack_from("<Q", head, 32), struct.unpack_from("<HH", head, 54)
        file.seek(segments)
        table = file.read(width * count)
    ends = [sum(struct.unpack_from("<QQQQ", table, at + 8)[::3]) for at in range(0, len(table) - width + 1, width)]
    return len(table) == width * count and max(ends, default=0) <= size


def build() -> bool:
    """Build LIBRARY from the present sources if it is out of date or damaged. Returns whether it was built.

    Raises:
        RuntimeError: There is no compiler, compilation failed, or the folder of LIBRARY cannot be written.
    """
    try:
        return _build()
    except OSError as error:
        raise RuntimeError(f"{error.filename or LIBRARY.parent}: {error.strerror}") from error


def _build() -> bool:
    expected = stamp(sources_digest(), commands_digest())
    if LIBRARY.exists() and is_whole(LIBRARY) and expected.encode() in LIBRARY.read_bytes():
        return False
    files = [file for file in sources() if file.suffix == ".cpp"]
    # In the library's folder: a rename within one file system is atomic.
    with tempfile.TemporaryDirectory(dir=LIBRARY.parent, prefix=".build-") as scratch:
        objects = [Path(scratch, f"{file.parent.name}_{file.stem}.o") for file in files]
        extra = [*include_flags(), f'-DDGC_STAMP="{expected}"']
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


def _run(words: list[str]) -> str:
    """Run the compiler and return its output."""
    try:
        done = subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace", check=False)
    except FileNotFoundError:
        raise RuntimeError(f"no C++ compiler: {words[0]} was not found; install one or set CXX") from None
    except OSError as error:
        raise RuntimeError(f"the C++ compiler {words[0]} cannot be started: {error.strerror}") from None
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)} ended with status {done.returncode}\n{done.stderr}".rstrip())
    return done.stdout


def main() -> None:
    try:
        if build():
            print(f"built {LIBRARY}", file=sys.stderr)  # which prints any path in any encoding
    except RuntimeError as error:
        sys.exit(f"the native kernels could not be built: {error}")


if __name__ == "__main__":
    main()
