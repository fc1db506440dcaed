"""How the ranks sum the elements that each of them has selected: `SparseCompressor(exchange=)`.

    result = 1/N * sum over the N ranks, in rank order, or the largest elements of that sum

Nothing is lost. Each rank removes from its residual what it has sent of the elements in the result. A part of the
sum that no rank receives stays, as a whole, in the residual of one rank:

    mean over ranks of (gradient + old error) = result + mean over ranks of new error

k: number of elements that each rank has selected. b = SparseFormat.nbytes(k): bytes of their payload.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isqrt
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.comm.meter import all_gather_wire_bytes
from dgc.comm.requests import AllGather, AllToAll, Conversation, read
from dgc.core.bucket import Bucket
from dgc.core.dense import place_of_mean
from dgc.core.envelope import Envelope, Flags
from dgc.core.protocol import Position
from dgc.core.results import (
    DenseResult,
    Result,
    SparseResult,
    first_nonfinite_message,
    reported,
    reported_mean,
    sparse_overflow_message,
)
from dgc.kernels import Budget, Merged, NativeMeanDecoder, SparseVector
from dgc.sparse.payloads.payload import Encoded, PayloadPlan

# The mean, what of this rank's elements is in it, with the values that the other ranks have received, and parts of
# the ranks' sum that no rank has received, and this one keeps.
Exchanged: TypeAlias = tuple[Result, SparseVector, SparseVector | None]


@dataclass(frozen=True, eq=False)
class SparseExchange(ABC):
    """Sums what the ranks have selected of one bucket, in the steps of one ratio.

    payload: the payload of a selection. wants_sparse: whether a sparse mean saves the optimizer a pass: after
    momentum correction it only subtracts.
    """

    payload: PayloadPlan
    size: int
    rank: int
    wants_sparse: bool = False

    @staticmethod
    @abstractmethod
    def wire_bytes(payload: PayloadPlan, size: int) -> float:
        """Bytes that a rank sends, by the meter's formulas; where ranks send different numbers, the largest."""

    def encode(self, elements: SparseVector, first_nonfinite: Position) -> Any:
        """Return what `mean` begins with. elements: what this rank has selected, with the payload's capacity."""
        return elements, first_nonfinite

    @abstractmethod
    def mean(self, bucket: Bucket, encoded: Any) -> Conversation[Exchanged]:
        """Exchange what this rank has selected."""

    @cached_property
    def envelope(self) -> Envelope:
        """The envelope of messages without elements."""
        return Envelope(self.payload.what, self.payload.budget.bounds, self.payload.terms)

    def part(self, budget: Budget, numel: int) -> PayloadPlan:
        """The payloads of other elements: of `numel` elements of the bucket, or of a sum."""
        return replace(self.payload, budget=budget, numel=numel, tensors=self.payload.budget.bounds)

    def decode(
        self,
        payloads: Sequence[Tensor],
        payload: PayloadPlan,
        bounds: Sequence[Tensor] | None = None,
    ) -> tuple[list[SparseVector], Flags]:
        """Decode payloads, and check them, on a device at the end of the step. See `PayloadPlan.decode`."""
        decoded = payload.decode(kernels.of(self.payload.budget.bounds).codec, payloads, bounds)
        return decoded.contents, decoded.flags

    def mean_of(self, bucket: Bucket, parts: Sequence[SparseVector], flags: Flags) -> Conversation[Result]:
        """The sum of sparse vectors of the bucket, divided by the number of ranks."""
        merged = kernels.of(parts[0].values).selection.merge_mean(parts, self.size, bucket.numel)
        if flags.values is None:
            return placed(bucket, merged, flags)
        return (yield from result_of(bucket, merged, flags.values))


class AllGatherExchange(SparseExchange):
    """Every rank receives the selection of every rank, and sums all. Bytes per rank: b (N-1)."""

    @staticmethod
    def wire_bytes(payload: PayloadPlan, size: int) -> float:
        return all_gather_wire_bytes(payload.layout.nbytes, size)

    def encode(self, elements: SparseVector, first_nonfinite: Position) -> Encoded:
        return self.payload.encode(kernels.of(elements.values).codec, elements, first_nonfinite)

    def mean(self, bucket: Bucket, encoded: Encoded) -> Conversation[Exchanged]:
        backend, plan = kernels.of(encoded.payload), self.payload
        (payloads,) = yield (AllGather(encoded.payload),)
        result: Result
        decoder = backend.decoder if backend.decoder is not None and backend.decoder.takes(plan.layout) else None
        is_dense = bucket.dtype == torch.float32
        if isinstance(decoder, NativeMeanDecoder) and (self.wants_sparse or not is_dense):
            result = yield from result_of(bucket, *plan.mean(decoder, payloads, self.size))
        elif decoder is None:
            result = yield from self.mean_of(bucket, *self.decode(payloads, plan))
        else:
            bucket.release()  # the gradients are accumulated and need no copy
            mean = place_of_mean(bucket)
            result = reported_mean(bucket, plan.mean_into_(mean, decoder, payloads, self.size))
            if not is_dense:
                bucket.flat.copy_(mean)
        return result, encoded.sent, None


