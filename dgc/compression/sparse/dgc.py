"""Deep Gradient Compression (Lin, Han, Mao, Wang, Dally: ICLR 2018, arXiv 1712.01887, Algorithm 1).

On each of N ranks, with local gradient g, momentum u, velocity v and ratio D:

    g = clip(g);  u = m u + g;  v = v + u          memory: momentum correction, accumulation
    S = the D n largest |v_i| of every tensor      selection: exact, or a sampled threshold
    send v_S;  v_S = 0;  u_S = 0                   memory: momentum factor masking
    result = 1/N * sum over ranks                  the optimizer's step adds no momentum of its own

NaN and inf in g count as zero. Each payload carries a flag for them, and every rank's result has all flags.
Payload of a bucket in bytes: SparseFormat.nbytes(sum over tensors of ceil(D n)). If an all-gather of it costs more
than a dense all-reduce, or D = 1: the whole velocity, 4 bytes (fp16_values: 2) per element, and a header of 24.
The header reveals a rank that uses another ratio.

Differences from the paper and the original code: The momentum of dense steps is also corrected locally, which by
linearity equals ordinary momentum. Values are clamped to the wire's range, and rounding errors stay in v. Sums are
taken in rank order, so that replicas stay equal bit for bit.
"""

from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

import dgc.kernels as kernels
from dgc.bucket import Bucket, Segment, named_pairs
from dgc.comm.meter import all_gather_wire_bytes, all_reduce_wire_bytes
from dgc.comm.requests import AllGather, AllReduce, Conversation
from dgc.compression.dense import FP16, Clipped, Dense
from dgc.compression.finite import first_blame, overflow, sparse_overflow
from dgc.compression.protocol import Compressor, DenseResult, Result, SparseResult
from dgc.compression.sparse.arguments import FLAG, NOTHING, NUMBER, WHOLE, require, selector_of
from dgc.compression.warmup import RatioWarmup
from dgc.memory import Memory
from dgc.memory.protocol import MomentumCorrection
from dgc.selection import Plan, Selector, plan_selection
from dgc.wire import CastValues, IndexFormat, PlainIndices, SparseFormat, ValueFormat
from dgc.wire.sealed import seal, sealed_bytes, unseal

MEMORIES = (
    "a dgc.memory.Memory: DGCSGDMemory(momentum), which is the paper's algorithm, ResidualMemory(), or NoMemory(),"
    " which keeps nothing back, so that what is not sent is lost"
)
# The selector's loaded history: the rows of each tensor by name, and the ratio that they belong to.
NO_HISTORY: dict[str, Any] = {"ratio": None, "tensors": {}}


