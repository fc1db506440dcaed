"""The message protocol of AD-PSGD on one rank: no threads, no clock, no network.

A cycle lasts from `begin` until every rank has settled. Active ranks (odd) average with passive ranks (even):

    AVERAGE   active -> passive: a = its x. The passive rank stores p = its x and does x += (a - p)/2
    REPLY     passive -> active: p. The active rank does x += (p - a)/2 to its current x

    ASK, TOLD  the same without x: an active rank without an average for a while requests the step counts

The two changes are exact opposites, so the sum over ranks is preserved except for the rounding of the additions.
To settle, no rank starts a new exchange, and passive ranks continue to answer:

    LEAVING   active -> each of its passive peers, after its last reply has arrived
    DONE      any rank -> rank 0, after it has left, or all its active peers have
    OVER      rank 0 -> all, after DONE from all: no message is in flight on any rank

In addition, ALIVE, between rank 0 and each other rank, shows that the sender runs, and ABORT names a failed rank.

Every message holds the number of steps of each rank, as known to its sender. A receiver keeps the larger numbers.
A rank may leave when its numbers show enough steps. An active rank informs its neighbours by leaving. A passive
rank does so in every answer, and slow ranks ask as often as fast ones. DONE and OVER make the numbers exact.

Payload in bytes, with n ranks and N elements: 8 (3 + n), and for AVERAGE and REPLY 8 ceil(N / 2) more.
"""

import threading
from dataclasses import dataclass
from enum import IntEnum
from math import inf

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from dgc.gossip.topology.bipartite import book
from dgc.gossip.topology.topology import Topology


class GossipError(RuntimeError):
    """A rank is silent or has failed. The message names it."""


class Kind(IntEnum):
    AVERAGE = 0
    REPLY = 1
    ASK = 2
    TOLD = 3
    LEAVING = 4
    DONE = 5
    OVER = 6
    ALIVE = 7
    ABORT = 8


@dataclass(frozen=True, eq=False)
class Outgoing:
    """A message and its receiver.

    message: int64 words: kind, sender, number, the steps of all ranks; then x.
    """

    to: int
    message: Int64[Tensor, "words"]


