"""Exact top-k of every tensor by magnitude."""

from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from dgc.kernels.reference import largest
from dgc.selection.plan import Plan


@dataclass(frozen=True)
class Exact:
    def select(self, v: Float32[Tensor, "n"], plan: Plan, seed: int) -> Int64[Tensor, "count"]:
        parts = zip(plan.split(v), plan.ks, plan.offsets, strict=True)
        return torch.cat([largest(part, k) + offset for part, k, offset in parts])
