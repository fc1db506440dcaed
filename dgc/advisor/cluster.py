"""The ranks and their network, measured or on paper, and the load of this machine."""

import os
from argparse import Namespace
from dataclasses import dataclass

from dgc.advisor.cost.computing import AlikeRanks
from dgc.advisor.cost.model import Network
from dgc.comm import Transport
from dgc.units import RATES, TIMES, human_rate, plural, quantity

LATENCY, INNER_RATE = "50us", "80gbit"  # on paper; the second is 10 GB/s, about the rate of shared memory
VALID_LATENCY, VALID_RATE = ("0s", "100s"), ("1kbit", "1000tbit")
BUSY = 0.5  # load average per core above which other programs delay the measurements


@dataclass(frozen=True)
class Cluster:
    """The ranks and their network.

    Attributes:
        transport: Connects the ranks; `AlikeRanks` on paper.
        network: Its latencies and bandwidths.
        misfit: Median factor between the network's times and the measured ones. None on paper.
        inside: On paper, where the rate inside a machine is from.
    """

    transport: Transport
    network: Network
    misfit: float | None = None
    inside: str = ""

    @property
    def on_paper(self) -> bool:
        return self.misfit is None

    @property
    def prints(self) -> bool:
        """Whether this process prints the result."""
        return self.on_paper or self.transport.rank == 0


def cluster_on_paper(args: Namespace) -> Cluster:
    """The cluster that the options describe. A single machine has only the rate inside it."""
    local_size = args.ranks_per_host or 1
    latency = quantity(args.latency or LATENCY, TIMES, "--latency", VALID_LATENCY)
    inner = quantity(args.inner_rate or INNER_RATE, RATES, "--inner-rate", VALID_RATE)
    rate = inner if args.hosts == 1 else quantity(args.rate, RATES, "--rate", VALID_RATE)
    network = Network(latency, rate / 8, local_size, inner_bandwidth=inner / 8)
    inside = "as given" if args.inner_rate else "assumed (--inner-rate)"
    return Cluster(AlikeRanks(args.hosts * local_size, local_size), network, inside=inside)


def describe(cluster: Cluster) -> str:
    """The network in one line."""
    network, local = cluster.network, cluster.transport.local_size
    alone = local == cluster.transport.size
    machines = f"{plural(cluster.transport.size // local, 'machine')} of {plural(local, 'rank')}"
    rate, delay = human_rate(network.bandwidth, 3), f"{1e6 * network.latency:.3g} us"
    if cluster.misfit is not None:
        where = "between its ranks" if alone else "between machines"
        within = f"fitted to times of collectives within {cluster.misfit:.2f}x"
        return f"{machines}: {rate} and {delay} {where}, {within}"
    across = [] if alone else [f"{rate} and {delay} between machines, as given"]
    inner = f"{human_rate(network.inner_bandwidth, 3)} between the ranks of a machine, {cluster.inside}"
    return f"{machines}: {'; '.join([*across, *([inner] if local > 1 else [])])}"


def load_average() -> float:
    """Of the last minute: the mean number of programs that ran or waited for a core."""
    return os.getloadavg()[0]


def describe_load(load: float) -> list[str]:
    """The first line of the result if other programs ran on this machine.

    Args:
        load: The load average from before the measurements.
    """
    cores = len(os.sched_getaffinity(0))  # the share of a container or batch job
    if load <= BUSY * cores:
        return []
    words = "other programs ran in the last minute. If they still do, computing is measured too long: repeat it"
    return [f"UNRELIABLE: load average {load:.1f} on {plural(cores, 'core')}: {words}"]
