"""A cost model of an exchange: bytes and seconds per rank, for any compressor and up to thousands of ranks.

`record` lists the requests of one rank (recording.py). `predict` gives each a time, with N ranks in the group,
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
The bytes of one rank are those of the meter: `cross_wire_bytes` leave the machine, the rest stay inside it. The
ranks of a machine share its network card, so the slowest of three resources counts: the card (bytes of all ranks
between machines), the link of one rank inside the machine, and the memory of the machine (bytes of all its ranks).

Differences from the paper: The number of steps of all-gather and reduce-scatter is that of powers of two.
Requests of a round, and the rounds of all buckets, follow each other on one network.
"""

from dataclasses import dataclass
from math import ceil, inf, isfinite, log2


@dataclass(frozen=True)
class Network:
    """Latency and bandwidth between the ranks.

    Args:
        latency: Seconds per message between machines.
        bandwidth: Bytes per second that a machine sends to others. All its ranks share it.
        ranks_per_machine: Ranks of each machine.
        inner_latency: Seconds per message inside a machine.
        inner_bandwidth: Bytes per second that one rank sends inside its machine.
        machine_bandwidth: Bytes per second that all ranks of a machine send inside it together.
        reduction: Seconds to add one byte of an all-reduce or reduce-scatter.
        half_reduction: The same for 16-bit floating-point numbers, which MPI libraries add in software.
        cores: Cores of a machine. With more ranks than cores, computing takes as many times as long.

    Raises:
        ValueError: A number is not in its range.

    Example:
        >>> from dgc.cost import Network
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
        """Ranks on one machine, of `size` ranks.

        Raises:
            ValueError: The machines would have different numbers of ranks.
        """
        local = min(size, self.ranks_per_machine)
        if size < 1 or size % local:
            raise ValueError(f"{size} ranks do not fill machines of {local}: take a multiple of {local}")
        return local

    def slowdown(self, size: int) -> float:
        """Factor of compute time if the ranks of a machine share its cores."""
        return 1.0 if self.cores is None else max(1.0, self.local_size(size) / self.cores)


@dataclass(frozen=True)
class Message:
    """One request of a rank.

    Attributes:
        kind: Class name of the request.
        size: Ranks of its group.
        inner: Those of them on one machine.
        payload: Bytes that the rank contributes.
        wire: Bytes that it sends.
        cross: Those of them that leave the machine.
        half: Whether 16-bit floating-point numbers are added.
        peers: Other ranks that it sends a message of its own.
        awaited: Bytes of an exchange that it waits for; without a message of its own, those of another rank.
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

    def seconds(self, network: Network, local_size: int) -> float:
        """Time of the request alone on the network."""
        if self.size == 1:
            return 0.0
        inside = _steps(self.inner)
        steps = inside, _steps(self.size) - inside
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
                tree = latency + self._transfer(network, local_size, sum(steps) * self.payload)
                turns = (self.inner - 1) * network.inner_latency + (self.size - self.inner) * network.latency
                shared = 2 * self.payload * (self.size - 1) / self.size
                return min(tree, latency + turns + self._transfer(network, local_size, shared))
            case _:
                peers = max(self.peers, 1)
                near = peers * (self.inner - 1) / (self.size - 1)
                turns = near * network.inner_latency + (peers - near) * network.latency
                return turns + max(moved, self._transfer(network, local_size, self.awaited))

    def _transfer(self, network: Network, local_size: int, nbytes: float) -> float:
        """Seconds in which every rank of a machine sends `nbytes`, in the same parts as `wire`."""
        away = self.cross / self.wire if self.wire else float(self.size > self.inner)
        cross, inner = nbytes * away, nbytes * (1 - away)
        shared = local_size * inner / network.machine_bandwidth
        return max(local_size * cross / network.bandwidth, inner / network.inner_bandwidth, shared)


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in one exchange, and how long it computes.

    Attributes:
        size: Number of ranks.
        local_size: Ranks of each machine.
        buckets: By bucket, its messages in their order.
        encode: Seconds until the first messages of all buckets were ready.
        decode: Seconds of all later computing, None if the last replies were too many to decode.
    """

    size: int
    local_size: int
    buckets: tuple[tuple[Message, ...], ...]
    encode: float
    decode: float | None

    def total(self, column: str) -> float:
        """The sum over all messages of `payload`, `wire` or `cross`."""
        return sum(getattr(message, column) for bucket in self.buckets for message in bucket)


@dataclass(frozen=True)
class Compute:
    """Seconds that one rank computes in one exchange: encode + decode + per_rank N."""

    encode: float = 0.0
    decode: float = 0.0
    per_rank: float = 0.0

    def seconds(self, size: int) -> float:
        return self.encode + self.decode + self.per_rank * size


@dataclass(frozen=True)
class Prediction:
    """Bytes and seconds of one rank in one exchange, and the part of the bytes that leaves its machine."""

    payload_bytes: float
    wire_bytes: float
    cross_wire_bytes: float
    communication: float
    compute: float
    buckets: int

    @property
    def exchange(self) -> float:
        """Seconds of an exchange without overlap."""
        return self.communication + self.compute

    def step(self, backward: float, overlap: bool = True) -> float:
        """Seconds of forward and backward, and the exchange. All buckets but the last overlap with `backward`."""
        hidden = backward * (1 - 1 / self.buckets) if overlap and self.buckets else 0.0
        return backward + self.compute + max(self.communication - hidden, 0.0)


def predict(traffic: Traffic, network: Network, compute: Compute) -> Prediction:
    """Predict bytes and seconds of an exchange.

    Raises:
        ValueError: The traffic was recorded for other machines than the network has.
    """
    local = network.local_size(traffic.size)
    if local != traffic.local_size:
        raise ValueError(f"the traffic is of {traffic.local_size} ranks per machine, the network has {local}")
    seconds = sum(message.seconds(network, local) for bucket in traffic.buckets for message in bucket)
    payload, wire, cross = (traffic.total(column) for column in ("payload", "wire", "cross"))
    computing = compute.seconds(traffic.size) * network.slowdown(traffic.size)
    return Prediction(payload, wire, cross, seconds, computing, len(traffic.buckets))


def _steps(size: int) -> int:
    return ceil(log2(size))
