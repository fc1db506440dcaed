"""RedSync's threshold search by bisection (Fang, Fu, Yang, Hsieh 2019, J. Parallel Distrib. Comput. 133,
doi 10.1016/j.jpdc.2019.05.016).

    l = 0, r = 1;  until r - l < 0.001:
        q = (l + r) / 2;  t = mean|v| + q (max|v| - mean|v|);  c = #{|v| >= t}
        k <= c <= 2 k:  done;    c < k:  r = q;    c > 2 k:  l = q

One pass for mean and maximum and at most 10 counts. One outlier widens the bracket, so that the last step may be
too coarse.

Differences from the paper: with k/2 <= c < k it moves l up, away from what is sought, and such a count is never
accepted; here it moves r. What the search leaves beyond k is cut by magnitude. Where more than k elements lie
below the mean, which the bracket does not reach, all elements are candidates.
"""

from dataclasses import dataclass

from dgc.selection.threshold import Counts, Estimator, Ranges, Thresholds, narrow


@dataclass(frozen=True)
class Bisection(Estimator):
    """lower, upper: counts that are accepted, by k. passes: counts at most; 10 end at r - l < 0.001."""

    lower: float = 1.0
    upper: float = 2.0
    passes: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.lower <= 1 <= self.upper:
            raise ValueError(f"0 < lower <= 1 <= upper is needed, not {self.lower} and {self.upper}")
        if self.passes < 1:
            raise ValueError(f"passes must be at least 1, not {self.passes}")

    def estimate(self, ranges: Ranges) -> tuple[Thresholds, Counts]:
        low = ranges.threshold(ranges.mean)
        start = low + (ranges.largest - low) / 2
        return narrow(ranges, start, low, self.lower, self.upper, self.passes, lambda bracket: bracket.middle)
