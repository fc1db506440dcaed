"""The GPU backend of payloads: Triton kernels with the same bytes and bits as `Codec` and `NativeMeanDecoder`.

Launches of `encode`, PyTorch's included: 2, for Rice codes 3, for plain indices and cast values 1 if the largest
magnitude is known, else 3 (in chunks 2, else 4); `seal_` and `words_of` 1. The mean of any number of payloads
takes 2, and 1 more if indices are coded. Nothing waits for the device.
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
    Launcher,
    Tree,
    as_rows,
    blocks,
    current_stream,
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
    FAN,
    FOUND,
    MOST,
    measure_packed,
    measure_rice,
    place_rice,
    write_coded,
)
from dgc.kernels.payload.triton_mean import (
    CHECKED,
    SUMMED,
    TILE,
    check,
    merge,
    open_headers,
    unpack,
    unpack_chunks,
)
from dgc.kernels.payload.triton_plain import SHARES, largest_of, seal, write_plain
from dgc.kernels.selection import SparseVector
from dgc.kernels.selection.triton import INTERPRETED

SCALED_KINDS = (ValueKind.FP16, ValueKind.BF16)
FEW = 256  # entries of a payload that `merge` reads at a time: a tile has few
PART = 512  # elements of a coded payload per program: fields need many registers
COUNTERS = 2 + 2 * SHARES.value


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
    if code.kind not in BLOCKS:
        return CodePlan(1, code.parameter, 0, tree_of(0, FAN.value), 0, 0)
    block, parts = BLOCKS[code.kind], blocks(code.capacity)
    n, tree = block_count(code.capacity, block), tree_of(parts, FAN.value)
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
        programs, widths = block_count(code.capacity, PART), None
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
        what = (given.indices, given.values, given.count, *header, code.capacity, limit, largest)
        measured = (found, plan.blocks, plan.stride, plan.parts, plan.tree.levels)
        how = (bounds, segments, widths, payload, begin, codes_begin(layout, segments))
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
    """Checks the payloads of all ranks and adds them, in two launches, or three if their indices are coded."""

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
        work = (numbers, counters_on(dense.device, current_stream(dense.device), ranks), parts)
        variant_of_check = (*variant, flags is not None, CHECKED, COUNTERS)
        self._launch(check, dense, ranks * parts, *given, *sizes, *where, *work, *variant_of_check)
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
