"""The GPU backend of methods with a code for every element: `measure` and `encode`, and `mean_of_payloads`.

Sums are added in a fixed order: the last program of a group of tiles to arrive adds the tiles, and the last group
of a segment adds the groups. So no program reads more than a tile, a group of tiles, and the groups of a segment.
Checksums are sums of integers, so their order does not matter. Counters are zero again after each launch, as in
`triton_codec`. Nothing waits for the device.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Int32, Int64, UInt8
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dgc.kernels.codes import Bounds, Dense, Each, Residual, empty_residual, layout_of, seed_word
from dgc.kernels.codes.elements import WORDS, ElementCode, ElementCoder, Form, Measured, Scale
from dgc.kernels.codes.triton import (
    LEVELS as LEVEL_FIELDS,
)
from dgc.kernels.codes.triton import (
    SIGNS as SIGN_FIELDS,
)
from dgc.kernels.codes.triton import (
    TERNARY as TERNARY_FIELDS,
)
from dgc.kernels.codes.triton import (
    field_value,
    keys_as_int32,
    level_of,
    live_bytes,
    shifts_of,
    sign_of,
    ternary_of,
    tile_of,
)
from dgc.kernels.launch import (
    BLOCK,
    SECTOR,
    Launcher,
    Tilings,
    as_rows,
    current_stream,
    groups_of_ranks,
    held,
    moves,
    on_device,
    pointers,
    read_and_written,
    seed_slot,
)
from dgc.kernels.payload import HEADER_BYTES, Terms
from dgc.kernels.payload.triton import counters_on
from dgc.kernels.payload.triton_plain import (
    BITS,
    FINISHED,
    HEADER,
    INFINITE,
    LOW,
    SUM,
    checksum_of,
    contribution,
    write_header,
)
from dgc.kernels.selection.triton import (
    FLOATS,
    INTERPRETED,
    MAGNITUDE,
    NOWHERE,
    SUMS,
    TOO_LARGE,
    arrive,
    most_of,
    rounded,
    sum_of,
    tile_at,
)

NONE, NONZERO, MEAN, LARGEST, NORM, SPREAD = (tl.constexpr(int(scale)) for scale in Scale)
SIGNS, CUTS, TERNARY, LEVELS = (tl.constexpr(int(form)) for form in Form)
NUMBERS = tl.constexpr(WORDS)
KEEPS_NOTHING, KEEPS_REST, KEEPS_SCALED = (tl.constexpr(i) for i in range(3))
# counters of `mean_of_payloads`: whether the mean is not finite; of each rank, a sum in a cache line of its own
OVERFLOW = tl.constexpr(0)
LINE = tl.constexpr(16)
# counter of `encode`: NOWHERE less the first unusable element
UNUSABLE = tl.constexpr(BITS.value)
CHECKED = 256  # words of a payload that a program adds at a time


def bytes_of_measure(a: Any) -> tuple[int, int]:
    n, own = a.v.numel(), each_of_measure(a) * (a.n_tiles + a.groups)
    return n * (a.G.primitive_bitwidth // 8 + (4 if a.ADDS else 0)) + own, own


def read_by_measure(a: Any) -> int:
    """Return the most bytes that a program reads: its tile, its group of tiles, and the groups of its segment."""
    tile: int = a.TILE * (a.G.primitive_bitwidth // 8 + (4 if a.ADDS else 0))
    return tile + each_of_measure(a) * (min(a.BLOCK, a.n_tiles) + a.n_tiles // a.BLOCK + 1)


def each_of_measure(a: Any) -> int:
    """Return the bytes that are kept of a tile or a group: a sum, or a maximum."""
    return {NONE.value: 0, NONZERO.value: 4, LARGEST.value: 4}.get(a.SCALE, 8)


@moves("tiles", "v unusable", read_by_measure, bytes_of_measure)
@triton.jit(do_not_specialize=["n_tiles", "n_segments", "groups"])
@no_type_check
def measure(
    tiles,
    n_tiles,
    sources,
    v,
    bounds,
    first_tiles,
    n_segments,
    unusable,
    tile_sums,
    tile_counts,
    groups,
    arrived,
    factor,
    values,
    G: tl.constexpr,
    ADDS: tl.constexpr,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write v, and the first unusable element of each tile. A segment's last program to arrive writes its numbers.

    tile_*: of each tile, and from n_tiles on of each group of BLOCK tiles of a segment. arrived: zeros for each
    segment, and then for each of `groups` groups, which they are again afterwards.
    """
    t, start, length, s = tile_at(tiles, n_tiles)
    piece = tl.load(tiles + 3 * n_tiles + t)
    inner = tl.load(tiles + 4 * n_tiles + t)
    lane = tl.arange(0, TILE)
    is_valid = lane < length
    source = tl.load(sources + piece).to(tl.pointer_type(G)) + inner
    # all loads before the first reduction, which is a barrier
    x = tl.load(source + lane, mask=is_valid, other=0.0).to(tl.float32)
    if ADDS:
        before = tl.load(v + start + lane, mask=is_valid, other=0.0)
    bad = (x.to(tl.int32, bitcast=True) & MAGNITUDE) >= TOO_LARGE
    first_bad = tl.min(tl.where(bad, lane, TILE), 0)
    tl.store(unusable + t, tl.where(first_bad < TILE, start + first_bad, NOWHERE))
    x = tl.where(bad, 0.0, x)
    if ADDS:
        x = before + x
    tl.store(v + start + lane, x, mask=is_valid)
    if SCALE != NONE:
        bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
        if (SCALE == NONZERO) | (SCALE == LARGEST):
            tl.store(tile_counts + t, tl.max(bits, 0))
        elif SCALE == MEAN:
            tl.store(tile_sums + t, tl.sum(bits.to(tl.float32, bitcast=True).to(tl.float64), 0))
        else:
            wide = x.to(tl.float64)
            tl.store(tile_sums + t, tl.sum(wide * wide, 0))
        first = tl.load(first_tiles + s).to(tl.int32)
        # the empty tiles at the end belong to the last segment and add nothing
        last = tl.load(first_tiles + s + 1, mask=s + 1 < n_segments, other=n_tiles).to(tl.int32)
        begin = t - (t - first) % BLOCK
        end = tl.minimum(begin + BLOCK, last)
        # where the segment's groups begin: it has at most one that is not full
        place = first // BLOCK + s
        group = place + (t - first) // BLOCK
        if arrive(arrived + n_segments + group) == end - begin - 1:
            tl.store(arrived + n_segments + group, 0)
            if (SCALE == NONZERO) | (SCALE == LARGEST):
                tl.store(tile_counts + n_tiles + group, most_of(tile_counts, begin, end, BLOCK))
            else:
                tl.store(tile_sums + n_tiles + group, sum_of(tile_sums, begin, end, BLOCK))
            n_groups = (last - first + BLOCK - 1) // BLOCK
            if arrive(arrived + s) == n_groups - 1:
                tl.store(arrived + s, 0)
                begin = n_tiles + place
                end = begin + n_groups
                size = tl.maximum(tl.load(bounds + s + 1) - tl.load(bounds + s), 1).to(tl.float64)
                if SCALE == NONZERO:
                    found = (most_of(tile_counts, begin, end, BLOCK) > 0).to(tl.float32)
                elif SCALE == MEAN:
                    found = (sum_of(tile_sums, begin, end, BLOCK) / size).to(tl.float32)
                elif SCALE == LARGEST:
                    found = most_of(tile_counts, begin, end, BLOCK).to(tl.float32, bitcast=True)
                elif SCALE == NORM:
                    found = tl.sqrt(sum_of(tile_sums, begin, end, BLOCK)).to(tl.float32)
                else:
                    spread = tl.sqrt(sum_of(tile_sums, begin, end, BLOCK) / size)
                    found = (spread * tl.load(factor)).to(tl.float32)
                tl.store(values + s, found)


