"""SIDCo with exponential stages (Abdelmoniem, Elzanaty, Alouini, Canini: MLSys 2021, arXiv 2101.10761).

If |v| is exponential, so is its excess over any threshold. M stages come down to the density D = k/n together,
the first to D_1 = 1/4, the others by a factor of q = (D / D_1) ** (1 / (M - 1)) each:

    t_1 = -mean|v| ln D_1                            (M = 1: -mean|v| ln D)
    t_j = t_{j-1} - mean(|v| - t_{j-1} : |v| >= t_{j-1}) ln q

Every 5 steps M changes by one, within 1 .. ceil(log2(1/D)): down where 1.2 k were selected on average, up where
less than 0.8 k. One pass for the mean, one per further stage and one that counts.

Differences from the paper and its code: M belongs to each tensor, not to all of them together, and begins at 1;
the excess is measured from the threshold, not from the smallest element above it, so that a stage nothing
survives leaves the threshold where it is; no threshold exceeds the largest element; what is beyond k and finds
no free slot is cut by magnitude.
"""

from dataclasses import dataclass

import torch

from dgc.selection.threshold import Counts, Estimator, Ranges, Thresholds

FIRST_DENSITY = 0.25


@dataclass(frozen=True)
class Exponential(Estimator):
    """period: steps between changes of M. lower, upper: mean counts, by k, that leave it as it is."""

    period: int = 5
    lower: float = 0.8
    upper: float = 1.2
    remembers = True

    def __post_init__(self) -> None:
        if not 0 < self.lower <= 1 <= self.upper:
            raise ValueError(f"0 < lower <= 1 <= upper is needed, not {self.lower} and {self.upper}")
        if self.period < 1:
            raise ValueError(f"period must be at least 1, not {self.period}")

    def estimate(self, ranges: Ranges) -> tuple[Thresholds, Counts]:
        k, density = ranges.k, ranges.density
        start = torch.stack([torch.ones_like(density), torch.zeros_like(density), torch.zeros_like(density)], 1)
        # numbers of stages are no longer whole where those of several ranks were blended
        stages, total, steps = ranges.plan.history.get("stages", start).unbind(1)
        stages = stages.round()
        several = (stages > 1) & (density < FIRST_DENSITY)
        first = density.new_full((), FIRST_DENSITY).where(several, density)
        t = ranges.threshold(-ranges.mean * first.log())
        fall = -(density / first).log() / (stages - 1).clamp(min=1)
        for stage in range(1, int(stages.max()) if stages.numel() else 1):
            tail = ranges.tail(t.where(several & (stage < stages), torch.inf))
            excess = tail.sums / tail.counts.clamp(min=1) - t
            t = ranges.threshold(t + excess * fall).where(tail.counts > 0, t)
        counts = ranges.count(t, k > 0)
        total, steps = total + counts / k.float().clamp(min=1), steps + 1
        self._adapt(ranges, stages, total, steps)
        return t, counts

    def _adapt(self, ranges: Ranges, stages: torch.Tensor, total: torch.Tensor, steps: torch.Tensor) -> None:
        due = steps >= self.period
        mean = total / steps
        change = (mean < self.lower).double() - (mean > self.upper).double()
        most = (1 / ranges.density).log2().ceil().clamp(min=1)
        stages = (stages + change).clamp(min=1).minimum(most).where(due, stages)
        ranges.plan.history["stages"] = torch.stack(
            [stages, total.masked_fill(due, 0.0), steps.masked_fill(due, 0.0)], 1
        )
