"""Quality of Laplace and normal fits: Wasserstein-1 distances between numbers and their maximum-likelihood fits.

At most 2**18 numbers of a tensor are used, evenly spaced. Zeros are left out: they belong to units that no image
of the batch activated, and neither distribution can describe them. The distance is the mean difference between the
p-quantiles of the numbers and of the distribution, at the middles of n equal intervals of p. It is given in units
of the standard deviation of the numbers, so that tensors with large numbers do not dominate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST = 1 << 18
FEWEST = 100  # fewest values for a fit
PUBLISHED_FIT = {  # table 1: distance to Laplace / distance to Gauss
    "alexnet": 13.2476 / 19.273,
    "vgg19_bn": 13.628 / 28.810,
    "resnet50": 4.694 / 8.343,
    "densenet121": 19.005 / 35.846,
    "senet18": 27.316 / 46.224,
}


@dataclass(frozen=True)
class Fit:
    """Distances to the two distributions."""

    laplace: float
    gauss: float

    @property
    def ratio(self) -> float:
        return self.laplace / self.gauss


def laplace_quantiles(p: Tensor, middle: float, width: float) -> Tensor:
    return middle - width * (p - 0.5).sign() * torch.log1p(-2 * (p - 0.5).abs())


def gauss_quantiles(p: Tensor, mean: float, deviation: float) -> Tensor:
    return mean + deviation * torch.special.ndtri(p)


def most_likely(x: Tensor) -> tuple[tuple[float, float], tuple[float, float]]:
    """Parameters: median and mean distance to it for Laplace, mean and standard deviation for Gauss."""
    middle = float(x.median())
    return (middle, float((x - middle).abs().mean())), (float(x.mean()), float(x.std(correction=0)))


def thinned(x: Tensor) -> Tensor:
    """At most MOST of the numbers of x, without zeros, in fp64."""
    # an odd stride, so that a power of two in the tensor's shape cannot line up with it
    x = x[:: -(-x.numel() // MOST) | 1]
    return x[x != 0].double().cpu()


def fit(x: Tensor) -> Fit | None:
    """Return the distances. None for fewer than FEWEST values."""
    x = thinned(x)
    if x.numel() < FEWEST or x.max() == x.min():
        return None
    laplace, gauss = most_likely(x)
    x, p = x.sort().values, (torch.arange(x.numel(), dtype=torch.float64) + 0.5) / x.numel()

    def distance(quantiles: Tensor) -> float:
        return float((x - quantiles).abs().mean()) / gauss[1]

    return Fit(distance(laplace_quantiles(p, *laplace)), distance(gauss_quantiles(p, *gauss)))


def fit_tensors(buckets: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> Fit:
    """The mean over tensors, each weighted by its size."""
    laplace = gauss = total = 0.0
    for bucket, numels in zip(buckets, sizes, strict=True):
        for part in bucket.split(list(numels)):
            found = fit(part)
            if found is not None:
                laplace, gauss = laplace + part.numel() * found.laplace, gauss + part.numel() * found.gauss
                total += part.numel()
    if not total:
        raise ValueError(f"no tensor has {FEWEST} different values")
    return Fit(laplace / total, gauss / total)


def fit_together(buckets: Sequence[Tensor]) -> Fit:
    """Treat the values of all tensors as one set. Different widths together give heavier tails."""
    found = fit(torch.cat(list(buckets)))
    if found is None:
        raise ValueError(f"fewer than {FEWEST} different values")
    return found
