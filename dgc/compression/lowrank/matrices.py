"""The matrices of a bucket, and low-rank products.

v [V] holds gradient + error of a bucket in fp32. The matrix M [n, m] of a tensor is shape[0] x rest. If dimension
0 is outermost in memory, as in channels_last, the columns of M are in memory order and no data is moved. Matrices
of the same shape and rank are stored consecutively and multiplied together as a `Batch`. The uncompressed tensors,
here called dense, follow.

Factors are stored in rows, P [B, r, n] and Q [B, r, m]: in this order both products read M in memory order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import isqrt, prod

import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.bucket import Bucket, Segment
from dgc.compression.lowrank.accordion import Accordion

Factor = tuple[Float32[Tensor, "_ _ _"], ...]  # P or Q, by batch
Products = list[tuple[Float32[Tensor, "_ _ _"], Float32[Tensor, "_ _ _"]]]  # (U, W) of U^T W, by batch


def memory_order(segment: Segment) -> list[int] | None:
    """Dimensions 1.. from outermost to innermost in memory; None if dimension 0 is not outermost."""
    shape, stride = segment.shape, segment.stride
    rest = range(1, len(shape))
    if shape and shape[0] > 1 and any(shape[d] > 1 and stride[d] > stride[0] for d in rest):
        return None
    return sorted(rest, key=lambda d: -stride[d])


def permute_columns(segment: Segment, Q: Float32[Tensor, "r m"], to_memory: bool) -> Float32[Tensor, "r m"]:
    """Permutes columns from the order of the shape to memory order, or back."""
    order = memory_order(segment)
    if order is None or order == sorted(order):
        return Q
    if to_memory:
        return Q.reshape(-1, *segment.shape[1:]).permute(0, *order).reshape(Q.shape)
    back = [1 + order.index(d) for d in sorted(order)]
    return Q.reshape(-1, *(segment.shape[d] for d in order)).permute(0, *back).reshape(Q.shape)


@dataclass(frozen=True)
class Batch:
    """`count` matrices [n, m] of rank `rank`, stored from `offset` in v.

    members: positions of their tensors in the bucket. numel: number of elements of these tensors. The rest of a
    square matrix is padding.
    """

    members: tuple[int, ...]
    offset: int
    count: int
    n: int
    m: int
    rank: int
    numel: int

    def of(self, v: Float32[Tensor, "V"]) -> Float32[Tensor, "B n m"]:
        end = self.offset + self.count * self.n * self.m
        return v[self.offset : end].view(self.count, self.n, self.m)

    def factor_shape(self, side: str) -> tuple[int, int, int]:
        """Shape of "P" or "Q"."""
        return self.count, self.rank, self.n if side == "P" else self.m


class Layout:
    """Positions of a bucket's tensors in v.

    Args:
        bucket (Bucket): the bucket.
        groups (mapping): positions in the bucket of the tensors of each batch, by (n, m, rank).
        square (bool): the only batch is one matrix of all tensors.
    """

    def __init__(self, bucket: Bucket, groups: Mapping[tuple[int, int, int], Sequence[int]], square: bool = False):
        self.bucket, self.segments, self.square = bucket, bucket.segments, square
        self.batches: list[Batch] = []
        self.begin_dense = 0
        for (n, m, rank), members in groups.items():
            count, numel = 1 if square else len(members), sum(self.segments[i].numel for i in members)
            self.batches.append(Batch(tuple(members), self.begin_dense, count, n, m, rank, numel))
            self.begin_dense += count * n * m
        compressed = [i for batch in self.batches for i in batch.members]
        self.dense = sorted(set(range(len(self.segments))) - set(compressed))
        order = compressed + self.dense
        starts = accumulate((self.segments[i].numel for i in order), initial=0)
        self._starts = dict(zip(order, starts, strict=False))  # position in v of each tensor, in the order of v
        self.numel = self.begin_dense + sum(self.segments[i].numel for i in self.dense)
        # tensors that v holds in the order of the shape, not in memory order
        self._moved = {i for i in compressed if not square and memory_order(self.segments[i]) is None}

    def names(self, batch: Batch) -> list[str]:
        """A name for each matrix of the batch. A square is named after the bucket's first and last tensors."""
        names = [self.segments[i].name for i in batch.members]
        return [f"{names[0]}..{names[-1]}"] if self.square else names

    def permute_columns(
        self, batch: Batch, Q: Sequence[Float32[Tensor, "r m"]], to_memory: bool
    ) -> list[Float32[Tensor, "r m"]]:
        """Permutes the columns of each matrix's Q from the order of the shapes to that of v, or back."""
        if self.square:
            return list(Q)
        return [permute_columns(self.segments[i], q, to_memory) for i, q in zip(batch.members, Q, strict=True)]

    def gradients(self) -> list[Tensor]:
        """The gradients of the bucket by segment, each one-dimensional in the order of v."""
        pieces = self.bucket.gradients
        if len(pieces) != len(self.segments):
            pieces = pieces[0].split([s.numel for s in self.segments])
        return [
            g.as_strided(s.shape, s.stride).reshape(-1) if i in self._moved else g
            for i, (g, s) in enumerate(zip(pieces, self.segments, strict=True))
        ]

    @cached_property
    def extents(self) -> Int64[Tensor, "2 parts"]:
        """Start in v, and number of elements from gradients, of each batch and of the dense tensors.

        Computed once, because a copy from the host waits for the device.
        """
        parts = [(batch.offset, batch.numel) for batch in self.batches]
        if self.dense:
            parts.append((self.begin_dense, self.numel - self.begin_dense))
        starts, counts = [start for start, _ in parts], [count for _, count in parts]
        return torch.tensor([starts, counts], dtype=torch.int64, device=self.bucket.device)

    @cached_property
    def bounds(self) -> Int64[Tensor, "bounds"]:
        """Start in v of each tensor, in the order of v, and the end."""
        return torch.tensor([*self._starts.values(), self.numel], dtype=torch.int64, device=self.bucket.device)

    def number_of(self, place: int) -> int:
        """The number in the bucket, from 1, of the tensor at this place in v, from 1; 0 for 0."""
        return list(self._starts)[place - 1] + 1 if place else 0

    def part_of(self, v: Float32[Tensor, "_"], i: int, offset: int = 0) -> Tensor:
        """Tensor i's part of v, with its shape. offset: position in the whole v where the given v begins."""
        s, start = self.segments[i], self._starts[i] - offset
        part = v[start : start + s.numel]
        return part.view(s.shape) if i in self._moved else part.as_strided(s.shape, s.stride)

    def write_product(self, b: int, U: Float32[Tensor, "B R n"], W: Float32[Tensor, "B R m"]) -> None:
        """Writes U^T W of a batch into the bucket, without a copy if it is fp32 in the same memory order."""
        batch, flat = self.batches[b], self.bucket.flat
        outer = kernels.of(flat).lowrank.outer
        if flat.dtype != torch.float32 or not self._moved.isdisjoint(batch.members):
            product = torch.empty(batch.count, batch.n, batch.m, dtype=torch.float32, device=flat.device)
            outer(U, W, list(product))
            for i in batch.members:
                self.segments[i].of(flat).copy_(self.part_of(product.view(-1), i, batch.offset))
        elif self.square:
            rows, rest = divmod(flat.numel(), batch.m)
            outer(U[:, :, :rows], W, [flat[: rows * batch.m].view(rows, batch.m)])
            if rest:
                outer(U[:, :, rows : rows + 1], W[:, :, :rest], [flat[rows * batch.m :].view(1, rest)])
        else:
            segments = [self.segments[i] for i in batch.members]
            outer(U, W, [flat[s.offset : s.offset + s.numel].view(batch.n, batch.m) for s in segments])

    def write_dense(self, mean: Float32[Tensor, "D"]) -> None:
        """Writes the mean of the dense tensors into the bucket."""
        segments = [self.segments[i] for i in self.dense]
        for s, part in zip(segments, mean.split([s.numel for s in segments]), strict=True):
            self.bucket.flat[s.offset : s.offset + s.numel].copy_(part)


