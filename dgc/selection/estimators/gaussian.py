"""GaussianK (Shi, Chu, Cheung, See 2019, arXiv 1911.08772): the threshold of a fitted normal distribution.

    t = mean(v) + std(v) * z,   z = the standard normal quantile of 1 - D/2
    at most 4 times:  c = #{|v| >= t};   c < 2/3 k:  t = t / 2;    c > 4/3 k:  t = 1.5 t;    otherwise done

The search takes one pass for mean and deviation and one for each count.

Differences from the paper: After one threshold was too high and one too low, the next lies between them, because
halving and multiplying by 1.5 may alternate forever. If no count is accepted, the candidates of the last threshold
with too many elements are cut by magnitude. If there was no such threshold, all elements are candidates.
"""

from dataclasses import dataclass

import torch

from dgc.arguments import checked
from dgc.selection.estimators.estimator import Bracket, Counts, Estimator, Ranges, Thresholds, narrow


@checked
@dataclass(frozen=True)
class Gaussian(Estimator):
    """Threshold from a fitted normal distribution, GaussianK (Shi et al. 2019, arXiv 1911.08772).

    Args:
        passes (int): largest number of counts; 4 in the paper.

    Raises:
        ValueError: if passes is less than 1.
    """

    passes: int = 4

    def __post_init__(self) -> None:
        if self.passes < 1:
            raise ValueError(f"passes must be at least 1, not {self.passes}")

    def estimate(self, segments: Ranges) -> tuple[Thresholds, Counts]:
        n, moments = segments.n.clamp(min=1), segments.moments
        mean = moments.sums / n
        deviation = (moments.squares / n - mean**2).clamp(min=0).sqrt()
        t = segments.threshold(mean + deviation * torch.special.ndtri(1 - segments.density / 2))

        def propose(bracket: Bracket) -> Thresholds:
            too_low, too_high = bracket.low > 0, bracket.high < segments.largest
            outside = (1.5 * bracket.low).where(too_low, bracket.high / 2)
            return bracket.middle.where((too_low & too_high) | (outside >= bracket.high), outside)

        return narrow(segments, t, torch.zeros_like(t), 2 / 3, 4 / 3, self.passes, propose)
