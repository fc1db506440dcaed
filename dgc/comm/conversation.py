"""Execution of one conversation: the generator of an algorithm, driven with a transport and a meter."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import inf
from time import perf_counter
from types import TracebackType
from typing import Any, Generic

import torch

from dgc.comm.meter import TrafficMeter
from dgc.comm.requests import Conversation, Read, T
from dgc.comm.staging import HostCopy
from dgc.comm.transport import Transport

# of every type of device; torch.autocast(..., enabled=False) is for one
without_autocast = getattr(torch._C, "_DisableAutocast", nullcontext)
# to enter it takes ten times as long as to ask whether it is needed
may_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


class RunningConversation(Generic[T]):
    """One conversation in progress. The constructor launches the first round.

    `advance` continues while replies are available and does not block. `finish` blocks. Requests of the ranks are
    matched by name and round, so a conversation must have the same number of rounds on every rank. A `Read` is not
    a round. The algorithm runs with autocast off: inside it, matrix products would lose digits, or raise an error.

    Args:
        name: Name of the conversation, the same on every rank.
        conversation: Generator of an algorithm.
        transport: Carries the requests.
        meter: Counts bytes and seconds.
        communicators: Communicators of the first rounds. Later rounds use the first of these communicators.

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
        communicators: Sequence[str] = ("",),
    ):
        self.name = name
        self.done = False
        self.rounds = 0
        self._conversation = conversation
        self._transport = transport
        self._meter = meter
        self._communicators = communicators
        self._awaited: Transport | HostCopy = transport  # of a Read: its copy
        self._work: Any = None
        self._launched = 0.0
        self.result: T
        self._resume(None)

    @property
    def has_replies(self) -> bool:
        """Whether it can continue without waiting."""
        return not self.done and self._awaited.poll(self._work)

    def advance(self, max_rounds: float = inf) -> bool:
        """Continue while replies are available, without waiting. Return whether the conversation has ended.

        max_rounds: Largest number of rounds that may have been launched afterwards.
        """
        while self.rounds < max_rounds and self.has_replies:
            self._resume(self._awaited.wait(self._work))
        return self.done

    def finish_round(self) -> bool:
        """Continue to the next round, or to the end. Wait where necessary. Return whether it has ended."""
        rounds = self.rounds
        while not self.done and self.rounds == rounds:
            start = perf_counter()
            replies = self._awaited.wait(self._work)
            self._meter.add_time("wait", self.name, start, perf_counter())
            self._resume(replies)
        return self.done

    def finish(self) -> T:
        """Wait for all remaining rounds and return the algorithm's result."""
        while not self.finish_round():
            pass
        return self.result

    def _resume(self, replies: Any) -> None:
        """Continue with these replies, and launch the next round."""
        start = perf_counter()
        if self._meter.trace is not None and replies is not None and self._awaited is self._transport:
            self._meter.trace.add("in flight", self.name, self._launched, start, network=True)
        try:
            if may_autocast():
                with without_autocast():
                    requests = self._conversation.send(replies)
            else:
                requests = self._conversation.send(replies)
        except StopIteration as stop:
            self.done, self.result, self._work = True, stop.value, None
            self._meter.add_time("decode", self.name, start, perf_counter())
            return
        self._launched = perf_counter()
        self._meter.add_time("compress", self.name, start, self._launched)
        if isinstance(requests, Read):
            self._awaited = HostCopy(requests.numbers)
            return
        for request in requests:
            self._meter.count(request, self._transport)
        self._meter.rounds += 1
        communicator = self._communicators[self.rounds if self.rounds < len(self._communicators) else 0]
        self._awaited = self._transport
        self._work = self._transport.launch(f"{self.name}.{self.rounds}", requests, communicator)
        self.rounds += 1
        self._meter.add_time("launch", self.name, self._launched, perf_counter())


class Intact:
    """Context of work with other ranks, without gradients. If an exception ends it, it cannot be entered again.

    What was sent, and the state of the methods, is unknown then: it may differ from the state of the other ranks.
    """

    def __init__(self) -> None:
        self._reason = ""
        self._grad_modes: list[bool] = []  # of the caller, for each entry

    @property
    def is_entered(self) -> bool:
        return bool(self._grad_modes)

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
        if self._reason:
            self.check()
        self._grad_modes.append(torch.is_grad_enabled())
        if self._grad_modes[-1]:  # not during backward
            torch.set_grad_enabled(False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._grad_modes.pop():
            torch.set_grad_enabled(True)
        if error is not None:
            self.fail(f"{type(error).__name__}: {error}")