def result_of(bucket: Bucket, merged: Merged, nonfinite: Sequence[int]) -> Conversation[SparseResult]:
    """The result of a sparse mean. nonfinite: each rank's flag."""
    # entries that are not valid are zero
    count, finite = yield from read([merged.count, merged.values.isfinite().all()])
    indices, values = merged.indices[:count], merged.values[:count]
    message = first_nonfinite_message(bucket, nonfinite) if any(nonfinite) else None
    if not finite and message is None:
        message = sparse_overflow_message(bucket, indices, values)
    return SparseResult(indices, values, message)


def placed(bucket: Bucket, merged: Merged, flags: Flags) -> DenseResult:
    """The result of a sparse mean on a device, in the bucket: the host does not know its number of entries."""
    bucket.release()
    vector, n = merged.vector, bucket.numel
    # one more element takes what is not valid, and what a damaged payload may have said
    at = torch.where(valid_entries(vector) & (vector.indices >= 0), vector.indices.clamp(max=n), n)
    flat = torch.zeros(n + 1, dtype=torch.float32, device=vector.values.device)
    flat[at.long()] = vector.values
    bucket.flat.copy_(flat[:n])
    return reported(bucket, flags)


# --- sparse vectors of a few elements, without waiting for the device ------------------------------

BEYOND = 2**31 - 1  # larger than any index


def valid_entries(x: SparseVector) -> Bool[Tensor, "capacity"]:
    """A mask of the valid entries."""
    return torch.arange(x.indices.numel(), dtype=torch.int64, device=x.indices.device) < x.count


def total_of(parts: Sequence[SparseVector], numel: int) -> SparseVector:
    """The sum of sparse vectors of `numel` elements, in the order given."""
    kernel = kernels.of(parts[0].values).selection
    return kernel.merge_mean(parts, 1, numel).vector  # a mean over one rank is the sum


def largest_of(x: SparseVector, k: int) -> SparseVector:
    """The k elements of largest magnitude, of equal ones the first. Zeros are left out."""
    # never fewer elements than slots
    values = torch.nn.functional.pad(torch.where(valid_entries(x), x.values, 0.0), (0, k))
    ends = values.numel() * torch.arange(2, dtype=torch.int64, device=values.device)
    budget = Budget(ends, torch.full((1,), k, dtype=torch.int64, device=values.device), k)
    chosen = kernels.of(values).selection.select(values, budget).elements
    indices = torch.nn.functional.pad(x.indices, (0, k))[chosen.indices.long()]
    return SparseVector(torch.where(valid_entries(chosen), indices, 0), chosen.values, chosen.count)


def at_common_indices(x: SparseVector, other: SparseVector) -> SparseVector:
    """The elements of x at indices that `other` has too. Indices ascend in both."""
    wanted = torch.where(valid_entries(other), other.indices, BEYOND)
    wanted = torch.nn.functional.pad(wanted, (0, 1), value=BEYOND)
    found = valid_entries(x) & (wanted[torch.searchsorted(wanted, x.indices)] == x.indices)
    indices, order = torch.where(found, x.indices, BEYOND).sort()
    indices = torch.where(indices < BEYOND, indices, 0)
    return SparseVector(indices, x.values[order], found.sum(dtype=torch.int32))


def subtract(x: SparseVector, part: SparseVector) -> SparseVector:
    """x - part, at the indices of x. The indices of `part` must be among them."""
    at = torch.searchsorted(torch.where(valid_entries(x), x.indices, BEYOND), part.indices).to(torch.int32)
    rest = x.values.clone()
    kernels.of(rest).selection.remove_sent_(SparseVector(at, part.values, part.count), None, rest)
    return SparseVector(x.indices, rest, x.count)


# --- reduce-scatter --------------------------------------------------------------------------------

BLOCK = 13  # B of `Regions`


