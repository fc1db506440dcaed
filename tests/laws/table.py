"""Every compressor, and what it promises. The laws in test_laws.py hold for every row."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from dgc.bucket import Bucket
from dgc.compression import BF16Compressor, Compressor, DenseCompressor, DGCCompressor, FP16Compressor
from dgc.compression.dense import CastCompressor
from dgc.compression.powersgd import PowerSGDCompressor
from dgc.memory import ClipByGlobalNorm, DGCSGDMemory, NoMemory, ResidualMemory
from dgc.selection import (
    Bisection,
    Exponential,
    Gaussian,
    Histogram,
    Laplace,
    MSTopk,
    Predicted,
    TopKPerChunk,
    Trimmed,
    plan_selection,
)
from dgc.wire import (
    CastValues,
    ChunkIndices,
    Int8Values,
    PackedIndices,
    PlainIndices,
    RiceIndices,
    SignValues,
    SparseFormat,
    TwoBitValues,
)


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
    the first result, where all is sent. by_shape: what it sends depends on a tensor's shape, not on the order of
    its elements in memory. payload_at: in place of payload where the number of ranks matters; payload_of: where
    the rank matters too. feedback: whether it has a residual though no setting makes it dense. at_zero: zeros
    stay zeros. one_element: a tensor of a single element is sent as it is. left: the share of the distance to a
    quadratic's minimum that may be left.
    """

    name: str
    make: Callable[[], Compressor]
    payload: Callable[[Bucket], int]
    conserves: bool = True
    dense_limit: Callable[[], Compressor] | None = None
    tolerance: float = 4 * 2.0**-24
    momentum: float = 0.0
    first_step: float = 1.0
    by_shape: bool = False
    payload_at: Callable[[Bucket, int], int] | None = None
    payload_of: Callable[[Bucket, int, int], int] | None = None
    feedback: bool = False
    at_zero: bool = True
    one_element: bool = True
    left: float | None = None

    def payload_bytes(self, bucket: Bucket, size: int, rank: int) -> int:
        """Bytes that one rank of `size` contributes."""
        if self.payload_of is not None:
            return self.payload_of(bucket, size, rank)
        return self.payload(bucket) if self.payload_at is None else self.payload_at(bucket, size)

    @property
    def keeps(self) -> bool:
        """Whether it conserves by a residual of its own: what a dropped step has sent must return there."""
        return self.conserves and (self.feedback or self.dense_limit is not None)


