"""A sparse all-reduce whose bytes per rank do not grow with the number of ranks (after Ok-Topk: Li and Hoefler
2022, arXiv 2201.07598).

Each of N ranks owns one region of the bucket (`regions`). With x_r the k elements that rank r has selected:

    round 1    rank r sends the part of x_r in each region to the region's owner           all-to-all
               the owner adds:                s = sum over r of x_r, in rank order
               the owner selects again:       t = the c_2 largest |s_i|, of equal ones the first
    round 2    every rank receives the t of all regions                                    all-gather
               result = t / N

Nothing is lost. Each rank removes from its error state only what it has sent of the elements of the result. All
others wait there, whether they did not fit into a payload of round 1 or were not selected again. The owner keeps
what the format rounds in round 2, s_i - t_i, as the whole sum. Therefore

    mean over ranks of (gradient + old error) = result + mean over ranks of new error

Capacity of round 1. Blocks are dealt to regions without regard to the data, so each selected element falls into a
region with probability 1/N. The number in one region has the mean m = k/N and the standard deviation
d = sqrt(k (N-1)) / N. A payload has room for c_1 = m + d elements, and then holds all of them with a probability
of 0.84 (normal approximation). On average 0.083 d elements per region wait for another step, the smallest ones:
1.7 % of m = 25, less of larger m. For N = 1, d = 0.

Capacity of round 2. The N ranks together select up to N k different elements. Those that the result does not have
wait on all ranks that selected them. With m elements per region they wait long, and a short training is less
accurate. So c_2 is 2 m where both rounds then cost at most six words of 4 bytes per selected element (in fp32 and
int32), and what fits into six words where they cost more, but at least 1.5 m:

    c_2 = min(2 m, max(1.5 m, 3 k / (N-1) - c_1 - 6))              6 elements have the bytes of two headers

Bytes per rank: (N-1) (SparseFormat.nbytes(c_1) + SparseFormat.nbytes(c_2)). In fp32 and int32 that is

    (N-1) (8 (m + d) + 8 c_2 + 48)        at most 24 k, where 1.5 m do not cost more

int8 and sign values have 4 bytes more per payload for each tensor of the bucket.

The first tensor with NaN or inf of each rank is in the header of every payload of round 1. Every rank thus learns
all flags.

Differences from the paper: Thresholds are not reused from earlier steps: both selections are exact in every step,
and payloads have a fixed size. Regions are dealt in blocks, not moved to follow the data. The result has up to 2 k
elements; in the paper it has about k.
"""

from dataclasses import dataclass
from functools import cached_property
from math import isqrt

import torch
from torch import Tensor

from dgc.comm.requests import AllGather, AllToAll, Conversation, read
from dgc.compression.protocol import SparseResult
from dgc.compression.sparse.exchange.protocol import Chosen
from dgc.compression.sparse.exchange.regions import Regions, divide_into_regions, largest_region
from dgc.compression.sparse.exchange.vectors import largest_of, shared, subtract
from dgc.kernels import Budget, SparseVector
from dgc.selection import Plan
from dgc.wire import Encoded, SparseFormat


@dataclass(frozen=True, eq=False)
class Division:
    """The regions of a bucket for one plan. send, keep: elements of a payload of round 1 and of round 2."""

    plan: Plan
    regions: Regions
    send: int
    keep: int

    @cached_property
    def bounds(self) -> tuple[Tensor, ...]:
        """The bounds of the tensors in each region."""
        return self.regions.bounds.unbind()

    @cached_property
    def numels(self) -> tuple[Tensor, ...]:
        """The sizes of the tensors in each region."""
        return self.regions.bounds.diff().unbind()

    def budget(self, region: int, capacity: int) -> Budget:
        """Every tensor may fill the whole payload."""
        return Budget(self.bounds[region], self.numels[region], capacity)