@dataclass(frozen=True, eq=False)
class Regions:
    """The division of a bucket into regions, one per rank, of equal size whatever the tensors look like.

    Blocks of B elements are dealt to the N ranks in turn. Element i belongs to the region

        r = (i // B) mod N      at the place      p = (i // (B N)) B + i mod B

    B is a prime number that divides the dimensions of few layers: if B N divided the length of a tensor's rows, a
    region would hold the same columns of every row. B is small, because large elements are close together: of 149
    elements selected from 14,664 on 16 ranks, 21 % find their region's payload full with B = 61 and 5 % with B =
    13. The map keeps the order of elements within a region.

    numel: number of elements of the largest region, the first. bounds: for each region, the bounds of the tensors
    in it.
    """

    size: int
    numel: int
    bounds: Int64[Tensor, "regions bounds"]

    def index_of(self, place: Int64[Tensor, "..."], region: Int64[Tensor, "..."] | int) -> Int64[Tensor, "..."]:
        """The index within the bucket."""
        return place // BLOCK * (BLOCK * self.size) + region * BLOCK + place % BLOCK

    def deal(self, elements: SparseVector, capacity: int) -> list[SparseVector]:
        """The elements of each region by place: at most `capacity` ones, the largest, of equal ones the first."""
        index, values = elements.indices.long(), elements.values
        numbers = torch.arange(index.numel(), dtype=torch.int64, device=index.device)
        region = torch.where(valid_entries(elements), index // BLOCK % self.size, self.size)
        # floats of one sign have the order of their bits
        by_magnitude = (region << 32) - values.abs().view(torch.int32)
        order = by_magnitude.argsort(stable=True)
        slots = torch.empty_like(numbers)
        slots[order] = numbers - self._starts(region)[region[order]]
        region = torch.where(slots < capacity, region, self.size)
        order = region.argsort(stable=True)  # within a region by index, and so by place
        region, index = region[order], index[order]
        slots = numbers - self._starts(region)[region]
        # one more slot, at the end, takes what is left out
        at = torch.where(region < self.size, region * capacity + slots, self.size * capacity)
        places = torch.zeros(self.size * capacity + 1, dtype=torch.int32, device=index.device)
        places[at] = (index // (BLOCK * self.size) * BLOCK + index % BLOCK).to(torch.int32)
        dealt = torch.zeros(self.size * capacity + 1, dtype=torch.float32, device=index.device)
        dealt[at] = values[order]
        rows = (table[:-1].view(self.size, capacity) for table in (places, dealt))
        counts = self._counts(region)[:-1].to(torch.int32)
        return [SparseVector(*part) for part in zip(*rows, counts, strict=True)]

    def join(self, parts: Sequence[SparseVector]) -> SparseVector:
        """One vector of the bucket from one of each region."""
        places, counts = torch.stack([p.indices for p in parts]).long(), torch.stack([p.count for p in parts])
        region = torch.arange(self.size, dtype=torch.int64, device=places.device).unsqueeze(1)
        numbers = torch.arange(places.shape[1], dtype=torch.int64, device=places.device)
        valid = numbers < counts.unsqueeze(1)
        index, order = torch.where(valid, self.index_of(places, region), BEYOND).view(-1).sort()
        values = torch.where(valid, torch.stack([p.values for p in parts]), 0.0).view(-1)[order]
        indices = torch.where(index < BEYOND, index, 0).to(torch.int32)
        return SparseVector(indices, values, counts.sum(dtype=torch.int32))

    def _counts(self, region: Int64[Tensor, "k"]) -> Int64[Tensor, "regions"]:
        """Number of elements of each region, and of those that are left out."""
        counts = torch.zeros(self.size + 1, dtype=torch.int64, device=region.device)
        return counts.index_add_(0, region, torch.ones_like(region))

    def _starts(self, region: Int64[Tensor, "k"]) -> Int64[Tensor, "regions"]:
        counts = self._counts(region)
        return counts.cumsum(0) - counts


def largest_region(numel: int, size: int) -> int:
    """Number of elements of the largest of `size` regions."""
    turns, rest = divmod(numel, BLOCK * size)
    return turns * BLOCK + min(rest, BLOCK)


def divide_into_regions(bounds: Int64[Tensor, "bounds"], numel: int, size: int) -> Regions:
    """Divide a bucket. bounds: the bounds of its tensors."""
    first = BLOCK * torch.arange(size, dtype=torch.int64, device=bounds.device).unsqueeze(1)
    turns, rest = bounds // (BLOCK * size), bounds % (BLOCK * size)
    return Regions(size, largest_region(numel, size), turns * BLOCK + (rest - first).clamp(0, BLOCK))


class ReduceScatterExchange(SparseExchange):
    """Each rank sums what all ranks have selected in its region of the bucket, and selects again.

    After Ok-Topk (Li and Hoefler 2022, arXiv 2201.07598). With x_r the k elements that rank r has selected:

        round 1    rank r sends the part of x_r in each region to the region's owner           all-to-all
                   the owner adds:                s = sum over r of x_r, in rank order
                   the owner selects again:       t = the c_2 largest |s_i|, of equal ones the first
        round 2    every rank receives the t of all regions                                    all-gather
                   result = t / N

    Elements that are not in the result wait in the residuals, whether they did not fit into a payload of round
    1 or were not selected again. The owner keeps what the format rounds in round 2, s_i - t_i, as the whole sum.

    Capacity of round 1. The number of selected elements in a region has the mean m = k/N and the standard
    deviation d = sqrt(k (N-1)) / N. A payload has room for c_1 = m + d elements, and then holds all of them with a
    probability of 0.84. On average the smallest 0.083 d elements per region wait: 1.7 % of m = 25, less of larger
    m.

    Capacity of round 2. It is 2 m where both rounds then cost at most six words of 4 bytes per selected element
    (in fp32 and int32), and what fits into six words where they cost more, but at least 1.5 m: with fewer,
    elements wait long, and a short training is less accurate.

        c_2 = min(2 m, max(1.5 m, 3 k / (N-1) - c_1 - 6))          6 elements have the bytes of two headers

    Bytes per rank: (N-1) (SparseFormat.nbytes(c_1) + SparseFormat.nbytes(c_2)). In fp32 and int32 that is

        (N-1) (8 (m + d) + 8 c_2 + 48)        at most 24 k, where 1.5 m do not cost more

    Differences from the paper: Both selections are exact in every step, without thresholds of earlier steps, and
    payloads have a fixed size. Regions are dealt in blocks, not moved to follow the data. The result has up to 2 k
    elements; in the paper it has about k.
    """

    @staticmethod
    def wire_bytes(payload: PayloadPlan, size: int) -> float:
        form, whole, region = payload.form, payload.budget, largest_region(payload.numel, size)
        budgets = (replace(whole, capacity=c) for c in capacities(whole.capacity, payload.numel, size))
        return (size - 1) * sum(form.nbytes(budget, region) for budget in budgets)

    @cached_property
    def regions(self) -> Regions:
        return divide_into_regions(self.payload.budget.bounds, self.payload.numel, self.size)

    @cached_property
    def payloads(self) -> tuple[list[PayloadPlan], PayloadPlan, list[Tensor]]:
        """The payloads to each region's owner in round 1, the payload of round 2, and the regions' bounds."""
        regions, bounds = self.regions, list(self.regions.bounds)
        to, kept = (
            # every tensor may fill the whole payload
            [self.part(Budget(own, own.diff(), capacity), regions.numel) for own in bounds]
            for capacity in capacities(self.payload.budget.capacity, self.payload.numel, self.size)
        )
        return to, kept[self.rank], bounds

    def mean(self, bucket: Bucket, encoded: tuple[SparseVector, Position]) -> Conversation[Exchanged]:
        elements, first_nonfinite = encoded
        regions, (to, kept, bounds), codec = self.regions, self.payloads, kernels.of(elements.values).codec

        dealt = zip(regions.deal(elements, to[self.rank].budget.capacity), to, strict=True)
        parts_sent = [payload.encode(codec, part, first_nonfinite) for part, payload in dealt]
        sent = regions.join([own.sent for own in parts_sent])
        payloads = [own.payload for own in parts_sent]
        splits = tuple(payload.numel() for payload in payloads)
        (received,) = yield (AllToAll(torch.cat(payloads), splits),)
        parts, flags = self.decode(received, to[self.rank])

        total = total_of(parts, regions.numel)
        own = kept.encode(codec, largest_of(total, kept.budget.capacity), self.payload.budget.bounds[-1])
        (received,) = yield (AllGather(own.payload),)
        parts, later = self.decode(received, kept, bounds)

        result = regions.join(parts)
        rest = at_common_indices(subtract(total, own.sent), own.sent)
        indices = regions.index_of(rest.indices.long(), self.rank).to(torch.int32)
        returned = SparseVector(indices, rest.values, rest.count)
        mean = yield from self.mean_of(bucket, [result], flags.with_checks_of(later))
        return mean, at_common_indices(sent, result), returned


def capacities(k: int, numel: int, size: int) -> tuple[int, int]:
    """c_1 and c_2 for k of `numel` elements. In whole numbers, because all ranks must compute the same."""
    region = largest_region(numel, size)
    send = min(region, -(-(k + isqrt(k * (size - 1))) // size))
    within_six_words = 3 * k // max(1, size - 1) - send - 6
    keep = min(-(-2 * k // size), max(-(-3 * k // (2 * size)), within_six_words))
    return send, min(region, size * send, keep)


# Of these, each bucket takes the one with the fewest planned bytes, the same on every rank.
EXCHANGES: dict[str, tuple[type[SparseExchange], ...]] = {
    "all_gather": (AllGatherExchange,),
    "reduce_scatter": (ReduceScatterExchange,),
    "auto": (AllGatherExchange, ReduceScatterExchange),
}
