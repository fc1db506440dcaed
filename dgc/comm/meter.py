"""Counts of bytes and seconds, taken where a conversation's requests are launched.

`payload_bytes` counts what this rank contributes, with headers and padding. `wire_bytes` counts what this rank
sends for it under the usual bandwidth-optimal algorithm with N ranks and b payload bytes:

    all-reduce (ring)        2 b (N-1)/N
    all-gather (ring)        b (N-1)
    reduce-scatter (ring)    b (N-1)/N
    all-to-all (pairwise)    bytes for other ranks
    broadcast (pipeline)     b from every rank but the last: b (N-1)/N on average
    exchange                 bytes for other ranks

`cross_wire_bytes` is the part of `wire_bytes` that goes to other machines: nothing in the group `local`, all in
`cross`. In `world`, a ring of N ranks that visits machines of L ranks one after another has N/L of its N edges
between machines: 1/L of the bytes. Messages to single ranks count if the rank is on another machine; ranks are
numbered machine by machine.

`dense_wire_bytes` is the value of `wire_bytes` for a dense fp32 all-reduce of the same gradients. Compare
`wire_bytes` with it: payloads of different collectives are not comparable. docs/bytes.md has an example.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from typing_extensions import assert_never

from dgc.comm.requests import AllGather, AllReduce, AllToAll, Broadcast, Exchange, ReduceScatter, Request
from dgc.comm.transport import Transport
from dgc.units import against_dense, human_bytes

PHASES = ("compress", "launch", "wait", "decode", "step")
BYTES = ("payload_bytes", "wire_bytes", "cross_wire_bytes", "dense_wire_bytes", "dense_cross_wire_bytes")
TOTALS = (*BYTES, "rounds")


def all_reduce_wire_bytes(payload: int, size: int) -> float:
    return 2 * payload * (size - 1) / size


def all_gather_wire_bytes(payload: int, size: int) -> float:
    return payload * (size - 1)


def bytes_of(request: Request, rank: int, size: int, local_size: int = 1) -> tuple[int, float, float]:
    """Return the payload bytes, wire bytes and cross wire bytes of this rank for the request.

    rank, size: This rank in the group, and the size of the group. local_size: Ranks of each machine.
    """
    parts: dict[int, int] | None = None  # bytes for each other rank, if they differ
    if isinstance(request, Exchange):
        parts = {to: tensor.nbytes for to, tensor in request.sends.items() if to != rank}
        payload = sum(parts.values())
    else:
        payload = request.tensor.nbytes
    wire: float
    match request:
        case AllReduce():
            wire = all_reduce_wire_bytes(payload, size)
        case AllGather():
            wire = all_gather_wire_bytes(payload, size)
        case ReduceScatter():
            wire = payload * (size - 1) / size
        case Broadcast():
            wire = payload * (size - 1) / size
            payload = payload if request.root == rank else 0
        case AllToAll(tensor, splits):
            parts = {to: n * tensor.element_size() for to, n in enumerate(splits) if to != rank}
        case Exchange():
            pass
        case _:
            assert_never(request)
    if parts is not None:
        wire = sum(parts.values())
    if request.group == "cross":
        return payload, wire, wire
    if request.group == "local" or size <= local_size:
        return payload, wire, 0
    if parts is None:
        return payload, wire, wire / local_size
    return payload, wire, sum(n for to, n in parts.items() if to // local_size != rank // local_size)


class Trace:
    """A timeline of a rank's exchanges in Chrome's trace format, for ui.perfetto.dev or chrome://tracing.

    Each bucket has two rows. The first shows its phases. The second shows its messages, "in flight" from the
    launch until the replies are used. Times are host times: on a GPU the work itself may still be running. At most
    `limit` events are kept, which bounds the memory of a long run. `dropped` counts the rest.
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


