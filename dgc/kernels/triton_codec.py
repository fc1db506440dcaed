"""The GPU backend of payloads: Triton kernels with the same bytes and bits as `Codec` and `NativeMeanDecoder`.

Launches per payload: `encode_plain` 1, and 2 more if the largest magnitude is not known; `seal_` and `words_of` 1.
The mean of any number of payloads of plain indices takes 2. All other operations are those of `Codec`. Nothing
waits for the device.

The checksum is a sum, so each program adds what its own elements contribute, and no second pass reads the payload.
The program that finishes last writes the header. Its counters are zero again after each launch: there is one set
per device and stream, and no operation clears it.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float32, Int32, Int64, UInt8
from torch import Tensor

from dgc.kernels.codec import (
    CASTS,
    CHECKSUM_OF_ZEROS,
    HEADER_BYTES,
    PLAIN,
    TABLES,
    WORDS,
    Codec,
    IndexKind,
    Layout,
    MeanDecoder,
    Terms,
    ValueKind,
)
from dgc.kernels.selection import SparseVector
from dgc.kernels.triton_selection import INTERPRETED, MAGNITUDE, find
from dgc.kernels.triton_tables import BLOCK, Launcher, as_rows, blocks, current_stream

TILE = 2048  # elements of the mean per program
FEW = 256  # entries of a payload that `merge` reads at a time: a tile has few
HEADER = tl.constexpr(HEADER_BYTES)
HEADER_WORDS = tl.constexpr(HEADER_BYTES // 8)
CONSTANT = tl.constexpr(CHECKSUM_OF_ZEROS)
LOW = tl.constexpr(0xFFFFFFFF)
INFINITE = tl.constexpr(0x7F800000)
NUMBERS = tl.constexpr(WORDS)
SUMMED = tl.constexpr(4096)  # words of a payload that one program adds at a time
FP32, FP16, BF16 = (tl.constexpr(int(kind)) for kind in (ValueKind.FP32, ValueKind.FP16, ValueKind.BF16))
SIGN, INT8 = (tl.constexpr(int(kind)) for kind in (ValueKind.SIGN, ValueKind.INT8))
# a payload's counters: sum of the words, programs that have finished
SUM, FINISHED = tl.constexpr(0), tl.constexpr(1)


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
def finish(
    payload, part, counters, n_programs, count, first, bounds, n_bounds, scale, ratio, form, LANES: tl.constexpr
):
    """Add this program's part of the sum. The last program writes the header, and clears the counters."""
    tl.atomic_add(counters + SUM, part)
    if tl.atomic_add(counters + FINISHED, 1) == n_programs - 1:
        number = tl.zeros([], dtype=tl.int64)
        lane = tl.arange(0, LANES)
        where = tl.load(first)
        for i in range(0, n_bounds, LANES):
            reached = tl.load(bounds + i + lane, mask=i + lane < n_bounds, other=0) <= where
            number += tl.sum((reached & (i + lane < n_bounds)).to(tl.int64), 0)
        number = tl.where(number < n_bounds, number, 0)  # no element is unusable
        opening = (tl.load(count).to(tl.int64) & LOW) | (number << 32)
        closing = (ratio.to(tl.int64) & LOW) | (form.to(tl.int64) << 32)
        scaled = (scale.to(tl.int32, bitcast=True).to(tl.int64) & LOW) << 32
        total = tl.atomic_add(counters + SUM, 0) + opening + 3 * scaled + 5 * closing
        header = payload.to(tl.pointer_type(tl.int64))
        tl.store(header, opening)
        tl.store(header + 1, scaled | checksum_of(total))
        tl.store(header + 2, closing)
        tl.store(counters + SUM, 0)
        tl.store(counters + FINISHED, 0)


