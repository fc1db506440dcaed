"""Quantizers in C++ for contiguous CPU tensors. They give the same bits as `TorchQuantizers`, at memory speed."""

from collections.abc import Sequence
from ctypes import c_char_p, c_float, c_int, c_int64, c_uint32, c_void_p

import torch
from jaxtyping import UInt8
from torch import Tensor

from dgc.kernels.library import FP32, INT64, UINT8, declare, load, pointer, pointers
from dgc.kernels.quantize.protocol import (
    WORD,
    Bounds,
    Codes,
    Dense,
    Each,
    empty_codes,
    keys_of,
    layout_of,
    level_factors,
    thresholds_or,
)

_RANGES = (c_void_p, c_void_p, c_int64)
_RANDOM = (c_int, c_uint32, c_uint32)
_EACH_RANK = (c_char_p, c_int)  # an array of addresses, and its length
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "dgc_quantize_signs": (c_void_p, *_RANGES, *(c_void_p,) * 5, c_int),
    "dgc_add_signs": (c_void_p, *_RANGES, *(c_void_p,) * 3, c_int),
    "dgc_quantize_ternary": (c_void_p, *_RANGES, *(c_void_p,) * 3, c_int),
    "dgc_add_ternary": (c_void_p, *_RANGES, *(c_void_p,) * 2, c_int),
    "dgc_quantize_levels": (c_void_p, *_RANGES, *(c_void_p,) * 2, c_int, c_int, *_RANDOM, *(c_void_p,) * 2, c_int),
    "dgc_add_levels": (c_void_p, *_RANGES, c_void_p, c_int, c_void_p, c_int),
    "dgc_quantize_natural": (c_void_p, c_int64, *_RANDOM, *(c_void_p,) * 2, c_int),
    "dgc_add_natural": (c_void_p, c_int64, c_void_p, c_int),
    "dgc_mean_signs": (*_EACH_RANK, *_RANGES, *(c_void_p,) * 3, c_float, c_void_p, c_int),
    "dgc_mean_ternary": (*_EACH_RANK, *_RANGES, *(c_void_p,) * 2, c_float, c_void_p, c_int),
    "dgc_mean_levels": (*_EACH_RANK, *_RANGES, c_void_p, c_int, c_float, c_void_p, c_int),
    "dgc_mean_natural": (*_EACH_RANK, c_int64, c_float, c_void_p, c_int),
    "dgc_pack_sums": (*_EACH_RANK, c_int64, c_int, c_int, c_void_p, c_int),
    "dgc_mean_sums": (*_EACH_RANK, c_int64, c_int, *_RANGES, c_int, *(c_void_p,) * 2, c_int),
    "dgc_pack": (c_void_p, c_int64, c_int, c_void_p, c_int),
    "dgc_unpack": (c_void_p, c_int64, c_int, c_void_p, c_int),
}


