"""SIDCo with exponential stages (Abdelmoniem, Elzanaty, Alouini, Canini: MLSys 2021, arXiv 2101.10761).

If |v| is exponentially distributed, its excess over any threshold is so too. M stages together reach the density
D = k/n. The first stage reaches D_1 = 1/4, and each other stage multiplies by q = (D / D_1) ** (1 / (M - 1)):

    t_1 = -mean|v| ln D_1                            (M = 1: -mean|v| ln D)
    t_j = t_{j-1} - mean(|v| - t_{j-1} : |v| >= t_{j-1}) ln q

Every 5 steps M changes by one, within 1 .. ceil(log2(1/D)). It decreases if more than 1.2 k elements were selected
on average, and increases if fewer than 0.8 k were. The cost is one pass for the mean, one for each further stage
and one that counts.

Differences from the paper and its code: Each tensor has its own M, which begins at 1. The excess is measured from
the threshold, not from the smallest element above it. A stage that no element survives therefore leaves the
threshold unchanged. No threshold exceeds the largest element. Elements beyond k that find no free slot are cut by
magnitude.
"""

from dataclasses import dataclass

import torch

from dgc.arguments import checked
from dgc.selection.estimators.estimator import Counts, Estimator, Ranges, Thresholds

FIRST_DENSITY = 0.25


@checked
@dataclass(frozen=True)
class Exponential(Estimator):
    """SIDCo with exponential stages (Abdelmoniem et al. 2021, arXiv 2101.10761).

    Args:
        period (int): steps between changes of the number of stages M.
        lower (float): M increases if the mean count, divided by k, is below this. In (0, 1].
        upper (float): M decreases if the mean count, divided by k, is above this. At least 1.

    Raises:
        ValueError: if an argument is out of range.
    """

    period: int = 5
    lower: float = 0.8
    upper: float = 1.2
    remembers = True

    def __post_init__(self) -> None:
        if not 0 < self.lower <= 1 <= self.upper:
            raise ValueError(f"0 < lower <= 1 <= upper is needed, not {self.lower} and {self.upper}")
        if self.period < 1:
            raise ValueError(f"period must be at least 1, not {self.period}")

    def estimate(self, segments: Ranges) -> tuple[Thresholds, Counts]:
        k, density = segments.k, segments.density
        start = torch.stack([torch.ones_like(density), torch.zeros_like(density), torch.zeros_like(density)], 1)
        # numbers of stages are no longer integers after the states of several ranks were averaged
        stages, total, steps = segments.plan.history.get("stages", start).unbind(1)
        stages = stages.round()
        several = (stages > 1) & (density < FIRST_DENSITY)
        first = density.new_full((), FIRST_DENSITY).where(several, density)
        t = segments.threshold(-segments.mean * first.log())
        fall = -(density / first).log() / (stages - 1).clamp(min=1)
        for stage in range(1, int(stages.max()) if stages.numel() else 1):
            tail = segments.tail(t.where(several & (stage < stages), torch.inf))
            excess = tail.sums / tail.counts.clamp(min=1) - t
            t = segments.threshold(t + excess * fall).where(tail.counts > 0, t)
        counts = segments.count(t, k > 0)
        total, steps = total + counts / k.float().clamp(min=1), steps + 1
        self._adapt(segments, stages, total, steps)
        return t, counts

    def _adapt(self, segments: Ranges, stages: torch.Tensor, total: torch.Tensor, steps: torch.Tensor) -> None:
        inputs = steps >= self.period
        mean = total / steps
        change = (mean < self.lower).double() - (mean > self.upper).double()
        most = (1 / segments.density).log2().ceil().clamp(min=1)
        stages = (stages + change).clamp(min=1).minimum(most).where(inputs, stages)
        segments.plan.history["stages"] = torch.stack(
            [stages, total.masked_fill(inputs, 0.0), steps.masked_fill(inputs, 0.0)], 1
        )
