"""Rows of the compressors that quantize, sample and factorize."""

from collections.abc import Callable
from functools import partial
from typing import Any

from laws.table import HALF, Row, sparse_bytes

from dgc.bucket import Bucket
from dgc.compression import (
    AtomoCompressor,
    BlockwiseCompressor,
    ChunkCompressor,
    Compressor,
    DGCCompressor,
    DoubleSqueezeCompressor,
    NaturalCompressor,
    OneBitCompressor,
    QSGDCompressor,
    RandomBlockCompressor,
    RandomKCompressor,
    ScaledSignCompressor,
    SignSGDCompressor,
    SVDCompressor,
    TernGradCompressor,
    ThresholdCompressor,
)
from dgc.compression.error_feedback import AllGatherCompressor
from dgc.memory import ClipByGlobalNorm, DGCSGDMemory, Memory, ResidualMemory
from dgc.selection import Fixed, Sampled, Selector
from dgc.wire.envelope import sealed_bytes


def threshold_bytes(bits: int, per_tensor: int = 0) -> Callable[[Bucket, int], int]:
    """With two ranks and one the codes are gathered, with more their sums are."""

    def formula(bucket: Bucket, size: int) -> int:
        codes = sum(4 * -(-s.numel * bits // 32) for s in bucket.segments)
        thresholds = per_tensor * len(bucket.segments)
        if size <= 2:
            return sealed_bytes(codes) + thresholds
        share = 4 * -(-codes // (4 * size))
        values = 2 * size + 1 if bits == 2 else size + 1
        fields = share * 8 // bits
        sums = -(-fields * (values - 1).bit_length() // 8)
        return size * sealed_bytes(share) + sealed_bytes(sums) + thresholds

    return formula


def double_squeeze_bytes(bucket: Bucket, size: int) -> int:
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


def sampled_bytes(ratio: float, itemsize: int) -> Callable[[Bucket], int]:
    def formula(bucket: Bucket) -> int:
        return itemsize * sum(-(-s.numel * int(1000 * ratio) // 1000) for s in bucket.segments) + 24

    return formula


def chunks(memory: Callable[[], Memory] = ResidualMemory, ratio: float = 0.05, dtype: str = "fp16") -> Any:
    return lambda: ChunkCompressor(ratio, memory(), 64, dtype)


def chunk_bytes(itemsize: int) -> Callable[[Bucket], int]:
    """5 % of the chunks of at most 64 elements, and a header."""

    def formula(bucket: Bucket) -> int:
        number = -(-bucket.numel // 64)
        sent = -(-number // 20) * -(-bucket.numel // number)
        return 24 + min(4 * number + itemsize * sent, itemsize * bucket.numel)

    return formula


def coded_row(name: str, make: Callable[[], AllGatherCompressor], **promises: Any) -> Row:
    return Row(name, make, lambda bucket: sealed_bytes(make().nbytes(bucket)), **promises)


def biased(name: str, make: Callable[[], AllGatherCompressor], left: float = 0.9, by_shape: bool = False) -> Row:
    """Without a residual."""
    return coded_row(name, make, conserves=False, one_element=False, left=left, by_shape=by_shape)


def unbiased(name: str, make: Callable[[], AllGatherCompressor]) -> Row:
    return biased(name, make, left=0.25)


def feedback(name: str, make: Callable[[], AllGatherCompressor]) -> Row:
    return coded_row(name, make, feedback=True)


def at(payload: Callable[[Bucket, int], int], name: str, make: Callable[[], Compressor], **promises: Any) -> Row:
    return Row(name, make, lambda bucket: 0, payload_at=payload, **promises)


def threshold(bits: int, name: str, value: float | None, per_tensor: int = 0, **promises: Any) -> Row:
    make = partial(ThresholdCompressor, bits, value)
    return at(threshold_bytes(bits, per_tensor), name, make, feedback=True, one_element=False, **promises)


def gathered_or_reduced(code: int, reduced: int, gathers_up_to: int) -> Callable[[Bucket, int], int]:
    """Bytes per element of a code, and of a number in an all-reduce, which more ranks use."""

    def formula(bucket: Bucket, size: int) -> int:
        scales = sum(4 * -(-s.numel // 1024) for s in bucket.segments) if code == 1 else 0
        if size <= gathers_up_to:
            return sealed_bytes(code * bucket.numel + scales)
        return sealed_bytes(0) + reduced * bucket.numel

    return formula


def dense_values(name: str, payload: Callable[[Bucket, int], int], **promises: Any) -> Row:
    """The compressor of what DGC does not compress."""

    def make() -> Compressor:
        return DGCCompressor(0.05, ResidualMemory(), dense_values=name).fallback

    return at(payload, f"dense-values-{name}", make, feedback=True, **promises)


def with_vectors(ratio: float, vector_ratio: float, selector: Selector | None = None) -> Compressor:
    return DGCCompressor(ratio, ResidualMemory(), selector=selector, vectors="sparse", vector_ratio=vector_ratio)


chunks_of_dgc = partial(Row, conserves=False, momentum=0.9, left=0.75)
QUANTIZED = [
    dense_values("int8", gathered_or_reduced(1, 4, gathers_up_to=7)),
    dense_values("bf16", gathered_or_reduced(2, 4, gathers_up_to=4)),
    # the sum of an all-reduce is rounded to fp16
    dense_values("fp16", gathered_or_reduced(2, 2, gathers_up_to=2), tolerance=2.0**-10),
    threshold(2, "2bit", 2.0),
    threshold(2, "2bit-adaptive", None, per_tensor=4, left=0.35),
    # a rank whose own gradient stays beyond 1, as here, can never send all of it
    threshold(1, "1bit", 0.0, at_zero=False, left=0.5),
    feedback("scaled-sign", ScaledSignCompressor),
    feedback("onebit", OneBitCompressor),
    feedback("blockwise", lambda: BlockwiseCompressor(block=100)),
    at(double_squeeze_bytes, "double-squeeze", DoubleSqueezeCompressor),
    biased("signsgd", SignSGDCompressor),
    biased("signum", lambda: SignSGDCompressor(0.5)),
    unbiased("qsgd", QSGDCompressor),
    unbiased("terngrad", TernGradCompressor),
    unbiased("natural", NaturalCompressor),
    biased("atomo", lambda: AtomoCompressor(2), by_shape=True),
    coded_row(
        "svd",
        lambda: SVDCompressor(2),
        dense_limit=lambda: SVDCompressor(1000),
        tolerance=64 * 2.0**-24,
        by_shape=True,
    ),
    *(
        Row(
            name,
            partial(make, 0.5, values=values),
            sampled_bytes(0.5, itemsize),
            dense_limit=partial(make, 1.0, values=values),
            tolerance=tolerance,
        )
        for name, make, values, itemsize, tolerance in (
            ("random-k", RandomKCompressor, "fp32", 4, 4 * 2.0**-24),
            ("random-block-fp16", RandomBlockCompressor, "fp16", 2, HALF),
        )
    ),
    *(
        Row(
            f"vectors-sparse-{name}",
            partial(with_vectors, 0.05, 0.2, selector),
            lambda bucket: sealed_bytes(
                12 * sum(-(-s.numel // 20) if len(s.shape) > 1 else -(-s.numel // 5) for s in bucket.segments)
            ),
            dense_limit=partial(with_vectors, 1.0, 1.0),
        )
        for name, selector in (("exact", None), ("sampled", Sampled(0.01)))
    ),
    Row("chunks-residual", chunks(), chunk_bytes(2), dense_limit=chunks(ratio=1.0), tolerance=HALF),
    Row("chunks-residual-fp32", chunks(dtype="fp32"), chunk_bytes(4), dense_limit=chunks(ratio=1.0, dtype="fp32")),
    # of two chunks, each is sent and masked in every other step, so momentum has no time to build up
    chunks_of_dgc("chunks-dgc", chunks(partial(DGCSGDMemory, 0.9)), chunk_bytes(2)),
    chunks_of_dgc(
        "chunks-dgc-clipped",
        chunks(lambda: DGCSGDMemory(0.9, gradient_clipping=ClipByGlobalNorm(50.0)), dtype="fp32"),
        lambda bucket: chunk_bytes(4)(bucket) + 4 * len(bucket.segments),
    ),
    Row(
        "threshold-v",
        lambda: DGCCompressor(0.05, ResidualMemory(), selector=Fixed(0.01)),
        sparse_bytes(0.05, 4, 8),
        dense_limit=lambda: DGCCompressor(1.0, ResidualMemory(), selector=Fixed(0.01)),
    ),
]