class Member:
    """One rank's state. `lock` guards x, counts and credit between the training thread and the gossip thread.

    An active rank starts at most `averagings_per_step` averages for each of its own steps. Averages that it had no
    time for are not made up later.
    """

    def __init__(self, x: Float32[Tensor, "n"], rank: int, pairs: Topology, averagings_per_step: float = inf):
        self.x, self.rank, self.size = x, rank, pairs.size
        self.book = book(pairs, rank)
        self.is_active = rank % 2 == 1
        self.averagings_per_step = averagings_per_step
        self.lock = threading.Lock()
        self.counts = torch.zeros(self.size, dtype=torch.int64)
        self.place = self.averagings = 0
        self._number = self._asked = 0
        self._header = 3 + self.size
        self._spare = [self.buffer()] if self.is_active else []
        self.begin()

    def buffer(self) -> Int64[Tensor, "words"]:
        """A buffer that holds any message."""
        return torch.zeros(self._header + (self.x.numel() + 1) // 2, dtype=torch.int64)

    def begin(self) -> None:
        """Starts a cycle. No message may be in flight."""
        self.credit = inf if self.averagings_per_step == inf else 0.0
        self.waits_for: int | None = None
        self.settling = self.over = self.has_said_done = False
        self._gossiping = set() if self.is_active else set(self.book)  # active peers that may start an average
        self._missing = set(range(1, self.size)) if self.rank == 0 else set()  # ranks that have not sent DONE

    def count_step(self) -> None:
        """Counts a step. The caller holds the lock."""
        self.counts[self.rank] += 1
        self.credit = min(self.credit + self.averagings_per_step, max(1.0, self.averagings_per_step))

    # --- interface of the link --------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether `news` would return a message."""
        return self._may_average or self._may_end

    @property
    def listens(self) -> bool:
        """Whether another message can arrive in this cycle."""
        return not self.over and (self.rank > 0 or bool(self._gossiping or self._missing))

    @property
    def watched(self) -> set[int]:
        """The ranks that count as lost if they are silent."""
        others = self._missing if self.rank == 0 else {0}
        return others if self.waits_for is None else {*others, self.waits_for}

    @property
    def watchers(self) -> range:
        """The ranks that expect ALIVE messages from this rank."""
        if self.rank == 0:
            return range(1, self.size)
        return range(0 if self.has_said_done else 1)

    def news(self) -> list[Outgoing]:
        """Messages that this rank sends on its own. Its earlier messages must have been sent."""
        with self.lock:
            if self._may_average:
                return [self._average()]
            if not self._may_end:
                return []
            self.has_said_done = True
            if self.rank == 0:
                self.over = True
                return [self.short(Kind.OVER, to) for to in range(1, self.size)]
            neighbours = sorted(set(self.book)) if self.is_active else []
            return [*(self.short(Kind.LEAVING, to) for to in neighbours), self.short(Kind.DONE, 0)]

    def ask(self) -> list[Outgoing]:
        """The message that requests step counts, if one is allowed. Earlier messages must have been sent."""
        with self.lock:
            if not self._is_free:
                return []
            self._asked = (self._asked + 1) % len(self.book)
            self._number += 1
            self.waits_for = self.book[self._asked]
            return [self.short(Kind.ASK, self.waits_for, self._number)]

    def receive(self, message: Int64[Tensor, "words"]) -> list[Outgoing]:
        """Processes a received message and returns the answer. The message's memory may be reused afterwards."""
        kind, sender, number = message[:3].tolist()
        with self.lock:
            torch.maximum(self.counts, message[3 : self._header], out=self.counts)
            if kind == Kind.AVERAGE and sender in self._gossiping:
                return [self._answer(message, sender, number)]
            if kind == Kind.ASK and sender in self._gossiping:
                return [self.short(Kind.TOLD, sender, number)]
            answers = (sender, number) == (self.waits_for, self._number)
            if kind == Kind.TOLD and answers:
                self.waits_for = None
            elif kind == Kind.REPLY and answers:
                own = self._x_of(self._spare[0])
                self.x += self._x_of(message).sub_(own).mul_(0.5)
                self.waits_for = None
                self.averagings += 1
            elif kind == Kind.LEAVING and sender in self._gossiping:
                self._gossiping.remove(sender)
            elif kind == Kind.DONE and sender in self._missing:
                self._missing.remove(sender)
            elif kind == Kind.OVER and self.has_said_done:
                self.over = True
            elif kind == Kind.ABORT:
                said = "failed; its own output says why" if number == sender else f"is silent, says rank {sender}"
                raise GossipError(f"gossip has ended: rank {number} {said}")
            elif kind != Kind.ALIVE:
                raise AssertionError(f"rank {sender} sent message {number} of kind {kind} out of turn")
            return []

    def sent(self, message: Int64[Tensor, "words"]) -> None:
        """Called after a message was sent. Its memory is free."""
        if not self.is_active and message.numel() > self._header:
            self._spare.append(message)

    def short(self, kind: Kind, to: int, number: int = 0) -> Outgoing:
        return Outgoing(to, self._headed(torch.empty(self._header, dtype=torch.int64), kind, number))

    # --- inside -----------------------------------------------------------------------------------------------

    @property
    def _is_free(self) -> bool:
        return self.is_active and self.waits_for is None and not self.settling

    @property
    def _may_average(self) -> bool:
        return self._is_free and self.credit >= 1

    @property
    def _may_end(self) -> bool:
        waiting = self.waits_for is not None or self._gossiping or self._missing
        return self.settling and not self.has_said_done and not waiting

    def _average(self) -> Outgoing:
        self.waits_for = self.book[self.place]
        self.place = (self.place + 1) % len(self.book)
        self._number += 1
        self.credit -= 1
        return Outgoing(self.waits_for, self._with_x(self._spare[0], Kind.AVERAGE, self._number))

    def _answer(self, message: Tensor, sender: int, number: int) -> Outgoing:
        reply = self._with_x(self._spare.pop() if self._spare else self.buffer(), Kind.REPLY, number)
        self.x += self._x_of(message).sub_(self._x_of(reply)).mul_(0.5)
        self.averagings += 1
        return Outgoing(sender, reply)

    def _headed(self, message: Tensor, kind: Kind, number: int) -> Tensor:
        message[:3] = torch.tensor([kind, self.rank, number], dtype=message.dtype)
        message[3 : self._header] = self.counts
        return message

    def _with_x(self, message: Tensor, kind: Kind, number: int) -> Tensor:
        self._x_of(message).copy_(self.x)
        return self._headed(message, kind, number)

    def _x_of(self, message: Tensor) -> Tensor:
        return message[self._header :].view(torch.float32)[: self.x.numel()]
