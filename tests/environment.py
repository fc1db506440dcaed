"""The PYTHONPATH of the processes that tests start, and the time that they get."""

import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
SLOWNESS = "TESTS_SLOWNESS"  # the environment variable with which all processes of a session share one measurement
WORK, QUIET_SECONDS = "for i in range(6_000_000): i * i", 0.5  # and its time on a quiet machine


def python_path(*folders: Path | str) -> str:
    """The repository and then these folders."""
    return os.pathsep.join(map(str, [REPOSITORY, *folders]))


@cache
def slowness() -> float:
    """How many times longer than a quiet machine this one takes, at least 2: measured once in a session.

    Every core runs a Python process that counts, since tests use every core. Twice the time leaves room for a
    program that starts later.
    """
    if SLOWNESS not in os.environ:
        start = time.perf_counter()
        cores = min(4, len(os.sched_getaffinity(0)))
        for process in [subprocess.Popen([sys.executable, "-c", WORK]) for _ in range(cores)]:
            process.wait()
        os.environ[SLOWNESS] = str(max(2.0, (time.perf_counter() - start) / QUIET_SECONDS))
    return float(os.environ[SLOWNESS])


def patient(seconds: float) -> float:
    """The time that a quiet machine would be given, made longer for this one. For every time limit of a test."""
    return seconds * slowness()
