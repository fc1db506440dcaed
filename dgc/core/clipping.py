"""Limits on gradients, before they enter a residual (Lin et al. 2018, arXiv 1712.01887, section 3.2)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from dgc.comm.requests import AllReduce, Conversation
from dgc.core.bucket import Bucket


class Clipping(ABC):
    """A rule that limits gradients, tensor by tensor (Lin et al. 2018, section 3.2). All attributes are positive.

    The paper scales its global threshold by N ** -0.5 for N ranks, because its local gradients contain the factor
    1/N. Here that factor is applied after the exchange. Pass the paper's threshold times N ** 0.5 as `max_norm`.
    """

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
                raise ValueError(f"{name} must be a positive number, not {value!r}")

    def clip(self, bucket: Bucket) -> Conversation[None]:
        """Clip this rank's gradient in `bucket.flat` in place, before it enters the residual."""
        self.clip_mean(bucket)
        yield from ()

    @abstractmethod
    def clip_mean(self, bucket: Bucket) -> None:
        """Clip the mean of tensors that were sent dense, in place, without a message and alike on every rank."""


def _parts(bucket: Bucket) -> list[Tensor]:
    return [bucket.flat[s.offset : s.offset + s.numel] for s in bucket.segments]


def _global_norms(bucket: Bucket) -> Conversation[Tensor]:
    """Return the root mean square, over all ranks, of each tensor's L2 norm, [tensors] fp32."""
    squares = torch.stack([part.to(torch.float32).square().sum() for part in _parts(bucket)])
    (mean,) = yield (AllReduce(squares),)
    return mean.sqrt()


@dataclass(frozen=True)
class ClipByValue(Clipping):
    """Clip each element: g = min(max(g, -clip_value), clip_value).

    Raises:
        ValueError: `clip_value` is not a positive number.
    """

    clip_value: float

    def clip_mean(self, bucket: Bucket) -> None:
        bucket.flat.clamp_(-self.clip_value, self.clip_value)


@dataclass(frozen=True)
class ClipByNorm(Clipping):
    """Scale each tensor by its local norm: g = g * min(1, max_norm / |g|).

    Args:
        max_norm: Largest norm of a tensor.
        norm_type: p of the p-norm. float("inf") is the largest magnitude.

    Raises:
        ValueError: An argument is not a positive number.

    Example:
        memory = DGCSGDMemory(momentum=0.9, gradient_clipping=ClipByNorm(1.0))
    """

    max_norm: float
    norm_type: float = 2.0

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
class ClipByGlobalNorm(Clipping):
    """Scale each tensor by the root mean square, over all ranks, of its L2 norm. The scale is equal on all ranks.

    Costs one all-reduce per bucket, with one number per tensor. `clip_mean` sends no message: a mean gradient is
    the same on every rank, so its local norm is the global one.

    Args, Raises: as `ClipByNorm`.
    """

    max_norm: float

    def clip(self, bucket: Bucket) -> Conversation[None]:
        norms = yield from _global_norms(bucket)
        scales = (self.max_norm / (norms + 1e-6)).clamp(max=1.0)
        for part, scale in zip(_parts(bucket), scales, strict=True):
            part.mul_(scale)

    def clip_mean(self, bucket: Bucket) -> None:
        ClipByNorm(self.max_norm).clip_mean(bucket)


@dataclass(frozen=True)
class ClipValueByGlobalNorm(Clipping):
    """Clip each element to the root mean square, over all ranks, of the tensor's L2 norm.

    Costs what `ClipByGlobalNorm` does. `clip_mean` changes nothing: no element of a mean gradient exceeds the norm
    of its tensor.
    """

    def clip(self, bucket: Bucket) -> Conversation[None]:
        limits = yield from _global_norms(bucket)
        for part, limit in zip(_parts(bucket), limits, strict=True):
            part.clamp_(-limit, limit)

    def clip_mean(self, bucket: Bucket) -> None:
        return None
