"""Clipping of each tensor's local gradient before it enters the error state (Lin et al. 2018, section 3.2).

The paper clips with its usual global threshold times N ** -0.5 for N ranks: pass that product as `max_norm`.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dgc.bucket import Bucket
from dgc.comm.requests import AllReduce, Conversation


@runtime_checkable
class Clipping(Protocol):
    def clip(self, bucket: Bucket) -> Conversation[None]:
        """Clip `bucket.flat` in place, tensor by tensor."""
        ...


def _require_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be positive, not {value}")


def _parts(bucket: Bucket) -> list[Tensor]:
    return [bucket.flat[s.offset : s.offset + s.numel] for s in bucket.segments]


@dataclass(frozen=True)
class ClipByValue:
    """g = min(max(g, -clip_value), clip_value)."""

    clip_value: float

    def __post_init__(self) -> None:
        _require_positive("clip_value", self.clip_value)

    def clip(self, bucket: Bucket) -> Conversation[None]:
        bucket.flat.clamp_(-self.clip_value, self.clip_value)
        yield from ()


@dataclass(frozen=True)
class ClipByNorm:
    """g = g * min(1, max_norm / |g|), with this rank's own L2 norm of the tensor."""

    max_norm: float

    def __post_init__(self) -> None:
        _require_positive("max_norm", self.max_norm)

    def clip(self, bucket: Bucket) -> Conversation[None]:
        for part in _parts(bucket):
            part.mul_((self.max_norm / (part.norm(dtype=torch.float32) + 1e-6)).clamp(max=1.0))
        yield from ()


@dataclass(frozen=True)
class ClipByGlobalNorm:
    """As ClipByNorm, with the root mean over all ranks of the squared norm: every rank scales alike.

    One all-reduce of one number per tensor and bucket.
    """

    max_norm: float

    def __post_init__(self) -> None:
        _require_positive("max_norm", self.max_norm)

    def clip(self, bucket: Bucket) -> Conversation[None]:
        parts = _parts(bucket)
        squares = torch.stack([part.to(torch.float32).square().sum() for part in parts])
        (squares,) = yield (AllReduce(squares),)
        for part, scale in zip(parts, (self.max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0), strict=True):
            part.mul_(scale)
