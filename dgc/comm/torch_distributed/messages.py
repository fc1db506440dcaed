"""Point-to-point messages over Gloo.

A Gloo message is known to be complete only when a call that waits for it returns. Threads wait, so that other
threads can ask whether a message is complete.

When Python shuts down, a thread that returns from Gloo, or releases an object of it, ends the process with
SIGABRT. `WaitingThreads.close` therefore ends the threads before.
"""

import time
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FOREVER = timedelta(days=365)  # an asynchronous rank may wait as long as it likes
SEND_TIME = 10.0  # seconds
END_TIME = 5.0  # seconds


class WaitingThreads:
    """Threads that wait for messages. There are as many as there were messages at one time."""

    def __init__(self) -> None:
        self.groups: list[MessageGroup] = []
        self._queue: SimpleQueue[tuple[Any, Future[None]] | None] = SimpleQueue()
        self._idle = Semaphore(0)
        self._threads: list[Thread] = []
        self._sends: set[Future[None]] = set()
        self._from_any: set[Future[None]] = set()

    def wait_for_receive(self, work: Any, from_any: bool = False) -> "Future[None]":
        """Wait for a message in another thread. The future has its exception if it failed.

        Args:
            work: The receive.
            from_any: The message may come from any rank.
        """
        return self._wait_for(work, self._from_any if from_any else set())

    def wait_for_send(self, work: Any) -> "Future[None]":
        """Wait in another thread until a message is sent. The future has its exception if that failed."""
        return self._wait_for(work, self._sends)

    def close(self) -> list[Any]:
        """Wait until all messages are sent, end the threads, and return the process groups, for `destroy`.

        It waits for sends at most `SEND_TIME`: another rank may have stopped. Receives that are left fail. Only a
        receive from any rank does not: its thread stays inside Gloo, where no message can arrive any more.
        """
        wait(list(self._sends), SEND_TIME)
        groups = [group.close() for group in self.groups]
        self.groups.clear()
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + END_TIME
        while sum(thread.is_alive() for thread in self._threads) > len(self._from_any) and time.monotonic() < end:
            time.sleep(0.001)
        return groups

    def _wait_for(self, work: Any, kind: "set[Future[None]]") -> "Future[None]":
        future: Future[None] = Future()
        kind.add(future)
        future.add_done_callback(kind.discard)
        self._queue.put((work, future))
        if not self._idle.acquire(blocking=False):
            # a daemon: otherwise Python would wait for it before `close` is called
            self._threads.append(Thread(target=self._run, name="dgc-messages", daemon=True))
            self._threads[-1].start()
        return future

    def _run(self) -> None:
        while (waiting := self._queue.get()) is not None:
            work, future = waiting
            try:
                work.wait()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del work, future, waiting  # the thread must not keep the message's memory
            self._idle.release()


class MessageGroup:
    """A process group for messages alone. Construction is collective."""

    def __init__(self, threads: WaitingThreads) -> None:
        self._group: Any = dist.new_group(timeout=FOREVER, backend="gloo")
        self._threads = threads
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        threads.groups.append(self)

    def close(self) -> Any:
        """Close the connections, and return the process group."""
        group, self._group = self._group, None
        if self.size > 1:
            # Gloo closes them when any message times out, and has no other call for it
            with suppress(RuntimeError):
                receive = group.recv([torch.empty(1, dtype=torch.uint8)], (self.rank + 1) % self.size, 0)
                receive.wait(timedelta(milliseconds=1))
        return group


class GlooChannel(MessageGroup):
    """A `Channel` over a process group of its own."""

    def isend(self, to: int, message: Tensor, tag: int) -> "Future[None]":
        return self._threads.wait_for_send(dist.isend(message, to, self._group, tag))

    def irecv(self, buffer: Tensor, tag: int) -> "Future[None]":
        return self._threads.wait_for_receive(dist.irecv(buffer, None, self._group, tag), from_any=True)

    def test(self, handle: "Future[None]") -> bool:
        if handle.done():
            handle.result()  # raises the exception of a message that failed
        return handle.done()


class Neighbors(MessageGroup):
    """The messages of `Exchange` requests.

    Messages are matched by name (the tag) and, under one name, in the order of sending.
    """

    def start(self, tag: int, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> "list[Future[None]]":
        """Start sending and receiving, by world rank. Return one future for each receive."""
        futures = [
            self._threads.wait_for_receive(dist.irecv(buffer, source, self._group, tag))
            for source, buffer in receives.items()
        ]
        for to, message in sends.items():
            self._threads.wait_for_send(dist.isend(message, to, self._group, tag))
        return futures
