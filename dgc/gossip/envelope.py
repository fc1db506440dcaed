"""Messages from rank to rank, each with a header of 24 bytes that has a checksum (`dgc.wire.sealed`).

Bytes of a message: 24 and its content, rounded up to a multiple of 8.
"""

from collections.abc import Mapping
from zlib import crc32

from jaxtyping import UInt8
from torch import Tensor

import dgc.kernels as kernels
from dgc.comm.requests import Conversation, Exchange, as_bytes, read
from dgc.kernels.codec.protocol import HEADER_BYTES, Terms
from dgc.wire.sealed import Opened, no_segments, open_sealed, seal_, sealed_bytes

Payload = UInt8[Tensor, "total"]


def blank(nbytes: int, like: Tensor) -> Payload:
    """Return a message for `nbytes` bytes of content, on the device of `like`. It is zero."""
    return kernels.of(like).codec.blank(sealed_bytes(nbytes), like)


def content(payload: Payload, nbytes: int) -> UInt8[Tensor, "nbytes"]:
    """Return the part of a message behind the header."""
    return payload[HEADER_BYTES : HEADER_BYTES + nbytes]


def message_of(tensor: Tensor) -> Payload:
    """Return a message with the bytes of a contiguous tensor."""
    data = as_bytes(tensor)
    payload = blank(data.numel(), data)
    content(payload, data.numel()).copy_(data)
    return payload


def write_header_(payload: Payload, what: str) -> None:
    """Seal a message. what: its kind, the same for sender and receiver."""
    seal_(kernels.of(payload).codec, payload, *no_segments(payload.device), _terms(what))


def opened(payload: Payload, nbytes: int, what: str, source: int) -> Opened:
    """Return a received message, whose header the device need not have checked. source: rank of its sender."""
    return open_sealed(kernels.of(payload).codec, [payload], nbytes, 1, _terms(what), what, [source])


def exchange(
    messages: Mapping[int, Payload], sizes: Mapping[int, int], what: str, like: Tensor
) -> Conversation[dict[int, Tensor]]:
    """Seal messages and send them. Returns the content of the received ones, by sender.

    Args:
        messages: By receiver. One message may have several receivers.
        sizes: Bytes of the content that each sender sends.
        what: Name of the messages in errors.
        like: Any tensor on the device of the messages.

    Raises:
        PayloadError: A message is damaged. The error names its sender.
    """
    for message in {id(message): message for message in messages.values()}.values():
        write_header_(message, what)
    receives = {source: blank(nbytes, like) for source, nbytes in sizes.items()}
    (replies,) = yield (Exchange(dict(messages), receives),)
    received = [opened(replies[source], nbytes, what, source) for source, nbytes in sizes.items()]
    words = yield from read([word for message in received for word in message.scalars])
    each = len(words) // max(1, len(received))
    contents = [message.checked(words[each * i : each * (i + 1)])[0][0] for i, message in enumerate(received)]
    return dict(zip(sizes, contents, strict=True))


def _terms(what: str) -> Terms:
    return Terms(1.0, crc32(what.encode()))
