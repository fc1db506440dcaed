"""Deep Gradient Compression (Lin, Han, Mao, Wang, Dally: ICLR 2018, arXiv 1712.01887) as its paper writes it.

Algorithm 1 with local gradient clipping and momentum correction (section 3.2), momentum factor masking and warm-up
training (section 3.3). On node k of N, with the gradient G of its own mini-batch and a ratio D:

    G[j] = G[j] min(1, thr_G / ||G[j]||)         of each tensor j
    U = m U + G,  V = V + U                      Nesterov: U = m (U + G),  V = V + U + G
    for each tensor j of n elements:
        Mask = |V[j]| >= thr                     thr: the magnitude that ceil(D n) elements reach
        G~[j] = V[j] * Mask,  V[j] = V[j] * not Mask,  U[j] = U[j] * not Mask
    G = 1/N sum over k of G~                     warm-up: D = max(0.25 ** (epoch + 1), final D)

Payload of a bucket in bytes: 12 sum over tensors of ceil(D n), and 8. dgc.compression.DGCCompressor on a CPU gives
the same bits with an exact selector, fp32 values and plain indices, in steps that it sends sparse.

Differences from the paper: the factor 1/N is applied last. Of equal magnitudes the first ones are sent, and never
a zero. Selection is exact, where the paper suggests to take thr from a sample. ||G|| is increased by 1e-6. Vectors
travel dense, as in the authors' code, and are not clipped. What is not finite: see feedback.py.
"""

from math import ceil

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from dgc.comm.requests import AllGather, Conversation
from dgc.core.bucket import Bucket, Segment
from dgc.core.dense import DenseCompressor
from dgc.core.protocol import MomentumCorrection
from dgc.core.results import Reduced
from dgc.core.state import State
from dgc.paper.feedback import ErrorFeedback, gradient_of, parts_of, result_of, sparse_sum


class DGC(ErrorFeedback):
    """compress_ratio: D. momentum: m. masking: of U. thr_G: local limit, N ** -0.5 of the global one, or None."""

    error, others, fallback = "V", ("U",), DenseCompressor()

    def __init__(
        self,
        compress_ratio: float,
        momentum: float = 0.9,
        nesterov: bool = False,
        masking: bool = True,
        thr_G: float | None = None,
        warmup_epochs: int = 0,
    ):
        self.D, self.m, self.nesterov, self.masking = compress_ratio, momentum, nesterov, masking
        self.thr_G, self.warmup, self.correction = thr_G, warmup_epochs, MomentumCorrection(momentum, nesterov)
        self.compress_ratio = self.D

    def accepts(self, segment: Segment) -> bool:
        return len(segment.shape) > 1

    def in_epoch(self, epoch: int) -> "DGC":
        D = max(0.25 ** (epoch + 1), self.D) if epoch < self.warmup else self.D
        return self.changed(compress_ratio=D) if self.warmup else self

    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        (G, bad), U, V, m = gradient_of(bucket), state.local["U"], state.errors["V"], self.m
        if self.thr_G is not None:
            G = torch.cat([G_j * (self.thr_G / (G_j.norm() + 1e-6)).clamp(max=1) for G_j in parts_of(bucket, G)])
        U = m * (U + G) if self.nesterov else m * U + G
        V = V + U + G if self.nesterov else V + U  # momentum correction
        unsent = state.next(local={"U": U}, errors={"V": V})
        tensors = zip(bucket.segments, parts_of(bucket, V), strict=True)
        chosen = torch.cat([j.offset + self.largest(V_j) for j, V_j in tensors])
        Mask = (V != 0) & torch.zeros_like(V, dtype=torch.bool).index_fill(0, chosen, True)
        U, rest = U.masked_fill(Mask & self.masking, 0.0), V.masked_fill(Mask, 0.0)  # not Mask
        indices, values, flags = yield (AllGather(chosen), AllGather(V[chosen]), AllGather(bad))
        result = result_of(bucket, sparse_sum(indices, values, V) / len(values), flags)
        return Reduced(result, state.next(local={"U": U}, errors={"V": rest}), dropped=unsent)

    def largest(self, V_j: Float32[Tensor, "n"]) -> Int64[Tensor, "k"]:
        """Indices of the k = ceil(D n) largest magnitudes, blind to the rounding of D n: 7% of 100 are 7."""
        k = ceil(self.compress_ratio * V_j.numel() * (1 - 1e-9))
        return V_j.abs().sort(descending=True, stable=True).indices[:k]
