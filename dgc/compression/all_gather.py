"""Base class of compressors that send a code for every element. All ranks gather all codes and sum them in rank
order.

Payload of a bucket in bytes: 24 + `nbytes`, rounded up to 8.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from dgc.bucket import Bucket
from dgc.comm.requests import Conversation
from dgc.compression.error_feedback import ErrorFeedbackCompressor, place_of_mean
from dgc.state import State

Codes = UInt8[Tensor, "nbytes"]


class AllGatherCompressor(ErrorFeedbackCompressor):
    """Base class of compressors with one code per element.

    bits: bits per code. The nominal ratio is bits / 32 unless a subclass overrides it.
    """

    bits: float

    @property
    def compress_ratio(self) -> float:
        return self.bits / 32

    @abstractmethod
    def nbytes(self, bucket: Bucket) -> int:
        """Bytes of the codes, the same on every rank and in every step."""
        ...

    @abstractmethod
    def encode(self, bucket: Bucket, state: State, v: Float32[Tensor, "n"]) -> tuple[Codes, Float32[Tensor, "n"]]:
        """Returns (codes, v minus the decoded codes)."""
        ...

    @abstractmethod
    def mean_(self, bucket: Bucket, state: State, codes: Sequence[Codes], mean: Float32[Tensor, "n"]) -> None:
        """Overwrites `mean` with the mean of the decoded codes of all ranks: added to zero in rank order."""
        ...

    def exchange(
        self, bucket: Bucket, state: State, v: Float32[Tensor, "n"], first_nonfinite: Int64[Tensor, ""]
    ) -> Conversation[tuple[Tensor, Tensor, list[int]]]:
        codes, kept = self.encode(bucket, state, v)
        parts, nonfinite = yield from self.envelope(bucket).gather(codes, first_nonfinite)
        mean = place_of_mean(bucket)
        self.mean_(bucket, state, parts, mean)
        return mean, kept, nonfinite


def join(header: Float32[Tensor, "length"], codes: Codes) -> UInt8[Tensor, "both"]:
    """The bytes of a header, followed by codes."""
    return torch.cat([header.contiguous().view(torch.uint8), codes])


def split(both: UInt8[Tensor, "both"], length: int) -> tuple[Float32[Tensor, "length"], Codes]:
    """Inverse of `join` for a header of `length` floats, which is copied because it may be unaligned."""
    edge = 4 * length
    return both[:edge].clone().view(torch.float32), both[edge:]


def split_all(
    codes: Sequence[UInt8[Tensor, "both"]], length: int
) -> tuple[tuple[Float32[Tensor, "length"], ...], tuple[Codes, ...]]:
    """The headers of all ranks, and their codes."""
    headers, fields = zip(*(split(both, length) for both in codes), strict=True)
    return headers, fields
