"""Received payloads, read without waiting for the device."""

from collections.abc import Sequence

from torch import Tensor

from dgc.comm.requests import Conversation, read
from dgc.kernels.codec.protocol import Codec, Terms
from dgc.wire.sealed import open_sealed


def unsealed(
    codec: Codec, payloads: Sequence[Tensor], nbytes: int, segments: int, terms: Terms, what: str
) -> Conversation[tuple[list[Tensor], list[int]]]:
    """Same as `dgc.wire.sealed.unseal`."""
    opened = open_sealed(codec, payloads, nbytes, segments, terms, what)
    return opened.checked((yield from read(opened.scalars)))
