"""Selectors that estimate a threshold for each tensor and send what reaches it.

All tensors of a bucket are searched at the same time: one pass over memory counts, in each, the elements at or
above that tensor's threshold, and leaves out tensors whose threshold is found. What more elements reach than may
be sent is cut by magnitude, never by position, and slots that one tensor leaves free serve another.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.kernels import Moments, Selection, Tail
from dgc.selection.plan import Plan
from dgc.selection.selector import Selector

Thresholds = Float32[Tensor, "S"]
Counts = Int64[Tensor, "S"]

LARGEST_FLOAT = torch.finfo(torch.float32).max


class Estimator(Selector):
    @abstractmethod
    def estimate(self, ranges: "Ranges") -> tuple[Thresholds, Counts]:
        """A threshold for each tensor, and how many elements reach it."""
        ...

    def choose(self, v: Float32[Tensor, "n"], plan: Plan, seed: int) -> Selection:
        thresholds, counts = self.estimate(Ranges(v, plan, seed))
        return kernels.of(v).select(v, plan.shared(counts), thresholds).selection


class Ranges:
    """The tensors of a bucket: v of each, n of its elements and the k that are due, S tensors in all.

    What is asked of v is one pass over it each time.
    """

    def __init__(self, v: Float32[Tensor, "n"], plan: Plan, seed: int = 0):
        self.v, self.plan, self.seed = v, plan, seed
        self.bounds, self.k = plan.per_tensor.bounds, plan.per_tensor.ks
        self.n = self.bounds.diff()

    @cached_property
    def moments(self) -> Moments:
        return kernels.of(self.v).moments(self.v, self.bounds)

    @cached_property
    def mean(self) -> Float64[Tensor, "S"]:
        """Of |v|."""
        return self.moments.magnitudes / self.n.clamp(min=1)

    @property
    def largest(self) -> Thresholds:
        """|v|."""
        return self.moments.largest

    @cached_property
    def density(self) -> Float64[Tensor, "S"]:
        """D = k/n; 1 for a tensor without elements."""
        return self.k.double().clamp(min=1) / self.n.clamp(min=1)

    def tail(self, t: Thresholds) -> Tail:
        """Of the elements with |v| >= t. A tensor whose t is inf is left out, and has none."""
        return kernels.of(self.v).tail(self.v, self.bounds, t)

    def count(self, t: Thresholds, where: Tensor) -> Counts:
        """The elements with |v| >= t of the tensors `where`; 0 of the others, which are not read."""
        if not bool(where.any()):
            return torch.zeros_like(self.n)
        return self.tail(t.where(where, torch.inf)).counts

    def threshold(self, estimate: Float64[Tensor, "S"]) -> Thresholds:
        """As a threshold that the largest element reaches; 0 where the estimate is no number."""
        return estimate.nan_to_num(0.0).clamp(0.0, LARGEST_FLOAT).float().minimum(self.largest)


@dataclass
class Bracket:
    """Of each tensor two thresholds: more elements reach `low` than are wanted, fewer reach `high`.

    above_low, above_high: how many, as far as counted; otherwise n, and 0.
    """

    low: Thresholds
    high: Thresholds
    above_low: Counts
    above_high: Counts

    @property
    def middle(self) -> Thresholds:
        return self.low + (self.high - self.low) / 2


def narrow(
    ranges: Ranges,
    t: Thresholds,
    low: Thresholds,
    lower: float,
    upper: float,
    passes: int,
    propose: Callable[[Bracket], Thresholds],
) -> tuple[Thresholds, Counts]:
    """Moves t, between low and the largest element, until lower * k <= count <= upper * k, at most `passes` times.

    propose: the next t. Where none is accepted, or no number is left to try, the threshold is the low one: what
    reaches it beyond k is cut. If even a low one that was given holds too few, it is 0.
    """
    k, start = ranges.k, low
    bracket = Bracket(low, ranges.largest, ranges.n, torch.zeros_like(k))
    found, counts = low, torch.zeros_like(k)
    sought = (k > 0) & (ranges.largest > 0)
    accepted = ~sought
    for _ in range(passes):
        count = ranges.count(t, sought)
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
    counts = ranges.count(found, uncounted).where(uncounted, counts)
    short = uncounted & (counts < k) & (found > 0)
    found = found.masked_fill(short, 0.0)
    return found, ranges.count(found, short).where(short, counts)
