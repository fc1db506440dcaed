"""A temporary copy of the working tree in which faults are applied and tests run."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from environment import patient, python_path

from .faults import Fault

ROOT = Path(__file__).parents[2]
LIBRARY = Path("dgc/kernels/libdgc_kernels.so")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.mutants.plugin", "--tb=short", "-rfE")
FIRST = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Ended:
    """How a run of tests ended, and everything that it printed. status: None if it did not end in time."""

    status: int | None
    output: str = ""

    @property
    def reason(self) -> str:
        """Of a failure: the first test that failed, if one did."""
        if self.status is None:
            return "no end in time"
        first = FIRST.search(self.output)
        return first[1] if first else f"pytest ended with {self.status}: {' '.join(self.output.split()[-20:])}"


@dataclass(frozen=True)
class Copy:
    """A copy of the working tree at `root`. Its library is up to date."""

    root: Path

    def tests(self, tests: Sequence[str], limit: float, *options: str, write_bytecode: bool = False) -> Ended:
        """Runs tests of the copy, in this order if they are single ones.

        After `limit` seconds of a quiet machine they are killed, with all that they started.
        """
        variables = {"PYTHONPATH": python_path().replace(str(ROOT), str(self.root)), "OMP_NUM_THREADS": "1"}
        variables["PYTHONDONTWRITEBYTECODE"] = "" if write_bytecode else "1"
        own = self.root.with_name(self.root.name + "-tmp")
        chosen = own.with_suffix(".json")
        chosen.write_text(json.dumps(tests))
        # a test function has one argument for all of its parameters; the plugin selects from them
        functions = dict.fromkeys(test.partition("[")[0] for test in tests)
        command = [sys.executable, *PYTEST, f"--basetemp={own}", f"--chosen={chosen}", *options, *functions]
        process = subprocess.Popen(
            command, cwd=self.root, env={**os.environ, **variables}, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=patient(limit))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Ended(None)
        return Ended(process.returncode, output)

    @contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        """Context in which the fault is applied."""
        path = self.root / fault.file
        whole, times = path.read_bytes(), path.stat()
        try:
            path.write_text(fault.code)
            # Python compares the time of a source with the time of its bytecode in whole seconds.
            os.utime(path, (times.st_atime, times.st_mtime + 100))
            yield
        finally:
            path.write_bytes(whole)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def copy_tree(to: Path) -> Copy:
    """Copies the working tree, with new files that git does not ignore, and the native library."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in {*listed.stdout.split("\0"), str(LIBRARY)}:
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return Copy(to)
