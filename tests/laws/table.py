"""Every compressor, and what it promises. The laws in test_laws.py hold for every row."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from dgc import compression as methods
from dgc import paper
from dgc.bucket import Bucket
from dgc.compression.dense import CastCompressor
from dgc.compression.error_feedback import AllGatherCompressor
from dgc.compression.powersgd import PowerSGDCompressor
from dgc.kernels import Budget
from dgc.memory import ClipByGlobalNorm, DGCSGDMemory, Memory, NoMemory, ResidualMemory
from dgc.selection import (
    Bisection,
    Exponential,
    Fixed,
    Gaussian,
    Histogram,
    Laplace,
    MSTopk,
    Predicted,
    Sampled,
    Selector,
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
from dgc.wire.envelope import sealed_bytes


class HalfLikeHorovod:
    """The shape of hvd.Compression.fp16."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


Payload = Callable[[Bucket, int, int], int]


@dataclass(frozen=True)
class Row:
    """conserves: mean of (gradient + old error) = result + mean of new error, within `tolerance` of the largest
    number involved. dense_limit: the compressor where it becomes dense, with the same tolerance.
    payload: bytes that a rank of so many contributes for a bucket in one step. first_step: the mean gradient's
    factor in the first result, where all is sent. by_shape: what it sends depends on a tensor's shape, not on the
    order of its elements in memory. by_size: the number of ranks decides how it is sent. feedback: whether it has
    a residual though no setting makes it dense. at_zero: zeros stay zeros. one_element: a tensor of a single
    element is sent as it is. left: the share of the distance to a quadratic's minimum that may be left.
    """

    name: str
    make: Callable[[], methods.Compressor]
    payload: Payload
    conserves: bool = True
    dense_limit: Callable[[], methods.Compressor] | None = None
    tolerance: float = 4 * 2.0**-24
    momentum: float = 0.0
    first_step: float = 1.0
    by_shape: bool = False
    by_size: bool = False
    feedback: bool = False
    at_zero: bool = True
    one_element: bool = True
    left: float | None = None

    @property
    def keeps(self) -> bool:
        """Whether it conserves by a residual of its own: what a dropped step has sent must return there."""
        return self.conserves and (self.feedback or self.dense_limit is not None)


