"""The network as the transport sees it: times of collectives, and the `Network` that explains them best.

All-reduce of fp32 and fp16 and all-gather of bytes are timed from 1 kB to 16 MB, on each level: between the ranks
of a machine, and between machines with all ranks of a machine at once, as they share its network card. A time is
the time of the slowest rank, as the median over repeats.

The fit finds latency, bandwidth and the seconds to add a byte with the formulas of model.py: it minimizes the
squared logarithms of predicted / measured over all sizes. Time that a transport needs for each collective, such
as Horovod's cycle, is thus part of the latency.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch

from dgc.advisor.cost.computing import message_of
from dgc.advisor.cost.model import Network, RecordedMessage
from dgc.comm import AllGather, AllReduce, Request, Transport, all_gather_object, barrier
from dgc.comm.requests import Group

SIZES = tuple(4**k for k in range(5, 13))  # bytes: 1 kB to 16 MB
LONGEST = 1.0  # seconds of one collective after which no larger ones are measured
START = (5e-5, 1e-9, 1e-10, 3e-10)  # of the fit: latency in s, s per byte sent, s per byte added: fp32, fp16
RANGE = 10.0  # natural logarithm of the factor by which the fit may leave START


@dataclass(frozen=True)
class Sample:
    """A collective and its measured seconds."""

    message: RecordedMessage
    seconds: float


def levels(transport: Transport) -> list[Group]:
    """The groups to measure, inside a machine first.

    Raises:
        ValueError: Machines have different numbers of ranks.
    """
    local_sizes = all_gather_object(transport, transport.local_size, "advise.local_sizes")
    if len(set(local_sizes)) > 1:
        raise ValueError(f"the advisor needs as many ranks on each machine, not {sorted(set(local_sizes))}")
    local = transport.local_size
    return ["local", "cross"] if 1 < local < transport.size else ["world"]


def requests_of(nbytes: int, group: Group, device: torch.device) -> list[Request]:
    """The collectives of one size."""
    single = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    half = torch.ones(nbytes // 2, dtype=torch.float16, device=device)
    gathered = torch.ones(nbytes, dtype=torch.uint8, device=device)
    return [AllReduce(single, "mean", group), AllReduce(half, "mean", group), AllGather(gathered, group)]


def time_collectives(
    transport: Transport, group: Group, device: torch.device, repeats: int, sizes: Sequence[int] = SIZES
) -> list[Sample]:
    """Times the collectives of all sizes in one kind of group. Collective."""
    found = []
    for nbytes in sizes:
        slowest = 0.0
        for number in range(3):
            times = []
            for _ in range(1 + repeats):  # the first one is a warm-up
                request = requests_of(nbytes, group, device)[number]
                name = f"advise.{group}.{number}.{nbytes}"
                barrier(transport, f"{name}.start")
                start = perf_counter()
                transport.wait(transport.launch(name, (request,)))
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times.append(perf_counter() - start)
            everyone = all_gather_object(transport, times[1:], f"{name}.times")
            seconds = median(max(repeat) for repeat in zip(*everyone, strict=True))
            found.append(Sample(message_of(request, transport), seconds))
            slowest = max(slowest, seconds)
        if slowest > LONGEST:
            break
    return found


def fit_network(samples: Sequence[Sample], local_size: int) -> Network:
    """The network that explains the samples of one level best. It has the same numbers on both levels.

    Args:
        samples: Times of collectives.
        local_size: Ranks of each machine.

    Raises:
        ValueError: SciPy is not installed.
    """
    try:
        from scipy.optimize import least_squares  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError("the fit of the network needs SciPy: pip install scipy") from None

    def network_of(logarithms: Any) -> Network:
        latency, per_byte, add, add_half = (math.exp(x) for x in logarithms)
        return Network(
            latency,
            1 / per_byte,
            local_size,
            inner_latency=latency,
            inner_bandwidth=1 / per_byte,
            reduction=add,
            half_reduction=add_half,
        )

    def residuals(logarithms: Any) -> list[float]:
        network = network_of(logarithms)
        return [math.log(of.message.seconds(network, local_size) / of.seconds) for of in samples]

    start = [math.log(number) for number in START]
    bounds = [x - RANGE for x in start], [x + RANGE for x in start]
    return network_of(least_squares(residuals, start, bounds=bounds).x)


def misfit(samples: Sequence[Sample], network: Network) -> float:
    """The median factor between predicted and measured times, at least 1."""
    factors = [of.message.seconds(network, network.ranks_per_machine) / of.seconds for of in samples]
    return median(max(factor, 1 / factor) for factor in factors)


def measure_network(
    transport: Transport, device: torch.device, repeats: int, sizes: Sequence[int] = SIZES
) -> tuple[Network, float]:
    """The network, and the median factor between its times and the measured ones. Collective.

    With all ranks on one machine, its memory is the network between them.

    Raises:
        ValueError: Machines have different numbers of ranks.
    """
    fits, factors = [], []
    for group in levels(transport):
        samples = time_collectives(transport, group, device, repeats, sizes)
        fits.append(fit_network(samples, transport.local_size))
        factors.append(misfit(samples, fits[-1]))
    inside, across = fits[0], fits[-1]
    network = replace(across, inner_latency=inside.inner_latency, inner_bandwidth=inside.inner_bandwidth)
    return network, max(factors)