@dataclass(frozen=True)
class CompressionRule:
    """Which tensors are compressed, and with which rank.

    half_steps: K. square: one matrix per bucket. start: number of uncompressed steps. accordion: proposes a rank
    for each tensor; `rank` is tried where that saves too little.
    """

    rank: int
    half_steps: int
    min_compression_rate: float
    square: bool = False
    start: int = 0
    accordion: Accordion | None = None

    def rank_of(self, name: str, numel: int, n: int, m: int) -> int:
        """Rank of the matrix [n, m] with `numel` elements from gradients; 0: not compressed."""
        for r in [self.rank] if self.accordion is None else [self.accordion.rank(name), self.rank]:
            rho = min(r, n, m)
            if rho and numel > self.min_compression_rate * (rho * (n + m) * self.half_steps / 2):
                return rho
        return 0

    def layout(self, bucket: Bucket, steps: int) -> Layout:
        """The layout after this many steps."""
        if steps < self.start:
            return Layout(bucket, {})
        groups: dict[tuple[int, int, int], list[int]] = {}
        if self.square:
            side = isqrt(max(0, bucket.numel - 1)) + 1
            rank = self.rank_of(bucket.name, bucket.numel, side, side)
            groups[side, side, rank] = list(range(len(bucket.segments)))
        for i, s in enumerate(bucket.segments):
            if len(s.shape) > 1 and not self.square:
                n, m = s.shape[0], prod(s.shape[1:])
                groups.setdefault((n, m, self.rank_of(s.name, s.numel, n, m)), []).append(i)
        compressed = {(n, m, rank): members for (n, m, rank), members in groups.items() if rank}
        return Layout(bucket, compressed, self.square)

    def floats_sent(self, layout: Layout) -> float:
        """Numbers that a rank sends per step, averaged over two steps."""
        factors = sum(batch.count * batch.rank * (batch.n + batch.m) for batch in layout.batches)
        return factors * self.half_steps / 2 + layout.numel - layout.begin_dense


def factor_views(flat: Float32[Tensor, "_"], shapes: Sequence[tuple[int, int, int]]) -> Factor:
    """Consecutive parts of a flat tensor, with these shapes."""
    parts = flat.split([prod(shape) for shape in shapes])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def append_(products: Products, X: Factor, Y: Factor, even: bool) -> None:
    """Adds X^T Y to each product if even, else Y^T X."""
    terms = list(zip(X, Y, strict=True) if even else zip(Y, X, strict=True))
    if products:
        terms = [
            (torch.cat([U, U_new], 1), torch.cat([W, W_new], 1))
            for (U, W), (U_new, W_new) in zip(products, terms, strict=True)
        ]
    products[:] = terms


def square_norms(U: Float32[Tensor, "B R n"], W: Float32[Tensor, "B R m"]) -> Float64[Tensor, "B 2"]:
    """The squared norm of each U^T W, computed from the factors, and 1 for the step."""
    squares = (U.bmm(U.mT) * W.bmm(W.mT)).sum(dim=(1, 2), dtype=torch.float64)
    return torch.stack([squares, torch.ones_like(squares)], dim=1)
