"""Sends and receives the messages of a `Member` over a `Channel`, and detects silent ranks.

It never waits and reads no clock.
"""

from typing import Any

from torch import Tensor

from dgc.comm.channel import Channel
from dgc.comm.meter import Meter
from dgc.comm.requests import Exchange
from dgc.gossip.adpsgd.protocol import GossipError, Kind, Member, Outgoing

SIGNS_OF_LIFE = 4  # ALIVE messages per timeout
NEWS = 0.1  # seconds without an average after which an active rank sends ASK


class Link:
    """Connects a `Member` to a `Channel`.

    Args:
        member (Member): state and protocol of this rank.
        channel (Channel): point-to-point messages.
        timeout (float): seconds of silence after which a rank counts as lost.

    Rank 0 monitors all ranks, and they monitor rank 0. A rank that waits for a reply also monitors the rank that
    owes it. A silent but healthy rank is therefore never reported as lost, and every lost rank is detected by some
    rank, which informs all others.
    """

    def __init__(self, member: Member, channel: Channel, timeout: float):
        self.member, self.channel, self.timeout = member, channel, timeout
        self.meter = Meter()
        self._incoming = member.buffer()
        self._receiving: Any = None
        self._sending: list[tuple[Any, Tensor]] = []
        self._heard: dict[int, float] = {}
        self._stuck: list[tuple[Any, Tensor]] = []
        self._aborts = False
        self._tag = 0

    def begin(self, tag: int, now: float) -> None:
        """Starts a cycle with its own tag. Messages of ranks that are in a later cycle are not received."""
        self._tag = tag
        self._heard = dict.fromkeys(range(self.member.size), now)
        self._shown = self._pumped = self._begun = now
        self._listen()

    @property
    def is_over(self) -> bool:
        """Whether the cycle is over and all of its messages have been sent."""
        return self.member.over and not self._sending

    @property
    def is_aborting(self) -> bool:
        """Whether messages about a failure are still being sent."""
        return self._aborts and bool(self._sending)

    @property
    def is_idle(self) -> bool:
        """Whether only ALIVE messages can arrive until this rank starts an exchange."""
        member = self.member
        return member.is_active and member.waits_for is None and not member.settling and not self._sending

    def pump(self, now: float) -> bool:
        """Receives and sends without waiting. Returns whether there was any message.

        now: seconds on any monotonic clock.

        Raises:
            GossipError: if a rank is lost.
        """
        self._excuse(now - self._pumped)
        self._pumped = now
        moved = self.flush()
        while self._receiving is not None and self.channel.test(self._receiving):
            moved, self._receiving = True, None
            self._heard[int(self._incoming[1])] = now
            self._send(self.member.receive(self._incoming))
            self._listen()
        if not self._sending:
            news = self.member.news() or (self.member.ask() if now - self._begun >= NEWS else [])
            if self.member.waits_for is not None and news:
                self._heard[self.member.waits_for] = self._begun = now
            self._send(news)
            moved = moved or bool(news)
        if not self.member.over:
            self._show_life(now)
            self._check_silence(now)
        return moved

    def flush(self) -> bool:
        """Removes completed sends. Returns whether there were any."""
        left = [(handle, message) for handle, message in self._sending if not self._has_gone(handle, message)]
        moved = len(left) < len(self._sending)
        self._sending = left
        return moved

    def abort(self, fault: int) -> None:
        """Informs all other ranks that the rank `fault` is lost."""
        # Messages to a lost rank may never complete. They are kept, because the network still reads them.
        self._stuck, self._sending, self._aborts = self._sending, [], True
        others = [rank for rank in range(self.member.size) if rank not in (self.member.rank, fault)]
        self._send([self.member.short(Kind.ABORT, to, fault) for to in others])

    def _has_gone(self, handle: Any, message: Tensor) -> bool:
        gone = self.channel.test(handle)
        if gone:
            self.member.sent(message)
        return gone

    def _send(self, news: list[Outgoing]) -> None:
        for out in news:
            self.meter.count(Exchange({out.to: out.message}, {}), self.member.rank, self.member.size)
            self._sending.append((self.channel.isend(out.to, out.message, self._tag), out.message))

    def _listen(self) -> None:
        if self.member.listens:
            self._receiving = self.channel.irecv(self._incoming, self._tag)

    def _show_life(self, now: float) -> None:
        if now - self._shown >= self.timeout / SIGNS_OF_LIFE:
            self._shown = now
            self._send([self.member.short(Kind.ALIVE, to) for to in self.member.watchers])

    def _excuse(self, pause: float) -> None:
        """Extends the time limits by a pause of this rank, in which it could not receive."""
        if pause >= self.timeout / SIGNS_OF_LIFE:
            self._heard = {rank: heard + pause for rank, heard in self._heard.items()}

    def _check_silence(self, now: float) -> None:
        for rank in sorted(self.member.watched):
            if now - self._heard[rank] > self.timeout:
                self.abort(rank)
                raise GossipError(
                    f"gossip has ended: rank {rank} has been silent for {self.timeout:g} seconds. It ended, hangs "
                    "or has lost the network. If it only took long between settle() and resume(), raise timeout"
                )
