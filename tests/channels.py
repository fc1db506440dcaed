"""A simulated network of channels (`dgc.comm.channel`), with N ranks in a single process.

Messages take random times, which repeat for the same seed and order of calls.
"""

import random
import threading
from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
class _Message:
    """A message in flight, received at `due` or later. An eager one is copied, as in MPI, and counts as sent."""

    source: int
    tag: int
    content: Tensor
    due: int
    eager: bool
    received: bool = False


@dataclass(eq=False)
class _Receive:
    rank: int
    tag: int
    buffer: Tensor


class LocalChannel:
    def __init__(self, world: "ChannelWorld", rank: int):
        self._world, self.rank, self.size, self.test = world, rank, world.size, world.test

    def isend(self, to: int, message: Tensor, tag: int) -> _Message:
        return self._world.send(self.rank, to, message, tag)

    def irecv(self, buffer: Tensor, tag: int) -> _Receive:
        return self._world.receive(self.rank, buffer, tag)


class ChannelWorld:
    """A simulated network with one `LocalChannel` per rank, in `channels`.

    Every call of `test`, on any channel, takes one unit of time; `max_delay` is the largest delay of a message.
    Some messages are copied when they are sent and some when they are received, so that a test detects a sender
    that overwrites its message too early.
    """

    def __init__(self, size: int, seed: int = 0, max_delay: int = 20):
        self.size, self.max_delay, self.time = size, max_delay, 0
        self.channels = [LocalChannel(self, rank) for rank in range(size)]
        self._messages: list[list[_Message]] = [[] for _ in range(size)]
        self._receives: set[_Receive] = set()
        self._random, self._lock = random.Random(seed), threading.Lock()

    @property
    def in_flight(self) -> int:
        return sum(map(len, self._messages))

    @property
    def pending_receives(self) -> int:
        return len(self._receives)

    def receive(self, rank: int, buffer: Tensor, tag: int) -> _Receive:
        with self._lock:
            self._receives.add(receive := _Receive(rank, tag, buffer))
            return receive

    def send(self, source: int, to: int, message: Tensor, tag: int) -> _Message:
        with self._lock:
            eager = self._random.random() < 0.5
            earlier = [m.due for m in self._messages[to] if m.source == source]
            due = max([self.time + self._random.randint(0, self.max_delay), *earlier])
            sent = _Message(source, tag, message.clone() if eager else message, due, eager)
            self._messages[to].append(sent)
            return sent

    def test(self, handle: _Message | _Receive) -> bool:
        with self._lock:
            self.time += 1
            if isinstance(handle, _Message):
                return handle.eager or handle.received
            ready = [m for m in self._messages[handle.rank] if m.tag == handle.tag and m.due <= self.time]
            if not ready:
                return False
            first = min(ready, key=lambda message: message.due)
            self._messages[handle.rank].remove(first)
            elements, room = first.content.numel(), handle.buffer.numel()
            if elements > room:
                raise ValueError(f"a message of {elements} elements for a buffer of {room}")
            handle.buffer[:elements].copy_(first.content)
            first.received = True
            self._receives.remove(handle)
            return True
