"""The base class of selectors, and the quota: how many elements each tensor of a bucket sends."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.core.bucket import Segment
from dgc.kernels import Budget, PassInputs, SparseVector

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Quota:
    """How many elements each tensor of a bucket sends: one entry per tensor. The payload holds `capacity` of them.

    ratio: of tensors of two or more dimensions. ratios: of all tensors.
    history: tensors that a selector keeps for its next step. Those in the selector's `rows` have one row
    per tensor of the bucket.
    """

    segments: tuple[Segment, ...]
    ks: tuple[int, ...]
    ratio: float
    ratios: tuple[float, ...]
    device: torch.device = CPU
    history: dict[str, Tensor] = field(default_factory=dict)
    _chunked: dict[int, Budget] = field(default_factory=dict)

    @cached_property
    def capacity(self) -> int:
        return sum(self.ks)

    @cached_property
    def per_tensor(self) -> Budget:
        """The k of every tensor."""
        return self._budget([segment.offset for segment in self.segments], self.ks)

    @cached_property
    def per_bucket(self) -> Budget:
        """One k for the whole bucket: large tensors may send more than their share, and small ones nothing."""
        return self._budget([0], [self.capacity])

    def per_chunk(self, chunk_size: int) -> Budget:
        """The k of every tensor, divided among chunks of about `chunk_size` elements: see `TopKPerChunk`."""
        if chunk_size not in self._chunked:
            starts: list[int] = []
            ks: list[int] = []
            for segment, k in zip(self.segments, self.ks, strict=True):
                chunks = min(-(-segment.numel // chunk_size), k)
                sent = [i * k // chunks for i in range(chunks)] + [k]
                # from k and not from the size, so that no chunk has fewer elements than it sends
                starts += [segment.offset + start * segment.numel // k for start in sent[:-1]]
                ks += [end - start for start, end in pairwise(sent)]
            self._chunked[chunk_size] = self._budget(starts, ks)
        return self._chunked[chunk_size]

    def split(self, v: Tensor) -> tuple[Tensor, ...]:
        return v.split([segment.numel for segment in self.segments])

    def shared_budget(self, counts: Int64[Tensor, "S"]) -> Budget:
        """How many of `counts` candidates each tensor may send: its k, and slots that other tensors leave free.

        Free slots are divided in proportion to each tensor's number of candidates beyond its k.
        """
        ks = self.per_tensor.ks
        kept = counts.minimum(ks)
        surplus = counts - kept
        free, requested = self.capacity - kept.sum(), surplus.sum()
        extra = surplus.where(requested <= free, free * surplus // requested.clamp(min=1))
        return Budget(self.per_tensor.bounds, kept + extra, self.capacity)

    def rows_of_history(self) -> dict[str, dict[str, Any]]:
        """The history by tensor name, independent of the division into buckets. It belongs to this ratio."""
        return {
            segment.name: {"ratio": self.ratio, **{key: h[i].clone() for key, h in self.history.items()}}
            for i, segment in enumerate(self.segments)
        }

    def take_history(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Loads rows of `rows_of_history`, if there are rows of this ratio for all tensors of this quota."""
        own = [rows.get(segment.name, {}) for segment in self.segments]
        if all(row.keys() == own[0].keys() and row.get("ratio") == self.ratio for row in own):
            for key in (key for row in own[:1] for key in row if key != "ratio"):
                self.history[key] = torch.stack([row[key].to(self.device) for row in own])

    def _budget(self, starts: Sequence[int], ks: Sequence[int]) -> Budget:
        bounds = [*starts, sum(segment.numel for segment in self.segments)]
        return Budget(
            torch.tensor(bounds, dtype=torch.int64, device=self.device),
            torch.tensor(ks, dtype=torch.int64, device=self.device),
            self.capacity,
        )


def share(numel: int, ratio: float) -> int:
    """ceil(ratio * numel), not affected by float rounding: 0.07 * 100 is 7.000000000000001 in floats."""
    return math.ceil(numel * ratio * (1 - 1e-9))


def quota_of(
    segments: Sequence[Segment], ratio: float, device: torch.device = CPU, vector_ratio: float | None = None
) -> Quota:
    """The quota with k = ceil(ratio * numel) for each tensor: at least one element of every non-empty tensor.

    Tensors of less than two dimensions have `vector_ratio`, or `ratio` if that is larger.
    """
    vectors = max(ratio, vector_ratio or 0.0)
    ratios = tuple(ratio if len(s.shape) > 1 else vectors for s in segments)
    ks = tuple(share(s.numel, own) for s, own in zip(segments, ratios, strict=True))
    return Quota(tuple(segments), ks, ratio, ratios, device)


@dataclass(frozen=True, eq=False)
class SelectorResult:
    """The result of `Selector.select`. first_nonfinite: index of the gradient's first NaN or TOO_LARGE, or n."""

    elements: SparseVector
    first_nonfinite: Int64[Tensor, ""]


class Selector(ABC):
    """Base class of selectors. A selector chooses at most `quota.capacity` elements of a bucket and never a zero.

    rows: what of `quota.history` the selection depends on, which is saved in checkpoints: for each name, the shape
        of a tensor's row, in fp32 and not negative.
    repeats: whether each step does the same on a GPU, without a seed and without waiting. It can be a CUDA graph.
    """

    rows: Mapping[str, tuple[int, ...]] = {}
    repeats = False

    @abstractmethod
    def choose(self, v: Float32[Tensor, "n"], quota: Quota, seed: int) -> SparseVector:
        """Selects elements of v, which is not changed. All randomness of a selector must come from `seed`."""

    def select(self, inputs: PassInputs, quota: Quota, seed: int) -> SelectorResult:
        """Accumulates the gradient into v in one pass, then chooses from the new v."""
        first_nonfinite = kernels.of(inputs.v).selection.accumulate_(inputs)
        return SelectorResult(self.choose(inputs.v, quota, seed), first_nonfinite)
