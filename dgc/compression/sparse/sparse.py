"""Sparse compression: each rank sends a few elements of its accumulated gradient, and keeps the rest.

On each of N ranks, with local gradient g and error state v of the memory:

    v = memory(v, g)                       error feedback: v + g; DGC: v + (m u + g)
    S = selector(v)                        the positions of the elements to send
    send v_S;  memory: v_S = 0             payloads of planned size per bucket
    result = 1/N * sum over ranks          by an exchange, so that replicas stay equal bit for bit

With its parts this is DGC (`dgc`), top-k with error feedback (Stich et al. 2018, arXiv 1809.07599) and threshold-v
(Dutta et al. 2020, arXiv 1911.08250). NaN and inf in g count as zero. Each payload carries a flag for them, and
every rank's result has all flags.

The option `exchange` says how the ranks sum what they send. Each has a file in the folder `exchange`, with its
bytes. By default one all-gather of one payload per bucket.

Payload of a bucket in bytes: SparseFormat.nbytes(sum over tensors of ceil(D n)) for the ratio D. If its exchange
costs more than a dense all-reduce, or D = 1: all of v, 4 bytes per element (2 for 16-bit values), and a header of
24. The header reveals a rank that uses another ratio.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from torch import Tensor

import dgc.kernels as kernels
from dgc.arguments import NOTHING, NUMBER, WHOLE, require
from dgc.bucket import Bucket, Segment, named_pairs
from dgc.comm.meter import all_gather_wire_bytes, all_reduce_wire_bytes
from dgc.comm.requests import Conversation
from dgc.compression.envelope import Envelope
from dgc.compression.finite import first_nonfinite_message, overflow
from dgc.compression.protocol import Compressor, DenseResult, Result
from dgc.compression.sparse.exchange.choice import exchange_of
from dgc.compression.sparse.exchange.protocol import Chosen
from dgc.compression.sparse.fallback import make_fallback
from dgc.compression.sparse.plans import Plans
from dgc.compression.warmup import RatioWarmup
from dgc.kernels import PassInputs
from dgc.memory import Memory
from dgc.memory.protocol import MomentumCorrection
from dgc.memory.state import StepCounts
from dgc.selection import Plan, Predicted, Selector
from dgc.wire import CastValues, IndexFormat, PlainIndices, SparseFormat, ValueFormat
from dgc.wire.sealed import sealed_bytes

MEMORIES = (
    "a dgc.memory.Memory: DGCSGDMemory(momentum), which is the paper's algorithm, ResidualMemory(), or NoMemory(),"
    " which keeps nothing back, so that what is not sent is lost"
)


@dataclass(frozen=True, eq=False)
class Step:
    """The inputs of one step of a bucket.

    Attributes:
        inputs: The pass over gradient and error state.
        plan: Number of elements per tensor.
        seed: Seed of the selector's random numbers.
        clipped: Index of the first non-finite element that clipping has replaced, or n; None without clipping.
        dense: Whether all of v is sent, because that costs less.
    """

    inputs: PassInputs
    plan: Plan
    seed: int
    clipped: Tensor | None
    dense: bool

    def first_nonfinite(self, found: Tensor) -> Tensor:
        """Index of the gradient's first non-finite element. found: that of the pass, which is after clipping."""
        return found if self.clipped is None else self.clipped.minimum(found)


