"""LDTE-BS: Laplace distribution, threshold estimation, binary search (Chen, Liu, Han 2021, J. Zhejiang Univ. Eng.
Sci. 55(2), doi 10.3785/j.issn.1008-973X.2021.02.019).

A Laplace density exp(-|x|/b) / 2b has the area exp(-t/b) beyond +-t, and its maximum-likelihood b is the mean
magnitude. So k of n elements should reach

    t = b ln(n/k),  b = mean|v|

and where lower * k <= #{|v| >= t} <= upper * k does not hold, t is corrected:

    bisection   too many: t + max(b ln(c/k), b/10) until one threshold had too few, then the middle of both
    secant      between 0 and the maximum, linear in ln c, each step from 1/10 to 9/10 of the way

One pass for the mean and the maximum, one for each count.

Error feedback keeps back what lies below the last threshold and destroys the Laplace tail: on accumulated
gradients the correction is the algorithm, and takes its passes. warm_start begins at the last step's threshold
instead, and needs few.

Differences from the paper, of which the abstract, tables and captions are public: range of accepted counts, limit
of passes, secant and warm start are ours; `redsync` is the rule of the method that the paper builds on. What is
beyond k and finds no free slot is cut by magnitude.
"""

from dataclasses import dataclass

import torch

from dgc.selection.threshold import Bracket, Counts, Estimator, Ranges, Thresholds, narrow

STOP = {"redsync": (1.0, 2.0), "tight": (0.8, 1.25), "exact": (1.0, 1.0)}
METHODS = ("bisection", "secant")


@dataclass(frozen=True)
class Laplace(Estimator):
    """stop: the counts accepted: redsync, tight or exact. method: bisection or secant. passes: counts at most."""

    stop: str = "tight"
    method: str = "bisection"
    warm_start: bool = False
    passes: int = 12

    def __post_init__(self) -> None:
        if self.stop not in STOP:
            raise ValueError(f"stop is one of {', '.join(STOP)}, not {self.stop!r}")
        if self.method not in METHODS:
            raise ValueError(f"method is one of {', '.join(METHODS)}, not {self.method!r}")
        if self.passes < 1:
            raise ValueError(f"passes must be at least 1, not {self.passes}")

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return self.warm_start

    def estimate(self, ranges: Ranges) -> tuple[Thresholds, Counts]:
        b, k, history = ranges.mean, ranges.k.clamp(min=1), ranges.plan.history
        t = ranges.threshold(-b * ranges.density.log())
        if self.warm_start and "threshold" in history:
            last = history["threshold"]
            t = last.minimum(ranges.largest).where(last > 0, t)

        def bisect(bracket: Bracket) -> Thresholds:
            step = (b * (bracket.above_low / k.float()).log()).maximum(b / 10)
            further = bracket.low + step.float()
            unbounded = (bracket.above_high == 0) & (bracket.low > 0) & (further < bracket.high)
            return further.where(unbounded, bracket.middle)

        def secant(bracket: Bracket) -> Thresholds:
            above, below = (c.float().clamp(min=1).log() for c in (bracket.above_low, bracket.above_high))
            way = ((above - k.float().log()) / (above - below)).nan_to_num(0.5).clamp(0.1, 0.9)
            return bracket.low + (bracket.high - bracket.low) * way

        lower, upper = STOP[self.stop]
        propose = bisect if self.method == "bisection" else secant
        t, counts = narrow(ranges, t, torch.zeros_like(t), lower, upper, self.passes, propose)
        if self.warm_start:
            history["threshold"] = t
        return t, counts
