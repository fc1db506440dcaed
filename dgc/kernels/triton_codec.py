"""The GPU backend of payloads: Triton kernels with the same bytes and bits as `Codec` and `NativeMeanDecoder`.

Launches of `encode`, PyTorch's included: 2, for Rice codes 3, for plain indices and cast values 1 if the largest
magnitude is known, else 3 (in chunks 2, else 4); `seal_` and `words_of` 1. The mean of any number of payloads
takes 2, and 1 more if indices are coded. Nothing waits for the device.

The checksum is a sum, so each program adds what its own elements contribute, and no second pass reads the payload.
The program that finishes last writes the header. Its counters are zero again after each launch: there is one set
per device and stream, and no operation clears it.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float32, Int32, Int64, UInt8
from torch import Tensor

from dgc.kernels.codec import (
    BLOCKS,
    CHECKSUM_OF_ZEROS,
    CHUNK,
    CHUNK_BITS,
    HEADER_BYTES,
    LARGEST_PARAMETER,
    PACKED_SHARES,
    PLAIN,
    TABLES,
    WORDS,
    Codec,
    IndexCode,
    IndexKind,
    Layout,
    MeanDecoder,
    Terms,
    ValueKind,
    block_count,
)
from dgc.kernels.selection import SparseVector
from dgc.kernels.triton_selection import INTERPRETED, MAGNITUDE, find
from dgc.kernels.triton_tables import BLOCK, Launcher, as_rows, blocks, both, current_stream, moves, on_device

TILE = 2048  # elements of the mean per program
SCALED_KINDS = (ValueKind.FP16, ValueKind.BF16)
FEW = 256  # entries of a payload that `merge` reads at a time: a tile has few
PART = 512  # elements of a coded payload per program: fields need many registers
HEADER = tl.constexpr(HEADER_BYTES)
HEADER_WORDS = tl.constexpr(HEADER_BYTES // 8)
CONSTANT = tl.constexpr(CHECKSUM_OF_ZEROS)
LOW = tl.constexpr(0xFFFFFFFF)
INFINITE = tl.constexpr(0x7F800000)
NUMBERS = tl.constexpr(WORDS)
SUMMED = tl.constexpr(4096)  # words of a payload that one program adds at a time
FP32, FP16, BF16 = (tl.constexpr(int(kind)) for kind in (ValueKind.FP32, ValueKind.FP16, ValueKind.BF16))
SIGN, INT8 = (tl.constexpr(int(kind)) for kind in (ValueKind.SIGN, ValueKind.INT8))
INT64, PACKED, RICE, CHUNKS = (tl.constexpr(int(kind)) for kind in [*IndexKind][1:])
WIDEST, WITHIN, INSIDE = (tl.constexpr(i) for i in (LARGEST_PARAMETER, CHUNK_BITS, CHUNK - 1))
SHARES = tl.constexpr(len(PACKED_SHARES) + 2)  # the whole selection, these shares, and what fits for any indices
# A payload's counters: sum of the words, programs that have finished; for each share that is tried, bits of its
# code, and bits of its largest magnitude.
SUM, FINISHED, BITS, LARGEST = (tl.constexpr(i) for i in (0, 1, 2, 2 + SHARES.value))
COUNTERS = 2 + 2 * SHARES.value
# What is known of a code before it is written: elements that are sent, bits of their largest magnitude, first bit
# of the unary part; then per block its parameter, its first bit, and the unary bits before it.
KEPT, MOST, END, FOUND = (tl.constexpr(i) for i in range(4))


@triton.jit
@no_type_check
def contribution(bits, byte):
    """Return what elements add to the sum of the checksum. bits: those of an element that begins at `byte`."""
    return (bits << (byte % 8 * 8)) * (2 * (byte // 8) + 1)


@triton.jit
@no_type_check
def checksum_of(total):
    return ((total ^ (total >> 32)) & LOW) ^ CONSTANT


@triton.jit
@no_type_check
def write_header(payload, counters, count, where, bounds, n_bounds, scale, ratio, form, LANES: tl.constexpr):
    """Write the header, once all programs have added their parts of the sum, and clear the counters.

    where: the gradient's first unusable element, or a number from the end of `bounds` on.
    """
    number = tl.zeros([], dtype=tl.int64)
    lane = tl.arange(0, LANES)
    for i in range(0, n_bounds, LANES):
        reached = tl.load(bounds + i + lane, mask=i + lane < n_bounds, other=0) <= where
        number += tl.sum((reached & (i + lane < n_bounds)).to(tl.int64), 0)
    number = tl.where(number < n_bounds, number, 0)  # no element is unusable
    opening = (count.to(tl.int64) & LOW) | (number << 32)
    closing = (ratio.to(tl.int64) & LOW) | (form.to(tl.int64) << 32)
    scaled = (scale.to(tl.int32, bitcast=True).to(tl.int64) & LOW) << 32
    total = tl.atomic_add(counters + SUM, 0) + opening + 3 * scaled + 5 * closing
    header = payload.to(tl.pointer_type(tl.int64))
    tl.store(header, opening)
    tl.store(header + 1, scaled | checksum_of(total))
    tl.store(header + 2, closing)
    tl.store(counters + SUM, 0)
    tl.store(counters + FINISHED, 0)


@triton.jit
@no_type_check
def finish(
    payload, part, counters, n_programs, count, first, bounds, n_bounds, scale, ratio, form, LANES: tl.constexpr
):
    """Add this program's part of the sum. The last program writes the header."""
    tl.atomic_add(counters + SUM, part)
    if tl.atomic_add(counters + FINISHED, 1) == n_programs - 1:
        where = tl.load(first)
        write_header(payload, counters, tl.load(count), where, bounds, n_bounds, scale, ratio, form, LANES)


