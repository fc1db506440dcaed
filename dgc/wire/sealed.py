"""Codes of any kind in one uint8 buffer of planned size.

    bytes 0-23   header as in `payload`: count 0, first tensor with a non-finite gradient, checksum, scale 1,
                 nominal ratio, form (crc32 of the compressor's name)
    then         codes, padded with zeros to a multiple of 8 bytes
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float32, Int32, Int64, UInt8
from torch import Tensor

from dgc.kernels.codec.protocol import HEADER_BYTES, Codec, Terms
from dgc.wire.checks import check_sizes, read_scalars, refuse_changed, refuse_other_terms


def sealed_bytes(nbytes: int) -> int:
    """Return the size of the buffer for `nbytes` bytes of codes."""
    return HEADER_BYTES + -(-nbytes // 8) * 8


def seal(
    codec: Codec,
    codes: UInt8[Tensor, "nbytes"],
    first_nonfinite: Int64[Tensor, ""],
    bounds: Int64[Tensor, "bounds"],
    terms: Terms,
) -> UInt8[Tensor, "total"]:
    """Return the buffer for `codes`.

    Args:
        codec: Codec for the codes' device.
        codes: The codes.
        first_nonfinite: Index of the gradient's first non-finite element; bounds[-1] if there is none.
        bounds: Bounds of the tensors in the bucket.
        terms: Ratio and form for the header.
    """
    return seal_each(codec, codes.unsqueeze(0), first_nonfinite, bounds, terms).view(-1)


def seal_each(
    codec: Codec,
    codes: UInt8[Tensor, "rows nbytes"],
    first_nonfinite: Int64[Tensor, ""],
    bounds: Int64[Tensor, "bounds"],
    terms: Terms,
) -> UInt8[Tensor, "rows total"]:
    """Same as `seal`, for the codes to each of several ranks. Every row is a buffer."""
    rows, nbytes = codes.shape
    payloads = codec.blank(rows * sealed_bytes(nbytes), codes).view(rows, -1)
    payloads[:, HEADER_BYTES : HEADER_BYTES + nbytes] = codes
    for payload in payloads:
        seal_(codec, payload, first_nonfinite, bounds, terms)
    return payloads


def seal_(
    codec: Codec,
    payload: UInt8[Tensor, "total"],
    first_nonfinite: Int64[Tensor, ""],
    bounds: Int64[Tensor, "bounds"],
    terms: Terms,
) -> None:
    """Write the header into a buffer that has the codes and is zero elsewhere."""
    none, one = _count_and_scale(payload.device)
    codec.seal_(payload, none, first_nonfinite, bounds, one, terms)


# Numbers of the host wait for a GPU when they are copied to it: these are copied once.
@cache
def no_segments(device: torch.device) -> tuple[Int64[Tensor, ""], Int64[Tensor, "2"]]:
    """Return `first_nonfinite` and `bounds` of what has no gradient. Do not change them in place."""
    bounds = torch.tensor([0, 1], dtype=torch.int64, device=device)
    return bounds[1], bounds


@cache
def _count_and_scale(device: torch.device) -> tuple[Int32[Tensor, ""], Float32[Tensor, ""]]:
    none = torch.tensor(0, dtype=torch.int32, device=device)
    return none, torch.tensor(1.0, dtype=torch.float32, device=device)


def unseal(
    codec: Codec,
    payloads: Sequence[UInt8[Tensor, "total"]],
    nbytes: int,
    segments: int,
    terms: Terms,
    what: str,
) -> tuple[list[UInt8[Tensor, "nbytes"]], list[int]]:
    """Return the codes of all ranks, and wait until the device has checked them.

    Args:
        codec: Codec for the payloads' device.
        payloads: One buffer per rank.
        nbytes: Bytes of codes.
        segments: Number of tensors in the bucket.
        terms: Terms of this rank.
        what: Name of the payloads in errors.

    Returns:
        (codes, nonfinite), in rank order. `nonfinite` has the position, from 1, of each rank's first tensor with a
        non-finite gradient, or 0.

    Raises:
        PayloadError: A buffer was not written by `seal`, or with other terms. The message names the rank.
    """
    opened = open_sealed(codec, payloads, nbytes, segments, terms, what)
    return opened.checked(read_scalars(opened.scalars))


@dataclass(frozen=True, eq=False)
class Opened:
    """Codes that are not checked: the device need not have finished.

    Attributes:
        scalars: Five numbers per payload, for `checked`.
    """

    scalars: Sequence[Tensor]
    _codes: list[Tensor]
    _segments: int
    _terms: Terms
    _what: str
    _ranks: Sequence[int]

    def checked(self, words: Sequence[int]) -> tuple[list[UInt8[Tensor, "nbytes"]], list[int]]:
        """Return what `unseal` does.

        Args:
            words: The values of `scalars`.

        Raises:
            PayloadError: See `unseal`.
        """
        for i, rank in enumerate(self._ranks):
            number, sealed, count, *theirs = words[5 * i : 5 * i + 5]
            if not sealed or count or not 0 <= number <= self._segments:
                refuse_changed(rank, self._what)
            refuse_other_terms(rank, theirs, self._terms, self._what)
        return self._codes, list(words[::5])


def open_sealed(
    codec: Codec,
    payloads: Sequence[UInt8[Tensor, "total"]],
    nbytes: int,
    segments: int,
    terms: Terms,
    what: str,
    ranks: Sequence[int] | None = None,
) -> Opened:
    """Same as `unseal`, without waiting for the device. ranks: the senders. Default: all ranks."""
    codes, scalars = [], []
    ranks = range(len(payloads)) if ranks is None else ranks
    check_sizes(payloads, sealed_bytes(nbytes), terms, what, ranks)
    for payload in payloads:
        whole = payload if payload.is_contiguous() and payload.storage_offset() % 8 == 0 else payload.clone()
        header = codec.unseal(whole)
        codes.append(whole[HEADER_BYTES : HEADER_BYTES + nbytes])
        scalars += [header.number, header.sealed, header.count, *header.terms]
    return Opened(scalars, codes, segments, terms, what, ranks)
