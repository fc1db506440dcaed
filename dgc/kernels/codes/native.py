"""The codes of every element in C++."""

from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_uint32, c_void_p
from math import inf
from typing import Any

import torch
from jaxtyping import Int32, Int64, UInt8
from torch import Tensor

from dgc.kernels.codes import (
    WORD,
    Bounds,
    Codes,
    Dense,
    Each,
    Quantizers,
    Residual,
    empty_codes,
    empty_residual,
    keys_of,
    layout_of,
    level_factors,
    thresholds_or,
)
from dgc.kernels.codes.blocks import BlockCode, Blocks, Padded, Row, Rows
from dgc.kernels.codes.elements import ElementCode, ElementCoder, Form, Measured, Scale
from dgc.kernels.codes.halves import HalfCode, Halves
from dgc.kernels.library import (
    EACH_F32,
    EACH_U8,
    F32,
    F64,
    FP32,
    FP64,
    I64,
    INT32,
    INT64,
    U8,
    UINT8,
    Native,
    Signatures,
)
from dgc.kernels.payload import CASTS, HEADER_BYTES, Terms
from dgc.kernels.payload.native import NativeCodec
from dgc.kernels.selection.native import NativeSelection, pieces_of

_RANGES = (I64, I64, c_int64)
_RANDOM = (c_int, c_uint32, c_uint32)
_MADE = (U8, F32, c_int)
_RANKS = (EACH_U8, c_int)
_ROWS = (c_int64, U8, c_int64)
_PIECES = (EACH_F32, c_void_p, c_int)

SIGNATURES: Signatures = {
    "dgc_largest": (None, (F32, I64, c_int64, F32, c_int)),
    "dgc_quantize_signs": (None, (F32, *_RANGES, F32, F32, *_MADE)),
    "dgc_add_signs": (None, (U8, *_RANGES, F32, F32, c_int)),
    "dgc_quantize_ternary": (None, (F32, *_RANGES, F32, *_MADE)),
    "dgc_quantize_levels": (None, (F32, *_RANGES, F32, F32, c_int, c_int, *_RANDOM, *_MADE)),
    "dgc_add_levels": (None, (U8, *_RANGES, F32, c_int, F32, c_int)),
    "dgc_blocks_encode": (None, (F32, *_RANGES, c_int64, c_int, c_int, c_int64, U8, c_int64, F32, c_int)),
    "dgc_blocks_add_sum": (None, (*_RANKS, c_int64, c_int, c_int, c_int64, F32, c_int)),
    "dgc_blocks_add_encode": (
        c_int64,
        (EACH_F32, c_int, F32, *_RANGES, c_int64, c_int, c_int, c_int64, U8, c_int64, F32, c_int),
    ),
    "dgc_blocks_second_phase": (None, (*_RANKS, c_int64, c_int, c_int, c_int64, F32, F32, c_int, U8, F32, c_int)),
    "dgc_blocks_decode": (
        None,
        (EACH_U8, *_RANGES, c_int64, c_int, c_int, c_int64, c_float, EACH_F32, c_int, c_int),
    ),
    "dgc_halves_encode": (None, (F32, c_int64, *_ROWS, *_RANDOM, F32, c_int)),
    "dgc_halves_add_encode": (c_int64, (*_PIECES, F32, c_int64, *_ROWS, *_RANDOM, F32, c_int)),
    "dgc_halves_add_sum": (None, (*_RANKS, c_int64, F32, c_int)),
    "dgc_halves_second_phase": (None, (*_RANKS, c_int64, F32, U8, *_RANDOM, F32, c_int)),
    "dgc_halves_decode": (None, (EACH_U8, c_int64, c_int64, c_float, *_PIECES, c_int)),
    "dgc_measure": (
        c_int64,
        (EACH_F32, c_void_p, c_int, F32, c_int, I64, c_int64, c_int, F64, c_int),
    ),
    "dgc_mean_signs": (c_int, (*_RANKS, *_RANGES, EACH_F32, F32, c_float, c_int, F32, c_int)),
    "dgc_mean_ternary": (c_int, (*_RANKS, *_RANGES, EACH_F32, F32, c_float, F32, c_int)),
    "dgc_mean_levels": (c_int, (*_RANKS, *_RANGES, EACH_F32, c_int, c_float, F32, c_int)),
    "dgc_mean_bf16": (None, (*_RANKS, c_int64, c_float, F32, c_int)),
    "dgc_round": (c_int, (EACH_F32, c_void_p, c_int, c_int, U8, c_int64, c_int)),
    "dgc_pack_sums": (None, (*_RANKS, c_int64, c_int, c_int, U8, c_int)),
    "dgc_mean_sums": (None, (*_RANKS, c_int64, c_int, *_RANGES, c_int, F32, F32, c_int)),
}

