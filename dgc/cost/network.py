"""The network of a cluster, on one or two levels, by a few numbers."""

from dataclasses import dataclass
from math import inf, isfinite


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
