"""Sends and receives the messages of an `AveragingProtocol` over a `Channel`, and detects lost ranks.

No method waits or reads a clock.
"""

from typing import Any

from torch import Tensor

from dgc.comm.channel import Channel
from dgc.comm.meter import TrafficMeter
from dgc.comm.requests import Exchange, as_bytes
from dgc.gossip.adpsgd.protocol import KIND, AveragingProtocol, GossipError, Kind, Outgoing
from dgc.gossip.envelope import opened, write_header_
from dgc.wire.checks import read_scalars

HEARTBEATS_PER_TIMEOUT = 4
MESSAGE = "a message of AD-PSGD"
COUNTS_INTERVAL = 0.1  # seconds without an average after which an active rank requests step counts


class MessageLink:
    """Connects an `AveragingProtocol` to a `Channel`.

    Rank 0 monitors all ranks, and they monitor rank 0. A rank that waits for a reply also monitors the rank that
    owes it. An idle but healthy rank is therefore never reported as lost, and every lost rank is detected by some
    rank, which informs all others.

    Args:
        protocol (AveragingProtocol): state of this rank.
        channel (Channel): point-to-point messages.
        timeout (float): seconds without a message after which a rank counts as lost.
        local_size (int): ranks of each machine, to count the bytes between machines.
    """

    def __init__(self, protocol: AveragingProtocol, channel: Channel, timeout: float, local_size: int = 1):
        self.protocol, self.channel, self.timeout = protocol, channel, timeout
        self.meter = TrafficMeter(local_size)
        self._buffer = protocol.buffer()
        self._receive: Any = None
        self._sends: list[tuple[Any, Tensor]] = []
        self._abandoned_sends: list[tuple[Any, Tensor]] = []
        self._last_received: dict[int, float] = {}
        self._aborting = False
        self._tag = 0

    def begin(self, tag: int, now: float) -> None:
        """Begins a cycle with its own tag. Messages of ranks that are in a later cycle are not received."""
        self._tag = tag
        self._last_received = dict.fromkeys(range(self.protocol.size), now)
        self._last_heartbeat = self._last_poll = self._last_request = now
        self._start_receive()

    @property
    def is_over(self) -> bool:
        """Whether the cycle is over and all of its messages have been sent."""
        return self.protocol.is_over and not self._sends

    @property
    def is_aborting(self) -> bool:
        """Whether messages about a failure are still being sent."""
        return self._aborting and bool(self._sends)

    @property
    def is_idle(self) -> bool:
        """Whether only HEARTBEAT messages can arrive until this rank starts an exchange."""
        protocol = self.protocol
        is_waiting = protocol.awaited_rank is not None or protocol.is_draining or bool(self._sends)
        return protocol.is_active and not is_waiting

    def poll(self, now: float) -> bool:
        """Receives and sends without waiting. Returns whether there was any message.

        now: seconds on any monotonic clock.

        Raises:
            GossipError: if a rank is lost.
            PayloadError: if a message is damaged. The error names its sender as the message does.
        """
        self._extend_deadlines(now - self._last_poll)
        self._last_poll = now
        progressed = self.complete_sends()
        while self._receive is not None and self.channel.test(self._receive):
            progressed, self._receive = True, None
            message = self.protocol.whole(self._buffer)
            sender = int(message[KIND + 1])
            received = opened(as_bytes(message), 8 * (message.numel() - KIND), MESSAGE, sender)
            received.checked(read_scalars(received.scalars))
            self._last_received[sender] = now
            self._send(self.protocol.receive(message))
            self._start_receive()
        if not self._sends:
            messages = self.protocol.next_messages()
            if not messages and now - self._last_request >= COUNTS_INTERVAL:
                messages = self.protocol.request_counts()
            if self.protocol.awaited_rank is not None and messages:
                self._last_received[self.protocol.awaited_rank] = self._last_request = now
            self._send(messages)
            progressed = progressed or bool(messages)
        if not self.protocol.is_over:
            self._send_heartbeats(now)
            self._check_timeouts(now)
        return progressed

    def complete_sends(self) -> bool:
        """Removes completed sends. Returns whether there were any."""
        pending = [(handle, message) for handle, message in self._sends if not self._is_sent(handle, message)]
        progressed = len(pending) < len(self._sends)
        self._sends = pending
        return progressed

    def abort(self, fault: int) -> None:
        """Informs all other ranks that rank `fault` is lost."""
        # Messages to a lost rank may never complete. They are kept, because the network still reads them.
        self._abandoned_sends, self._sends, self._aborting = self._sends, [], True
        others = [rank for rank in range(self.protocol.size) if rank not in (self.protocol.rank, fault)]
        self._send([self.protocol.header_only(Kind.ABORT, to, fault) for to in others])

    def _is_sent(self, handle: Any, message: Tensor) -> bool:
        is_sent = self.channel.test(handle)
        if is_sent:
            self.protocol.release(message)
        return is_sent

    def _send(self, messages: list[Outgoing]) -> None:
        for out in messages:
            write_header_(as_bytes(out.message), MESSAGE)
            self.meter.count(Exchange({out.to: out.message}, {}), self.protocol.rank, self.protocol.size)
            self._sends.append((self.channel.isend(out.to, out.message, self._tag), out.message))

    def _start_receive(self) -> None:
        if self.protocol.can_receive:
            self._receive = self.channel.irecv(self._buffer, self._tag)

    def _send_heartbeats(self, now: float) -> None:
        if now - self._last_heartbeat >= self.timeout / HEARTBEATS_PER_TIMEOUT:
            self._last_heartbeat = now
            self._send([self.protocol.header_only(Kind.HEARTBEAT, to) for to in self.protocol.heartbeat_receivers])

    def _extend_deadlines(self, pause: float) -> None:
        """Extends the time limits by a pause of this rank, in which it could not receive."""
        if pause >= self.timeout / HEARTBEATS_PER_TIMEOUT:
            self._last_received = {rank: time + pause for rank, time in self._last_received.items()}

    def _check_timeouts(self, now: float) -> None:
        for rank in sorted(self.protocol.monitored_ranks):
            if now - self._last_received[rank] > self.timeout:
                self.abort(rank)
                raise GossipError(
                    f"gossip has ended: rank {rank} timed out: it sent no message for {self.timeout:g} seconds. "
                    "It ended, hangs or has lost the network. If only the time between synchronize_messages() and "
                    "resume() was long, raise timeout"
                )
