"""SIGTERM and SIGUSR1 ask a run to save and end at the next step; a second SIGTERM ends it at once.

It does not matter which rank gets the signal. At the start of each step every rank starts one all-reduce of
its flag and reads the answer at the step's end, or some steps later where ranks need not wait for each other in
each step: the collective travels beside the step's own work, and all ranks stop after the same step.

What launchers hand on (Open MPI 4.1): `mpirun` forwards SIGUSR1 to every rank and is the one to ask.
SIGTERM makes mpirun itself end the job: it passes SIGTERM on and kills after one second, unless
`--mca odls_base_sigkill_timeout 60` gives the ranks time to save. SLURM: `--signal=USR1@120`.
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

# Exit status of a run that saved and ended because it was asked to: EX_TEMPFAIL, "try again later".
SAVED = 75
# Seconds within which two SIGTERMs are one: batch systems send it to the launcher, which passes it on, and to us.
APART = 1.0
ASKING = (signal.SIGTERM, signal.SIGUSR1)


class Interruption:
    """Inside `with`, signals only ask. Where a thread that is not the main one enters, none are caught.

    `begin_step` and `end_step` are collective; between them no rank waits. lag: steps after which an answer is
    read; None where ranks have no steps in common, so that only `now` asks.
    """

    def __init__(self, transport: Transport, lag: int | None = 0) -> None:
        self.transport, self.lag = transport, lag
        self._flights: deque[Any] = deque()
        self._begun = 0
        self.asked = 0  # the signal's number
        self._catches = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "Interruption":
        if self._catches:
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            # Python's handlers wait until the main thread leaves a collective; this byte does not.
            self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            self._before = {signum: signal.signal(signum, _note) for signum in ASKING}
            threading.Thread(target=self._watch, daemon=True, name="interruption").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._read(0)
        if self._catches:
            for signum, handler in self._before.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(self._wakeup_before)
            self._writer.close()

    def _watch(self) -> None:
        first = 0.0
        while received := self._reader.recv(64):
            for number in received:
                if number == signal.SIGTERM and self.asked == signal.SIGTERM:
                    if time.monotonic() - first < APART:
                        continue
                    print("A second SIGTERM: ended without saving.", file=sys.stderr, flush=True)
                    os._exit(128 + signal.SIGTERM)
                if number in ASKING:
                    first = time.monotonic()
                    self.asked = max(self.asked, number)
        self._reader.close()

    def begin_step(self) -> None:
        if self.lag is not None:
            self._ask()

    def _ask(self) -> None:
        flag = torch.tensor([float(self.asked)])
        name = f"dgc.control.interruption.{self._begun % ((self.lag or 0) + 2)}"
        self._flights.append(self.transport.launch(name, (AllReduce(flag, "max"),)))
        self._begun += 1

    def end_step(self) -> signal.Signals | None:
        """The signal that some rank had got when the step `lag` steps ago began; the same on every rank."""
        return self._read(self.lag or 0)

    def _read(self, left: int) -> signal.Signals | None:
        number = 0
        while len(self._flights) > left:
            (most,) = self.transport.wait(self._flights.popleft())
            number = max(number, int(most.item()))
        return signal.Signals(number) if number else None

    def now(self) -> signal.Signals | None:
        """The same for this moment, where there is no step to travel beside."""
        self._ask()
        return self._read(0)


def _note(signum: int, frame: FrameType | None) -> None:
    """A handler must exist for the byte to be written; the byte does the rest."""
