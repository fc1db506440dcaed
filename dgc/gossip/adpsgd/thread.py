"""The gossip thread of a rank. It polls a `MessageLink` and uses little CPU time while waiting."""

import atexit
import threading
import time
from contextlib import suppress

from dgc.gossip.adpsgd.link import COUNTS_INTERVAL, MessageLink
from dgc.gossip.adpsgd.protocol import GossipError

TAGS = 2**14
# Seconds between two polls of the network: a fraction of the time since the last message. Polling therefore delays
# a message by little more than this fraction, and a network without messages uses almost no CPU time.
MIN_SLEEP, MAX_SLEEP, SLEEP_FRACTION = 50e-6, 5e-3, 0.05
IDLE_SLEEP = COUNTS_INTERVAL  # seconds, if only HEARTBEAT messages can arrive
ABORT_TIMEOUT = 2.0  # seconds to inform the other ranks of a failure

_abandoned: list[MessageLink] = []  # the network may still read and write their messages


class GossipThread:
    """Runs a `MessageLink` in its own thread. It is paused at first.

    To change the link's protocol, hold the lock `changed` and notify.

    Args:
        link (MessageLink): messages of this rank.
    """

    def __init__(self, link: MessageLink):
        self.link = link
        self.changed = threading.Condition(link.protocol.lock)
        self.is_paused = True
        self._closing, self._cycle = False, 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="AD-PSGD gossip", daemon=True)
        self._thread.start()
        # MPI is also finalized at exit, and this thread must stop calling it before
        atexit.register(self.close)

    def check(self) -> None:
        """Raises GossipError if the thread has failed."""
        if self._closing:
            raise RuntimeError("gossip was closed")
        if isinstance(self._error, GossipError):
            raise GossipError(str(self._error)) from self._error
        if self._error is not None:
            raise GossipError(f"gossip has ended on this rank: {self._error!r}") from self._error

    @property
    def is_running(self) -> bool:
        return not (self.is_paused or self._closing or self._error is not None)

    def pause(self) -> None:
        """Waits until the messages of all ranks are drained. Collective."""
        with self.changed:
            self.link.protocol.is_draining = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.is_paused or self._error is not None)
        self.check()

    def resume(self) -> None:
        with self.changed:
            if self.is_paused:
                self.link.protocol.begin()
                self._cycle += 1
                self.is_paused = False
                self.changed.notify_all()

    def close(self) -> None:
        atexit.unregister(self.close)
        with self.changed:
            was_closing, self._closing = self._closing, True
            self.changed.notify_all()
        self._thread.join()
        if not self.is_paused and not was_closing:
            _abandoned.append(self.link)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._run_cycle()
        except BaseException as error:
            # First try to inform the other ranks: the training thread may end the process when it gets the error.
            with suppress(Exception):
                self._abort(error)
            with self.changed:
                self._error = error
                self.changed.notify_all()

    def _run_cycle(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: not self.is_paused or self._closing)
        if self._closing:
            return
        self.link.begin(self._cycle % TAGS, time.monotonic())
        last_progress = time.monotonic()
        while not self.link.is_over:
            if self._closing:
                return
            now = time.monotonic()
            if self.link.poll(now):
                last_progress = now
            if self.link.is_idle:
                with self.changed:
                    seconds = min(IDLE_SLEEP, self.link.timeout / 10)
                    if self.changed.wait_for(lambda: self.link.protocol.can_send or self._closing, seconds):
                        last_progress = time.monotonic()
            elif not self.link.is_over:
                time.sleep(min(max(MIN_SLEEP, SLEEP_FRACTION * (now - last_progress)), MAX_SLEEP))
        with self.changed:
            self.is_paused = True
            self.changed.notify_all()

    def _abort(self, error: BaseException) -> None:
        if not isinstance(error, GossipError):
            self.link.abort(self.link.protocol.rank)
        end = time.monotonic() + ABORT_TIMEOUT
        while self.link.is_aborting and time.monotonic() < end:
            self.link.complete_sends()
            time.sleep(MAX_SLEEP)
