"""A cost model of an exchange: bytes and seconds per rank, for any compressor and up to thousands of ranks.

`record_steps` lists the requests of one rank (computing.py). `predict` gives each a time, with N ranks in a group,
b payload bytes, latency a (seconds per message) and bandwidth B (bytes per second):

    all-reduce      min(l (a + b/B), 2 l a + 2 b (N-1)/(N B)) + b (N-1)/N r        recursive doubling, Rabenseifner
    all-gather      l a + b (N-1)/B                                                recursive doubling
    reduce-scatter  l a + b (N-1)/(N B) + b (N-1)/N r                              recursive halving
    broadcast       min(l (a + b/B), (l + N-1) a + 2 b (N-1)/(N B))                binomial tree, van de Geijn
    all-to-all      (N-1) a + (bytes for other ranks)/B                            pairwise
    exchange        a per message + (bytes for other ranks)/B

l is log2 N, rounded up, and r the seconds to add one byte. (Thakur, Rabenseifner, Gropp 2005: Optimization of
Collective Communication Operations in MPICH, sections 4 and 5.)

Two levels: a group that spans machines has log2 of its ranks per machine, rounded up, of its l steps inside them.
The bytes of one rank are counted as by the meter: `cross_wire_bytes` leave the machine, the rest stay inside it.
The slowest of three resources counts: the network card of the machine (bytes of all its ranks; they may differ),
the link of one rank inside the machine, and the memory of the machine (bytes of all its ranks).

Differences from the paper: The number of steps of all-gather and reduce-scatter is the number for powers of two.
Requests of a round, and the rounds of all buckets, follow each other on one network.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from math import ceil, inf, isfinite, log2


@dataclass(frozen=True)
class Network:
    """Latency and bandwidth of a cluster's network, on one or two levels.

    Args:
        latency: Seconds per message between machines.
        bandwidth: Bytes per second that a machine sends to others. All its ranks share it.
        ranks_per_machine: Ranks of each machine.
        inner_latency: Seconds per message inside a machine.
        inner_bandwidth, machine_bandwidth: Bytes per second that one rank, and all ranks, send inside a machine.
        reduction: Seconds to add one byte of an all-reduce or reduce-scatter.
        half_reduction: The same for 16-bit floating-point numbers, which MPI libraries add in software.
        cores: Cores of a machine. With more ranks than cores, computing takes as many times as long.

    Raises:
        ValueError: A number is not in its range.

    Example:
        >>> from dgc.advisor.cost import Network
        >>> network = Network(latency=30e-6, bandwidth=1.25e9, ranks_per_machine=8)  # 10 Gbit/s Ethernet
    """

    latency: float
    bandwidth: float
    ranks_per_machine: int = 1
    inner_latency: float = 2e-6
    inner_bandwidth: float = 10e9
    machine_bandwidth: float = inf
    reduction: float = 0.0
    half_reduction: float = 0.0
    cores: int | None = None

    def __post_init__(self) -> None:
        for name in ("bandwidth", "inner_bandwidth", "machine_bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Network: {name} must be above 0 bytes per second, not {getattr(self, name)}")
        for name in ("latency", "inner_latency", "reduction", "half_reduction"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"Network: {name} must be 0 or more, in seconds, not {getattr(self, name)}")
        for name, number in (("ranks_per_machine", self.ranks_per_machine), ("cores", self.cores)):
            if number is not None and number < 1:
                raise ValueError(f"Network: {name} must be at least 1, not {number}")

    def local_size(self, size: int) -> int:
        """Ranks on one machine, of `size`. Raises ValueError if machines would have different numbers of ranks."""
        local = min(size, self.ranks_per_machine)
        if size < 1 or size % local:
            raise ValueError(f"{size} ranks do not fill machines of {local}: take a multiple of {local}")
        return local

    def slowdown(self, size: int) -> float:
        """Factor of compute time if the ranks of a machine share its cores."""
        return 1.0 if self.cores is None else max(1.0, self.local_size(size) / self.cores)


@dataclass(frozen=True)
class RecordedMessage:
    """One request of a rank.

    Attributes:
        kind: Class name of the request.
        size: Ranks of its group.
        inner: The ranks of the group on one machine.
        payload: Bytes that the rank contributes.
        wire: Bytes that it sends.
        cross: The part of `wire` bytes that leave the machine.
        half: Whether 16-bit floating-point numbers are added.
        peers: Other ranks that it sends a message of its own.
        awaited: Bytes that it waits for in a broadcast, an all-to-all or an exchange.
        machine: Bytes that all ranks of the machine send to others. None: each sends as many as this one.
    """

    kind: str
    size: int
    inner: int
    payload: int
    wire: float
    cross: float
    half: bool
    peers: int
    awaited: int = 0
    machine: float | None = None

    def leaving(self, local_size: int) -> float:
        """Bytes that all ranks of its machine send to others."""
        return local_size * self.cross if self.machine is None else self.machine

    def seconds(self, network: Network, local_size: int) -> float:
        """Time of the request alone on the network."""
        if self.size == 1:
            return 0.0
        inside = ceil(log2(self.inner))
        steps = inside, ceil(log2(self.size)) - inside
        latency = steps[0] * network.inner_latency + steps[1] * network.latency
        moved = self._transfer(network, local_size, self.wire)
        added = self.payload * (self.size - 1) / self.size
        added *= network.half_reduction if self.half else network.reduction
        match self.kind:
            case "AllReduce":
                doubling = latency + self._transfer(network, local_size, sum(steps) * self.payload)
                return min(doubling, 2 * latency + moved) + added
            case "AllGather":
                return latency + moved
            case "ReduceScatter":
                return latency + moved + added
            case "Broadcast":
                whole = max(self.payload, self.awaited)  # only the root contributes
                tree = latency + self._transfer(network, local_size, sum(steps) * whole)
                turns = (self.inner - 1) * network.inner_latency + (self.size - self.inner) * network.latency
                shared = 2 * whole * (self.size - 1) / self.size
                return min(tree, latency + turns + self._transfer(network, local_size, shared))
            case _:
                peers = max(self.peers, 1)
                near = peers * (self.inner - 1) / (self.size - 1)
                turns = near * network.inner_latency + (peers - near) * network.latency
                return turns + max(moved, self._transfer(network, local_size, self.awaited))

    def _transfer(self, network: Network, local_size: int, nbytes: float) -> float:
        """Seconds in which this rank sends `nbytes`, and the others in proportion, to the same ranks as `wire`."""
        away = self.cross / self.wire if self.wire else float(self.size > self.inner)
        card = nbytes * (self.leaving(local_size) / self.wire if self.wire else local_size * away)
        inner = nbytes * (1 - away)
        shared = local_size * inner / network.machine_bandwidth
        return max(card / network.bandwidth, inner / network.inner_bandwidth, shared)


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in one exchange, and how long it computes.

    Attributes:
        size: Number of ranks.
        local_size: Ranks of each machine.
        buckets: By bucket, its messages in their order.
        encode: Seconds until the first messages of all buckets were ready.
        decode: Seconds of all later computing, None if the last replies were too many to decode.
        elements: Number of gradient elements of each bucket. Empty: the same number in all.
    """

    size: int
    local_size: int
    buckets: tuple[tuple[RecordedMessage, ...], ...]
    encode: float
    decode: float | None
    elements: tuple[int, ...] = ()

    @property
    def shares(self) -> tuple[float, ...]:
        elements = self.elements or (1,) * len(self.buckets)
        return tuple(n / max(sum(elements), 1) for n in elements)

    def total(self, column: str) -> float:
        """The sum over all messages of `payload`, `wire` or `cross`."""
        return sum(getattr(message, column) for bucket in self.buckets for message in bucket)

    @property
    def machine_bytes(self) -> float:
        return sum(message.leaving(self.local_size) for bucket in self.buckets for message in bucket)


