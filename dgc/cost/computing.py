"""Seconds of computing for any number of ranks, from measured exchanges."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from dgc.cost.model import Compute, Traffic

REDUCED = {"AllReduce", "ReduceScatter", "Broadcast"}  # their replies do not grow with the number of ranks


def fit_computing(traffics: Sequence[Traffic]) -> Compute:
    """Median time of encoding, and a line through the times of decoding; it neither falls nor begins below 0.

    It is flat for a method that only reduces: what a rank decodes is as large for any number of ranks.

    Args:
        traffics: Recorded exchanges of at least two numbers of ranks.

    Raises:
        ValueError: All exchanges whose last replies were decoded have the same number of ranks.
    """
    points = [(traffic.size, traffic.decode) for traffic in traffics if traffic.decode is not None]
    if len({size for size, _ in points}) < 2:
        raise ValueError("a line through the times of decoding needs exchanges of two or more numbers of ranks")
    x, y = (sum(point[i] for point in points) / len(points) for i in range(2))
    spread = sum((size - x) ** 2 for size, _ in points)
    slope = sum((size - x) * (seconds - y) for size, seconds in points) / spread
    slope = min(max(0.0, slope), y / x)
    kinds = {message.kind for traffic in traffics for bucket in traffic.buckets for message in bucket}
    if kinds and kinds <= REDUCED:
        slope = 0.0
    return Compute(median(traffic.encode for traffic in traffics), y - slope * x, slope)


def typical(traffics: Sequence[Traffic]) -> Traffic:
    """The last of several exchanges of the same compressors, with the median seconds of all.

    Args:
        traffics: Exchanges whose last replies were decoded.

    Raises:
        ValueError: The replies of one were not decoded.
    """
    decode = [traffic.decode for traffic in traffics if traffic.decode is not None]
    if len(decode) < len(traffics):
        raise ValueError(f"{len(traffics) - len(decode)} of {len(traffics)} exchanges were not decoded")
    encode = median(traffic.encode for traffic in traffics)
    return replace(traffics[-1], encode=encode, decode=median(decode))
