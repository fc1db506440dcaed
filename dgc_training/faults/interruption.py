"""On SIGTERM or SIGUSR1 a run saves a checkpoint and stops at the next step. A second SIGTERM ends it at once.

Any rank may receive the signal. At the start of each step every rank starts an all-reduce of its flag. It reads
the result at the end of the step, or some steps later if one rank may be ahead of another. The collective overlaps
with the step's own work, and all ranks stop after the same step.

Signals under launchers (Open MPI 4.1): `mpirun` forwards SIGUSR1 to every rank, so send SIGUSR1 to mpirun. On
SIGTERM mpirun ends the job itself: it forwards SIGTERM and kills the ranks after one second, unless
`--mca odls_base_sigkill_timeout 60` gives them time to save. SLURM: `--signal=USR1@120`.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from types import FrameType, TracebackType
from typing import Any

import torch

from dgc.comm import AllReduce, Transport

# Exit status of a run that saved and stopped after a signal: EX_TEMPFAIL, "try again later".
EXIT_SAVED = 75
# Two SIGTERMs within this many seconds count as one: a batch system sends the signal both to the ranks and to the
# launcher, which forwards it.
DUPLICATE_SECONDS = 1.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Interruption:
    """Context manager in which signals only set a flag. It catches no signals outside of the main thread.

    `begin_step` and `end_step` are collective. No rank waits between them.

    Args:
        lag: number of steps after which a result is read. None: ranks have no common steps, and only `check` reads
            the flags.
    """

    def __init__(self, transport: Transport, lag: int | None = 0) -> None:
        self.transport, self.lag = transport, lag
        self._flights: deque[Any] = deque()
        self._launched = 0
        self.received = 0  # number of the signal that this rank has received
        self._catches = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "Interruption":
        if self._catches:
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            # Python's handlers run only after the main thread leaves a collective. This byte arrives at once.
            self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            self._handlers_before = {signum: signal.signal(signum, _ignore) for signum in STOP_SIGNALS}
            threading.Thread(target=self._watch, daemon=True, name="interruption").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._read(0)
        if self._catches:
            for signum, handler in self._handlers_before.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(self._wakeup_before)
            self._writer.close()

    def _watch(self) -> None:
        first = 0.0
        while data := self._reader.recv(64):
            for number in data:
                if number == signal.SIGTERM and self.received == signal.SIGTERM:
                    if time.monotonic() - first < DUPLICATE_SECONDS:
                        continue
                    print("A second SIGTERM: ended without saving.", file=sys.stderr, flush=True)
                    os._exit(128 + signal.SIGTERM)
                if number in STOP_SIGNALS:
                    first = time.monotonic()
                    self.received = max(self.received, number)
        self._reader.close()

    def begin_step(self) -> None:
        if self.lag is not None:
            self._launch()

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
        return signal.Signals(number) if number else None

    def check(self) -> signal.Signals | None:
        """The signal that any rank has received so far, without overlap with a step. Collective."""
        self._launch()
        return self._read(0)


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Empty handler: the byte is written only for signals that have a Python handler."""
