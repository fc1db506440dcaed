"""Every compressor, and what it promises. The laws in test_laws.py hold for every row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dgc.bucket import Bucket
from dgc.compression import BF16, FP16, Compressor, Dense, DGCCompressor
from dgc.compression.dense import Cast
from dgc.memory import ClipByGlobalNorm, DGCSGDMemory, ResidualMemory
from dgc.selection import (
    Bisection,
    Exponential,
    Gaussian,
    Histogram,
    Laplace,
    MSTopk,
    Predicted,
    Trimmed,
    plan_selection,
)
from dgc.wire import CastValues, Int8Values, PackedIndices, PlainIndices, RiceIndices, SignValues, SparseFormat


class HalfLikeHorovod:
    """The shape of hvd.Compression.fp16."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


@dataclass(frozen=True)
class Row:
    """conserves: mean of (gradient + old error) = result + mean of new error, within `tolerance` of the largest
    number involved. dense_limit: the compressor where it becomes dense, with the same tolerance.
    payload: bytes that one rank contributes for a bucket in one step. first_step: the mean gradient's factor in
    the first result, where all is sent.
    """

    name: str
    make: Callable[[], Compressor]
    payload: Callable[[Bucket], int]
    conserves: bool = True
    dense_limit: Callable[[], Compressor] | None = None
    tolerance: float = 4 * 2.0**-24
    momentum: float = 0.0
    first_step: float = 1.0

    @property
    def keeps(self) -> bool:
        """Whether it conserves by an error state of its own: what a dropped step has sent must return there."""
        return self.conserves and self.dense_limit is not None


