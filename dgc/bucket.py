"""A bucket: several gradients of one dtype and device that travel together in one flat buffer."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """Where one parameter's gradient lies in its bucket. `offset` and `numel` count elements."""

    name: str
    offset: int
    numel: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, flat: Tensor) -> Tensor:
        """This segment of a flat buffer of the bucket's length, with the parameter's shape and strides."""
        return flat[self.offset : self.offset + self.numel].as_strided(self.shape, self.stride)


@dataclass(eq=False)
class Bucket:
    """`flat` holds the gradients in memory order, and the averaged gradients after a dense exchange.

    The name is the same on every rank and unlike every other bucket's: it pairs messages between ranks.
    """

    name: str
    flat: Tensor
    segments: tuple[Segment, ...]

    @property
    def numel(self) -> int:
        return self.flat.numel()


def lay_out(named_tensors: Sequence[tuple[str, Tensor]]) -> tuple[Segment, ...]:
    """Segments that lie one after another, each with its tensor's shape and strides.

    A tensor whose elements do not fill one block of memory (an expanded one, say) gets contiguous strides.
    """
    segments = []
    offset = 0
    for name, tensor in named_tensors:
        shape = tuple(tensor.shape)
        stride = tuple(tensor.stride()) if fills_a_block(tensor) else _contiguous_stride(shape)
        segments.append(Segment(name, offset, tensor.numel(), shape, stride))
        offset += tensor.numel()
    return tuple(segments)


def make_bucket(name: str, named_tensors: Sequence[tuple[str, Tensor]]) -> Bucket:
    """A bucket of zeros for these tensors, which share dtype and device."""
    segments = lay_out(named_tensors)
    first = named_tensors[0][1]
    flat = torch.zeros(sum(s.numel for s in segments), dtype=first.dtype, device=first.device)
    return Bucket(name, flat, segments)


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def fills_a_block(tensor: Tensor) -> bool:
    """Whether some order of the dimensions makes the tensor contiguous (non-overlapping and dense)."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si > 1):
        if stride != expected:
            return False
        expected *= size
    return True
