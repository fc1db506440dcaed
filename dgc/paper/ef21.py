"""EF21 with momentum as EF21-Muon writes it: Gruntkowska, Gaponov, Tovmasyan, Richtárik 2025, arXiv 2510.00643,
Algorithm 3, with an uncompressed model. The fast implementation is `dgc.compression.EF21Compressor`.

Worker j of n, with its gradient, its momentum M_j and estimate G_j, and the mean G of the estimates:

    M_j = (1 - beta) M_j + beta gradient
    R_j = C(M_j - G_j);   G_j = G_j + R_j
    G   = G + 1/n sum over j of R_j                the step is along G

C keeps the D largest elements of each tensor.
"""

from math import ceil

import torch

from dgc.comm.requests import AllGather, Conversation
from dgc.core.bucket import Bucket
from dgc.core.results import Reduced
from dgc.core.state import State, zeros
from dgc.paper.feedback import ErrorFeedback, gradient_of, parts_of, result_of, sparse_sum


class EF21(ErrorFeedback):
    """compress_ratio: D. A dropped step leaves the state as it was."""

    def __init__(self, compress_ratio: float, beta: float):
        self.compress_ratio, self.beta = compress_ratio, beta

    def init(self, bucket: Bucket, size: int, rank: int) -> State:
        return State(size, rank, local={name: zeros(bucket) for name in ("M_j", "G_j", "G")})

    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        (gradient, bad), M_j, G_j, G = gradient_of(bucket), *(state.local[name] for name in ("M_j", "G_j", "G"))
        M_j = (1 - self.beta) * M_j + self.beta * gradient
        rest = M_j - G_j
        sorted_parts = (part.abs().sort(descending=True, stable=True).indices for part in parts_of(bucket, rest))
        counts = [ceil(self.compress_ratio * j.numel * (1 - 1e-9)) for j in bucket.segments]
        pairs = zip(bucket.segments, sorted_parts, counts, strict=True)
        chosen = torch.cat([j.offset + largest[:k] for j, largest, k in pairs])
        R_j = rest[chosen]
        G_j = G_j.index_add(0, chosen, R_j)
        indices, values, flags = yield (AllGather(chosen), AllGather(R_j), AllGather(bad))
        G = G + sparse_sum(indices, values, G) / len(values)
        after = state.next(local={"M_j": M_j, "G_j": G_j, "G": G})
        return Reduced(result_of(bucket, G, flags), after, dropped=state)