def sparse_bytes(value: int, index: int, bucket: Bucket, *_: int) -> int:
    """5 % of each tensor, as are all sparse payloads here."""
    capacity = sum(-(-s.numel // 20) for s in bucket.segments)
    return -(-(24 + capacity * (value + index)) // 8) * 8


def planned_bytes(form: SparseFormat, bucket: Bucket, *_: int) -> int:
    return form.nbytes(plan_selection(bucket.segments, 0.05).per_tensor, bucket.numel)


def own_bytes(bucket: Bucket, *_: int) -> int:
    return bucket.flat.numel() * bucket.flat.element_size()


def two_bytes(bucket: Bucket, *_: int) -> int:
    return 2 * bucket.numel


def sealed_two_bytes(bucket: Bucket, *_: int) -> int:
    return 24 + -(-2 * bucket.numel // 8) * 8


def dgc(memory: Callable[[], Any], **settings: Any) -> Callable[[], methods.Compressor]:
    settings = {"compress_ratio": 0.05, **settings}

    def make() -> methods.Compressor:
        compressor = methods.DGCCompressor(memory=memory(), **settings)
        compressor.begin_epoch(0)
        return compressor

    return make


def rounded(name: str, make: Callable[[], methods.Compressor], payload: Payload, tolerance: float) -> Row:
    return Row(name, make, payload, conserves=False, dense_limit=make, tolerance=tolerance)


def form_of(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: settings[key] for key in ("values", "indices", "fp16_values", "int32_indices") if key in settings}


def dgc_bytes(fp16_values: bool = False, int32_indices: bool = False, **form: Any) -> Payload:
    """In the format of these settings of DGCCompressor."""
    if form:
        return partial(planned_bytes, SparseFormat(**form))
    return partial(sparse_bytes, 2 if fp16_values else 4, 4 if int32_indices else 8)


def residual(name: str, tolerance: float = 4 * 2.0**-24, **settings: Any) -> Row:
    form = form_of(settings)
    limit = dgc(ResidualMemory, compress_ratio=1.0, **form)
    make = dgc(ResidualMemory, **settings)
    return Row(f"{name}-residual", make, dgc_bytes(**form), dense_limit=limit, tolerance=tolerance)


PLAIN_MOMENTUM = partial(DGCSGDMemory, 0.9)


def with_momentum(
    name: str,
    memory: Callable[[], DGCSGDMemory] = PLAIN_MOMENTUM,
    payload: Payload | None = None,
    first_step: float = 1.0,
    **settings: Any,
) -> Row:
    payload = payload or dgc_bytes(**form_of(settings))
    return Row(name, dgc(memory, **settings), payload, conserves=False, momentum=0.9, first_step=first_step)


def powersgd(**settings: Any) -> Callable[[], methods.Compressor]:
    return lambda: PowerSGDCompressor(**settings)


def low_rank_bytes(
    bucket: Bucket,
    *_: int,
    rank: int,
    mode: str,
    num_iters_per_step: int = 2,
    min_compression_rate: float = 2,
    wire: str = "",
    warm_start: bool = True,
) -> int:
    """Of an even number of half steps."""
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
GENERAL = [
    Row("dense", methods.DenseCompressor, own_bytes),
    rounded("fp16", methods.FP16Compressor, two_bytes, HALF),
    rounded("bf16", methods.BF16Compressor, sealed_two_bytes, BRAIN),
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
        lambda bucket, *_: sparse_bytes(4, 8, bucket) + 4 * len(bucket.segments),
    ),
    with_momentum(
        "dgc-warm-up", payload=lambda bucket, *_: own_bytes(bucket) + 24, warmup_epochs=1, warmup_coeff=[1.0]
    ),
    *(
        Row(
            f"powersgd-{name}",
            powersgd(**settings),
            partial(low_rank_bytes, **settings),
            dense_limit=powersgd(**{**settings, "rank": 10**6, "min_compression_rate": 0}),
            # at full rank these are sums of up to 64 products, and random Q have a condition
            tolerance=HALF if settings.keys() & {"wire", "warm_start"} else 32 * 2.0**-24,
            by_shape=settings["mode"] != "square",
        )
        for name, settings in POWERSGD.items()
    ),
]


# --- quantization, samples and low rank ------------------------------------------------------------------


def threshold_bytes(bits: int, per_tensor: int, bucket: Bucket, size: int, *_: int) -> int:
    """With two ranks and one the codes are gathered, with more their sums are."""
    codes = sum(4 * -(-s.numel * bits // 32) for s in bucket.segments)
    thresholds = per_tensor * len(bucket.segments)
    if size <= 2:
        return sealed_bytes(codes) + thresholds
    share = 4 * -(-codes // (4 * size))
    values = 2 * size + 1 if bits == 2 else size + 1
    fields = share * 8 // bits
    sums = -(-fields * (values - 1).bit_length() // 8)
    return size * sealed_bytes(share) + sealed_bytes(sums) + thresholds


def double_squeeze_bytes(bucket: Bucket, size: int, *_: int) -> int:
    """Signs and scales of a chunk to each of `size` servers, and of one chunk from this rank's own."""
    length = 32 * -(-bucket.numel // (32 * size))
    largest = 0
    for begin in range(0, bucket.numel, max(1, length)):
        chunk = range(begin, min(begin + length, bucket.numel))
        inside = [
            min(s.offset + s.numel, chunk.stop) - max(s.offset, chunk.start) for s in bucket.segments if s.numel
        ]
        largest = max(largest, sum(4 + 4 * -(-d // 32) for d in inside if d > 0))
    return (size + 1) * sealed_bytes(largest)


def two_phase_bytes(bits: int, block: int, bucket: Bucket, size: int, *_: int) -> int:
    """A part of the blocks to each of `size` ranks, and this rank's own part of the mean to all."""
    blocks = -(-sum(-(-s.numel // block) for s in bucket.segments) // size)
    return (size + 1) * sealed_bytes(blocks * (2 + block * bits // 8))


def two_phases(name: str, bits: int, block: int, **settings: Any) -> Row:
    payload = partial(two_phase_bytes, bits, block)
    return Row(name, lambda: methods.TwoPhaseCompressor(bits, block, **settings), payload, by_size=True)


def half_bytes(itemsize: int, bucket: Bucket, *_: int) -> int:
    return itemsize * sum(-(-s.numel // 2) for s in bucket.segments) + 24


def chunks(memory: Callable[[], Memory] = ResidualMemory, ratio: float = 0.05, dtype: str = "fp16") -> Any:
    return lambda: methods.ChunkCompressor(ratio, memory(), 64, dtype)


def chunk_bytes(itemsize: int, bucket: Bucket, *_: int) -> int:
    """5 % of the chunks of at most 64 elements, and a header."""
    number = -(-bucket.numel // 64)
    sent = -(-number // 20) * -(-bucket.numel // number)
    return 24 + min(4 * number + itemsize * sent, itemsize * bucket.numel)


def coded_row(name: str, make: Callable[[], AllGatherCompressor], **promises: Any) -> Row:
    return Row(name, make, lambda bucket, *_: sealed_bytes(make().nbytes(bucket)), **promises)


def biased(name: str, make: Callable[[], AllGatherCompressor], left: float = 0.9, by_shape: bool = False) -> Row:
    """Without a residual."""
    return coded_row(name, make, conserves=False, one_element=False, left=left, by_shape=by_shape)


def unbiased(name: str, make: Callable[[], AllGatherCompressor]) -> Row:
    return biased(name, make, left=0.25)


def feedback(name: str, make: Callable[[], AllGatherCompressor]) -> Row:
    return coded_row(name, make, feedback=True)


def threshold(bits: int, name: str, value: float | None, per_tensor: int = 0, **promises: Any) -> Row:
    make, payload = partial(methods.ThresholdCompressor, bits, value), partial(threshold_bytes, bits, per_tensor)
    return Row(name, make, payload, by_size=True, feedback=True, one_element=False, **promises)


def dense_bytes(code: int, reduced: int, gathers_up_to: int, bucket: Bucket, size: int, *_: int) -> int:
    """Bytes per element of a code, and of a number in an all-reduce, which more ranks use."""
    scales = sum(4 * -(-s.numel // 1024) for s in bucket.segments) if code == 1 else 0
    if size <= gathers_up_to:
        return sealed_bytes(code * bucket.numel + scales)
    return sealed_bytes(0) + reduced * bucket.numel


def dense_values(name: str, code: int, reduced: int, gathers_up_to: int, **promises: Any) -> Row:
    """The compressor of what DGC does not compress."""

    def make() -> methods.Compressor:
        return methods.DGCCompressor(0.05, ResidualMemory(), dense_values=name).fallback

    payload = partial(dense_bytes, code, reduced, gathers_up_to)
    return Row(f"dense-values-{name}", make, payload, by_size=True, feedback=True, **promises)


def with_vectors(ratio: float, vector_ratio: float, selector: Selector | None = None) -> methods.Compressor:
    return methods.DGCCompressor(
        ratio, ResidualMemory(), selector=selector, vectors="sparse", vector_ratio=vector_ratio
    )


def ef21(make: Callable[[], methods.Compressor]) -> methods.Compressor:
    return methods.EF21Compressor(make(), beta=0.5)


EF21: list[tuple[str, Callable[[], methods.Compressor], Payload, bool]] = [
    ("dense", methods.DenseCompressor, lambda bucket, *_: 4 * bucket.numel, False),
    ("top-k", dgc(ResidualMemory), dgc_bytes(), False),
    ("int4", partial(methods.TwoPhaseCompressor, 4, 128), partial(two_phase_bytes, 4, 128), True),
]
chunks_of_dgc = partial(Row, conserves=False, momentum=0.9, left=0.75)
QUANTIZED = [
    dense_values("int8", 1, 4, 7),
    dense_values("bf16", 2, 4, 4),
    # the sum of an all-reduce is rounded to fp16
    dense_values("fp16", 2, 2, 2, tolerance=2.0**-10),
    threshold(2, "2bit", 2.0),
    threshold(2, "2bit-adaptive", None, per_tensor=4, left=0.35),
    # a rank whose own gradient stays beyond 1, as here, can never send all of it
    threshold(1, "1bit", 0.0, at_zero=False, left=0.5),
    feedback("scaled-sign", methods.ScaledSignCompressor),
    feedback("onebit", methods.OneBitCompressor),
    feedback("blockwise", lambda: methods.BlockwiseCompressor(block=100)),
    Row("double-squeeze", methods.DoubleSqueezeCompressor, double_squeeze_bytes, by_size=True),
    two_phases("int8", 8, 64),
    two_phases("int4", 4, 128),
    two_phases("int4-hadamard", 4, 64, hadamard=True),
    biased("signsgd", methods.SignSGDCompressor),
    biased("signum", lambda: methods.SignSGDCompressor(0.5)),
    unbiased("qsgd", methods.QSGDCompressor),
    unbiased("terngrad", methods.TernGradCompressor),
    unbiased("natural", methods.NaturalCompressor),
    biased("atomo", lambda: methods.AtomoCompressor(2), by_shape=True),
    coded_row(
        "svd",
        lambda: methods.SVDCompressor(2),
        dense_limit=lambda: methods.SVDCompressor(1000),
        tolerance=64 * 2.0**-24,
        by_shape=True,
    ),
    *(
        Row(
            name,
            partial(make, 0.5, values=values),
            partial(half_bytes, itemsize),
            dense_limit=partial(make, 1.0, values=values),
            tolerance=tolerance,
        )
        for name, make, values, itemsize, tolerance in (
            ("random-k", methods.RandomKCompressor, "fp32", 4, 4 * 2.0**-24),
            ("random-block-fp16", methods.RandomBlockCompressor, "fp16", 2, HALF),
        )
    ),
    *(
        Row(
            f"vectors-sparse-{name}",
            partial(with_vectors, 0.05, 0.2, selector),
            lambda bucket, *_: sealed_bytes(
                12 * sum(-(-s.numel // 20) if len(s.shape) > 1 else -(-s.numel // 5) for s in bucket.segments)
            ),
            dense_limit=partial(with_vectors, 1.0, 1.0),
        )
        for name, selector in (("exact", None), ("sampled", Sampled(0.01)))
    ),
    Row("chunks-residual", chunks(), partial(chunk_bytes, 2), dense_limit=chunks(ratio=1.0), tolerance=HALF),
    Row(
        "chunks-residual-fp32",
        chunks(dtype="fp32"),
        partial(chunk_bytes, 4),
        dense_limit=chunks(ratio=1.0, dtype="fp32"),
    ),
    *(
        Row(f"ef21-{name}", partial(ef21, make), payload, False, momentum=0.5, first_step=0.5, by_size=by_size)
        for name, make, payload, by_size in EF21
    ),
    # of two chunks, each is sent and masked in every other step, so momentum has no time to build up
    chunks_of_dgc("chunks-dgc", chunks(partial(DGCSGDMemory, 0.9)), partial(chunk_bytes, 2)),
    chunks_of_dgc(
        "chunks-dgc-clipped",
        chunks(lambda: DGCSGDMemory(0.9, gradient_clipping=ClipByGlobalNorm(50.0)), dtype="fp32"),
        lambda bucket, *_: chunk_bytes(4, bucket) + 4 * len(bucket.segments),
    ),
    Row(
        "threshold-v",
        lambda: methods.DGCCompressor(0.05, ResidualMemory(), selector=Fixed(0.01)),
        partial(sparse_bytes, 4, 8),
        dense_limit=lambda: methods.DGCCompressor(1.0, ResidualMemory(), selector=Fixed(0.01)),
    ),
]


# --- exchanges of sparse payloads other than the all-gather ----------------------------------------------

INT32 = SparseFormat(CastValues(), PlainIndices("int32"))
SMALL = SparseFormat(CastValues("fp16"), PackedIndices())
SMALLEST = SparseFormat(Int8Values(), RiceIndices())


def settings_of(form: SparseFormat) -> dict[str, Any]:
    return {"values": form.values, "indices": form.indices}


def nbytes(form: SparseFormat, capacity: int, tensors: int, numel: int) -> int:
    bounds = torch.zeros(tensors + 1, dtype=torch.int64)
    return form.nbytes(Budget(bounds, bounds[1:], capacity), numel)


def reduce_scatter_bytes(form: SparseFormat, bucket: Bucket, size: int, *_: int) -> int:
    """N payloads of k/N elements and a deviation, and one of what six words leave, from 1.5 to 2 k/N."""
    k = sum(-(-s.numel // 20) for s in bucket.segments)
    turns, rest = divmod(bucket.numel, 13 * size)
    region = turns * 13 + min(13, rest)
    send = -(-(k + isqrt(k * (size - 1))) // size)
    room = 3 * k // (size - 1) - 6 - send if size > 1 else k
    keep = min(-(-2 * k // size), max(-(-3 * k // 2 // size), room), send * size)
    first, second = (nbytes(form, n, len(bucket.segments), region) for n in (send, keep))
    return size * first + second


def gtopk_bytes(form: SparseFormat, bucket: Bucket, size: int, rank: int) -> int:
    """A header, the selection in a rank's first message, and twice as many elements in those of sums.

    A rank sends in every doubling of the power of two up to N, and to its twin beyond that power.
    """
    k = sum(-(-s.numel // 20) for s in bucket.segments)
    doublings = size.bit_length() - 1
    power = 2**doublings
    first, later = (nbytes(form, n, len(bucket.segments), bucket.numel) for n in (k, min(bucket.numel, 2 * k)))
    if rank >= power:
        return 24 + first
    if rank + power < size:
        return 24 + (doublings + 1) * later
    return 24 + (first + (doublings - 1) * later if doublings else 0)


def auto_bytes(bucket: Bucket, size: int, *_: int) -> int:
    return sparse_bytes(4, 4, bucket) if size < 4 else reduce_scatter_bytes(INT32, bucket, size)


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
        partial(reduce_scatter_bytes if exchange == "reduce_scatter" else gtopk_bytes, form),
        by_size=exchange == "reduce_scatter",
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
        auto_bytes,
        by_size=True,
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


# --- dgc/paper: the definitions keep the laws too --------------------------------------------------------


def pairs_and_flag(bucket: Bucket, *_: int) -> int:
    """5 % of each tensor as fp32 values and int64 indices; the flag is an int64."""
    return 12 * sum(-(-s.numel // 20) for s in bucket.segments) + 8


def codes_and_flag(bits: int, bucket: Bucket, *_: int) -> int:
    return sum(4 * -(-s.numel * bits // 32) for s in bucket.segments) + 8


DEFINITIONS = [
    Row(
        "paper-ef21", lambda: paper.EF21(0.05, 0.5), pairs_and_flag, conserves=False, momentum=0.5, first_step=0.5
    ),
    Row("paper-dgc", lambda: paper.DGC(0.05), pairs_and_flag, conserves=False, momentum=0.9),
    Row(
        "paper-dgc-zero-momentum",
        lambda: paper.DGC(0.05, momentum=0.0),
        pairs_and_flag,
        dense_limit=lambda: paper.DGC(1.0, momentum=0.0),
    ),
    Row("paper-ldte-bs", lambda: paper.LDTEBS(0.05), pairs_and_flag, dense_limit=lambda: paper.LDTEBS(1.0)),
    Row(
        "paper-2bit", lambda: paper.Threshold(2, 2.0), partial(codes_and_flag, 2), feedback=True, one_element=False
    ),
    Row(
        "paper-1bit",
        lambda: paper.Threshold(1, 0.0),
        partial(codes_and_flag, 1),
        feedback=True,
        one_element=False,
        at_zero=False,
        left=0.5,  # as the fast one: what stays beyond 1 can never be sent
    ),
]

TABLE = [*GENERAL, *EXCHANGES, *QUANTIZED, *DEFINITIONS]
