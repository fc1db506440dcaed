"""Every compressor, and what it promises. The laws in test_laws.py hold for every row."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from optim.nets import Half

from dgc import compression as methods
from dgc import contrib, paper
from dgc.core.bucket import Bucket
from dgc.core.dense import CastCompressor
from dgc.core.envelope import sealed_bytes
from dgc.core.error_feedback import AllGatherCompressor
from dgc.kernels import Budget
from dgc.memory import ClipByGlobalNorm, DGCSGDMemory, NoMemory, ResidualMemory
from dgc.sparse import payloads as formats
from dgc.sparse import selectors

Make = Callable[[], methods.Compressor]
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
    make: Make
    payload: Payload
    conserves: bool = True
    dense_limit: Make | None = None
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


def kept(bucket: Bucket) -> int:
    return sum(-(-s.numel // 20) for s in bucket.segments)


def sparse_bytes(value: int, index: int, bucket: Bucket, *_: int) -> int:
    return -(-(24 + kept(bucket) * (value + index)) // 8) * 8


def planned_bytes(form: formats.SparseFormat, bucket: Bucket, *_: int) -> int:
    return form.nbytes(selectors.quota_of(bucket.segments, 0.05).per_tensor, bucket.numel)


def own_bytes(bucket: Bucket, *_: int) -> int:
    return bucket.flat.numel() * bucket.flat.element_size()


def two_bytes(bucket: Bucket, *_: int) -> int:
    return 2 * bucket.numel


def clipped_bytes(payload: Payload) -> Payload:
    """And the norm of each tensor."""
    return lambda bucket, *ranks: payload(bucket, *ranks) + 4 * len(bucket.segments)


def dgc(memory: Callable[[], Any], **settings: Any) -> Make:
    def make() -> methods.Compressor:
        compressor = methods.DGCCompressor(memory=memory(), **{"compress_ratio": 0.05, **settings})
        compressor.begin_epoch(0)
        return compressor

    return make


def rounded(name: str, make: Make, payload: Payload, tolerance: float) -> Row:
    return Row(name, make, payload, conserves=False, dense_limit=make, tolerance=tolerance)


def form_of(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: settings[key] for key in ("values", "indices", "fp16_values", "int32_indices") if key in settings}


def dgc_bytes(fp16_values: bool = False, int32_indices: bool = False, **form: Any) -> Payload:
    if form:
        return partial(planned_bytes, formats.SparseFormat(**form))
    return partial(sparse_bytes, 2 if fp16_values else 4, 4 if int32_indices else 8)


def residual(name: str, tolerance: float = 4 * 2.0**-24, **settings: Any) -> Row:
    form, make = form_of(settings), dgc(ResidualMemory, **settings)
    limit = dgc(ResidualMemory, compress_ratio=1.0, **form)
    return Row(f"{name}-residual", make, dgc_bytes(**form), dense_limit=limit, tolerance=tolerance)


PLAIN_MOMENTUM = partial(DGCSGDMemory, 0.9)
no_momentum = partial(DGCSGDMemory, momentum=0.0)
CLIPPED = partial(DGCSGDMemory, 0.9, gradient_clipping=ClipByGlobalNorm(50.0))


def with_momentum(name: str, memory: Any = PLAIN_MOMENTUM, payload: Any = None, **settings: Any) -> Row:
    promises: Any = {"conserves": False, "momentum": 0.9, "first_step": settings.pop("first_step", 1.0)}
    return Row(name, dgc(memory, **settings), payload or dgc_bytes(**form_of(settings)), **promises)


def low_rank_bytes(settings: dict[str, Any], bucket: Bucket, *_: int) -> int:
    """Of an even number of half steps."""
    half_steps, rate = settings.get("num_iters_per_step", 2), settings.get("min_compression_rate", 2)
    floats, side = 0, -int(-math.sqrt(bucket.numel) // 1)
    square, matrices = settings["mode"] == "square", [(s.shape, s.numel) for s in bucket.segments]
    for shape, numel in [((side, side), bucket.numel)] if square else matrices:
        n = shape[0]
        m = side if square else numel // n
        cost = min(settings["rank"], n, m) * (n + m) * half_steps // 2
        floats += cost if len(shape) > 1 and numel > rate * cost else numel
    return (2 if "wire" in settings else 4) * floats + 24


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


def powersgd(name: str, settings: dict[str, Any]) -> Row:
    make = partial(methods.PowerSGDCompressor, **settings)
    return Row(
        f"powersgd-{name}",
        make,
        partial(low_rank_bytes, settings),
        dense_limit=partial(make, rank=10**6, min_compression_rate=0),
        # at full rank these are sums of up to 64 products, and random Q have a condition
        tolerance=HALF if settings.keys() & {"wire", "warm_start"} else 32 * 2.0**-24,
        by_shape=settings["mode"] != "square",
    )


SELECTORS = (
    selectors.Exact(),
    selectors.Trimmed(),
    selectors.Radix(),
    selectors.Laplace(warm_start=True),
)
SMALL_SAMPLE: dict[str, Any] = {"sample_ratio": 0.01, "strided_sample": False, "resample": False}
PER_CHUNK = selectors.TopKPerChunk(64)
RICE, PACKED, CHUNKS = formats.RiceIndices(), formats.PackedIndices(), formats.ChunkIndices()
SPARSELOCO = dgc(lambda: ResidualMemory(decay=0.95), selector=PER_CHUNK, indices=CHUNKS)
NARROW: dict[str, Any] = {"fp16_values": True, "int32_indices": True}
GENERAL = [
    Row("dense", methods.DenseCompressor, own_bytes),
    rounded("fp16", methods.FP16Compressor, two_bytes, HALF),
    rounded("bf16", methods.BF16Compressor, lambda bucket, *_: sealed_bytes(2 * bucket.numel), BRAIN),
    rounded("horovod-fp16", lambda: CastCompressor(Half()), two_bytes, HALF),
    residual("top-k", sample_ratio=1.0),
    residual("sampled", sample_ratio=0.01),
    residual("sampled-fp16-int32", HALF, **NARROW, **SMALL_SAMPLE),
    *(residual(type(selector).__name__.lower(), selector=selector) for selector in SELECTORS),
    # small elements never travel: it comes closer, not home
    Row("sampled-no-memory", dgc(NoMemory, sample_ratio=0.01), dgc_bytes(), conserves=False, left=0.9),
    residual("per-bucket-rice", selector=selectors.Predicted(per_bucket=True), indices=RICE),
    residual("bf16-packed", values=formats.CastValues("bf16"), indices=PACKED),
    residual("int8", values=formats.Int8Values(), indices=formats.PlainIndices("int32")),
    residual("sign-rice", values=formats.SignValues(), indices=RICE),
    residual("2-bit-values-rice", values=formats.TwoBitValues(), indices=RICE),
    residual("per-chunk-2-bit-values", selector=PER_CHUNK, values=formats.TwoBitValues(), indices=CHUNKS),
    Row("per-chunk-residual-that-decays", SPARSELOCO, dgc_bytes(indices=CHUNKS), conserves=False, left=0.25),
    with_momentum("dgc-2-bit-values-packed", values=formats.TwoBitValues(4.0), indices=PACKED),
    with_momentum("dgc-sign-rice", values=formats.SignValues(), indices=RICE),
    Row("dgc-zero-momentum", dgc(no_momentum), dgc_bytes(), dense_limit=dgc(no_momentum, compress_ratio=1.0)),
    with_momentum("dgc-laplace", selector=selectors.Laplace()),
    with_momentum("dgc"),
    with_momentum("dgc-nesterov", partial(PLAIN_MOMENTUM, nesterov=True), first_step=1.9, int32_indices=True),
    with_momentum("dgc-no-masking-fp16", partial(PLAIN_MOMENTUM, momentum_masking=False), **NARROW),
    with_momentum("dgc-clipped", CLIPPED, clipped_bytes(partial(sparse_bytes, 4, 8))),
    with_momentum("dgc-warm-up", payload=lambda b, *_: own_bytes(b) + 24, warmup_epochs=1, warmup_coeff=[1.0]),
    *(powersgd(name, settings) for name, settings in POWERSGD.items()),
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
    sums = -(-(share * 8 // bits) * (values - 1).bit_length() // 8)
    return size * sealed_bytes(share) + sealed_bytes(sums) + thresholds


def double_squeeze_bytes(bucket: Bucket, size: int, *_: int) -> int:
    """Signs and scales of a chunk to each of `size` servers, and of one chunk from this rank's own."""
    length, largest = 32 * -(-bucket.numel // (32 * size)), 0
    filled = [(s.offset, s.offset + s.numel) for s in bucket.segments if s.numel]
    for begin in range(0, bucket.numel, max(1, length)):
        end = min(begin + length, bucket.numel)
        inside = [min(last, end) - max(first, begin) for first, last in filled]
        largest = max(largest, sum(4 + 4 * -(-d // 32) for d in inside if d > 0))
    return (size + 1) * sealed_bytes(largest)


def two_phase_bytes(bits: int, block: int, bucket: Bucket, size: int, *_: int) -> int:
    """A part of the blocks to each of `size` ranks, and this rank's own part of the mean to all."""
    blocks = -(-sum(-(-s.numel // block) for s in bucket.segments) // size)
    return (size + 1) * sealed_bytes(blocks * (2 + block * bits // 8))


def two_phases(name: str, bits: int, block: int, **settings: Any) -> Row:
    payload = partial(two_phase_bytes, bits, block)
    return Row(name, partial(methods.TwoPhaseCompressor, bits, block, **settings), payload, by_size=True)


def sixteen_bits(name: str, **settings: Any) -> Row:
    """Half of fp32: two bytes per element to each of the ranks that reduce them, and two of the sums."""
    make = partial(methods.TwoPhaseCompressor, 16, **settings)

    def payload(bucket: Bucket, size: int, *_: int) -> int:
        return (size + 1) * sealed_bytes(2 * -(-bucket.numel // size))

    if settings.get("error_feedback"):
        return Row(name, make, payload, by_size=True)
    return rounded(name, make, payload, 2 * BRAIN if settings else BRAIN)


def half_bytes(itemsize: int, bucket: Bucket, *_: int) -> int:
    return itemsize * sum(-(-s.numel // 2) for s in bucket.segments) + 24


def half(name: str, make: Any, values: str, itemsize: int, tolerance: float) -> Row:
    limit, payload = partial(make, 1.0, values=values), partial(half_bytes, itemsize)
    return Row(name, partial(make, 0.5, values=values), payload, dense_limit=limit, tolerance=tolerance)


def chunks(memory: Any = ResidualMemory, ratio: float = 0.05, dtype: str = "fp16") -> Make:
    return lambda: methods.ChunkCompressor(ratio, memory(), 64, dtype)


def chunk_bytes(itemsize: int, bucket: Bucket, *_: int) -> int:
    """5 % of the chunks of at most 64 elements, and a header."""
    number = -(-bucket.numel // 64)
    sent = -(-number // 20) * -(-bucket.numel // number)
    return 24 + min(4 * number + itemsize * sent, itemsize * bucket.numel)


def coded_row(name: str, make: Callable[[], AllGatherCompressor], **promises: Any) -> Row:
    return Row(name, make, lambda bucket, *_: sealed_bytes(make().nbytes(bucket)), **promises)


# without a residual
biased = partial(coded_row, conserves=False, one_element=False, left=0.9)
unbiased = partial(biased, left=0.25)


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
    def make() -> methods.Compressor:
        return methods.DGCCompressor(0.05, ResidualMemory(), dense_values=name).fallback

    payload = partial(dense_bytes, code, reduced, gathers_up_to)
    return Row(f"dense-values-{name}", make, payload, by_size=True, feedback=True, **promises)


def with_vectors(ratio: float, vector_ratio: float, selector: selectors.Selector | None) -> Make:
    options: Any = {"compress_ratio": ratio, "vector_ratio": vector_ratio, "selector": selector}
    return dgc(ResidualMemory, vectors="sparse", **options)


def vector_bytes(bucket: Bucket, *_: int) -> int:
    """5 % of each matrix, and 20 % of each vector."""
    return sealed_bytes(12 * sum(-(-s.numel // (20 if len(s.shape) > 1 else 5)) for s in bucket.segments))


def vectors(name: str, selector: selectors.Selector | None) -> Row:
    make, limit = with_vectors(0.05, 0.2, selector), with_vectors(1.0, 1.0, None)
    return Row(f"vectors-sparse-{name}", make, vector_bytes, dense_limit=limit)


def ef21(name: str, make: Make, payload: Payload, by_size: bool = False) -> Row:
    options: dict[str, Any] = {"momentum": 0.5, "first_step": 0.5, "by_size": by_size}
    return Row(f"ef21-{name}", lambda: methods.EF21Compressor(make(), beta=0.5), payload, False, **options)


feedback_qsgd = partial(methods.QSGDCompressor, 8, error_feedback=True)
above = partial(dgc, ResidualMemory, selector=selectors.Fixed(0.01))
chunks_of_dgc = partial(Row, conserves=False, momentum=0.9, left=0.75)
full_chunks, full_precise_chunks = chunks(ratio=1.0), chunks(ratio=1.0, dtype="fp32")
accordion = partial(contrib.AccordionCompressor, min_compression_rate=0, num_iters_per_step=2)
high_rank_bytes = partial(low_rank_bytes, {"rank": 2, "mode": "residual", "min_compression_rate": 0})
high: dict[str, Any] = {"dense_limit": partial(accordion, 10**6, 10**6), "tolerance": 32 * 2.0**-24}
svd: dict[str, Any] = {"dense_limit": partial(contrib.SVDCompressor, 1000), "tolerance": 64 * 2.0**-24}
QUANTIZED = [
    dense_values("int8", 1, 4, 7),
    dense_values("bf16", 2, 4, 4),
    # the sum of an all-reduce is rounded to fp16
    dense_values("fp16", 2, 2, 2, tolerance=2.0**-10),
    threshold(2, "2bit", 2.0),
    threshold(2, "2bit-adaptive", None, per_tensor=4, left=0.35),
    # a rank whose own gradient stays beyond 1, as here, can never send all of it
    threshold(1, "1bit", 0.0, at_zero=False, left=0.5),
    coded_row("scaled-sign", methods.ScaledSignCompressor, feedback=True),
    coded_row("onebit", contrib.OneBitCompressor, feedback=True),
    coded_row("blockwise", partial(methods.BlockwiseCompressor, block=100), feedback=True),
    Row("double-squeeze", contrib.DoubleSqueezeCompressor, double_squeeze_bytes, by_size=True),
    two_phases("int8", 8, 64),
    two_phases("int4", 4, 128),
    two_phases("int4-hadamard", 4, 64, hadamard=True),
    sixteen_bits("bf16-two-phases"),
    sixteen_bits("bf16-two-phases-random", random=True),
    sixteen_bits("bf16-two-phases-feedback", error_feedback=True),
    biased("signsgd", methods.SignSGDCompressor),
    biased("signum", partial(methods.SignSGDCompressor, 0.5)),
    unbiased("qsgd", methods.QSGDCompressor),
    unbiased("terngrad", contrib.TernGradCompressor),
    unbiased("natural", contrib.NaturalCompressor),
    biased("atomo", partial(contrib.AtomoCompressor, 2), by_shape=True),
    coded_row("svd", partial(contrib.SVDCompressor, 2), by_shape=True, **svd),
    Row("accordion", partial(accordion, 1, 2), high_rank_bytes, by_shape=True, **high),
    half("random-k", contrib.RandomKCompressor, "fp32", 4, 4 * 2.0**-24),
    half("random-block-fp16", contrib.RandomBlockCompressor, "fp16", 2, HALF),
    vectors("exact", None),
    vectors("sampled", selectors.Sampled(0.01)),
    Row("chunks-residual", chunks(), partial(chunk_bytes, 2), dense_limit=full_chunks, tolerance=HALF),
    Row("chunks-residual-fp32", chunks(dtype="fp32"), partial(chunk_bytes, 4), dense_limit=full_precise_chunks),
    ef21("dense", methods.DenseCompressor, lambda bucket, *_: 4 * bucket.numel),
    ef21("top-k", dgc(ResidualMemory), dgc_bytes()),
    ef21("sampled", dgc(ResidualMemory, sample_ratio=0.01), dgc_bytes()),
    ef21("qsgd", feedback_qsgd, lambda bucket, *_: sealed_bytes(feedback_qsgd().nbytes(bucket))),
    ef21("random-k", partial(contrib.RandomKCompressor, 0.5), partial(half_bytes, 4)),
    ef21("int4", partial(methods.TwoPhaseCompressor, 4, 128), partial(two_phase_bytes, 4, 128), by_size=True),
    # of two chunks, each is sent and masked in every other step, so momentum has no time to build up
    chunks_of_dgc("chunks-dgc", chunks(PLAIN_MOMENTUM), partial(chunk_bytes, 2)),
    chunks_of_dgc("chunks-dgc-clipped", chunks(CLIPPED, dtype="fp32"), clipped_bytes(partial(chunk_bytes, 4))),
    Row("threshold-v", above(), partial(sparse_bytes, 4, 8), dense_limit=above(compress_ratio=1.0)),
]


# --- exchanges of sparse payloads other than the all-gather ----------------------------------------------

INT32 = formats.SparseFormat(formats.CastValues(), formats.PlainIndices("int32"))
SMALL = formats.SparseFormat(formats.CastValues("fp16"), PACKED)
SMALLEST = formats.SparseFormat(formats.Int8Values(), RICE)


def nbytes(form: formats.SparseFormat, capacity: int, tensors: int, numel: int) -> int:
    bounds = torch.zeros(tensors + 1, dtype=torch.int64)
    return form.nbytes(Budget(bounds, bounds[1:], capacity), numel)


def reduce_scatter_bytes(form: formats.SparseFormat, bucket: Bucket, size: int, *_: int) -> int:
    """N payloads of k/N elements and a deviation, and one of what six words leave, from 1.5 to 2 k/N."""
    k = kept(bucket)
    turns, rest = divmod(bucket.numel, 13 * size)
    region = turns * 13 + min(13, rest)
    send = -(-(k + math.isqrt(k * (size - 1))) // size)
    room = 3 * k // (size - 1) - 6 - send if size > 1 else k
    keep = min(-(-2 * k // size), max(-(-3 * k // 2 // size), room), send * size)
    first, second = (nbytes(form, n, len(bucket.segments), region) for n in (send, keep))
    return size * first + second


def gtopk_bytes(bucket: Bucket, size: int, rank: int) -> int:
    """A header, the selection in a rank's first message, and twice as many elements in messages of sums: one in
    every doubling of the power of two up to N, and one to its twin beyond that power.
    """
    k, doublings = kept(bucket), size.bit_length() - 1
    power = 2**doublings
    first, later = (sealed_bytes(8 * n) for n in (k, min(bucket.numel, 2 * k)))
    if rank >= power:
        return 24 + first
    if rank + power < size:
        return 24 + (doublings + 1) * later
    return 24 + (first + (doublings - 1) * later if doublings else 0)


def auto_bytes(bucket: Bucket, size: int, *_: int) -> int:
    return sparse_bytes(4, 4, bucket) if size < 4 else reduce_scatter_bytes(INT32, bucket, size)


def row(exchange: str, name: str, memory: Any, form: Any, momentum: float = 0.0, left: Any = None) -> Row:
    """left: a step changes at most 2 k elements, where the all-gather changes the k of every rank."""
    return Row(
        f"{exchange.replace('_', '-')}-{name}",
        dgc(memory, exchange=exchange, values=form.values, indices=form.indices),
        auto_bytes if exchange == "auto" else partial(reduce_scatter_bytes, form),
        by_size=True,
        conserves=not momentum,
        dense_limit=None if momentum else dgc(memory, compress_ratio=1.0, exchange=exchange),
        momentum=momentum,
        left=left,
    )


gtopk = partial(contrib.GTopKCompressor, 0.05)
EXCHANGES = [
    row("auto", "residual", ResidualMemory, INT32),
    row("reduce_scatter", "residual", ResidualMemory, INT32),
    row("reduce_scatter", "residual-int8-rice", ResidualMemory, SMALLEST),
    row("reduce_scatter", "dgc-zero-momentum-fp16-packed", no_momentum, SMALL),
    row("reduce_scatter", "dgc", PLAIN_MOMENTUM, INT32, 0.9, 0.4),
    row("reduce_scatter", "dgc-int8-rice", PLAIN_MOMENTUM, SMALLEST, 0.9, 0.4),
    Row("gtopk", gtopk, gtopk_bytes, dense_limit=partial(contrib.GTopKCompressor, 1.0)),
]


# --- dgc/paper: the definitions keep the laws too --------------------------------------------------------


def pairs_and_flag(bucket: Bucket, *_: int) -> int:
    """fp32 values and int64 indices; the flag is an int64."""
    return 12 * kept(bucket) + 8


def codes_and_flag(bits: int, bucket: Bucket, *_: int) -> int:
    return sum(4 * -(-s.numel * bits // 32) for s in bucket.segments) + 8


def defined(name: str, definition: Any, payload: Payload, *settings: Any, **promises: Any) -> Row:
    return Row(f"paper-{name}", partial(definition, *settings), payload, **promises)


# left as of the fast one: what stays beyond 1 can never be sent
ONE_BIT: dict[str, Any] = {"feedback": True, "one_element": False, "at_zero": False, "left": 0.5}
DEFINITIONS = [
    defined("ef21", paper.EF21, pairs_and_flag, 0.05, 0.5, conserves=False, momentum=0.5, first_step=0.5),
    defined("dgc", paper.DGC, pairs_and_flag, 0.05, conserves=False, momentum=0.9),
    defined("dgc-zero-momentum", paper.DGC, pairs_and_flag, 0.05, 0.0, dense_limit=lambda: paper.DGC(1.0, 0.0)),
    defined("ldte-bs", paper.LDTEBS, pairs_and_flag, 0.05, dense_limit=lambda: paper.LDTEBS(1.0)),
    defined("2bit", paper.Threshold, partial(codes_and_flag, 2), 2, 2.0, feedback=True, one_element=False),
    defined("1bit", paper.Threshold, partial(codes_and_flag, 1), 1, 0.0, **ONE_BIT),
]

TABLE = [*GENERAL, *EXCHANGES, *QUANTIZED, *DEFINITIONS]
