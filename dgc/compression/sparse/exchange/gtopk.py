"""gTop-k (Shi et al. 2019, arXiv 1901.04359) by recursive doubling, for any number of ranks.

With x the k elements that a rank has selected, and P the largest power of two up to the number of ranks N:

    first            rank P + p sends its x to rank p:               x_p = top_2k(x_p + x_{P+p})
    j = 0, 1, ..     ranks r and r xor 2**j exchange their x:        x = top_2k(x of one + x of the other)
    last             rank p sends x to rank P + p
    result           x / N

After round j, each group of 2**(j+1) ranks holds the same x, bit for bit. top_2k keeps the 2 k largest magnitudes,
of equal ones the first.

Nothing is lost. Each rank removes from its error state only the elements that the result has. Of an element of the
result, a part of the sum may have been dropped by another group, or rounded by the format. All ranks of that group
see this part. One of them keeps it: for element i the member number (i // B) mod (size of the group), so that each
keeps its share. Therefore

    mean over ranks of (gradient + old error) = result + mean over ranks of new error

Before the first round an all-gather of headers brings each rank's first tensor with NaN or inf, and its settings,
to every rank.

Bytes of a rank: 24 (N-1) for the header, and for its messages b = SparseFormat.nbytes(k) for x as selected, and
B = SparseFormat.nbytes(2 k) for a sum:

    p < N - P         B (log2 P + 1)
    N - P <= p < P    b + B (log2 P - 1), or nothing for P = 1
    p >= P            b

Messages go from rank to rank.

Differences from the paper: The paper keeps k elements of each sum. The N ranks together select up to N k different
ones, and those that the result does not have wait on all ranks that selected them. With k they wait long, and a
short training is less accurate. The paper reduces along a tree to one rank and broadcasts, 2 b log2 P bytes, and
needs a power of two. There the parts that are dropped of elements of the result are lost.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dgc.comm.meter import all_gather_wire_bytes
from dgc.comm.requests import Conversation, Exchange, read
from dgc.compression.envelope import Envelope
from dgc.compression.protocol import SparseResult
from dgc.compression.sparse.exchange.protocol import Chosen
from dgc.compression.sparse.exchange.regions import BLOCK
from dgc.compression.sparse.exchange.vectors import largest_of, shared, subtract
from dgc.kernels import Budget, SparseVector
from dgc.selection import Plan
from dgc.wire import SparseFormat
from dgc.wire.sealed import sealed_bytes


class GTopKExchange:
    """Pairs of ranks add and select again what their groups have selected."""

    point_to_point = True

    def wire_bytes(self, form: SparseFormat, plan: Plan, numel: int, size: int) -> float:
        power = largest_power_of_two(size)
        doublings = power.bit_length() - 1
        own, summed = (form.nbytes(budget_of(plan, numel, is_sum), numel) for is_sum in (False, True))
        header = all_gather_wire_bytes(sealed_bytes(0), size)
        if size > power:
            return header + (doublings + 1) * summed
        return header + (own + (doublings - 1) * summed if doublings else 0)

    def mean(self, chosen: Chosen) -> Conversation[SparseResult]:
        held = _Held(chosen)
        nonfinite = yield from _all_flags(chosen)
        size, rank, power = chosen.size, chosen.rank, largest_power_of_two(chosen.size)
        twin = rank - power if rank >= power else rank + power  # of the first and the last round, if there is one
        twins = [twin] if twin < size else []
        if size > power:
            if rank >= power:
                yield from held.swap({twin: held.message(1)})
            else:
                for part in (yield from held.swap({}, twins, sums=False)):
                    held.add(held.x, part, 1)
        for j in range(power.bit_length() - 1):
            partner = rank ^ 1 << j
            if rank >= power:
                yield from held.swap({})
                continue
            sums = j > 0 or partner + power < size
            (other,) = yield from held.swap({partner: held.message(1 << j)}, [partner], sums)
            lower, upper = (held.x, other) if rank < partner else (other, held.x)
            held.add(lower, upper, 2 << j)
        if size > power:
            if rank >= power:
                (held.x,) = yield from held.swap({}, twins, sums=True)
            else:
                message = held.message(power)  # with or without a twin: x is now what the twins receive
                yield from held.swap(dict.fromkeys(twins, message))
        held.tell_memory()
        return (yield from chosen.mean([held.x], nonfinite))


class _Held:
    """The elements x that a rank holds between rounds, and those that it keeps.

    The ranks of a group hold the same. `members` is the size of the group, a power of two.
    """

    def __init__(self, chosen: Chosen):
        self._chosen = chosen
        encoded = chosen.encode()
        self.x = self._own = encoded.sent
        self._payload: Tensor | None = encoded.payload  # of x
        self._kept: list[SparseVector] = []

    def message(self, members: int) -> Tensor:
        """The payload of x, for one rank. x is then what it receives, and a member keeps the rounding."""
        chosen, payload = self._chosen, self._payload
        if payload is None:
            finite = torch.full_like(chosen.first_nonfinite, chosen.bucket.numel)
            encoded = chosen.encode(self.x, finite, self._budget(sums=True))
            self._keep(subtract(chosen.kernels.selection, self.x, encoded.sent), members)
            self.x, payload = encoded.sent, encoded.payload
        self._payload = None
        return payload

    def add(self, lower: SparseVector, upper: SparseVector, members: int) -> None:
        """Set x to the largest elements of the sum of two groups. `members`: of both together."""
        chosen, kernel = self._chosen, self._chosen.kernels.selection
        total = kernel.merge_mean([lower, upper], 1, chosen.bucket.numel).vector  # over one rank: the sum
        self.x, self._payload = largest_of(kernel, total, self._budget(sums=True).capacity), None
        self._keep(subtract(kernel, total, self.x), members)

    def swap(
        self, sends: dict[int, Tensor], sources: Sequence[int] = (), sums: bool = False
    ) -> Conversation[list[SparseVector]]:
        """Send payloads by rank, and return those of other ranks. sums: whether the sources send sums."""
        chosen, budget, bucket = self._chosen, self._budget(sums), self._chosen.bucket
        nbytes = chosen.form.nbytes(budget, bucket.numel)
        receives = {r: torch.empty(nbytes, dtype=torch.uint8, device=bucket.device) for r in sources}
        (received,) = yield (Exchange(sends, receives),)
        planned = (budget, bucket.numel, chosen.plan.ratio, chosen.what)
        payloads = [received[r] for r in sources]
        decoding = chosen.form.decoding(chosen.kernels.codec, payloads, *planned, ranks=sources)
        return decoding.checked((yield from read(decoding.scalars)))[0]

    def tell_memory(self) -> None:
        """Tell the memory what of this rank's elements is in x, the result, and what this rank keeps of them."""
        bucket, memory = self._chosen.bucket, self._chosen.memory
        memory.sent_(bucket, shared(self._own, self.x))
        if self._kept:
            rest = self._chosen.kernels.selection.merge_mean(self._kept, 1, bucket.numel).vector
            memory.returned_(bucket, shared(rest, self.x))

    def _budget(self, sums: bool) -> Budget:
        return budget_of(self._chosen.plan, self._chosen.bucket.numel, sums)

    def _keep(self, rest: SparseVector, members: int) -> None:
        own = rest.indices // BLOCK % members == self._chosen.rank % members
        self._kept.append(SparseVector(rest.indices, torch.where(own, rest.values, 0.0), rest.count))


def budget_of(plan: Plan, numel: int, sums: bool) -> Budget:
    """The elements of a message: those that a rank has selected, or twice as many of a sum."""
    if not sums:
        return plan.per_tensor
    return Budget(plan.per_tensor.bounds, plan.per_tensor.ks, min(numel, 2 * plan.capacity))


def largest_power_of_two(size: int) -> int:
    """The largest power of two up to `size`."""
    return 1 << size.bit_length() - 1


def _all_flags(chosen: Chosen) -> Conversation[list[int]]:
    """For each rank, the position (from 1) of its first tensor with NaN or inf, or 0."""
    nothing = torch.empty(0, dtype=torch.uint8, device=chosen.bucket.device)
    envelope = Envelope(chosen.what, chosen.plan.per_tensor.bounds, chosen.form.terms(chosen.plan.ratio))
    _, nonfinite = yield from envelope.gather(nothing, chosen.first_nonfinite)
    return nonfinite
