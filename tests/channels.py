"""A simulated network of channels (`dgc.comm.channel`), with N ranks in a single process.

Messages take random times, which repeat for the same seed and order of calls.
"""

import random
import threading
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(eq=False)
class _Message:
    """A message in flight.

    Attributes:
        due: First time at which the message can be received.
        eager: The message counts as sent once it is copied, as in the eager mode of MPI.
    """

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
    """One rank's end of a `ChannelWorld`."""

    def __init__(self, world: "ChannelWorld", rank: int):
        self._world = world
        self.rank, self.size = rank, world.size

    def isend(self, to: int, message: Tensor, tag: int) -> _Message:
        return self._world.send(self.rank, to, message, tag)

    def irecv(self, buffer: Tensor, tag: int) -> _Receive:
        return self._world.receive(self.rank, buffer, tag)

    def test(self, handle: _Message | _Receive) -> bool:
        return self._world.test(handle)


@dataclass(eq=False)
class ChannelWorld:
    """A simulated network with one `LocalChannel` per rank, in `channels`.

    Every call of `test`, on any channel, takes one unit of time. Some messages are copied when they are sent and
    some when they are received. A test can therefore detect a sender that overwrites its message too early.

    Args:
        size: Number of ranks.
        seed: Seed of the random delays.
        max_delay: Largest delay of a message, in units of time.
    """

    size: int
    seed: int = 0
    max_delay: int = 20
    time: int = 0
    _messages: list[list[_Message]] = field(default_factory=list)
    _receives: set[_Receive] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.channels = [LocalChannel(self, rank) for rank in range(self.size)]
        self._messages = [[] for _ in range(self.size)]
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()

    @property
    def in_flight(self) -> int:
        return sum(map(len, self._messages))

    @property
    def pending_receives(self) -> int:
        return len(self._receives)

    def receive(self, rank: int, buffer: Tensor, tag: int) -> _Receive:
        with self._lock:
            receive = _Receive(rank, tag, buffer)
            self._receives.add(receive)
            return receive

    def send(self, source: int, to: int, message: Tensor, tag: int) -> _Message:
        with self._lock:
            eager = self._random.random() < 0.5
            content = message.clone() if eager else message
            earlier = [m.due for m in self._messages[to] if m.source == source]
            due = max([self.time + self._random.randint(0, self.max_delay), *earlier])
            sent = _Message(source, tag, content, due, eager)
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
