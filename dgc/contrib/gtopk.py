"""gTop-k: pairs of ranks add what they have selected, and select again (Shi et al. 2019, arXiv 1901.04359).

With v = gradient + residual, x the k = sum of ceil(D d) largest elements of v, over tensors of d elements, and P
the largest power of two up to the number of ranks N:

    first            rank P + p sends its x to rank p:               x_p = top_2k(x_p + x_{P+p})
    j = 0, 1, ..     ranks r and r xor 2**j exchange their x:        x = top_2k(x of one + x of the other)
    last             rank p sends x to rank P + p
    result           x / N

After round j, each group of 2**(j+1) ranks holds the same x, bit for bit. top_2k keeps the 2 k largest magnitudes,
of equal ones the first. An element of v that is not in the result stays in the residual. Of an element that is, a
group may have dropped a part of its sum. All ranks of the group see this part, and one of them keeps it: for
element i the member number (i // 13) mod (size of the group).

Payload of a bucket in bytes: 24 for a header that all ranks gather, and messages of b = 24 + 8 k bytes, or b_2 =
24 + 8 min(2 k, n) for a sum:

    p < N - P         b_2 (log2 P + 1)
    N - P <= p < P    b + b_2 (log2 P - 1), or nothing for P = 1
    p >= P            b

Differences from the paper: The paper keeps k elements of each sum: more elements then wait, and a short training
is less accurate. It reduces along a tree to one rank and broadcasts, 2 b log2 P bytes, and needs a power of two.
There the parts that are dropped of elements of the result are lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from dgc.comm.requests import Conversation, Exchange, read
from dgc.core.arguments import checked
from dgc.core.bucket import Bucket, Segment
from dgc.core.dense import place_of_mean
from dgc.core.envelope import Envelope, sealed_bytes
from dgc.core.error_feedback import ErrorFeedbackCompressor, Mean, clone
from dgc.core.protocol import Position, Vector, fraction_of
from dgc.core.state import State
from dgc.sparse.compressor import SELDOM
from dgc.sparse.selectors.selector import share

BLOCK = 13  # elements in sequence of which one member of a group keeps what the group drops


@dataclass(frozen=True, eq=False)
class Elements:
    """A vector that is zero except for `values` at the ascending `indices`."""

    indices: Int64[Tensor, "k"]
    values: Float32[Tensor, "k"]

    def __getitem__(self, chosen: Tensor) -> "Elements":
        return Elements(self.indices[chosen], self.values[chosen])

    def plus(self, other: "Elements") -> "Elements":
        indices, places = torch.cat([self.indices, other.indices]).unique(return_inverse=True)
        values = torch.zeros_like(indices, dtype=torch.float32)
        # two terms at most, which have the same sum in either order
        return Elements(indices, values.index_add_(0, places, torch.cat([self.values, other.values])))

    def largest(self, k: int) -> "Elements":
        """The k largest magnitudes, of equal ones the first."""
        return self[self.values.abs().argsort(descending=True, stable=True)[:k].sort().values]

    def common(self, other: "Elements") -> "Elements":
        """The elements at indices that `other` has too."""
        return self[torch.isin(self.indices, other.indices)]


@checked
class GTopKCompressor(ErrorFeedbackCompressor):
    """gTop-k for any number of ranks (Shi et al. 2019, arXiv 1901.04359).

    Its messages go from rank to rank: `dgc.comm.connect.connect(point_to_point=True)`. Tensors of less than two
    dimensions are sent dense.

    Args:
        compress_ratio (float): fraction of elements that a rank selects, D; above 1 the factor saved.

    Raises:
        ValueError: if compress_ratio is not positive.
    """

    point_to_point = True
    unsuited = SELDOM

    def __init__(self, compress_ratio: float):
        super().__init__()
        self._ratio = fraction_of(compress_ratio=compress_ratio)

    @property
    def compress_ratio(self) -> float:
        return self._ratio

    def accepts(self, segment: Segment) -> bool:
        return len(segment.shape) > 1

    def exchange(self, bucket: Bucket, state: State, v: Vector, first_nonfinite: Position) -> Mean:
        size, rank, envelope = state.size, state.rank, self.envelope(bucket)
        power = 1 << size.bit_length() - 1  # P
        nothing = torch.empty(0, dtype=torch.uint8, device=v.device)
        _, flags = yield from envelope.gather(nothing, first_nonfinite)

        own = x = self.select(bucket, v)
        dropped: list[Elements] = []
        k, sums = own.indices.numel(), min(bucket.numel, 2 * own.indices.numel())

        def add(other: Elements, members: int) -> Elements:
            """Return the largest elements of x + other, and keep this member's share of what they leave out."""
            total = x.plus(other)
            kept = total.largest(sums)
            rest = torch.isin(total.indices, kept.indices, invert=True)
            dropped.append(total[rest & (total.indices // BLOCK % members == rank % members)])
            return kept

        def swap(
            to: Sequence[int], sent: int, sources: Sequence[int], received: int
        ) -> Conversation[list[Elements]]:
            """Send x to some ranks, and receive it from others. sent, received: the elements of a message."""
            sends = {r: envelope.seal(pack(x, sent, bucket.numel), first_nonfinite) for r in to}
            nbytes = 8 * received
            buffers = {r: nothing.new_empty(sealed_bytes(nbytes)) for r in sources}
            (replies,) = yield (Exchange(sends, buffers),)
            return (yield from opened(envelope, [replies[r] for r in sources], nbytes, sources, bucket.numel))

        twins = [rank ^ power] if rank ^ power < size else []
        above = rank >= power
        if size > power:
            for part in (yield from swap(twins if above else [], k, [] if above else twins, k)):
                x = add(part, 1)
        for j in range(power.bit_length() - 1):
            partner = rank ^ 1 << j
            if above:
                yield from swap([], k, [], k)
                continue
            mine, theirs = (sums if j > 0 or r + power < size else k for r in (rank, partner))
            (other,) = yield from swap([partner], mine, [partner], theirs)
            x = add(other, 2 << j)
        if size > power:
            replies = yield from swap([] if above else twins, sums, twins if above else [], sums)
            x = replies[0] if above else x

        kept = clone(v, state)
        kept[own.common(x).indices] = 0.0
        for part in (part.common(x) for part in dropped):
            kept.index_add_(0, part.indices, part.values)
        mean = place_of_mean(bucket).zero_()
        mean[x.indices] = x.values / size
        return mean, kept, flags

    def select(self, bucket: Bucket, v: Vector) -> Elements:
        """The ceil(D d) largest elements of each tensor of d elements."""
        found = [torch.empty(0, dtype=torch.int64, device=v.device)]
        for s in bucket.segments:
            part = v[s.offset : s.offset + s.numel].abs()
            found.append(part.topk(share(s.numel, self._ratio)).indices.sort().values + s.offset)
        indices = torch.cat(found)
        return Elements(indices, v[indices])


def pack(x: Elements, capacity: int, numel: int) -> UInt8[Tensor, "nbytes"]:
    """int32 indices and fp32 values of `capacity` elements. Those beyond x have the index `numel`."""
    room = (0, capacity - x.indices.numel())
    indices = torch.nn.functional.pad(x.indices, room, value=numel).to(torch.int32)
    return torch.cat([indices.view(torch.uint8), torch.nn.functional.pad(x.values, room).view(torch.uint8)])


def opened(
    envelope: Envelope, payloads: Sequence[Tensor], nbytes: int, ranks: Sequence[int], numel: int
) -> Conversation[list[Elements]]:
    """Check and unpack payloads of these ranks. nbytes: of `pack`."""
    if not payloads:
        return []
    contents = envelope.open(payloads, nbytes, ranks)
    contents.check((yield from read(contents.scalars)))
    halves = [part.clone().chunk(2) if nbytes else (part, part) for part in contents.contents]
    found = [Elements(i.view(torch.int32).long(), values.view(torch.float32)) for i, values in halves]
    return [x[x.indices < numel] for x in found]
