"""Memory layout of low-rank methods: the matrices of a bucket, and what a step subtracted from them.

v holds gradient + error in fp32. The matrix M [n, m] of a tensor is shape[0] x rest. If dimension 0 is outermost
in memory, as in channels_last, the columns of M keep the memory order and no data is moved. Matrices of the same
shape and rank are stored consecutively and multiplied together as a Batch. All other tensors follow.

Factors are stored in rows, P [B, r, n] and Q [B, r, m]: in this order both products read M in memory order.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt, prod

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.bucket import Bucket, Segment


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(n, m) of a tensor; (1, 1) if it has no dimensions."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def memory_order(segment: Segment) -> list[int] | None:
    """Dimensions 1.. from outermost to innermost in memory; None if dimension 0 is not outermost."""
    dims = range(len(segment.shape))
    order = sorted((d for d in dims if segment.shape[d] > 1), key=lambda d: -segment.stride[d])
    if segment.shape and segment.shape[0] > 1 and order[0] != 0:
        return None
    return [d for d in dims if d and segment.shape[d] <= 1] + [d for d in order if d]


def columns_to_logical(segment: Segment, Q: Float32[Tensor, "r m"]) -> Float32[Tensor, "r m"]:
    """Permutes columns from memory order to the order of the shape."""
    order = memory_order(segment)
    if order is None or order == sorted(order):
        return Q
    sizes = [segment.shape[d] for d in order]
    back = [1 + order.index(d) for d in range(1, len(segment.shape))]
    return Q.reshape(-1, *sizes).permute(0, *back).reshape(Q.shape)


def columns_to_memory(segment: Segment, Q: Float32[Tensor, "r m"]) -> Float32[Tensor, "r m"]:
    """The inverse of columns_to_logical."""
    order = memory_order(segment)
    if order is None or order == sorted(order):
        return Q
    return Q.reshape(-1, *segment.shape[1:]).permute(0, *order).reshape(Q.shape)


Factor = Sequence[Float32[Tensor, "_ _ _"]]  # P or Q, by batch


@dataclass(frozen=True)
class Batch:
    """`count` matrices [n, m] of rank `rank`, stored from `offset` in v. members: their segments, by position.

    gradient: number of elements that come from gradients. The others pad a square matrix with zeros.
    """

    members: tuple[int, ...]
    offset: int
    count: int
    n: int
    m: int
    rank: int
    gradient: int

    def of(self, v: Float32[Tensor, "V"]) -> Float32[Tensor, "B n m"]:
        end = self.offset + self.count * self.n * self.m
        return v[self.offset : end].view(self.count, self.n, self.m)


class Layout:
    """Positions of a bucket's tensors in v.

    Args:
        bucket (Bucket): the bucket.
        ranks (mapping): rank of each tensor by name. Tensors with 0 or without an entry are sent uncompressed.
        square (int): if not 0, the whole bucket is one matrix of this rank, [s, s] with s = ceil(sqrt(N)).
    """

    def __init__(self, bucket: Bucket, ranks: Mapping[str, int], square: int = 0):
        self.bucket, self.segments = bucket, bucket.segments
        self.ranks = {s.name: ranks.get(s.name, 0) for s in bucket.segments}
        self.square = square
        self.batches: list[Batch] = []
        self._lies_as = [memory_order(s) is not None for s in bucket.segments]
        self.dense: tuple[int, ...] = ()
        if square:
            side = isqrt(max(0, bucket.numel - 1)) + 1
            everything = tuple(range(len(bucket.segments)))
            self.batches = [Batch(everything, 0, 1, side, side, square, bucket.numel)]
        else:
            self._group()
            self.dense = tuple(i for i, s in enumerate(bucket.segments) if not self.ranks[s.name])
        self.begin_dense = sum(b.count * b.n * b.m for b in self.batches)
        self.order = [i for batch in self.batches for i in batch.members] + list(self.dense)
        self._starts: list[int] = []  # of segments, in this order
        at = 0
        for i in self.order:
            self._starts.append(at)
            at += self.segments[i].numel
        self.numel = self.begin_dense + sum(self.segments[i].numel for i in self.dense)

    def _group(self) -> None:
        alike: dict[tuple[int, int, int], list[int]] = {}
        for i, s in enumerate(self.segments):
            if self.ranks[s.name]:
                alike.setdefault((*matrix_shape(s.shape), self.ranks[s.name]), []).append(i)
        offset = 0
        for (n, m, rank), members in alike.items():
            numel = len(members) * n * m
            self.batches.append(Batch(tuple(members), offset, len(members), n, m, rank, numel))
            offset += numel

    def gradients(self) -> list[Tensor]:
        """The gradients of the bucket by segment, each one-dimensional in the order of v."""
        pieces = self.bucket.gradients
        if len(pieces) != len(self.segments):
            pieces = pieces[0].split([s.numel for s in self.segments])
        return [
            g if self.square or lies or i in self.dense else g.as_strided(s.shape, s.stride).reshape(-1)
            for i, (g, s, lies) in enumerate(zip(pieces, self.segments, self._lies_as, strict=True))
        ]

    @cached_property
    def extents(self) -> Int64[Tensor, "2 parts"]:
        """Start in v of each batch and of the uncompressed tensors, and the number of their elements from
        gradients.

        Computed once, because a copy from the host waits for the device.
        """
        begins, lengths = [b.offset for b in self.batches], [b.gradient for b in self.batches]
        if self.dense:
            begins.append(self.begin_dense)
            lengths.append(self.numel - self.begin_dense)
        return torch.tensor([begins, lengths], dtype=torch.int64, device=self.bucket.device)

    def number_of(self, position: int) -> int:
        """The number, from 1, of the tensor that holds this element of v; 0 past the last element."""
        return 0 if position >= self.numel else self.order[bisect_right(self._starts, position) - 1] + 1

    def clear_padding_(self, v: Float32[Tensor, "V"]) -> None:
        if self.square:
            v[self.bucket.numel :].zero_()

    def part_of(self, v: Float32[Tensor, "V"], i: int) -> Tensor:
        """Segment i's part of v, with its shape."""
        s, start = self.segments[i], self._starts[self.order.index(i)]
        part = v[start : start + s.numel]
        if self.square or self._lies_as[i] or i in self.dense:
            return part.as_strided(s.shape, s.stride)
        return part.view(s.shape)

    def write_product(self, b: int, U: Float32[Tensor, "B R n"], W: Float32[Tensor, "B R m"]) -> None:
        """Writes U^T W of a batch into the bucket, without a copy if it is fp32 in the same memory order."""
        batch, flat = self.batches[b], self.bucket.flat
        products = kernels.of(flat).lowrank
        straight = flat.dtype == torch.float32 and all(self._lies_as[i] for i in batch.members)
        if straight and self.square:
            rows, rest = divmod(flat.numel(), batch.m)
            products.outer(U[:, :, :rows], W, [flat[: rows * batch.m].view(rows, batch.m)])
            if rest:
                products.outer(U[:, :, rows : rows + 1], W[:, :, :rest], [flat[rows * batch.m :].view(1, rest)])
            return
        if straight:
            segments = [self.segments[i] for i in batch.members]
            out = [flat[s.offset : s.offset + s.numel].view(batch.n, batch.m) for s in segments]
            products.outer(U, W, out)
            return
        whole = torch.empty(batch.count, batch.n, batch.m, dtype=torch.float32, device=flat.device)
        products.outer(U, W, list(whole))
        if self.square:
            flat.copy_(whole.view(-1)[: flat.numel()])
            return
        for product, i in zip(whole, batch.members, strict=True):
            s = self.segments[i]
            if self._lies_as[i]:
                flat[s.offset : s.offset + s.numel].copy_(product.view(-1))
            else:
                s.of(flat).copy_(product.view(s.shape))

    def write_dense(self, mean: Float32[Tensor, "D"]) -> None:
        """Writes the mean of the uncompressed tensors into the bucket."""
        numels = [self.segments[i].numel for i in self.dense]
        for i, part in zip(self.dense, mean.split(numels), strict=True):
            s = self.segments[i]
            self.bucket.flat[s.offset : s.offset + s.numel].copy_(part)


