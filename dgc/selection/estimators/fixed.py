"""Threshold-v (Dutta et al. 2019, arXiv 1911.08250; Strom: Interspeech 2015): all elements above a given
magnitude.

    t is given;  send every |v_i| >= t

The selection takes one count. The number of elements depends only on the gradients. The ratio of the compressor
sets the plan's capacity: elements beyond it are cut by magnitude and stay in the error state.
"""

import math
from dataclasses import dataclass

import torch

from dgc.arguments import checked
from dgc.selection.estimators.estimator import Counts, Estimator, Ranges, Thresholds


@checked
@dataclass(frozen=True)
class Fixed(Estimator):
    """Selects every element with magnitude at or above a fixed threshold (Dutta et al. 2019, arXiv 1911.08250).

    Args:
        threshold (float): t, in the unit of the gradients. Positive and finite.

    Raises:
        ValueError: if threshold is not positive and finite.
    """

    threshold: float

    def __post_init__(self) -> None:
        if not (self.threshold > 0 and math.isfinite(self.threshold)):
            raise ValueError(f"threshold must be positive and finite, not {self.threshold}")

    def estimate(self, segments: Ranges) -> tuple[Thresholds, Counts]:
        t = torch.full_like(segments.k, self.threshold, dtype=torch.float32)
        return t, segments.count(t, segments.k > 0)