class NativeQuantizers:
    """Implements `dgc.kernels.quantize.protocol.Quantizers` on torch.get_num_threads() threads.

    Raises:
        KernelsMissing: See `dgc.kernels.library.load`.
    """

    name = "native"

    def __init__(self) -> None:
        self._library = load()
        declare(self._library, {name: (None, arguments) for name, arguments in _ARGUMENTS.items()})

    def sign_encode(self, v: Dense, bounds: Bounds, cuts: Each, lows: Each, highs: Each) -> tuple[Codes, Dense]:
        segments, codes = _ranges(bounds, 1, WORD), empty_codes(bounds, 1, WORD)
        residual = torch.empty_like(v)
        values = (pointer(cuts, FP32), pointer(lows, FP32), pointer(highs, FP32))
        made = (pointer(codes, UINT8), pointer(residual, FP32), torch.get_num_threads())
        self._library.dgc_quantize_signs(pointer(v, FP32), *segments, *values, *made)
        return codes, residual

    def sign_add_(self, codes: Codes, bounds: Bounds, lows: Each, highs: Each, total: Dense) -> None:
        values = (pointer(lows, FP32), pointer(highs, FP32), pointer(total, FP32), torch.get_num_threads())
        self._library.dgc_add_signs(pointer(codes, UINT8), *_ranges(bounds, 1, WORD), *values)

    def sign_mean_(
        self,
        codes: Sequence[Codes],
        bounds: Bounds,
        lows: Sequence[Each],
        highs: Sequence[Each],
        factors: Each | None,
        size: int,
        mean: Dense,
    ) -> None:
        given = (*_by_rank(codes, lows, highs), *_ranges(bounds, 1, WORD))
        values = (pointers(lows, FP32), pointers(highs, FP32))
        made = (pointer(factors, FP32), size, pointer(mean, FP32), torch.get_num_threads())
        self._library.dgc_mean_signs(*given, *values, *made)

    def tern_encode(self, v: Dense, bounds: Bounds, thresholds: Each) -> tuple[Codes, Dense]:
        segments, codes = _ranges(bounds, 2, WORD), empty_codes(bounds, 2, WORD)
        residual, sent = torch.empty_like(v), thresholds_or(torch.inf, thresholds)
        made = (pointer(codes, UINT8), pointer(residual, FP32), torch.get_num_threads())
        self._library.dgc_quantize_ternary(pointer(v, FP32), *segments, pointer(sent, FP32), *made)
        return codes, residual

    def tern_add_(self, codes: Codes, bounds: Bounds, thresholds: Each, total: Dense) -> None:
        sent = thresholds_or(0.0, thresholds)
        values = (pointer(sent, FP32), pointer(total, FP32), torch.get_num_threads())
        self._library.dgc_add_ternary(pointer(codes, UINT8), *_ranges(bounds, 2, WORD), *values)

    def tern_mean_(
        self,
        codes: Sequence[Codes],
        bounds: Bounds,
        thresholds: Sequence[Each],
        factors: Each | None,
        size: int,
        mean: Dense,
    ) -> None:
        sent = [thresholds_or(0.0, own) for own in thresholds]
        given = (*_by_rank(codes, sent), *_ranges(bounds, 2, WORD), pointers(sent, FP32))
        made = (pointer(factors, FP32), size, pointer(mean, FP32), torch.get_num_threads())
        self._library.dgc_mean_ternary(*given, *made)

    def uniform_encode(
        self, v: Dense, bounds: Bounds, scales: Each, levels: int, bits: int, seed: int | None
    ) -> tuple[Codes, Dense]:
        inverses, steps = level_factors(scales, levels, bits)
        segments, codes = _ranges(bounds, bits, 1), empty_codes(bounds, bits, 1)
        residual = torch.empty_like(v)
        values = (pointer(inverses, FP32), pointer(steps, FP32), levels, bits, *_random(seed))
        made = (pointer(codes, UINT8), pointer(residual, FP32), torch.get_num_threads())
        self._library.dgc_quantize_levels(pointer(v, FP32), *segments, *values, *made)
        return codes, residual

    def uniform_add_(
        self, codes: Codes, bounds: Bounds, scales: Each, levels: int, bits: int, total: Dense
    ) -> None:
        _, steps = level_factors(scales, levels, bits)
        values = (pointer(steps, FP32), bits, pointer(total, FP32), torch.get_num_threads())
        self._library.dgc_add_levels(pointer(codes, UINT8), *_ranges(bounds, bits, 1), *values)

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
        steps = [level_factors(own, levels, bits)[1] for own in scales]
        given = (*_by_rank(codes, steps), *_ranges(bounds, bits, 1), pointers(steps, FP32), bits)
        self._library.dgc_mean_levels(*given, size, pointer(mean, FP32), torch.get_num_threads())

    def natural_encode(self, v: Dense, seed: int | None) -> tuple[Codes, Dense]:
        codes, residual = torch.empty(4 + v.numel(), dtype=torch.uint8), torch.empty_like(v)
        made = (pointer(codes, UINT8), pointer(residual, FP32), torch.get_num_threads())
        self._library.dgc_quantize_natural(pointer(v, FP32), v.numel(), *_random(seed), *made)
        return codes, residual

    def natural_add_(self, codes: Codes, total: Dense) -> None:
        place = (total.numel(), pointer(total, FP32), torch.get_num_threads())
        self._library.dgc_add_natural(pointer(codes, UINT8), *place)

    def natural_mean_(self, codes: Sequence[Codes], size: int, mean: Dense) -> None:
        made = (mean.numel(), size, pointer(mean, FP32), torch.get_num_threads())
        self._library.dgc_mean_natural(*_by_rank(codes), *made)

    def pack(self, levels: UInt8[Tensor, "n"], bits: int) -> Codes:
        codes = torch.empty(-(-levels.numel() * bits // 8), dtype=torch.uint8)
        place = (levels.numel(), bits, pointer(codes, UINT8), torch.get_num_threads())
        self._library.dgc_pack(pointer(levels, UINT8), *place)
        return codes

    def unpack(self, codes: Codes, bits: int, n: int) -> UInt8[Tensor, "n"]:
        levels = torch.empty(n, dtype=torch.uint8)
        self._library.dgc_unpack(pointer(codes, UINT8), n, bits, pointer(levels, UINT8), torch.get_num_threads())
        return levels

    def pack_sums(self, codes: Sequence[Codes], whole: Bounds, width: int, bits: int) -> UInt8[Tensor, "packed"]:
        fields = codes[0].numel() * 8 // width
        packed = torch.empty(-(-fields * bits // 8), dtype=torch.uint8)
        made = (pointer(packed, UINT8), torch.get_num_threads())
        self._library.dgc_pack_sums(*_by_rank(codes), fields, width, bits, *made)
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
        made = (pointer(factors, FP32), pointer(mean, FP32), torch.get_num_threads())
        self._library.dgc_mean_sums(*given, *made)


def _ranges(bounds: Bounds, width: int, unit: int) -> tuple[int, int, int]:
    # the layout is cached with the bounds, so the pointer stays valid
    starts = layout_of(bounds, width, unit).starts
    return pointer(bounds, INT64), pointer(starts, INT64), bounds.numel() - 1


def _by_rank(codes: Sequence[Codes], *values: Sequence[Each]) -> tuple[bytes, int]:
    assert all(len(each) == len(codes) for each in values), (len(codes), [*map(len, values)])
    return pointers(codes, UINT8), len(codes)


def _random(seed: int | None) -> tuple[int, int, int]:
    return (0, 0, 0) if seed is None else (1, *keys_of(seed))
