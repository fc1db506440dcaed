"""LDTE-BS: Laplace distribution, threshold estimation, binary search (Chen, Liu, Han 2021, J. Zhejiang Univ. Eng.
Sci. 55(2):386-394, doi 10.3785/j.issn.1008-973X.2021.02.019). Of the paper its abstract, tables and captions are
public; what they leave open is marked *.

On each of N ranks, with the local gradient g, the residual e and a ratio D:

    v = e + g
    for each tensor of n elements, with k = ceil(D n):
        b = mean |v|                             the maximum-likelihood scale of the density exp(-|x|/b) / 2b
        t = b ln(n / k)                          its area beyond +-t is exp(-t / b)
        until lower k <= c <= upper k *, with c = #{|v| >= t}:
            as long as all have had too many:  t = t + max(b ln(c / k), b / 10) *
            then:                              t = the middle of the last t of too many and the last of too few
        sent = v where |v| >= t, else 0
    e = v - sent;   result = 1/N sum over ranks of sent

Payload of a bucket in bytes: 12 sum over tensors of k, and 8. dgc.sparse.selectors.Laplace with ResidualMemory on
a CPU gives the same bits for a bucket of one tensor. In one of several a tensor may fill what others leave of
their k.

Differences from the paper: a message has room for k elements of each tensor, so that every rank's has the same
length. What reaches t beyond k waits, smallest magnitudes first. What is not finite: see feedback.py.
"""

from math import ceil, log

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from dgc.comm.requests import AllGather, Conversation
from dgc.core.bucket import Bucket
from dgc.core.results import Reduced
from dgc.core.state import State
from dgc.paper.feedback import ErrorFeedback, gradient_of, parts_of, result_of, sparse_sum


class LDTEBS(ErrorFeedback):
    """compress_ratio: D. lower, upper: counts that are accepted, by k. passes: counts at most."""

    def __init__(self, compress_ratio: float, lower: float = 0.8, upper: float = 1.25, passes: int = 12):
        self.compress_ratio, self.lower, self.upper, self.passes = compress_ratio, lower, upper, passes

    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        (g, bad), e = gradient_of(bucket), state.errors["e"]
        v = e + g
        ks = [ceil(self.compress_ratio * s.numel * (1 - 1e-9)) for s in bucket.segments]
        indices, values = v.new_zeros(sum(ks), dtype=torch.int64), v.new_zeros(sum(ks))
        tensors = zip(bucket.segments, parts_of(bucket, v), ks, strict=True)
        chosen = torch.cat([s.offset + self.select(v_j.abs(), k) for s, v_j, k in tensors])
        indices[: len(chosen)], values[: len(chosen)] = chosen, v[chosen]
        e = v.index_fill(0, chosen, 0.0)
        indices, values, flags = yield (AllGather(indices), AllGather(values), AllGather(bad))
        result = result_of(bucket, sparse_sum(indices, values, v) / len(values), flags)
        return Reduced(result, state.next(errors={"e": e}), state.next(errors={"e": v}))

    def select(self, a: Float32[Tensor, "n"], k: int) -> Int64[Tensor, "count"]:
        """Indices of at most k of one tensor's magnitudes that reach the threshold, the largest first."""
        t = self.threshold(a, k) if k else a.new_zeros(())
        largest, where = a.sort(descending=True, stable=True)
        return where[(largest >= t) & (largest > 0)][:k]

    def threshold(self, a: Float32[Tensor, "n"], k: int) -> Float32[Tensor, ""]:
        """t; where no count is accepted, the last that had too many."""
        b, low, high = a.mean(dtype=torch.float64), a.new_zeros(()), a.max()
        t, had_too_few = (b * log(len(a) / k)).float().minimum(high), False
        for _ in range(self.passes):
            c = (a >= t).sum()
            if self.lower * k <= c <= self.upper * k:
                return t
            low, high, had_too_few = (t, high, had_too_few) if c > self.upper * k else (low, t, True)
            t = low + (b * (c.float() / k).log()).maximum(b / 10).float()
            if had_too_few or t >= high:
                t = low + (high - low) / 2
            if not low < t < high:
                break
        return low
