"""A temporary copy of the working tree in which faults are applied and tests run."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .fault import Fault

ROOT = Path(__file__).parents[2]
BUILD = Path("dgc/kernels/build.py")
LIBRARY = Path("dgc/kernels/libdgc_kernels.so")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-rfE")
FIRST = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
SECONDS = 600.0  # longest run of one fault's tests


@dataclass(frozen=True)
class Ended:
    """How a run of tests ended. `output` has everything that it printed."""

    status: int | None  # None: it was killed after SECONDS
    output: str

    @property
    def first(self) -> str | None:
        """Node id of the first test that failed."""
        found = FIRST.search(self.output)
        return found[1] if found else None


class Copy:
    """A copy of the working tree at `root`. Its library is up to date."""

    def __init__(self, root: Path):
        self.root = root

    def tests(self, tests: Sequence[str], *options: str, write_bytecode: bool = False) -> Ended:
        """Runs tests of the copy."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.root),
            "PYTHONDONTWRITEBYTECODE": "" if write_bytecode else "1",
            "OMP_NUM_THREADS": "1",
        }
        temporary = f"--basetemp={self.root.with_name(self.root.name + '-tmp')}"
        command = [sys.executable, *PYTEST, temporary, *options, *tests]
        return run(command, self.root, environment)

    @contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        """Context in which the fault is applied.

        Raises:
            RuntimeError: The library cannot be built with the fault.
        """
        path, library = self.root / fault.file, self.root / LIBRARY
        whole, times = path.read_bytes(), path.stat()
        kept = library.with_suffix(".kept")
        if fault.is_native:
            shutil.copy2(library, kept)
        try:
            fault.apply(self.root)
            # Python compares the time of a source with that of its bytecode in whole seconds.
            os.utime(path, (times.st_atime, times.st_mtime + 100))
            if fault.is_native:
                self.build()
            yield
        finally:
            path.write_bytes(whole)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            if fault.is_native:
                kept.replace(library)

    def build(self) -> None:
        """Builds the library from the copy's sources. Raises RuntimeError if that fails."""
        done = run([sys.executable, str(self.root / BUILD)], self.root, dict(os.environ))
        if done.status:
            raise RuntimeError(done.output)


def run(command: Sequence[str], folder: Path, environment: dict[str, str]) -> Ended:
    """Runs a command with a limit of time."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Ended(None, "")
    return Ended(done.returncode, done.stdout)


def copy_tree(to: Path) -> Copy:
    """Copies the working tree, with new files that git does not ignore, and builds the library there."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in {*listed.stdout.split("\0"), str(LIBRARY)}:
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    copy = Copy(to)
    copy.build()
    return copy


def clone(copy: Copy, to: Path) -> Copy:
    """Copies a copy, with what Python has compiled there."""
    shutil.copytree(copy.root, to)
    return Copy(to)
