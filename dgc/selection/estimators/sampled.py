"""Sampled threshold with adaptation and resampling (Lin et al. 2018, section 3 and appendix: hierarchical
selection), as refined by the original implementation.

For a tensor of n elements and k = ceil(D n), m = max(ceil(s n), ceil(2/D)) samples are drawn:

    t = the ceil(m D)-th largest sample;  S = {i : |v_i| >= t}
    up to `max_adaptation_iters` times:
        |S| > upper * k:  exact top-k within S, done (resample), or t = upper * t
        |S| < lower * k:  t = lower * t
        otherwise done

The search takes one pass for each count, and the sample.

Differences from the original: A selection between k and upper * k is cut by magnitude. The original keeps the
first k positions, which starves the end of every tensor. Slots that one tensor leaves free are used by others.
Zeros are not sent. A threshold is never raised beyond the largest element. The random start is seeded, so runs
repeat.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dgc.arguments import checked
from dgc.selection.estimators.estimator import Counts, Estimator, Ranges, Thresholds
from dgc.selection.plan import share


@checked
@dataclass(frozen=True)
class Sampled(Estimator):
    """Threshold from a sample, with adaptation and resampling (Lin et al. 2018, arXiv 1712.01887, section 3).

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
        if not 0 < self.compress_lower_bound <= 1 <= self.compress_upper_bound:
            raise ValueError(
                "0 < compress_lower_bound <= 1 <= compress_upper_bound is needed, not "
                f"{self.compress_lower_bound} and {self.compress_upper_bound}"
            )
        if self.max_adaptation_iters < 0:
            raise ValueError(f"max_adaptation_iters must not be negative, not {self.max_adaptation_iters}")

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
        plan = segments.plan
        generator = torch.Generator(segments.v.device).manual_seed(segments.seed)
        thresholds, whole = [], []
        for part, ratio in zip(plan.split(segments.v), plan.ratios, strict=True):
            samples = self._sample(part, ratio, generator)
            whole.append(samples.numel() == part.numel())
            if whole[-1]:
                thresholds.append(part.new_zeros(()))
            else:
                target = share(samples.numel(), ratio)
                thresholds.append(samples.abs().topk(target, sorted=False).values.min())
        return torch.stack(thresholds), torch.tensor(whole, dtype=torch.bool, device=plan.device)

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
