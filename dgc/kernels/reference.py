"""The operations of the hot path in plain torch: the definition that faster tiers must meet."""

from bisect import bisect_right
from collections.abc import Sequence

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor


def correct_momentum_(
    g: Float[Tensor, "n"], u: Float32[Tensor, "n"], v: Float32[Tensor, "n"], momentum: float, nesterov: bool
) -> None:
    """Momentum correction and accumulation (Lin et al. 2018, eq. 4), in place.

    plain: u = m u + g; v = v + u.  Nesterov: u = m (u + g); v = v + u + g.
    """
    g = g.to(u.dtype)
    if nesterov:
        u.add_(g).mul_(momentum)
        v.add_(u).add_(g)
    else:
        u.mul_(momentum).add_(g)
        v.add_(u)


def remove_nonfinite_(g: Float[Tensor, "n"], offsets: Sequence[int]) -> int:
    """Set NaN and inf in g to zero. `offsets`: where each tensor begins.

    Returns the number, from 1, of the first tensor that had any; 0 when all is finite.
    """
    number = first_nonfinite(g, offsets)
    if number:
        torch.nan_to_num_(g, 0.0, 0.0, 0.0)
    return number


def first_nonfinite(g: Float[Tensor, "n"], offsets: Sequence[int]) -> int:
    """The number, from 1, of the first tensor in g that has NaN or inf; 0 when all is finite."""
    finite = torch.isfinite(g)
    if bool(finite.all()):
        return 0
    return bisect_right(offsets, int((~finite).nonzero()[0]))


def largest(v: Float[Tensor, "n"], k: int) -> Int64[Tensor, "found"]:
    """Ascending indices of the k elements of largest magnitude in v. Zeros are never chosen."""
    if k == 0 or v.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device=v.device)
    magnitudes, indices = torch.topk(v.abs(), min(k, v.numel()), sorted=False)
    return indices[magnitudes > 0].sort().values


def above(v: Float[Tensor, "n"], threshold: Float[Tensor, ""]) -> Int64[Tensor, "found"]:
    """Ascending indices of the non-zero elements of v with |v| >= threshold."""
    magnitudes = v.abs()
    return ((magnitudes >= threshold) & (magnitudes > 0)).nonzero().view(-1)


def merge_mean(
    parts: Sequence[tuple[Tensor, Tensor]], size: int
) -> tuple[Int64[Tensor, "k"], Float32[Tensor, "k"]]:
    """The mean over `size` ranks of sparse vectors.

    parts: (indices int64, values fp32) of each rank, unique indices within one rank. Returns unique ascending
    indices and values. Values of one index are added in the order of the parts, so that every rank that
    merges the same parts gets the same bits.
    """
    indices, where = torch.unique(torch.cat([i for i, _ in parts]), sorted=True, return_inverse=True)
    values = torch.zeros(indices.numel(), dtype=torch.float32, device=indices.device)
    start = 0
    for own, own_values in parts:
        values.index_add_(0, where[start : start + own.numel()], own_values)
        start += own.numel()
    return indices, values.div_(size)
