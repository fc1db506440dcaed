"""Compressors that send a code of every element: all gather every rank's codes and add them up, in rank order.

Payload of a bucket in bytes: 24 + `nbytes`, rounded up to 8.
"""

from abc import abstractmethod

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

import dgc.kernels as kernels
from dgc.bucket import Bucket
from dgc.comm.requests import AllGather, Conversation
from dgc.compression.feedback import Feedback
from dgc.wire.sealed import seal, unseal

Codes = UInt8[Tensor, "nbytes"]


class Coded(Feedback):
    """bits: of an element's code; unless a subclass says otherwise, the nominal ratio counts nothing else."""

    bits: float

    @property
    def compress_ratio(self) -> float:
        return self.bits / 32

    @abstractmethod
    def nbytes(self, bucket: Bucket) -> int:
        """Of the codes; the same on every rank and in every step."""
        ...

    @abstractmethod
    def encode(self, v: Float32[Tensor, "n"], bucket: Bucket) -> tuple[Codes, Float32[Tensor, "n"]]:
        """(codes, v less what they stand for)"""
        ...

    @abstractmethod
    def add_(self, codes: Codes, bucket: Bucket, total: Float32[Tensor, "n"]) -> None:
        """Add what the codes stand for to `total`."""
        ...

    def mean(self, total: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return total.div_(self.size)

    def exchange(
        self, bucket: Bucket, v: Float32[Tensor, "n"], first_nonfinite: Int64[Tensor, ""]
    ) -> Conversation[tuple[Tensor, Tensor, list[int]]]:
        codec, bounds, terms = kernels.codec_of(v), self.bounds(bucket), self.terms()
        codes, kept = self.encode(v, bucket)
        (payloads,) = yield (AllGather(seal(codec, codes, first_nonfinite, bounds, terms)),)
        planned = (self.nbytes(bucket), bounds.numel() - 1, terms, f"bucket {bucket.name}")
        parts, numbers = unseal(codec, payloads, *planned)
        total = torch.zeros_like(v)
        for part in parts:
            self.add_(part, bucket, total)
        return self.mean(total), kept, numbers


def join(header: Float32[Tensor, "numbers"], codes: Codes) -> UInt8[Tensor, "both"]:
    """A tensor's bytes before codes."""
    return torch.cat([header.contiguous().view(torch.uint8), codes])


def split(both: UInt8[Tensor, "both"], numbers: int) -> tuple[Float32[Tensor, "numbers"], Codes]:
    """What `join` joined to so many; these as a tensor of its own, since they may not lie where floats must."""
    edge = 4 * numbers
    return both[:edge].clone().view(torch.float32), both[edge:]
