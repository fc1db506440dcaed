"""Clipping of gradients, tensor by tensor (Lin et al. 2018, section 3.2).

A memory clips this rank's local gradient before it enters the error state. The same limit applies to tensors that
travel dense through the compressor's fallback, after averaging: `clip_mean`.

The paper scales its global threshold by N ** -0.5 for N ranks, for local gradients that contain the factor 1/N.
Here that factor is applied after the exchange: pass the threshold times N ** 0.5 as `max_norm`.

Names in the original code and here:

    clip_grad_value_                    ClipByValue
    clip_grad_norm_                     ClipByNorm
    clip_grad_norm_2_by_global_         ClipByGlobalNorm
    clip_grad_value_by_global_norm_     ClipValueByGlobalNorm
"""

from dataclasses import dataclass
from numbers import Real
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dgc.bucket import Bucket
from dgc.comm.requests import AllReduce, Conversation


@runtime_checkable
class Clipping(Protocol):
    def clip(self, bucket: Bucket) -> Conversation[None]:
        """Clip this rank's gradient in `bucket.flat` in place, tensor by tensor."""
        ...

    def clip_mean(self, bucket: Bucket) -> None:
        """Clip the mean over all ranks in `bucket.flat` in place, tensor by tensor.

        The mean is the same on every rank, and so must be the result. No message is sent.
        """
        ...


def _require_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not value > 0:
        raise ValueError(f"{name} must be a positive number, not {value!r}")


def _parts(bucket: Bucket) -> list[Tensor]:
    return [bucket.flat[s.offset : s.offset + s.numel] for s in bucket.segments]


def _mean_squares(bucket: Bucket) -> Conversation[Tensor]:
    """[tensors] fp32: the mean over all ranks of each tensor's squared L2 norm."""
    squares = torch.stack([part.to(torch.float32).square().sum() for part in _parts(bucket)])
    (mean,) = yield (AllReduce(squares),)
    return mean


@dataclass(frozen=True)
class ClipByValue:
    """g = min(max(g, -clip_value), clip_value)."""

    clip_value: float

    def __post_init__(self) -> None:
        _require_positive("clip_value", self.clip_value)

    def clip(self, bucket: Bucket) -> Conversation[None]:
        self.clip_mean(bucket)
        yield from ()

    def clip_mean(self, bucket: Bucket) -> None:
        bucket.flat.clamp_(-self.clip_value, self.clip_value)


@dataclass(frozen=True)
class ClipByNorm:
    """g = g * min(1, max_norm / |g|), with this rank's own norm of the tensor.

    norm_type: p of the p-norm, a positive number; float("inf") is the largest magnitude.
    """

    max_norm: float
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        _require_positive("max_norm", self.max_norm)
        _require_positive("norm_type", self.norm_type)

    def clip(self, bucket: Bucket) -> Conversation[None]:
        self._clip(bucket, torch.float32)
        yield from ()

    def clip_mean(self, bucket: Bucket) -> None:
        # fp64: CPUs with vectors of different widths add in other orders, which fp32 would show
        self._clip(bucket, torch.float64)

    def _clip(self, bucket: Bucket, dtype: torch.dtype) -> None:
        for part in _parts(bucket):
            if part.numel():  # an empty tensor has no largest magnitude
                norm = part.norm(self.norm_type, dtype=dtype).float()
                part.mul_((self.max_norm / (norm + 1e-6)).clamp(max=1.0))


@dataclass(frozen=True)
class ClipByGlobalNorm:
    """As ClipByNorm, with the root mean over all ranks of the squared L2 norm: every rank scales alike.

    One all-reduce of one number per tensor and bucket. A mean gradient is the same on every rank, so that its own
    norm is the global one: `clip_mean` needs no message.
    """

    max_norm: float

    def __post_init__(self) -> None:
        _require_positive("max_norm", self.max_norm)

    def clip(self, bucket: Bucket) -> Conversation[None]:
        squares = yield from _mean_squares(bucket)
        scales = (self.max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for part, scale in zip(_parts(bucket), scales, strict=True):
            part.mul_(scale)

    def clip_mean(self, bucket: Bucket) -> None:
        ClipByNorm(self.max_norm).clip_mean(bucket)


@dataclass(frozen=True)
class ClipValueByGlobalNorm:
    """g = min(max(g, -limit), limit) with limit the root mean over all ranks of the tensor's squared L2 norm.

    One all-reduce of one number per tensor and bucket. No element of a mean gradient exceeds the norm of its own
    tensor: `clip_mean` changes nothing.
    """

    def clip(self, bucket: Bucket) -> Conversation[None]:
        squares = yield from _mean_squares(bucket)
        for part, limit in zip(_parts(bucket), squares.sqrt(), strict=True):
            part.clamp_(-limit, limit)

    def clip_mean(self, bucket: Bucket) -> None:
        return None
