"""Low-rank gradients by singular value decomposition: the best approximation, and an unbiased one.

Of each matrix M [n, m], a tensor's shape[0] x rest, with M = sum of s_i a_i b_i^T:

    SVD     the r largest: sum over i <= r, with error feedback (Vogels et al. 2019, arXiv 1905.13727, as a bound
            of what PowerSGD can reach)
    Atomo   r of all, at random, so that i is chosen with probability p_i = min(1, c s_i), sum p_i = r, and
            s_i / p_i is sent: unbiased (Wang, Sievert, Charles, Liu, Wright, Papailiopoulos 2018,
            arXiv 1806.04090, Algorithm 1 with spectral atoms)

Each rank's factors are gathered by all. Payload of a bucket in bytes: 4 r (n + m) for each matrix (s_i goes into
a_i or b_i), 16 in all, rounded up to 8.

Differences from Atomo's paper: exactly r are chosen, one in each unit of the running sum of p_i (systematic
sampling), where independent draws are repeated until r come out, which is no longer unbiased.
"""

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from dgc.bucket import Bucket, Segment
from dgc.compression.coded import Coded, Codes


class SVD(Coded):
    """Takes tensors of two and more dimensions; others are sent as they are. rank: r, at most min(n, m)."""

    def __init__(self, rank: int = 2, error_feedback: bool = True, seed: int = 0):
        if rank < 1:
            raise ValueError(f"rank must be at least 1, not {rank}")
        super().__init__(error_feedback, seed)
        self.rank_limit = rank
        self._planned: dict[str, tuple[int, int]] = {}  # of each bucket: elements, bytes of its factors

    @property
    def compress_ratio(self) -> float:
        """Numbers of the factors over elements, of all planned buckets; 1 before any is planned."""
        elements = sum(numel for numel, _ in self._planned.values())
        return sum(nbytes for _, nbytes in self._planned.values()) / (4 * elements) if elements else 1.0

    def plan(self, bucket: Bucket, size: int, rank: int) -> None:
        super().plan(bucket, size, rank)
        self._planned[bucket.name] = (bucket.numel, self.nbytes(bucket))

    def accepts(self, segment: Segment) -> bool:
        n, m, r = self.sizes(segment)
        return len(segment.shape) > 1 and r * (n + m) < n * m

    def sizes(self, segment: Segment) -> tuple[int, int, int]:
        """(n, m, r)"""
        n = segment.shape[0] if segment.shape else 1
        m = segment.numel // max(1, n)
        return n, m, min(self.rank_limit, n, m)

    def nbytes(self, bucket: Bucket) -> int:
        return sum(4 * r * (n + m) for n, m, r in map(self.sizes, bucket.segments))

    def encode(self, v: Float32[Tensor, "n"], bucket: Bucket) -> tuple[Codes, Float32[Tensor, "n"]]:
        generator = torch.Generator().manual_seed(self.noise(bucket))
        kept, factors = v.clone(), [v.new_empty(0)]
        for s in bucket.segments:
            n, m, r = self.sizes(s)
            if r == 0:
                continue
            # as they will lie where they are decoded, so that the products have the same bits
            a, b = (f.contiguous() for f in self.factors(s.of(v).reshape(n, m), r, generator))
            s.of(kept).sub_((a @ b.T).view(s.shape))
            factors += [a.reshape(-1), b.reshape(-1)]
        return torch.cat(factors).view(torch.uint8), kept

    def factors(
        self, M: Float32[Tensor, "n m"], r: int, generator: torch.Generator
    ) -> tuple[Float32[Tensor, "n r"], Float32[Tensor, "m r"]]:
        U, _ = left_singular(M)
        return projected(M, U[:, :r])

    def add_(self, codes: Codes, bucket: Bucket, total: Float32[Tensor, "n"]) -> None:
        numbers, at = codes.clone().view(torch.float32), 0
        for s in bucket.segments:
            n, m, r = self.sizes(s)
            a, b = numbers[at : at + n * r].view(n, r), numbers[at + n * r : at + (n + m) * r].view(m, r)
            s.of(total).add_((a @ b.T).view(s.shape))
            at += (n + m) * r


class Atomo(SVD):
    """rank: how many are sent on average, and in fact."""

    def __init__(self, rank: int = 2, seed: int = 0):
        super().__init__(rank, False, seed)

    def factors(
        self, M: Float32[Tensor, "n m"], r: int, generator: torch.Generator
    ) -> tuple[Float32[Tensor, "n r"], Float32[Tensor, "m r"]]:
        U, s = left_singular(M)
        p = inclusion(s, r)
        start = torch.rand((), generator=generator, dtype=torch.float64)
        marks = start.to(p.device) + torch.arange(r, dtype=torch.int64, device=p.device)
        chosen = torch.searchsorted(p.cumsum(0), marks, right=True).clamp(max=s.numel() - 1)
        a, b = projected(M, U[:, chosen])
        return a / p[chosen].clamp(min=1e-30).float(), b


def left_singular(M: Float32[Tensor, "n m"]) -> tuple[Tensor, Tensor]:
    """(vectors in columns, values), fp64, the largest first, of M or, where it has fewer columns than rows, of
    M^T: the eigenvectors of M M^T, which take a fraction of a decomposition's time.
    """
    wide = (M if M.shape[0] <= M.shape[1] else M.T).double()
    squares, vectors = torch.linalg.eigh(wide @ wide.T)
    return vectors.flip(1), squares.flip(0).clamp(min=0).sqrt()


def projected(M: Float32[Tensor, "n m"], U: Tensor) -> tuple[Float32[Tensor, "n r"], Float32[Tensor, "m r"]]:
    """a b^T = U U^T M, or M U U^T."""
    U = U.float()
    return (U, M.T @ U) if M.shape[0] <= M.shape[1] else (M @ U, U)


def inclusion(s: Float[Tensor, "k"], r: int) -> Tensor:
    """p_i = min(1, c s_i) with sum r, fp64, for s in descending order: the largest that exceed 1 are cut in turn.

    Where fewer than r are not zero, those have 1, and zeros share the rest.
    """
    s = s.double() + s.double().sum() * 1e-12 + 1e-300
    rest = s.flip(0).cumsum(0).flip(0)  # sum of s_i, i >= j
    left = r - torch.arange(s.numel(), dtype=torch.int64, device=s.device)  # to be shared, once j are certain
    certain = (left > 0) & (left * s >= rest)
    j = int(certain.long().cumprod(0).sum())
    p = torch.ones_like(s)
    if j < min(r, s.numel()):
        p[j:] = (r - j) * s[j:] / rest[j]
    elif j < s.numel():
        p[j:] = 0.0
    return p
