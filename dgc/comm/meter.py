"""Bytes and seconds, counted in one place: where a conversation's requests are launched.

`payload_bytes` is what this rank contributes, headers and padding included. `wire_bytes` is what this rank
sends to carry it, by the usual bandwidth-optimal algorithm with N ranks and b payload bytes:

    all-reduce (ring)        2 b (N-1)/N
    all-gather (ring)        b (N-1)
    reduce-scatter (ring)    b (N-1)/N
    all-to-all (pairwise)    what goes to other ranks
    broadcast (pipeline)     b from every rank but the last: b (N-1)/N on average
    exchange                 what goes to other ranks

`dense_wire_bytes` is what `wire_bytes` would be if the same gradients travelled by dense all-reduce in fp32. It is
what `wire_bytes` is compared with: payloads of different collectives do not compare. docs/bytes.md has an example.
"""

from dataclasses import dataclass, field

from torch import Tensor

from dgc.comm.requests import AllGather, AllReduce, AllToAll, Broadcast, Exchange, ReduceScatter, Request
from dgc.comm.trace import Trace

PHASES = ("compress", "launch", "wait", "decode", "step")


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def payload_bytes(request: Request, rank: int) -> int:
    """Bytes that this rank (its number within the group) contributes to the request."""
    if isinstance(request, Exchange):
        return sum(nbytes(t) for to, t in request.sends.items() if to != rank)
    if isinstance(request, Broadcast):
        return nbytes(request.tensor) if request.root == rank else 0
    return nbytes(request.tensor)


def all_reduce_wire_bytes(payload: int, size: int) -> float:
    return 2 * payload * (size - 1) / size


def all_gather_wire_bytes(payload: int, size: int) -> float:
    return payload * (size - 1)


def wire_bytes(request: Request, rank: int, size: int) -> float:
    """Bytes that this rank sends for the request, in a group of `size` ranks."""
    match request:
        case AllReduce(tensor):
            return all_reduce_wire_bytes(nbytes(tensor), size)
        case AllGather(tensor):
            return all_gather_wire_bytes(nbytes(tensor), size)
        case ReduceScatter(tensor) | Broadcast(tensor):
            return nbytes(tensor) * (size - 1) / size
        case AllToAll(tensor, splits):
            return (sum(splits) - splits[rank]) * tensor.element_size()
        case Exchange():
            return payload_bytes(request, rank)


@dataclass
class Meter:
    """Totals since the start, for this rank.

    `seconds` is time of the host: on a GPU the work itself may still be running. "compress" is work that ends in
    a message, "launch" handing messages to the transport, "wait" what step() or synchronize() waits for replies,
    "decode" the work after the last reply, "step" the optimizer's own. `trace`: who draws all that, if anyone.
    """

    payload_bytes: int = 0
    wire_bytes: float = 0.0
    dense_wire_bytes: float = 0.0
    rounds: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    trace: Trace | None = None

    def count(self, request: Request, rank: int, size: int) -> None:
        self.payload_bytes += payload_bytes(request, rank)
        self.wire_bytes += wire_bytes(request, rank, size)

    def count_dense(self, numel: int, size: int) -> None:
        """`numel` gradients were exchanged, by whatever method, among `size` ranks."""
        self.dense_wire_bytes += all_reduce_wire_bytes(4 * numel, size)

    def spent(self, phase: str, on: str, start: float, end: float) -> None:
        """Seconds of time.perf_counter() between which this phase of `on` (a bucket) lasted."""
        self.seconds[phase] += end - start
        if self.trace is not None:
            self.trace.add(phase, on, start, end)

    def in_flight(self, on: str, launched: float, taken_up: float) -> None:
        """A message travelled or lay ready between these two readings of time.perf_counter()."""
        if self.trace is not None:
            self.trace.add("in flight", on, launched, taken_up, network=True)