class ReduceScatterExchange:
    """Each rank sums and selects again what all ranks have selected in its region of the bucket."""

    point_to_point = False

    def __init__(self) -> None:
        self._divisions: dict[str, Division] = {}  # by bucket

    def wire_bytes(self, form: SparseFormat, plan: Plan, numel: int, size: int) -> float:
        region, whole = largest_region(numel, size), plan.per_tensor
        budgets = [Budget(whole.bounds, whole.ks, capacity) for capacity in capacities(plan.capacity, numel, size)]
        return (size - 1) * sum(form.nbytes(budget, region) for budget in budgets)

    def mean(self, chosen: Chosen) -> Conversation[SparseResult]:
        division, bucket, form = self._division(chosen), chosen.bucket, chosen.form
        regions, codec = division.regions, chosen.kernels.codec
        settings = (regions.numel, chosen.plan.ratio, chosen.what)

        dealt = [
            self._encode(chosen, division, r, division.send, part, chosen.first_nonfinite)
            for r, part in enumerate(regions.deal(chosen.elements, division.send))
        ]
        sent = regions.join([encoded.sent for encoded in dealt])
        payloads = [encoded.payload for encoded in dealt]
        splits = tuple(payload.numel() for payload in payloads)
        (received,) = yield (AllToAll(torch.cat(payloads), splits),)
        budget = division.budget(chosen.rank, division.send)
        decoding = form.decoding(codec, received, budget, *settings)
        parts, nonfinite = decoding.checked((yield from read(decoding.scalars)))

        kernel = chosen.kernels.selection
        total = kernel.merge_mean(parts, 1, regions.numel).vector  # a mean over one rank is the sum
        again = largest_of(kernel, total, division.keep)
        finite = torch.full_like(chosen.first_nonfinite, bucket.numel)
        encoded = self._encode(chosen, division, chosen.rank, division.keep, again, finite)
        (payloads,) = yield (AllGather(encoded.payload),)
        budget = division.budget(chosen.rank, division.keep)
        decoding = form.decoding(codec, payloads, budget, *settings, bounds=division.bounds)
        parts, _ = decoding.checked((yield from read(decoding.scalars)))
        result = regions.join(parts)
        rest = shared(subtract(kernel, total, encoded.sent), encoded.sent)
        indices = regions.index_of(rest.indices.long(), chosen.rank).to(torch.int32)
        chosen.memory.sent_(bucket, shared(sent, result))
        chosen.memory.returned_(bucket, SparseVector(indices, rest.values, rest.count))
        return (yield from chosen.mean([result], nonfinite))

    def _division(self, chosen: Chosen) -> Division:
        bucket, plan = chosen.bucket, chosen.plan
        division = self._divisions.get(bucket.name)
        if division is None or division.plan is not plan:
            regions = divide_into_regions(plan.per_tensor.bounds, bucket.numel, chosen.size)
            division = Division(plan, regions, *capacities(plan.capacity, bucket.numel, chosen.size))
            self._divisions[bucket.name] = division
        return division

    def _encode(
        self, chosen: Chosen, division: Division, region: int, capacity: int, part: SparseVector, first: Tensor
    ) -> Encoded:
        plan = chosen.plan
        how = (division.budget(region, capacity), division.regions.numel, first, chosen.bucket.dtype, plan.ratio)
        return chosen.form.encode(chosen.kernels.codec, part, *how, tensors=plan.per_tensor.bounds)


def capacities(k: int, numel: int, size: int) -> tuple[int, int]:
    """Elements of a payload of round 1 and of round 2, for k of `numel` elements on `size` ranks.

    In whole numbers, because all ranks must compute the same.
    """
    region = largest_region(numel, size)
    send = min(region, -(-(k + isqrt(k * (size - 1))) // size))
    within_six_words = 3 * k // max(1, size - 1) - send - 6
    keep = min(-(-2 * k // size), max(-(-3 * k // (2 * size)), within_six_words))
    return send, min(region, size * send, keep)
