"""Base class of low-rank methods with error feedback: the choice of tensors and ranks, the state of each bucket,
and checkpoints. Subclasses implement the algorithm.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import isqrt
from typing import Any
from zlib import crc32

import torch
from jaxtyping import Float32
from torch import Tensor

from dgc.bucket import Bucket, Segment
from dgc.compression.dense import DenseCompressor
from dgc.compression.lowrank.accordion import Accordion
from dgc.compression.lowrank.lowrank import Layout, matrix_shape
from dgc.compression.lowrank.lowrank_state import Named, Own, as_dict, check_errors, from_dict, make
from dgc.compression.protocol import Compressor
from dgc.memory.protocol import MomentumCorrection


def compresses(numel: int, n: int, m: int, r: int, half_steps: int, min_compression_rate: float) -> bool:
    """Whether factors of rank r save more than min_compression_rate. half_steps: K."""
    return numel > min_compression_rate * (min(r, n, m) * (n + m) * half_steps / 2) and min(r, n, m) > 0


class LowRankCompressor:
    """Base class of low-rank compressors.

    Args:
        rank (int): rank r of the factors, at least 1.
        half_steps (int): number of factors that a step sends of each tensor, K.
        min_compression_rate (float): send a tensor uncompressed unless compression saves more than this factor.
        square (bool): treat each bucket as one matrix.
        start_compressing_after_num_steps (int): number of uncompressed steps at the start.
        error_feedback (bool): whether `errors` holds any tensors.
        accordion (Accordion, optional): chooses ranks of r and above.
        seed (int): seed of the first factors.

    Raises:
        ValueError: if an argument is out of range.
    """

    correction: MomentumCorrection | None = None
    fallback: Compressor = DenseCompressor()

    def __init__(
        self,
        rank: int,
        half_steps: int,
        min_compression_rate: float,
        square: bool,
        start_compressing_after_num_steps: int,
        error_feedback: bool,
        accordion: Accordion | None,
        seed: int,
    ):
        if rank < 1:
            raise ValueError(f"rank must be at least 1, not {rank}")
        if not min_compression_rate >= 0 or start_compressing_after_num_steps < 0:
            raise ValueError("min_compression_rate and start_compressing_after_num_steps must be at least 0")
        self.rank, self.half_steps, self.min_compression_rate = rank, half_steps, min_compression_rate
        self.square, self.error_feedback, self.seed = square, error_feedback, seed
        self.start_compressing_after_num_steps = start_compressing_after_num_steps
        self._accordion = accordion
        self._own: dict[str, Own] = {}
        self._stale: set[str] = set()  # buckets that may have new ranks
        self._size = 1

    def accepts(self, segment: Segment) -> bool:
        return True

    def plan(self, bucket: Bucket, size: int, rank: int) -> None:
        self._size = size
        self._own[bucket.name] = make(self._layout(bucket, 0), self._draw)

    def _rank_of(self, segment: Segment) -> int:
        if len(segment.shape) < 2:
            return 0
        n, m = matrix_shape(segment.shape)
        ranks = [self.rank] if self._accordion is None else [self._accordion.rank(segment.name), self.rank]
        worth = (
            r for r in ranks if compresses(segment.numel, n, m, r, self.half_steps, self.min_compression_rate)
        )
        return min(next(worth, 0), n, m)

    def _layout(self, bucket: Bucket, steps: int) -> Layout:
        """The layout after this many steps."""
        if steps < self.start_compressing_after_num_steps:
            return Layout(bucket, {})
        if self.square:
            side = isqrt(max(0, bucket.numel - 1)) + 1
            worth = compresses(bucket.numel, side, side, self.rank, self.half_steps, self.min_compression_rate)
            return Layout(bucket, {}, square=min(self.rank, side) if worth else 0)
        return Layout(bucket, {s.name: self._rank_of(s) for s in bucket.segments})

    def _due(self, bucket: Bucket) -> Own:
        """The state of the bucket, with the layout of this step."""
        own = self._own[bucket.name]
        steps = own.factors.steps
        if steps == self.start_compressing_after_num_steps or bucket.name in self._stale:
            self._stale.discard(bucket.name)
            layout = self._layout(bucket, steps)
            if (layout.ranks, layout.square) != (own.layout.ranks, own.layout.square):
                own = self._own[bucket.name] = make(layout, self._draw, own.named(self.error_feedback))
        return own

    def _draw(self, what: str, r: int, length: int) -> Float32[Tensor, "r length"]:
        generator = torch.Generator().manual_seed(crc32(f"{self.seed} {what}".encode()))
        return torch.randn(r, length, generator=generator, dtype=torch.float32)

    def rollback(self, bucket: Bucket) -> None:
        self._own[bucket.name].rollback()

    def begin_epoch(self, epoch: int) -> None:
        if self._accordion is None or not self._accordion.ends_interval(epoch):
            return
        sums: dict[str, tuple[float, float]] = {}
        for own in self._own.values():
            for batch, rows in zip(own.layout.batches, own.factors.sums, strict=True):
                sums |= {key: (row[0], row[1]) for key, row in zip(own.keys(batch), rows.tolist(), strict=True)}
            own.factors = replace(own.factors, sums=tuple(map(torch.zeros_like, own.factors.sums)))
            own.before = None
        self._accordion.choose(sums)
        self._stale.update(self._own)

    @property
    def compress_ratio(self) -> float:
        numel = sum(own.layout.bucket.numel for own in self._own.values())
        return sum(self._floats(own.layout) for own in self._own.values()) / numel if numel else 1.0

    def floats_per_step(self, bucket: Bucket) -> float:
        """Numbers sent by a rank per compressed step of a bucket, averaged over two steps."""
        return self._floats(self._layout(bucket, self.start_compressing_after_num_steps))

    def _floats(self, layout: Layout) -> float:
        factors = sum(batch.count * batch.rank * (batch.n + batch.m) for batch in layout.batches)
        return factors * self.half_steps / 2 + layout.numel - layout.begin_dense

    def errors(self) -> Iterator[Tensor]:
        """Copies of the errors, in the order of the bucket's tensors and their memory."""
        if self.error_feedback:
            for own in self._own.values():
                layout, error = own.layout, own.error()
                flat = torch.empty(layout.bucket.numel, dtype=torch.float32, device=error.device)
                for i, s in enumerate(layout.segments):
                    s.of(flat).copy_(layout.part_of(error, i))
                yield flat

    def state_dict(self) -> dict[str, Any]:
        named = Named()
        for own in self._own.values():
            named.add(own.named(self.error_feedback))
        accordion = {} if self._accordion is None else self._accordion.state_dict()
        return {**as_dict(named), "accordion": accordion}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rest = dict(state)
        accordion = rest.pop("accordion", None)
        named = from_dict(rest)
        if accordion is None or bool(accordion) != (self._accordion is not None):
            raise ValueError(f"state of another compressor: {sorted(state)}, or of one with another high_rank")
        if self.error_feedback:
            check_errors(named, [own.layout.bucket for own in self._own.values()])
        if self._accordion is not None:
            self._accordion.load_state_dict(accordion)
        for name, own in self._own.items():
            layout = self._layout(own.layout.bucket, named.steps)
            self._own[name] = make(layout, self._draw, named)
