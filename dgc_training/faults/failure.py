"""Ends a run on an error: one rank prints its message and all ranks end at once.

A rank that raises while the others wait for it inside a collective must not block them. It prints its message and
ends its process without Python's usual shutdown, which would wait for the other ranks. The launcher reads the exit
status and ends the other ranks.
"""

import errno
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from dgc.launch import LaunchError
from dgc_training.config import ConfigError
from dgc_training.launcher import launched_rank, launched_size, record_error

# Seconds by which ranks other than 0 delay a message. If all ranks fail alike, only rank 0's message is printed,
# since the launcher ends the others as soon as rank 0 has exited.
MESSAGE_DELAY = 1.0
# The delay after a collective that failed because another rank ended: that rank's message is printed first.
SECONDARY_DELAY = 5.0
# Seconds after a signal until a rank ends although its main thread does not leave a collective. torchrun would
# kill it 30 seconds after the signal, and restart the ranks only then.
UNWIND_TIME = 3.0
# Parts of their messages, by the name of the exception's class: of Horovod, of Gloo and NCCL, and of the store
# through which ranks connect.
SECONDARY_ERRORS = {
    "HorovodInternalError": ("has been shut down",),
    "RuntimeError": ("gloo/transport", "Application timeout caused pair closure", "was not complete after"),
    "DistBackendError": ("gloo/transport", "ncclRemoteError"),
    "DistNetworkError": ("timed out", "recv", "Broken pipe", "Connection reset"),
    "DistStoreError": ("timeout", "timed out", "Timed out"),
}


# No restart helps against these.
FULL_DISK = {errno.ENOSPC, errno.EDQUOT}
RESTART = "the same command resumes from the last checkpoint, if the run has saved one."
RESUMES = "Once that is put right, the same command resumes from the last checkpoint."


class UsageError(ValueError):
    """The run cannot do what the user asked for. Every rank raises it. It has no traceback. Exit status: 2."""


class Terminated(BaseException):
    """SIGTERM or SIGUSR1 before the first step or after the last one, when there is nothing to save."""


def describe(error: BaseException, rank: int, size: int) -> str:
    """Formats `error`: rank, host and message in the first line, then the traceback."""
    message = f"[rank {rank} of {size} on {socket.gethostname()}] {type(error).__name__}: {error}"
    return message + "\n" + "".join(traceback.format_exception(error)).rstrip() + "\n"


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated(signal.Signals(signum))


def is_secondary(error: BaseException) -> bool:
    """Whether a collective failed because another rank has exited or did not respond."""
    return any(part in str(error) for part in SECONDARY_ERRORS.get(type(error).__name__, ()))


def end_process(status: int) -> None:
    """Ends this process without Python's usual shutdown, which would wait for the other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def ending_all_ranks(leave: Callable[[int], None] = end_process) -> Iterator[None]:
    """Context manager around all work of a rank. It prints an exception and ends the process, and so the run.

    Exit status: 1 after an exception, 2 if refused, 130 after Ctrl-C, 143 after SIGTERM, 138 after SIGUSR1.
    (A signal during training does not raise: the run saves and returns, see `dgc_training.faults.interruption`.)
    """
    rank, size = launched_rank(), launched_size()
    ended = threading.Event()

    def stop(number: int) -> None:
        if rank == 0:
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            print(f"Stopped by {name}. The same command resumes from the last checkpoint.", file=sys.stderr)
        leave(128 + number)

    def stop_soon(number: int) -> None:
        if not ended.wait(UNWIND_TIME):
            stop(number)

    with listening((signal.SIGTERM, signal.SIGUSR1), _terminate, stop_soon):
        try:
            with _reporting(rank, size, leave):
                yield
        # Also if the launcher ends a rank during its delay: another rank has printed the message already.
        except (KeyboardInterrupt, Terminated) as error:
            ended.set()
            stop(error.args[0] if isinstance(error, Terminated) else signal.SIGINT)
        finally:
            ended.set()


@contextmanager
def _refusing_full_disk() -> Iterator[None]:
    """Context manager that raises UsageError in place of the error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise UsageError(f"{error}. {RESUMES}") from error


@contextmanager
def _reporting(rank: int, size: int, leave: Callable[[int], None]) -> Iterator[None]:
    """Context manager that prints an exception and ends the process."""
    try:
        with _refusing_full_disk():
            yield
    except (UsageError, ConfigError, LaunchError) as error:
        time.sleep(MESSAGE_DELAY if rank else 0.0)
        sys.stdout.flush()
        message = f"[rank {rank} of {size} on {socket.gethostname()}] {error}" if rank else str(error)
        print(message, file=sys.stderr)
        record_error(message)
        leave(2)
    except Exception as error:
        secondary = is_secondary(error)
        time.sleep(SECONDARY_DELAY if secondary else MESSAGE_DELAY if rank else 0.0)
        sys.stdout.flush()
        if secondary:
            where = "" if type(error).__name__ == "HorovodInternalError" else f" {str(error).splitlines()[0]}"
            print(
                f"[rank {rank} of {size} on {socket.gethostname()}] ended because another rank exited or did not "
                "respond within train.timeout. See its message, or Horovod's list of missing ranks; "
                f"{RESTART}{where}",
                file=sys.stderr,
            )
        else:
            print(describe(error, rank, size), file=sys.stderr)
        leave(1)


@contextmanager
def listening(
    numbers: Sequence[signal.Signals],
    handler: Callable[[int, FrameType | None], object],
    received: Callable[[int], object],
) -> Iterator[None]:
    """Context manager that handles signals in two threads. Outside of the main thread it does nothing.

    A signal is noticed at once, also while the main thread is inside a collective: Python's own handlers run only
    after the main thread leaves a call into C++, and that call may wait for a rank that has died.

    Args:
        numbers: the signals.
        handler: called in the main thread, as soon as Python can.
        received: called in another thread, at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while data := reader.recv(64):
            for number in data:
                if number in numbers:
                    received(number)
        reader.close()

    # A byte is written only for signals that have a Python handler.
    wakeup_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    handlers_before = {number: signal.signal(number, handler) for number in numbers}
    threading.Thread(target=watch, daemon=True, name="signals").start()
    try:
        yield
    finally:
        for number, before in handlers_before.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(wakeup_before)
        writer.close()
