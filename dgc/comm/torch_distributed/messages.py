"""Point-to-point messages over Gloo.

A Gloo message is known to be complete only when a call that waits for it returns. Threads wait, so that other
threads can ask whether a message is complete.
"""

from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any

import torch.distributed as dist
from torch import Tensor

FOREVER = timedelta(days=365)  # an asynchronous rank may wait as long as it likes


class WaitingThreads:
    """Threads that wait for messages. There are as many as there were messages at one time.

    They do not keep the process alive: a receive may remain when a run ends.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Any, Future[None]]] = SimpleQueue()
        self._idle = Semaphore(0)

    def wait_for(self, work: Any) -> "Future[None]":
        """Wait for a message in another thread. The future has its exception if it failed."""
        future: Future[None] = Future()
        self._queue.put((work, future))
        if not self._idle.acquire(blocking=False):
            Thread(target=self._run, name="dgc-messages", daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            work, future = self._queue.get()
            try:
                work.wait()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del work, future  # the thread must not keep the message's memory
            self._idle.release()


class GlooChannel:
    """A `Channel` over a process group of its own. Construction is collective."""

    def __init__(self) -> None:
        self._group: Any = dist.new_group(timeout=FOREVER, backend="gloo")
        self._threads = WaitingThreads()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def isend(self, to: int, message: Tensor, tag: int) -> "Future[None]":
        return self._threads.wait_for(dist.isend(message, to, self._group, tag))

    def irecv(self, buffer: Tensor, tag: int) -> "Future[None]":
        return self._threads.wait_for(dist.irecv(buffer, None, self._group, tag))

    def test(self, handle: "Future[None]") -> bool:
        if handle.done():
            handle.result()  # raises the exception of a message that failed
        return handle.done()


class Neighbors:
    """The messages of `Exchange` requests, on a process group of their own. Construction is collective.

    Messages are matched by name (the tag) and, under one name, in the order of sending.
    """

    def __init__(self) -> None:
        self._group: Any = dist.new_group(timeout=FOREVER, backend="gloo")
        self._threads = WaitingThreads()

    def start(self, tag: int, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> "list[Future[None]]":
        """Start sending and receiving, by world rank. Return one future for each receive."""
        futures = [
            self._threads.wait_for(dist.irecv(buffer, source, self._group, tag))
            for source, buffer in receives.items()
        ]
        for to, message in sends.items():
            self._threads.wait_for(dist.isend(message, to, self._group, tag))
        return futures
