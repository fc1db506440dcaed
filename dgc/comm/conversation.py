"""Execution of one conversation: the generator of an algorithm, driven with a transport and a meter."""

from collections.abc import Sequence
from math import inf
from time import perf_counter
from typing import Any, Generic

from dgc.comm.meter import TrafficMeter
from dgc.comm.requests import Conversation, Request, T
from dgc.comm.transport import Transport


class RunningConversation(Generic[T]):
    """One conversation in progress. The constructor launches the first round.

    `advance` continues while replies are available and does not block. `finish` blocks. Requests of the ranks are
    matched by name and round, so a conversation must have the same number of rounds on every rank.

    Args:
        name: Name of the conversation, the same on every rank.
        conversation: Generator of an algorithm.
        transport: Carries the requests.
        meter: Counts bytes and seconds.
        lanes: Lanes of the first rounds. Later rounds use the first of these lanes.

    Example:
        >>> def mean(x):
        ...     (reply,) = yield (AllReduce(x),)
        ...     return reply
        >>> running = RunningConversation("mean", mean(x), transport, TrafficMeter())
        >>> y = running.finish()
    """

    def __init__(
        self,
        name: str,
        conversation: Conversation[T],
        transport: Transport,
        meter: TrafficMeter,
        lanes: Sequence[str] = ("",),
    ):
        self.name = name
        self.done = False
        self.rounds = 0
        self._conversation = conversation
        self._transport = transport
        self._meter = meter
        self._lanes = lanes
        self._flight: Any = None
        self._launched = 0.0
        self._result: T
        self._resume(None)

    def advance(self, max_rounds: float = inf) -> bool:
        """Continue while replies are available, without waiting. Return whether the conversation has ended.

        Args:
            max_rounds: Largest number of rounds that may have been launched afterwards.
        """
        while not self.done and self.rounds < max_rounds and self._transport.poll(self._flight):
            self._resume(self._transport.wait(self._flight))
        return self.done

    def finish_round(self) -> bool:
        """Wait for the replies of the current round and continue. Return whether the conversation has ended."""
        if not self.done:
            start = perf_counter()
            replies = self._transport.wait(self._flight)
            self._meter.add_time("wait", self.name, start, perf_counter())
            self._resume(replies)
        return self.done

    def finish(self) -> T:
        """Wait for all remaining rounds and return the algorithm's result."""
        while not self.finish_round():
            pass
        return self._result

    def _resume(self, replies: tuple[Any, ...] | None) -> None:
        start = perf_counter()
        if replies is not None:
            self._meter.trace_message(self.name, self._launched, start)
        try:
            requests = next(self._conversation) if replies is None else self._conversation.send(replies)
        except StopIteration as stop:
            self.done, self._result, self._flight = True, stop.value, None
            self._meter.add_time("decode", self.name, start, perf_counter())
        else:
            self._meter.add_time("compress", self.name, start, perf_counter())
            self._launch(requests)

    def _launch(self, requests: Sequence[Request]) -> None:
        self._launched = perf_counter()
        for request in requests:
            size = self._transport.group_size(request.group)
            self._meter.count(request, self._transport.group_rank(request.group), size)
        self._meter.rounds += 1
        lane = self._lanes[self.rounds if self.rounds < len(self._lanes) else 0]
        self._flight = self._transport.launch(f"{self.name}.{self.rounds}", requests, lane)
        self.rounds += 1
        self._meter.add_time("launch", self.name, self._launched, perf_counter())