@dataclass(frozen=True)
class Compute:
    """Seconds that one rank computes in one exchange: encode + decode + per_rank N."""

    encode: float = 0.0
    decode: float = 0.0
    per_rank: float = 0.0

    def seconds(self, size: int) -> float:
        return self.encode + self.decode + self.per_rank * size


@dataclass(frozen=True)
class BucketWork:
    """The exchange of one bucket.

    Attributes:
        ready: Share of backward, 0 to 1, after which the gradients are complete.
        computing: Seconds before the first message, between messages, and after the last one.
        messages: Seconds of each message on the network, one less than `computing`.
    """

    ready: float
    computing: tuple[float, ...]
    messages: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.computing) != len(self.messages) + 1:
            raise ValueError(
                f"BucketWork: {len(self.messages)} messages need {len(self.messages) + 1} times of computing "
                f"around them, not {len(self.computing)}"
            )
        if not 0 <= self.ready <= 1:
            raise ValueError(f"BucketWork: ready must be a share of backward from 0 to 1, not {self.ready}")


@dataclass(frozen=True)
class Prediction:
    """Bytes and seconds of a rank in an exchange. machine_wire_bytes: from all ranks of its machine to others."""

    payload_bytes: float
    wire_bytes: float
    cross_wire_bytes: float
    communication: float
    compute: float
    buckets: tuple[BucketWork, ...] = ()
    machine_wire_bytes: float = 0.0

    @property
    def exchange(self) -> float:
        """Seconds without overlap."""
        return self.communication + self.compute

    def step(self, backward: float, overlap: bool = True, forward: float = 0.0) -> float:
        """Seconds of forward, backward and the exchange.

        overlap: whether a bucket's exchange begins in backward, as soon as its gradients are complete.
        """
        if not overlap:
            return forward + backward + self.exchange
        return forward + overlapped(backward, self.buckets)


