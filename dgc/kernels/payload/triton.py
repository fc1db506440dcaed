"""The GPU backend of payloads: Triton kernels with the same bytes and bits as `Codec` and `NativeMeanDecoder`.

Launches of `encode`, PyTorch's included: 2, for Rice codes 3, for plain indices and cast values 1 if the largest
magnitude is known, else 3 (in chunks 2, else 4), and for int8 values 1 more, for signs 2, for 2 bits 4; `seal_`
and `words_of` 1. The mean of payloads takes 2, and for coded indices 1 more; where one program would read more of
them than MOST_READ, 2 more for chunks, 3 for packed ones and 4 for Rice codes. So does the sum of more entries
than one program may read. Nothing waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float32, Int32, Int64, UInt8
from torch import Tensor

from dgc.kernels.launch import (
    BLOCK,
    MOST_READ,
    Launcher,
    Tree,
    as_rows,
    blocks,
    current_stream,
    groups_of_ranks,
    held,
    on_device,
    tree_of,
    zeros_on,
)
from dgc.kernels.payload import (
    BLOCKS,
    HEADER_BYTES,
    PACKED_SHARES,
    PLAIN,
    TABLES,
    WORDS,
    Codec,
    IndexCode,
    IndexKind,
    MeanDecoder,
    PayloadLayout,
    Terms,
    ValueKind,
    block_count,
)
from dgc.kernels.payload.triton_coded import (
    BIN_SUMS,
    FAN,
    FIELDS,
    FOUND,
    MOST,
    MOST_IN,
    SQUARES_OF,
    SUM_OF,
    add_up,
    measure_packed,
    measure_rice,
    place_rice,
    write_coded,
)
from dgc.kernels.payload.triton_mean import (
    CHECKED,
    KNOWN,
    SUMMED,
    TILE,
    check,
    merge,
    open_headers,
    place_in_chunks,
    place_indices,
    place_ones,
    read_by_unpack,
    read_by_unpack_chunks,
    read_of_entry,
    read_of_ranges,
    sum_chunks,
    sum_fields,
    sum_gaps,
    unpack,
    unpack_chunks,
)
from dgc.kernels.payload.triton_plain import SHARES, largest_of, seal, write_plain
from dgc.kernels.selection import SparseVector
from dgc.kernels.selection.triton import INTERPRETED

SCALED_KINDS = (ValueKind.FP16, ValueKind.BF16)
FEW = 256  # entries of a payload that `merge` reads at a time: a tile has few
SEARCHED = 16  # ranks whose entries of a tile it searches at a time
PART = 512  # elements of a coded payload per program: fields need many registers
LISTED = 1024  # blocks of a code, or chunks, of which a program adds what is known of them
COUNTERS = 2 + 2 * SHARES.value
# what is found of the values of segments, in this order
FIELDS_OF = {
    ValueKind.SIGN: (MOST_IN, SUM_OF),
    ValueKind.INT8: (MOST_IN,),
    ValueKind.TWO_BITS: (MOST_IN, SUM_OF, SQUARES_OF, BIN_SUMS),
}


@dataclass(frozen=True)
class CodePlan:
    """What is found of a code of indices before it is written.

    Attributes:
        block, blocks: Elements of a block, and the number of blocks, of chunks, or of nothing.
        parts, tree: The parts of BLOCK elements, and the tree in which their sums are added.
        shares, stride: Shares of the selection that are tried, and what each takes.
        found: The size of all, in numbers of 8 bytes.
    """

    block: int
    blocks: int
    parts: int
    tree: Tree
    shares: int
    stride: int

    @property
    def found(self) -> int:
        return FOUND.value + self.shares * self.stride


@lru_cache(maxsize=1024)
def plan_code(code: IndexCode) -> CodePlan:
    n = blocks_of(code)
    if code.kind not in BLOCKS:
        return CodePlan(1, n, 0, tree_of(0, FAN.value), 0, 0)
    block, parts = BLOCKS[code.kind], blocks(code.capacity)
    tree = tree_of(parts, FAN.value)
    if code.kind == IndexKind.PACKED:
        return CodePlan(block, n, parts, tree, SHARES.value, 2 * n + tree.sums)
    return CodePlan(block, n, parts, tree, 1, 3 * n + 2 * tree.sums)


class TritonCodec(Codec):
    """The kernels above."""

    def __init__(self) -> None:
        self._launch = Launcher(INTERPRETED)

    def blank(self, nbytes: int, like: Tensor) -> UInt8[Tensor, "nbytes"]:
        if nbytes > HEADER_BYTES:
            return super().blank(nbytes, like)
        return torch.empty(nbytes, dtype=torch.uint8, device=like.device)  # `seal_` writes all of a header

    def encodes(self, layout: PayloadLayout) -> bool:
        return layout.values is not None

    def encode(
        self,
        selection: SparseVector,
        layout: PayloadLayout,
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
        programs, fields, widths = block_count(code.capacity, PART), None, None
        own, given, found, largest = selection, selection, None, None
        plan = plan_code(code)
        if code.kind not in BLOCKS:
            payload = self.blank(layout.nbytes, values)
            if layout.values in SCALED_KINDS:
                largest = self._largest(selection)
        else:
            count = torch.empty((), dtype=torch.int32, device=device)
            own = SparseVector(torch.empty_like(selection.indices), torch.empty_like(values), count)
            payload = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
            found = torch.empty(plan.found, dtype=torch.int64, device=device)
            given = self._measure(selection, layout, plan, payload, found, own, counters)
            largest = found[MOST.value :]
        if layout.values in TABLES:
            programs += segments
            if layout.values == ValueKind.TWO_BITS:
                widths = on_device((r / 4,), torch.float64, device)
            fields = zeros_on(device, 2 * segments * FIELDS.value).view(torch.int64)
            elements = (given.indices, given.values, given.count, found, limit, bounds, segments, fields, widths)
            for field in FIELDS_OF[layout.values]:
                variant = (int(code.kind), int(layout.values), field.value, PART)
                self._launch(add_up, values, block_count(code.capacity, PART), *elements, *variant)
        what = (given.indices, given.values, given.count, *header, code.capacity, limit, largest)
        measured = (found, plan.blocks, plan.stride, plan.parts, plan.tree.levels)
        how = (bounds, segments, fields, widths, payload, begin, codes_begin(layout, segments))
        result = (decoded, own.indices, own.values, own.count, *terms.words, counters, max(1, programs))
        kind = (int(code.kind), plan.block, int(layout.values), BLOCK, PART)
        self._launch(write_coded, values, max(1, programs), *what, *measured, *how, *result, *kind)
        return payload, SparseVector(own.indices, decoded, own.count), own.values

    def _measure(
        self,
        selection: SparseVector,
        layout: PayloadLayout,
        plan: CodePlan,
        payload: UInt8[Tensor, "nbytes"],
        found: Int64[Tensor, "found"],
        own: SparseVector,
        counters: Int64[Tensor, "counters"],
    ) -> SparseVector:
        """Clear the payload, and find the code of the selection's indices. Returns what `write_coded` reads.

        own: receives what is sent, with a Rice code. With a packed one `write_coded` writes it.
        """
        code, values, parts, tree = layout.indices, selection.values, plan.parts, plan.tree
        scaled, size = layout.values in SCALED_KINDS, (plan.block, BLOCK)
        sizes = (plan.blocks, 8 * (code.nbytes - plan.blocks), code.parameter, payload, layout.nbytes // 8)
        sums = (counters, zeros_on(values.device, plan.shares * tree.groups))
        if code.kind == IndexKind.PACKED:
            shares = on_device((128, *PACKED_SHARES, 0), torch.int64, values.device)
            what = (selection.indices, values, selection.count, shares, *sizes, found, plan.stride, *sums)
            programs = parts * plan.shares
            self._launch(measure_packed, values, programs, *what, tree.groups, parts, tree.levels, scaled, *size)
            return selection
        given = (selection.indices, selection.count, *sizes, found, counters, parts)
        self._launch(measure_rice, values, parts, *given, *size)
        result = (found, own.indices, own.values, own.count, *sums, parts, tree.levels)
        elements = (selection.indices, values, selection.count, code.capacity, plan.blocks)
        self._launch(place_rice, values, parts, *elements, *result, scaled, *size)
        return own

    def _encode_plain(
        self, selection: SparseVector, layout: PayloadLayout, limit: float, header: tuple[Any, ...], terms: Terms
    ) -> tuple[UInt8[Tensor, "nbytes"], Float32[Tensor, "capacity"]]:
        kind = layout.values
        assert kind is not None
        values, device, capacity = selection.values, selection.values.device, layout.indices.capacity
        payload = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        decoded = torch.empty(capacity, dtype=torch.float32, device=device)
        counters = counters_on(device, current_stream(device))
        largest = self._largest(selection) if kind in SCALED_KINDS else None
        programs = -(-capacity // BLOCK) or 1  # the header is written without elements too
        what = (selection.indices, values, selection.count, *header)
        place = (payload, layout.value_bytes.start, layout.nbytes, decoded)
        where = (capacity, limit, largest, *place, *terms.words, counters, programs)
        variant = (layout.indices.kind == IndexKind.INT64, int(kind), BLOCK)
        self._launch(write_plain, values, programs, *what, *where, *variant)
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
        ranks, nbytes, device = len(payloads), payloads[0].numel(), payloads[0].device
        words = torch.empty(5 * ranks, dtype=torch.int32, device=device)
        rows, parts = as_rows(payloads, 8), parts_of(nbytes)
        counters = counters_on(device, current_stream(device), ranks)
        self._launch(
            open_headers, words, ranks * parts, rows, rows.stride(0), nbytes, words, counters, parts, COUNTERS
        )
        return words


class TritonMeanDecoder(MeanDecoder):
    """Checks the payloads of all ranks and adds them, in two launches or more; one to four for coded indices."""

    def __init__(self) -> None:
        self._launch = Launcher(INTERPRETED)

    def takes(self, layout: PayloadLayout) -> bool:
        return layout.values is not None

    def mean_into_(
        self,
        dense: Float32[Tensor, "n"],
        payloads: Sequence[UInt8[Tensor, "nbytes"]],
        layout: PayloadLayout,
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
        parts = max(parts_of(layout.nbytes), block_count(code.capacity, CHECKED))
        decoded = None
        if kind in TABLES:
            decoded = torch.empty(ranks, code.capacity, dtype=torch.float32, device=dense.device)
        work = (numbers, decoded, counters_on(dense.device, current_stream(dense.device), ranks), parts)
        variant_of_check = (*variant, flags is not None, CHECKED, COUNTERS)
        self._launch(check, dense, ranks * parts, *given, *sizes, *where, *work, *variant_of_check)
        values = rows[:, layout.value_bytes.start :] if decoded is None else decoded.view(torch.uint8)
        self._merge(dense, (*given, values, values.stride(0)), layout, size, numbers)
        return numbers

    def _merge(
        self,
        dense: Float32[Tensor, "n"],
        given: tuple[Any, ...],
        layout: PayloadLayout,
        size: int,
        numbers: Int32[Tensor, "numbers"],
    ) -> None:
        """Launch `merge` as often as is needed if tiles are full. given: its first arguments."""
        code, ranks, kind = layout.indices, given[1], layout.values
        assert kind is not None
        cast = ValueKind.FP32 if kind in TABLES else kind
        wide, steps = code.kind == IndexKind.INT64, code.capacity.bit_length()
        most = max(1, min(TILE, code.capacity))
        together = min(SEARCHED, 1 << (ranks - 1).bit_length())
        each, besides = read_of_entry(wide, cast), read_of_ranges(wide, together, steps)
        groups = groups_of_ranks(ranks, each * most, besides, at_most=together)
        done, room = None, ranks * most
        if len(groups) > 1:
            done = torch.empty(block_count(code.numel, TILE), dtype=torch.int32, device=dense.device)
            room = max(groups[0][1] * most, (MOST_READ - besides) // each)
        sizes = (float(size), code.numel, steps, numbers, dense, done, room)
        for first, _ in groups:
            variant = (wide, int(cast), kind not in TABLES, first == 0, together, TILE, FEW)
            self._launch(merge, dense, block_count(code.numel, TILE), *given, *sizes, *variant)

    def _unpack(
        self, rows: UInt8[Tensor, "ranks nbytes"], code: IndexCode
    ) -> tuple[UInt8[Tensor, "ranks row"], Int32[Tensor, "ranks"]]:
        """Return the bytes of int32 indices, and whether they are valid."""
        ranks, device, n, in_chunks = rows.shape[0], rows.device, blocks_of(code), code.kind == IndexKind.CHUNKS
        indices = torch.empty(ranks, code.capacity, dtype=torch.int32, device=device)
        flags = torch.empty(ranks, dtype=torch.int32, device=device)
        if in_chunks:
            most = read_by_unpack_chunks(code.capacity, n)
        else:
            most = read_by_unpack(code.kind == IndexKind.RICE, code.capacity, n, code.nbytes)
        if most > MOST_READ:
            (self._unpack_chunks_in_parts if in_chunks else self._unpack_in_parts)(rows, code, indices, flags)
            return indices.view(torch.uint8), flags
        starts = torch.empty(ranks * n, dtype=torch.int64, device=device)
        given, end = (rows, rows.stride(0), code.capacity), (indices, flags)
        if in_chunks:
            self._launch(unpack_chunks, rows, ranks, *given, n, n.bit_length(), code.nbytes, starts, *end, BLOCK)
        else:
            is_rice = code.kind == IndexKind.RICE
            ones = torch.empty(ranks * code.capacity if is_rice else 0, dtype=torch.int64, device=device)
            sizes, variant = (code.numel, n, code.nbytes, starts, ones), (int(code.kind), BLOCKS[code.kind], BLOCK)
            self._launch(unpack, rows, ranks, *given, *sizes, *end, *variant)
        return indices.view(torch.uint8), flags

    def _unpack_in_parts(self, rows: Tensor, code: IndexCode, indices: Tensor, flags: Tensor) -> None:
        ranks, device, n, is_rice = rows.shape[0], rows.device, blocks_of(code), code.kind == IndexKind.RICE
        fields = Parts(block_count(n, LISTED), 2)
        tiles = Parts(block_count(8 * code.nbytes, BLOCK) if is_rice else 0, 1)
        gaps = Parts(block_count(code.capacity, PART), 2)
        sizes = [KNOWN.value, n, fields.sums, tiles.sums, gaps.sums, code.capacity if is_rice else 0]
        work = torch.empty(ranks * sum(sizes), dtype=torch.int64, device=device)
        known, starts, field_sums, tile_sums, gap_sums, ones = work.split([ranks * size for size in sizes])
        zeros = zeros_on(device, ranks * (fields.tree.groups + tiles.tree.groups + gaps.tree.groups))
        arrived = zeros.split([ranks * parts.tree.groups for parts in (fields, tiles, gaps)])
        given, variant = (rows, rows.stride(0), code.capacity), (BLOCKS[code.kind], LISTED)
        where, programs = (known, starts), ranks * (fields.count + tiles.count)
        sums = (*fields.given(field_sums, arrived[0]), *tiles.given(tile_sums, arrived[1]))
        self._launch(sum_fields, rows, programs, *given, n, code.nbytes, *where, *sums, *variant, BLOCK)
        if is_rice:
            places = (known, tile_sums, tiles.sums, tiles.count, tiles.tree.levels, ones, BLOCK)
            self._launch(place_ones, rows, ranks * tiles.count, *given, code.nbytes, *places)
        read = (*where, field_sums, fields.sums, fields.count, fields.tree.levels, ones)
        own, kind = (*gaps.given(gap_sums, arrived[2]), indices, flags), (int(code.kind), *variant, PART)
        self._launch(sum_gaps, rows, ranks * gaps.count, *given, code.numel, n, code.nbytes, *read, *own, *kind)
        sums = (gap_sums, gaps.sums, gaps.count, gaps.tree.levels, indices, PART)
        self._launch(place_indices, rows, ranks * gaps.count, *given, code.numel, *sums)

    def _unpack_chunks_in_parts(self, rows: Tensor, code: IndexCode, indices: Tensor, flags: Tensor) -> None:
        ranks, device, n = rows.shape[0], rows.device, blocks_of(code)
        parts, programs = Parts(block_count(n, LISTED), 2), block_count(code.capacity, FEW)
        assert parts.tree.levels < 2, "2**31 elements have at most 512 parts of 1024 chunks"
        work = torch.empty(ranks * (n + parts.sums), dtype=torch.int64, device=device)
        starts, sums = work.split([ranks * n, ranks * parts.sums])
        given, zeros = (rows, rows.stride(0)), zeros_on(device, ranks * parts.tree.groups)
        own = (starts, *parts.given(sums, zeros), flags, LISTED)
        self._launch(sum_chunks, rows, ranks * parts.count, *given, n, *own)
        read = (starts, sums, parts.sums, parts.count, parts.count.bit_length(), indices, programs)
        sizes, variant = (code.capacity, n, code.nbytes), (LISTED, LISTED.bit_length(), FEW)
        self._launch(place_in_chunks, rows, ranks * programs, *given, *sizes, *read, *variant)


@dataclass(frozen=True)
class Parts:
    """Parts of something, of which `rows` numbers are added in a tree of their programs."""

    count: int
    rows: int

    @property
    def tree(self) -> Tree:
        return tree_of(self.count, FAN.value)

    @property
    def sums(self) -> int:
        return self.rows * self.tree.sums

    def given(self, sums: Tensor, arrived: Tensor) -> tuple[Any, ...]:
        """Return the arguments of a kernel for several ranks."""
        return sums, self.sums, arrived, self.tree.groups, self.count, self.tree.levels


def blocks_of(code: IndexCode) -> int:
    """Return the number of blocks of a code, or of chunks."""
    return block_count(code.capacity, BLOCKS[code.kind]) if code.kind in BLOCKS else code.parameter


def parts_of(nbytes: int) -> int:
    """Return the number of programs that add the words of a payload."""
    return block_count(nbytes, 8 * SUMMED.value)


def codes_begin(layout: PayloadLayout, segments: int) -> int:
    """Return the first byte of the codes of values, after their tables."""
    assert layout.values is not None
    begin: int = layout.value_bytes.start
    return begin + 4 * TABLES[layout.values][0] * segments if layout.values in TABLES else begin


def counters_on(device: torch.device, stream: int, rows: int = 1) -> Int64[Tensor, "counters"]:
    """The counters of launches on this stream, which follow each other, for each of some payloads."""
    return held(_counters_on(device, stream, rows))


@lru_cache(maxsize=256)
def _counters_on(device: torch.device, stream: int, rows: int) -> Int64[Tensor, "counters"]:
    return torch.zeros(rows * COUNTERS, dtype=torch.int64, device=device)
