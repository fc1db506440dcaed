"""LDTE-BS: Laplace distribution, threshold estimation, binary search (Chen, Liu, Han 2021, J. Zhejiang Univ. Eng.
Sci. 55(2), doi 10.3785/j.issn.1008-973X.2021.02.019).

A Laplace density exp(-|x|/b) / 2b has the area exp(-t/b) beyond +-t, and its maximum-likelihood b is the mean
magnitude. Thus k of n elements should reach

    t = b ln(n/k),  b = mean|v|

If lower * k <= #{|v| >= t} <= upper * k does not hold, t is corrected:

    bisection   too many: t + max(b ln(c/k), b/10) until one threshold has too few, then the middle of both
    secant      between 0 and the maximum, linear in ln c, each step from 1/10 to 9/10 of the way

The search takes one pass for the mean and the maximum and one for each count.

Error feedback keeps the elements below the last threshold, which destroys the Laplace tail. On accumulated
gradients the correction therefore determines the result and takes most of the passes. warm_start begins at the
threshold of the last step and needs few passes.

Differences from the paper: Only its abstract, tables and captions are public. The range of accepted counts, the
limit of passes, secant and warm start are this project's. `redsync` is the rule of the method that the paper
builds on. Elements beyond k that find no free slot are cut by magnitude.
"""

from dataclasses import dataclass

import torch

from dgc.arguments import checked
from dgc.selection.estimators.estimator import Bracket, Counts, Estimator, Ranges, Thresholds, narrow

STOP = {"redsync": (1.0, 2.0), "tight": (0.8, 1.25), "exact": (1.0, 1.0)}
METHODS = ("bisection", "secant")


@checked
@dataclass(frozen=True)
class Laplace(Estimator):
    """Threshold from a fitted Laplace distribution, LDTE-BS (Chen, Liu, Han 2021).

    Args:
        stop (str): range of accepted counts: "redsync" (k to 2 k), "tight" (0.8 k to 1.25 k) or "exact" (k).
        method (str): correction of the threshold, "bisection" or "secant".
        warm_start (bool): begin at the threshold of the last step.
        passes (int): largest number of counts.

    Raises:
        ValueError: if an argument is not one of the values above, or passes is less than 1.
    """

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

    def estimate(self, segments: Ranges) -> tuple[Thresholds, Counts]:
        b, k, history = segments.mean, segments.k.clamp(min=1), segments.plan.history
        t = segments.threshold(-b * segments.density.log())
        if self.warm_start and "threshold" in history:
            last = history["threshold"]
            t = last.minimum(segments.largest).where(last > 0, t)

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
        t, counts = narrow(segments, t, torch.zeros_like(t), lower, upper, self.passes, propose)
        if self.warm_start:
            history["threshold"] = t
        return t, counts
