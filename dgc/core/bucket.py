"""A bucket: several gradients of one dtype and device that travel together in one flat buffer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """The place of one parameter's gradient in its bucket. `offset` and `numel` count elements."""

    name: str
    offset: int
    numel: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, flat: Tensor) -> Tensor:
        """Return a view of this segment in `flat` [bucket's numel], with the parameter's shape and strides."""
        return flat[self.offset : self.offset + self.numel].as_strided(self.shape, self.stride)

    def orders(self, tensor: Tensor) -> bool:
        """Whether the parameter still has the memory order that the segment was laid out for."""
        return tensor.stride() == self.stride or _stride_in_bucket(tensor) == self.stride

    def is_laid_out_as(self, tensor: Tensor) -> bool:
        """Whether the tensor has this segment's shape and strides. Strides of dimensions of size 1 are ignored."""
        if tensor.shape != self.shape:
            return False
        if tensor.stride() == self.stride:
            return True
        return all(a == b or n == 1 for n, a, b in zip(self.shape, tensor.stride(), self.stride, strict=True))


class Bucket:
    """Several gradients in one flat buffer.

    `flat` holds the gradients in memory order, and the averaged gradients after a dense exchange. Gradients may
    lie elsewhere until `flat` is read. Code that reads them through `gradients` avoids the copy, and `flat` is
    then never allocated.

    `destinations` may say where the mean is needed: a one-dimensional tensor per segment, of the bucket's dtype. A
    compressor that writes the mean there, and not into `flat`, says so in its result.

    `keeps_scratch`: whether methods keep the memory of their residuals on a GPU, so that its addresses repeat.

    Args:
        name: Pairs messages between ranks. It must be unique among buckets and the same on every rank.
        segments: The place of each gradient, without gaps.
        dtype, device: Type and device of the gradients.

    Raises:
        ValueError: The type is complex. See `as_real`.
    """

    def __init__(self, name: str, segments: Sequence[Segment], dtype: torch.dtype, device: torch.device):
        for segment in segments:
            check_real(segment.name, dtype)
        self.name, self.segments = name, tuple(segments)
        self.dtype, self.device = dtype, device
        self.numel = sum(segment.numel for segment in segments)
        self._elsewhere: dict[int, Tensor] = {}
        self.keeps_scratch = False
        self.destinations: tuple[Tensor, ...] | None = None

    @cached_property
    def _flat(self) -> Tensor:
        return torch.zeros(self.numel, dtype=self.dtype, device=self.device)

    @cached_property
    def _slices(self) -> tuple[Tensor, ...]:
        return self._flat.split([segment.numel for segment in self.segments])

    @cached_property
    def bounds(self) -> Tensor:
        """The first element of each segment, and numel, int64 [segments + 1]."""
        bounds = [*(s.offset for s in self.segments), self.numel]
        return torch.tensor(bounds, dtype=torch.int64, device=self.device)

    @property
    def flat(self) -> Tensor:
        """All gradients [numel]. Gradients that lie elsewhere are copied in first."""
        if self._elsewhere:
            for i, gradient in self._elsewhere.items():
                self._slices[i].copy_(gradient)
            self.release()
        return self._flat

    def probe(self) -> Tensor:
        """A number, inf or NaN if `flat` has NaN, inf or very large elements. The host does not wait for it."""
        return self.flat.sum(dtype=torch.promote_types(self.dtype, torch.float32))

    @property
    def is_flat(self) -> bool:
        """Whether `flat` holds all gradients already."""
        return not self._elsewhere

    def use_gradient(self, i: int, gradient: Tensor) -> None:
        """Use `gradient`, of the segment's layout, for segment i until `use_flat(i)`.

        Raises:
            ValueError: Its dtype or device is not the bucket's.
        """
        if gradient.dtype != self.dtype or gradient.device != self.device:
            raise ValueError(
                f"the gradient of {self.segments[i].name} is {gradient.dtype} on {gradient.device}, and was "
                f"planned as {self.dtype} on {self.device}: convert or move the model (model.to) before its "
                "optimizer or DistributedDataParallel is wrapped, or wrap it again"
            )
        self._elsewhere[i] = gradient.as_strided((self.segments[i].numel,), (1,))

    @property
    def elsewhere(self) -> dict[int, Tensor]:
        """The gradients that are used where they are, by segment. They can be set, to use them once more."""
        return dict(self._elsewhere)

    @elsewhere.setter
    def elsewhere(self, gradients: dict[int, Tensor]) -> None:
        self._elsewhere = dict(gradients)

    def use_flat(self, i: int) -> None:
        """Use the content of `flat` for segment i."""
        self._elsewhere.pop(i, None)

    def release(self) -> None:
        """Drop the references to gradients that lie elsewhere."""
        if self.device.type == "cuda":  # this stream may still read memory that belongs to the stream of backward
            for gradient in self._elsewhere.values():
                gradient.record_stream(torch.cuda.current_stream(gradient.device))
        self._elsewhere.clear()

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        """The gradients as one-dimensional tensors, in the order of the bucket."""
        if not self._elsewhere:
            return (self.flat,)
        gradients = []
        for i in range(len(self.segments)):
            gradients.append(self._elsewhere[i] if i in self._elsewhere else self._slices[i])
        return tuple(gradients)