def sparse_bytes(ratio: float, value: int, index: int) -> Callable[[Bucket], int]:
    def formula(bucket: Bucket) -> int:
        capacity = sum(-(-s.numel * int(1000 * ratio) // 1000) for s in bucket.segments)
        return -(-(16 + capacity * (value + index)) // 8) * 8

    return formula


def planned_bytes(ratio: float, form: SparseFormat) -> Callable[[Bucket], int]:
    return lambda bucket: form.nbytes(plan_selection(bucket.segments, ratio).per_tensor, bucket.numel)


def own_bytes(bucket: Bucket) -> int:
    return bucket.flat.numel() * bucket.flat.element_size()


def two_bytes(bucket: Bucket) -> int:
    return 2 * bucket.numel


def dgc(memory: Callable[[], Any], **settings: Any) -> Callable[[], Compressor]:
    settings = {"compress_ratio": 0.05, **settings}
    return lambda: DGCCompressor(memory=memory(), **settings)


HALF = 2.0**-10  # rounding of fp16 over a sum of a few ranks
BRAIN = 2.0**-7

TABLE = [
    Row("dense", Dense, own_bytes),
    Row("fp16", FP16, two_bytes, conserves=False, dense_limit=FP16, tolerance=HALF),
    Row("bf16", BF16, two_bytes, conserves=False, dense_limit=BF16, tolerance=BRAIN),
    Row(
        "horovod-fp16",
        lambda: Cast(HalfLikeHorovod()),
        two_bytes,
        conserves=False,
        dense_limit=lambda: Cast(HalfLikeHorovod()),
        tolerance=HALF,
    ),
    Row(
        "top-k-residual",
        dgc(ResidualMemory, sample_ratio=1.0),
        sparse_bytes(0.05, 4, 8),
        dense_limit=dgc(ResidualMemory, compress_ratio=1.0),
    ),
    Row(
        "sampled-residual",
        dgc(ResidualMemory, sample_ratio=0.01),
        sparse_bytes(0.05, 4, 8),
        dense_limit=dgc(ResidualMemory, compress_ratio=1.0),
    ),
    Row(
        "sampled-residual-fp16-int32",
        dgc(
            ResidualMemory,
            fp16_values=True,
            int32_indices=True,
            sample_ratio=0.01,
            strided_sample=False,
            resample=False,
        ),
        sparse_bytes(0.05, 2, 4),
        dense_limit=dgc(ResidualMemory, compress_ratio=1.0, fp16_values=True),
        tolerance=HALF,
    ),
    *(
        Row(
            f"{type(selector).__name__.lower()}-residual",
            dgc(ResidualMemory, selector=selector),
            sparse_bytes(0.05, 4, 8),
            dense_limit=dgc(ResidualMemory, compress_ratio=1.0),
        )
        for selector in (Trimmed(), Bisection(), MSTopk(), Laplace(warm_start=True), Exponential(), Gaussian())
    ),
    Row("sampled-no-memory", dgc(lambda: None, sample_ratio=0.01), sparse_bytes(0.05, 4, 8), conserves=False),
    Row(
        "histogram-residual",
        dgc(ResidualMemory, selector=Histogram()),
        sparse_bytes(0.05, 4, 8),
        dense_limit=dgc(ResidualMemory, compress_ratio=1.0),
    ),
    Row(
        "per-bucket-residual-rice",
        lambda: DGCCompressor(0.05, ResidualMemory(), selector=Predicted(per_bucket=True), indices=RiceIndices()),
        planned_bytes(0.05, SparseFormat(indices=RiceIndices())),
        dense_limit=dgc(ResidualMemory, compress_ratio=1.0, indices=RiceIndices()),
    ),
    Row(
        "bf16-packed-residual",
        dgc(ResidualMemory, values=CastValues("bf16"), indices=PackedIndices()),
        planned_bytes(0.05, SparseFormat(CastValues("bf16"), PackedIndices())),
        dense_limit=dgc(ResidualMemory, compress_ratio=1.0, values=CastValues("bf16")),
    ),
    Row(
        "int8-residual",
        dgc(ResidualMemory, values=Int8Values(), indices=PlainIndices("int32")),
        planned_bytes(0.05, SparseFormat(Int8Values(), PlainIndices("int32"))),
        dense_limit=dgc(ResidualMemory, compress_ratio=1.0, values=Int8Values()),
    ),
    Row(
        "sign-rice-residual",
        dgc(ResidualMemory, values=SignValues(), indices=RiceIndices()),
        planned_bytes(0.05, SparseFormat(SignValues(), RiceIndices())),
        dense_limit=dgc(ResidualMemory, compress_ratio=1.0, values=SignValues()),
    ),
    Row(
        "dgc-sign-rice",
        dgc(DGCSGDMemory, values=SignValues(), indices=RiceIndices()),
        planned_bytes(0.05, SparseFormat(SignValues(), RiceIndices())),
        conserves=False,
        momentum=0.9,
    ),
    Row(
        "dgc-zero-momentum",
        dgc(lambda: DGCSGDMemory(momentum=0.0)),
        sparse_bytes(0.05, 4, 8),
        dense_limit=dgc(lambda: DGCSGDMemory(momentum=0.0), compress_ratio=1.0),
    ),
    Row(
        "dgc-laplace",
        dgc(DGCSGDMemory, selector=Laplace()),
        sparse_bytes(0.05, 4, 8),
        conserves=False,
        momentum=0.9,
    ),
    Row("dgc", dgc(DGCSGDMemory), sparse_bytes(0.05, 4, 8), conserves=False, momentum=0.9),
    Row(
        "dgc-nesterov",
        dgc(lambda: DGCSGDMemory(nesterov=True), int32_indices=True),
        sparse_bytes(0.05, 4, 4),
        conserves=False,
        momentum=0.9,
        first_step=1.9,
    ),
    Row(
        "dgc-no-masking-fp16",
        dgc(lambda: DGCSGDMemory(momentum_masking=False), fp16_values=True, int32_indices=True),
        sparse_bytes(0.05, 2, 4),
        conserves=False,
        momentum=0.9,
    ),
    Row(
        "dgc-clipped",
        dgc(lambda: DGCSGDMemory(gradient_clipping=ClipByGlobalNorm(50.0))),
        lambda bucket: sparse_bytes(0.05, 4, 8)(bucket) + 4 * len(bucket.segments),
        conserves=False,
        momentum=0.9,
    ),
    Row(
        "dgc-warm-up",
        dgc(DGCSGDMemory, warmup_epochs=1, warmup_coeff=[1.0]),
        lambda bucket: own_bytes(bucket) + 8,
        conserves=False,
        momentum=0.9,
    ),
]

SHAPES: tuple[tuple[int, ...], ...] = ((40, 25), (3, 3), (7, 11, 13), (1,), (2000,))


def gradients(rank: int, step: int, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in shapes]
