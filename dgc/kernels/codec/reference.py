"""The payload codec in plain torch, on any device. It defines every bit and does not wait for the device."""

from math import inf, nan

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
from dgc.kernels.selection.protocol import SparseVector

SMALLEST = 2.0**-149  # of fp32
LARGEST_EXPONENT = 15  # scaled values stay below 2**15, half of fp16's range


class TorchCodec:
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

    def cast_encode_(
        self,
        values: Float32[Tensor, "capacity"],
        dtype: torch.dtype,
        section: UInt8[Tensor, "nbytes"],
        limit: float = inf,
    ) -> tuple[Float32[Tensor, "capacity"], Float32[Tensor, ""]]:
        values = torch.where(values.isfinite(), values.clamp(-limit, limit), nan)
        wire = section.view(dtype)
        if dtype == torch.float32:
            wire.copy_(values)
            return values, values.new_ones(())
        scale, inverse = power_of_two(values)
        wire.copy_(values * inverse)
        return wire.float() * scale, scale

    def cast_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        count: Int32[Tensor, ""],
        dtype: torch.dtype,
        scale: Float32[Tensor, ""],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        given = section.view(dtype)
        return first(given.float() * scale, count)

    def sign_encode_(
        self, selection: SparseVector, bounds: Int64[Tensor, "bounds"], section: UInt8[Tensor, "nbytes"]
    ) -> Float32[Tensor, "capacity"]:
        segments, capacity = bounds.numel() - 1, selection.values.numel()
        owner = owners(selection.indices, bounds)
        live = numbers(bounds, capacity) < selection.count
        sums = torch.zeros(segments, dtype=torch.float64, device=section.device)
        counts = torch.zeros(segments, dtype=torch.int64, device=section.device)
        # not index_add_, which adds in a varying order on a GPU
        sums.index_put_((owner,), selection.values.abs().double(), accumulate=True)
        counts.index_add_(0, owner, live.long())
        means = (sums / counts.clamp(min=1)).float()
        section[: 4 * segments].view(torch.float32).copy_(means)
        negative = (selection.values < 0).to(torch.uint8)
        negative = torch.nn.functional.pad(negative, (0, -capacity % 8)).view(-1, 8)
        eight = numbers(section, 8).to(torch.uint8)
        section[4 * segments : 4 * segments + negative.shape[0]] = (negative << eight).sum(1, dtype=torch.uint8)
        return self.sign_decode(section, selection.indices, selection.count, bounds)[0]

    def sign_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        count: Int32[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        segments, capacity = bounds.numel() - 1, indices.numel()
        magnitudes = section[: 4 * segments].view(torch.float32)[owners(indices, bounds)]
        bits = section[4 * segments : 4 * segments + (capacity + 7) // 8].unsqueeze(1)
        negative = (bits >> numbers(section, 8).to(torch.uint8) & 1).view(-1)[:capacity]
        return first(torch.where(negative > 0, -magnitudes, magnitudes), count)

    def int8_encode_(
        self, selection: SparseVector, bounds: Int64[Tensor, "bounds"], section: UInt8[Tensor, "nbytes"]
    ) -> Float32[Tensor, "capacity"]:
        segments, capacity = bounds.numel() - 1, selection.values.numel()
        owner = owners(selection.indices, bounds)
        largest = torch.zeros(segments, dtype=torch.float32, device=section.device)
        largest.scatter_reduce_(0, owner, selection.values.abs(), "amax")
        # divide by a tensor: for a number, a GPU multiplies by its inverse
        scales = (largest / torch.full_like(largest, 127)).clamp(min=SMALLEST)
        scales = torch.where(largest > 0, scales, 0.0)
        section[: 4 * segments].view(torch.float32).copy_(scales)
        steps = torch.where(scales > 0, scales, 1.0)[owner]
        rounded = (selection.values / steps).round().clamp(-127, 127).to(torch.int8)
        section[4 * segments : 4 * segments + capacity] = rounded.view(torch.uint8)
        return self.int8_decode(section, selection.indices, selection.count, bounds)[0]

    def int8_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        count: Int32[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        segments, capacity = bounds.numel() - 1, indices.numel()
        scales = section[: 4 * segments].view(torch.float32)[owners(indices, bounds)]
        steps = section[4 * segments : 4 * segments + capacity].view(torch.int8)
        return first(steps * scales, count)


def checksum(payload: UInt8[Tensor, "nbytes"], stored: Int64[Tensor, ""] | int = 0) -> Int64[Tensor, ""]:
    """Return the checksum of a payload, with its checksum field, now `stored`, taken as zero."""
    words = payload.view(torch.int64)
    total = (words * (2 * numbers(payload, words.numel()) + 1)).sum() - 3 * stored
    return (total ^ total >> 32) & LOW ^ CHECKSUM_OF_ZEROS


def first(
    values: Float32[Tensor, "capacity"], count: Int32[Tensor, ""]
) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
    """Return (values with zeros after the first `count`, whether they are finite)."""
    values = torch.where(numbers(values, values.numel()) < count, values, 0.0)
    return values, values.isfinite().all()


def owners(indices: Int32[Tensor, "capacity"], bounds: Int64[Tensor, "bounds"]) -> Int64[Tensor, "capacity"]:
    """Return the segment of each element. For indices outside all segments the result is arbitrary but valid."""
    owner = torch.searchsorted(bounds, indices.long(), right=True) - 1
    return owner.clamp(0, max(0, bounds.numel() - 2))


def power_of_two(values: Float32[Tensor, "n"]) -> tuple[Float32[Tensor, ""], Float32[Tensor, ""]]:
    """Return (scale, 1 / scale), both exact. NaN values are ignored."""
    if not values.numel():
        one = torch.ones((), dtype=torch.float32, device=values.device)
        return one, one.clone()
    largest = values.abs().nan_to_num(0.0).amax()
    # the exponent from the bits: exact on every device, and 0 for denormals
    exponent = (largest.view(torch.int32) >> 23) - 126 - LARGEST_EXPONENT
    exponent = torch.where(largest > 0, exponent.clamp(-126, 126), 0)
    return ((127 + exponent) << 23).view(torch.float32), ((127 - exponent) << 23).view(torch.float32)
