"""Ends a run when ranks have waited `train.timeout` seconds for another one, and reports that rank.

A rank that raises ends the run itself (`failure`). A rank that is stuck outside of a collective (a data set on a
dead network drive, an endless loop, a branch that only this rank takes) prints nothing, and Horovod reports only
the missing tensors. Each rank therefore runs a second thread. Every few seconds these threads
exchange how long each rank has been waiting, and for which message. If some ranks have waited too long, the ranks
that are not waiting caused it. The first of them prints its stack trace, and all ranks end.

If no thread of a rank responds, the exchange itself does not complete. A timer then ends the other ranks, and
`Heartbeat` finds the rank that does not respond.

With process sets, Horovod may wait for a stopped rank inside a call that keeps Python's interpreter locked. No
thread and no timer of Python runs then. `faulthandler`, which needs no interpreter, prints where the rank is and
ends it.
"""

import faulthandler
import os
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dgc.comm import Transport, all_gather_object, broadcast_object
from dgc.comm.channel import Channel, open_channel
from dgc.comm.requests import Group, Reply, Request
from dgc_training.faults.failure import MESSAGE_DELAY, end_process, is_secondary

Waiting = tuple[float, str] | None
LANE = "watchdog"


MESSAGE = struct.Struct("!ii")  # rank, number of the exchange


class Heartbeat:
    """Finds ranks that do not respond at all: stopped, swapped out, or on a machine that is down.

    Horovod's controller over MPI waits for such a rank forever, and its stall check waits too. Every rank sends a
    datagram to rank 0 before each exchange of the watchdog. If an exchange does not complete, rank 0 can list the
    ranks that sent no datagram for it. If datagrams do not pass between the machines, the run still ends, but the
    message has no rank. The constructor is collective.
    """

    def __init__(self, transport: Transport) -> None:
        self.rank, self.size = transport.rank, transport.size
        self.number = 0
        self.last = [0] * self.size
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        address = None
        if self.rank == 0:
            self._socket.bind(("", 0))
            address = (socket.gethostname(), self._socket.getsockname()[1])
        host, port = broadcast_object(transport, address, name="heartbeat")
        # A machine may be unable to resolve its own name.
        self._address = ("127.0.0.1" if host == socket.gethostname() else host, port)

    def send(self) -> None:
        """Sends a datagram. Call it before each exchange."""
        self.number += 1
        try:
            self._socket.sendto(MESSAGE.pack(self.rank, self.number), self._address)
        except OSError:
            return  # the error message then has no rank
        self._receive()

    def _receive(self) -> None:
        while self.rank == 0:
            try:
                rank, number = MESSAGE.unpack(self._socket.recv(64))
            except (OSError, struct.error):
                return
            if 0 <= rank < self.size:
                self.last[rank] = max(self.last[rank], number)

    def missing(self) -> list[int]:
        """On rank 0: the ranks that sent datagrams earlier, but none for this exchange."""
        self._receive()
        return [rank for rank, number in enumerate(self.last) if 0 < number < self.number]

    def close(self) -> None:
        self._socket.close()


