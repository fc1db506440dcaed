"""Sparse compression: each rank sends a few elements of its accumulated gradient, and keeps the rest.

On each of N ranks, with local gradient g and residual v of the memory:

    v = memory(v, g)                       error feedback: v + g; DGC: v + (m u + g)
    S = selector(v)                        the positions of the elements to send
    send v_S;  memory: v_S = 0             payloads of planned size per bucket
    result = 1/N * sum over ranks          by an exchange, so that replicas stay equal bit for bit

With its parts this is DGC (`dgc`), top-k with error feedback (Stich et al. 2018, arXiv 1809.07599) and threshold-v
(Dutta et al. 2020, arXiv 1911.08250). NaN and inf in g count as zero. Each payload carries a flag for them.

Payload of a bucket in bytes: SparseFormat.nbytes(sum over tensors of ceil(D n)) for the ratio D, or what
`dgc.sparse.sums` says of other exchanges than the all-gather. If its exchange costs more than a dense
all-reduce, or D = 1: all of v, 4 bytes per element (2 for 16-bit values), and a header of 24.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet
from zlib import crc32

from torch import Tensor

import dgc.kernels as kernels
import dgc.sparse.payloads as wire
import dgc.sparse.selectors as selectors
from dgc.codes.uniform import make_fallback
from dgc.comm.meter import all_gather_wire_bytes, all_reduce_wire_bytes
from dgc.comm.requests import Conversation
from dgc.core.arguments import NUMBER, WHOLE, require
from dgc.core.bucket import Bucket, Segment, named_pairs
from dgc.core.dense import DenseCompressor
from dgc.core.envelope import sealed_bytes
from dgc.core.momentum import MomentumCorrection
from dgc.core.protocol import Compressor, Position, Repeats, Run, Use, check_choice, fraction_of
from dgc.core.results import Reduced, reported
from dgc.kernels import PassInputs
from dgc.sparse.memories import DGCSGDMemory, Memory, NoMemory, ResidualMemory, SparseState
from dgc.sparse.payloads import (
    CastValues,
    IndexFormat,
    PackedIndices,
    PlainIndices,
    RiceIndices,
    SparseFormat,
    ValueFormat,
)
from dgc.sparse.payloads.payload import PayloadPlan
from dgc.sparse.selectors import Selector, quota_of
from dgc.sparse.sums import EXCHANGES, AllGatherExchange

SELDOM = {
    Use.ADAM: "sends an element seldom, by which Adam's second moments grow, see "
    "docs/methods.md#which-optimizer-goes-with-which-method"
}


class SparseCompressor(Compressor):
    """Sends the elements that a selector chooses from the residual of a memory.

    Args:
        compress_ratio (float): fraction of each tensor's elements to send; above 1 the factor saved (1000 means
            0.001).
        memory (Memory or str): treatment of unsent elements: "residual" adds them to the next gradient, "dgc" also
            corrects momentum as DGC does, with the momentum of the optimizer, and "none" discards them. Or an
            object of dgc.memory, such as DGCSGDMemory(momentum_masking=False).
        selector (Selector or str): which elements: "predicted", the exact top-k of every tensor, another one of
            SELECTORS, or an object of dgc.sparse.selectors.
        values (ValueFormat or str): "fp32", "fp16", "bf16", "int8", "sign", "2bit", or an object of
            dgc.sparse.payloads.
        indices (IndexFormat or str): "int64", "int32", "packed", "rice", or an object of dgc.sparse.payloads.
        exchange (str): how the ranks sum what they send. "all_gather": every rank receives all of it.
            "reduce_scatter": each rank sums a part of the bucket and selects again, in up to twice as many
            elements as one rank selects; the bytes per rank do not grow with the number of ranks. "auto": the one
            that sends fewer bytes.
        warmup_epochs (int), warmup_coeff (float or sequence): larger ratio in the first epochs; see `RatioWarmup`.
            Call begin_epoch of the optimizer or exchange before each epoch, or pass steps_per_epoch to it.
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

    ratio: float = 1.0
    fallback: Compressor = DenseCompressor()

    @property
    def unsuited(self) -> Mapping[Use, str]:  # type: ignore[override]
        return SELDOM if self.compress_ratio < 1 else {}

    # --- one step ---------------------------------------------------------------------------------

    def repeats(self, bucket: Bucket, state: SparseState) -> Repeats | None:
        """Not in the first step of a ratio, nor after a dropped one."""
        quota, sent, exchange = state.quota, state.sent, state.exchange
        if quota is None or sent is None or state.dense or state.returned is not None:
            return None
        alike = quota.ratio == self.ratio and sent.values.numel() == quota.capacity
        decoder = kernels.of(sent.values).decoder
        if not (alike and self.selector.repeats and isinstance(exchange, AllGatherExchange)):
            return None
        return Repeats((quota,)) if decoder is not None and decoder.takes(exchange.payload.layout) else None

    def reduce(self, bucket: Bucket, state: SparseState) -> Conversation[Reduced]:
        replaced = None if self.memory.gradient_clipping is None else (yield from self.memory.clip(bucket))
        inputs, state = self._begin(bucket, state)
        if state.dense:
            return (yield from self._reduce_dense(bucket, state, inputs, replaced))
        assert state.quota is not None
        # new for each bucket and step, and the same in a resumed run: dense steps count too
        seed = crc32(f"{self.seed} {bucket.segments[0].name} {state.steps - 1}".encode())
        encoded = self._encode(state, inputs, seed, replaced)
        result, sent, returned = yield from state.exchange.mean(bucket, encoded)
        return Reduced(result, state.after(sent, returned), dropped=state)

    def _encode(self, state: SparseState, inputs: PassInputs, seed: int, replaced: Position | None) -> Any:
        """Add the gradient to the residual, select, and encode. replaced: as in `_reduce_dense`."""
        assert state.quota is not None
        selection = self.selector.select(inputs, state.quota, seed)
        first_nonfinite = selection.first_nonfinite
        if replaced is not None:
            first_nonfinite = replaced.minimum(first_nonfinite)
        return state.exchange.encode(selection.elements, first_nonfinite)

    def _begin(self, bucket: Bucket, state: SparseState) -> tuple[PassInputs, SparseState]:
        """Return the pass over the gradient, and the state after it, with the quota of this step."""
        inputs, quota, ratio = self.memory.pass_inputs(bucket, state), state.quota, self.ratio
        if quota is not None and quota.ratio == ratio:
            return inputs, state.next(sent=None, returned=None)
        quota = quota_of(bucket.segments, ratio, bucket.device, self.vector_ratio)
        quota.take_history(state.history)
        what, (size, rank) = f"bucket {bucket.name}", (state.size, state.rank)
        payload = PayloadPlan(self.format, quota.per_tensor, bucket.numel, ratio, what, bucket.dtype)
        kind = min(self._exchanges, key=lambda kind: kind.wire_bytes(payload, size))
        exchange = kind(payload, size, rank, wants_sparse=self.memory.correction is not None)
        new = {"quota": quota, "exchange": exchange, "history": {}, "dense": self._dense_is_cheaper(payload, size)}
        return inputs, state.next(sent=None, returned=None, **new)

    def _reduce_dense(
        self, bucket: Bucket, state: SparseState, inputs: PassInputs, replaced: Position | None
    ) -> Conversation[Reduced]:
        """Sends all of v. replaced: the first non-finite element, if the gradient was clipped."""
        v, first_nonfinite = inputs.v, kernels.of(inputs.v).selection.accumulate_(inputs)
        first_nonfinite = first_nonfinite if replaced is None else replaced.minimum(first_nonfinite)
        values = self.format.values.dense.quantize(v, state.size, bucket.dtype)
        errors = {table: v - values.float() for table in state.errors}
        # The reply may overwrite its message. The state needs v until the step is known to be valid.
        bucket.release()  # the gradients are accumulated and need no copy
        message = bucket.flat.copy_(values) if values.dtype == bucket.dtype else values.clone()
        mean, flags = yield from state.exchange.envelope.reduce(message, first_nonfinite)
        bucket.flat.copy_(mean)
        return Reduced(reported(bucket, flags), state.changed(errors=errors), dropped=state)

    def _dense_is_cheaper(self, payload: PayloadPlan, size: int) -> bool:
        size = max(2, size)  # one process uses the rule for two
        sparse = min(kind.wire_bytes(payload, size) for kind in self._exchanges)
        dense = all_reduce_wire_bytes(payload.numel * self.format.values.dense.itemsize, size)
        return payload.ratio >= 1 or sparse > dense + all_gather_wire_bytes(sealed_bytes(0), size)

    # --- options ----------------------------------------------------------------------------------

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
        require("a whole number", WHOLE, seed=seed)
        fraction = fraction_of(compress_ratio=compress_ratio)
        self.memory = named("memory", memory, MEMORIES, Memory, "dgc.sparse.memories")
        self.selector = named("selector", selector, SELECTORS, Selector, "dgc.sparse.selectors", "predicted")
        self.format = SparseFormat(
            named("values", values, VALUES, ValueFormat, "dgc.sparse.payloads", "fp32"),
            named("indices", indices, INDICES, IndexFormat, "dgc.sparse.payloads", "int64"),
        )
        self.warmup = RatioWarmup(fraction, warmup_epochs, warmup_coeff)
        self.ratio = self.warmup.at(0)
        self.seed, self.dense_values = seed, dense_values
        self.fallback = make_fallback(dense_values, self.format.values, self.memory.gradient_clipping)
        check_choice(EXCHANGES, exchange=exchange)
        self.exchange, self._exchanges = exchange, EXCHANGES[exchange]
        self.vectors, self.vector_ratio = vectors, checked_vector_ratio(vectors, vector_ratio, fraction)
        self._names: set[str] | None = None

    @property
    def compress_ratio(self) -> float:
        """The ratio of the epoch: of a compressor that exchanges use, the smallest one of theirs."""
        use = _uses.get(self) if self.warmup.warmup_epochs > 0 else None
        return self.ratio if use is None else min(use.ratios(), default=self.warmup.at(use.epoch or 0))

    @property
    def correction(self) -> MomentumCorrection | None:
        return self.memory.correction

    def initialize(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Compresses only these tensors. Without this call, `vectors` says which tensors.

        The original work's interface. It is a setting: call it before an optimizer uses the compressor.
        """
        self._names = {name for name, _ in named_pairs(named_parameters)}

    def accepts(self, segment: Segment) -> bool:
        if self._names is None:
            return len(segment.shape) > 1 or self.vectors == "sparse"
        return segment.name in self._names

    # --- the settings of a run ------------------------------------------------------------------------

    def in_epoch(self, epoch: int) -> "SparseCompressor":
        return self.changed(ratio=self.warmup.at(epoch)) if self.warmup.warmup_epochs > 0 else self

    def with_momentum(self, momentum: float, nesterov: bool) -> "SparseCompressor":
        memory = self.memory.with_momentum(momentum, nesterov)
        return self if memory is self.memory else self._for_a_run(memory=memory)

    def _for_a_run(self, **settings: Any) -> "SparseCompressor":
        """`changed`, and the exchange that uses the copy counts as one that uses this compressor."""
        copy = self.changed(**settings)
        _uses[copy] = _uses.setdefault(self, _Use())
        return copy

    def used_by(self, run: Run) -> None:
        _uses.setdefault(self, _Use()).add(run)

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch in all exchanges that use this compressor, and in those that will be built with it.

        The original work's interface. `begin_epoch` of an optimizer or exchange begins an epoch there alone.
        """
        _uses.setdefault(self, _Use()).begin_epoch(epoch)

    def warmup_compress_ratio(self, epoch: int) -> None:
        """Same as `begin_epoch`, under the original's name."""
        self.begin_epoch(epoch)

    def init(self, bucket: Bucket, size: int, rank: int) -> SparseState:
        self.format.indices.plan(0, bucket.numel)  # raises an error if the bucket is too large for the indices
        state = self.memory.init(bucket, size, rank)
        return replace(state, dense=False, rows=self.selector.rows)


class _Use:
    """The exchanges that use a compressor, and the epoch that was begun there by its own `begin_epoch`."""

    def __init__(self) -> None:
        self._runs: WeakSet[Run] = WeakSet()
        self.epoch: int | None = None
        self._lock = Lock()  # simulated ranks are threads

    def _list(self) -> list[Run]:
        with self._lock:
            return list(self._runs)

    def add(self, run: Run) -> None:
        with self._lock:
            self._runs.add(run)
        if self.epoch is not None:
            run.begin_epoch(self.epoch)

    def begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        for run in self._list():
            run.begin_epoch(epoch)

    def ratios(self) -> list[float]:
        return [run.compress_ratio for run in self._list()]


# The original work's scripts set the epoch in the compressor, and read its ratio there. Here both are in the
# exchanges. Only these two calls of users need to find them.
_uses: WeakKeyDictionary[SparseCompressor, _Use] = WeakKeyDictionary()


@dataclass(frozen=True)
class RatioWarmup:
    """Warm-up of the ratio: the first epochs send more elements (Lin et al. 2018, arXiv 1712.01887, section 3.3).

    With W = warmup_epochs and the final ratio D, epoch e < W (from 0) sends

        no coefficient      D ** ((e+1)/W)               W = 5, D = 0.001: 0.25, 0.063, 0.016, 0.004, 0.001
        a number c          max(c ** (e+1), D)
        a list              its e-th entry

    Differences from the original: Its default exponent is (e+1)/(W+1), which does not give the ratios in its
    documentation (0.25, 0.063, 0.015, 0.004, 0.001). The first formula above does.

    W of 0 or less is none.

    Raises:
        ValueError: if an argument has a wrong type or is out of range, or the list is shorter than W.
    """

    ratio: float
    warmup_epochs: int = -1
    warmup_coeff: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        require("a whole number of epochs", WHOLE, warmup_epochs=self.warmup_epochs)
        given = () if self.warmup_coeff is None else self.warmup_coeff
        for c in given if isinstance(given, Sequence) else (given,):
            if isinstance(c, bool) or not isinstance(c, NUMBER) or not 0 < c <= 1:
                kinds = "None, a number or a list of numbers, each in (0, 1]"
                raise ValueError(f"warmup_coeff must be {kinds}, not {self.warmup_coeff!r}")
        if isinstance(self.warmup_coeff, Sequence) and len(self.warmup_coeff) < self.warmup_epochs:
            listed = len(self.warmup_coeff)
            raise ValueError(f"warmup_coeff lists {listed} ratios for {self.warmup_epochs} warmup_epochs")

    def at(self, epoch: int) -> float:
        if epoch >= self.warmup_epochs:
            return self.ratio
        if self.warmup_coeff is None:
            return self.ratio ** ((epoch + 1) / self.warmup_epochs)
        if isinstance(self.warmup_coeff, Sequence):
            return self.warmup_coeff[epoch]
        return max(self.warmup_coeff ** (epoch + 1), self.ratio)


def checked_vector_ratio(vectors: str, vector_ratio: float | None, compress_ratio: float) -> float | None:
    """Return the ratio of tensors of less than two dimensions as a fraction. Raises ValueError if it is wrong."""
    check_choice(("dense", "sparse"), vectors=vectors)
    if vector_ratio is None:
        return None
    if vectors == "dense":
        raise ValueError("vector_ratio has no effect on vectors that are sent dense: set vectors='sparse'")
    ratio = fraction_of(vector_ratio=vector_ratio)
    if ratio < compress_ratio:
        raise ValueError(
            f"vector_ratio is {ratio:g}, less than the compress_ratio of {compress_ratio:g}: small tensors need "
            "the larger share"
        )
    return ratio


MEMORIES: dict[str, Callable[[], Memory]] = {"dgc": DGCSGDMemory, "residual": ResidualMemory, "none": NoMemory}
SELECTORS: dict[str, Callable[[], Selector]] = {
    "predicted": selectors.Predicted,
    "exact": selectors.Exact,
    "radix": selectors.Radix,
    "sampled": selectors.Sampled,
    "laplace": selectors.Laplace,
    "trimmed": selectors.Trimmed,
}
VALUES: dict[str, Callable[[], ValueFormat]] = {
    "fp32": partial(CastValues, "fp32"),
    "fp16": partial(CastValues, "fp16"),
    "bf16": partial(CastValues, "bf16"),
    "int8": wire.Int8Values,
    "sign": wire.SignValues,
    "2bit": wire.TwoBitValues,
}
INDICES: dict[str, Callable[[], IndexFormat]] = {
    "int64": partial(PlainIndices, "int64"),
    "int32": partial(PlainIndices, "int32"),
    "packed": PackedIndices,
    "rice": RiceIndices,
}
P = TypeVar("P")


def named(
    what: str, given: Any, choices: Mapping[str, Callable[[], P]], kind: Any, home: str, default: Any = None
) -> P:
    """Return the part that is given, or make the one of that name, with its defaults.

    what: name of the argument. kind: interface of the parts, whose classes are in `home`. Raises ValueError if it
    is neither.
    """
    given = default if given is None else given
    if isinstance(given, str) and given in choices:
        return choices[given]()
    require(f"one of {', '.join(map(repr, choices))}, or an object of {home}", (kind,), **{what: given})
    return cast(P, given)
