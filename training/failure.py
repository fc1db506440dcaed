"""How a run ends when something goes wrong: one rank's message on top, and all ranks end with it, at once.

A rank that raises while the others wait for it inside a collective must not hang them: it prints its message
and ends its process without Python's usual farewell (which would wait for the others too). The launcher sees
the exit status and ends the rest.
"""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from training.config import ConfigError
from training.launcher import launched_rank, launched_size

# Seconds for which the other ranks hold a message back, so that rank 0's is the only one where all have the same:
# the launcher ends them as soon as rank 0 has left.
PATIENCE = 1.0
# The same for what all ranks refuse together.
PATIENCE_WHEN_ALL_REFUSE = 5.0
# A collective that broke because another rank ended: that rank's message comes first.
PATIENCE_WITH_CONSEQUENCES = 5.0
CONSEQUENCES = ("HorovodInternalError",)


class Refused(ValueError):
    """The user asked for what cannot be done; every rank raises it together. No traceback, exit code 2."""


class Terminated(BaseException):
    """SIGTERM."""


def describe(error: BaseException, rank: int, size: int) -> str:
    """The block that tells of `error`: rank, host and message in the first line, then the traceback."""
    message = f"[rank {rank} of {size} on {socket.gethostname()}] {type(error).__name__}: {error}"
    return message + "\n" + "".join(traceback.format_exception(error)).rstrip() + "\n"


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated


def _leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def ending_all_ranks(leave: Callable[[int], None] = _leave) -> Iterator[None]:
    """Around all that a rank does: an exception inside is told and ends this process, and so the run.

    Exit status: 1 after an exception, 2 if refused, 130 after Ctrl-C, 143 after SIGTERM.
    """
    rank, size = launched_rank(), launched_size()
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except (KeyboardInterrupt, Terminated) as error:
        name, status = ("SIGTERM", 143) if isinstance(error, Terminated) else ("Ctrl-C", 130)
        if rank == 0:
            print(f"Stopped by {name}. The same command goes on from the last checkpoint.", file=sys.stderr)
        leave(status)
    except (Refused, ConfigError) as error:
        time.sleep(PATIENCE if rank else 0.0)
        sys.stdout.flush()
        print(
            f"[rank {rank} of {size} on {socket.gethostname()}] {error}" if rank else error, file=sys.stderr
        )
        leave(2)
    except Exception as error:
        if type(error).__name__ in CONSEQUENCES:
            time.sleep(PATIENCE_WITH_CONSEQUENCES)
        else:
            time.sleep(PATIENCE if rank else 0.0)
        sys.stdout.flush()
        print(describe(error, rank, size), file=sys.stderr)
        leave(1)
    finally:
        signal.signal(signal.SIGTERM, previous)