@moves("values", "")
@triton.jit(do_not_specialize=["capacity"])
@no_type_check
def largest_of(values, capacity, largest, BLOCK: tl.constexpr):
    """Find the bits of the largest finite magnitude, which are ordered as these."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(values + i, mask=i < capacity, other=0.0).to(tl.int32, bitcast=True) & MAGNITUDE
    tl.atomic_max(largest, tl.max(tl.where(bits < INFINITE, bits, 0), 0), sem="relaxed")


@triton.jit
@no_type_check
def cast_to(x, limit, most, KIND: tl.constexpr, LANES: tl.constexpr):
    """Return (bits of x / scale, what they decode to, scale). most: bits of the largest magnitude."""
    finite = (x.to(tl.int32, bitcast=True) & MAGNITUDE) < INFINITE
    x = tl.where(finite, tl.minimum(tl.maximum(x, -limit), limit), 0.0)
    nan = tl.full([LANES], 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    exponent = tl.zeros([], dtype=tl.int32)
    if KIND != FP32:
        # 141 = 126 + 15: the largest scaled magnitude is below 2**15
        most = tl.minimum(most.to(tl.float32, bitcast=True), limit).to(tl.int32, bitcast=True)
        exponent = tl.where(most > 0, tl.minimum(tl.maximum((most >> 23) - 141, -126), 126), 0)
    scale = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    if KIND == FP32:
        y = tl.where(finite, x, nan)
        bits = y.to(tl.int32, bitcast=True)
    else:
        x = x * inverse
        if KIND == FP16:
            half = x.to(tl.float16)
            bits = tl.where(finite, half.to(tl.int16, bitcast=True), 0x7E00)
            y = half.to(tl.float32)
        else:
            wide = x.to(tl.int32, bitcast=True)
            # to nearest even: Triton's interpreter truncates
            wide = (wide + 0x7FFF + ((wide >> 16) & 1)) & -0x10000
            bits = tl.where(finite, wide >> 16, 0x7FC0).to(tl.int16)
            y = wide.to(tl.float32, bitcast=True)
        bits = bits.to(tl.int16)
        y = tl.where(finite, y * scale, nan)
    return bits, y, scale


@triton.jit
@no_type_check
def store_cast(payload, begin, i, bits, live, KIND: tl.constexpr):
    """Write the bits of values i. Returns what they add to the sum of the checksum."""
    tl.store((payload + begin).to(tl.pointer_type(tl.int32 if KIND == FP32 else tl.int16)) + i, bits, mask=live)
    if KIND == FP32:
        part = contribution(bits.to(tl.int64) & LOW, begin + 4 * i.to(tl.int64))
    else:
        part = contribution(bits.to(tl.int64) & 0xFFFF, begin + 2 * i.to(tl.int64))
    return part


@moves("indices values bounds", "payload decoded", lambda a: both(16 * a.programs))
@triton.jit(do_not_specialize=["capacity", "n_programs", "n_bounds", "begin", "nbytes", "ratio", "form"])
@no_type_check
def write_plain(
    indices, values, count, first, bounds, n_bounds, capacity, limit, largest, payload, begin, nbytes, decoded,
    ratio, form, counters, n_programs, WIDE: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write indices and cast values. begin: first byte of the values. WIDE: indices of 8 bytes."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < capacity
    index = tl.load(indices + i, mask=live, other=0).to(tl.int64)
    if WIDE:
        tl.store((payload + HEADER).to(tl.pointer_type(tl.int64)) + i, index, mask=live)
        part = index * (2 * (i + HEADER_WORDS) + 1)
    else:
        tl.store((payload + HEADER).to(tl.pointer_type(tl.int32)) + i, index.to(tl.int32), mask=live)
        part = contribution(index, 4 * i.to(tl.int64) + HEADER)
    x = tl.load(values + i, mask=live, other=0.0)
    most = tl.zeros([], dtype=tl.int32)
    if KIND != FP32:
        most = tl.load(largest)
    bits, y, scale = cast_to(x, limit, most, KIND, BLOCK)
    part += store_cast(payload, begin, i, bits, live, KIND)
    tl.store(decoded + i, y, mask=live)
    if tl.program_id(0) == 0:
        end = begin + capacity * (4 if KIND == FP32 else 2)
        lane = tl.arange(0, 8)
        tl.store(payload + end + lane, tl.zeros([8], dtype=tl.uint8), mask=end + lane < nbytes)
    total = tl.sum(tl.where(live, part, 0), 0)
    finish(payload, total, counters, n_programs, count, first, bounds, n_bounds, scale, ratio, form, BLOCK)


@moves("payloads bounds", "", lambda a: both(16 * a.programs))
@triton.jit(do_not_specialize=["n_words", "n_bounds", "ratio", "form", "n_programs"])
@no_type_check
def seal(
    payloads, n_words, count, first, bounds, n_bounds, scale, ratio, form, counters, n_programs,
    BLOCK: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Write the headers of adjacent payloads, with `n_programs` programs for each."""
    row = tl.program_id(0) // n_programs
    payload, counters = payloads + row.to(tl.int64) * n_words * 8, counters + row * LINE
    i = tl.program_id(0) % n_programs * BLOCK + tl.arange(0, BLOCK) + HEADER_WORDS
    word = tl.load(payload.to(tl.pointer_type(tl.int64)) + i, mask=i < n_words, other=0)
    part = tl.sum(word * (2 * i.to(tl.int64) + 1), 0)
    known = tl.load(scale)
    finish(payload, part, counters, n_programs, count, first, bounds, n_bounds, known, ratio, form, BLOCK)


# --- codes of indices, and tables of values ---------------------------------------------------------
#
# Fields share words, and are added to a payload of zeros with integer atomics. A packed or Rice code is measured
# first, and the program that finishes last decides how many elements fit. Then the places of all fields are known.


@triton.jit
@no_type_check
def element(j, count, kept):
    """Return the element of the selection that is sent as number j: `thin`."""
    which = j.to(tl.int64)
    if kept < count:
        which = which * count // tl.maximum(kept, 1)
    return which


@triton.jit
@no_type_check
def gaps_at(indices, j, count, kept):
    """Return the gaps before the elements j that are sent, 0 from `kept` on."""
    live = j < kept
    index = tl.load(indices + element(j, count, kept), mask=live, other=0)
    before = tl.load(indices + element(j - 1, count, kept), mask=live & (j > 0), other=-1)
    return tl.where(live, index - before - 1, 0)