class SparseCompressor:
    """Sends the elements that a selector chooses from the error state of a memory.

    Args:
        compress_ratio (float): fraction of each tensor's elements to send; above 1 the factor saved (1000 means
            0.001).
        memory (Memory): treatment of unsent elements: ResidualMemory() adds them to the next gradient,
            DGCSGDMemory(momentum) also corrects momentum as DGC does, NoMemory() discards them.
        selector (Selector, optional): which elements; default `Predicted`, the exact top-k of every tensor.
        values (ValueFormat, optional): format of the values; default fp32.
        indices (IndexFormat, optional): format of the indices; default int64.
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
        >>> compression = SparseCompressor(0.01, ResidualMemory(), values=Int8Values(), indices=RiceIndices())
        >>> optimizer = DistributedOptimizer(optimizer, model.named_parameters(), compression)
    """

    def __init__(
        self,
        compress_ratio: float,
        memory: Memory,
        selector: Selector | None = None,
        values: ValueFormat | None = None,
        indices: IndexFormat | None = None,
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
        require(MEMORIES, (Memory,), memory=memory)
        require("None or a selector of dgc.selection", (Selector, *NOTHING), selector=selector)
        require("None or a format of dgc.wire", (ValueFormat, *NOTHING), values=values)
        require("None or a format of dgc.wire", (IndexFormat, *NOTHING), indices=indices)
        require("a whole number", WHOLE, seed=seed)
        if not 0 < compress_ratio < math.inf:
            raise ValueError(f"compress_ratio must be positive and finite, not {compress_ratio}")
        self.compress_ratio = min(compress_ratio, 1 / compress_ratio)
        self.memory, self.selector = memory, selector or Predicted()
        self.format = SparseFormat(values or CastValues("fp32"), indices or PlainIndices("int64"))
        self.warmup = RatioWarmup(self.compress_ratio, warmup_epochs, warmup_coeff)
        self.compress_ratio = self.warmup.at(0)
        self.seed, self.dense_values = seed, dense_values
        self._fallback = make_fallback(dense_values, self.format.values, memory.gradient_clipping)
        self.exchange, self._exchange = exchange, exchange_of(exchange)
        self._names: set[str] | None = None
        self._steps = StepCounts()
        self._sent_dense: dict[str, int] = {}  # per bucket: elements sent dense in the last step
        self.vectors, self.vector_ratio = vectors, vector_ratio
        self._plans = Plans(vectors, vector_ratio, self.warmup.ratio)
        self._size, self._rank, self._numel = 1, 0, 0
        self._awaits_epoch = warmup_epochs > 0

    def reduce(self, bucket: Bucket) -> Conversation[Result]:
        step = yield from self._begin(bucket)
        if step.dense:
            return (yield from self._reduce_dense(bucket, step))
        chosen = self.selector.select(step.inputs, step.plan, step.seed)
        first = step.first_nonfinite(chosen.first_nonfinite)
        place = (self.format, self.memory, self._size, self._rank)
        return (yield from self._exchange.mean(Chosen(bucket, step.plan, chosen.elements, first, *place)))

    def _reduce_dense(self, bucket: Bucket, step: Step) -> Conversation[Result]:
        """Sends all of v."""
        v = step.inputs.v
        first = step.first_nonfinite(kernels.of(v).selection.accumulate_(step.inputs))
        values = self.format.values.dense.quantize(v, self._size, bucket.dtype)
        self.memory.sent_all_(bucket, values.float())
        # The reply may overwrite its message. The memory needs v until the step is known to be valid.
        bucket.release()  # the gradients are accumulated and need no copy
        message = bucket.flat.copy_(values) if values.dtype == bucket.dtype else values.clone()
        mean, nonfinite = yield from self._envelope(bucket, step).reduce(message, first)
        bucket.flat.copy_(mean)
        return DenseResult(first_nonfinite_message(bucket, nonfinite) or (yield from overflow(bucket)))

    def _envelope(self, bucket: Bucket, step: Step) -> Envelope:
        terms = self.format.terms(step.plan.ratio)
        return Envelope(f"bucket {bucket.name}", step.plan.per_tensor.bounds, terms)

    def rollback(self, bucket: Bucket) -> None:
        self.memory.rollback_(bucket)

    # --- the plan of a step -----------------------------------------------------------------------

    def _begin(self, bucket: Bucket) -> Conversation[Step]:
        if self._awaits_epoch:
            self._awaits_epoch = False
            if self._rank == 0:
                self.warmup.warn_of_no_epoch()
        clipped = yield from self.memory.clip(bucket)
        plan, count = self._plans.of(bucket, self.compress_ratio), self._steps[bucket]
        # new for each bucket and step, and the same in a resumed run: dense steps count too
        seed = crc32(f"{self.seed} {bucket.segments[0].name} {count}".encode())
        dense = self._dense_is_cheaper(bucket, plan)
        self._steps[bucket], self._sent_dense[bucket.name] = count + 1, bucket.numel * dense
        return Step(self.memory.pass_inputs(bucket), plan, seed, clipped, dense)

    def _dense_is_cheaper(self, bucket: Bucket, plan: Plan) -> bool:
        size = max(2, self._size)  # one process uses the rule for two
        sparse = self._exchange.wire_bytes(self.format, plan, bucket.numel, size)
        dense = all_reduce_wire_bytes(bucket.numel * self.format.values.dense.itemsize, size)
        return self.compress_ratio >= 1 or sparse > dense + all_gather_wire_bytes(sealed_bytes(0), size)

    @property
    def dense_share(self) -> float:
        """Fraction of elements sent dense in the last step, because that costs less; 0 before the first."""
        return sum(self._sent_dense.values()) / max(1, self._numel)

    # --- setup and state --------------------------------------------------------------------------

    @property
    def correction(self) -> MomentumCorrection | None:
        return self.memory.correction

    @property
    def point_to_point(self) -> bool:
        return self._exchange.point_to_point

    @property
    def fallback(self) -> Compressor:
        """Sends vectors and all else that `accepts` refuses, and clips means by the memory's gradient_clipping."""
        return self._fallback

    def initialize(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Compresses only these tensors. Without this call: those that `vectors` says."""
        self._names = {name for name, _ in named_pairs(named_parameters)}

    def accepts(self, segment: Segment) -> bool:
        if self._names is None:
            return len(segment.shape) > 1 or self.vectors == "sparse"
        return segment.name in self._names

    def plan(self, bucket: Bucket, size: int, rank: int) -> None:
        self.format.indices.plan(0, bucket.numel)  # raises an error if the bucket is too large for the indices
        self.memory.plan(bucket)
        self._size, self._rank = size, rank
        self._numel += bucket.numel
        self._steps[bucket] = 0

    def begin_epoch(self, epoch: int) -> None:
        self.compress_ratio, self._awaits_epoch = self.warmup.at(epoch), False

    def warmup_compress_ratio(self, epoch: int) -> None:
        """Same as `begin_epoch`, under the original's name."""
        self.begin_epoch(epoch)

    def errors(self) -> Iterable[Tensor]:
        return self.memory.errors()

    def state_dict(self) -> dict[str, Any]:
        return {
            "memory": self.memory.state_dict(),
            "steps": self._steps.state_dict(),
            "history": self._plans.state_dict(self.compress_ratio, self.selector.remembers),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != {"memory", "steps", "history"}:
            raise ValueError(f"state of another compressor: {sorted(state)}")
        self._plans.load_state_dict(state["history"])
        self.memory.load_state_dict(state["memory"])
        self._steps.load_state_dict(state["steps"])
