"""Base class of compressors with a dense result: error feedback, seeds, and undo of dropped steps.

    v = g + e                 e: residual of earlier steps. NaN and TOO_LARGE in g count as zero and are flagged.
    (mean, e) = exchange(v)   mean over ranks of the sent values, and this rank's new residual
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.arguments import checked
from dgc.bucket import Bucket, Segment
from dgc.comm.requests import Conversation
from dgc.compression.dense import DenseCompressor
from dgc.compression.envelope import Envelope, envelope_of, first_nonfinite_message, overflow
from dgc.compression.protocol import Compressor, DenseResult, Result
from dgc.memory import MomentumCorrection
from dgc.state import FlatState, Snapshots, StepCounts, load_parts


def place_of_mean(bucket: Bucket) -> Float32[Tensor, "n"]:
    """Where to write an fp32 mean with its final bits: into the bucket, if it is of that type, without a copy."""
    if bucket.dtype is torch.float32:
        return bucket.flat
    return torch.empty(bucket.numel, dtype=torch.float32, device=bucket.device)


@checked
class ErrorFeedbackCompressor(ABC):
    """Base class of compressors with a dense result.

    Args:
        error_feedback (bool): keep what a step does not send and add it to the next gradient.
        seed (int): seed of all random numbers.

    Tensors that the method does not accept go to `fallback`.
    """

    correction: MomentumCorrection | None = None
    fallback: Compressor = DenseCompressor()

    def __init__(self, error_feedback: bool = True, seed: int = 0):
        self.error_feedback, self._seed = error_feedback, seed
        self._error, self._snapshots = FlatState("error"), Snapshots()
        self._steps = StepCounts()
        self._bounds: dict[str, Tensor] = {}
        self.size, self.rank = 1, 0

    @property
    @abstractmethod
    def compress_ratio(self) -> float: ...

    @abstractmethod
    def exchange(
        self, bucket: Bucket, v: Float32[Tensor, "n"], first_nonfinite: Int64[Tensor, ""]
    ) -> Conversation[tuple[Tensor, Tensor, list[int]]]:
        """Returns (mean [n] fp32, residual [n] fp32, for each rank its first non-finite tensor, from 1, or 0).

        v must not change, and the residual must be a separate tensor. The mean may be `place_of_mean(bucket)`.
        first_nonfinite: index of the first element of the gradient that was NaN or TOO_LARGE, or n if there is
        none.
        """
        ...

    def accepts(self, segment: Segment) -> bool:
        return True

    def plan(self, bucket: Bucket, size: int, rank: int) -> None:
        self.size, self.rank = size, rank
        if self.error_feedback:
            self._error.add(bucket)
        self._steps[bucket] = 0
        self._bounds[bucket.name] = torch.tensor(
            [*(s.offset for s in bucket.segments), bucket.numel], dtype=torch.int64, device=bucket.device
        )

    def bounds(self, bucket: Bucket) -> Int64[Tensor, "bounds"]:
        """Start of each tensor in the bucket, and n."""
        return self._bounds[bucket.name]

    def begin_epoch(self, epoch: int) -> None:
        return None

    def accumulate(self, bucket: Bucket) -> tuple[Float32[Tensor, "n"], Int64[Tensor, ""]]:
        """Returns v, and the first_nonfinite of `exchange`. Called once per step."""
        if self.error_feedback:
            v = self._error[bucket]
        else:
            v = torch.zeros(bucket.numel, dtype=torch.float32, device=bucket.device)
        return v, kernels.of(v).selection.accumulate_(kernels.PassInputs(bucket.gradients, None, v))

    def reduce(self, bucket: Bucket) -> Conversation[Result]:
        self._snapshots.forget(bucket)
        v, first = self.accumulate(bucket)
        bucket.release()
        mean, kept, nonfinite = yield from self.exchange(bucket, v, first)
        self._steps[bucket] += 1
        if self.error_feedback:
            self._snapshots.replace(self._error, bucket, kept)
        bucket.flat.copy_(mean)
        return DenseResult(first_nonfinite_message(bucket, nonfinite) or (yield from overflow(bucket)))

    def rollback(self, bucket: Bucket) -> None:
        self._snapshots.rollback(bucket)

    def envelope(self, bucket: Bucket) -> Envelope:
        """The envelope of this bucket's payloads."""
        return envelope_of(bucket, self.bounds(bucket), self.compress_ratio, type(self).__qualname__)

    def noise(self, bucket: Bucket, *, shared: bool = False) -> int:
        """A 32-bit seed for this bucket and step: different on each rank, or `shared` by all."""
        owner = "all" if shared else self.rank
        return crc32(f"{self._seed} {owner} {bucket.segments[0].name} {self._steps[bucket]}".encode())

    def errors(self) -> Iterator[Tensor]:
        return iter(self._error)

    def state_dict(self) -> dict[str, Any]:
        return {"errors": self._error.state_dict(), "steps": self._steps.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != {"errors", "steps"}:
            raise ValueError(f"state of another compressor: {sorted(state)}")
        load_parts({"errors": self._error}, {"errors": state["errors"]})
        self._steps.load_state_dict(state["steps"])
