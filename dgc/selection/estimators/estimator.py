"""Selectors that estimate a threshold for each tensor and send the elements that reach it.

All tensors of a bucket are searched at the same time. In each tensor, one pass over memory counts the elements at
or above that tensor's threshold; tensors with a final threshold are skipped. If more elements reach a threshold
than may be sent, they are cut by magnitude, never by position. Slots that one tensor leaves free are used by
others.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.kernels import Moments, SparseVector, Tail
from dgc.selection.plan import Plan
from dgc.selection.selector import Selector

Thresholds = Float32[Tensor, "S"]
Counts = Int64[Tensor, "S"]

LARGEST_FLOAT = torch.finfo(torch.float32).max


class Estimator(Selector):
    """Base class of selectors that estimate a threshold for each tensor."""

    @abstractmethod
    def estimate(self, segments: "Ranges") -> tuple[Thresholds, Counts]:
        """Returns a threshold for each tensor, and the number of elements that reach it."""
        ...

    def choose(self, v: Float32[Tensor, "n"], plan: Plan, seed: int) -> SparseVector:
        thresholds, counts = self.estimate(Ranges(v, plan, seed))
        return kernels.of(v).selection.select(v, plan.shared(counts), thresholds).elements


class Ranges:
    """The S tensors of a bucket: their elements in v, their sizes n and their k.

    Each call of `tail` or `count`, and the first use of `moments`, takes one pass over v.
    """

    def __init__(self, v: Float32[Tensor, "n"], plan: Plan, seed: int = 0):
        self.v, self.plan, self.seed = v, plan, seed
        self.bounds, self.k = plan.per_tensor.bounds, plan.per_tensor.ks
        self.n = self.bounds.diff()

    @cached_property
    def moments(self) -> Moments:
        return kernels.of(self.v).selection.moments(self.v, self.bounds)

    @cached_property
    def mean(self) -> Float64[Tensor, "S"]:
        """Mean of |v| in each tensor."""
        return self.moments.magnitudes / self.n.clamp(min=1)

    @property
    def largest(self) -> Thresholds:
        """Maximum of |v| in each tensor."""
        return self.moments.largest

    @cached_property
    def density(self) -> Float64[Tensor, "S"]:
        """D = k/n of each tensor, or 1 for a tensor without elements."""
        return self.k.double().clamp(min=1) / self.n.clamp(min=1)

    def tail(self, t: Thresholds) -> Tail:
        """Statistics of the elements with |v| >= t. A tensor with t = inf is skipped and has none."""
        return kernels.of(self.v).selection.tail(self.v, self.bounds, t)

    def count(self, t: Thresholds, where: Tensor) -> Counts:
        """Counts elements with |v| >= t in the tensors `where`. The others are not read and get 0."""
        if not bool(where.any()):
            return torch.zeros_like(self.n)
        return self.tail(t.where(where, torch.inf)).counts

    def threshold(self, estimate: Float64[Tensor, "S"]) -> Thresholds:
        """The estimate in fp32, limited to the largest element, or 0 if the estimate is NaN."""
        return estimate.nan_to_num(0.0).clamp(0.0, LARGEST_FLOAT).float().minimum(self.largest)


@dataclass
class Bracket:
    """Two thresholds for each tensor: too many elements reach `low`, and too few reach `high`.

    above_low, above_high: the number of elements that reach each. Before the first count they are n and 0.
    """

    low: Thresholds
    high: Thresholds
    above_low: Counts
    above_high: Counts

    @property
    def middle(self) -> Thresholds:
        return self.low + (self.high - self.low) / 2


def narrow(
    segments: Ranges,
    t: Thresholds,
    low: Thresholds,
    lower: float,
    upper: float,
    passes: int,
    propose: Callable[[Bracket], Thresholds],
) -> tuple[Thresholds, Counts]:
    """Moves t, between low and the largest element, until lower * k <= count <= upper * k, at most `passes` times.

    propose: returns the next t. If no count is accepted, or no number is left to try, the result is the low
    threshold, and elements beyond k are cut. If too few elements reach even the given `low`, the threshold is 0.
    """
    k, start = segments.k, low
    bracket = Bracket(low, segments.largest, segments.n, torch.zeros_like(k))
    found, counts = low, torch.zeros_like(k)
    sought = (k > 0) & (segments.largest > 0)
    accepted = ~sought
    for _ in range(passes):
        count = segments.count(t, sought)
        over, under = sought & (count > upper * k.float()), sought & (count < lower * k.float())
        fits = sought & ~over & ~under
        found, counts, accepted = t.where(fits, found), count.where(fits, counts), accepted | fits
        bracket.low, bracket.above_low = t.where(over, bracket.low), count.where(over, bracket.above_low)
        bracket.high, bracket.above_high = t.where(under, bracket.high), count.where(under, bracket.above_high)
        t = propose(bracket)
        sought = (over | under) & (t > bracket.low) & (t < bracket.high)
        if not bool(sought.any()):
            break
    found, counts = found.where(accepted, bracket.low), counts.where(accepted, bracket.above_low)
    uncounted = ~accepted & (found <= start)
    counts = segments.count(found, uncounted).where(uncounted, counts)
    short = uncounted & (counts < k) & (found > 0)
    found = found.masked_fill(short, 0.0)
    return found, segments.count(found, short).where(short, counts)
