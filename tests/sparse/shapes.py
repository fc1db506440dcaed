"""Data of many shapes to select from, and quotas over them."""

from typing import Any

import torch

from dgc.core.bucket import Segment
from dgc.sparse.selectors import Selector, quota_of


def rng(seed: Any) -> Any:
    return torch.Generator().manual_seed(seed)


def laplace(n: Any, seed: int = 0) -> Any:
    uniform = torch.rand(n, generator=rng(seed), dtype=torch.float64) - 0.5
    return (-uniform.sign() * torch.log1p(-2 * uniform.abs())).float()


def quota_for(*numels: Any, ratio: Any) -> Any:
    segments, offset = [], 0
    for i, n in enumerate(numels):
        segments.append(Segment(f"p{i}", offset, n, (n,), (1,)))
        offset += n
    return quota_of(segments, ratio)


def indices_of(selector: Selector, v: Any, quota: Any, seed: Any) -> Any:
    selection = selector.choose(v, quota, seed)
    return selection.indices[: int(selection.count)].long()


WALL_THRESHOLD = 1.0


def wall(n: Any, seed: int = 0) -> Any:
    """Accumulated gradients: dense right below last step's threshold, few above it."""
    generator = rng(seed)
    v = WALL_THRESHOLD * torch.rand(n, generator=generator).pow(0.3)
    v += 0.03 * torch.randn(n, generator=generator)
    return v * (torch.randint(2, (n,), generator=generator) * 2 - 1)


SHAPES = {
    "laplace": laplace,
    "normal": lambda n, seed=0: torch.randn(n, generator=rng(seed)),
    "heavy tails": lambda n, seed=0: torch.empty(n).cauchy_(generator=rng(seed)).clamp(-1e30, 1e30),
    "wall": wall,
    "zeros": lambda n, seed=0: torch.zeros(n),
    "equal": lambda n, seed=0: torch.full((n,), -0.5),
    "outlier": lambda n, seed=0: torch.zeros(n).index_fill_(0, torch.tensor([n // 3]), 1e20),
    "half zeros": lambda n, seed=0: laplace(n, seed) * torch.randint(2, (n,), generator=rng(seed)),
    "tiny": lambda n, seed=0: laplace(n, seed) * 1e-40,
    "huge": lambda n, seed=0: laplace(n, seed) * 1e36,
    "one sign": lambda n, seed=0: laplace(n, seed).abs(),
    "ties": lambda n, seed=0: torch.randn(n, generator=rng(seed)).round(),
    "sorted": lambda n, seed=0: laplace(n, seed).sort().values,
}
