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


def rounded(name: str, make: Callable[[], Compressor], payload: Callable[[Bucket], int], tolerance: float) -> Row:
    return Row(name, make, payload, conserves=False, dense_limit=make, tolerance=tolerance)


def form_of(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: settings[key] for key in ("values", "indices", "fp16_values", "int32_indices") if key in settings}


def dgc_bytes(fp16_values: bool = False, int32_indices: bool = False, **form: Any) -> Callable[[Bucket], int]:
    """5 % of each tensor in the format of these settings of DGCCompressor."""
    if form:
        return planned_bytes(0.05, SparseFormat(**form))
    return sparse_bytes(0.05, 2 if fp16_values else 4, 4 if int32_indices else 8)


def residual(name: str, tolerance: float = 4 * 2.0**-24, **settings: Any) -> Row:
    form = form_of(settings)
    limit = dgc(ResidualMemory, compress_ratio=1.0, **form)
    make = dgc(ResidualMemory, **settings)
    return Row(f"{name}-residual", make, dgc_bytes(**form), dense_limit=limit, tolerance=tolerance)


PLAIN_MOMENTUM = partial(DGCSGDMemory, 0.9)


def with_momentum(
    name: str,
    memory: Callable[[], DGCSGDMemory] = PLAIN_MOMENTUM,
    payload: Callable[[Bucket], int] | None = None,
    first_step: float = 1.0,
    **settings: Any,
) -> Row:
    payload = payload or dgc_bytes(**form_of(settings))
    return Row(name, dgc(memory, **settings), payload, conserves=False, momentum=0.9, first_step=first_step)


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

SELECTORS = (Trimmed(), Bisection(), MSTopk(), Laplace(warm_start=True), Exponential(), Gaussian(), Histogram())
TABLE = [
    Row("dense", DenseCompressor, own_bytes),
    rounded("fp16", FP16Compressor, two_bytes, HALF),
    rounded("bf16", BF16Compressor, sealed_two_bytes, BRAIN),
    rounded("horovod-fp16", lambda: CastCompressor(HalfLikeHorovod()), two_bytes, HALF),
    residual("top-k", sample_ratio=1.0),
    residual("sampled", sample_ratio=0.01),
    residual(
        "sampled-fp16-int32",
        tolerance=HALF,
        fp16_values=True,
        int32_indices=True,
        sample_ratio=0.01,
        strided_sample=False,
        resample=False,
    ),
    *(residual(type(selector).__name__.lower(), selector=selector) for selector in SELECTORS),
    Row(  # small elements never travel: it comes closer, not home
        "sampled-no-memory", dgc(NoMemory, sample_ratio=0.01), dgc_bytes(), conserves=False, left=0.9
    ),
    residual("per-bucket-rice", selector=Predicted(per_bucket=True), indices=RiceIndices()),
    residual("bf16-packed", values=CastValues("bf16"), indices=PackedIndices()),
    residual("int8", values=Int8Values(), indices=PlainIndices("int32")),
    residual("sign-rice", values=SignValues(), indices=RiceIndices()),
    residual("2-bit-values-rice", values=TwoBitValues(), indices=RiceIndices()),
    residual("per-chunk-2-bit-values", selector=TopKPerChunk(64), values=TwoBitValues(), indices=ChunkIndices()),
    Row(
        "per-chunk-residual-that-decays",  # 0.95: sparseloco
        dgc(lambda: ResidualMemory(decay=0.95), selector=TopKPerChunk(64), indices=ChunkIndices()),
        dgc_bytes(indices=ChunkIndices()),
        conserves=False,
        left=0.25,
    ),
    with_momentum("dgc-2-bit-values-packed", values=TwoBitValues(4.0), indices=PackedIndices()),
    with_momentum("dgc-sign-rice", values=SignValues(), indices=RiceIndices()),
    Row(
        "dgc-zero-momentum",
        dgc(lambda: DGCSGDMemory(momentum=0.0)),
        dgc_bytes(),
        dense_limit=dgc(lambda: DGCSGDMemory(momentum=0.0), compress_ratio=1.0),
    ),
    with_momentum("dgc-laplace", selector=Laplace()),
    with_momentum("dgc"),
    with_momentum("dgc-nesterov", partial(DGCSGDMemory, 0.9, nesterov=True), first_step=1.9, int32_indices=True),
    with_momentum(
        "dgc-no-masking-fp16",
        partial(DGCSGDMemory, 0.9, momentum_masking=False),
        fp16_values=True,
        int32_indices=True,
    ),
    with_momentum(
        "dgc-clipped",
        lambda: DGCSGDMemory(0.9, gradient_clipping=ClipByGlobalNorm(50.0)),
        lambda bucket: dgc_bytes()(bucket) + 4 * len(bucket.segments),
    ),
    with_momentum(
        "dgc-warm-up", payload=lambda bucket: own_bytes(bucket) + 24, warmup_epochs=1, warmup_coeff=[1.0]
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
