"""The message protocol of AD-PSGD on one rank: no threads, no clock, no network.

A cycle lasts from `begin` until the messages of all ranks are drained. Active ranks (odd) average with passive
ranks (even):

    AVERAGE   active -> passive: a = x of the sender. The passive rank stores p = its x and does x += (a - p)/2
    REPLY     passive -> active: p. The active rank does x += (p - a)/2 to its current x

    COUNTS_REQUEST, COUNTS_REPLY  the same without x: an active rank without a recent average requests step counts

The two changes are exact opposites, so the sum over ranks is preserved except for the rounding of the additions.
While a rank drains its messages, it starts no exchange. Passive ranks continue to reply:

    LEAVE     active -> each of its passive peers, after its last reply has arrived
    DONE      any rank -> rank 0, after it has left, or all its active peers have
    END       rank 0 -> all, after DONE from all: no message is in flight on any rank

In addition, HEARTBEAT, between rank 0 and each other rank, shows that the sender runs, and ABORT reports a failed
rank.

Every message contains the number of steps of each rank, as far as its sender has been informed. A receiver keeps
the larger numbers. A rank may leave when its numbers show enough steps. An active rank informs its neighbours by
leaving. A passive rank does so in every reply, and slow ranks request counts as often as fast ones. DONE and END
make the numbers exact.

Payload in bytes, with n ranks and N elements: 8 (6 + n), and for AVERAGE and REPLY 8 ceil(N / 2) more.
"""

import threading
from dataclasses import dataclass
from enum import IntEnum
from math import inf

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from dgc.gossip.topology.bipartite import peer_schedule
from dgc.gossip.topology.topology import Topology

KIND, COUNTS = 3, 6  # words before the kind, and before the steps


class GossipError(RuntimeError):
    """A rank has timed out or failed. The message names it."""


class Kind(IntEnum):
    """Kind of a message."""

    AVERAGE = 0
    REPLY = 1
    COUNTS_REQUEST = 2
    COUNTS_REPLY = 3
    LEAVE = 4
    DONE = 5
    END = 6
    HEARTBEAT = 7
    ABORT = 8


@dataclass(frozen=True, eq=False)
class Outgoing:
    """A message and its receiver.

    message: int64 words: 3 for an envelope (`dgc.gossip.envelope`), kind, sender, number, the steps of all ranks;
    then x.
    """

    to: int
    message: Int64[Tensor, "words"]


