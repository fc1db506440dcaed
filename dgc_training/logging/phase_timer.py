"""Host time spent in named phases."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from dgc.comm.meter import Trace

T = TypeVar("T")


class PhaseTimer:
    """Adds up the host's seconds spent in named phases. With a `trace`, each phase is also drawn there."""

    def __init__(self, trace: Trace | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.trace = trace

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self.seconds[name] = self.seconds.get(name, 0.0) + ended - started
            if self.trace is not None:
                self.trace.add(name, "training", started, ended)

    def iterate(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """Yields `items`, and counts the time spent fetching them as phase `name`."""
        iterator = iter(items)
        while True:
            with self.phase(name):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item