@triton.jit
@no_type_check
def usable_or(threshold, instead):
    return tl.where((threshold > 0) & (threshold < float("inf")), threshold, instead)


@triton.jit
@no_type_check
def level_factors_of(scale, levels):
    """Return what `level_factors` does: (levels / scale, scale / levels)."""
    positive = scale > 0
    # `/` would be an approximate division on GPUs
    inverse = tl.math.div_rn(levels, tl.where(positive, scale, 1.0))
    step = tl.math.div_rn(scale, levels)
    over = (step * levels).to(tl.int32, bitcast=True) >= INFINITE
    step = tl.where(over, (step.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True), step)
    sent = positive & (scale < float("inf")) & (inverse < float("inf"))
    return tl.where(sent, inverse, 0.0), tl.where(sent, step, 0.0)


@moves("tiles v values values unusable", "payload residual", lambda a: 4 * a.TILE + 4 * a.share)
@triton.jit(
    do_not_specialize=[
        "n_tiles",
        "n_segments",
        "n_unusable",
        "share",
        "n_tensors",
        "begin",
        "end",
        "nbytes",
        "levels",
        "key",
        "inner_key",
        "momentum",
        "ratio",
        "form",
    ]
)
@no_type_check
def encode(
    tiles,
    n_tiles,
    bounds,
    starts,
    n_segments,
    v,
    values,
    payload,
    begin,
    end,
    nbytes,
    residual,
    momentum,
    levels,
    key,
    inner_key,
    seeds,
    unusable,
    n_unusable,
    share,
    tensors,
    n_tensors,
    ratio,
    form,
    counters,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    KEEP: tl.constexpr,
    RANDOM: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write table and codes, at `begin` to `end`, and the residual. The last program writes the header.

    unusable: first unusable elements of parts, of which each program reads `share`. seeds: `seed_word` on the
    device, in the place of the keys, or None.
    """
    s, length, i, is_valid, place = tile_of(tiles, n_tiles, bounds, starts, WIDTH, TILE)
    x = tl.load(v + i, mask=is_valid, other=0.0)
    value = tl.load(values + s)
    if FORM == SIGNS:
        field, sent = sign_of(x, is_valid, 0.0, value)
    elif FORM == CUTS:
        field, sent = sign_of(x, is_valid, value, 1.0)
    elif FORM == TERNARY:
        field, sent = ternary_of(x, is_valid, usable_or(value, float("inf")))
    else:
        inverse, step = level_factors_of(value, levels)
        if seeds is not None:
            word = tl.load(seeds)
            key = word.to(tl.int32)
            inner_key = (word >> 32).to(tl.int32)
        field, sent = level_of(x, i, is_valid, inverse, step, levels, key, inner_key, RANDOM, WIDTH)
    if KEEP == KEEPS_REST:
        tl.store(residual + i, x - sent, mask=is_valid)
    elif KEEP == KEEPS_SCALED:
        tl.store(residual + i, x * momentum, mask=is_valid)
    written = live_bytes(length, WIDTH, UNIT, TILE)
    packed = tl.sum(field << shifts_of(WIDTH, FORM <= TERNARY), 1)
    byte = begin + place
    tl.store(payload + byte, packed.to(tl.uint8), mask=written)
    part = tl.sum(tl.where(written, contribution(packed.to(tl.int64), byte), 0), 0)
    t = tl.program_id(0)
    if ROWS > 0:
        # there are at least as many tiles as segments
        listed = t < n_segments
        size = tl.load(bounds + t + 1, mask=listed, other=0) - tl.load(bounds + t, mask=listed, other=0)
        word = tl.load(values + t, mask=listed & (size > 0), other=0.0).to(tl.int32, bitcast=True)
        tl.store((payload + HEADER).to(tl.pointer_type(tl.int32)) + t, word, mask=listed)
        word = tl.where(listed, word, 0).to(tl.int64) & LOW
        part += contribution(word, 4 * t.to(tl.int64) + HEADER)
    if t == 0:
        pad = end + tl.arange(0, 8)
        tl.store(payload + pad, tl.zeros([8], dtype=tl.uint8), mask=pad < nbytes)
    lane = tl.arange(0, BLOCK)
    least = tl.full([BLOCK], NOWHERE, tl.int32)
    for k in range(0, share, BLOCK):
        own = (lane < share - k) & (t * share + k + lane < n_unusable)
        least = tl.minimum(least, tl.load(unusable + t * share + k + lane, mask=own, other=NOWHERE))
    found = tl.min(least, 0)
    if found < NOWHERE:
        tl.atomic_max(counters + UNUSABLE, tl.full([], NOWHERE, tl.int64) - found)
    tl.atomic_add(counters + SUM, part)
    if tl.atomic_add(counters + FINISHED, 1) == n_tiles - 1:
        where = tl.full([], NOWHERE, tl.int64) - tl.atomic_xchg(counters + UNUSABLE, 0)
        one = tl.full([], 1.0, tl.float32)
        zero = tl.zeros([], dtype=tl.int32)
        write_header(payload, counters, zero, where, tensors, n_tensors, one, ratio, form)


def read_of_rank(tile: int, width: int, share: int) -> int:
    """Return the bytes that a program reads of a rank: codes, words of the checksum, and the last one a header."""
    return tile * width // 8 + 8 * share + HEADER_BYTES


def read_by_mean(a: Any) -> int:
    """Return the most bytes that a program reads: of each rank, and sums."""
    continued: int = 0 if a.before is None else 4 * a.TILE
    return (a.end - a.first) * read_of_rank(a.TILE, a.WIDTH, a.share) + continued


@moves(
    "tiles payloads payloads before",
    "mean numbers sums",
    read_by_mean,
    lambda a: read_and_written(SECTOR * a.programs * (a.end - a.first + 2)),
)
@triton.jit(
    do_not_specialize=[
        "n_tiles",
        "n_segments",
        "first",
        "end",
        "stride",
        "n_words",
        "share",
        "begin",
        "levels",
        "size",
    ]
)
@no_type_check
def mean_of_payloads(
    tiles,
    n_tiles,
    bounds,
    starts,
    n_segments,
    payloads,
    first,
    end,
    stride,
    n_words,
    share,
    begin,
    given,
    levels,
    size,
    counters,
    numbers,
    before,
    sums,
    mean,
    P: tl.constexpr,
    FORM: tl.constexpr,
    MAJORITY: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    CHECKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the values of ranks in their order, from `first` on and before `end`. The last program writes their
    numbers.

    Each program also adds `share` words to the checksum of each rank. before: sums that these continue, or None.
    sums: where sums are left for the next launch. None: this one writes the mean, and the number after those of
    all ranks.
    """
    s, length, i, is_valid, place = tile_of(tiles, n_tiles, bounds, starts, WIDTH, TILE)
    t = tl.program_id(0)
    total = tl.zeros([TILE * WIDTH // 8, 8 // WIDTH], dtype=tl.float32)
    if before is not None:
        total = tl.load(before + i, mask=is_valid, other=0.0)
    written = live_bytes(length, WIDTH, UNIT, TILE)
    lane = tl.arange(0, CHECKED)
    for r in range(first, end):
        payload = payloads + tl.cast(r, tl.int64) * stride
        packed = tl.load(payload + begin + place, mask=written, other=0).to(tl.int32)
        field = packed[:, None] >> shifts_of(WIDTH, FORM <= TERNARY)
        table = (payload + HEADER).to(tl.pointer_type(tl.float32))
        if FORM == SIGNS:
            total += field_value(field, tl.load(table + s), SIGN_FIELDS, WIDTH)
        elif FORM == CUTS:
            total += field_value(field, 1.0, SIGN_FIELDS, WIDTH)
        elif FORM == TERNARY:
            total += field_value(field, 1.0, TERNARY_FIELDS, WIDTH)
        else:
            _, step = level_factors_of(tl.load(table + s), levels)
            total += field_value(field, step, LEVEL_FIELDS, WIDTH)
        part = tl.zeros([CHECKED], dtype=tl.int64)
        for k in range(0, share, CHECKED):
            j = t * share + k + lane
            own = (lane < share - k) & (j < n_words)
            word = tl.load(payload.to(tl.pointer_type(tl.int64)) + j, mask=own, other=0)
            part += word * (2 * j.to(tl.int64) + 1)
        tl.atomic_add(counters + (r - first + 1) * LINE, tl.sum(part, 0), sem="relaxed")
    if sums is not None:
        tl.store(sums + i, total, mask=is_valid)
    else:
        if FORM == TERNARY:
            total *= usable_or(tl.load(given + s), 0.0)
        # `/` would be an approximate division on GPUs
        y = tl.math.div_rn(total, tl.zeros_like(total) + size)
        if MAJORITY:
            y = tl.where(y > 0, 1.0, tl.where(y < 0, -1.0, 0.0))
        y = rounded(y, P)
        tl.store(mean + i, y.to(P), mask=is_valid)
        infinite = is_valid & ((y.to(tl.int32, bitcast=True) & MAGNITUDE) >= INFINITE)
        if tl.max(tl.max(infinite.to(tl.int32), 1), 0) > 0:
            tl.atomic_add(counters + OVERFLOW, 1, sem="relaxed")
    if tl.atomic_add(counters + FINISHED, 1) == n_tiles - 1:
        tl.store(counters + FINISHED, 0)
        if sums is None:
            tl.store(numbers + end * NUMBERS, (tl.atomic_xchg(counters + OVERFLOW, 0) == 0).to(tl.int32))
        lanes = tl.arange(0, BLOCK)
        for k in range(first, end, BLOCK):
            rank = k + lanes
            some = rank < end
            header = payloads.to(tl.pointer_type(tl.int32)) + rank.to(tl.int64) * (stride // 4)
            stored = tl.load(header + 2, mask=some, other=0).to(tl.int64) & LOW
            counter = counters + (rank - first + 1) * LINE
            added = tl.atomic_xchg(counter, tl.zeros([BLOCK], dtype=tl.int64), mask=some)
            report = numbers + rank * NUMBERS
            tl.store(report, tl.load(header + 1, mask=some), mask=some)
            # the checksum belongs to a payload with zero in its report
            tl.store(report + 1, (checksum_of(added - 3 * stored) == stored).to(tl.int32), mask=some)
            tl.store(report + 2, tl.load(header, mask=some), mask=some)
            tl.store(report + 3, tl.load(header + 4, mask=some), mask=some)
            tl.store(report + 4, tl.load(header + 5, mask=some), mask=some)


class TritonElementCoder(ElementCoder):
    """The kernels above. tile: elements per program, a power of two, at least 32."""

    def __init__(self, tile: int = 2048):
        self.tile = tile
        self._launch = Launcher(INTERPRETED)
        self._tilings = Tilings(tile)
        self._arrived = WeakTensorKeyDictionary()

    def measure_(self, code: ElementCode, g: tuple[Tensor, ...], v: Dense, adds: bool) -> Measured:
        tiling, device = self._tilings.of(code.bounds, tuple(piece.numel() for piece in g)), v.device
        tiles, segments, dtype = tiling.count, tiling.first_tiles.numel(), g[0].dtype
        values = torch.empty(max(1, code.rows), segments, dtype=torch.float32, device=device)
        groups = tiles // SUMS + segments
        sums = torch.empty(tiles + groups, dtype=torch.float64, device=device)
        words = torch.empty(2 * tiles + groups, dtype=torch.int32, device=device)
        unusable, counts = words[:tiles], words[tiles:]
        where = (tiling.table, tiles, pointers(g, dtype, device), v, code.bounds, tiling.first_tiles, segments)
        parts = (unusable, sums, counts, groups, self._arrived_at(code.bounds, segments + groups))
        found = (on_device((code.factor,), torch.float64, device), values)
        kind = (FLOATS[dtype], adds, int(code.scale), self.tile, SUMS)
        self._launch(measure, v, tiles, *where, *parts, *found, *kind)
        return Measured(values, unusable)

    def encode(
        self,
        code: ElementCode,
        v: Dense,
        measured: Measured,
        given: Each | None,
        seed: int | None,
        keep: bool,
        tensors: Int64[Tensor, "bounds"],
        terms: Terms,
        into: Dense | None = None,
    ) -> tuple[UInt8[Tensor, "nbytes"], Residual]:
        where, tiles, layout = self._where(code, v)
        payload = torch.empty(code.nbytes, dtype=torch.uint8, device=v.device)
        residual, kept = empty_residual(v, keep, into), KEEPS_NOTHING
        if keep:
            kept = KEEPS_REST if code.momentum is None else KEEPS_SCALED
        values = measured.values if given is None else given
        sizes = (code.begin, code.begin + layout, code.nbytes, residual, code.momentum or 0.0, float(code.levels))
        unusable, counters = measured.unusable, counters_on(v.device, current_stream(v.device))
        parts = unusable.numel(), -(-unusable.numel() // tiles)
        header = (unusable, *parts, tensors, tensors.numel(), *terms.words, counters)
        kind = (int(code.form), code.rows, kept.value, seed is not None, code.bits, code.unit, self.tile, BLOCK)
        slot = None if seed is None else seed_slot(seed_word(seed))
        keys = keys_as_int32(seed if slot is None else None)
        made = (v, values, payload, *sizes, *keys, slot, *header)
        self._launch(encode, v, tiles, *where, *made, *kind)
        return payload, residual

    def mean_into_(
        self, flat: Tensor, code: ElementCode, payloads: Sequence[UInt8[Tensor, "nbytes"]], given: Each | None
    ) -> Int32[Tensor, "numbers"]:
        (where, tiles, _), ranks, rows = self._where(code, flat), len(payloads), as_rows(payloads, 8)
        numbers = torch.empty(WORDS * ranks + 1, dtype=torch.int32, device=flat.device)
        words = code.nbytes // 8
        share = -(-words // tiles)
        each = read_of_rank(self.tile, code.bits, share)
        groups = groups_of_ranks(ranks, each, continued=4 * self.tile)
        counters = sums_on(flat.device, current_stream(flat.device), groups[0][1])
        sums = flat
        if len(groups) > 1 and flat.dtype != torch.float32:
            sums = torch.empty(flat.numel(), dtype=torch.float32, device=flat.device)
        settings = (rows.stride(0), words, share, code.begin, given, float(code.levels), float(ranks))
        kind = (
            FLOATS[flat.dtype],
            int(code.form),
            code.majority,
            code.bits,
            code.unit,
            self.tile,
            CHECKED,
            CHECKED,
        )
        for first, end in groups:
            held_back = (sums if first > 0 else None, sums if end < ranks else None)
            made = (counters, numbers, *held_back, flat)
            self._launch(mean_of_payloads, flat, tiles, *where, rows, first, end, *settings, *made, *kind)
        return numbers

    def _where(self, code: ElementCode, near: Tensor) -> tuple[tuple[object, ...], int, int]:
        """Return the first arguments of a kernel with codes, the number of tiles, and the bytes of the codes."""
        tiling = self._tilings.of(code.bounds, (near.numel(),))
        layout = layout_of(code.bounds, code.bits, code.unit)
        where = (tiling.table, tiling.count, code.bounds, layout.starts, tiling.first_tiles.numel())
        return where, tiling.count, layout.nbytes

    def _arrived_at(self, bounds: Bounds, n: int) -> Int32[Tensor, "n"]:
        """The counters of launches on the current stream, which follow each other. They are zero in between."""
        kept: dict[tuple[int, int], Tensor] = self._arrived.setdefault(bounds, {})
        key = (current_stream(bounds.device), n)
        if key not in kept:
            kept[key] = torch.zeros(n, dtype=torch.int32, device=bounds.device)
        return kept[key]


def sums_on(device: torch.device, stream: int, ranks: int) -> Int64[Tensor, "counters"]:
    """As `counters_on`, with a sum for each rank."""
    return held(_sums_on(device, stream, ranks))


@lru_cache(maxsize=256)
def _sums_on(device: torch.device, stream: int, ranks: int) -> Int64[Tensor, "counters"]:
    return torch.zeros(LINE.value * (ranks + 1), dtype=torch.int64, device=device)
