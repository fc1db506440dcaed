"""Index formats of a payload.

A format plans a section of fixed size. The size depends only on the capacity and on the size of the bucket. Plain
indices always fit. The length of packed and Rice codes depends on the indices. Their plan has room for the likely
length. If a selection does not fit, a few of its elements are not sent. If a code would need more bytes than int32
indices, the section holds int32 indices instead.

The likely length: k of n elements are sent, and all are equally likely. Gaps are then geometric with p = k/n:

    P(gap >= s) = (1-p)**s

Packed, blocks of 128. A block's width exceeds w if its largest gap is 2**w or more:

    P(width > w) = 1 - (1 - (1-p)**(2**w))**128         E[width] = sum over w >= 0 of P(width > w)

Rice with parameter b, M = 2**b. A gap's high and low part, q = gap >> b and r = gap mod M, are independent:

    P(q >= 1) = x = (1-p)**M      E[q] = x/(1-x)      V_q = x/(1-x)**2      V_r = (1-p)/p**2 - M**2 V_q
    bits = k (b + 1 + E[q])

All gaps sum to n - k, so sum q = (n - k - sum r) / M varies little. For sums of k independent normal variables
with that sum given, the variance is k V_q V_r / (M**2 V_q + V_r).

The plan is the expected length plus one standard deviation, plus one byte per block. If the longest possible code
needs at most 4 more bytes, that length is planned instead. All of this uses decimal arithmetic with 50 digits,
which rounds equally on every machine, because all ranks must compute the same sizes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from functools import cache

import torch

from dgc.core.arguments import checked
from dgc.kernels.payload import BLOCKS, CHUNK, LARGEST_PARAMETER, PLAIN, IndexCode, IndexKind, block_count

INT32_MAX = torch.iinfo(torch.int32).max
PACKED_BLOCK, RICE_BLOCK = BLOCKS[IndexKind.PACKED], BLOCKS[IndexKind.RICE]
FURTHER_BITS = 32
ARITHMETIC = Context(prec=50)


class IndexFormat(ABC):
    """A format of indices."""

    @abstractmethod
    def plan(self, capacity: int, numel: int) -> IndexCode:
        """Plan the section for `capacity` of `numel` elements.

        Raises:
            ValueError: This format cannot hold such indices.
        """


@checked
@dataclass(frozen=True)
class PlainIndices(IndexFormat):
    """Indices within the bucket, not compressed.

    Args:
        dtype: "int64" or "int32".

    Raises:
        ValueError: `dtype` is neither.
    """

    dtype: str = "int64"

    def __post_init__(self) -> None:
        if self.dtype not in ("int64", "int32"):
            raise ValueError(f"plain indices are int64 or int32, not {self.dtype!r}")

    def plan(self, capacity: int, numel: int) -> IndexCode:
        if numel > INT32_MAX:
            raise ValueError(f"a bucket of {numel} elements is too large: the maximum is {INT32_MAX}")
        kind = IndexKind[self.dtype.upper()]
        return IndexCode(kind, capacity, numel, capacity * PLAIN[kind].itemsize)


@dataclass(frozen=True)
class PackedIndices(IndexFormat):
    """Gaps between indices in blocks of 128, each with the bit width of its largest gap: fast on any machine."""

    def plan(self, capacity: int, numel: int) -> IndexCode:
        return or_plain(plan_packed, capacity, numel)


@dataclass(frozen=True)
class RiceIndices(IndexFormat):
    """Gaps between indices in a Rice code, with one parameter per 512 gaps: about 0.1 bit above the entropy."""

    def plan(self, capacity: int, numel: int) -> IndexCode:
        return or_plain(plan_rice, capacity, numel)


@dataclass(frozen=True)
class ChunkIndices(IndexFormat):
    """Indices of 12 bits within chunks of 4096 elements, as of SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706).

    Chunk c of the bucket has the elements 4096 c .. 4096 c + 4095. A section has

        2 bytes for each chunk     number of its elements that are sent
        12 bits for each element   its index modulo 4096, in ascending order; two in 3 bytes, the first one low

    Bytes for k of n elements: 2 ceil(n / 4096) + 3 ceil(k / 2), rounded up to a multiple of 4. With 64 elements of
    each chunk these are 12.25 bits per element.

    A Rice code of the same indices needs 7.5 bits (`RiceIndices`). This one has a fixed length for any selection,
    and every element is found without the ones before it.

    Differences from the paper: Chunks divide the bucket and not a tensor, and their numbers of elements
    are sent, 0.25 bits per element. So any selection has a code, also one of chunks that cross bounds of tensors.

    Example:
        >>> memory, selector = ResidualMemory(decay=0.95), TopKPerChunk(4096)
        >>> compression = SparseCompressor(64 / 4096, memory, selector, TwoBitValues(), ChunkIndices())
    """

    def plan(self, capacity: int, numel: int) -> IndexCode:
        return or_plain(plan_chunks, capacity, numel)


def plan_chunks(capacity: int, numel: int) -> IndexCode:
    """Plan a code in chunks. Requires capacity >= 1."""
    chunks = -(-numel // CHUNK)
    nbytes = _nbytes(16 * chunks + 24 * ((capacity + 1) // 2))
    return IndexCode(IndexKind.CHUNKS, capacity, numel, nbytes, chunks)


def or_plain(code: Callable[[int, int], IndexCode], capacity: int, numel: int) -> IndexCode:
    """Plan the section of a code, or int32 indices if these need no more bytes."""
    plain = PlainIndices("int32").plan(capacity, numel)
    if not capacity:
        return plain
    coded = code(capacity, numel)
    return coded if coded.nbytes < plain.nbytes else plain


@cache
def plan_packed(capacity: int, numel: int) -> IndexCode:
    """Plan a packed code. Requires numel >= capacity >= 1."""
    full, rest = divmod(capacity, PACKED_BLOCK)
    with localcontext(ARITHMETIC):
        mean, variance = Decimal(0), Decimal(0)
        for blocks, size in ((full, PACKED_BLOCK), (1, rest)):
            width, spread = _width(size, capacity, numel)
            mean += blocks * size * width
            variance += blocks * size**2 * spread
        likely = _ceil(mean + variance.sqrt())
    blocks = block_count(capacity, PACKED_BLOCK)
    longest = packed_longest(capacity, numel)
    room = _room(likely, longest)
    sure = max(room // numel.bit_length(), PACKED_BLOCK * _sure_blocks(room, blocks, numel))
    nbytes = _nbytes(room + 8 * blocks)
    return IndexCode(IndexKind.PACKED, capacity, numel, nbytes, capacity if room == longest else sure)


@cache
def plan_rice(capacity: int, numel: int) -> IndexCode:
    """Plan a Rice code with the parameter b* that needs the fewest bits. Requires numel >= capacity >= 1."""
    with localcontext(ARITHMETIC):
        p = Decimal(capacity) / numel
        plans = [(_rice_bits(b, p, capacity), b) for b in range(LARGEST_PARAMETER)]
        exact, parameter = min(plans)
        likely = _ceil(exact)
    room = _room(likely, capacity * (parameter + 1) + (numel - capacity >> parameter))
    nbytes = _nbytes(room + 8 * block_count(capacity, RICE_BLOCK))
    return IndexCode(IndexKind.RICE, capacity, numel, nbytes, parameter)


def packed_longest(count: int, numel: int) -> int:
    """Return a number of bits that is enough for the gaps of any `count` of `numel` elements.

    For every w >= 1, a gap g needs at most w - 1 + g / 2**(w-1) bits. The largest gaps of B blocks sum to at most
    n, so the widths of the blocks sum to at most B (w-1) + n / 2**(w-1).
    """
    if count <= PACKED_BLOCK:
        return count * (numel - count).bit_length()
    return PACKED_BLOCK * _widths(block_count(count, PACKED_BLOCK), numel)


def _widths(blocks: int, numel: int) -> int:
    return min(blocks * w + (numel >> w) for w in range(LARGEST_PARAMETER))


def _sure_blocks(room: int, blocks: int, numel: int) -> int:
    """Return the largest number of full blocks that always fit into `room` bits, by bisection."""
    low, high = 0, blocks
    while low < high:
        middle = (low + high + 1) // 2
        if PACKED_BLOCK * _widths(middle, numel) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def _width(size: int, capacity: int, numel: int) -> tuple[Decimal, Decimal]:
    """Return the expected width of a block of `size` gaps, and its variance."""
    mean = square = Decimal(0)
    beyond = 1 - Decimal(capacity) / numel  # (1-p)**(2**w)
    for w in range(LARGEST_PARAMETER):
        wider = 1 - (1 - beyond) ** size
        mean += wider
        square += (2 * w + 1) * wider
        beyond *= beyond
    return mean, max(Decimal(0), square - mean * mean)


def _rice_bits(b: int, p: Decimal, capacity: int) -> Decimal:
    """Return the expected number of bits plus one standard deviation."""
    m = 2**b
    x = (1 - p) ** m
    v_q = x / (1 - x) ** 2
    v_r = max(Decimal(0), (1 - p) / p**2 - m**2 * v_q)
    both = m**2 * v_q + v_r
    variance = capacity * v_q * v_r / both if both else Decimal(0)
    return capacity * (b + 1 + x / (1 - x)) + variance.sqrt()


def _room(likely: int, longest: int) -> int:
    return longest if longest <= likely + FURTHER_BITS else likely


def _ceil(x: Decimal) -> int:
    return int(x.to_integral_value(rounding="ROUND_CEILING"))


def _nbytes(bits: int) -> int:
    """Return the bytes for these bits, rounded up to a multiple of 4."""
    return -(-bits // 32) * 4
