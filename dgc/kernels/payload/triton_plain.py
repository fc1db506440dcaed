"""Triton kernels of payloads without codes: values, plain indices, the header and its checksum.

The checksum is a sum, so each program adds what its own elements contribute, and no second pass reads the payload.
The program that finishes last writes the header. Its counters are zero again after each launch: there is one set
per device and stream, and no operation clears it.
"""

from typing import no_type_check

import triton
import triton.language as tl

from dgc.kernels.launch import moves, of_each, read_and_written
from dgc.kernels.payload import CHECKSUM_OF_ZEROS, HEADER_BYTES, PACKED_SHARES, ValueKind
from dgc.kernels.selection.triton import MAGNITUDE

HEADER = tl.constexpr(HEADER_BYTES)
HEADER_WORDS = tl.constexpr(HEADER_BYTES // 8)
CONSTANT = tl.constexpr(CHECKSUM_OF_ZEROS)
LOW = tl.constexpr(0xFFFFFFFF)
INFINITE = tl.constexpr(0x7F800000)
FP32, FP16, BF16 = (tl.constexpr(int(kind)) for kind in (ValueKind.FP32, ValueKind.FP16, ValueKind.BF16))
SHARES = tl.constexpr(len(PACKED_SHARES) + 2)  # the whole selection, these shares, and what fits for any indices
# A payload's counters: sum of the words, programs that have finished; for each share that is tried, bits of its
# code, and bits of its largest magnitude.
SUM, FINISHED, BITS, LARGEST = (tl.constexpr(i) for i in (0, 1, 2, 2 + SHARES.value))


@triton.jit
@no_type_check
def contribution(bits, byte):
    """Return what elements add to the sum of the checksum. bits: the bits of an element that begins at `byte`."""
    return (bits << (byte % 8 * 8)) * (2 * (byte // 8) + 1)


@triton.jit
@no_type_check
def checksum_of(total):
    return ((total ^ (total >> 32)) & LOW) ^ CONSTANT


@triton.jit
@no_type_check
def write_header(payload, counters, count, where, bounds, n_bounds, scale, ratio, form):
    """Write the header, once all programs have added their parts of the sum, and clear the counters.

    where: the gradient's first unusable element, or a number from the end of `bounds` on.
    """
    number = tl.zeros([], dtype=tl.int32)
    if where < tl.load(bounds + n_bounds - 1):  # else no element is unusable
        high = number + n_bounds
        while number < high:
            middle = (number + high) // 2
            reached = tl.load(bounds + middle) <= where
            number = tl.where(reached, middle + 1, number)
            high = tl.where(reached, high, middle)
    opening = (count.to(tl.int64) & LOW) | (number.to(tl.int64) << 32)
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
def finish(payload, part, counters, n_programs, count, first, bounds, n_bounds, scale, ratio, form):
    """Add this program's part of the sum. The last program writes the header. Returns whether it is this one."""
    tl.atomic_add(counters + SUM, part)
    is_last = tl.atomic_add(counters + FINISHED, 1) == n_programs - 1
    if is_last:
        where = tl.load(first)
        write_header(payload, counters, tl.load(count), where, bounds, n_bounds, scale, ratio, form)
    return is_last


@moves("values", "", of_each(4, "BLOCK"))
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
def store_cast(payload, begin, i, bits, is_valid, KIND: tl.constexpr):
    """Write the bits of values i. Returns what they add to the sum of the checksum."""
    tl.store(
        (payload + begin).to(tl.pointer_type(tl.int32 if KIND == FP32 else tl.int16)) + i, bits, mask=is_valid
    )
    if KIND == FP32:
        part = contribution(bits.to(tl.int64) & LOW, begin + 4 * i.to(tl.int64))
    else:
        part = contribution(bits.to(tl.int64) & 0xFFFF, begin + 2 * i.to(tl.int64))
    return part


@moves("indices values", "payload decoded", of_each(8, "BLOCK"), lambda a: read_and_written(16 * a.programs))
@triton.jit(do_not_specialize=["capacity", "n_programs", "n_bounds", "begin", "nbytes", "ratio", "form"])
@no_type_check
def write_plain(
    indices,
    values,
    count,
    first,
    bounds,
    n_bounds,
    capacity,
    limit,
    largest,
    payload,
    begin,
    nbytes,
    decoded,
    ratio,
    form,
    counters,
    n_programs,
    WIDE: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write indices and cast values. begin: first byte of the values. WIDE: indices of 8 bytes."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_valid = i < capacity
    index = tl.load(indices + i, mask=is_valid, other=0).to(tl.int64)
    if WIDE:
        tl.store((payload + HEADER).to(tl.pointer_type(tl.int64)) + i, index, mask=is_valid)
        part = index * (2 * (i + HEADER_WORDS) + 1)
    else:
        tl.store((payload + HEADER).to(tl.pointer_type(tl.int32)) + i, index.to(tl.int32), mask=is_valid)
        part = contribution(index, 4 * i.to(tl.int64) + HEADER)
    x = tl.load(values + i, mask=is_valid, other=0.0)
    most = tl.zeros([], dtype=tl.int32)
    if KIND != FP32:
        most = tl.load(largest)
    bits, y, scale = cast_to(x, limit, most, KIND, BLOCK)
    part += store_cast(payload, begin, i, bits, is_valid, KIND)
    tl.store(decoded + i, y, mask=is_valid)
    if tl.program_id(0) == 0:
        end = begin + capacity * (4 if KIND == FP32 else 2)
        lane = tl.arange(0, 8)
        tl.store(payload + end + lane, tl.zeros([8], dtype=tl.uint8), mask=end + lane < nbytes)
    total = tl.sum(tl.where(is_valid, part, 0), 0)
    finish(payload, total, counters, n_programs, count, first, bounds, n_bounds, scale, ratio, form)


@moves("payloads", "", of_each(8, "BLOCK"), lambda a: read_and_written(16 * a.programs))
@triton.jit(do_not_specialize=["n_words", "n_bounds", "ratio", "form", "n_programs"])
@no_type_check
def seal(
    payloads,
    n_words,
    count,
    first,
    bounds,
    n_bounds,
    scale,
    ratio,
    form,
    counters,
    n_programs,
    BLOCK: tl.constexpr,
    LINE: tl.constexpr,
):
    """Write the headers of adjacent payloads, with `n_programs` programs for each."""
    row = tl.program_id(0) // n_programs
    payload, counters = payloads + row.to(tl.int64) * n_words * 8, counters + row * LINE
    i = tl.program_id(0) % n_programs * BLOCK + tl.arange(0, BLOCK) + HEADER_WORDS
    word = tl.load(payload.to(tl.pointer_type(tl.int64)) + i, mask=i < n_words, other=0)
    part = tl.sum(word * (2 * i.to(tl.int64) + 1), 0)
    known = tl.load(scale)
    finish(payload, part, counters, n_programs, count, first, bounds, n_bounds, known, ratio, form)
