"""Checks of received payloads. Every error names the rank whose payload is not valid."""

import struct
from collections.abc import Sequence
from typing import NoReturn

import torch
from jaxtyping import UInt8
from torch import Tensor

from dgc.kernels.codec.mean import WORDS
from dgc.kernels.codec.protocol import HEADER_BYTES, Terms
from dgc.kernels.selection.protocol import Budget


class PayloadError(RuntimeError):
    """A payload is damaged, or was encoded with other settings."""


def check_sizes(
    payloads: Sequence[UInt8[Tensor, "nbytes"]],
    nbytes: int,
    terms: Terms,
    what: str,
    ranks: Sequence[int] | None = None,
) -> None:
    """Check that all payloads have the planned size. ranks: the senders. Default: all ranks.

    A rank with other terms plans another size. Some transports then split the gathered bytes into parts of equal
    size, which are not the ranks' payloads. All payloads before the first differing one have the planned size, so
    its header is found in the concatenated bytes.

    Raises:
        PayloadError: A size differs. The message names the rank.
    """
    if all(payload.numel() == nbytes for payload in payloads):
        return
    ranks = range(len(payloads)) if ranks is None else ranks
    whole, sizes = torch.cat(list(payloads)), [payload.numel() for payload in payloads]
    if sizes == [part.numel() for part in whole.chunk(len(payloads))]:
        payloads = [whole[i * nbytes :] for i in range(len(payloads))]
    for rank, payload in zip(ranks, payloads, strict=True):
        header = payload[:HEADER_BYTES].cpu().clone()
        if header.numel() == HEADER_BYTES:
            refuse_other_terms(rank, header.view(torch.int32).tolist()[4:], terms, what)
    rank, size = next((rank, size) for rank, size in zip(ranks, sizes, strict=True) if size != nbytes)
    raise PayloadError(f"rank {rank} sent {size} bytes of {what} instead of the planned {nbytes}")


def refuse_changed(rank: int, what: str) -> NoReturn:
    """Raise PayloadError for a payload whose checksum is wrong."""
    raise PayloadError(f"rank {rank} sent {what} with a wrong checksum: it changed in transit")


def refuse_other_terms(rank: int, words: Sequence[int], terms: Terms, what: str) -> None:
    """Raise PayloadError if the terms of `rank` differ from this rank's. `words`: the terms in its header."""
    ratio, form = words
    own_ratio, own_form = terms.words
    if ratio != own_ratio:
        (theirs,) = struct.unpack("<f", struct.pack("<i", ratio))
        raise PayloadError(
            f"rank {rank} encoded {what} at compress_ratio {theirs:.6g}, this rank at {terms.ratio:.6g}: call "
            "begin_epoch(epoch) on every rank, with the same epoch"
        )
    if form != own_form:
        raise PayloadError(
            f"rank {rank} encoded {what} in another format than this rank: every rank needs the same settings"
        )


def refuse_invalid(
    words: Sequence[int], ranks: Sequence[int], budget: Budget, numel: int, terms: Terms, what: str
) -> None:
    """Raise PayloadError for the first payload that is not valid. words: see `dgc.kernels.codec.mean.Decoded`."""
    segments = budget.bounds.numel() - 1
    for i, rank in enumerate(ranks):
        count, number, *theirs, sealed, indices_valid, values_valid = words[WORDS * i : WORDS * (i + 1)]
        if not sealed:
            refuse_changed(rank, what)
        refuse_other_terms(rank, theirs, terms, what)
        if not 0 <= count <= budget.capacity:
            raise PayloadError(f"rank {rank} sent {count} elements, but the capacity is {budget.capacity}")
        if not 0 <= number <= segments:
            raise PayloadError(f"rank {rank} reports tensor {number} of {segments} as non-finite")
        if not indices_valid:
            raise PayloadError(f"rank {rank} sent indices that do not ascend within 0..{numel - 1}")
        if not values_valid:
            raise PayloadError(f"rank {rank} sent values that are not finite: its error state has overflowed")


def read_scalars(scalars: Sequence[Tensor]) -> list[int]:
    """Return the values of zero-dimensional tensors. On a GPU one read gets them all, because each read waits."""
    if not scalars or scalars[0].is_cpu:
        return [int(scalar) for scalar in scalars]
    known: list[int] = torch.stack([scalar.int() for scalar in scalars]).tolist()
    return known
