"""Sparse compression: each rank sends a few elements of its accumulated gradient, and keeps the rest.

On each of N ranks, with local gradient g and error state v of the memory:

    v = memory(v, g)                       error feedback: v + g; DGC: v + (m u + g)
    S = selector(v)                        the positions of the elements to send
    send v_S;  memory: v_S = 0             payloads of planned size per bucket
    result = 1/N * sum over ranks          by an exchange, so that replicas stay equal bit for bit

With its parts this is DGC (`dgc`), top-k with error feedback (Stich et al. 2018, arXiv 1809.07599) and threshold-v
(Dutta et al. 2020, arXiv 1911.08250). NaN and inf in g count as zero. Each payload carries a flag for them, and
every rank's result has all flags.

The option `exchange` says how the ranks sum what they send: `dgc.compression.sparse_sum` has all ways and their
bytes. By default one all-gather of one payload per bucket.

Payload of a bucket in bytes: SparseFormat.nbytes(sum over tensors of ceil(D n)) for the ratio D. If its exchange
costs more than a dense all-reduce, or D = 1: all of v, 4 bytes per element (2 for 16-bit values), and a header of
24. The header reveals a rank that uses another ratio.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast
from zlib import crc32

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.arguments import NOTHING, NUMBER, WHOLE, require
from dgc.bucket import Bucket, Segment, named_pairs
from dgc.comm.meter import all_gather_wire_bytes, all_reduce_wire_bytes
from dgc.comm.requests import Conversation
from dgc.compression.all_gather import AllGatherCompressor, Codes
from dgc.compression.dense import ClippedCompressor, DenseCompressor, FP16Compressor, clipped
from dgc.compression.nonfinite import first_nonfinite_message
from dgc.compression.protocol import Compressor, DenseResult, Reduced
from dgc.compression.sparse_sum import Chosen, exchange_of
from dgc.compression.uniform import BlockwiseCompressor
from dgc.compression.warmup import RatioWarmup
from dgc.kernels import PassInputs
from dgc.memory import Clipping, DGCSGDMemory, Memory, MomentumCorrection, NoMemory, ResidualMemory, SparseState
from dgc.selection import (
    Bisection,
    Exact,
    Exponential,
    Gaussian,
    Histogram,
    Laplace,
    MSTopk,
    Plan,
    Predicted,
    Radix,
    Sampled,
    Selector,
    Trimmed,
    plan_selection,
)
from dgc.state import State
from dgc.wire import (
    CastValues,
    IndexFormat,
    Int8Values,
    PackedIndices,
    PlainIndices,
    RiceIndices,
    SignValues,
    SparseFormat,
    TwoBitValues,
    ValueFormat,
)
from dgc.wire.envelope import Envelope, sealed_bytes
from dgc.wire.payload import PayloadPlan

VECTORS = ("dense", "sparse")
DENSE_VALUES = ("fp32", "fp16", "bf16", "int8")
BLOCK = 1024  # elements of a block of int8 dense values
MEMORIES: dict[str, Callable[[], Memory]] = {"dgc": DGCSGDMemory, "residual": ResidualMemory, "none": NoMemory}
SELECTORS: dict[str, Callable[[], Selector]] = {
    "predicted": Predicted,
    "exact": Exact,
    "histogram": Histogram,
    "radix": Radix,
    "sampled": Sampled,
    "laplace": Laplace,
    "exponential": Exponential,
    "gaussian": Gaussian,
    "trimmed": Trimmed,
    "bisection": Bisection,
    "mstopk": MSTopk,
}
VALUES: dict[str, Callable[[], ValueFormat]] = {
    "fp32": partial(CastValues, "fp32"),
    "fp16": partial(CastValues, "fp16"),
    "bf16": partial(CastValues, "bf16"),
    "int8": Int8Values,
    "sign": SignValues,
    "2bit": TwoBitValues,
}
INDICES: dict[str, Callable[[], IndexFormat]] = {
    "int64": partial(PlainIndices, "int64"),
    "int32": partial(PlainIndices, "int32"),
    "packed": PackedIndices,
    "rice": RiceIndices,
}
P = TypeVar("P")


def named(what: str, given: Any, choices: Mapping[str, Callable[[], P]], kind: Any, home: str) -> P:
    """Return the part that is given, or make the one of that name, with its defaults.

    Args:
        what: Name of the argument.
        given: A part, or a name.
        choices: What makes the part of each name.
        kind: The interface of the parts.
        home: Where their classes are, for the error.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(given, str) and given in choices:
        return choices[given]()
    require(f"one of {', '.join(map(repr, choices))}, or an object of {home}", (kind,), **{what: given})
    return cast(P, given)


