"""The gossip thread of a rank. It drives a `Link` and uses little CPU time while waiting."""

import atexit
import threading
import time
from contextlib import suppress

from dgc.gossip.adpsgd.link import NEWS, Link
from dgc.gossip.adpsgd.protocol import GossipError

TAGS = 2**14
# Seconds between two polls of the network: a share of the time without any message. Polling rarely therefore
# delays a message by little more than that share, and a quiet network uses almost no CPU time.
SHORTEST, LONGEST, SHARE = 50e-6, 5e-3, 0.05
IDLE = NEWS  # seconds, if only ALIVE messages can arrive
FAREWELL = 2.0  # seconds to inform the other ranks of a failure

_abandoned: list[Link] = []  # the network may still read and write their messages


class GossipThread:
    """Runs a `Link`; settled at first. To change the link's member, hold the lock `changed` and notify."""

    def __init__(self, link: Link):
        self.link = link
        self.changed = threading.Condition(link.member.lock)
        self.is_settled = True
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
    def is_under_way(self) -> bool:
        return not (self.is_settled or self._closing or self._error is not None)

    def settle(self) -> None:
        with self.changed:
            self.link.member.settling = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.is_settled or self._error is not None)
        self.check()

    def resume(self) -> None:
        with self.changed:
            if self.is_settled:
                self.link.member.begin()
                self._cycle += 1
                self.is_settled = False
                self.changed.notify_all()

    def close(self) -> None:
        atexit.unregister(self.close)
        with self.changed:
            already, self._closing = self._closing, True
            self.changed.notify_all()
        self._thread.join()
        if not self.is_settled and not already:
            _abandoned.append(self.link)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._run_cycle()
        except BaseException as error:
            # First try to inform the other ranks: the training thread may end the process when it gets the error.
            with suppress(Exception):
                self._say_farewell(error)
            with self.changed:
                self._error = error
                self.changed.notify_all()

    def _run_cycle(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: not self.is_settled or self._closing)
        if self._closing:
            return
        self.link.begin(self._cycle % TAGS, time.monotonic())
        moved = time.monotonic()
        while not self.link.is_over:
            if self._closing:
                return
            now = time.monotonic()
            if self.link.pump(now):
                moved = now
            if self.link.is_idle:
                with self.changed:
                    wake = min(IDLE, self.link.timeout / 10)
                    if self.changed.wait_for(lambda: self.link.member.has_news or self._closing, wake):
                        moved = time.monotonic()
            elif not self.link.is_over:
                time.sleep(min(max(SHORTEST, SHARE * (now - moved)), LONGEST))
        with self.changed:
            self.is_settled = True
            self.changed.notify_all()

    def _say_farewell(self, error: BaseException) -> None:
        if not isinstance(error, GossipError):
            self.link.abort(self.link.member.rank)
        end = time.monotonic() + FAREWELL
        while self.link.is_aborting and time.monotonic() < end:
            self.link.flush()
            time.sleep(LONGEST)