@dataclass(frozen=True, eq=False)
class Taken:
    """What a step subtracted from v: U^T W from each batch, and all of the other tensors except `kept` [D]."""

    factors: Sequence[tuple[Tensor, Tensor]]
    kept: Float32[Tensor, "D"]


def settle_(layout: Layout, taken: Taken, v: Float32[Tensor, "V"]) -> Tensor:
    """Updates v to its value after the step: bit for bit the value to which `accumulate_` adds."""
    for batch, (U, W) in zip(layout.batches, taken.factors, strict=True):
        kernels.of(v).lowrank.subtract_(batch.of(v), U, W)
    v[layout.begin_dense :].copy_(taken.kept)
    layout.clear_padding_(v)
    return v


def accumulate_(
    layout: Layout, v: Float32[Tensor, "V"], taken: Taken | None, X: Factor, even: bool, Y: Factor
) -> Int64[Tensor, ""]:
    """Subtracts `taken` of the last step, adds the gradients, and multiplies each batch with its X into its Y.

    M is not changed within a step: what a step takes is subtracted here, in the next one's pass over memory. A
    dropped step therefore needs no repair.

    Returns the position in v of the first NaN or TOO_LARGE, or the length of v if there is none.
    """
    products, gradients = kernels.of(v).lowrank, layout.gradients()
    found = []
    for b, batch in enumerate(layout.batches):
        g = [gradients[i] for i in batch.members]
        last = None if taken is None else taken.factors[b]
        found.append(products.refresh_(batch.of(v), last, g, X[b], even, Y[b]))
    if layout.dense:
        own = v[layout.begin_dense :]
        if taken is not None:
            own.copy_(taken.kept)
        g = [gradients[i] for i in layout.dense]
        found.append(kernels.of(v).selection.accumulate_(kernels.PassInputs(tuple(g), None, own)))
    layout.bucket.release()
    starts, counts = layout.extents
    places = torch.stack(found)
    return torch.where(places < counts, places + starts, layout.numel).min()
