"""How many elements each tensor of a bucket sends, and what is done when a selection holds more."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from dgc.bucket import Segment
from dgc.kernels.reference import largest


@dataclass(frozen=True)
class Plan:
    """Parallel tables, one entry per tensor of the bucket; `capacity` elements fit into the payload."""

    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    ks: tuple[int, ...]
    ratio: float

    @property
    def capacity(self) -> int:
        return sum(self.ks)

    def split(self, v: Tensor) -> list[Tensor]:
        return [v[o : o + n] for o, n in zip(self.offsets, self.numels, strict=True)]


@runtime_checkable
class Selector(Protocol):
    def select(self, v: Float32[Tensor, "n"], plan: Plan, seed: int) -> Int64[Tensor, "count"]:
        """Indices into v, ascending, at most `plan.capacity`, never of a zero.

        `seed` is all the randomness that a selector may use.
        """
        ...


def share(numel: int, ratio: float) -> int:
    """ceil(ratio * numel), blind to the noise of floats: 0.07 * 100 is 7.000000000000001 to them."""
    return math.ceil(numel * ratio * (1 - 1e-9))


def plan_selection(segments: Sequence[Segment], ratio: float) -> Plan:
    """k = ceil(ratio * numel) of each tensor, so at least one of every tensor that has any element."""
    return Plan(
        offsets=tuple(s.offset for s in segments),
        numels=tuple(s.numel for s in segments),
        ks=tuple(share(s.numel, ratio) for s in segments),
        ratio=ratio,
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