def sparse_bytes(ratio: float, value: int, index: int) -> Callable[[Bucket], int]:
    def formula(bucket: Bucket) -> int:
        capacity = sum(-(-s.numel * int(1000 * ratio) // 1000) for s in bucket.segments)
        return -(-(24 + capacity * (value + index)) // 8) * 8

    return formula


def planned_bytes(ratio: float, form: SparseFormat) -> Callable[[Bucket], int]:
    return lambda bucket: form.nbytes(plan_selection(bucket.segments, ratio).per_tensor, bucket.numel)


def own_bytes(bucket: Bucket) -> int:
    return bucket.flat.numel() * bucket.flat.element_size()


def two_bytes(bucket: Bucket) -> int:
    return 2 * bucket.numel


def sealed_two_bytes(bucket: Bucket) -> int:
    return 24 + -(-2 * bucket.numel // 8) * 8


def dgc(memory: Callable[[], Any], **settings: Any) -> Callable[[], Compressor]:
    settings = {"compress_ratio": 0.05, **settings}

    def make() -> Compressor:
        compressor = DGCCompressor(memory=memory(), **settings)
        compressor.begin_epoch(0)
        return compressor

    return make


def powersgd(**settings: Any) -> Callable[[], Compressor]:
    return lambda: PowerSGDCompressor(**settings)


def low_rank_bytes(
    rank: int, mode: str, num_iters_per_step: int = 2, min_compression_rate: float = 2, wire: str = "", **_: Any
) -> Callable[[Bucket], int]:
    """Of an even number of half steps."""

    def formula(bucket: Bucket) -> int:
        floats = 0
        side = -int(-math.sqrt(bucket.numel) // 1)
        matrices: list[tuple[tuple[int, ...], int]] = [(s.shape, s.numel) for s in bucket.segments]
        if mode == "square":
            matrices = [((side, side), bucket.numel)]
        for shape, numel in matrices:
            n = shape[0]
            m = numel // n if mode != "square" else side
            cost = min(rank, n, m) * (n + m) * num_iters_per_step // 2
            floats += cost if len(shape) > 1 and numel > min_compression_rate * cost else numel
        return (2 if wire else 4) * floats + 24

    return formula


HALF = 2.0**-10  # rounding of fp16 over a sum of a few ranks
BRAIN = 2.0**-7

POWERSGD: dict[str, dict[str, Any]] = {
    "residual": {"rank": 2, "mode": "residual", "num_iters_per_step": 2},
    "residual-4": {"rank": 1, "mode": "residual", "num_iters_per_step": 4, "min_compression_rate": 1},
    "paper": {"rank": 2, "mode": "paper"},
    "paper-cold": {"rank": 1, "mode": "paper", "warm_start": False},
    "paper-fp16": {"rank": 1, "mode": "paper", "wire": "fp16"},
    "square": {"rank": 2, "mode": "square"},
}

TABLE = [
    Row("dense", DenseCompressor, own_bytes),
    Row("fp16", FP16Compressor, two_bytes, conserves=False, dense_limit=FP16Compressor, tolerance=HALF),
    Row("bf16", BF16Compressor, sealed_two_bytes, conserves=False, dense_limit=BF16Compressor, tolerance=BRAIN),
    Row(
        "horovod-fp16",
        lambda: CastCompressor(HalfLikeHorovod()),
        two_bytes,
        conserves=False,
        dense_limit=lambda: CastCompressor(HalfLikeHorovod()),
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
    Row(
        "sampled-no-memory",  # small elements never travel: it comes closer, not home
        dgc(NoMemory, sample_ratio=0.01),
        sparse_bytes(0.05, 4, 8),
        conserves=False,
        left=0.9,
    ),
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
        "2-bit-values-rice-residual",
        dgc(ResidualMemory, values=TwoBitValues(), indices=RiceIndices()),
        planned_bytes(0.05, SparseFormat(TwoBitValues(), RiceIndices())),
        dense_limit=dgc(ResidualMemory, compress_ratio=1.0, values=TwoBitValues()),
    ),
    Row(
        "per-chunk-2-bit-values-residual",
        dgc(ResidualMemory, selector=TopKPerChunk(64), values=TwoBitValues(), indices=ChunkIndices()),
        planned_bytes(0.05, SparseFormat(TwoBitValues(), ChunkIndices())),
        dense_limit=dgc(ResidualMemory, compress_ratio=1.0, values=TwoBitValues()),
    ),
    Row(
        "per-chunk-residual-that-decays",  # 0.95: sparseloco
        dgc(lambda: ResidualMemory(decay=0.95), selector=TopKPerChunk(64), indices=ChunkIndices()),
        planned_bytes(0.05, SparseFormat(CastValues(), ChunkIndices())),
        conserves=False,
        left=0.25,
    ),
    Row(
        "dgc-2-bit-values-packed",
        dgc(partial(DGCSGDMemory, 0.9), values=TwoBitValues(4.0), indices=PackedIndices()),
        planned_bytes(0.05, SparseFormat(TwoBitValues(4.0), PackedIndices())),
        conserves=False,
        momentum=0.9,
    ),
    Row(
        "dgc-sign-rice",
        dgc(partial(DGCSGDMemory, 0.9), values=SignValues(), indices=RiceIndices()),
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
        dgc(partial(DGCSGDMemory, 0.9), selector=Laplace()),
        sparse_bytes(0.05, 4, 8),
        conserves=False,
        momentum=0.9,
    ),
    Row("dgc", dgc(partial(DGCSGDMemory, 0.9)), sparse_bytes(0.05, 4, 8), conserves=False, momentum=0.9),
    Row(
        "dgc-nesterov",
        dgc(lambda: DGCSGDMemory(0.9, nesterov=True), int32_indices=True),
        sparse_bytes(0.05, 4, 4),
        conserves=False,
        momentum=0.9,
        first_step=1.9,
    ),
    Row(
        "dgc-no-masking-fp16",
        dgc(lambda: DGCSGDMemory(0.9, momentum_masking=False), fp16_values=True, int32_indices=True),
        sparse_bytes(0.05, 2, 4),
        conserves=False,
        momentum=0.9,
    ),
    Row(
        "dgc-clipped",
        dgc(lambda: DGCSGDMemory(0.9, gradient_clipping=ClipByGlobalNorm(50.0))),
        lambda bucket: sparse_bytes(0.05, 4, 8)(bucket) + 4 * len(bucket.segments),
        conserves=False,
        momentum=0.9,
    ),
    Row(
        "dgc-warm-up",
        dgc(partial(DGCSGDMemory, 0.9), warmup_epochs=1, warmup_coeff=[1.0]),
        lambda bucket: own_bytes(bucket) + 24,
        conserves=False,
        momentum=0.9,
    ),
    *(
        Row(
            f"powersgd-{name}",
            powersgd(**settings),
            low_rank_bytes(**settings),
            dense_limit=powersgd(**{**settings, "rank": 10**6, "min_compression_rate": 0}),
            # at full rank these are sums of up to 64 products, and random Q have a condition
            tolerance=HALF if settings.keys() & {"wire", "warm_start"} else 32 * 2.0**-24,
            by_shape=settings["mode"] != "square",
        )
        for name, settings in POWERSGD.items()
    ),
]
