"""Seconds of computing for any number of ranks, from measured exchanges."""

from collections.abc import Sequence
from statistics import median

from dgc.cost.model import Compute, Traffic


def fit_computing(traffics: Sequence[Traffic]) -> Compute:
    """Median time of encoding, and a line through the times of decoding; it neither falls nor begins below 0.

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
    return Compute(median(traffic.encode for traffic in traffics), y - slope * x, slope)
