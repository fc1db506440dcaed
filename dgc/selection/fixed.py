"""Threshold-v (Dutta et al. 2019, arXiv 1911.08250; Strom: Interspeech 2015): all elements of a given magnitude.

    t is given;  send every |v_i| >= t

One count. How many these are depends on the gradients alone: what is beyond the plan's capacity, which the
compressor's ratio sets, is cut by magnitude and waits in the error state.
"""

import math
from dataclasses import dataclass

import torch

from dgc.selection.threshold import Counts, Estimator, Ranges, Thresholds


@dataclass(frozen=True)
class Fixed(Estimator):
    """threshold: t."""

    threshold: float

    def __post_init__(self) -> None:
        if not (self.threshold > 0 and math.isfinite(self.threshold)):
            raise ValueError(f"threshold must be positive and finite, not {self.threshold}")

    def estimate(self, ranges: Ranges) -> tuple[Thresholds, Counts]:
        t = torch.full_like(ranges.k, self.threshold, dtype=torch.float32)
        return t, ranges.count(t, ranges.k > 0)
