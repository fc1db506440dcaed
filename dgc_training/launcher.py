"""Rank, size and terminal of this process, by its launcher's environment variables, before a transport exists."""

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from dgc.launch import started_by
from dgc.terminal import escape_unprintable as escape_unprintable

LAUNCHERS = ("mpirun", "mpiexec", "orterun", "prterun")
# Options of mpirun that prefix or redirect lines. A progress bar, which redraws its line, does not work with them.
REDIRECTING = ("tag-output", "timestamp-output", "output", "output-filename", "xml")
UNTAGGED = ("orte_tag_output", "0")  # a parameter after -mca, which overrides --tag-output, as of horovodrun


def _launched() -> tuple[int, int]:
    started = started_by(os.environ)
    return (0, 1) if started is None else (started.rank, started.size)


def launched_rank() -> int:
    """The rank of this process; 0 without a launcher."""
    return _launched()[0]


def launched_size() -> int:
    """The number of ranks started; 1 without a launcher."""
    return _launched()[1]


def is_under_torchrun() -> bool:
    started = started_by(os.environ)
    return started is not None and started.launcher.name == "torchrun"


def may_restart() -> bool:
    """Whether torchrun may start the ranks again after a failure, perhaps another number of them."""
    return is_under_torchrun() and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def terminal_of(descriptor: int) -> str | None:
    """The path of the terminal behind `descriptor` (1 or 2); None if it is not a terminal."""
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return os.ttyname(descriptor) if os.isatty(descriptor) else None
    parent = Path(f"/proc/{os.getppid()}")
    try:
        words = (parent / "cmdline").read_bytes().decode(errors="replace").split("\0")
        path = os.readlink(parent / f"fd/{descriptor}")
    except OSError:  # no /proc on this system, or another user's process
        return None
    options = {word.lstrip("-") for word in words if word.startswith("-")}
    if UNTAGGED in zip(words, words[1:], strict=False):
        options.discard("tag-output")
    prefixed = not options.isdisjoint(REDIRECTING)
    if Path(words[0]).name not in LAUNCHERS or prefixed:
        return None
    return path if path.startswith(("/dev/pts/", "/dev/tty")) else None


def print_error(message: str, delay: float = 15.0) -> int:
    """Prints to stderr why nothing was started, and returns exit status 2.

    Usually every rank fails with the same message, and the launcher ends the others once rank 0 has exited. If
    rank 0 does not fail (a file is missing on one machine), the others print after `delay` seconds.
    """
    rank = launched_rank()
    if rank:
        if is_under_torchrun() and threading.current_thread() is threading.main_thread():
            # torchrun would list a rank that it has ended as another failure
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(delay)
        message = f"[rank {rank}] {message}"
    print(message, file=sys.stderr, flush=True)
    record_error(message)
    return 2


def record_error(message: str) -> None:
    """Gives torchrun the message of this rank. It ends its own report with it, after a traceback of its own."""
    content = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
    with suppress(OSError, KeyError), open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": content}, file)
