"""The matrices of a bucket, orthonormal bases for their factors, and the choice of their ranks.

v [V] holds gradient + error of a bucket in fp32. If dimension 0 of a tensor is outermost in memory, as in
channels_last, the columns of its matrix M [n, m] are in memory order and no data is moved. Matrices of the same
shape and rank are stored consecutively and multiplied together as a `Batch`. The uncompressed tensors, here called
dense, follow. Factors are stored in rows, P [B, r, n] and Q [B, r, m]: both products then read M in memory order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import isqrt, prod

import torch
from jaxtyping import Bool, Float32, Int32, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.core.bucket import Bucket, Segment
from dgc.kernels.lowrank import Batch, Products

Factor = tuple[Float32[Tensor, "_ _ _"], ...]  # P or Q, by batch
Rows = Float32[Tensor, "B r d"]


def memory_order(segment: Segment) -> list[int] | None:
    """Dimensions 1.. from outermost to innermost in memory; None if dimension 0 is not outermost."""
    shape, stride = segment.shape, segment.stride
    rest = range(1, len(shape))
    if shape and shape[0] > 1 and any(shape[d] > 1 and stride[d] > stride[0] for d in rest):
        return None
    return sorted(rest, key=lambda d: -stride[d])


class MatrixLayout:
    """Positions of a bucket's tensors in v. groups: positions in the bucket of the tensors of each batch, by
    (n, m, rank). square: the only batch is one matrix of all tensors.
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

    @cached_property
    def shapes(self) -> dict[str, tuple[list[tuple[int, int, int]], list[int]]]:
        """Shapes and sizes of all factors of a side, "P" or "Q"."""
        shapes = {side: [batch.factor_shape(side) for batch in self.batches] for side in ("P", "Q")}
        return {side: (own, list(map(prod, own))) for side, own in shapes.items()}

    def factors(self, flat: Float32[Tensor, "_"], side: str) -> Factor:
        """The factors of the batches, as consecutive parts of a flat tensor."""
        shapes, sizes = self.shapes[side]
        return tuple(map(Tensor.view, flat.split_with_sizes(sizes), shapes))

    def names(self, batch: Batch) -> list[str]:
        """A name for each matrix of the batch. A square is named after the bucket's first and last tensors."""
        names = [self.segments[i].name for i in batch.members]
        return [f"{names[0]}..{names[-1]}"] if self.square else names

    def permute_columns(
        self, batch: Batch, Qs: Sequence[Float32[Tensor, "r m"]], to_memory: bool
    ) -> list[Float32[Tensor, "r m"]]:
        """Permutes the columns of each matrix's Q from the order of the shapes to the order of v, or back."""
        permuted = list(Qs)
        for j, i in enumerate(() if self.square else batch.members):
            Q, shape, order = Qs[j], self.segments[i].shape, memory_order(self.segments[i])
            if order is None or order == sorted(order):
                continue
            axes, sizes = order, list(shape[1:])
            if not to_memory:
                axes, sizes = [1 + order.index(d) for d in sorted(order)], [shape[d] for d in order]
            permuted[j] = Q.reshape(-1, *sizes).permute(0, *axes).reshape(Q.shape)
        return permuted

    def gradients(self) -> list[Tensor]:
        """The gradients of the bucket, each one-dimensional, in the order of v."""
        pieces = self.bucket.gradients
        if len(pieces) != len(self.segments):
            pieces = pieces[0].split([s.numel for s in self.segments])
        gradients = list(pieces)
        for i in self._moved:
            s = self.segments[i]
            gradients[i] = gradients[i].as_strided(s.shape, s.stride).reshape(-1)
        return list(map(gradients.__getitem__, self._starts))

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

    @cached_property
    def _places(self) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Where the bucket has the matrices of each batch, if they are in the order of v, and the dense tensors. A
        square is its whole rows, and the rest of one.
        """
        flat = self.bucket.flat
        parts = [flat[s.offset : s.offset + s.numel] for s in self.segments]
        dense = [parts[i] for i in self.dense]
        if self.square and self.batches:
            m = self.batches[0].m
            rows = (flat.numel() - 1) // m  # so that there is a rest
            return [[flat[: rows * m].view(rows, m)], [flat[rows * m :].view(1, -1)]], dense
        return [[parts[i].view(-1, batch.m) for i in batch.members] for batch in self.batches], dense

    def write(
        self, products: Products, mean: Float32[Tensor, "D"], largest: Int32[Tensor, "1"] | None = None
    ) -> None:
        """Writes U^T W of each batch, and the mean of the dense tensors, into the bucket. largest: of `outer`.

        Nothing is copied if the bucket is fp32, or the backend is `fused`, and in the order of v.
        """
        flat, (matrices, dense) = self.bucket.flat, self._places
        lowrank, moved = kernels.of(flat).lowrank, []
        if self._moved or not (flat.dtype == torch.float32 or lowrank.fused):
            shapes = [(batch.count, batch.n, batch.m) for batch in self.batches]
            dtype = flat.dtype if lowrank.fused else torch.float32
            moved = [torch.empty(shape, dtype=dtype, device=flat.device) for shape in shapes]
            matrices = list(map(list, moved))
        elif self.square and products:
            (U, W), rows, rest = products[0], matrices[0][0].shape[0], matrices[1][0].shape[1]
            products = [(U[:, :, :rows], W), (U[:, :, rows : rows + 1], W[:, :, :rest])]
        lowrank.outer(products, matrices, mean, dense, largest)
        for batch, M in zip(self.batches if moved else (), moved, strict=True):
            for i in batch.members:
                self.segments[i].of(flat).copy_(self.part_of(M.view(-1), i, batch.offset))


@dataclass(frozen=True)
class CompressionRule:
    """Which tensors are compressed, and with which rank. half_steps: K. square: one matrix per bucket. start:
    number of uncompressed steps.
    """

    rank: int
    half_steps: int
    min_compression_rate: float
    square: bool = False
    start: int = 0

    def rank_of(self, numel: int, n: int, m: int, higher: int = 0) -> int:
        """Rank of the matrix [n, m] with `numel` elements from gradients; 0: not compressed. higher: a rank to try
        first.
        """
        for r in (max(self.rank, higher), self.rank):
            rho = min(r, n, m)
            if rho and numel > self.min_compression_rate * (rho * (n + m) * self.half_steps / 2):
                return rho
        return 0

    def layout(self, bucket: Bucket, steps: int, ranks: Mapping[str, int]) -> MatrixLayout:
        """The layout after this many steps. ranks: by name, higher ranks for tensors where they save enough."""
        if steps < self.start:
            return MatrixLayout(bucket, {})
        groups: dict[tuple[int, int, int], list[int]] = {}
        if self.square:
            side = isqrt(max(0, bucket.numel - 1)) + 1
            rank = self.rank_of(bucket.numel, side, side)
            groups[side, side, rank] = list(range(len(bucket.segments)))
        for i, s in enumerate(bucket.segments):
            if len(s.shape) > 1 and not self.square:
                n, m = s.shape[0], prod(s.shape[1:])
                rank = self.rank_of(s.numel, n, m, ranks.get(s.name, 0))
                groups.setdefault((n, m, rank), []).append(i)
        compressed = {(n, m, rank): members for (n, m, rank), members in groups.items() if rank}
        return MatrixLayout(bucket, compressed, self.square)

    def floats_sent(self, layout: MatrixLayout) -> float:
        """Numbers that a rank sends per step, averaged over two steps."""
        factors = sum(batch.count * batch.rank * (batch.n + batch.m) for batch in layout.batches)
        return factors * self.half_steps / 2 + layout.numel - layout.begin_dense


# --- orthonormal bases, in fp32 and for each matrix of a batch --------------------------------------

WAYS = ("auto", "qr", "gram_schmidt", "cholesky_qr", "authors")
SAFE = 1e-2  # smallest share of a row at which the last two methods are accurate


def orthonormalize(
    xs: Sequence[Float32[Tensor, "_ _ _"]],
    way: str = "auto",
    epsilon: float = 1e-8,
    noise: Callable[[int], Tensor] | None = None,
    key: int = 0,
) -> list[Float32[Tensor, "_ _ _"]]:
    """Orthonormal bases for the rows of each of the B matrices in each x [B, r, d]. x is finite and r <= d.

    A result has r orthonormal rows of d elements with the same span as x; its first k rows span the same space as
    the first k rows of x. The `share` of a row is the part of its length that the rows before it do not explain.
    There are three methods, and a fourth that repeats other code:

        qr             Householder reflections; orthonormal for any x
        gram_schmidt   x_i = x_i / |x_i|;  x_j -= (x_j . x_i) x_i for j > i      (modified, Vogels et al. 2019)
        cholesky_qr    L L^T = x x^T in fp64;  L^-1 x

    The last two lose orthogonality if rows are nearly dependent; then Householder replaces them. `auto` uses
    Gram-Schmidt at rank 1, where only the norm is computed. Otherwise it uses qr on a CPU (the fastest for
    ResNet-18's matrices) and cholesky_qr on a GPU without Triton, where QR of many small matrices is slow.

    `authors` repeats what the authors' package, epfml/powersgd, does: at rank 1 x / max(|x|, 1e-16) with one norm
    |x| of the whole batch, otherwise qr. The rows of B equal matrices of rank 1 then have a length of about
    1 / sqrt(B), not 1, so a step sends only a part of what it should. The error feedback keeps the rest.

    A row that is zero, or has a share of at most epsilon, determines no direction and is replaced by a random row.
    Without this, as in the paper, which adds epsilon to the norm, a gradient that was zero once (an unused layer)
    would never be compressed again, because its factor would stay zero.

    On a GPU three launches replace all ways but `authors` at rank 1: cholesky_qr, repeated, which is accurate for
    any x whose rows have shares above 2**-22. Rows with less are replaced: it is the rounding of fp32. The host
    waits for nothing there, and what is not finite counts as zero.

    noise: returns the source of the random rows of the b-th x, [B, r, d] fp32, the same on all ranks. None: random
    numbers from a fixed seed. key: the key of the random rows where a kernel makes them.
    """
    if not xs:
        return []
    lowrank = kernels.of(xs[0]).lowrank
    if lowrank.fused:
        return list(lowrank.orthonormal(xs, way == "authors", epsilon, key))
    if way in ("auto", "gram_schmidt") and all(x.shape[1] == 1 for x in xs):
        bases, accepted = lowrank.unit_rows(xs)
    else:
        attempts = [attempt(x, way, epsilon) for x in xs]
        bases = [basis for basis, _ in attempts]
        # The host waits for a GPU once for all matrices, and again only for a matrix that is not accepted.
        accepted = torch.stack([valid for _, valid in attempts]).tolist()
    for b, accept in enumerate(accepted):
        if accept:
            continue
        bases[b], share = qr(x := xs[b])
        lost = ~(share > epsilon)
        if bool(lost.any()):
            fixed = torch.Generator().manual_seed(0)
            rows = torch.randn(x.shape, generator=fixed, dtype=torch.float32) if noise is None else noise(b)
            # the lost rows move behind the others, which keep their span
            order = lost.int().argsort(dim=1, stable=True)[:, :, None].expand_as(x)
            bases[b], _ = qr(torch.where(lost[:, :, None], rows.to(x.device), x).gather(1, order))
    return bases


def attempt(x: Rows, way: str, epsilon: float) -> tuple[Rows, Bool[Tensor, ""]]:
    """Returns (basis, whether it is valid): not if rows determine no direction or rounding has spoilt it."""
    if way == "authors":
        if x.shape[1] == 1:
            whole = torch.linalg.vector_norm(x)
            return x / whole.clamp(min=1e-16), whole.isfinite()
        way = "qr"
    if way == "auto":
        way = "gram_schmidt" if x.shape[1] == 1 else "cholesky_qr" if x.is_cuda else "qr"
    basis, share = {"qr": qr, "gram_schmidt": gram_schmidt, "cholesky_qr": cholesky_qr}[way](x)
    # the share of a zero row is NaN, and comparisons with NaN are false
    return basis, (share > (epsilon if way == "qr" or x.shape[1] == 1 else SAFE)).all()


def qr(x: Rows) -> tuple[Rows, Float32[Tensor, "B r"]]:
    """Returns (basis, share), as the next two. LAPACK expects columns: the transpose of x, which costs no copy."""
    q, r = torch.linalg.qr(x.mT)
    return q.mT, r.diagonal(dim1=1, dim2=2).abs() / torch.linalg.vector_norm(r, dim=1)


def gram_schmidt(x: Rows) -> tuple[Rows, Float32[Tensor, "B r"]]:
    basis = x.clone()
    before = torch.linalg.vector_norm(x, dim=2)
    left = []
    for i in range(x.shape[1]):
        row, rest = basis[:, i : i + 1], basis[:, i + 1 :]
        norm = torch.linalg.vector_norm(row, dim=2, keepdim=True)
        left.append(norm.view(-1))
        row.div_(norm)
        if rest.shape[1]:
            rest.baddbmm_(rest.bmm(row.mT), row, alpha=-1)
    return basis, torch.stack(left, dim=1) / before


def cholesky_qr(x: Rows) -> tuple[Rows, Float32[Tensor, "B r"]]:
    wide = x.double()
    gram = wide.bmm(wide.mT)
    L, info = torch.linalg.cholesky_ex(gram)
    identity = torch.eye(x.shape[1], dtype=wide.dtype, device=x.device).expand_as(gram)
    inverse = torch.linalg.solve_triangular(L, identity, upper=False)
    share = (L / gram.diagonal(dim1=1, dim2=2).sqrt()[:, :, None]).diagonal(dim1=1, dim2=2)
    return inverse.bmm(wide).float(), torch.where(info[:, None] == 0, share, 0.0).float()
