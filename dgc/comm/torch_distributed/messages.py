"""Point-to-point messages over Gloo.

A Gloo message is known to be complete only when a call that waits for it returns. Threads wait, so that other
threads can ask whether a message is complete.
"""

from concurrent.futures import Future, wait
from datetime import timedelta
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any

import torch.distributed as dist
from torch import Tensor

FOREVER = timedelta(days=365)  # an asynchronous rank may wait as long as it likes
SEND_TIME = 10.0  # seconds


class WaitingThreads:
    """Threads that wait for messages. There are as many as there were messages at one time.

    They do not keep the process alive: a receive may remain when a run ends.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Any, Future[None]]] = SimpleQueue()
        self._idle = Semaphore(0)
        self._sends: set[Future[None]] = set()

    def wait_for_receive(self, work: Any) -> "Future[None]":
        """Wait for a message in another thread. The future has its exception if it failed."""
        return self._wait_for(work, Future())

    def wait_for_send(self, work: Any) -> "Future[None]":
        """Wait in another thread until a message is sent. The future has its exception if that failed."""
        future: Future[None] = Future()
        self._sends.add(future)
        future.add_done_callback(self._sends.discard)
        return self._wait_for(work, future)

    def finish_sends(self) -> None:
        """Wait until all messages are sent, at most `SEND_TIME`: another rank may have stopped."""
        wait(list(self._sends), SEND_TIME)

    def _wait_for(self, work: Any, future: "Future[None]") -> "Future[None]":
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

    def __init__(self, threads: WaitingThreads) -> None:
        self._group: Any = dist.new_group(timeout=FOREVER, backend="gloo")
        self._threads = threads
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def isend(self, to: int, message: Tensor, tag: int) -> "Future[None]":
        return self._threads.wait_for_send(dist.isend(message, to, self._group, tag))

    def irecv(self, buffer: Tensor, tag: int) -> "Future[None]":
        return self._threads.wait_for_receive(dist.irecv(buffer, None, self._group, tag))

    def test(self, handle: "Future[None]") -> bool:
        if handle.done():
            handle.result()  # raises the exception of a message that failed
        return handle.done()


class Neighbors:
    """The messages of `Exchange` requests, on a process group of their own. Construction is collective.

    Messages are matched by name (the tag) and, under one name, in the order of sending.
    """

    def __init__(self, threads: WaitingThreads) -> None:
        self._group: Any = dist.new_group(timeout=FOREVER, backend="gloo")
        self._threads = threads

    def start(self, tag: int, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> "list[Future[None]]":
        """Start sending and receiving, by world rank. Return one future for each receive."""
        futures = [
            self._threads.wait_for_receive(dist.irecv(buffer, source, self._group, tag))
            for source, buffer in receives.items()
        ]
        for to, message in sends.items():
            self._threads.wait_for_send(dist.isend(message, to, self._group, tag))
        return futures

    def close(self) -> Any:
        """Wait until all messages are sent, and return the process group, for `destroy`."""
        self._threads.finish_sends()
        group, self._group = self._group, None
        return group
