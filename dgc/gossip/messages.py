"""Messages from rank to rank, and the encodings of models in them.

A message is sealed: a header of 24 bytes with a checksum (`dgc.core.envelope`), then its content, rounded up to a
multiple of 8 bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable
from zlib import crc32

import torch
from jaxtyping import Float32, Float64, UInt8
from torch import Tensor

import dgc.kernels as kernels
from dgc.comm.requests import Conversation, Exchange, as_bytes, read
from dgc.core.arguments import WHOLE, checked, require
from dgc.core.envelope import Envelope, Unchecked, no_segments, sealed_bytes
from dgc.kernels.payload import HEADER_BYTES, Terms

HALF_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LEVELS = 127
FP32, WEIGHT_NBYTES = 4, 8  # bytes; push-sum weights are fp64

Vector = Float32[Tensor, "n"]
Bytes = UInt8[Tensor, "nbytes"]
Payload = UInt8[Tensor, "total"]  # a message with its header


def blank(nbytes: int, like: Tensor) -> tuple[Payload, Bytes]:
    """Returns a message on the device of `like`, and its content of `nbytes` bytes. Both are zero."""
    payload = kernels.of(like).codec.blank(sealed_bytes(nbytes), like)
    return payload, payload[HEADER_BYTES : HEADER_BYTES + nbytes]


def message_of(tensor: Tensor) -> Payload:
    """Returns a message with the bytes of a contiguous tensor."""
    data = as_bytes(tensor)
    payload, content = blank(data.numel(), data)
    content.copy_(data)
    return payload


def write_header_(payload: Payload, what: str) -> None:
    """Seals a message. what: its kind, the same for sender and receiver."""
    nothing, _ = no_segments(payload.device)
    _envelope(what, payload.device).seal_(payload, nothing)


def opened(payload: Payload, nbytes: int, what: str, source: int) -> Unchecked[Bytes]:
    """Returns the content of a message of rank `source`, not checked yet."""
    return _envelope(what, payload.device).open([payload], nbytes, [source])


def exchange(
    messages: Mapping[int, Payload], sizes: Mapping[int, int], what: str, like: Tensor
) -> Conversation[dict[int, Tensor]]:
    """Seals messages and sends them by receiver. Returns the contents, of these sizes, by sender.

    what: name of the messages in errors. like: any tensor on their device.

    Raises:
        PayloadError: if a message is damaged. The error names its sender.
    """
    for message in {id(message): message for message in messages.values()}.values():
        write_header_(message, what)
    receives = {source: blank(nbytes, like)[0] for source, nbytes in sizes.items()}
    (replies,) = yield (Exchange(dict(messages), receives),)
    received = [opened(replies[source], nbytes, what, source) for source, nbytes in sizes.items()]
    words = yield from read([word for message in received for word in message.scalars])
    each = len(words) // max(1, len(received))
    for i, one in enumerate(received):
        one.check(words[each * i : each * (i + 1)])
    return {source: one.contents[0] for source, one in zip(sizes, received, strict=True)}


def _envelope(what: str, device: torch.device) -> Envelope:
    return Envelope(what, no_segments(device)[1], Terms(1.0, crc32(what.encode())))


def weight_of(content: Bytes) -> Float64[Tensor, ""]:
    """Returns the push-sum weight at the end of a content, which may be unaligned."""
    return content[-WEIGHT_NBYTES:].cpu().clone().view(torch.float64)[0]


@runtime_checkable
class GossipMessage(Protocol):
    """An encoding of vectors with a fixed size."""

    @property
    def exact(self) -> bool:
        """Whether decoding returns exactly the encoded values."""
        ...

    def nbytes(self, n: int) -> int: ...

    def encode_(self, z: Vector, factor: float, section: Bytes) -> Vector:
        """Writes factor * z into `section`, which has `nbytes(n)` bytes. Returns what `decode` will return."""
        ...

    def decode(self, section: Bytes, n: int) -> Vector:
        """Decodes n elements. The result may share the memory of `section`."""
        ...


@dataclass(frozen=True)
class FP32Message:
    """fp32 messages, without rounding: 4 bytes per element.

    Example:
        >>> FP32Message().nbytes(1000)
        4000
    """

    exact = True

    def nbytes(self, n: int) -> int:
        return FP32 * n

    def encode_(self, z: Vector, factor: float, section: Bytes) -> Vector:
        return torch.mul(z, factor, out=section.view(torch.float32))

    def decode(self, section: Bytes, n: int) -> Vector:
        return section.view(torch.float32)


@checked
@dataclass(frozen=True)
class HalfPrecisionMessage:
    """16-bit messages with one scale, a power of two that avoids overflow: 2 bytes per element, and 4.

    Args:
        dtype (str): "fp16", or "bf16", which has a larger range and three bits less.

    Raises:
        ValueError: if dtype is neither.

    Example:
        >>> HalfPrecisionMessage("bf16").nbytes(1000)
        2004
    """

    dtype: str = "fp16"
    exact = False

    def __post_init__(self) -> None:
        if self.dtype not in HALF_DTYPES:
            raise ValueError(f"dtype must be {' or '.join(HALF_DTYPES)}, not {self.dtype!r}")

    def nbytes(self, n: int) -> int:
        return 2 * n + FP32

    def encode_(self, z: Vector, factor: float, section: Bytes) -> Vector:
        values, scale = kernels.of(z).codec.cast_encode_(z * factor, HALF_DTYPES[self.dtype], section[FP32:])
        section[:FP32].copy_(as_bytes(scale.view(1)))
        return values

    def decode(self, section: Bytes, n: int) -> Vector:
        scale = section[:FP32].clone().view(torch.float32)
        return section[FP32:].clone().view(HALF_DTYPES[self.dtype]).float() * scale


@checked
@dataclass(frozen=True)
class Int8Message:
    """8-bit messages, 1 byte per element: round(x / scale), with scale = largest magnitude of a block / 127.

    Args:
        block (int): number of elements that share a scale. With 2048, scales add 0.2 % to the bytes.

    Raises:
        ValueError: if block is less than 1.

    Example:
        >>> Int8Message().nbytes(4096)
        4104
    """

    block: int = 2048
    exact = False

    def __post_init__(self) -> None:
        require("at least 1", WHOLE, least=1, block=self.block)

    def nbytes(self, n: int) -> int:
        return n + FP32 * -(-n // self.block)

    def _bounds(self, z: Tensor, n: int) -> Tensor:
        return torch.arange(0, n + self.block, self.block, dtype=torch.int64, device=z.device).clamp(max=n)

    def encode_(self, z: Vector, factor: float, section: Bytes) -> Vector:
        x, bounds = z * factor, self._bounds(z, z.numel())
        scales = kernels.of(z).quantize.largest(x, bounds)
        codes, residual = kernels.of(z).quantize.uniform_encode(x, bounds, scales, LEVELS, 8, None)
        end = FP32 * scales.numel()
        section[:end].copy_(as_bytes(scales))
        section[end:].copy_(codes)
        return x - residual

    def decode(self, section: Bytes, n: int) -> Vector:
        end = self.nbytes(n) - n
        scales = section[:end].clone().view(torch.float32)
        total = torch.zeros(n, dtype=torch.float32, device=section.device)
        bounds = self._bounds(section, n)
        kernels.of(total).quantize.uniform_add_(section[end:].clone(), bounds, scales, LEVELS, 8, total)
        return total