def named_pairs(named_parameters: Iterable[Any]) -> list[tuple[str, Tensor]]:
    """Return the pairs as a list. Raises ValueError for what is not a pair of a name and a tensor."""
    if not isinstance(named_parameters, Iterable):
        raise ValueError(f"named_parameters must be model.named_parameters(), not {named_parameters!r}")
    pairs = list(named_parameters)
    for pair in pairs:
        match pair:
            case (str(), Tensor()):
                continue
        raise ValueError(
            f"named_parameters must hold pairs of a name and a tensor, not a {type(pair).__name__}: pass "
            "model.named_parameters(), not model.parameters()"
        )
    return pairs


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor [...] as pairs of real numbers [..., 2], and others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def check_real(name: str, dtype: torch.dtype) -> None:
    """Raise ValueError for a complex parameter."""
    if dtype.is_complex:
        raise ValueError(
            f"{name} is complex, which only DistributedOptimizer and dgc.ddp.compress exchange: make it a real "
            "parameter with a last dimension of 2, and call torch.view_as_complex in forward()"
        )


def lay_out(named_tensors: Sequence[tuple[str, Tensor]]) -> tuple[Segment, ...]:
    """Return adjacent segments, each with its tensor's shape, and its strides if it fills one block of memory."""
    segments, offset = [], 0
    for name, tensor in named_tensors:
        segments.append(Segment(name, offset, tensor.numel(), tuple(tensor.shape), _stride_in_bucket(tensor)))
        offset += tensor.numel()
    return tuple(segments)


def divide(segments: Sequence[Segment], loads: Sequence[int]) -> list[int]:
    """Divide the tensors of a bucket into one group per local rank, such that their loads become similar.

    loads: elements that each local rank has already. Returns the number of the first tensor of each group, and the
    number of tensors.
    """
    total = sum(s.numel for s in segments)
    target = (sum(loads) + total) / len(loads)
    wanted = [max(0.0, target - load) for load in loads]
    scale = total / (sum(wanted) or 1.0)
    firsts, edge = [0], 0.0
    for share in wanted[:-1]:
        edge += share * scale
        # a tensor belongs to the group in which its middle lies
        firsts.append(sum(s.offset + s.numel / 2 < edge for s in segments))
    return [*firsts, len(segments)]


def make_bucket(name: str, named_tensors: Sequence[tuple[str, Tensor]]) -> Bucket:
    """Return a bucket of zeros for these tensors. They must share dtype and device."""
    first_tensor = named_tensors[0][1]
    return Bucket(name, lay_out(named_tensors), first_tensor.dtype, first_tensor.device)


def _stride_in_bucket(tensor: Tensor) -> tuple[int, ...]:
    if fills_a_block(tensor):
        return tuple(tensor.stride())
    return tuple(prod(tensor.shape[i + 1 :]) for i in range(tensor.dim()))


def fills_a_block(tensor: Tensor) -> bool:
    """Whether some order of the dimensions makes the tensor contiguous (non-overlapping and dense)."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that FSDP2 has sharded, or the tensor itself."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
