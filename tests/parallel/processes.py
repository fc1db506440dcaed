"""Runs commands, and shows where their processes are if they do not end in time."""

import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from environment import REPOSITORY, patient


def free_port() -> int:
    """A port of this machine that no process uses, below those that systems give to processes themselves."""
    while True:
        port = random.SystemRandom().randrange(10000, 20000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("", port))
            return port


def children(pid: int) -> list[int]:
    """Process ids of the children of a process. None if it has ended."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def descendants(pid: int) -> Iterator[int]:
    """Process ids of the children of a process, of their children, and so on. The deepest come first."""
    for child in children(pid):
        yield from descendants(child)
        yield child


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def start(command: Sequence[str], output: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in the repository and in a session of its own, with all output in a file."""
    variables = {**environment, "OMP_NUM_THREADS": "1"}
    with open(output, "w") as file:
        options: Any = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
        return subprocess.Popen(command, cwd=REPOSITORY, env=variables, **options)


def run_together(
    commands: Sequence[Sequence[str]], directory: Path, environment: Mapping[str, str], timeout: float
) -> list[subprocess.CompletedProcess[str]]:
    """Run commands at the same time, and wait for all of them.

    timeout: Seconds of a quiet machine. The error after it has their output and the stacks of their threads.
    """
    variables = {**environment, "PYTHONFAULTHANDLER": "1"}  # prints the stacks of all threads at SIGABRT
    options: Any = {"cwd": directory, "env": variables, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen(command, **options, text=True) for command in commands]
    timeout = patient(timeout)
    with ThreadPoolExecutor(len(processes)) as pool:
        ends = list(pool.map(lambda process: _end(process, timeout), processes))
    assert all(in_time for _, in_time in ends), f"no end within {timeout:.0f} s:" + "".join(
        f"\n--- {' '.join(done.args)}\nstatus {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-12000:]}"
        for done, _ in ends
    )
    return [done for done, _ in ends]


def _end(process: subprocess.Popen[str], timeout: float) -> tuple[subprocess.CompletedProcess[str], bool]:
    in_time = True
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        in_time = False
        tree = [*descendants(process.pid), process.pid]
        for number, seconds in ((signal.SIGABRT, patient(10)), (signal.SIGKILL, None)):
            for pid in tree:
                send(pid, number)
            with suppress(subprocess.TimeoutExpired):
                out, err = process.communicate(timeout=seconds)
                break
    return subprocess.CompletedProcess(process.args, process.returncode, out, err), in_time
