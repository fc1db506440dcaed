"""Lock that allows one run at a time in a run directory. The kernel releases it when the process ends."""

import errno
import fcntl
import os
import re
import socket
import time
import warnings
from pathlib import Path

from dgc_training.faults.failure import UsageError

NAME = ".lock"
UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
TEMPORARY = re.compile(r"\..+\.(\d+)\.tmp")


class RunLock:
    """The exclusive lock of a run directory. The directory is created if it does not exist.

    The lock file contains the process id and the host of its holder. If the directory is moved while the lock is
    held, set the attribute `directory` to its new path. A file system without locks causes a warning.

    Args:
        directory: the run directory.
        wait: seconds to wait for another process that holds the lock.

    Raises:
        UsageError: if another process holds the lock.
    """

    def __init__(self, directory: Path, wait: float = 0.0) -> None:
        self.directory = directory
        self._deadline = time.monotonic() + wait
        directory.mkdir(parents=True, exist_ok=True)
        self._descriptor = self._acquire()

    def _acquire(self) -> int:
        while True:
            descriptor = os.open(self.directory / NAME, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._lock(descriptor)
                if self._is_in_place(descriptor):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the previous holder has removed the file since

    def _lock(self, descriptor: int) -> None:
        try:
            while not _try_lock(descriptor, self._deadline):
                time.sleep(0.2)
        except BlockingIOError:
            holder = os.read(descriptor, 300).decode(errors="replace").strip() or "another process"
            raise UsageError(
                f"the run directory {self.directory} is in use by {holder}. Wait until that run has ended, or "
                "give this run another directory with --suffix or --run-dir."
            ) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            warnings.warn(
                f"{self.directory} cannot be locked ({error.strerror}): make sure that no other run uses it",
                stacklevel=4,
            )

    def _is_in_place(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.stat(self.directory / NAME), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._is_in_place(self._descriptor):
            (self.directory / NAME).unlink()
        os.close(self._descriptor)


def _try_lock(descriptor: int, deadline: float) -> bool:
    """Whether the lock is free. Raises BlockingIOError after the deadline."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if time.monotonic() > deadline:
            raise
        return False
    return True


def remove_temporary_files(directory: Path) -> None:
    """Removes temporary files of killed processes below `directory`. Only the holder of the lock may call it."""
    for path in directory.rglob(".*.tmp"):
        found = TEMPORARY.fullmatch(path.name)
        if found and not _is_running(int(found[1])):
            path.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    """Whether another process of this machine has this id. This process has written no temporary file yet."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:  # another user's process
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
