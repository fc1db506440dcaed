"""Execution of one conversation: the generator of an algorithm, driven with a transport and a meter.

Several conversations at once, whose rounds are launched in the same order on every rank.

Which replies arrive first depends on timing. The order of launches on one lane must not depend on it:

- The caller starts conversations, and so launches their rounds 0, in the same order on every rank.
- Round r of a conversation is launched after round r of all conversations that started before it.
- Each round r < LANES has a lane of its own. The order between round 0 of one conversation and round 1 of another
  therefore does not matter.
- Later rounds are launched by `finish` alone, on the lane of round 0: for each r, round r of all conversations.
  Whether a conversation ends after LANES rounds is known only when it is continued, so that is left to `finish`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf
from time import perf_counter
from types import TracebackType
from typing import Any, Generic

from dgc.comm.meter import TrafficMeter
from dgc.comm.requests import Conversation, Read, Request, T
from dgc.comm.staging import HostCopy
from dgc.comm.transport import Transport


class RunningConversation(Generic[T]):
    """One conversation in progress. The constructor launches the first round.

    `advance` continues while replies are available and does not block. `finish` blocks. Requests of the ranks are
    matched by name and round, so a conversation must have the same number of rounds on every rank. A `Read` is not
    a round.

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
        self._copy: HostCopy | None = None  # of a Read
        self._launched = 0.0
        self._result: T
        self._resume(None)

    def advance(self, max_rounds: float = inf) -> bool:
        """Continue while replies are available, without waiting. Return whether the conversation has ended.

        Args:
            max_rounds: Largest number of rounds that may have been launched afterwards.
        """
        while not self.done and self.rounds < max_rounds and self._poll():
            self._resume(self._wait())
        return self.done

    def finish_round(self) -> bool:
        """Continue to the next round, or to the end. Wait where necessary. Return whether it has ended."""
        rounds = self.rounds
        while not self.done and self.rounds == rounds:
            start = perf_counter()
            replies = self._wait()
            self._meter.add_time("wait", self.name, start, perf_counter())
            self._resume(replies)
        return self.done

    def finish(self) -> T:
        """Wait for all remaining rounds and return the algorithm's result."""
        while not self.finish_round():
            pass
        return self._result

    def _poll(self) -> bool:
        return self._transport.poll(self._flight) if self._copy is None else self._copy.poll()

    def _wait(self) -> Any:
        return self._transport.wait(self._flight) if self._copy is None else self._copy.wait()

    def _resume(self, replies: Any) -> None:
        start = perf_counter()
        if replies is not None and self._copy is None:
            self._meter.trace_message(self.name, self._launched, start)
        self._copy = None
        try:
            requests = next(self._conversation) if replies is None else self._conversation.send(replies)
        except StopIteration as stop:
            self.done, self._result, self._flight = True, stop.value, None
            self._meter.add_time("decode", self.name, start, perf_counter())
        else:
            self._meter.add_time("compress", self.name, start, perf_counter())
            if isinstance(requests, Read):
                self._copy = HostCopy(requests.numbers)
            else:
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


LANES = 3  # few methods have more rounds. A lane of torch.distributed is a process group, with its connections.

Context = Callable[[], AbstractContextManager[Any]]


class Intact:
    """Context of work with other ranks. If an exception ends it, it cannot be entered again.

    What was sent, and the state of the methods, is unknown then: it may differ from that of the other ranks.
    """

    def __init__(self) -> None:
        self._reason = ""

    def fail(self, reason: str) -> None:
        """Let `check` raise from here on. The first reason remains."""
        self._reason = self._reason or reason

    def check(self) -> None:
        """Raise RuntimeError, with the reason, if an exception has ended the work of an earlier step."""
        if self._reason:
            raise RuntimeError(
                f"an earlier step ended with an exception, {self._reason}: ranks may have sent and applied "
                "different parts of it. End the process on all ranks, and continue from a checkpoint"
            )

    def __enter__(self) -> None:
        self.check()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(f"{type(error).__name__}: {error}")


class OrderedConversations(Generic[T]):
    """Conversations in progress, in the order in which they were started. Construction is collective.

    Args:
        name: Prefix of the lanes. It must be unique on the transport.
        transport: Carries the requests.
        meter: Counts bytes and seconds.

    Attributes:
        intact: Guards all methods. After an exception of a method or of the network each of them raises
            RuntimeError.

    Example:
        >>> from dgc.comm.conversation import OrderedConversations
        >>> def mean(x):
        ...     (reply,) = yield (AllReduce(x),)
        ...     return reply
        >>> conversations = OrderedConversations("gradients", transport, TrafficMeter())
        >>> conversations.start("a", mean(torch.ones(1)))
        >>> conversations.start("b", mean(torch.zeros(1)))
        >>> conversations.advance()  # any number of times, or never
        >>> conversations.finish()
        [tensor([1.]), tensor([0.])]
    """

    def __init__(self, name: str, transport: Transport, meter: TrafficMeter):
        self._transport, self._meter = transport, meter
        self._lanes = [f"{name}.round{r}" for r in range(LANES)]
        for lane in self._lanes:
            transport.open_lane(lane)
        self._running: list[tuple[RunningConversation[T], Context]] = []
        self._waiting: deque[tuple[RunningConversation[T], Context]] = deque()  # the last of them, not all done
        self.intact = Intact()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, name: str, conversation: Conversation[T], context: Context = nullcontext) -> None:
        """Launch the first round of a conversation.

        Args:
            name: Name of the conversation, the same on every rank.
            conversation: Generator of an algorithm.
            context: Makes a context manager in which the conversation continues later, such as a CUDA stream.
        """
        with self.intact:
            running = RunningConversation(name, conversation, self._transport, self._meter, self._lanes)
        self._running.append((running, context))
        self._waiting.append((running, context))

    def advance(self) -> None:
        """Continue all conversations whose replies are available, without waiting."""
        while self._waiting and self._waiting[0][0].done:
            self._waiting.popleft()
        limit = LANES
        for running, context in self._waiting:
            if running.done:
                continue
            with self.intact, context():
                done = running.advance(limit)
            limit = limit if done else min(limit, running.rounds)
            if limit == 1:  # all others wait in their first round, and may not begin another one
                break

    def finish(self) -> list[T]:
        """Wait for all rounds of all conversations. Return the results in the order of `start`."""
        rounds = 1
        remaining = self._running
        with self.intact:
            while remaining:
                for running, context in remaining:
                    if running.rounds == rounds:
                        with context():
                            running.finish_round()
                rounds += 1
                remaining = [(running, context) for running, context in remaining if not running.done]
        results = [running.finish() for running, _ in self._running]
        self.clear()
        return results

    def clear(self) -> None:
        """Forget all conversations. For a step that is given up."""
        self._running = []
        self._waiting.clear()
