"""Selectors that estimate a threshold for each tensor and send the elements that reach it.

All tensors of a bucket are searched at the same time. In each tensor, one pass over memory counts the elements at
or above that tensor's threshold; tensors with a final threshold are skipped. No threshold exceeds the largest
element, and zeros are not sent. Slots that one tensor leaves free are used by others. If more elements reach a
threshold than may be sent, they are cut by magnitude, never by position.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.core.arguments import WHOLE, checked, require
from dgc.kernels import Moments, SparseVector, Tail
from dgc.sparse.selectors.selector import Quota, Selector, share

Thresholds = Float32[Tensor, "S"]
Counts = Int64[Tensor, "S"]

LARGEST_FLOAT = torch.finfo(torch.float32).max


class Estimator(Selector):
    """Base class of selectors that estimate a threshold for each tensor."""

    @abstractmethod
    def estimate(self, segments: "Ranges") -> tuple[Thresholds, Counts]:
        """Returns a threshold for each tensor, and the number of elements that reach it."""

    def choose(self, v: Float32[Tensor, "n"], quota: Quota, seed: int) -> SparseVector:
        thresholds, counts = self.estimate(Ranges(v, quota, seed))
        return kernels.of(v).selection.select(v, quota.shared_budget(counts), thresholds).elements


class Ranges:
    """The S tensors of a bucket: their elements in v, their sizes n and their k.

    Each call of `tail` or `count`, and the first use of `moments`, takes one pass over v.
    """

    def __init__(self, v: Float32[Tensor, "n"], quota: Quota, seed: int = 0):
        self.v, self.quota, self.seed = v, quota, seed
        self.bounds, self.k = quota.per_tensor.bounds, quota.per_tensor.ks
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


def require_around_one(**bounds: float) -> None:
    """Raises ValueError unless the first bound is in (0, 1], and the second at least 1."""
    (lower, least), (upper, most) = bounds.items()
    if not 0 < least <= 1 <= most:
        raise ValueError(f"0 < {lower} <= 1 <= {upper} is needed, not {least} and {most}")


@checked
@dataclass(frozen=True)
class Sampled(Estimator):
    """Threshold from a sample, with adaptation and resampling (Lin et al. 2018, arXiv 1712.01887, section 3 and
    appendix: hierarchical selection), as refined by the original implementation.

    For a tensor of n elements and k = ceil(D n), m = max(ceil(s n), ceil(2/D)) samples are drawn:

        t = the ceil(m D)-th largest sample;  S = {i : |v_i| >= t}
        up to `max_adaptation_iters` times:
            |S| > upper * k:  exact top-k within S, done (resample), or t = upper * t
            |S| < lower * k:  t = lower * t
            otherwise done

    The search takes one pass for each count, and the sample.

    Differences from the original: A selection between k and upper * k is cut by magnitude. The original keeps the
    first k positions, which starves the end of every tensor. The random start is seeded, so runs repeat.

    Args:
        sample_ratio (float): s, the fraction of each tensor that is sampled. In (0, 1].
        strided_sample (bool): sample every stride-th element from a random start. False: draw random indices.
        compress_upper_bound (float): a count above this multiple of k is too large. At least 1.
        compress_lower_bound (float): a count below this multiple of k is too small. In (0, 1].
        max_adaptation_iters (int): largest number of corrections of the threshold.
        resample (bool): cut a count that is too large by an exact top-k. False: raise the threshold instead.

    Raises:
        ValueError: if an argument is out of range.
    """

    sample_ratio: float = 0.01
    strided_sample: bool = True
    compress_upper_bound: float = 1.3
    compress_lower_bound: float = 0.8
    max_adaptation_iters: int = 10
    resample: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.sample_ratio <= 1:
            raise ValueError(f"sample_ratio is a fraction in (0, 1], not {self.sample_ratio}")
        require_around_one(
            compress_lower_bound=self.compress_lower_bound, compress_upper_bound=self.compress_upper_bound
        )
        require("at least 0", WHOLE, least=0, max_adaptation_iters=self.max_adaptation_iters)

    def estimate(self, segments: Ranges) -> tuple[Thresholds, Counts]:
        k, (t, whole) = segments.k, self._from_samples(segments)
        counts = segments.count(t, k > 0)
        cut, target = whole, k.float()
        for _ in range(self.max_adaptation_iters):
            over = ~cut & (counts > self.compress_upper_bound * target)
            under = counts < self.compress_lower_bound * target
            if self.resample:
                cut, over = cut | over, torch.zeros_like(over)
            adapted = over | (under & ~cut & (t > 0))
            if not bool(adapted.any()):
                break
            moved = torch.where(over, t * self.compress_upper_bound, t * self.compress_lower_bound)
            reached = segments.count(moved, adapted)
            cut = cut | (over & (reached == 0))
            t, counts = moved.where(adapted & ~cut, t), reached.where(adapted & ~cut, counts)
        return t, counts.minimum(k).where(cut, counts)

    def _from_samples(self, segments: Ranges) -> tuple[Thresholds, Tensor]:
        """The first thresholds, and which tensors are not larger than their sample: their threshold is 0."""
        quota = segments.quota
        generator = torch.Generator(segments.v.device).manual_seed(segments.seed)
        thresholds, whole = [], []
        for part, ratio in zip(quota.split(segments.v), quota.ratios, strict=True):
            samples = self._sample(part, ratio, generator)
            whole.append(samples.numel() == part.numel())
            if whole[-1]:
                thresholds.append(part.new_zeros(()))
            else:
                target = share(samples.numel(), ratio)
                thresholds.append(samples.abs().topk(target, sorted=False).values.min())
        return torch.stack(thresholds), torch.tensor(whole, dtype=torch.bool, device=quota.device)

    def _sample(self, v: Tensor, ratio: float, generator: torch.Generator) -> Tensor:
        """A random sample of v [n], or v itself if the sample would not be smaller."""
        n = v.numel()
        target = max(share(n, self.sample_ratio), share(2, 1 / ratio))
        if target >= n:
            return v
        if not self.strided_sample:
            return v[torch.randint(n, (target,), generator=generator, dtype=torch.int64, device=v.device)]
        # odd strides, so that a power of two in the tensor's shape cannot line up with the sample
        stride = math.ceil(n / target / 32) * 32 + 1
        while n // stride < target:
            stride -= 8
        start = int(torch.randint(stride, (), generator=generator, dtype=torch.int64, device=v.device))
        return v[start::stride]


STOP = {"redsync": (1.0, 2.0), "tight": (0.8, 1.25), "exact": (1.0, 1.0)}
METHODS = ("bisection", "secant")


@checked
@dataclass(frozen=True)
class Laplace(Estimator):
    """LDTE-BS: Laplace distribution, threshold estimation, binary search (Chen, Liu, Han 2021, J. Zhejiang Univ.
    Eng. Sci. 55(2), doi 10.3785/j.issn.1008-973X.2021.02.019).

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

    Differences from the paper: Only its abstract, tables and captions are public. The range of accepted counts,
    the limit of passes, secant and warm start are this project's. `redsync` is the rule of the method that the
    paper builds on.

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
        require("at least 1", WHOLE, least=1, passes=self.passes)

    @property
    def rows(self) -> dict[str, tuple[int, ...]]:  # type: ignore[override]
        return {"threshold": ()} if self.warm_start else {}

    def estimate(self, segments: Ranges) -> tuple[Thresholds, Counts]:
        b, k, history = segments.mean, segments.k.clamp(min=1), segments.quota.history
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


@checked
@dataclass(frozen=True)
class Trimmed(Estimator):
    """RedSync's trimmed top-k (Fang, Fu, Yang, Hsieh 2019, J. Parallel Distrib. Comput. 133,
    doi 10.1016/j.jpdc.2019.05.016).

        r = 0.8;  t = mean|v| + r (max|v| - mean|v|)
        while #{|v| >= t} < k:  r = r - 0.2
        send the k largest of {|v| >= t}

    The search takes one pass for mean and maximum, one to five counts, and an exact top-k of the candidates. It
    always returns k elements. Heavy tails leave many candidates, and then the last step costs as much as an exact
    top-k of all.

    Differences from the paper: If fewer than k elements reach the mean, all elements are candidates.

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


@checked
@dataclass(frozen=True)
class Fixed(Estimator):
    """Threshold-v: every element of at least a given magnitude (Dutta et al. 2019, arXiv 1911.08250; Strom:
    Interspeech 2015).

    The selection takes one count. The number of elements depends only on the gradients. The ratio of the
    compressor sets the quota's capacity: elements beyond it are cut by magnitude and stay in the residual.

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
