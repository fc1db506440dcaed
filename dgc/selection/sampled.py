"""Sampled threshold with adaptation and resampling (Lin et al. 2018, section 3 and appendix: hierarchical
selection), as the original implementation refines it.

With n elements of which k = ceil(D n) are due, m = max(ceil(s n), ceil(2/D)) samples are drawn:

    t = the ceil(m D)-th largest sample;  S = {i : |v_i| >= t}
    up to `max_adaptation_iters` times:
        |S| > upper * k:  exact top-k within S, done (resample), or t = upper * t
        |S| < lower * k:  t = lower * t
        otherwise done

Differences from the original: a selection between k and upper * k is cut by magnitude, where the original
keeps its first k in the order of positions and starves the end of every tensor; slots that one tensor leaves
free serve another; zeros are not sent; the random start comes from a seed, so that a run repeats.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from dgc.kernels.reference import above, largest
from dgc.selection.plan import Plan, fit, share
from dgc.selection.selector import Selector


@dataclass(frozen=True)
class Sampled(Selector):
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

    def indices(self, v: Float32[Tensor, "n"], plan: Plan, seed: int) -> Int64[Tensor, "count"]:
        generator = torch.Generator(v.device).manual_seed(seed)
        parts = zip(plan.split(v), plan.ks, strict=True)
        return fit(v, [self._select_one(part, k, plan.ratio, generator) for part, k in parts], plan)

    def _select_one(self, v: Tensor, k: int, ratio: float, generator: torch.Generator) -> Tensor:
        samples = self._sample(v, ratio, generator)
        if samples.numel() == v.numel():
            return largest(v, k)
        threshold = samples.abs().topk(share(samples.numel(), ratio), sorted=False).values.min()
        indices = above(v, threshold)
        for _ in range(self.max_adaptation_iters):
            if indices.numel() > self.compress_upper_bound * k:
                if self.resample:
                    return indices[largest(v[indices], k)]
                threshold = threshold * self.compress_upper_bound
            elif indices.numel() < self.compress_lower_bound * k and threshold > 0:
                threshold = threshold * self.compress_lower_bound
            else:
                break
            indices = above(v, threshold)
        return indices

    def _sample(self, v: Tensor, ratio: float, generator: torch.Generator) -> Tensor:
        """A random part of v [n]; v itself where a sample would be no smaller."""
        n = v.numel()
        wanted = max(share(n, self.sample_ratio), share(2, 1 / ratio))
        if wanted >= n:
            return v
        if not self.strided_sample:
            return v[torch.randint(n, (wanted,), generator=generator, device=v.device)]
        # odd strides, so that a power of two in the tensor's shape cannot line up with the sample
        stride = math.ceil(n / wanted / 32) * 32 + 1
        while n // stride < wanted:
            stride -= 8
        start = int(torch.randint(stride, (), generator=generator, device=v.device))
        return v[start::stride]
