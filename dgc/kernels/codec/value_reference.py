"""The values of a selection as bytes, in plain torch, on any device. It does not wait for the device."""

from math import inf, nan

import torch
from jaxtyping import Bool, Float32, Float64, Int32, Int64, UInt8
from torch import Tensor

from dgc.kernels.codec.bit_streams import numbers
from dgc.kernels.selection.protocol import SparseVector

SMALLEST = 2.0**-149  # of fp32
LARGEST_EXPONENT = 15  # scaled values stay below 2**15, half of fp16's range


class TorchValueCodec:
    """Implements `dgc.kernels.codec.value_protocol.ValueCodec`."""

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
        means = means_of(selection.values.abs().double(), live, owner, segments).float()
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

    def two_bit_encode_(
        self, selection: SparseVector, bounds: Int64[Tensor, "bounds"], section: UInt8[Tensor, "nbytes"], r: float
    ) -> Float32[Tensor, "capacity"]:
        segments, capacity = bounds.numel() - 1, selection.values.numel()
        owner = owners(selection.indices, bounds)
        live = numbers(bounds, capacity) < selection.count
        values = selection.values.double()
        above = values - means_of(values, live, owner, segments)[owner]
        deviations = means_of(torch.where(live, above * above, 0.0), live, owner, segments).sqrt()
        width = (deviations * (r / 4))[owner]
        codes = (above >= -width).long() + (above >= 0).long() + (above >= width).long()
        codes = torch.where(live, codes, 0)
        table = means_of(values, live, 4 * owner + codes, 4 * segments).float()
        section[: 16 * segments].view(torch.float32).copy_(table)
        fields = torch.nn.functional.pad(codes.to(torch.uint8), (0, -capacity % 4)).view(-1, 4)
        packed = (fields << 2 * numbers(section, 4).to(torch.uint8)).sum(1, dtype=torch.uint8)
        section[16 * segments : 16 * segments + packed.numel()] = packed
        return self.two_bit_decode(section, selection.indices, selection.count, bounds)[0]

    def two_bit_decode(
        self,
        section: UInt8[Tensor, "nbytes"],
        indices: Int32[Tensor, "capacity"],
        count: Int32[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
    ) -> tuple[Float32[Tensor, "capacity"], Bool[Tensor, ""]]:
        segments, capacity = bounds.numel() - 1, indices.numel()
        table = section[: 16 * segments].view(torch.float32)
        packed = section[16 * segments : 16 * segments + (capacity + 3) // 4].unsqueeze(1)
        codes = (packed >> 2 * numbers(section, 4).to(torch.uint8) & 3).view(-1)[:capacity]
        return first(table[4 * owners(indices, bounds) + codes], count)


def means_of(
    values: Float64[Tensor, "capacity"],
    live: Bool[Tensor, "capacity"],
    group: Int64[Tensor, "capacity"],
    groups: int,
) -> Float64[Tensor, "groups"]:
    """Return the mean of each group's values, added up in their order, or 0. Values that are not live are zero."""
    counts = torch.zeros(groups, dtype=torch.int64, device=values.device).index_add_(0, group, live.long())
    sums = torch.zeros(groups, dtype=torch.float64, device=values.device)
    # not index_add_, which adds in a varying order on a GPU
    sums.index_put_((group,), values, accumulate=True)
    return sums / counts.clamp(min=1)


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
