"""Asynchronous messages from one rank to another, for algorithms without synchronised steps."""

from typing import Any, Protocol, runtime_checkable
from zlib import crc32

from torch import Tensor


@runtime_checkable
class Channel(Protocol):
    """Point-to-point messages: contiguous one-dimensional tensors in host memory.

    No call blocks, and a single thread makes all calls. A receive takes a message with its tag from any rank.
    Only messages with one tag from one rank to another arrive in the order of sending.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def isend(self, to: int, message: Tensor, tag: int) -> Any:
        """Start sending and return a handle. `message` must not change until `test` returns True for it."""
        ...

    def irecv(self, buffer: Tensor, tag: int) -> Any:
        """Start receiving into the front of `buffer` and return a handle. The message may be shorter."""
        ...

    def test(self, handle: Any) -> bool:
        """Whether the message has been sent or received. Do not call it again after it has returned True."""
        ...


def open_channel(transport: Any) -> Channel:
    """Open a channel over the network of a transport. Collective. Raises ValueError if it has none."""
    if not hasattr(transport, "channel"):
        raise ValueError(
            f"asynchronous training needs point-to-point messages, which {type(transport).__name__} does not "
            "carry: use dgc.comm.horovod.connect(point_to_point=True)"
        )
    channel: Channel = transport.channel()
    return channel


class MessageTags:
    """A tag for each name of a message. max_tag: the largest one of the network."""

    def __init__(self, max_tag: int):
        self._max_tag = max_tag
        self._names: dict[int, str] = {}

    def of(self, name: str) -> int:
        """Return the tag of a name, the same on every rank. Raises ValueError if another name has it."""
        tag = crc32(name.encode()) % self._max_tag
        if self._names.setdefault(tag, name) != name:
            raise ValueError(f"messages {name!r} and {self._names[tag]!r} have the same tag: rename one of them")
        return tag
