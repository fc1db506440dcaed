"""RedSync's threshold search by bisection (Fang, Fu, Yang, Hsieh 2019, J. Parallel Distrib. Comput. 133,
doi 10.1016/j.jpdc.2019.05.016).

    l = 0, r = 1;  until r - l < 0.001:
        q = (l + r) / 2;  t = mean|v| + q (max|v| - mean|v|);  c = #{|v| >= t}
        k <= c <= 2 k:  done;    c < k:  r = q;    c > 2 k:  l = q

The search takes one pass for mean and maximum and at most 10 counts. A single outlier widens the bracket, and then
the last step may be too coarse.

Differences from the paper: For k/2 <= c < k the paper moves l up, away from the threshold it searches for, and it
never accepts such a count. This code moves r. Candidates beyond k are cut by magnitude. If fewer than k elements
reach the mean, which is the lower end of the bracket, all elements are candidates.
"""

from dataclasses import dataclass

from dgc.arguments import checked
from dgc.selection.estimators.estimator import Counts, Estimator, Ranges, Thresholds, narrow


@checked
@dataclass(frozen=True)
class Bisection(Estimator):
    """RedSync's threshold search by bisection (Fang et al. 2019, doi 10.1016/j.jpdc.2019.05.016).

    Args:
        lower (float): smallest accepted count, as a multiple of k. In (0, 1].
        upper (float): largest accepted count, as a multiple of k. At least 1.
        passes (int): largest number of counts. With 10 the search ends at r - l < 0.001, as in the paper.

    Raises:
        ValueError: if an argument is out of range.
    """

    lower: float = 1.0
    upper: float = 2.0
    passes: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.lower <= 1 <= self.upper:
            raise ValueError(f"0 < lower <= 1 <= upper is needed, not {self.lower} and {self.upper}")
        if self.passes < 1:
            raise ValueError(f"passes must be at least 1, not {self.passes}")

    def estimate(self, segments: Ranges) -> tuple[Thresholds, Counts]:
        low = segments.threshold(segments.mean)
        start = low + (segments.largest - low) / 2
        return narrow(segments, start, low, self.lower, self.upper, self.passes, lambda bracket: bracket.middle)