class WatchedTransport:
    """A transport that records how long its rank has been waiting, and for which message.

    Args:
        inner: the transport that does all communication.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.local_rank, self.local_size = inner.local_rank, inner.local_size
        self.timeout, self.point_to_point = inner.timeout, inner.point_to_point
        self._since: tuple[float, str] | None = None

    @property
    def waiting(self) -> Waiting:
        """(seconds, name of the message) of the current wait; None if the rank is not waiting."""
        since = self._since
        return None if since is None else (time.monotonic() - since[0], since[1])

    def group_size(self, group: Group) -> int:
        return self.inner.group_size(group)

    def group_rank(self, group: Group) -> int:
        return self.inner.group_rank(group)

    def channel(self) -> Channel:
        """The point-to-point channel. Its waits are not watched, since gossip has its own time limit."""
        return open_channel(self.inner)

    def open_communicator(self, communicator: str, kinds: Sequence[Group] | None = None) -> None:
        self.inner.open_communicator(communicator, kinds)

    def launch(self, name: str, requests: Sequence[Request], communicator: str = "") -> tuple[str, Any]:
        return name, self.inner.launch(name, requests, communicator)

    def poll(self, work: tuple[str, Any]) -> bool:
        return self.inner.poll(work[1])

    def wait(self, work: tuple[str, Any]) -> tuple[Reply, ...]:
        self._since = (time.monotonic(), work[0])
        try:
            return self.inner.wait(work[1])
        finally:
            self._since = None


def find_stuck_rank(waits: Sequence[Waiting], timeout: float) -> tuple[int, str] | None:
    """(rank at fault, reason) if some rank has waited for `timeout` seconds, otherwise None."""
    longest = max((wait[0] for wait in waits if wait is not None), default=0.0)
    if longest < timeout:
        return None
    busy = [rank for rank, wait in enumerate(waits) if wait is None]
    if busy:
        names = sorted({wait[1] for wait in waits if wait is not None})
        ranks = f"rank {busy[0]}" if len(busy) == 1 else f"ranks {busy}"
        joined = ", ".join(names[:3])
        return busy[0], f"{ranks} did not join {joined}, for which the others have waited {longest:.0f} s"
    each = "; ".join(f"rank {rank} for {wait[1]}" for rank, wait in enumerate(waits) if wait is not None)
    # The first rank that waits for another message than rank 0.
    other = next((rank for rank, wait in enumerate(waits) if wait and waits[0] and wait[1] != waits[0][1]), 0)
    return other, f"ranks have waited for each other for {longest:.0f} s: {each}"


@contextmanager
def watching(
    transport: WatchedTransport, timeout: float, leave: Callable[[int], None] = end_process
) -> Iterator[None]:
    """Context manager in which the run ends if ranks wait `timeout` seconds for another one. Collective."""
    if transport.size == 1:
        yield
        return
    period = min(15.0, max(0.5, timeout / 20))
    limit = max(timeout / 2, timeout - 2 * period)
    main, ended = threading.get_ident(), threading.Event()

    heartbeat = Heartbeat(transport.inner)
    # The exchanges of the watchdog come at any time between the exchanges of the training.
    transport.inner.open_communicator(LANE)

    def end_without_exchange() -> None:
        _report_missing(heartbeat, transport, limit)
        leave(1)

    def watch() -> None:
        while True:
            last = ended.wait(period)
            # A call of Horovod may wait for a stopped rank without releasing the interpreter, and no thread runs.
            faulthandler.dump_traceback_later(timeout + 2 * period + 10 * MESSAGE_DELAY, exit=True)
            heartbeat.send()
            timer = threading.Timer(limit, end_without_exchange)
            timer.daemon = True
            timer.start()
            # Uses the inner transport, so that this thread's wait does not count as a wait of the rank.
            views = all_gather_object(
                transport.inner, (transport.waiting, last), name="watchdog", communicator=LANE
            )
            timer.cancel()
            # Every rank has the same views, so all ranks stop after the same exchange.
            if all(over for _, over in views):
                return
            # Ranks that have ended wait only for this exchange.
            found = find_stuck_rank([(0.0, "the end") if over else wait for wait, over in views], limit)
            if found is not None:
                _report(found, transport, main)
                leave(1)

    def guarded() -> None:
        try:
            watch()
        except Exception as error:
            # The main thread gets the same error from its own collective and reports it.
            if type(error).__name__ != "HorovodInternalError" and not is_secondary(error):
                raise
        finally:
            faulthandler.cancel_dump_traceback_later()

    thread = threading.Thread(target=guarded, daemon=True, name="watchdog")
    thread.start()
    yield
    # Skipped after an exception: the other ranks do not get here, and the launcher ends them.
    ended.set()
    thread.join()
    heartbeat.close()


def _report(found: tuple[int, str], transport: WatchedTransport, main: int) -> None:
    stuck, reason = found
    if transport.rank != stuck:
        # The launcher ends the other ranks once the rank at fault has printed its stack trace and exited.
        time.sleep(5 * MESSAGE_DELAY)
        print(f"[rank {transport.rank} of {transport.size}] {reason}", file=sys.stderr, flush=True)
        return
    frame = sys._current_frames().get(main)
    place = "".join(traceback.format_stack(frame)) if frame is not None else "  (unknown)\n"
    sys.stdout.flush()
    print(
        f"[rank {transport.rank} of {transport.size} on {socket.gethostname()}] {reason} (train.timeout). "
        f"Rank {stuck} (process {os.getpid()}) is here:\n{place}",
        file=sys.stderr,
        flush=True,
    )


def _report_missing(heartbeat: Heartbeat, transport: WatchedTransport, limit: float) -> None:
    """Prints that a rank does not respond. Rank 0 has the heartbeats and prints first."""
    reason = "a rank does not respond at all, and it is not known which"
    if transport.rank:
        time.sleep(5 * MESSAGE_DELAY)
        reason += " (only rank 0 receives the heartbeats)"
    elif missing := heartbeat.missing():
        ranks = f"rank {missing[0]} does" if len(missing) == 1 else f"ranks {missing} do"
        reason = f"{ranks} not respond at all: stopped, out of memory, or its machine or network is down"
    print(
        f"[rank {transport.rank} of {transport.size} on {socket.gethostname()}] {reason}. Waited {limit:.0f} s "
        "(train.timeout).",
        file=sys.stderr,
        flush=True,
    )