# of a payload that is not sparse
_NO_COUNT, _NO_SCALE = torch.tensor(0, dtype=INT32), torch.tensor(1.0, dtype=FP32)

# what `round_` returns: an element is not finite, or all are
_PROBES = (torch.tensor(inf, dtype=FP32), torch.tensor(0.0, dtype=FP32))


class NativeQuantizers(Native, Quantizers):
    """Quantizers at the speed of memory. Ternary codes of a single rank are added in torch."""

    signatures = SIGNATURES

    def largest(self, v: Dense, bounds: Bounds) -> Each:
        found = torch.empty(bounds.numel() - 1, dtype=FP32)
        self._library.dgc_largest(v, bounds, found.numel(), found, torch.get_num_threads())
        return found

    def sign_encode(
        self,
        v: Dense,
        bounds: Bounds,
        cuts: Each,
        scales: Each,
        keep: bool = True,
        into: Dense | None = None,
    ) -> tuple[Codes, Residual]:
        codes, residual = empty_codes(bounds, 1, WORD), empty_residual(v, keep, into)
        where, threads = _ranges(bounds, 1, WORD), torch.get_num_threads()
        self._library.dgc_quantize_signs(v, *where, cuts, scales, codes, residual, threads)
        return codes, residual

    def sign_add_(self, codes: Codes, bounds: Bounds, scales: Each, total: Dense) -> None:
        where = _ranges(bounds, 1, WORD)
        self._library.dgc_add_signs(codes, *where, scales, total, torch.get_num_threads())

    def sign_mean_(
        self,
        codes: Sequence[Codes],
        bounds: Bounds,
        scales: Sequence[Each],
        factors: Each | None,
        size: int,
        mean: Dense,
    ) -> None:
        given, threads = (*_by_rank(codes, scales), *_ranges(bounds, 1, WORD)), torch.get_num_threads()
        self._library.dgc_mean_signs(*given, scales, factors, size, False, mean, threads)

    def tern_encode(
        self, v: Dense, bounds: Bounds, thresholds: Each, keep: bool = True, into: Dense | None = None
    ) -> tuple[Codes, Residual]:
        codes, residual = empty_codes(bounds, 2, WORD), empty_residual(v, keep, into)
        sent, threads = thresholds_or(torch.inf, thresholds), torch.get_num_threads()
        self._library.dgc_quantize_ternary(v, *_ranges(bounds, 2, WORD), sent, codes, residual, threads)
        return codes, residual

    def tern_mean_(
        self,
        codes: Sequence[Codes],
        bounds: Bounds,
        thresholds: Sequence[Each],
        factors: Each | None,
        size: int,
        mean: Dense,
    ) -> None:
        sent, threads = [thresholds_or(0.0, own) for own in thresholds], torch.get_num_threads()
        given = (*_by_rank(codes, sent), *_ranges(bounds, 2, WORD))
        self._library.dgc_mean_ternary(*given, sent, factors, size, mean, threads)

    def uniform_encode(
        self,
        v: Dense,
        bounds: Bounds,
        scales: Each,
        levels: int,
        bits: int,
        seed: int | None,
        keep: bool = True,
        into: Dense | None = None,
    ) -> tuple[Codes, Residual]:
        codes, residual = empty_codes(bounds, bits, 1), empty_residual(v, keep, into)
        how = (*level_factors(scales, levels, bits), levels, bits, *_random(seed))
        made = (codes, residual, torch.get_num_threads())
        self._library.dgc_quantize_levels(v, *_ranges(bounds, bits, 1), *how, *made)
        return codes, residual

    def uniform_add_(
        self, codes: Codes, bounds: Bounds, scales: Each, levels: int, bits: int, total: Dense
    ) -> None:
        (_, steps), where = level_factors(scales, levels, bits), _ranges(bounds, bits, 1)
        self._library.dgc_add_levels(codes, *where, steps, bits, total, torch.get_num_threads())

    def uniform_mean_(
        self,
        codes: Sequence[Codes],
        bounds: Bounds,
        scales: Sequence[Each],
        levels: int,
        bits: int,
        size: int,
        mean: Dense,
    ) -> None:
        steps, threads = [level_factors(own, levels, bits)[1] for own in scales], torch.get_num_threads()
        given = (*_by_rank(codes, steps), *_ranges(bounds, bits, 1))
        self._library.dgc_mean_levels(*given, steps, bits, size, mean, threads)

    def round_(self, g: tuple[Tensor, ...], halves: Tensor) -> Tensor:
        if halves.dtype not in CASTS or any(piece.dtype != FP32 for piece in g):
            return super().round_(g, halves)
        how = (halves.dtype == torch.bfloat16, halves.view(UINT8), halves.numel(), torch.get_num_threads())
        return _PROBES[self._library.dgc_round(*pieces_of(g, halves.numel()), *how)]

    def halves_mean_(self, codes: Sequence[Codes], dtype: torch.dtype, size: int, mean: Dense) -> None:
        if dtype != torch.bfloat16:
            super().halves_mean_(codes, dtype, size, mean)
            return
        self._library.dgc_mean_bf16(*_by_rank(codes), mean.numel(), size, mean, torch.get_num_threads())

    def pack_sums(self, codes: Sequence[Codes], whole: Bounds, width: int, bits: int) -> UInt8[Tensor, "packed"]:
        fields = codes[0].numel() * 8 // width
        packed = torch.empty(-(-fields * bits // 8), dtype=UINT8)
        self._library.dgc_pack_sums(*_by_rank(codes), fields, width, bits, packed, torch.get_num_threads())
        return packed

    def sums_mean_(
        self,
        packed: Sequence[Codes],
        fields: int,
        width: int,
        bits: int,
        bounds: Bounds,
        factors: Each,
        mean: Dense,
    ) -> None:
        given = (*_by_rank(packed), fields, bits, *_ranges(bounds, width, WORD), width)
        self._library.dgc_mean_sums(*given, factors, mean, torch.get_num_threads())


# what dgc_measure finds for a scale
NOTHING, LARGEST, MAGNITUDES, SQUARES = range(4)

FOUND = {
    Scale.NONE: NOTHING,
    Scale.NONZERO: LARGEST,
    Scale.LARGEST: LARGEST,
    Scale.MEAN: MAGNITUDES,
    Scale.NORM: SQUARES,
    Scale.SPREAD: SQUARES,
}


class NativeElementCoder(Native, ElementCoder):
    """Steps of codes whose scale is in FOUND.

    The scale is found while the elements are in the cache, and codes are written to their place in the payload.
    """

    signatures = SIGNATURES

    def __init__(self) -> None:
        super().__init__()
        self._codec = NativeCodec()

    def takes(self, code: ElementCode) -> bool:
        return code.scale in FOUND

    def measure_(self, code: ElementCode, g: tuple[Tensor, ...], v: Dense, adds: bool) -> Measured:
        bounds, found = code.bounds, torch.empty(code.bounds.numel() - 1, dtype=FP64)
        how = (v, adds, bounds, found.numel(), FOUND[code.scale], found, torch.get_num_threads())
        first_nonfinite = self._library.dgc_measure(*pieces_of(g, v.numel()), *how)
        match code.scale:
            case Scale.NONZERO:
                found = found > 0
            case Scale.MEAN:
                found = found / bounds.diff().clamp(min=1)
            case Scale.NORM:
                found = found.sqrt()
            case Scale.SPREAD:
                found = code.factor * (found / bounds.diff().clamp(min=1)).sqrt()
        values = found.float()
        return Measured(values[None], torch.full((1,), first_nonfinite, dtype=INT32))

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
        payload, residual = torch.empty(code.nbytes, dtype=UINT8), empty_residual(v, keep, into)
        payload[-8:] = 0  # the codes need not fill the last word
        values = measured.values[0]
        payload[HEADER_BYTES : code.begin] = values[: code.rows * values.numel()].view(UINT8)
        scaling = code.momentum is not None
        made = (payload[code.begin :], residual[:0] if scaling else residual, torch.get_num_threads())
        where = (v, *_ranges(code.bounds, code.bits, code.unit))
        match code.form:
            case Form.TERNARY:
                assert given is not None
                self._library.dgc_quantize_ternary(*where, thresholds_or(inf, given), *made)
            case Form.LEVELS:
                how = (*level_factors(values, code.levels, code.bits), code.levels, code.bits, *_random(seed))
                self._library.dgc_quantize_levels(*where, *how, *made)
            case _:
                scales = values if given is None else torch.ones_like(given)
                cuts = torch.zeros_like(scales) if given is None else given
                self._library.dgc_quantize_signs(*where, cuts, scales, *made)
        if keep and code.momentum is not None:
            torch.mul(v, code.momentum, out=residual)
        self._codec.seal_(payload, _NO_COUNT, measured.unusable.long().view(()), tensors, _NO_SCALE, terms)
        return payload, residual

    def mean_into_(
        self, flat: Tensor, code: ElementCode, payloads: Sequence[UInt8[Tensor, "nbytes"]], given: Each | None
    ) -> Int32[Tensor, "numbers"]:
        segments, ranks, threads = code.bounds.numel() - 1, len(payloads), torch.get_num_threads()
        words = self._codec.words_of(payloads)
        mean = flat if flat.dtype == FP32 else torch.empty(flat.numel(), dtype=FP32)
        codes = [payload[code.begin :] for payload in payloads]
        table = [payload[HEADER_BYTES : code.begin].clone().view(FP32) for payload in payloads]
        where = (codes, ranks, *_ranges(code.bounds, code.bits, code.unit))
        match code.form:
            case Form.TERNARY:
                assert given is not None
                unit = torch.ones(segments, dtype=FP32)
                how = ([unit] * ranks, thresholds_or(0.0, given), ranks, mean, threads)
                is_finite = self._library.dgc_mean_ternary(*where, *how)
            case Form.LEVELS:
                steps = [level_factors(own, code.levels, code.bits)[1] for own in table]
                is_finite = self._library.dgc_mean_levels(*where, steps, code.bits, ranks, mean, threads)
            case _:
                scales = table if given is None else [torch.ones_like(given)] * ranks
                options = (ranks, code.majority, mean, threads)
                is_finite = self._library.dgc_mean_signs(*where, scales, None, *options)
        if mean is not flat:
            flat.copy_(mean)
            is_finite = bool(flat.isfinite().all())
        return torch.tensor([*words, is_finite], dtype=INT32)


class NativeBlocks(Native, Blocks):
    """Each is one pass: the scale of a block is found while the block is in the cache."""

    signatures = SIGNATURES

    def __init__(self, selection: NativeSelection | None = None):
        super().__init__()
        self.selection = selection or NativeSelection()

    def encode_into_(self, v: Dense, bounds: Bounds, code: BlockCode, rows: Rows, kept: Dense | None) -> None:
        self._library.dgc_blocks_encode(v, *_in_rows(bounds, code, rows), kept, torch.get_num_threads())

    def add_encode_(
        self, g: Sequence[Tensor], v: Dense, bounds: Bounds, code: BlockCode, rows: Rows, kept: Dense | None
    ) -> Int64[Tensor, ""]:
        pieces = list(map(Tensor.float, g))
        made = (*_in_rows(bounds, code, rows), kept, torch.get_num_threads())
        first_nonfinite = self._library.dgc_blocks_add_encode(pieces, _checked(pieces, bounds), v, *made)
        return torch.full((), first_nonfinite, dtype=INT64)

    def add_sum_(self, rows: Sequence[Row], code: BlockCode, total: Padded) -> None:
        blocks, threads = total.numel() // code.size, torch.get_num_threads()
        self._library.dgc_blocks_add_sum(rows, len(rows), *_how(code), blocks, total, threads)

    def second_phase_(
        self,
        rows: Sequence[Row],
        code: BlockCode,
        errors: Padded | None,
        real: Padded | None,
        chunk: Bounds,
        second_code: BlockCode,
        row: Rows,
        kept: Padded | None,
    ) -> None:
        blocks = rows[0].numel() // code.row_bytes(1)
        assert (second_code.size, second_code.rotate) == (code.size, code.rotate), (second_code, code)
        assert len(row) == 1, len(row)
        made = (second_code.bits, row[0], kept, torch.get_num_threads())
        self._library.dgc_blocks_second_phase(rows, len(rows), *_how(code), blocks, errors, real, *made)

    def decode(
        self, rows: Sequence[Row], bounds: Bounds, code: BlockCode, size: int, out: Sequence[Dense]
    ) -> None:
        each, where = rows[0].numel() // code.row_bytes(1), _ranges(bounds, code.bits, code.code_bytes)
        made = (out, _checked(out, bounds), torch.get_num_threads())
        self._library.dgc_blocks_decode(rows, *where, *_how(code), each, size, *made)


class NativeHalves(Native, Halves):
    """Each is one pass, `encode_gradient_` as well, which needs no memory."""

    signatures = SIGNATURES

    def encode_into_(self, v: Dense, bounds: Bounds, code: BlockCode, rows: Rows, kept: Dense | None) -> None:
        given = (v, v.numel(), *_halves_in(rows), *_noise(code))
        self._library.dgc_halves_encode(*given, kept, torch.get_num_threads())

    def add_encode_(
        self, g: Sequence[Tensor], v: Dense, bounds: Bounds, code: BlockCode, rows: Rows, kept: Dense | None
    ) -> Int64[Tensor, ""]:
        return self._encode(g, v, code, v.numel(), rows, kept)

    def encode_gradient_(
        self, g: Sequence[Tensor], room: Dense, bounds: Bounds, code: BlockCode, rows: Rows
    ) -> Int64[Tensor, ""]:
        return self._encode(g, None, code, room.numel(), rows, None)

    def _encode(
        self, g: Sequence[Tensor], v: Dense | None, code: BlockCode, n: int, rows: Rows, kept: Dense | None
    ) -> Int64[Tensor, ""]:
        given = (*pieces_of(g, n), v, n, *_halves_in(rows), *_noise(code))
        first_nonfinite = self._library.dgc_halves_add_encode(*given, kept, torch.get_num_threads())
        return torch.full((), first_nonfinite, dtype=INT64)

    def add_sum_(self, rows: Sequence[Row], code: BlockCode, total: Padded) -> None:
        self._library.dgc_halves_add_sum(rows, len(rows), total.numel(), total, torch.get_num_threads())

    def second_phase_(
        self,
        rows: Sequence[Row],
        code: BlockCode,
        errors: Padded | None,
        real: Padded | None,
        chunk: Bounds,
        second_code: BlockCode,
        row: Rows,
        kept: Padded | None,
    ) -> None:
        assert real is None and len(row) == 1, "there is no transform, and one row"
        given = (rows, len(rows), rows[0].numel() // 2, errors, row[0], *_noise(second_code))
        self._library.dgc_halves_second_phase(*given, kept, torch.get_num_threads())

    def decode(
        self, rows: Sequence[Row], bounds: Bounds, code: BlockCode, size: int, out: Sequence[Dense]
    ) -> None:
        n = sum(map(Tensor.numel, out))
        given = (rows, rows[0].numel() // 2, n, size, *pieces_of(out, n))
        self._library.dgc_halves_decode(*given, torch.get_num_threads())


def _halves_in(rows: Rows) -> tuple[int, Tensor, int]:
    return rows.shape[1] // 2, rows[0], rows.stride(0)


def _noise(code: BlockCode) -> tuple[int, int, int]:
    assert isinstance(code, HalfCode), code
    return _random(code.seed if code.random else None)


def _in_rows(bounds: Bounds, code: BlockCode, rows: Rows) -> tuple[Any, ...]:
    """Return where each segment's blocks are in rows, whose first is contiguous, as the library requires."""
    each = rows.shape[1] // code.row_bytes(1)
    return *_ranges(bounds, code.bits, code.code_bytes), *_how(code), each, rows[0], rows.stride(0)


def _checked(pieces: Sequence[Tensor], bounds: Bounds) -> int:
    """Return the number of pieces: one, or one for each segment."""
    assert len(pieces) in (1, bounds.numel() - 1), (len(pieces), bounds.numel())
    return len(pieces)


def _how(code: BlockCode) -> tuple[int, int, bool]:
    return code.size, code.bits, code.rotate


def _ranges(bounds: Bounds, width: int, unit: int) -> tuple[Tensor, Tensor, int]:
    return bounds, layout_of(bounds, width, unit).starts, bounds.numel() - 1


def _by_rank(codes: Sequence[Codes], *values: Sequence[Each]) -> tuple[Sequence[Codes], int]:
    assert all(len(each) == len(codes) for each in values), (len(codes), [*map(len, values)])
    return codes, len(codes)


def _random(seed: int | None) -> tuple[int, int, int]:
    return (0, 0, 0) if seed is None else (1, *keys_of(seed))
