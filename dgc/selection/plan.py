"""How many elements each tensor of a bucket sends, and what is done when a selection holds more."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from dgc.bucket import Segment
from dgc.kernels import Quotas
from dgc.kernels.reference import largest

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Plan:
    """Parallel tables, one entry per tensor of the bucket; `capacity` elements fit into the payload."""

    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    ks: tuple[int, ...]
    ratio: float
    device: torch.device = CPU

    @cached_property
    def capacity(self) -> int:
        return sum(self.ks)

    @cached_property
    def per_tensor(self) -> Quotas:
        """The k of every tensor."""
        return self._quotas([*self.offsets, sum(self.numels)], self.ks)

    @cached_property
    def per_bucket(self) -> Quotas:
        """One k for the whole bucket: large tensors may send more than their share, small ones nothing."""
        return self._quotas([0, sum(self.numels)], [self.capacity])

    def split(self, v: Tensor) -> list[Tensor]:
        return [v[o : o + n] for o, n in zip(self.offsets, self.numels, strict=True)]

    def _quotas(self, bounds: Sequence[int], ks: Sequence[int]) -> Quotas:
        return Quotas(
            torch.tensor(bounds, dtype=torch.int64, device=self.device),
            torch.tensor(ks, dtype=torch.int64, device=self.device),
            self.capacity,
        )


def share(numel: int, ratio: float) -> int:
    """ceil(ratio * numel), blind to the noise of floats: 0.07 * 100 is 7.000000000000001 to them."""
    return math.ceil(numel * ratio * (1 - 1e-9))


def plan_selection(segments: Sequence[Segment], ratio: float, device: torch.device = CPU) -> Plan:
    """k = ceil(ratio * numel) of each tensor, so at least one of every tensor that has any element."""
    return Plan(
        offsets=tuple(s.offset for s in segments),
        numels=tuple(s.numel for s in segments),
        ks=tuple(share(s.numel, ratio) for s in segments),
        ratio=ratio,
        device=device,
    )


def fit(
    v: Float32[Tensor, "n"], candidates: Sequence[Int64[Tensor, "_"]], plan: Plan
) -> Int64[Tensor, "count"]:
    """Cut candidates (ascending indices within each tensor) to what the payload holds, as bucket indices.

    A tensor with more candidates than its k may use slots that other tensors leave free, shared in proportion
    to its surplus. Beyond that its smallest magnitudes stay behind; its position in the tensor plays no part.
    """
    surplus = [max(0, c.numel() - k) for c, k in zip(candidates, plan.ks, strict=True)]
    free = plan.capacity - sum(min(c.numel(), k) for c, k in zip(candidates, plan.ks, strict=True))
    wanted = sum(surplus)
    kept = []
    for part, own, offset, k, extra in zip(
        plan.split(v), candidates, plan.offsets, plan.ks, surplus, strict=True
    ):
        quota = k + (extra if wanted <= free else free * extra // wanted)
        if own.numel() > quota:
            own = own[largest(part[own], quota)]
        kept.append(own + offset)
    return torch.cat(kept)