class DGCCompressor:
    """Deep Gradient Compression (Lin et al. 2018, arXiv 1712.01887, Algorithm 1).

    Args:
        compress_ratio (float): fraction of elements sent; above 1 the factor saved (1000 means 0.001).
        memory (Memory): treatment of unsent elements: DGCSGDMemory(momentum) as in the paper, ResidualMemory() to
            add them to the next gradient, or NoMemory() to discard them.
        sample_ratio, strided_sample, ..., resample: the original's sampled threshold, default off; see `Sampled`.
        fp16_values (bool), int32_indices (bool): send fp16 and int32, in place of fp32 values and int64 indices.
        warmup_epochs (int), warmup_coeff (float or sequence): larger ratio in the first epochs; see `RatioWarmup`.
            Call begin_epoch before each epoch, or pass steps_per_epoch to DistributedOptimizer. Otherwise the
            first step warns and the ratio stays at that of the first epoch.
        seed (int): seed of the selector's random numbers.
        selector (Selector, optional): default `Predicted`, the exact top-k of every tensor.
        values (ValueFormat, optional), indices (IndexFormat, optional): payload formats of `dgc.wire`.

    Raises:
        ValueError: if an argument has a wrong type or is out of range; the message names it.

    Example:
        >>> compression = DGCCompressor(0.001, memory=DGCSGDMemory(momentum=0.9), warmup_epochs=5)
        >>> optimizer = DistributedOptimizer(optimizer, model.named_parameters(), compression)
    """

    def __init__(
        self,
        compress_ratio: float,
        memory: Memory,
        sample_ratio: float | None = None,
        strided_sample: bool = True,
        compress_upper_bound: float = 1.3,
        compress_lower_bound: float = 0.8,
        max_adaptation_iters: int = 10,
        resample: bool = True,
        fp16_values: bool = False,
        int32_indices: bool = False,
        warmup_epochs: int = -1,
        warmup_coeff: float | Sequence[float] | None = None,
        seed: int = 0,
        *,
        selector: Selector | None = None,
        values: ValueFormat | None = None,
        indices: IndexFormat | None = None,
    ):
        require("a number", NUMBER, compress_ratio=compress_ratio, compress_upper_bound=compress_upper_bound)
        require("a number", NUMBER, compress_lower_bound=compress_lower_bound)
        require("None or a number", NUMBER + NOTHING, sample_ratio=sample_ratio)
        require("a whole number", WHOLE, max_adaptation_iters=max_adaptation_iters, seed=seed)
        require("True or False", FLAG, strided_sample=strided_sample, resample=resample)
        require("True or False", FLAG, fp16_values=fp16_values, int32_indices=int32_indices)
        require("None or a selector of dgc.selection", (Selector, *NOTHING), selector=selector)
        require("None or a format of dgc.wire", (ValueFormat, *NOTHING), values=values)
        require("None or a format of dgc.wire", (IndexFormat, *NOTHING), indices=indices)
        require(MEMORIES, (Memory,), memory=memory)
        if not compress_ratio > 0:
            raise ValueError(f"compress_ratio must be positive, not {compress_ratio}")
        self.compress_ratio = ratio = compress_ratio if compress_ratio <= 1 else 1 / compress_ratio
        self.memory = memory
        self._warmup = RatioWarmup(ratio, warmup_epochs, warmup_coeff)
        sampling = (strided_sample, compress_upper_bound, compress_lower_bound, max_adaptation_iters, resample)
        self._selector = selector_of(selector, sample_ratio, sampling)
        if fp16_values and values is not None or int32_indices and indices is not None:
            raise ValueError("fp16_values and values, or int32_indices and indices, both given: keep one of them")
        self._format = SparseFormat(
            values or CastValues("fp16" if fp16_values else "fp32"),
            indices or PlainIndices("int32" if int32_indices else "int64"),
        )
        dense = FP16() if self._format.values.dense.dtype == "fp16" else Dense()
        clipping = self.memory.gradient_clipping
        self._fallback = dense if clipping is None else Clipped(dense, clipping)
        self._names: set[str] | None = None
        self._seed = seed
        self._steps: dict[str, int] = {}
        self._sent: dict[str, tuple[int, bool]] = {}  # per bucket: number of elements, and whether sent dense
        self._plans: dict[str, Plan] = {}
        self._history = NO_HISTORY
        self._size, self._rank = 1, 0
        self.compress_ratio = self._warmup.at(0)
        self._awaits_epoch = warmup_epochs > 0

    @property
    def correction(self) -> MomentumCorrection | None:
        return self.memory.correction

    @property
    def fallback(self) -> Compressor:
        """All-reduce, with the memory's gradient_clipping, of vectors and all else that `accepts` refuses."""
        return self._fallback

    def initialize(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Compresses only these tensors. Without this call: every tensor of two or more dimensions."""
        self._names = {name for name, _ in named_pairs(named_parameters)}

    def accepts(self, segment: Segment) -> bool:
        return len(segment.shape) > 1 if self._names is None else segment.name in self._names

    def plan(self, bucket: Bucket, size: int, rank: int) -> None:
        self._format.indices.plan(0, bucket.numel)  # raises an error if the bucket is too large for the indices
        self.memory.plan(bucket)
        self._size, self._rank = size, rank
        self._steps[bucket.name] = 0

    def begin_epoch(self, epoch: int) -> None:
        self.compress_ratio, self._awaits_epoch = self._warmup.at(epoch), False

    def warmup_compress_ratio(self, epoch: int) -> None:
        """Same as `begin_epoch`, under the original's name."""
        self.begin_epoch(epoch)

    def reduce(self, bucket: Bucket) -> Conversation[Result]:
        if self._awaits_epoch:
            self._awaits_epoch = False
            if self._rank == 0:
                self._warmup.warn_of_no_epoch()
        clipped = yield from self.memory.clip(bucket)
        plan, seed = self._plan_of(bucket), self._next_seed(bucket)
        inputs = self.memory.pass_inputs(bucket)
        kernel, codec = kernels.of(inputs.v).selection, kernels.of(inputs.v).codec
        dense = self._dense_is_cheaper(bucket, plan)
        self._sent[bucket.name] = (bucket.numel, dense)
        if dense:
            first = kernel.accumulate_(inputs) if clipped is None else clipped.minimum(kernel.accumulate_(inputs))
            return (yield from self._reduce_dense(bucket, plan, inputs.v, first))
        selected = self._selector.select(inputs, plan, seed)
        first = selected.first_nonfinite if clipped is None else clipped.minimum(selected.first_nonfinite)
        encoded = self._format.encode(
            codec, selected.elements, plan.per_tensor, bucket.numel, first, bucket.dtype, plan.ratio
        )
        self.memory.sent_(bucket, encoded.sent)
        (payloads,) = yield (AllGather(encoded.payload),)
        planned = (plan.per_tensor, bucket.numel, plan.ratio, f"bucket {bucket.name}")
        parts, flags = self._format.decode(codec, payloads, *planned)
        indices, values = kernel.merge_mean(parts, len(parts), bucket.numel)
        nonfinite = first_blame(bucket, flags) or sparse_overflow(bucket, indices, values)
        return SparseResult(indices, values, nonfinite)

    def _reduce_dense(
        self, bucket: Bucket, plan: Plan, v: Tensor, first_nonfinite: Tensor
    ) -> Conversation[Result]:
        codec, bounds, terms = kernels.of(v).codec, plan.per_tensor.bounds, self._format.terms(plan.ratio)
        header = seal(codec, v.new_empty(0, dtype=torch.uint8), first_nonfinite, bounds, terms)
        values = self._format.values.dense.quantize(v, self._size, bucket.dtype)
        self.memory.sent_all_(bucket, values.float())
        # The reply may overwrite its message. The memory needs v until the step is known to be valid.
        bucket.release()  # the gradients are accumulated and need no copy
        message = bucket.flat.copy_(values) if values.dtype == bucket.dtype else values.clone()
        (headers, mean) = yield (AllGather(header), AllReduce(message))
        bucket.flat.copy_(mean)
        _, numbers = unseal(codec, headers, 0, bounds.numel() - 1, terms, f"bucket {bucket.name}")
        return DenseResult(first_blame(bucket, numbers) or overflow(bucket))

    def rollback(self, bucket: Bucket) -> None:
        self.memory.rollback_(bucket)

    def _plan_of(self, bucket: Bucket) -> Plan:
        plan = self._plans.get(bucket.name)
        if plan is None or plan.ratio != self.compress_ratio:
            plan = plan_selection(bucket.segments, self.compress_ratio, bucket.device)
            if self._history["ratio"] != plan.ratio:
                self._history = NO_HISTORY
            plan.take_history(self._history["tensors"])
            self._plans[bucket.name] = plan
        return plan

    def _dense_is_cheaper(self, bucket: Bucket, plan: Plan) -> bool:
        size = max(2, self._size)  # one process decides as with two
        sparse = all_gather_wire_bytes(self._format.nbytes(plan.per_tensor, bucket.numel), size)
        dense = all_reduce_wire_bytes(bucket.numel * self._format.values.dense.itemsize, size)
        return self.compress_ratio >= 1 or sparse > dense + all_gather_wire_bytes(sealed_bytes(0), size)

    @property
    def dense_share(self) -> float:
        """Fraction of elements sent dense in the last step, because that costs less; 0 before the first."""
        whole = sum(numel for numel, _ in self._sent.values())
        return sum(numel for numel, dense in self._sent.values() if dense) / max(1, whole)

    def _next_seed(self, bucket: Bucket) -> int:
        """A new seed for each bucket and step, the same after a resume. Dense steps count too: counters agree."""
        step = self._steps[bucket.name]
        self._steps[bucket.name] = step + 1
        return crc32(f"{self._seed} {bucket.segments[0].name} {step}".encode())

    def errors(self) -> Iterable[Tensor]:
        return self.memory.errors()

    def state_dict(self) -> dict[str, Any]:
        tensors = dict(self._history["tensors"]) if self._history["ratio"] == self.compress_ratio else {}
        if self._selector.remembers:
            for plan in self._plans.values():
                tensors |= plan.rows_of_history()
        return {
            "memory": self.memory.state_dict(),
            "steps": max(self._steps.values(), default=0),
            "history": {"ratio": self.compress_ratio, "tensors": tensors},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != {"memory", "steps", "history"}:
            raise ValueError(f"state of another compressor: {sorted(state)}")
        if not isinstance(state["history"], dict) or state["history"].keys() != {"ratio", "tensors"}:
            raise ValueError("history is not a mapping of ratio and tensors")
        for name, rows in state["history"]["tensors"].items():
            if bad := [key for key, row in rows.items() if bool(row.isnan().any())]:
                raise ValueError(f"history of {name}: {bad[0]} has NaN")
        self.memory.load_state_dict(state["memory"])
        self._steps = dict.fromkeys(self._steps, state["steps"])
        self._plans.clear()
        self._history = state["history"]