class SparseCompressor(Compressor):
    """Sends the elements that a selector chooses from the error state of a memory.

    Args:
        compress_ratio (float): fraction of each tensor's elements to send; above 1 the factor saved (1000 means
            0.001).
        memory (Memory or str): treatment of unsent elements: "residual" adds them to the next gradient, "dgc" also
            corrects momentum as DGC does, with that of the optimizer, and "none" discards them. Or an object of
            dgc.memory, such as DGCSGDMemory(momentum_masking=False).
        selector (Selector or str): which elements: "predicted", the exact top-k of every tensor, another one of
            SELECTORS, or an object of dgc.selection.
        values (ValueFormat or str): format of the values: "fp32", "fp16", "bf16", "int8", "sign", "2bit", or an
            object of dgc.wire.
        indices (IndexFormat or str): format of the indices: "int64", "int32", "packed", "rice", or an object of
            dgc.wire.
        exchange (str): how the ranks sum what they send. "all_gather": every rank receives all of it.
            "reduce_scatter": each rank sums a part of the bucket and selects again; all results together have up
            to twice as many elements as one rank selects, and the bytes per rank do not grow with the number of
            ranks. "gtopk": pairs of ranks add and select again what their groups have; the transport must carry
            messages from rank to rank (`connect`). "auto": the one of the first two that sends fewer bytes.
        warmup_epochs (int), warmup_coeff (float or sequence): larger ratio in the first epochs; see `RatioWarmup`.
            Call begin_epoch before each epoch, or pass steps_per_epoch to DistributedOptimizer. Otherwise the
            first step warns and the ratio stays at that of the first epoch.
        seed (int): seed of the selector's random numbers.
        dense_values (str, optional): values of tensors that are not compressed: "fp32", or with error feedback
            "fp16", "bf16" or "int8". None: fp32, fp16 without error feedback or bf16, as `values`; else int8.
        vectors (str): "sparse" compresses tensors of less than two dimensions as well. "dense" leaves them out.
        vector_ratio (float, optional): ratio of these tensors, at least compress_ratio. None: compress_ratio.

    Raises:
        ValueError: if an argument has a wrong type or is out of range; the message names it.

    Example:
        >>> compression = SparseCompressor(0.01, "residual", "sampled", values="int8", indices="rice")
        >>> optimizer = DistributedOptimizer(optimizer, model.named_parameters(), compression)
    """

    compress_ratio: float = 1.0
    fallback: Compressor = DenseCompressor()

    def __init__(
        self,
        compress_ratio: float,
        memory: Memory | str,
        selector: Selector | str | None = None,
        values: ValueFormat | str | None = None,
        indices: IndexFormat | str | None = None,
        *,
        warmup_epochs: int = -1,
        warmup_coeff: float | Sequence[float] | None = None,
        seed: int = 0,
        dense_values: str | None = None,
        vectors: str = "dense",
        vector_ratio: float | None = None,
        exchange: str = "all_gather",
    ):
        require("a number", NUMBER, compress_ratio=compress_ratio)
        require("a whole number", WHOLE, seed=seed)
        if not 0 < compress_ratio < math.inf:
            raise ValueError(f"compress_ratio must be positive and finite, not {compress_ratio}")
        fraction = min(compress_ratio, 1 / compress_ratio)
        self.memory = named("memory", memory, MEMORIES, Memory, "dgc.memory")
        chosen = "predicted" if selector is None else selector
        self.selector = named("selector", chosen, SELECTORS, Selector, "dgc.selection")
        self.format = SparseFormat(
            named("values", "fp32" if values is None else values, VALUES, ValueFormat, "dgc.wire"),
            named("indices", "int64" if indices is None else indices, INDICES, IndexFormat, "dgc.wire"),
        )
        self.warmup = RatioWarmup(fraction, warmup_epochs, warmup_coeff)
        self.compress_ratio = self.warmup.at(0)
        self.seed, self.dense_values = seed, dense_values
        self.fallback = make_fallback(dense_values, self.format.values, self.memory.gradient_clipping)
        self.exchange, self._exchange = exchange, exchange_of(exchange)
        self.point_to_point = self._exchange.point_to_point
        self.vectors, self.vector_ratio = vectors, checked_vector_ratio(vectors, vector_ratio, self.warmup.ratio)
        self._names: set[str] | None = None
        self._awaits_epoch = warmup_epochs > 0

    @property
    def correction(self) -> MomentumCorrection | None:
        return self.memory.correction

    def initialize(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Compresses only these tensors. Without this call: those that `vectors` says."""
        self._names = {name for name, _ in named_pairs(named_parameters)}

    def accepts(self, segment: Segment) -> bool:
        if self._names is None:
            return len(segment.shape) > 1 or self.vectors == "sparse"
        return segment.name in self._names

    def begin_epoch(self, epoch: int) -> None:
        self.compress_ratio, self._awaits_epoch = self.warmup.at(epoch), False

    def warmup_compress_ratio(self, epoch: int) -> None:
        """Same as `begin_epoch`, under the original's name."""
        self.begin_epoch(epoch)

    def init(self, bucket: Bucket, size: int, rank: int) -> SparseState:
        self.format.indices.plan(0, bucket.numel)  # raises an error if the bucket is too large for the indices
        state = self.memory.init(bucket, size, rank)
        return replace(state, dense=False, remembers=self.selector.remembers)

    # --- one step ---------------------------------------------------------------------------------

    def reduce(self, bucket: Bucket, state: SparseState) -> Conversation[Reduced]:
        replaced = None if self.memory.gradient_clipping is None else (yield from self.memory.clip(bucket))
        inputs, state = self._begin(bucket, state)
        assert state.plan is not None and state.payload is not None
        if state.dense:
            first = kernels.of(inputs.v).selection.accumulate_(inputs)
            first = first if replaced is None else replaced.minimum(first)
            return (yield from self._reduce_dense(bucket, state, inputs.v, first))
        # new for each bucket and step, and the same in a resumed run: dense steps count too
        seed = crc32(f"{self.seed} {bucket.segments[0].name} {state.steps - 1}".encode())
        selection = self.selector.select(inputs, state.plan, seed)
        first = selection.first_nonfinite if replaced is None else replaced.minimum(selection.first_nonfinite)
        parts = (bucket, state.plan, state.payload, selection.elements, first)
        chosen = Chosen(*parts, state.size, state.rank, wants_sparse=self.memory.correction is not None)
        result, sent, returned = yield from self._exchange.mean(chosen)
        return Reduced(result, state.after(sent, returned), dropped=state)

    def _begin(self, bucket: Bucket, state: SparseState) -> tuple[PassInputs, SparseState]:
        """Return the pass over the gradient, and the state after it, with the plan of this step."""
        if self._awaits_epoch:
            self._awaits_epoch = False
            if state.rank == 0:
                self.warmup.warn_of_no_epoch()
        inputs, plan, ratio = self.memory.pass_inputs(bucket, state), state.plan, self.compress_ratio
        if plan is not None and plan.ratio == ratio:
            return inputs, state.next(sent=None, returned=None)
        plan = plan_selection(bucket.segments, ratio, bucket.device, self.vector_ratio)
        plan.take_history(state.history)
        what, dense = f"bucket {bucket.name}", self._dense_is_cheaper(bucket, state.size, plan)
        payload = PayloadPlan(self.format, plan.per_tensor, bucket.numel, ratio, what, bucket.dtype)
        new = {"plan": plan, "payload": payload, "history": {}, "dense": dense}
        return inputs, state.next(sent=None, returned=None, **new)

    def _reduce_dense(
        self, bucket: Bucket, state: SparseState, v: Float32[Tensor, "n"], first: Int64[Tensor, ""]
    ) -> Conversation[Reduced]:
        """Sends all of v."""
        values = self.format.values.dense.quantize(v, state.size, bucket.dtype)
        errors = {table: v - values.float() for table in state.errors}
        # The reply may overwrite its message. The state needs v until the step is known to be valid.
        bucket.release()  # the gradients are accumulated and need no copy
        message = bucket.flat.copy_(values) if values.dtype == bucket.dtype else values.clone()
        mean, nonfinite = yield from self._envelope(bucket, state).reduce(message, first)
        bucket.flat.copy_(mean)
        result = DenseResult(first_nonfinite_message(bucket, nonfinite))
        return Reduced(result, state.changed(errors=errors), dropped=state)

    def _envelope(self, bucket: Bucket, state: SparseState) -> Envelope:
        assert state.payload is not None
        return Envelope(state.payload.what, bucket.bounds, state.payload.terms)

    def _dense_is_cheaper(self, bucket: Bucket, size: int, plan: Plan) -> bool:
        size = max(2, size)  # one process uses the rule for two
        sparse = self._exchange.wire_bytes(self.format, plan, bucket.numel, size)
        dense = all_reduce_wire_bytes(bucket.numel * self.format.values.dense.itemsize, size)
        return self.compress_ratio >= 1 or sparse > dense + all_gather_wire_bytes(sealed_bytes(0), size)


def checked_vector_ratio(vectors: str, vector_ratio: float | None, compress_ratio: float) -> float | None:
    """Return the ratio of tensors of less than two dimensions as a fraction.

    Raises:
        ValueError: An argument is out of range, or `vector_ratio` is given for vectors that go dense, or is less
            than `compress_ratio`.
    """
    if vectors not in VECTORS:
        raise ValueError(f"vectors must be 'dense' or 'sparse', not {vectors!r}")
    require("None or a number", NUMBER + NOTHING, vector_ratio=vector_ratio)
    if vector_ratio is None:
        return None
    if vectors == "dense":
        raise ValueError("vector_ratio has no effect on vectors that are sent dense: set vectors='sparse'")
    if not 0 < vector_ratio < math.inf:
        raise ValueError(f"vector_ratio must be positive and finite, not {vector_ratio}")
    ratio = min(vector_ratio, 1 / vector_ratio)
    if ratio < compress_ratio:
        raise ValueError(
            f"vector_ratio is {ratio:g}, less than the compress_ratio of {compress_ratio:g}: small tensors need "
            "the larger share"
        )
    return ratio


def make_fallback(dense_values: str | None, values: ValueFormat, clipping: Clipping | None) -> Compressor:
    """Return the compressor of the tensors that a sparse method does not accept.

    Args:
        dense_values: Its values, one of DENSE_VALUES. None: those that fit `values`.
        values: Format of the method's own values.
        clipping: The limit on means.

    Raises:
        ValueError: `dense_values` is none of these.
    """
    if dense_values not in (*DENSE_VALUES, None):
        raise ValueError(f"dense_values must be None or one of {', '.join(DENSE_VALUES)}, not {dense_values!r}")
    name = dense_values or _fitting(values)
    if name == "fp32" or (name == "fp16" and dense_values is None):
        dense = DenseCompressor() if name == "fp32" else FP16Compressor()
        return dense if clipping is None else ClippedCompressor(dense, clipping)
    return DenseValuesCompressor(name, clipping)


def _fitting(values: ValueFormat) -> str:
    """Return the type of dense values that costs about as much per element as `values`, or the next larger one."""
    if isinstance(values, CastValues):
        return values.dtype
    return "int8" if values.nbytes(BLOCK, 0) < 2 * BLOCK else values.dense.dtype


class DenseValuesCompressor(AllGatherCompressor):
    """Sends every element as fp16, bf16 or int8, with error feedback. `SparseCompressor(dense_values=)` makes it.

    It takes what a sparse method leaves: vectors, and all else that it does not accept. At a ratio of 0.1 % these
    tensors are most of the bytes, if they travel as fp32. With codes of fewer bits Q:

        v = g + e;  send Q(v);  e = v - Q(v)      error feedback: what rounding takes is sent later

        fp16, bf16   v cast to the type
        int8         the nearest of 255 levels; every block of up to 1024 elements of a tensor has a scale, its
                     largest magnitude / 127 (`BlockwiseCompressor`)

    All ranks gather all codes and sum them in rank order. Bytes of an all-gather grow with the number of ranks N.
    With many ranks an all-reduce costs fewer: of v as fp16 for fp16, of v as fp32 for the others. The transport
    rounds a sum in fp16. This is the only rounding that no error state keeps.

    Payload of a bucket in bytes: 24 + codes, rounded up to 8; codes: 2 per element, or for int8 1 per element and
    4 per block. If an all-gather of the codes costs more than the all-reduce: 24 + 2 (fp16) or 4 per element. This
    begins with N = 3 for fp16, N = 5 for bf16, and N = 8 for int8, or earlier if tensors have only a few elements.

    Args:
        values (str): "fp16", "bf16" or "int8".
        clipping (Clipping, optional): limit on the mean of each tensor.

    Raises:
        ValueError: if values is none of these.

    Example:
        >>> vectors = DGCCompressor(0.001, DGCSGDMemory(momentum=0.9), dense_values="int8").fallback
    """

    def __init__(self, values: str, clipping: Clipping | None = None):
        if values not in DENSE_VALUES[1:]:
            raise ValueError(f"values must be one of {', '.join(DENSE_VALUES[1:])}, not {values!r}")
        super().__init__()
        self.values, self.clipping = values, clipping
        self.bits = 8 if values == "int8" else 16
        self._blocks = BlockwiseCompressor(8, BLOCK, error_feedback=False)

    @property
    def compress_ratio(self) -> float:
        return self.bits / 32 if self.values == "int8" else 1.0

    def ratio_of(self, states: Sequence[tuple[Bucket, State]]) -> float:
        return self.compress_ratio if all(self._gathers(bucket, state) for bucket, state in states) else 1.0

    def init(self, bucket: Bucket, size: int, rank: int) -> State:
        return replace(super().init(bucket, size, rank), constants=self._blocks.init(bucket, size, rank).constants)

    def _gathers(self, bucket: Bucket, state: State) -> bool:
        ranks = max(2, state.size)  # one process uses the rule for two
        gathered = all_gather_wire_bytes(self.nbytes(bucket), ranks)
        return gathered <= all_reduce_wire_bytes(bucket.numel * self._reduced.itemsize, ranks)

    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        reduced = yield from super().reduce(bucket, state)
        if self.clipping is None:
            return reduced
        return replace(reduced, result=(yield from clipped(bucket, reduced.result, self.clipping)))

    def exchange(
        self, bucket: Bucket, state: State, v: Float32[Tensor, "n"], first_nonfinite: Int64[Tensor, ""]
    ) -> Conversation[tuple[Tensor, Tensor, list[int]]]:
        if self._gathers(bucket, state):
            return (yield from super().exchange(bucket, state, v, first_nonfinite))
        sent = self._reduced.quantize(v, state.size, bucket.dtype)
        kept = v - sent.float()
        message = sent.clone()  # the reply may overwrite it
        mean, nonfinite = yield from self.envelope(bucket).reduce(message, first_nonfinite)
        return mean.float(), kept, nonfinite

    @property
    def _reduced(self) -> CastValues:
        """Format of an all-reduce. No transport can add bf16 or int8."""
        return CastValues("fp16" if self.values == "fp16" else "fp32")

    # --- codes ------------------------------------------------------------------------------------

    def nbytes(self, bucket: Bucket) -> int:
        return self._blocks.nbytes(bucket) if self.values == "int8" else 2 * bucket.numel

    def encode(self, bucket: Bucket, state: State, v: Float32[Tensor, "n"]) -> tuple[Codes, Float32[Tensor, "n"]]:
        if self.values == "int8":
            return self._blocks.encode(bucket, state, v)
        cast = CastValues(self.values).quantize(v, result=bucket.dtype)
        return cast.view(torch.uint8), v - cast.float()

    def mean_(self, bucket: Bucket, state: State, codes: Sequence[Codes], mean: Float32[Tensor, "n"]) -> None:
        if self.values == "int8":
            return self._blocks.mean_(bucket, state, codes, mean)
        mean.zero_()
        for own in codes:
            mean += own.view(CastValues(self.values).torch_dtype)
        mean.div_(state.size)
