"""The locks of laboratories: each process that has one keeps a file locked. The lock ends with the process.

Two processes that start or end at the same time look at each other's files. One of them may hold the lock of a
file for a moment, or remove it between the other's steps.
"""

import fcntl
import os
import time
from pathlib import Path
from typing import IO

ATTEMPTS, PAUSE = 20, 0.05  # seconds


def try_lock(path: Path, mode: str = "r") -> IO[str] | None:
    """The open file, locked. None: another process holds the lock, or has removed the file meanwhile."""
    try:
        file: IO[str] = open(path, mode)  # noqa: SIM115  (stays open as long as the lock is held)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # a removed file can be locked as well, beside a new one of the same name
        if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    file.close()
    return None


def lock(path: Path) -> IO[str] | None:
    """Make a file and lock it. None: another file has kept the lock for a second."""
    path.parent.mkdir(exist_ok=True)
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE)
        if (file := try_lock(path, "w")) is not None:
            return file
    return None
