"""The payload codec in plain torch, on any device. It defines every bit and does not wait for the device."""

import torch
from jaxtyping import Bool, Float32, Int32, Int64, UInt8
from torch import Tensor

from dgc.kernels.codec import bit_streams
from dgc.kernels.codec.bit_streams import LOW, numbers
from dgc.kernels.codec.protocol import (
    CHECKSUM_OF_ZEROS,
    HEADER_BYTES,
    Header,
    PackedCode,
    RiceCode,
    Terms,
)
from dgc.kernels.codec.value_reference import TorchValueCodec
from dgc.kernels.selection.protocol import SparseVector


class TorchCodec(TorchValueCodec):
    """Implements `dgc.kernels.codec.protocol.Codec`."""

    name = "reference"

    def blank(self, nbytes: int, like: Tensor) -> UInt8[Tensor, "nbytes"]:
        return torch.zeros(nbytes, dtype=torch.uint8, device=like.device)

    def encode_plain(
        self,
        selection: SparseVector,
        dtypes: tuple[torch.dtype, torch.dtype],
        limit: float,
        first_nonfinite: Int64[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
        terms: Terms,
        nbytes: int,
    ) -> tuple[UInt8[Tensor, "nbytes"], Float32[Tensor, "capacity"]]:
        payload, (plain, cast) = self.blank(nbytes, selection.values), dtypes
        sizes = [selection.indices.numel() * dtype.itemsize for dtype in dtypes]
        self.plain_encode_(selection.indices, plain, payload[HEADER_BYTES:][: sizes[0]])
        values = payload[HEADER_BYTES + sizes[0] :][: sizes[1]]
        decoded, scale = self.cast_encode_(selection.values, cast, values, limit)
        self.seal_(payload, selection.count, first_nonfinite, bounds, scale, terms)
        return payload, decoded

    def seal_(
        self,
        payload: UInt8[Tensor, "nbytes"],
        count: Int32[Tensor, ""],
        first_nonfinite: Int64[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
        scale: Float32[Tensor, ""],
        terms: Terms,
    ) -> None:
        header = payload[:HEADER_BYTES].view(torch.int32)
        header[0] = count
        header[1] = torch.searchsorted(bounds, first_nonfinite, right=True) % bounds.numel()
        header[2] = 0
        header[3] = scale.view(torch.int32)
        header[4], header[5] = terms.words
        header[2] = checksum(payload).view(1).view(torch.int32)[0]

    def unseal(self, payload: UInt8[Tensor, "nbytes"]) -> Header:
        count, number, stored, scale, *terms = payload[:HEADER_BYTES].view(torch.int32).clone().unbind()
        stored = stored.long() & LOW
        sealed = checksum(payload, stored) == stored
        return Header(count, number, scale.view(torch.float32), (terms[0], terms[1]), sealed)

    def plain_encode_(
        self, indices: Int32[Tensor, "capacity"], dtype: torch.dtype, section: UInt8[Tensor, "nbytes"]
    ) -> None:
        section.view(dtype).copy_(indices)

    def plain_decode(
        self, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""], numel: int, dtype: torch.dtype
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        given = section.view(dtype)
        live = numbers(given, given.numel()) < count
        ordered = (given >= 0) & (given < numel)
        ordered[1:] &= given[1:] > given[:-1]
        valid = (ordered | ~live).all() & (count >= 0) & (count <= given.numel())
        return torch.where(live & ordered, given, 0).to(torch.int32), valid

    def packed_encode_(
        self, selection: SparseVector, code: PackedCode, section: UInt8[Tensor, "nbytes"]
    ) -> SparseVector:
        return bit_streams.packed_encode_(selection, code, section)

    def packed_decode(
        self, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""], code: PackedCode
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        return bit_streams.packed_decode(section, count, code)

    def rice_encode_(
        self, selection: SparseVector, code: RiceCode, section: UInt8[Tensor, "nbytes"]
    ) -> SparseVector:
        return bit_streams.rice_encode_(selection, code, section)

    def rice_decode(
        self, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""], code: RiceCode
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        return bit_streams.rice_decode(section, count, code)


def checksum(payload: UInt8[Tensor, "nbytes"], stored: Int64[Tensor, ""] | int = 0) -> Int64[Tensor, ""]:
    """Return the checksum of a payload, with its checksum field, now `stored`, taken as zero."""
    words = payload.view(torch.int64)
    total = (words * (2 * numbers(payload, words.numel()) + 1)).sum() - 3 * stored
    return (total ^ total >> 32) & LOW ^ CHECKSUM_OF_ZEROS