@dataclass
class TrafficMeter:
    """Bytes and seconds of this rank since the start of the process.

    A run that resumes continues its totals with `load_state_dict`.

    Attributes:
        local_size: Number of ranks of each machine. 1: every rank counts as a machine.
        payload_bytes: Bytes that this rank contributed, with headers and padding.
        wire_bytes: Bytes that this rank sent.
        cross_wire_bytes: The part of them that went to other machines.
        dense: What would have sent `dense_wire_bytes`, in words.
        dense_wire_bytes: Bytes that it would have sent.
        dense_cross_wire_bytes: The part of them that would have gone to other machines.
        rounds: Number of rounds of requests.
        seconds: Host time per phase; on a GPU the work itself may still be running. "compress" computes a message,
            "launch" passes messages to the transport, "wait" is the time that step() or synchronize() waits for
            replies, "decode" follows the last reply, "step" is the step of the wrapped optimizer.
        trace: Records the phases as a timeline, if given.
    """

    local_size: int = 1
    dense: str = "a dense fp32 all-reduce"
    payload_bytes: int = 0
    wire_bytes: float = 0.0
    cross_wire_bytes: float = 0.0
    dense_wire_bytes: float = 0.0
    dense_cross_wire_bytes: float = 0.0
    rounds: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    trace: Trace | None = None
    _costs: dict[Any, tuple[int, float, float]] = field(default_factory=dict, repr=False, compare=False)

    def count(self, request: Request, transport: Transport) -> None:
        """Count the bytes that this rank sends for a request."""
        group = request.group
        if group == "world":
            rank, size = transport.rank, transport.size
        else:
            rank, size = transport.group_rank(group), transport.group_size(group)
        alike: Any = None  # messages of one size cost the same in every step
        if type(request) in (AllReduce, AllGather):
            tensor = request.tensor  # type: ignore[union-attr]
            alike = type(request), rank, size, group, tensor.numel(), tensor.dtype
        costs = self._costs.get(alike)
        if costs is None:
            costs = bytes_of(request, rank, size, self.local_size)
            if alike is not None:
                self._costs[alike] = costs
        self.payload_bytes += costs[0]
        self.wire_bytes += costs[1]
        self.cross_wire_bytes += costs[2]

    def count_dense(self, numel: int, size: int) -> None:
        """Count the dense equivalent of `numel` gradient elements, exchanged among `size` ranks."""
        dense = all_reduce_wire_bytes(4 * numel, size)
        self.dense_wire_bytes += dense
        self.dense_cross_wire_bytes += dense / self.local_size if size > self.local_size else 0

    @contextmanager
    def timing(self, phase: str, row: str) -> Iterator[None]:
        """Add the time of what runs inside."""
        start = perf_counter()
        yield
        self.add_time(phase, row, start, perf_counter())

    def add_time(self, phase: str, row: str, start: float, end: float) -> None:
        """Add the time of a phase. `row`: a bucket's name. `start`, `end`: time.perf_counter(), in seconds."""
        self.seconds[phase] += end - start
        if self.trace is not None:
            self.trace.add(phase, row, start, end)

    def summary(self) -> str:
        """Return the bytes that were sent, in one line: "sent 98.0 MB, 7.8 times fewer than ..."."""
        if not self.wire_bytes:
            return "sent nothing: there is no other rank, with FSDP2 no other machine, or no step was taken"
        text = f"sent {human_bytes(self.wire_bytes)}"
        if self.dense_wire_bytes:
            text += f", {against_dense(self.wire_bytes, self.dense_wire_bytes, self.dense)}"
        if self.dense_cross_wire_bytes and self.cross_wire_bytes != self.wire_bytes:
            text += f"; to other machines {human_bytes(self.cross_wire_bytes)}, "
            text += against_dense(self.cross_wire_bytes, self.dense_cross_wire_bytes, self.dense)
        return text

    def state_dict(self) -> dict[str, float]:
        """Return the totals, without the seconds."""
        return {name: getattr(self, name) for name in TOTALS}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from these totals.

        Raises:
            ValueError: The state is not from a meter.
        """
        if state.keys() != set(TOTALS):
            raise ValueError(f"not the state of a meter: it has {sorted(state)}, not {sorted(TOTALS)}")
        for name, value in state.items():
            setattr(self, name, value)