@triton.jit(do_not_specialize=["capacity"])
@no_type_check
def largest_of(values, capacity, largest, BLOCK: tl.constexpr):
    """Find the bits of the largest finite magnitude, which are ordered as these."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(values + i, mask=i < capacity, other=0.0).to(tl.int32, bitcast=True) & MAGNITUDE
    tl.atomic_max(largest, tl.max(tl.where(bits < INFINITE, bits, 0), 0), sem="relaxed")


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
    finite = (x.to(tl.int32, bitcast=True) & MAGNITUDE) < INFINITE
    x = tl.where(finite, tl.minimum(tl.maximum(x, -limit), limit), 0.0)
    nan = tl.full([BLOCK], 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    exponent = tl.zeros([], dtype=tl.int32)
    if KIND != FP32:
        # 141 = 126 + 15: the largest scaled magnitude is below 2**15
        most = tl.minimum(tl.load(largest).to(tl.float32, bitcast=True), limit).to(tl.int32, bitcast=True)
        exponent = tl.where(most > 0, tl.minimum(tl.maximum((most >> 23) - 141, -126), 126), 0)
    scale = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    place = (payload + begin).to(tl.pointer_type(tl.int32 if KIND == FP32 else tl.int16)) + i
    if KIND == FP32:
        bits = tl.where(finite, x, nan).to(tl.int32, bitcast=True)
        tl.store(place, bits, mask=live)
        part += contribution(bits.to(tl.int64) & LOW, begin + 4 * i.to(tl.int64))
        y = tl.where(finite, x, nan)
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
        tl.store(place, bits.to(tl.int16), mask=live)
        part += contribution(bits.to(tl.int64) & 0xFFFF, begin + 2 * i.to(tl.int64))
        y = tl.where(finite, y * scale, nan)
    tl.store(decoded + i, y, mask=live)
    if tl.program_id(0) == 0:
        end = begin + capacity * (4 if KIND == FP32 else 2)
        lane = tl.arange(0, 8)
        tl.store(payload + end + lane, tl.zeros([8], dtype=tl.uint8), mask=end + lane < nbytes)
    total = tl.sum(tl.where(live, part, 0), 0)
    finish(payload, total, counters, n_programs, count, first, bounds, n_bounds, scale, ratio, form, BLOCK)


@triton.jit(do_not_specialize=["n_words", "n_bounds", "ratio", "form", "n_programs"])
@no_type_check
def seal(
    payload, n_words, count, first, bounds, n_bounds, scale, ratio, form, counters, n_programs, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) + HEADER_WORDS
    word = tl.load(payload.to(tl.pointer_type(tl.int64)) + i, mask=i < n_words, other=0)
    part = tl.sum(word * (2 * i.to(tl.int64) + 1), 0)
    known = tl.load(scale)
    finish(payload, part, counters, n_programs, count, first, bounds, n_bounds, known, ratio, form, BLOCK)


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
def index_at(payload, j, live, WIDE: tl.constexpr):
    start = payload + HEADER
    if WIDE:
        index = tl.load(start.to(tl.pointer_type(tl.int64)) + j, mask=live, other=0)
    else:
        index = tl.load(start.to(tl.pointer_type(tl.int32)) + j, mask=live, other=0).to(tl.int64)
    return index


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


@triton.jit(
    do_not_specialize=["n_ranks", "stride", "nbytes", "capacity", "numel", "begin", "codes", "n_segments", "steps"]
)
@no_type_check
def check(
    payloads, n_ranks, stride, nbytes, capacity, numel, begin, codes, bounds, n_segments, steps, numbers,
    WIDE: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per rank: the numbers of its payload (`codec.WORDS`). The last number is set for `merge`."""
    r = tl.program_id(0)
    payload = payloads + r.to(tl.int64) * stride
    header = payload.to(tl.pointer_type(tl.int32))
    lane = tl.arange(0, BLOCK)
    total, stored = sum_of_words(payload, nbytes)
    count = tl.load(header)
    scale = tl.load(header + 3).to(tl.float32, bitcast=True)
    wrong = ((count < 0) | (count > capacity)).to(tl.int32)
    infinite = tl.zeros([], dtype=tl.int32)
    for i in range(0, tl.minimum(tl.maximum(count, 0), capacity), BLOCK):
        j = i + lane
        live = (j < count) & (j < capacity)
        index = index_at(payload, j, live, WIDE)
        before = index_at(payload, j - 1, live & (j > 0), WIDE)
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
def entries_below(payload, count, index, WIDE: tl.constexpr):
    """Return the number of a payload's indices below `index`."""
    low = tl.zeros([], dtype=tl.int32)
    high = count
    while low < high:
        middle = (low + high) // 2
        below = index_at(payload, middle, middle < count, WIDE) < index
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit(do_not_specialize=["n_ranks", "stride", "size", "numel", "begin", "codes", "n_segments", "steps"])
@no_type_check
def merge(
    payloads, n_ranks, stride, size, numel, begin, codes, bounds, n_segments, steps, numbers, mean,
    WIDE: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
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
        first = entries_below(payload, count, start, WIDE)
        last = entries_below(payload, count, start + TILE, WIDE)
        tl.debug_barrier()  # the sums so far are written
        for i in range(first, last, BLOCK):
            j = i + small
            live = j < last
            index = index_at(payload, j, live, WIDE)
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
    """The kernels above. `launches` counts launched kernels, without torch's own."""

    def __init__(self) -> None:
        self._launch = Launcher(INTERPRETED)

    @property
    def launches(self) -> int:
        return self._launch.launches

    def blank(self, nbytes: int, like: Tensor) -> UInt8[Tensor, "nbytes"]:
        if nbytes > HEADER_BYTES:
            return super().blank(nbytes, like)
        return torch.empty(nbytes, dtype=torch.uint8, device=like.device)  # `seal_` writes all of a header

    def encode_plain(
        self,
        selection: SparseVector,
        layout: Layout,
        limit: float,
        first_nonfinite: Int64[Tensor, ""],
        bounds: Int64[Tensor, "bounds"],
        terms: Terms,
    ) -> tuple[UInt8[Tensor, "nbytes"], Float32[Tensor, "capacity"]]:
        assert layout.values is not None
        values, capacity = selection.values, layout.indices.capacity
        payload = torch.empty(layout.nbytes, dtype=torch.uint8, device=values.device)
        decoded, counters = torch.empty_like(values), counters_on(values.device, current_stream(values.device))
        largest = selection.largest
        if largest is None:
            largest = torch.zeros((), dtype=torch.int32, device=values.device)
            if CASTS[layout.values] != torch.float32:
                self._launch(largest_of, values, blocks(capacity), values, capacity, largest, BLOCK)
        programs = max(1, blocks(capacity))  # the header is written without elements too
        what = (selection.indices, values, selection.count, first_nonfinite, bounds, bounds.numel())
        where = (
            capacity,
            limit,
            largest,
            payload,
            layout.value_bytes.start,
            layout.nbytes,
            decoded,
            *terms.words,
            counters,
            programs,
        )
        kind = (layout.indices.kind == IndexKind.INT64, int(layout.values), BLOCK)
        self._launch(write_plain, values, programs, *what, *where, *kind)
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
        words, counters = payload.numel() // 8, counters_on(payload.device, current_stream(payload.device))
        programs = max(1, blocks(words - HEADER_BYTES // 8))
        what = (payload, words, count, first_nonfinite, bounds, bounds.numel(), scale, *terms.words)
        self._launch(seal, payload, programs, *what, counters, programs, BLOCK)

    def words_of(self, payloads: Sequence[UInt8[Tensor, "nbytes"]]) -> Int32[Tensor, "words"]:
        words = torch.empty(5 * len(payloads), dtype=torch.int32, device=payloads[0].device)
        rows = as_rows(payloads, 8)
        self._launch(open_headers, words, len(payloads), rows, rows.stride(0), payloads[0].numel(), words)
        return words


class TritonMeanDecoder(MeanDecoder):
    """Checks the payloads of all ranks and adds them, in two launches, if their indices are plain."""

    def __init__(self) -> None:
        self._launch = Launcher(INTERPRETED)

    @property
    def launches(self) -> int:
        return self._launch.launches

    def takes(self, layout: Layout) -> bool:
        return layout.values is not None and layout.indices.kind in PLAIN

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
        begin = layout.value_bytes.start
        codes = begin + 4 * TABLES[kind][0] * segments if kind in TABLES else begin
        where = (begin, codes, bounds, segments, segments.bit_length(), numbers)
        variant = (code.kind == IndexKind.INT64, int(kind))
        rows = as_rows(payloads, 8)
        given = (rows, ranks, rows.stride(0))
        sizes = (layout.nbytes, code.capacity, code.numel)
        self._launch(check, dense, ranks, *given, *sizes, *where, *variant, BLOCK)
        tiles = -(-code.numel // TILE)
        self._launch(merge, dense, tiles, *given, float(size), code.numel, *where, dense, *variant, TILE, FEW)
        return numbers


@lru_cache(maxsize=256)
def counters_on(device: torch.device, stream: int) -> Int64[Tensor, "2"]:
    """The counters of launches on this stream, which follow each other."""
    return torch.zeros(2, dtype=torch.int64, device=device)