@triton.jit
@no_type_check
def rows_of(first, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return ROWS blocks and their elements [ROWS, SIZE], from element `first` on."""
    row = tl.arange(0, ROWS)
    return first // SIZE + row, first + row[:, None] * SIZE + tl.arange(0, SIZE)[None, :]


@triton.jit
@no_type_check
def counts_at(block, kept, SIZE: tl.constexpr):
    return tl.minimum(tl.maximum(kept - block * SIZE, 0), SIZE)


@triton.jit
@no_type_check
def clear(payload, n_words, n_programs, LANES: tl.constexpr):
    """Set the words of a payload to zero, each program a part of them."""
    lane = tl.arange(0, LANES)
    words = payload.to(tl.pointer_type(tl.int64))
    for i in range(tl.program_id(0) * LANES, n_words, n_programs * LANES):
        tl.store(words + i + lane, tl.zeros([LANES], dtype=tl.int64), mask=i + lane < n_words)


@triton.jit
@no_type_check
def largest_in(x):
    """Return the bits of the largest finite magnitude of x [rows, columns]."""
    bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
    return tl.max(tl.max(tl.where(bits < INFINITE, bits, 0), 1), 0).to(tl.int64)


@triton.jit
@no_type_check
def add_up(source, n, LANES: tl.constexpr):
    """Replace n numbers with the sums of those before. Returns the sum of all."""
    lane = tl.arange(0, LANES)
    total = tl.zeros([], dtype=tl.int64)
    for i in range(0, n, LANES):
        own = tl.load(source + i + lane, mask=i + lane < n, other=0)
        tl.store(source + i + lane, total + tl.cumsum(own, 0) - own, mask=i + lane < n)
        total += tl.sum(own, 0)
    return total


@moves("", "payload widths", lambda a: (SHARES.value * (2 * a.indices.nbytes + a.values.nbytes), 0))
@triton.jit(do_not_specialize=["n_blocks", "room", "sure", "n_words", "n_programs"])
@no_type_check
def measure_packed(
    indices, values, count, shares, n_blocks, room, sure, payload, n_words, widths, found, counters, n_programs,
    SCALED: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Each program measures LANES elements of one share of the selection. room: bits for the gaps.

    widths: those of the blocks of each share. sure: number of elements that fit for any indices.
    """
    clear(payload, n_words, n_programs, LANES)
    share = tl.program_id(0) % SHARES
    n = tl.load(count)
    kept = (n.to(tl.int64) * tl.load(shares + share) // 128).to(tl.int32)
    kept = tl.where(share == SHARES - 1, tl.minimum(n, sure), kept)
    block, j = rows_of(tl.program_id(0) // SHARES * LANES, LANES // SIZE, SIZE)
    most = tl.max(gaps_at(indices, j, n, kept), 1)
    # the bit length, from the exponent
    width = tl.maximum((most.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1022, 0)
    tl.store(widths + share.to(tl.int64) * n_blocks + block, width.to(tl.int32), mask=block < n_blocks)
    tl.atomic_add(counters + BITS + share, tl.sum(width * counts_at(block, kept, SIZE), 0))
    if SCALED:
        x = tl.load(values + element(j, n, kept), mask=j < kept, other=0.0)
        tl.atomic_max(counters + LARGEST + share, largest_in(x))
    tl.debug_barrier()  # all threads have written
    if tl.atomic_add(counters + FINISHED, 1) == n_programs - 1:
        chosen = tl.zeros([], dtype=tl.int32) + (SHARES - 1)
        for i in tl.static_range(SHARES - 1):
            fits = tl.atomic_add(counters + BITS + (SHARES - 2 - i), 0) <= room
            chosen = tl.where(fits, SHARES - 2 - i, chosen)
        final = (n.to(tl.int64) * tl.load(shares + chosen) // 128).to(tl.int32)
        final = tl.where(chosen == SHARES - 1, tl.minimum(n, sure), final)
        tl.store(found + KEPT, final.to(tl.int64))
        tl.store(found + MOST, tl.atomic_add(counters + LARGEST + chosen, 0))
        lane = tl.arange(0, LANES)
        for i in range(0, n_blocks, LANES):
            b = i + lane
            own = tl.load(widths + chosen.to(tl.int64) * n_blocks + b, mask=b < n_blocks, other=0).to(tl.int64)
            tl.store(found + FOUND + b, own, mask=b < n_blocks)
            tl.store(found + FOUND + n_blocks + b, own * counts_at(b, final, SIZE), mask=b < n_blocks)
        tl.debug_barrier()
        add_up(found + FOUND + n_blocks, n_blocks, LANES)
        tl.debug_barrier()
        tl.store(counters + lane, tl.zeros([LANES], dtype=tl.int64), mask=lane < LARGEST + SHARES)


@triton.jit
@no_type_check
def rice_parameters(gaps, counts):
    """Return the parameter of each row: `codec.rice_parameters`."""
    b = tl.zeros_like(counts)
    for i in tl.static_range(5):
        further = b + (16 >> i)
        # the shortening of all unary parts by the last bit, which costs one bit per element
        saved = tl.sum((gaps >> (further - 1)[:, None]) - (gaps >> further[:, None]), 1)
        b = tl.where(saved > counts, further, b)
    return b


@moves("indices indices", "payload")
@triton.jit(do_not_specialize=["n_blocks", "room", "parameter", "n_words", "n_programs"])
@no_type_check
def measure_rice(
    indices, count, n_blocks, room, parameter, payload, n_words, found, counters, n_programs,
    SIZE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Find how many elements fit: `codec.rice_kept`. room: bits for the gaps."""
    clear(payload, n_words, n_programs, LANES)
    n = tl.load(count)
    block, j = rows_of(tl.program_id(0) * LANES, LANES // SIZE, SIZE)
    gaps, counts = gaps_at(indices, j, n, n), counts_at(block, n, SIZE)
    b = rice_parameters(gaps, counts)
    best = tl.sum((gaps >> b[:, None]).to(tl.int64), 1) + counts * (b + 1)
    fixed = tl.sum((gaps >> parameter).to(tl.int64), 1) + counts * (parameter + 1)
    tl.atomic_add(counters + BITS, tl.sum(best, 0))
    tl.atomic_add(counters + BITS + 1, tl.sum(fixed, 0))
    if tl.atomic_add(counters + FINISHED, 1) == n_programs - 1:
        beyond = tl.atomic_add(counters + BITS + 1, 0) - room
        each = tl.maximum(parameter, 1)
        fits = tl.atomic_add(counters + BITS, 0) <= room
        tl.store(found + KEPT, n - tl.where(fits, 0, (beyond + each - 1) // each))
        for i in tl.static_range(3):
            tl.store(counters + FINISHED + i, 0)


@moves("indices indices indices values", "own_indices own_values", lambda a: both(16 * a.n_blocks))
@triton.jit(do_not_specialize=["capacity", "n_blocks", "n_programs"])
@no_type_check
def place_rice(
    indices, values, count, capacity, n_blocks, found, own_indices, own_values, own_count, counters, n_programs,
    SCALED: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Copy the elements that are sent, and find the parameters and the first bits of their blocks."""
    n, kept = tl.load(count), tl.load(found + KEPT).to(tl.int32)
    block, j = rows_of(tl.program_id(0) * LANES, LANES // SIZE, SIZE)
    which = element(j, n, kept)
    tl.store(own_indices + j, tl.load(indices + which, mask=j < kept, other=0), mask=j < capacity)
    x = tl.load(values + which, mask=j < kept, other=0.0)
    tl.store(own_values + j, x, mask=j < capacity)
    gaps, counts = gaps_at(indices, j, n, kept), counts_at(block, kept, SIZE)
    b = rice_parameters(gaps, counts)
    own = found + FOUND + block
    tl.store(own, b.to(tl.int64), mask=block < n_blocks)
    tl.store(own + n_blocks, (b * counts).to(tl.int64), mask=block < n_blocks)
    tl.store(own + 2 * n_blocks, tl.sum((gaps >> b[:, None]).to(tl.int64), 1) + counts, mask=block < n_blocks)
    if SCALED:
        tl.atomic_max(counters + LARGEST, largest_in(x))
    tl.debug_barrier()  # all threads have written
    if tl.atomic_add(counters + FINISHED, 1) == n_programs - 1:
        tl.store(own_count, kept)
        tl.store(found + MOST, tl.atomic_add(counters + LARGEST, 0))
        tl.store(found + END, add_up(found + FOUND + n_blocks, n_blocks, LANES))
        add_up(found + FOUND + 2 * n_blocks, n_blocks, LANES)
        tl.store(counters + FINISHED, 0)
        tl.store(counters + LARGEST, 0)


@triton.jit
@no_type_check
def add_field(payload, at, field, live):
    """Add fields of up to 31 bits, from bit `at` of the payload on. Returns their part of the checksum's sum."""
    word = at >> 5
    wide = tl.where(live, field.to(tl.int64) << (at & 31), 0)
    low, high = wide & LOW, wide >> 32
    words = payload.to(tl.pointer_type(tl.int32)) + word
    tl.atomic_add(words, low.to(tl.int32), mask=low > 0, sem="relaxed")
    tl.atomic_add(words + 1, high.to(tl.int32), mask=high > 0, sem="relaxed")
    return contribution(low, 4 * word) + contribution(high, 4 * word + 4)


@triton.jit
@no_type_check
def write_gaps(
    indices, j, count, kept, n_blocks, found, payload, INDEX: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr
):
    """Write the parameters and fields of the elements j. Returns what they add to the checksum's sum."""
    live = j < kept
    gap = gaps_at(indices, j, count, kept)
    block = j // SIZE
    inside = block < n_blocks
    own = found + FOUND + block
    width = tl.load(own, mask=inside, other=0)
    begin = tl.zeros_like(width) + 8 * HEADER
    part = add_field(payload, begin + 8 * block, width, inside & (j % SIZE == 0))
    begin += 8 * n_blocks
    at = begin + tl.load(own + n_blocks, mask=inside, other=0) + (j % SIZE) * width
    part += add_field(payload, at, gap & ((1 << width) - 1), live)
    if INDEX == RICE:
        unary = tl.where(live, (gap >> width) + 1, 0)
        before = tl.load(found + FOUND + 2 * n_blocks + tl.program_id(0) * (LANES // SIZE))
        at = begin + (tl.load(found + END) + before) + tl.cumsum(unary, 0) - 1
        part += add_field(payload, at, tl.zeros_like(at) + 1, live)
    return part


@triton.jit
@no_type_check
def write_within(index, j, live, n_chunks, payload):
    """As `write_gaps`: count the elements of their chunks, and write their indices within them."""
    begin = tl.zeros_like(index).to(tl.int64) + 8 * HEADER
    part = add_field(payload, begin + 16 * (index >> WITHIN), tl.zeros_like(index) + 1, live)
    within = index & INSIDE
    return part + add_field(payload, begin + 16 * n_chunks + j.to(tl.int64) * WITHIN, within, live)


@triton.jit
@no_type_check
def values_at(values, j, live, count, kept, limit):
    x = tl.load(values + element(j, count, kept), mask=live, other=0.0)
    return tl.minimum(tl.maximum(x, -limit), limit)


@triton.jit
@no_type_check
def sent_below(indices, count, kept, index):
    """Return the number of elements that are sent of lower indices."""
    low = tl.zeros([], dtype=tl.int32)
    high = kept
    while low < high:
        middle = (low + high) // 2
        below = tl.load(indices + element(middle, count, kept)) < index
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
@no_type_check
def store_number(payload, place, x):
    """Write an fp32 number. Returns what it adds to the sum of the checksum."""
    tl.store((payload + place).to(tl.pointer_type(tl.float32)), x)
    return contribution(x.to(tl.int32, bitcast=True).to(tl.int64) & LOW, place)


@triton.jit
@no_type_check
def int8_segment(values, first, last, count, kept, limit, payload, place, codes, decoded, LANES: tl.constexpr):
    """Write the scale and codes of elements first .. last - 1. Returns what they add to the checksum's sum."""
    lane = tl.arange(0, LANES)
    most = tl.zeros([], dtype=tl.float32)
    for i in range(first, last, LANES):
        x = values_at(values, i + lane, i + lane < last, count, kept, limit)
        most = tl.maximum(most, tl.max(tl.abs(x), 0))
    smallest = (tl.zeros([], dtype=tl.int32) + 1).to(tl.float32, bitcast=True)
    scale = tl.where(most > 0, tl.maximum(tl.math.div_rn(most, tl.zeros_like(most) + 127.0), smallest), 0.0)
    step = tl.where(most > 0, scale, 1.0)
    part = store_number(payload, place, scale)
    for i in range(first, last, LANES):
        j = i + lane
        live = j < last
        y = tl.math.div_rn(values_at(values, j, live, count, kept, limit), tl.zeros([LANES], tl.float32) + step)
        # to nearest even: at 2**23 and above there are no fractions
        y = tl.minimum(tl.maximum((y + 12582912.0) - 12582912.0, -127.0), 127.0)
        code = y.to(tl.int8)
        tl.store((payload + codes).to(tl.pointer_type(tl.int8)) + j, code, mask=live)
        tl.store(decoded + j, code.to(tl.float32) * scale, mask=live)
        part += tl.sum(tl.where(live, contribution(code.to(tl.int64) & 0xFF, codes + j.to(tl.int64)), 0), 0)
    return part


# Sums in the order of indices are sequential. A sum of n fp32 numbers in fp64 is exact, and so the same in any
# order, if all partial sums are at most 2**53 times the last bit of the smallest number. Of exponents that differ
# by d it is if n <= 2**(29 - d). Else, and where the order decides a bin, one thread adds the numbers in turn.


@triton.jit
@no_type_check
def sums_of(values, first, last, count, kept, limit, SIGNED: tl.constexpr, LANES: tl.constexpr):
    """Return (the sum of elements first .. last - 1, or of their magnitudes; whether any order gives it)."""
    lane = tl.arange(0, LANES)
    total = tl.zeros([], dtype=tl.float64)
    lowest = tl.zeros([], dtype=tl.int32) + 255
    highest = tl.zeros([], dtype=tl.int32)
    for i in range(first, last, LANES):
        x = values_at(values, i + lane, i + lane < last, count, kept, limit)
        bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
        exponent = tl.maximum(bits >> 23, 1)
        lowest = tl.minimum(lowest, tl.min(tl.where(bits > 0, exponent, 255), 0))
        highest = tl.maximum(highest, tl.max(tl.where(bits > 0, exponent, 0), 0))
        total += tl.sum((x if SIGNED else tl.abs(x)).to(tl.float64), 0)
    spread = tl.maximum(highest - lowest, 0)
    exact = (spread < 30) & (last - first <= (1 << tl.maximum(29 - spread, 0)))
    if not exact:
        total = tl.zeros([], dtype=tl.float64)
        for j in range(first, last):
            x = values_at(values, tl.cast(j, tl.int32), j < last, count, kept, limit)
            total += (x if SIGNED else tl.abs(x)).to(tl.float64)
    return total, exact


@triton.jit
@no_type_check
def sign_segment(values, first, last, count, kept, limit, payload, place, codes, decoded, LANES: tl.constexpr):
    """As `int8_segment`: the mean magnitude, and signs."""
    total, _ = sums_of(values, first, last, count, kept, limit, False, LANES)
    mean = (total / tl.maximum(last - first, 1).to(tl.float64)).to(tl.float32)
    part = store_number(payload, place, mean)
    lane = tl.arange(0, LANES)
    for i in range(first, last, LANES):
        j = i + lane
        live = j < last
        negative = live & (values_at(values, j, live, count, kept, limit) < 0)
        at = 8 * tl.cast(codes, tl.int64) + j
        part += tl.sum(add_field(payload, at, tl.zeros_like(at) + 1, negative), 0)
        tl.store(decoded + j, tl.where(negative, -mean, mean), mask=live)
    return part


@triton.jit
@no_type_check
def bin_of(above, width):
    return (above >= -width).to(tl.int32) + (above >= 0).to(tl.int32) + (above >= width).to(tl.int32)


@triton.jit
@no_type_check
def two_bit_segment(
    values, first, last, count, kept, limit, widths, payload, place, codes, decoded, LANES: tl.constexpr
):
    """As `int8_segment`: the means of 4 bins, and the numbers of bins. widths: that of a bin, in deviations."""
    lane = tl.arange(0, LANES)
    total, exact = sums_of(values, first, last, count, kept, limit, True, LANES)
    n = tl.maximum(last - first, 1).to(tl.float64)
    mean = total / n
    squares = tl.zeros([], dtype=tl.float64)
    for i in range(first, last, LANES):
        live = i + lane < last
        above = values_at(values, i + lane, live, count, kept, limit).to(tl.float64) - mean
        squares += tl.sum(tl.where(live, above * above, 0.0), 0)
    width = tl.sqrt(squares / n) * tl.load(widths)
    # sums of n squares in two orders differ by less than 2 n roundings
    slack = width * ((4 * n + 32) * 1.1102230246251565e-16)
    near = tl.zeros([], dtype=tl.int32)
    for i in range(first, last, LANES):
        live = i + lane < last
        above = values_at(values, i + lane, live, count, kept, limit).to(tl.float64) - mean
        near += tl.sum((live & (tl.abs(tl.abs(above) - width) <= slack)).to(tl.int32), 0)
    if (near > 0) & (squares > 0):
        squares = tl.zeros([], dtype=tl.float64)
        for j in range(first, last):
            x = values_at(values, tl.cast(j, tl.int32), j < last, count, kept, limit)
            above = x.to(tl.float64) - mean
            squares += above * above
        width = tl.sqrt(squares / n) * tl.load(widths)
    number = tl.arange(0, 4)
    sums, counts = tl.zeros([4], dtype=tl.float64), tl.zeros([4], dtype=tl.int32)
    part = tl.zeros([], dtype=tl.int64)
    for i in range(first, last, LANES):
        j = i + lane
        live = j < last
        x = values_at(values, j, live, count, kept, limit).to(tl.float64)
        bin = bin_of(x - mean, width)
        part += tl.sum(add_field(payload, 8 * tl.cast(codes, tl.int64) + 2 * j, bin, live), 0)
        for b in tl.static_range(4):
            own = live & (bin == b)
            sums += tl.where(number == b, tl.sum(tl.where(own, x, 0.0), 0), 0.0)
            counts += tl.where(number == b, tl.sum(own.to(tl.int32), 0), 0)
    if not exact:
        sums = tl.zeros([4], dtype=tl.float64)
        for j in range(first, last):
            x = values_at(values, tl.cast(j, tl.int32), j < last, count, kept, limit).to(tl.float64)
            sums += tl.where(number == bin_of(x - mean, width), x, 0.0)
    means = (sums / tl.maximum(counts, 1).to(tl.float64)).to(tl.float32)
    part += tl.sum(store_number(payload, place + 4 * number, means), 0)
    for i in range(first, last, LANES):
        j = i + lane
        bin = bin_of(values_at(values, j, j < last, count, kept, limit).to(tl.float64) - mean, width)
        y = tl.zeros([LANES], dtype=tl.float32)
        for b in tl.static_range(4):
            y = tl.where(bin == b, tl.sum(tl.where(number == b, means, 0.0), 0), y)
        tl.store(decoded + j, y, mask=j < last)
    return part


CODED_SIZES = "capacity n_blocks n_segments begin codes ratio form n_programs n_bounds".split()


@moves(
    "indices indices indices values values values values bounds widths tensors payload",
    "payload decoded own_indices own_values",
)
@triton.jit(do_not_specialize=CODED_SIZES)
@no_type_check
def write_coded(
    indices, values, count, first, tensors, n_bounds, capacity, limit, largest, found, n_blocks, bounds,
    n_segments, widths, payload, begin, codes, decoded, own_indices, own_values, own_count, ratio, form, counters,
    n_programs, INDEX: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write a payload of coded indices, or tables, or both, into zeros.

    A program writes LANES elements, or the table and the codes of a segment. begin, codes: first byte of the
    values, and of the codes. own_*: written if indices are packed: the part of the selection that is sent. If not,
    the selection is that part.
    """
    p = tl.program_id(0)
    n_parts = (capacity + LANES - 1) // LANES
    n = tl.load(count)
    kept = n
    scale = tl.zeros([], dtype=tl.float32) + 1.0
    part = tl.zeros([], dtype=tl.int64)
    if INDEX == PACKED:
        kept = tl.load(found + KEPT).to(tl.int32)
    if p < n_parts:
        j = p * LANES + tl.arange(0, LANES)
        inside, live = j < capacity, j < kept
        which = element(j, n, kept)
        index = tl.load(indices + which, mask=live, other=0)
        x = tl.load(values + which, mask=live, other=0.0)
        if INDEX == CHUNKS:
            sums = write_within(index, j, live, n_blocks, payload)
        elif INDEX > INT64:
            sums = write_gaps(indices, j, n, kept, n_blocks, found, payload, INDEX, SIZE, LANES)
            if INDEX == PACKED:
                tl.store(own_indices + j, index, mask=inside)
                tl.store(own_values + j, x, mask=inside)
                tl.store(own_count, kept, mask=p == 0)
        elif INDEX == INT64:
            tl.store((payload + HEADER).to(tl.pointer_type(tl.int64)) + j, index.to(tl.int64), mask=inside)
            sums = index.to(tl.int64) * (2 * (j + HEADER_WORDS) + 1)
        else:
            tl.store((payload + HEADER).to(tl.pointer_type(tl.int32)) + j, index, mask=inside)
            sums = contribution(index.to(tl.int64), 4 * j.to(tl.int64) + HEADER)
        if KIND <= BF16:
            most = tl.zeros([], dtype=tl.int32)
            if KIND != FP32:
                most = tl.load(largest).to(tl.int32)
            bits, y, scale = cast_to(x, limit, most, KIND, LANES)
            sums += store_cast(payload, begin, j, bits, live, KIND)
            tl.store(decoded + j, tl.where(live, y, 0.0), mask=inside)
        else:
            tl.store(decoded + j, tl.zeros([LANES], dtype=tl.float32), mask=inside & (j >= kept))
        part = tl.sum(tl.where(inside, sums, 0), 0)
    if KIND > BF16:
        s = p - n_parts
        if (s >= 0) & (s < n_segments):
            # elements outside all segments belong to the first or last
            low = tl.zeros([], dtype=tl.int32)
            if s > 0:
                low = sent_below(indices, n, kept, tl.load(bounds + s))
            high = kept
            if s < n_segments - 1:
                high = sent_below(indices, n, kept, tl.load(bounds + s + 1))
            if KIND == INT8:
                place = begin + 4 * s.to(tl.int64)
                part = int8_segment(values, low, high, n, kept, limit, payload, place, codes, decoded, LANES)
            elif KIND == SIGN:
                place = begin + 4 * s.to(tl.int64)
                part = sign_segment(values, low, high, n, kept, limit, payload, place, codes, decoded, LANES)
            else:
                place = begin + 16 * s.to(tl.int64)
                part = two_bit_segment(
                    values, low, high, n, kept, limit, widths, payload, place, codes, decoded, LANES
                )
    number = found if INDEX == PACKED else count
    finish(payload, part, counters, n_programs, number, first, tensors, n_bounds, scale, ratio, form, LANES)


# --- the mean of payloads --------------------------------------------------------------------------


@triton.jit
@no_type_check
def sum_of_words(payload, nbytes):
    """Return what the checksum of a payload is made of, with its own field taken as zero, and that field."""
    lane = tl.arange(0, SUMMED)
    total = tl.zeros([], dtype=tl.int64)
    for i in range(0, nbytes // 8, SUMMED):
        word = tl.load(payload.to(tl.pointer_type(tl.int64)) + i + lane, mask=i + lane < nbytes // 8, other=0)
        total += tl.sum(word * (2 * (i + lane).to(tl.int64) + 1), 0)
    stored = tl.load(payload.to(tl.pointer_type(tl.int32)) + 2).to(tl.int64) & LOW
    return total - 3 * stored, stored


@triton.jit
@no_type_check
def index_at(indices, j, live, WIDE: tl.constexpr):
    if WIDE:
        index = tl.load(indices.to(tl.pointer_type(tl.int64)) + j, mask=live, other=0)
    else:
        index = tl.load(indices.to(tl.pointer_type(tl.int32)) + j, mask=live, other=0).to(tl.int64)
    return index


@triton.jit
@no_type_check
def read_field(words, at, width, live):
    """Return fields of up to 31 bits, from bit `at` on. words: a pointer, and the number of words."""
    source, n_words = words
    word = at >> 5
    low = tl.load(source + word, mask=live & (word < n_words), other=0).to(tl.int64) & LOW
    high = tl.load(source + word + 1, mask=live & (word + 1 < n_words), other=0).to(tl.int64)
    one = tl.zeros_like(width) + 1
    return ((low | (high << 32)) >> (at & 31)) & ((one << width) - 1)


@moves("payloads starts", "starts indices")
@triton.jit(do_not_specialize=["stride", "capacity", "n_chunks", "steps", "nbytes"])
@no_type_check
def unpack_chunks(
    payloads, stride, capacity, n_chunks, steps, nbytes, starts, indices, flags, LANES: tl.constexpr
):
    """One program per rank: as `unpack`. That indices ascend is left to `check`."""
    r = tl.program_id(0).to(tl.int64)
    payload = payloads + r * stride
    count = tl.load(payload.to(tl.pointer_type(tl.int32)))
    section = payload + HEADER
    words = (section.to(tl.pointer_type(tl.int32)), nbytes // 4)
    starts += r * n_chunks
    lane = tl.arange(0, LANES)
    wrong = tl.zeros([], dtype=tl.int32)
    total = tl.zeros([], dtype=tl.int64)
    for i in range(0, n_chunks, LANES):
        inside = i + lane < n_chunks
        given = tl.load(section.to(tl.pointer_type(tl.int16)) + i + lane, mask=inside, other=0).to(tl.int64)
        own = tl.minimum(tl.maximum(given, 0), INSIDE + 1)
        wrong += tl.sum((given != own).to(tl.int32), 0)
        tl.store(starts + i + lane, total + tl.cumsum(own, 0) - own, mask=inside)
        total += tl.sum(own, 0)
    tl.debug_barrier()  # starts are written
    for i in range(0, tl.minimum(tl.maximum(count, 0), capacity), LANES):
        j = (i + lane).to(tl.int64)
        chunk = tl.where(j < total, find(starts, n_chunks, steps, j), n_chunks)
        width = tl.zeros_like(j) + WITHIN
        index = (chunk << WITHIN) + read_field(
            words, 16 * tl.cast(n_chunks, tl.int64) + j * WITHIN, width, j < count
        )
        tl.store(indices + r * capacity + j, index.to(tl.int32), mask=(j < count) & (j < capacity))
    tl.store(flags + r, ((wrong == 0) & (total == count)).to(tl.int32))


@moves("payloads payloads starts ones", "starts ones indices")
@triton.jit(do_not_specialize=["stride", "capacity", "numel", "n_blocks", "nbytes"])
@no_type_check
def unpack(
    payloads, stride, capacity, numel, n_blocks, nbytes, starts, ones, indices, flags,
    INDEX: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One program per rank: indices from a code of nbytes bytes, and whether they are valid.

    starts, ones: rows for the first bits of blocks, and the places of ones in the unary part.
    """
    r = tl.program_id(0).to(tl.int64)
    payload = payloads + r * stride
    count = tl.load(payload.to(tl.pointer_type(tl.int32)))
    kept = tl.minimum(tl.maximum(count, 0), capacity)
    section = payload + HEADER
    words = (section.to(tl.pointer_type(tl.int32)), nbytes // 4)
    starts += r * n_blocks
    ones += r * capacity
    indices += r * capacity
    lane = tl.arange(0, LANES)
    wrong = (kept != count).to(tl.int32)
    end = tl.zeros([], dtype=tl.int64) + 8 * n_blocks
    for i in range(0, n_blocks, LANES):
        block = i + lane
        width = tl.load(section + block, mask=block < n_blocks, other=0).to(tl.int32)
        wrong += tl.sum((width > WIDEST).to(tl.int32), 0)
        bits = (tl.minimum(width, WIDEST) * counts_at(block, kept, SIZE)).to(tl.int64)
        tl.store(starts + block, end + tl.cumsum(bits, 0) - bits, mask=block < n_blocks)
        end += tl.sum(bits, 0)
    total = 8 * tl.cast(nbytes, tl.int64)
    if INDEX == RICE:
        found = tl.zeros([], dtype=tl.int64)
        for i in range(end // 8, nbytes, LANES // 8):
            at = 8 * tl.cast(i, tl.int64) + lane
            byte = tl.load(section + (at >> 3), mask=at < total, other=0).to(tl.int64)
            one = tl.where(at >= end, (byte >> (at & 7)) & 1, 0)
            rank = found + tl.cumsum(one, 0) - 1
            tl.store(ones + rank, at, mask=(one > 0) & (rank < capacity))
            found += tl.sum(one, 0)
        wrong += (found < kept).to(tl.int32)
    else:
        wrong += (end > total).to(tl.int32)
    tl.debug_barrier()  # starts and ones are written
    before = tl.zeros([], dtype=tl.int64) - 1
    for i in range(0, kept, LANES):
        j = i + lane
        live = j < kept
        block = j // SIZE
        width = tl.load(section + block, mask=live, other=0).to(tl.int64)
        width = tl.minimum(width, WIDEST)
        at = tl.load(starts + block, mask=live, other=0) + (j % SIZE) * width
        gap = read_field(words, at, width, live)
        if INDEX == RICE:
            place = tl.load(ones + j, mask=live & (j < found), other=0)
            former = tl.load(ones + j - 1, mask=live & (j > 0) & (j <= found), other=0)
            zeros = place - tl.where(j > 0, former, end - 1) - 1
            gap = gap | (zeros << width)
        outside = (gap < 0) | (gap > numel)
        step = tl.where(live, tl.minimum(tl.maximum(gap, 0), numel) + 1, 0)
        index = before + tl.cumsum(step, 0)
        wrong += tl.sum((live & (outside | (index >= numel))).to(tl.int32), 0)
        tl.store(indices + j, tl.minimum(index, tl.maximum(numel - 1, 0)).to(tl.int32), mask=live)
        before += tl.sum(step, 0)
    tl.store(flags + r, (wrong == 0).to(tl.int32))


@triton.jit
@no_type_check
def value_at(payload, begin, codes, scale, bounds, n_segments, steps, j, index, live, KIND: tl.constexpr):
    """Return the values j of a payload, at `index`. begin, codes: first byte of the values, and of the codes."""
    section = payload + begin
    if KIND == FP32:
        x = tl.load(section.to(tl.pointer_type(tl.float32)) + j, mask=live, other=0.0) * scale
    elif KIND == FP16:
        x = tl.load(section.to(tl.pointer_type(tl.float16)) + j, mask=live, other=0.0).to(tl.float32) * scale
    elif KIND == BF16:
        bits = tl.load(section.to(tl.pointer_type(tl.int16)) + j, mask=live, other=0).to(tl.int32)
        x = (bits << 16).to(tl.float32, bitcast=True) * scale
    else:
        owner = find(bounds, n_segments, steps, index)
        table = section.to(tl.pointer_type(tl.float32))
        if KIND == SIGN:
            x = tl.load(table + owner, mask=live, other=0.0)
            negative = (tl.load(payload + codes + j // 8, mask=live, other=0).to(tl.int32) >> (j % 8)) & 1
            x = tl.where(negative > 0, -x, x)
        elif KIND == INT8:
            code = tl.load((payload + codes).to(tl.pointer_type(tl.int8)) + j, mask=live, other=0)
            x = code.to(tl.float32) * tl.load(table + owner, mask=live, other=0.0)
        else:
            bin = (tl.load(payload + codes + j // 4, mask=live, other=0).to(tl.int32) >> (j % 4 * 2)) & 3
            x = tl.load(table + 4 * owner + bin, mask=live, other=0.0)
    return x


MEAN_SIZES = "n_ranks stride index_stride size nbytes capacity numel begin codes n_segments steps".split()


@moves("payloads payloads indices", "numbers", lambda a: (8 * a.n_ranks * a.capacity, 0))
@triton.jit(do_not_specialize=[size for size in MEAN_SIZES if size != "size"])
@no_type_check
def check(
    payloads, n_ranks, stride, indices, index_stride, nbytes, capacity, numel, flags, begin, codes, bounds,
    n_segments, steps, numbers, WIDE: tl.constexpr, KIND: tl.constexpr, CODED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per rank: the numbers of its payload (`codec.WORDS`). The last number is set for `merge`.

    indices: rows of bytes. flags: whether they are valid, if they were coded.
    """
    r = tl.program_id(0)
    indices += r.to(tl.int64) * index_stride
    payload = payloads + r.to(tl.int64) * stride
    header = payload.to(tl.pointer_type(tl.int32))
    lane = tl.arange(0, BLOCK)
    total, stored = sum_of_words(payload, nbytes)
    count = tl.load(header)
    scale = tl.load(header + 3).to(tl.float32, bitcast=True)
    wrong = ((count < 0) | (count > capacity)).to(tl.int32)
    if CODED:
        wrong += (tl.load(flags + r) == 0).to(tl.int32)
    infinite = tl.zeros([], dtype=tl.int32)
    for i in range(0, tl.minimum(tl.maximum(count, 0), capacity), BLOCK):
        j = i + lane
        live = (j < count) & (j < capacity)
        index = index_at(indices, j, live, WIDE)
        before = index_at(indices, j - 1, live & (j > 0), WIDE)
        outside = (index < 0) | (index >= numel) | ((j > 0) & (index <= before))
        wrong += tl.sum((live & outside).to(tl.int32), 0)
        x = value_at(payload, begin, codes, scale, bounds, n_segments, steps, j, index, live, KIND)
        unusable = (x.to(tl.int32, bitcast=True) & MAGNITUDE) >= INFINITE
        infinite += tl.sum((live & unusable).to(tl.int32), 0)
    own = numbers + r * NUMBERS
    tl.store(own, count)
    tl.store(own + 1, tl.load(header + 1))
    tl.store(own + 2, tl.load(header + 4))
    tl.store(own + 3, tl.load(header + 5))
    tl.store(own + 4, (checksum_of(total) == stored).to(tl.int32))
    tl.store(own + 5, (wrong == 0).to(tl.int32))
    tl.store(own + 6, (infinite == 0).to(tl.int32))
    if r == 0:
        tl.store(numbers + n_ranks * NUMBERS, 1)


@moves("payloads", "words")
@triton.jit(do_not_specialize=["stride", "nbytes"])
@no_type_check
def open_headers(payloads, stride, nbytes, words):
    """One program per rank: the words of `Codec.words`."""
    r = tl.program_id(0)
    payload = payloads + r.to(tl.int64) * stride
    header = payload.to(tl.pointer_type(tl.int32))
    total, stored = sum_of_words(payload, nbytes)
    own = words + 5 * r
    tl.store(own, tl.load(header + 1))
    tl.store(own + 1, (checksum_of(total) == stored).to(tl.int32))
    tl.store(own + 2, tl.load(header))
    tl.store(own + 3, tl.load(header + 4))
    tl.store(own + 4, tl.load(header + 5))


@triton.jit
@no_type_check
def entries_below(indices, count, index, WIDE: tl.constexpr):
    """Return the number of a payload's indices below `index`."""
    low = tl.zeros([], dtype=tl.int32)
    high = count
    while low < high:
        middle = (low + high) // 2
        below = index_at(indices, middle, middle < count, WIDE) < index
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@moves("payloads indices mean mean", "mean mean mean")
@triton.jit(do_not_specialize=[size for size in MEAN_SIZES if size not in ("nbytes", "capacity")])
@no_type_check
def merge(
    payloads, n_ranks, stride, indices, index_stride, size, numel, begin, codes, bounds, n_segments, steps,
    numbers, mean, WIDE: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per tile of the mean, which stays in the cache: it adds the entries of each rank in turn.

    Payloads that are not valid are not read. The last number becomes 0 if the mean is not finite.
    """
    start = tl.program_id(0).to(tl.int64) * TILE
    lane = tl.arange(0, TILE)
    here = start + lane < numel
    tl.store(mean + start + lane, tl.zeros([TILE], dtype=tl.float32), mask=here)
    small = tl.arange(0, BLOCK)
    for r in range(n_ranks):
        own = numbers + r * NUMBERS
        valid = (tl.load(own + 5) > 0) & (tl.load(own + 4) > 0)
        count = tl.where(valid, tl.load(own), 0)
        payload = payloads + tl.cast(r, tl.int64) * stride
        scale = tl.load(payload.to(tl.pointer_type(tl.int32)) + 3).to(tl.float32, bitcast=True)
        chosen = indices + tl.cast(r, tl.int64) * index_stride
        first = entries_below(chosen, count, start, WIDE)
        last = entries_below(chosen, count, start + TILE, WIDE)
        tl.debug_barrier()  # the sums so far are written
        for i in range(first, last, BLOCK):
            j = i + small
            live = j < last
            index = index_at(chosen, j, live, WIDE)
            x = value_at(payload, begin, codes, scale, bounds, n_segments, steps, j, index, live, KIND)
            total = tl.load(mean + index, mask=live, other=0.0)
            tl.store(mean + index, total + x, mask=live)
    tl.debug_barrier()
    total = tl.load(mean + start + lane, mask=here, other=0.0)
    # `/` would be an approximate division on GPUs
    y = tl.math.div_rn(total, tl.zeros_like(total) + size)
    tl.store(mean + start + lane, y, mask=here)
    infinite = here & ((y.to(tl.int32, bitcast=True) & MAGNITUDE) >= INFINITE)
    if tl.max(infinite.to(tl.int32), 0) > 0:
        tl.atomic_min(numbers + n_ranks * NUMBERS, 0)


# --- the backend -----------------------------------------------------------------------------------


class TritonCodec(Codec):
    """The kernels above."""

    def __init__(self) -> None:
        self._launch = Launcher(INTERPRETED)

    def blank(self, nbytes: int, like: Tensor) -> UInt8[Tensor, "nbytes"]:
        if nbytes > HEADER_BYTES:
            return super().blank(nbytes, like)
        return torch.empty(nbytes, dtype=torch.uint8, device=like.device)  # `seal_` writes all of a header

    def encodes(self, layout: Layout) -> bool:
        return layout.values is not None

    def encode(
        self,
        selection: SparseVector,
        layout: Layout,
        limit: float,
        r: float,
        first_nonfinite: Int64[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
        tensors: Int64[Tensor, "tensors"],
        terms: Terms,
    ) -> tuple[UInt8[Tensor, "nbytes"], SparseVector, Float32[Tensor, "capacity"]]:
        assert layout.values is not None
        code, header = layout.indices, (first_nonfinite, tensors, tensors.numel())
        values, device = selection.values, selection.values.device
        if code.kind in PLAIN and layout.values not in TABLES:
            payload, decoded = self._encode_plain(selection, layout, limit, header, terms)
            return payload, SparseVector(selection.indices, decoded, selection.count), values
        counters, decoded = counters_on(device, current_stream(device)), torch.empty_like(values)
        segments, begin = bounds.numel() - 1, layout.value_bytes.start
        block, n_blocks, programs, widths = 1, 0, block_count(code.capacity, PART), None
        own, given, found, largest = selection, selection, None, None
        if code.kind not in BLOCKS:
            payload, n_blocks = self.blank(layout.nbytes, values), code.parameter
            if layout.values in SCALED_KINDS:
                largest = self._largest(selection)
        else:
            block = BLOCKS[code.kind]
            n_blocks = block_count(code.capacity, block)
            count = torch.empty((), dtype=torch.int32, device=device)
            own = SparseVector(torch.empty_like(selection.indices), torch.empty_like(values), count)
            payload = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
            found = torch.empty(FOUND.value + 3 * n_blocks, dtype=torch.int64, device=device)
            given = self._measure(selection, layout, payload, found, own, counters)
            largest = found[MOST.value :]
        if layout.values in TABLES:
            programs += segments
        if layout.values == ValueKind.TWO_BITS:
            widths = on_device((r / 4,), torch.float64, device)
        what = (given.indices, given.values, given.count, *header, code.capacity, limit, largest)
        how = (found, n_blocks, bounds, segments, widths, payload, begin, codes_begin(layout, segments))
        result = (decoded, own.indices, own.values, own.count, *terms.words, counters, max(1, programs))
        kind = (int(code.kind), block, int(layout.values), PART)
        self._launch(write_coded, values, max(1, programs), *what, *how, *result, *kind)
        return payload, SparseVector(own.indices, decoded, own.count), own.values

    def _measure(
        self,
        selection: SparseVector,
        layout: Layout,
        payload: UInt8[Tensor, "nbytes"],
        found: Int64[Tensor, "found"],
        own: SparseVector,
        counters: Int64[Tensor, "counters"],
    ) -> SparseVector:
        """Clear the payload, and find the code of the selection's indices. Returns what `write_coded` reads.

        own: receives what is sent, with a Rice code. With a packed one `write_coded` writes it.
        """
        code, values = layout.indices, selection.values
        block, parts = BLOCKS[code.kind], blocks(code.capacity)
        n_blocks, scaled = block_count(code.capacity, block), layout.values in SCALED_KINDS
        sizes = (n_blocks, 8 * (code.nbytes - n_blocks), code.parameter, payload, layout.nbytes // 8)
        if code.kind == IndexKind.PACKED:
            shares = on_device((128, *PACKED_SHARES, 0), torch.int64, values.device)
            widths = torch.empty(SHARES.value * n_blocks, dtype=torch.int32, device=values.device)
            programs = parts * SHARES.value
            what = (selection.indices, values, selection.count, shares, *sizes, widths, found, counters, programs)
            self._launch(measure_packed, values, programs, *what, scaled, block, BLOCK)
            return selection
        given = (selection.indices, selection.count, *sizes, found, counters, parts)
        self._launch(measure_rice, values, parts, *given, block, BLOCK)
        result = (found, own.indices, own.values, own.count, counters, parts)
        elements = (selection.indices, values, selection.count, code.capacity, n_blocks)
        self._launch(place_rice, values, parts, *elements, *result, scaled, block, BLOCK)
        return own

    def _encode_plain(
        self, selection: SparseVector, layout: Layout, limit: float, header: tuple[Any, ...], terms: Terms
    ) -> tuple[UInt8[Tensor, "nbytes"], Float32[Tensor, "capacity"]]:
        assert layout.values is not None
        values, capacity = selection.values, layout.indices.capacity
        payload = torch.empty(layout.nbytes, dtype=torch.uint8, device=values.device)
        decoded, counters = torch.empty_like(values), counters_on(values.device, current_stream(values.device))
        largest = self._largest(selection) if layout.values in SCALED_KINDS else None
        programs = max(1, blocks(capacity))  # the header is written without elements too
        what = (selection.indices, values, selection.count, *header)
        place = (payload, layout.value_bytes.start, layout.nbytes, decoded)
        where = (capacity, limit, largest, *place, *terms.words, counters, programs)
        kind = (layout.indices.kind == IndexKind.INT64, int(layout.values), BLOCK)
        self._launch(write_plain, values, programs, *what, *where, *kind)
        return payload, decoded

    def _largest(self, selection: SparseVector) -> Int32[Tensor, ""]:
        """Return the bits of the largest magnitude."""
        values, largest = selection.values, selection.largest
        if largest is None:
            largest = torch.zeros((), dtype=torch.int32, device=values.device)
            self._launch(largest_of, values, blocks(values.numel()), values, values.numel(), largest, BLOCK)
        return largest

    def seal_(
        self,
        payload: UInt8[Tensor, "nbytes"],
        count: Int32[Tensor, ""],
        first_nonfinite: Int64[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
        scale: Float32[Tensor, ""],
        terms: Terms,
    ) -> None:
        self.seal_rows_(payload[None], count, first_nonfinite, bounds, scale, terms)

    def seal_rows_(
        self,
        payloads: UInt8[Tensor, "rows nbytes"],
        count: Int32[Tensor, ""],
        first_nonfinite: Int64[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
        scale: Float32[Tensor, ""],
        terms: Terms,
    ) -> None:
        rows, words = len(payloads), payloads.shape[1] // 8
        counters = counters_on(payloads.device, current_stream(payloads.device), rows)
        programs = max(1, blocks(words - HEADER_BYTES // 8))
        what = (payloads, words, count, first_nonfinite, bounds, bounds.numel(), scale, *terms.words)
        self._launch(seal, payloads, rows * programs, *what, counters, programs, BLOCK, COUNTERS)

    def words_of(self, payloads: Sequence[UInt8[Tensor, "nbytes"]]) -> Int32[Tensor, "words"]:
        words = torch.empty(5 * len(payloads), dtype=torch.int32, device=payloads[0].device)
        rows = as_rows(payloads, 8)
        self._launch(open_headers, words, len(payloads), rows, rows.stride(0), payloads[0].numel(), words)
        return words


class TritonMeanDecoder(MeanDecoder):
    """Checks the payloads of all ranks and adds them, in two launches, or three if their indices are coded."""

    def __init__(self) -> None:
        self._launch = Launcher(INTERPRETED)

    def takes(self, layout: Layout) -> bool:
        return layout.values is not None

    def mean_into_(
        self,
        dense: Float32[Tensor, "n"],
        payloads: Sequence[UInt8[Tensor, "nbytes"]],
        layout: Layout,
        bounds: Int64[Tensor, "bounds"],
        size: int,
    ) -> Int32[Tensor, "numbers"]:
        assert layout.values is not None
        code, kind, ranks, segments = layout.indices, layout.values, len(payloads), bounds.numel() - 1
        numbers = torch.empty(WORDS * ranks + 1, dtype=torch.int32, device=dense.device)
        where = (layout.value_bytes.start, codes_begin(layout, segments), bounds, segments, segments.bit_length())
        rows = as_rows(payloads, 8)
        indices, flags = rows[:, HEADER_BYTES:], None
        if code.kind not in PLAIN:
            indices, flags = self._unpack(rows, code)
        variant = (code.kind == IndexKind.INT64, int(kind))
        given = (rows, ranks, rows.stride(0), indices, indices.stride(0))
        sizes = (layout.nbytes, code.capacity, code.numel, flags)
        self._launch(check, dense, ranks, *given, *sizes, *where, numbers, *variant, flags is not None, BLOCK)
        tiles = -(-code.numel // TILE)
        self._launch(
            merge, dense, tiles, *given, float(size), code.numel, *where, numbers, dense, *variant, TILE, FEW
        )
        return numbers

    def _unpack(
        self, rows: UInt8[Tensor, "ranks nbytes"], code: IndexCode
    ) -> tuple[UInt8[Tensor, "ranks row"], Int32[Tensor, "ranks"]]:
        """Return the bytes of int32 indices, and whether they are valid."""
        ranks, block, device = rows.shape[0], BLOCKS.get(code.kind, 1), rows.device
        is_rice, in_chunks = code.kind == IndexKind.RICE, code.kind == IndexKind.CHUNKS
        n_blocks = code.parameter if in_chunks else block_count(code.capacity, block)
        starts = torch.empty(ranks * n_blocks, dtype=torch.int64, device=device)
        ones = torch.empty(ranks * code.capacity if is_rice else 0, dtype=torch.int64, device=device)
        indices = torch.empty(ranks, code.capacity, dtype=torch.int32, device=device)
        flags = torch.empty(ranks, dtype=torch.int32, device=device)
        given, end = (rows, rows.stride(0), code.capacity), (indices, flags)
        if in_chunks:
            steps = n_blocks.bit_length()
            self._launch(unpack_chunks, rows, ranks, *given, n_blocks, steps, code.nbytes, starts, *end, BLOCK)
        else:
            sizes = (code.numel, n_blocks, code.nbytes, starts, ones)
            self._launch(unpack, rows, ranks, *given, *sizes, *end, int(code.kind), block, BLOCK)
        return indices.view(torch.uint8), flags


def codes_begin(layout: Layout, segments: int) -> int:
    """Return the first byte of the codes of values, after their tables."""
    assert layout.values is not None
    begin: int = layout.value_bytes.start
    return begin + 4 * TABLES[layout.values][0] * segments if layout.values in TABLES else begin


@lru_cache(maxsize=256)
def counters_on(device: torch.device, stream: int, rows: int = 1) -> Int64[Tensor, "counters"]:
    """The counters of launches on this stream, which follow each other, for each of some payloads."""
    return torch.zeros(rows * COUNTERS, dtype=torch.int64, device=device)
