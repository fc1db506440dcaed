"""Rows of the exchanges of sparse payloads other than the all-gather."""

from collections.abc import Callable
from functools import partial
from math import isqrt
from typing import Any

import torch
from laws.table import Row, dgc, sparse_bytes

from dgc.bucket import Bucket
from dgc.kernels import Budget
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.wire import CastValues, Int8Values, PackedIndices, PlainIndices, RiceIndices, SparseFormat

INT32 = SparseFormat(CastValues(), PlainIndices("int32"))
SMALL = SparseFormat(CastValues("fp16"), PackedIndices())
SMALLEST = SparseFormat(Int8Values(), RiceIndices())


def settings_of(form: SparseFormat) -> dict[str, Any]:
    return {"values": form.values, "indices": form.indices}


def nbytes(form: SparseFormat, capacity: int, tensors: int, numel: int) -> int:
    bounds = torch.zeros(tensors + 1, dtype=torch.int64)
    return form.nbytes(Budget(bounds, bounds[1:], capacity), numel)


def reduce_scatter_bytes(form: SparseFormat) -> Callable[[Bucket, int], int]:
    """N payloads of k/N elements and a deviation, and one of what six words leave, from 1.5 to 2 k/N."""

    def formula(bucket: Bucket, size: int) -> int:
        k = sum(-(-s.numel * 5 // 100) for s in bucket.segments)
        turns, rest = divmod(bucket.numel, 13 * size)
        region = turns * 13 + min(13, rest)
        send = -(-(k + isqrt(k * (size - 1))) // size)
        room = 3 * k // (size - 1) - 6 - send if size > 1 else k
        keep = min(-(-2 * k // size), max(-(-3 * k // 2 // size), room), send * size)
        first, second = (nbytes(form, n, len(bucket.segments), region) for n in (send, keep))
        return size * first + second

    return formula


def gtopk_bytes(form: SparseFormat) -> Callable[[Bucket, int, int], int]:
    """A header, the selection in a rank's first message, and twice as many elements in those of sums.

    A rank sends in every doubling of the power of two up to N, and to its twin beyond that power.
    """

    def formula(bucket: Bucket, size: int, rank: int) -> int:
        k = sum(-(-s.numel * 5 // 100) for s in bucket.segments)
        doublings = size.bit_length() - 1
        power = 2**doublings
        first, later = (nbytes(form, n, len(bucket.segments), bucket.numel) for n in (k, min(bucket.numel, 2 * k)))
        if rank >= power:
            return 24 + first
        if rank + power < size:
            return 24 + (doublings + 1) * later
        return 24 + (first + (doublings - 1) * later if doublings else 0)

    return formula


def row(
    exchange: str,
    name: str,
    memory: Callable[[], Any],
    form: SparseFormat,
    momentum: float = 0.0,
    left: float | None = None,
) -> Row:
    """left: a step changes at most 2 k elements, where the all-gather changes the k of every rank."""
    return Row(
        f"{exchange.replace('_', '-')}-{name}",
        dgc(memory, exchange=exchange, **settings_of(form)),
        lambda bucket: 0,
        payload_at=reduce_scatter_bytes(form) if exchange == "reduce_scatter" else None,
        payload_of=gtopk_bytes(form) if exchange == "gtopk" else None,
        conserves=not momentum,
        dense_limit=None if momentum else dgc(memory, compress_ratio=1.0, exchange=exchange),
        momentum=momentum,
        left=left,
    )


def no_momentum() -> DGCSGDMemory:
    return DGCSGDMemory(momentum=0.0)


EXCHANGES = [
    Row(
        "auto-residual",
        dgc(ResidualMemory, exchange="auto", **settings_of(INT32)),
        lambda bucket: 0,
        payload_at=lambda bucket, size: (
            sparse_bytes(0.05, 4, 4)(bucket) if size < 4 else reduce_scatter_bytes(INT32)(bucket, size)
        ),
        dense_limit=dgc(ResidualMemory, compress_ratio=1.0, exchange="auto"),
    )
]
EXCHANGES += [
    row(exchange, *others)
    for exchange in ("reduce_scatter", "gtopk")
    for others in (
        ("residual", ResidualMemory, INT32),
        ("residual-int8-rice", ResidualMemory, SMALLEST),
        ("dgc-zero-momentum-fp16-packed", no_momentum, SMALL),
        ("dgc", partial(DGCSGDMemory, 0.9), INT32, 0.9, 0.4),
        ("dgc-int8-rice", partial(DGCSGDMemory, 0.9), SMALLEST, 0.9, 0.4),
    )
]
