"""RedSync's trimmed top-k (Fang, Fu, Yang, Hsieh 2019, J. Parallel Distrib. Comput. 133,
doi 10.1016/j.jpdc.2019.05.016).

    r = 0.8;  t = mean|v| + r (max|v| - mean|v|)
    while #{|v| >= t} < k:  r = r - 0.2
    send the k largest of {|v| >= t}

The search takes one pass for mean and maximum, one to five counts, and an exact top-k of the candidates. It always
returns k elements. Heavy tails leave many candidates, and then the last step costs as much as an exact top-k of
all.

Differences from the paper: If fewer than k elements reach the mean, all elements are candidates.
"""

from dataclasses import dataclass

import torch

from dgc.arguments import checked
from dgc.selection.estimators.estimator import Counts, Estimator, Ranges, Thresholds


@checked
@dataclass(frozen=True)
class Trimmed(Estimator):
    """RedSync's trimmed top-k (Fang et al. 2019, doi 10.1016/j.jpdc.2019.05.016).

    Args:
        step (float): decrement of r, which starts at 1, in each round. From 0.01 to 1; 0.2 in the paper.

    Raises:
        ValueError: if step is out of range.
    """

    step: float = 0.2

    def __post_init__(self) -> None:
        if not 0.01 <= self.step <= 1:
            raise ValueError(f"step must be from 0.01 to 1, not {self.step}")

    def estimate(self, segments: Ranges) -> tuple[Thresholds, Counts]:
        mean, largest, k = segments.mean, segments.largest.double(), segments.k
        t, count = segments.largest, torch.zeros_like(k)
        steps = round(1 / self.step)
        for i in range(1, steps + 1):
            short = count < k
            r = max(0.0, 1 - i / steps)
            t = segments.threshold(mean + r * (largest - mean)).where(short, t)
            count = segments.count(t, short).where(short, count)
            if not bool((count < k).any()):
                break
        return t.masked_fill(count < k, 0.0), k
