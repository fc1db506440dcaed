"""A timeline of a rank's exchanges in Chrome's trace format, for ui.perfetto.dev or chrome://tracing.

Each bucket has two rows. The first shows its phases. The second shows its messages, "in flight" from the launch
until the replies are used. Times are host times: on a GPU the work itself may still be running.
"""

import json
from pathlib import Path
from time import perf_counter


class Trace:
    """Events of one rank.

    Args:
        rank: This rank.
        limit: Largest number of events kept, which bounds the memory of a long run. `dropped` counts the rest.
    """

    def __init__(self, rank: int, limit: int = 200_000):
        self._rank, self._limit = rank, limit
        self._zero = perf_counter()
        self._rows: dict[str, int] = {}
        self._events: list[tuple[str, int, float, float]] = []
        self.dropped = 0

    def add(self, phase: str, row: str, start: float, end: float, network: bool = False) -> None:
        """Add a phase to a row, or with `network` to the row below it. Times: time.perf_counter(), in seconds."""
        number = 2 * self._rows.setdefault(row, len(self._rows)) + network
        if len(self._events) < self._limit:
            self._events.append((phase, number, start - self._zero, end - start))
        else:
            self.dropped += 1

    def save(self, path: Path) -> None:
        """Write all events so far. Times are written in microseconds since the trace began."""
        events = [_name("process_name", self._rank, 0, f"rank {self._rank}")]
        for name, row in self._rows.items():
            events.append(_name("thread_name", self._rank, 2 * row, name))
            events.append(_name("thread_name", self._rank, 2 * row + 1, f"{name} (network)"))
        for phase, row, start, duration in self._events:
            times = {"ts": round(1e6 * start, 3), "dur": round(1e6 * duration, 3)}
            events.append({"ph": "X", "name": phase, "pid": self._rank, "tid": row, **times})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": events, "droppedEvents": self.dropped}))


def _name(kind: str, rank: int, row: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": {"name": name}}
