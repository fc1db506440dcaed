"""On SIGTERM or SIGUSR1 a run saves a checkpoint and stops at the next step. A second SIGTERM ends it at once.

A run with a limit of its time stops in the same way, as if it had received SIGALRM then.

Any rank may receive the signal. At the start of each step every rank starts an all-reduce of its flag. It reads
the result at the end of the step, or some steps later if one rank may be ahead of another. The collective overlaps
with the step's own work, and all ranks stop after the same step.

Signals under launchers (Open MPI 4.1): `mpirun` forwards SIGUSR1 to every rank, so send SIGUSR1 to mpirun. On
SIGTERM mpirun ends the job itself: it forwards SIGTERM and kills the ranks after one second, unless
`--mca odls_base_sigkill_timeout 60` gives them time to save. SLURM: `--signal=USR1@120`.

torchrun sends SIGTERM when it is stopped, when another rank has died and when a machine joins, and kills the ranks
30 seconds later. If a rank has died, the others cannot save. Usually its connections break, and their collective
fails at once. If its machine is down, no connection breaks. A rank therefore ends without saving if the ranks have
not agreed to stop after half of these seconds.
"""

import os
import signal
import sys
import threading
import time
from collections import deque
from math import inf
from types import FrameType, TracebackType
from typing import Any

import torch

from dgc.comm import AllReduce, Transport
from dgc_training.faults.failure import RESTART, Terminated, is_secondary, listening
from dgc_training.launcher import is_under_torchrun

# Exit status of a run that saved and stopped after a signal: EX_TEMPFAIL, "try again later".
EXIT_SAVED = 75
# Two SIGTERMs within this many seconds count as one: a batch system sends the signal both to the ranks and to the
# launcher, which forwards it.
DUPLICATE_SECONDS = 1.0
# Seconds that torchrun waits after SIGTERM, and the environment variable that sets them
KILL_SECONDS, KILL_VARIABLE = 30.0, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Interruption:
    """Context manager in which signals only set a flag. It catches no signals outside of the main thread.

    `begin_step` and `end_step` are collective. No rank waits between them.

    Args:
        lag: number of steps after which a result is read. None: ranks have no common steps, and only `check` reads
            the flags.
        seconds: time from the construction until this rank wants to stop.
    """

    def __init__(self, transport: Transport, lag: int | None = 0, seconds: float = inf) -> None:
        self.transport, self.lag = transport, lag
        self._end = time.monotonic() + seconds
        self._flights: deque[Any] = deque()
        self._launched = 0
        self.received = 0  # number of the signal that this rank has received
        self._listening = listening(STOP_SIGNALS, _ignore, self._receive)
        self._first = 0.0  # time of the first SIGTERM
        self._limit: threading.Timer | None = None

    def __enter__(self) -> "Interruption":
        self._listening.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._read(0)
        finally:
            self._cancel_limit()
            self._listening.__exit__(None, None, None)
        # The launcher ends this rank because of the other one, which has been reported.
        if self.received and isinstance(error, Exception) and is_secondary(error):
            raise Terminated(signal.Signals(self.received)) from error

    def _receive(self, number: int) -> None:
        if number == self.received == signal.SIGTERM:
            if time.monotonic() - self._first < DUPLICATE_SECONDS:
                return
            print("A second SIGTERM: ended without saving.", file=sys.stderr, flush=True)
            os._exit(128 + signal.SIGTERM)
        self._first = time.monotonic()
        if number == signal.SIGTERM and self.transport.rank == 0:
            # at once: mpirun kills this rank a second later
            cure = f"If it cannot: {RESTART}"
            print(f"SIGTERM: the run saves and stops at the next step. {cure}", file=sys.stderr, flush=True)
        self.received = max(self.received, number)
        if number == signal.SIGTERM and is_under_torchrun():
            seconds = float(os.environ.get(KILL_VARIABLE, KILL_SECONDS)) / 2
            self._limit = threading.Timer(seconds, _give_up, (seconds,))
            self._limit.daemon = True
            self._limit.start()

    def _cancel_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()

    def begin_step(self) -> None:
        self._watch_time()
        if self.lag is not None:
            self._launch()

    def _watch_time(self) -> None:
        if time.monotonic() >= self._end:
            self.received = max(self.received, signal.SIGALRM)

    def _launch(self) -> None:
        flag = torch.tensor([float(self.received)])
        name = f"dgc.control.interruption.{self._launched % ((self.lag or 0) + 2)}"
        self._flights.append(self.transport.launch(name, (AllReduce(flag, "max"),)))
        self._launched += 1

    def end_step(self) -> signal.Signals | None:
        """The signal that any rank had received when the step `lag` steps ago began. Equal on every rank."""
        return self._read(self.lag or 0)

    def _read(self, left: int) -> signal.Signals | None:
        number = 0
        while len(self._flights) > left:
            (largest,) = self.transport.wait(self._flights.popleft())
            number = max(number, int(largest.item()))
        if number:
            self._cancel_limit()
        return signal.Signals(number) if number else None

    def check(self) -> signal.Signals | None:
        """The signal that any rank has received so far, without overlap with a step. Collective."""
        self._watch_time()
        self._launch()
        return self._read(0)


def _give_up(seconds: float) -> None:
    print(f"No common stop within {seconds:g} s after SIGTERM: ended without saving.", file=sys.stderr, flush=True)
    os._exit(128 + signal.SIGTERM)


def _ignore(signum: int, frame: FrameType | None) -> None:
    """`listening` needs a handler."""
