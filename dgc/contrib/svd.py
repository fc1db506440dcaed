"""Low-rank gradients by singular value decomposition: the best approximation, and an unbiased one.

The matrix M [n, m] of a tensor is shape[0] x rest, with M = sum of s_i a_i b_i^T. Codes: 4 r (n + m) bytes for
each matrix; s_i is part of a_i or b_i.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from dgc.core.arguments import checked
from dgc.core.bucket import Bucket, Segment
from dgc.core.error_feedback import AllGatherCompressor, Codes, clone
from dgc.core.protocol import Vector
from dgc.core.state import State


@checked
class SVDCompressor(AllGatherCompressor):
    """The best approximation of rank r: the r largest of s_i a_i b_i^T, with error feedback.

    Vogels et al. 2019 (arXiv 1905.13727) have it as an upper bound for the quality of PowerSGD. Tensors of less
    than two dimensions are sent uncompressed.

    Args:
        rank (int): r, limited to min(n, m) for each matrix.
        error_feedback, seed: as `ErrorFeedbackCompressor`. Only `AtomoCompressor` makes random choices.

    Raises:
        ValueError: if rank is less than 1.
    """

    bits = 32  # the most for a tensor; the number of a run depends on the shapes of its tensors

    def __init__(self, rank: int = 2, error_feedback: bool = True, seed: int = 0):
        if rank < 1:
            raise ValueError(f"rank must be at least 1, not {rank}")
        super().__init__(error_feedback, seed)
        self.rank_limit = rank

    def ratio_of(self, states: Sequence[tuple[Bucket, State]]) -> float:
        elements = sum(bucket.numel for bucket, _ in states)
        return sum(self.nbytes(bucket) for bucket, _ in states) / (4 * elements) if elements else 1.0

    def accepts(self, segment: Segment) -> bool:
        n, m, r = self.sizes(segment)
        return len(segment.shape) > 1 and r * (n + m) < n * m

    def sizes(self, segment: Segment) -> tuple[int, int, int]:
        """Returns (n, m, r)."""
        n = segment.shape[0] if segment.shape else 1
        m = segment.numel // max(1, n)
        return n, m, min(self.rank_limit, n, m)

    def nbytes(self, bucket: Bucket) -> int:
        return sum(4 * r * (n + m) for n, m, r in map(self.sizes, bucket.segments))

    def encode(self, bucket: Bucket, state: State, v: Vector) -> tuple[Codes, Vector]:
        generator = torch.Generator().manual_seed(self.noise(bucket, state))
        kept, factors = clone(v, state), [v.new_empty(0)]
        for s in bucket.segments:
            n, m, r = self.sizes(s)
            if r == 0:
                continue
            M = s.of(v).reshape(n, m)
            vectors, values = left_singular(M)
            chosen, p = self.choose(values, r, generator)
            U = vectors[:, chosen].float()
            a, b = (U, M.T @ U) if n <= m else (M @ U, U)  # a b^T = U U^T M, or M U U^T
            # the same memory layout as at the decoder, so that the products have the same bits
            a, b = (a if p is None else a / p).contiguous(), b.contiguous()
            s.of(kept).sub_((a @ b.T).view(s.shape))
            factors += [a.reshape(-1), b.reshape(-1)]
        return torch.cat(factors).view(torch.uint8), kept

    def choose(self, s: Float[Tensor, "k"], r: int, generator: torch.Generator) -> tuple[Any, Tensor | None]:
        """Which r of the singular values are sent, and the probability of each."""
        return slice(r), None

    def mean_(self, bucket: Bucket, state: State, codes: Sequence[Codes], mean: Vector) -> None:
        mean.zero_()
        for own in codes:
            factors, at = own.clone().view(torch.float32), 0
            for s in bucket.segments:
                n, m, r = self.sizes(s)
                a, b = factors[at : at + (n + m) * r].view(n + m, r).split([n, m])
                s.of(mean).add_((a @ b.T).view(s.shape))
                at += (n + m) * r
        mean.div_(state.size)


@checked
class AtomoCompressor(SVDCompressor):
    """Atomo (Wang, Sievert, Charles, Liu, Wright, Papailiopoulos 2018, arXiv 1806.04090, Algorithm 1 with spectral
    atoms): r of all s_i a_i b_i^T, at random and unbiased.

    i is chosen with probability p_i = min(1, c s_i), sum p_i = r, and s_i / p_i is sent.

    Differences from the paper: Exactly r are chosen, one in each unit of the running sum of p_i. The paper repeats
    independent draws until r are chosen, which is no longer unbiased. Args, Raises: as `SVDCompressor`.
    """

    def __init__(self, rank: int = 2, seed: int = 0):
        super().__init__(rank, False, seed)

    def choose(self, s: Float[Tensor, "k"], r: int, generator: torch.Generator) -> tuple[Any, Tensor | None]:
        p = inclusion(s, r)
        start = torch.rand((), generator=generator, dtype=torch.float64)
        marks = start.to(p.device) + torch.arange(r, dtype=torch.int64, device=p.device)
        chosen = torch.searchsorted(p.cumsum(0), marks, right=True).clamp(max=s.numel() - 1)
        return chosen, p[chosen].clamp(min=1e-30).float()


def left_singular(M: Float32[Tensor, "n m"]) -> tuple[Tensor, Tensor]:
    """Returns (vectors in columns, values) of M, or of M^T if that is wider, in fp64, largest value first.

    They are eigenvectors of M M^T, which takes a fraction of the time of a decomposition.
    """
    wide = (M if M.shape[0] <= M.shape[1] else M.T).double()
    squares, vectors = torch.linalg.eigh(wide @ wide.T)
    return vectors.flip(1), squares.flip(0).clamp(min=0).sqrt()


def inclusion(s: Float[Tensor, "k"], r: int) -> Tensor:
    """Probabilities p_i = min(1, c s_i) with sum r, fp64, for s in descending order. If fewer than r of s are
    nonzero, these get 1, and the zeros share the rest.
    """
    s = s.double() + s.double().sum() * 1e-12 + 1e-300
    rest = s.flip(0).cumsum(0).flip(0)  # sum of s_i, i >= j
    left = r - torch.arange(s.numel(), dtype=torch.int64, device=s.device)  # after j certain ones
    certain = (left > 0) & (left * s >= rest)
    j = int(certain.long().cumprod(0).sum())
    p = torch.ones_like(s)
    if j < min(r, s.numel()):
        p[j:] = (r - j) * s[j:] / rest[j]
    elif j < s.numel():
        p[j:] = 0.0
    return p