def predict(
    traffic: Traffic, network: Network, compute: Compute, ready: Sequence[float] | None = None
) -> Prediction:
    """Predict bytes and seconds of an exchange.

    Each bucket has the share of its elements in the computing; what follows the first message is divided equally
    between the times after each message. ready: of each BucketWork. None: the share of elements up to it.

    Raises:
        ValueError: The traffic was recorded for other machines than the network has, or `ready` does not have a
            share for each bucket.
    """
    local = network.local_size(traffic.size)
    if local != traffic.local_size:
        raise ValueError(f"the traffic is of {traffic.local_size} ranks per machine, the network has {local}")
    if ready is None:
        ready = [min(share, 1.0) for share in accumulate(traffic.shares)]
    if len(ready) != len(traffic.buckets):
        raise ValueError(f"ready must have a share of backward for each of {len(traffic.buckets)} buckets")
    slowdown, later = network.slowdown(traffic.size), compute.seconds(traffic.size) - compute.encode
    work = []
    for at, share, messages in zip(ready, traffic.shares, traffic.buckets, strict=True):
        seconds = tuple(message.seconds(network, local) for message in messages)
        rest = slowdown * share * later
        first = slowdown * share * compute.encode + (0.0 if messages else rest)
        work.append(BucketWork(at, (first, *(rest / len(messages) for _ in messages)), seconds))
    payload, wire, cross = (traffic.total(column) for column in ("payload", "wire", "cross"))
    communication = sum(sum(bucket.messages) for bucket in work)
    computing = compute.seconds(traffic.size) * slowdown
    return Prediction(payload, wire, cross, communication, computing, tuple(work), traffic.machine_bytes)


def overlapped(backward: float, buckets: Sequence[BucketWork]) -> float:
    """Seconds from the start of backward until it and the exchange of all buckets have ended.

    This is simulated with one network and one processor, which one bucket at a time has. The network sends
    messages in the order in which they were handed over. On the processor the work of an exchange comes first, in
    the order in which it became possible. Backward continues in the time between.

    Differences from dgc/engine/loop.py: There, replies are used when the next hook of backward runs, and messages
    after the third round of a conversation wait for the end of backward. On a GPU, encoding may overlap with
    backward. The network needs no processor here; MPI and Gloo use one.
    """
    waiting = sorted(range(len(buckets)), key=lambda b: buckets[b].ready)  # for their gradients
    possible: list[tuple[float, int, int]] = []  # (time, bucket, number) of computing that can begin then
    clock = progress = network_free = 0.0
    while waiting or possible or progress < backward:
        if possible and possible[0][0] <= clock:
            _, b, number = heappop(possible)
            clock += buckets[b].computing[number]
            if number < len(buckets[b].messages):
                network_free = max(clock, network_free) + buckets[b].messages[number]
                heappush(possible, (network_free, b, number + 1))
            continue
        if waiting and buckets[waiting[0]].ready * backward <= progress:
            heappush(possible, (clock, waiting.pop(0), 0))
            continue
        target = buckets[waiting[0]].ready * backward if waiting else backward
        reply = possible[0][0] if possible else inf
        if progress >= target:  # backward has ended
            clock = reply
        elif clock + (target - progress) <= reply:
            clock, progress = clock + (target - progress), target
        else:
            clock, progress = reply, progress + (reply - clock)
    return clock
