"""On SIGTERM or SIGUSR1 a run saves and ends at the next step. A second SIGTERM ends it at once.

Any rank may receive the signal. At the start of each step every rank starts an all-reduce of its flag. It reads
the result at the end of the step, or some steps later if the ranks do not wait for each other in each step. The
collective overlaps with the step's own work, and all ranks stop after the same step.

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

# Exit status of a run that saved and ended after a signal: EX_TEMPFAIL, "try again later".
SAVED = 75
# Two SIGTERMs within this many seconds count as one: a batch system sends the signal both to the ranks and to the
# launcher, which forwards it.
APART = 1.0
ASKING = (signal.SIGTERM, signal.SIGUSR1)


class Interruption:
    """Context manager in which signals only set a flag. It catches no signals outside of the main thread.

    `begin_step` and `end_step` are collective. No rank waits between them.

    Args:
        lag: number of steps after which a result is read. None: ranks have no common steps, and only `now` checks
            the flags.
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
            # Python's handlers run only after the main thread leaves a collective. This byte arrives at once.
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
        """The signal that any rank had received when the step `lag` steps ago began. Equal on every rank."""
        return self._read(self.lag or 0)

    def _read(self, left: int) -> signal.Signals | None:
        number = 0
        while len(self._flights) > left:
            (most,) = self.transport.wait(self._flights.popleft())
            number = max(number, int(most.item()))
        return signal.Signals(number) if number else None

    def now(self) -> signal.Signals | None:
        """The signal that any rank has received so far, without overlap with a step. Collective."""
        self._ask()
        return self._read(0)


def _note(signum: int, frame: FrameType | None) -> None:
    """Empty handler: the byte is written only for signals that have a Python handler."""
