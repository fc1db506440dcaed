"""Signals that are noticed at once, also while the main thread is inside a collective.

Python's own handlers run only after the main thread leaves a call into C++, and that call may wait for a rank that
has died.
"""

import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType


@contextmanager
def listening(
    numbers: Sequence[signal.Signals],
    handler: Callable[[int, FrameType | None], object],
    received: Callable[[int], object],
) -> Iterator[None]:
    """Context manager that handles signals in two threads. Outside of the main thread it does nothing.

    Args:
        numbers: the signals.
        handler: called in the main thread, as soon as Python can.
        received: called in another thread, at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while data := reader.recv(64):
            for number in data:
                if number in numbers:
                    received(number)
        reader.close()

    # A byte is written only for signals that have a Python handler.
    wakeup_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    handlers_before = {number: signal.signal(number, handler) for number in numbers}
    threading.Thread(target=watch, daemon=True, name="signals").start()
    try:
        yield
    finally:
        for number, before in handlers_before.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(wakeup_before)
        writer.close()
