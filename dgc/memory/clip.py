"""Gradient clipping, tensor by tensor (Lin et al. 2018, section 3.2).

A memory clips this rank's local gradient before it enters the error state. The compressor's fallback sends some
tensors dense. Their mean is clipped with the same limit: `clip_mean`.

The paper scales its global threshold by N ** -0.5 for N ranks, because its local gradients contain the factor 1/N.
Here that factor is applied after the exchange. Pass the paper's threshold times N ** 0.5 as `max_norm`.

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
    """A rule that limits gradients."""

    def clip(self, bucket: Bucket) -> Conversation[None]:
        """Clip this rank's gradient in `bucket.flat` in place, tensor by tensor."""
        ...

    def clip_mean(self, bucket: Bucket) -> None:
        """Clip the mean over all ranks in `bucket.flat` in place, tensor by tensor, without a message.

        The mean is the same on every rank. The result must also be.
        """
        ...


def _require_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not value > 0:
        raise ValueError(f"{name} must be a positive number, not {value!r}")


def _parts(bucket: Bucket) -> list[Tensor]:
    return [bucket.flat[s.offset : s.offset + s.numel] for s in bucket.segments]


def _mean_squares(bucket: Bucket) -> Conversation[Tensor]:
    """Return the mean over all ranks of each tensor's squared L2 norm, [tensors] fp32."""
    squares = torch.stack([part.to(torch.float32).square().sum() for part in _parts(bucket)])
    (mean,) = yield (AllReduce(squares),)
    return mean


@dataclass(frozen=True)
class ClipByValue:
    """Clip each element: g = min(max(g, -clip_value), clip_value).

    Args:
        clip_value: Largest magnitude, a positive number.

    Raises:
        ValueError: `clip_value` is not a positive number.
    """

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
    """Scale each tensor by its local norm: g = g * min(1, max_norm / |g|).

    Args:
        max_norm: Largest norm of a tensor, a positive number.
        norm_type: p of the p-norm, a positive number. float("inf") is the largest magnitude.

    Raises:
        ValueError: An argument is not a positive number.

    Example:
        memory = DGCSGDMemory(momentum=0.9, gradient_clipping=ClipByNorm(1.0))
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
        # fp64: the order of summation depends on the CPU's vector width, and an fp32 sum would differ between CPUs
        self._clip(bucket, torch.float64)

    def _clip(self, bucket: Bucket, dtype: torch.dtype) -> None:
        for part in _parts(bucket):
            if part.numel():  # an empty tensor has no largest magnitude
                norm = part.norm(self.norm_type, dtype=dtype).float()
                part.mul_((self.max_norm / (norm + 1e-6)).clamp(max=1.0))


@dataclass(frozen=True)
class ClipByGlobalNorm:
    """Scale each tensor by the root mean square, over all ranks, of its L2 norm. The scale is equal on all ranks.

    Costs one all-reduce per bucket, with one number per tensor. `clip_mean` sends no message: a mean gradient is
    the same on every rank, so its local norm is the global one.

    Args:
        max_norm: Largest norm of a tensor, a positive number.

    Raises:
        ValueError: `max_norm` is not a positive number.
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
    """Clip each element to the root mean square, over all ranks, of the tensor's L2 norm.

    g = min(max(g, -limit), limit). Costs one all-reduce per bucket, with one number per tensor. `clip_mean`
    changes nothing: no element of a mean gradient exceeds the norm of its tensor.
    """

    def clip(self, bucket: Bucket) -> Conversation[None]:
        squares = yield from _mean_squares(bucket)
        for part, limit in zip(_parts(bucket), squares.sqrt(), strict=True):
            part.clamp_(-limit, limit)

    def clip_mean(self, bucket: Bucket) -> None:
        return None