class AveragingProtocol:
    """State of the protocol on one rank.

    `lock` guards x, step_counts and credit between the training thread and the gossip thread.

    Args:
        x (Tensor): [n] fp32, this rank's model on the CPU, changed in place.
        rank (int): this rank.
        bipartite (Topology): edges between odd and even ranks.
        averagings_per_step (float): largest number of averages that an active rank starts per own step. Averages
            for which there was no time are not made up later.
    """

    def __init__(self, x: Float32[Tensor, "n"], rank: int, bipartite: Topology, averagings_per_step: float = inf):
        self.x, self.rank, self.size = x, rank, bipartite.size
        self.peers = peer_schedule(bipartite, rank)
        self.is_active = rank % 2 == 1
        self.averagings_per_step = averagings_per_step
        self.lock = threading.Lock()
        self.step_counts = torch.zeros(self.size, dtype=torch.int64)
        self.averagings = 0
        self._next_peer = self._next_counts_peer = 0  # positions in peers
        self._number = 0  # of the last message that expects a reply
        self._header = COUNTS + self.size  # words
        self._free_buffers = [self.buffer()] if self.is_active else []
        self.begin()

    def buffer(self) -> Int64[Tensor, "words"]:
        """A buffer that can hold any message."""
        return torch.zeros(self._header + (self.x.numel() + 1) // 2, dtype=torch.int64)

    def begin(self) -> None:
        """Begins a cycle. No message may be in flight."""
        self.credit = inf if self.averagings_per_step == inf else 0.0  # averages that may be started
        self.awaited_rank: int | None = None
        self.is_draining = self.is_over = self.is_done = False
        self._active_peers = set() if self.is_active else set(self.peers)  # peers that may still start an average
        self._not_done = set(range(1, self.size)) if self.rank == 0 else set()  # ranks that have not sent DONE

    def count_step(self) -> None:
        """Counts a step of this rank. The caller holds the lock."""
        self.step_counts[self.rank] += 1
        self.credit = min(self.credit + self.averagings_per_step, max(1.0, self.averagings_per_step))

    # --- interface of the link --------------------------------------------------------------------------------

    @property
    def can_send(self) -> bool:
        """Whether `next_messages` would return a message."""
        return self._can_average or self._can_finish

    @property
    def can_receive(self) -> bool:
        """Whether another message can arrive in this cycle."""
        return not self.is_over and (self.rank > 0 or bool(self._active_peers or self._not_done))

    @property
    def monitored_ranks(self) -> set[int]:
        """The ranks that count as lost if nothing arrives from them."""
        others = self._not_done if self.rank == 0 else {0}
        return others if self.awaited_rank is None else {*others, self.awaited_rank}

    @property
    def heartbeat_receivers(self) -> range:
        """The ranks that expect HEARTBEAT messages from this rank."""
        if self.rank == 0:
            return range(1, self.size)
        return range(0 if self.is_done else 1)

    def next_messages(self) -> list[Outgoing]:
        """Messages that this rank initiates. Call it only when all earlier messages have been sent."""
        with self.lock:
            if self._can_average:
                return [self._average()]
            if not self._can_finish:
                return []
            self.is_done = True
            if self.rank == 0:
                self.is_over = True
                return [self.header_only(Kind.END, to) for to in range(1, self.size)]
            neighbours = sorted(set(self.peers)) if self.is_active else []
            leave = [self.header_only(Kind.LEAVE, to) for to in neighbours]
            return [*leave, self.header_only(Kind.DONE, 0)]

    def request_counts(self) -> list[Outgoing]:
        """A request for step counts, if one is allowed. Call it only when all earlier messages have been sent."""
        with self.lock:
            if not self._is_free:
                return []
            self._next_counts_peer = (self._next_counts_peer + 1) % len(self.peers)
            self._number += 1
            self.awaited_rank = self.peers[self._next_counts_peer]
            return [self.header_only(Kind.COUNTS_REQUEST, self.awaited_rank, self._number)]

    def receive(self, message: Int64[Tensor, "words"]) -> list[Outgoing]:
        """Processes a received message and returns the reply. The message's memory may be reused afterwards."""
        kind, sender, number = message[KIND:COUNTS].tolist()
        with self.lock:
            torch.maximum(self.step_counts, message[COUNTS : self._header], out=self.step_counts)
            if kind == Kind.AVERAGE and sender in self._active_peers:
                return [self._reply(message, sender, number)]
            if kind == Kind.COUNTS_REQUEST and sender in self._active_peers:
                return [self.header_only(Kind.COUNTS_REPLY, sender, number)]
            is_awaited = (sender, number) == (self.awaited_rank, self._number)
            if kind == Kind.COUNTS_REPLY and is_awaited:
                self.awaited_rank = None
            elif kind == Kind.REPLY and is_awaited:
                sent_x = self._x_of(self._free_buffers[0])
                self.x += self._x_of(message).sub_(sent_x).mul_(0.5)
                self.awaited_rank = None
                self.averagings += 1
            elif kind == Kind.LEAVE and sender in self._active_peers:
                self._active_peers.remove(sender)
            elif kind == Kind.DONE and sender in self._not_done:
                self._not_done.remove(sender)
            elif kind == Kind.END and self.is_done:
                self.is_over = True
            elif kind == Kind.ABORT:
                fault = (
                    "failed: see its own output" if number == sender else f"timed out (reported by rank {sender})"
                )
                raise GossipError(f"gossip has ended: rank {number} {fault}")
            elif kind != Kind.HEARTBEAT:
                raise AssertionError(f"unexpected message {number} of kind {kind} from rank {sender}")
            return []

    def whole(self, buffer: Int64[Tensor, "words"]) -> Int64[Tensor, "words"]:
        """The received message at the front of a buffer."""
        has_x = int(buffer[KIND]) in (Kind.AVERAGE, Kind.REPLY)
        return buffer if has_x else buffer[: self._header]

    def release(self, message: Int64[Tensor, "words"]) -> None:
        """Makes the memory of a completely sent message available again."""
        if not self.is_active and message.numel() > self._header:
            self._free_buffers.append(message)

    def header_only(self, kind: Kind, to: int, number: int = 0) -> Outgoing:
        """A message without x."""
        return Outgoing(to, self._write_header(torch.empty(self._header, dtype=torch.int64), kind, number))

    # --- inside -----------------------------------------------------------------------------------------------

    @property
    def _is_free(self) -> bool:
        return self.is_active and self.awaited_rank is None and not self.is_draining

    @property
    def _can_average(self) -> bool:
        return self._is_free and self.credit >= 1

    @property
    def _can_finish(self) -> bool:
        is_waiting = self.awaited_rank is not None or self._active_peers or self._not_done
        return self.is_draining and not self.is_done and not is_waiting

    def _average(self) -> Outgoing:
        self.awaited_rank = self.peers[self._next_peer]
        self._next_peer = (self._next_peer + 1) % len(self.peers)
        self._number += 1
        self.credit -= 1
        return Outgoing(self.awaited_rank, self._write(self._free_buffers[0], Kind.AVERAGE, self._number))

    def _reply(self, message: Tensor, sender: int, number: int) -> Outgoing:
        buffer = self._free_buffers.pop() if self._free_buffers else self.buffer()
        reply = self._write(buffer, Kind.REPLY, number)
        self.x += self._x_of(message).sub_(self._x_of(reply)).mul_(0.5)
        self.averagings += 1
        return Outgoing(sender, reply)

    def _write(self, message: Tensor, kind: Kind, number: int) -> Tensor:
        self._x_of(message).copy_(self.x)
        return self._write_header(message, kind, number)

    def _write_header(self, message: Tensor, kind: Kind, number: int) -> Tensor:
        message[KIND:COUNTS] = torch.tensor([kind, self.rank, number], dtype=message.dtype)
        message[COUNTS : self._header] = self.step_counts
        return message

    def _x_of(self, message: Tensor) -> Tensor:
        return message[self._header :].view(torch.float32)[: self.x.numel()]
