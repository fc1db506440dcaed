"""Coarse-grained sparse communication, CSC (Sun, Feng, Han, Yan, Wen: GradientFlow, 2019, arXiv 1902.06855): whole
chunks of the gradients are sent or kept, the same ones on every rank.

On each of N ranks, with local gradient g and residual v of the memory, for a bucket of n elements:

    v = memory(v, g)                              error feedback: v + g; DGC: v + (m u + g)
    s_c = sum over ranks of |v of chunk c|_1      all-reduce of one number per chunk
    S = the k chunks of largest s_c               the same on every rank; of equal sums the first
    send v_S;  memory: v_S = 0                    one dense all-reduce of k chunks, without indices
    result = 1/N * sum over ranks

There are M = ceil(n / chunk_size) chunks of C = ceil(n / M) elements. The last one may be shorter, by less than M.
k = ceil(D M) for the ratio D, so at least one. Chunks cross the bounds of tensors, as in the paper's memory pool.

Payload of a bucket in bytes: 24 for a header, 4 M for the sums, and b k C for the chunks, with b = 2 (fp16) or 4
(fp32). If 4 M + b k C >= b n, or D = 1: all of v, b n, and the header. For fp16, magnitudes are limited to
65504 / (2 N), so that a sum stays in range. What the limit and the rounding take stays in the memory.

Differences from the paper: The sums choose the chunks of the same step, in a round of its own. The paper uses the
sums of the step before, so that no rank waits for them. They are then out of date, and state to be saved and
undone. The paper has one pool of all gradients, here every bucket is one. Vectors are sent dense, by `fallback`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.comm.requests import AllReduce, Conversation, read
from dgc.core.arguments import WHOLE, require
from dgc.core.bucket import Bucket
from dgc.core.envelope import Flags
from dgc.core.protocol import check_choice
from dgc.core.results import DenseResult, Reduced, SparseResult, first_nonfinite_message, sparse_overflow_message
from dgc.kernels import Merged, SparseVector
from dgc.sparse.compressor import SparseCompressor
from dgc.sparse.memories import Memory, SparseState
from dgc.sparse.payloads import CastValues
from dgc.sparse.payloads.payload import PayloadPlan
from dgc.sparse.selectors.selector import share
from dgc.sparse.sums import placed


@dataclass(frozen=True)
class Chunks:
    """Division of a bucket into `number` chunks of `length` elements, of which `sent` are sent."""

    numel: int
    number: int
    length: int
    sent: int

    def bounds(self, device: torch.device) -> Int64[Tensor, "bounds"]:
        starts = torch.arange(self.number + 1, dtype=torch.int64, device=device) * self.length
        return starts.clamp(max=self.numel)


def divide(numel: int, chunk_size: int, ratio: float) -> Chunks:
    """Divide `numel` elements into chunks of nearly equal length, at most `chunk_size`."""
    number = -(-numel // chunk_size)
    return Chunks(numel, number, -(-numel // max(1, number)), share(number, ratio))


def largest(sums: Float32[Tensor, "number"], k: int) -> Int64[Tensor, "k"]:
    """Return the ascending numbers of the k chunks with the largest sums, the first ones of equal sums."""
    return sums.sort(descending=True, stable=True).indices[:k].sort().values


class ChunkCompressor(SparseCompressor):
    """Sends whole chunks of the residual, the same on every rank, by an all-reduce (CSC, Sun et al. 2019).

    The bytes hardly grow with the number of ranks. A chunk has small elements too, so that it takes larger ratios
    than DGC, of 0.1 to 0.2.

    Args:
        compress_ratio (float): fraction of a bucket's chunks to send, at least one; above 1 the factor saved.
        memory, warmup_epochs, warmup_coeff: as in `SparseCompressor`. DGCSGDMemory corrects the momentum, as in
            the paper.
        chunk_size (int): largest number of elements of a chunk. A bucket of one chunk is sent dense.
        dtype (str): type of the sums over ranks, "fp16" or "fp32".

    Raises:
        ValueError: if an argument has a wrong type or is out of range; the message names it.

    Example:
        >>> compression = ChunkCompressor(0.1, memory=DGCSGDMemory(momentum=0.9), warmup_epochs=5)
        >>> optimizer = DistributedOptimizer(optimizer, model.named_parameters(), compression)
    """

    def __init__(
        self,
        compress_ratio: float,
        memory: Memory | str,
        chunk_size: int = 32768,
        dtype: str = "fp16",
        *,
        warmup_epochs: int = -1,
        warmup_coeff: float | Sequence[float] | None = None,
    ):
        require("a whole number of elements", WHOLE, chunk_size=chunk_size)
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be 1 element or more, not {chunk_size}")
        check_choice(("fp16", "fp32"), dtype=dtype)
        self.chunk_size, self.cast = chunk_size, CastValues(dtype)
        super().__init__(
            compress_ratio, memory, values=self.cast, warmup_epochs=warmup_epochs, warmup_coeff=warmup_coeff
        )

    def init(self, bucket: Bucket, size: int, rank: int) -> SparseState:
        bounds = divide(bucket.numel, self.chunk_size, 1.0).bounds(bucket.device)
        return replace(super().init(bucket, size, rank), constants={"bounds": bounds})

    def reduce(self, bucket: Bucket, state: SparseState) -> Conversation[Reduced]:
        replaced = None if self.memory.gradient_clipping is None else (yield from self.memory.clip(bucket))
        inputs, state = self._begin(bucket, state)
        if state.dense:
            return (yield from self._reduce_dense(bucket, state, inputs, replaced))
        v, backend = inputs.v, kernels.of(inputs.v)
        first_nonfinite = backend.selection.accumulate_(inputs)
        first_nonfinite = first_nonfinite if replaced is None else replaced.minimum(first_nonfinite)
        bucket.release()  # the gradients are accumulated and need no copy
        chunks = divide(bucket.numel, self.chunk_size, state.exchange.payload.ratio)
        norms = backend.selection.moments(v, state.constants["bounds"]).magnitudes.float()
        sums, flags = yield from state.exchange.envelope.reduce(norms, first_nonfinite, "sum")
        if flags.values is not None and (invalid := first_nonfinite_message(bucket, flags.values)):
            return Reduced(DenseResult(invalid), state, dropped=state)  # every rank drops the step
        chosen = largest(sums, chunks.sent)
        within = torch.arange(chunks.length, dtype=torch.int64, device=v.device)
        indices = (chosen.unsqueeze(1) * chunks.length + within).view(-1)
        if flags.values is None:
            return (yield from self._exchange_on_device(bucket, state, v, indices, flags))
        elements = torch.cat([v[c * chunks.length :][: chunks.length] for c in chosen.tolist()])
        count = elements.numel()
        indices = indices[:count]  # a shorter chunk is the last
        values = self.cast.quantize(elements, state.size, bucket.dtype)
        message = torch.zeros(chunks.sent * chunks.length, dtype=values.dtype, device=v.device)
        message[:count] = values
        number = torch.full((), count, dtype=torch.int32, device=v.device)
        sent = SparseVector(indices.to(torch.int32), values.float(), number)
        (mean,) = yield (AllReduce(message),)
        means = mean[:count].float()
        (finite,) = yield from read([means.isfinite().all()])
        overflow = None if finite else sparse_overflow_message(bucket, indices, means)
        return Reduced(SparseResult(indices, means, overflow), state.after(sent), dropped=state)

    def _exchange_on_device(
        self, bucket: Bucket, state: SparseState, v: Tensor, indices: Int64[Tensor, "k"], flags: Flags
    ) -> Conversation[Reduced]:
        """As the end of `reduce`, where the host does not know which chunks are sent. indices: of whole chunks."""
        inside = indices < bucket.numel
        elements = torch.where(inside, v[indices.clamp(max=bucket.numel - 1)], 0.0)
        values, count = self.cast.quantize(elements, state.size, bucket.dtype), inside.sum(dtype=torch.int32)
        sent = SparseVector(torch.where(inside, indices, 0).to(torch.int32), values.float(), count)
        (mean,) = yield (AllReduce(values.clone()),)
        result = placed(bucket, Merged(indices, mean.float(), count), flags)
        return Reduced(result, state.after(sent), dropped=state)

    def _dense_is_cheaper(self, payload: PayloadPlan, size: int) -> bool:
        chunks, itemsize = divide(payload.numel, self.chunk_size, payload.ratio), self.cast.itemsize
        sparse = chunks.number * torch.float32.itemsize + chunks.sent * chunks.length * itemsize
        return payload.ratio >= 1 or sparse >= payload.numel * itemsize
