"""Base class of compressors with a dense result: error feedback, and seeds.

v = g + e                 e: residual of earlier steps. NaN and TOO_LARGE in g count as zero and are flagged.
(mean, e) = exchange(v)   mean over ranks of the sent values, and this rank's new residual
"""

from abc import abstractmethod
from zlib import crc32

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.arguments import checked
from dgc.bucket import Bucket
from dgc.comm.requests import Conversation
from dgc.compression.dense import DenseCompressor
from dgc.compression.nonfinite import first_nonfinite_message
from dgc.compression.protocol import Compressor, DenseResult, Reduced
from dgc.state import State, zeros
from dgc.wire.envelope import Envelope, envelope_of


def place_of_mean(bucket: Bucket) -> Float32[Tensor, "n"]:
    """Where to write an fp32 mean with its final bits: into the bucket, if it is of that type, without a copy."""
    if bucket.dtype is torch.float32:
        return bucket.flat
    return torch.empty(bucket.numel, dtype=torch.float32, device=bucket.device)


@checked
class ErrorFeedbackCompressor(Compressor):
    """Base class of compressors with a dense result.

    Args:
        error_feedback (bool): keep what a step does not send and add it to the next gradient.
        seed (int): seed of all random numbers.

    Tensors that the method does not accept go to `fallback`.
    """

    fallback: Compressor = DenseCompressor()

    def __init__(self, error_feedback: bool = True, seed: int = 0):
        self.error_feedback, self._seed = error_feedback, seed

    @property
    @abstractmethod
    def compress_ratio(self) -> float: ...

    @abstractmethod
    def exchange(
        self, bucket: Bucket, state: State, v: Float32[Tensor, "n"], first_nonfinite: Int64[Tensor, ""]
    ) -> Conversation[tuple[Tensor, Tensor, list[int]]]:
        """Returns (mean [n] fp32, residual [n] fp32, for each rank its first non-finite tensor, from 1, or 0).

        v must not change, and the residual must be a separate tensor. The mean may be `place_of_mean(bucket)`.
        first_nonfinite: index of the first element of the gradient that was NaN or TOO_LARGE, or n if there is
        none.
        """
        ...

    def init(self, bucket: Bucket, size: int, rank: int) -> State:
        return State(size, rank, errors={"errors": zeros(bucket)} if self.error_feedback else {})

    def accumulate(self, bucket: Bucket, state: State) -> tuple[Float32[Tensor, "n"], Int64[Tensor, ""]]:
        """Returns v, and the first_nonfinite of `exchange`. With error feedback v is the residual, in place."""
        v = state.errors["errors"] if self.error_feedback else zeros(bucket)
        return v, kernels.of(v).selection.accumulate_(kernels.PassInputs(bucket.gradients, None, v))

    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        v, first = self.accumulate(bucket, state)
        bucket.release()
        mean, kept, nonfinite = yield from self.exchange(bucket, state, v, first)
        bucket.flat.copy_(mean)
        result = DenseResult(first_nonfinite_message(bucket, nonfinite))
        errors = {"errors": kept} if self.error_feedback else {}
        return Reduced(result, state.next(errors=errors), dropped=state.next())

    def envelope(self, bucket: Bucket) -> Envelope:
        """The envelope of this bucket's payloads."""
        return envelope_of(bucket, bucket.bounds, self.compress_ratio, type(self).__qualname__)

    def noise(self, bucket: Bucket, state: State, *, shared: bool = False) -> int:
        """A 32-bit seed for this bucket and step: different on each rank, or `shared` by all."""
        owner = "all" if shared else state.rank
        return crc32(f"{self._seed} {owner} {bucket.segments[0].name} {state.steps}".encode())
