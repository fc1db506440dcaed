"""PowerSGD: low-rank gradients by power iteration (Vogels, Karimireddy, Jaggi: NeurIPS 2019, arXiv 1905.13727).

On each of N ranks, with local gradient g and error e; M [n, m] is the matrix of a tensor, shape[0] x rest:

    M = g + e
    paper      P = mean(M Q); P = orth(P); Q_i = M^T P; Q = mean(Q_i);  result P Q^T;  e = M - P Q_i^T
    residual   h-th half step, K of them per step:
               even   X = orth(P);  Y_i = M^T X;  M -= X Y_i^T;  Q = mean(Y_i);  result += X Q^T
               odd    X = orth(Q);  Y_i = M X;    M -= Y_i X^T;  P = mean(Y_i);  result += P X^T
               e = M;  h continues from step to step (Vogels et al. 2020, arXiv 2008.01425, Algorithm 2)
    square     as paper, with the whole bucket as one matrix [s, s], s = ceil(sqrt(numel)), padded with zeros

In `residual`, every second half step after the second adds r directions. Two half steps cost one step of `paper`.
A tensor is compressed if n m / (rho (n + m) K / 2) > min_compression_rate, with rho = min(r, n, m) and
K = 2 except in `residual`. Other tensors, and vectors, are sent uncompressed in the first round.
Payload of a bucket in bytes: w times (the sum over compressed tensors of rho n or rho m in each half step, and the
elements of the other tensors) and 24 for a header, w = 4, or 2 with wire="fp16".

Differences from the paper: The error refers to this rank's own gradient. The paper has e = M - P Q^T, with the
mean Q. Then only the mean of e over the ranks is bounded, and each e grows with the differences between the ranks'
data. Undetermined directions are random.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import isfinite, prod
from struct import pack, unpack
from typing import Any, ClassVar, TypeVar
from zlib import crc32

import torch
from jaxtyping import Float32, Int32
from torch import Tensor

import dgc.kernels as kernels
from dgc.comm.requests import AllReduce, Conversation
from dgc.core.arguments import checked
from dgc.core.bucket import Bucket, Segment
from dgc.core.dense import DenseCompressor
from dgc.core.envelope import Envelope, Flags, count_of, envelope_of
from dgc.core.protocol import Compressor, Repeats, Use, check_choice
from dgc.core.results import DenseResult, Reduced, Report, first_nonfinite_message, overflow_message
from dgc.core.state import State, Tables, check_tensor, flat_from, largest_count, parts_of, zeros
from dgc.core.values import CastValues
from dgc.kernels.lowrank import Cast, SentUpdate, consecutive
from dgc.lowrank.matrices import (
    WAYS,
    Batch,
    CompressionRule,
    Factor,
    MatrixLayout,
    Products,
    orthonormalize,
)

S = TypeVar("S", bound="PowerSGDState")
NOTHING = torch.empty(0, dtype=torch.float32)


@dataclass(eq=False, kw_only=True)
class PowerSGDState(State):
    """State of one bucket. All but v and `deferred` is the same on every rank.

    settings: what must be equal on every rank. v: gradient + error of the last step. P, Q: [B, r, n] and [B, r,
    m], by batch. half_steps: h. ranks: higher ranks for tensors, by name. `steps` is without dropped ones.
    deferred: not yet subtracted from v. keeps: whether there is error feedback. cast: how numbers are sent.
    """

    layout: MatrixLayout
    rule: CompressionRule
    seed: int
    settings: str
    envelope: Envelope
    cast: Cast
    v: Float32[Tensor, "V"] = NOTHING
    P: Factor = ()
    Q: Factor = ()
    half_steps: int = 0
    ranks: Mapping[str, int] = field(default_factory=dict)
    deferred: SentUpdate | None = None
    keeps: bool = True
    partial: tuple[str, ...] = ("P", "Q")
    common: tuple[str, ...] = ("P", "Q")
    counters: ClassVar[tuple[str, ...]] = ("steps", "half_steps")

    def random_factor(self, batch: Batch, side: str, k: int) -> Float32[Tensor, "B r d"]:
        """Random factors for the k-th half step of this step, the same on all ranks. -1: to begin it with."""
        _, r, length = batch.factor_shape(side)
        keys = [f"{name} {side} {self.steps} {k}" for name in self.layout.names(batch)]
        return stack(self.layout, batch, side, [draw(self.seed, key, r, length) for key in keys])

    def random_key(self, side: str, k: int) -> int:
        """Key of the random rows that a kernel makes in the k-th half step of this step, the same on all ranks."""
        return crc32(f"{self.seed} {self.layout.bucket.name} {side} {self.steps} {k}".encode())

    # --- state ------------------------------------------------------------------------------------

    def moving(self) -> list[Tensor]:
        found = [self.v, *self.P, *self.Q]
        if self.deferred is not None:
            found += chain.from_iterable(self.deferred.products)
            errors = self.deferred.rounding_errors
            found += [] if errors is None else [errors]
        return found

    def error(self) -> Float32[Tensor, "n"]:
        """A copy of the error after the last step, to which `accumulate_` adds the gradients, in the order of the
        bucket.
        """
        layout, v = self.layout, self.v.clone()
        if self.deferred is not None:
            kernels.of(v).lowrank.remove_(v, layout.batches, self.deferred)
        flat = torch.empty(layout.bucket.numel, dtype=torch.float32, device=v.device)
        for i, s in enumerate(layout.segments):
            s.of(flat).copy_(layout.part_of(v, i))
        return flat

    def unsent(self, bucket: Bucket) -> list[Tensor]:
        return [self.error()] if self.keeps else []

    def saved(self, bucket: Bucket) -> Tables:
        """errors in the shape of the tensor; P [n, r] and Q [m, r] with rows in the order of the shape; the
        numbers half_steps and steps.
        """
        tables: Tables = {"P": {}, "Q": {}}
        layout = self.layout
        for batch, P, Q in zip(layout.batches, self.P, self.Q, strict=True):
            rows = (P, layout.permute_columns(batch, list(Q), to_memory=False))
            for name, p, q in zip(layout.names(batch), *rows, strict=True):
                tables["P"][name], tables["Q"][name] = p.T.contiguous(), q.T.contiguous()
        if self.keeps:
            tables["errors"] = parts_of(bucket, self.error())
        for key, count in (("half_steps", self.half_steps), ("steps", self.steps)):
            tables[key] = dict.fromkeys((s.name for s in bucket.segments), count)
        return tables

    def loaded(self: S, bucket: Bucket, tables: Tables) -> S:
        error = flat_from("errors", bucket, tables["errors"]) if self.keeps else zeros(bucket)
        half_steps, steps = (largest_count(tables[key], bucket) for key in ("half_steps", "steps"))
        return replace(self, steps=steps, half_steps=half_steps).with_factors(tables, error)

    def updated(self: S) -> S:
        """This state, or a new one if other tensors are to be compressed now, or with other ranks."""
        layout = self.rule.layout(self.layout.bucket, self.steps, self.ranks)
        if layout.batches == self.layout.batches:
            return self
        return self.with_factors(self.saved(layout.bucket), self.error())

    def with_factors(self: S, tables: Tables, error: Float32[Tensor, "n"]) -> S:
        """The state with the layout of its steps and ranks, and with this error. Factors and rows of factors that
        `tables` does not have are random. Excess rows are dropped.
        """
        layout = self.rule.layout(self.layout.bucket, self.steps, self.ranks)
        check_factors(layout, tables)
        v = torch.zeros(layout.numel, dtype=torch.float32, device=error.device)
        for i, s in enumerate(layout.segments):
            layout.part_of(v, i).copy_(s.of(error))
        P, Q = (
            tuple(restored(layout, batch, side, tables[side], self.seed) for batch in layout.batches)
            for side in ("P", "Q")
        )
        ratio = self.rule.floats_sent(layout) / max(1, layout.bucket.numel)
        envelope = envelope_of(layout.bucket, layout.bounds, ratio, self.settings)
        return replace(self, layout=layout, envelope=envelope, v=v, P=P, Q=Q, deferred=None)

    def with_ranks(self: S, ranks: Mapping[str, int]) -> S:
        """The state with these higher ranks for tensors, by name, where they save enough. If a rank falls, the
        first rows of its factors stay.
        """
        return replace(self, ranks=ranks).updated()


def stack(layout: MatrixLayout, batch: Batch, side: str, factors: list[Tensor]) -> Float32[Tensor, "B r d"]:
    """Stacks the factors of a batch, each in the order of the shape."""
    if side == "Q":
        factors = layout.permute_columns(batch, factors, to_memory=True)
    stacked, device = torch.stack(factors), layout.bucket.device
    # from pinned memory: other copies wait for the device
    return stacked if device == stacked.device else stacked.pin_memory().to(device, non_blocking=True)


def check_factors(layout: MatrixLayout, tables: Tables) -> None:
    """Raise ValueError if the factors of a checkpoint do not fit the matrices of a layout."""
    for batch in layout.batches:
        for name in layout.names(batch):
            found = [table for table in ("P", "Q") if name in tables[table]]
            if not found:
                continue
            if len(found) < 2:
                raise ValueError(f"{name} has {found[0]} alone, and needs P and Q")
            P, Q = factors = [tables[side][name] for side in ("P", "Q")]
            for side, factor in zip(("P", "Q"), factors, strict=True):
                _, _, length = batch.factor_shape(side)
                check_tensor(f"{side} of {name}", factor)
                if factor.dim() != 2 or factor.shape[0] != length:
                    raise ValueError(f"{side} of {name} has shape {tuple(factor.shape)}, not ({length}, rank)")
            if P.shape[1] != Q.shape[1]:
                raise ValueError(f"P and Q of {name} have different ranks, {P.shape[1]} and {Q.shape[1]}")


def restored(
    layout: MatrixLayout, batch: Batch, side: str, saved: Mapping[str, Any], seed: int
) -> Float32[Tensor, "B r d"]:
    """The factors of a batch from the factors of a checkpoint, which have been checked."""
    (_, r, length), device = batch.factor_shape(side), layout.bucket.device
    factors = []
    for name in layout.names(batch):
        factor = torch.empty(length, 0, dtype=torch.float32) if name not in saved else saved[name]
        rows = factor[:, :r].T
        if len(rows) < r:
            drawn = draw(seed, f"{name} {side}", r, length)[len(rows) :]
            # on the device, because the backend of its kernels may not run on a CPU
            rows = torch.cat([rows.to(device), drawn.to(device)])
            (rows,) = orthonormalize([rows[None]])[0]
        factors.append(rows.to(device))
    return stack(layout, batch, side, factors)


def draw(seed: int, key: str, r: int, length: int) -> Float32[Tensor, "r length"]:
    """Random numbers that depend on seed and key alone, so that they are the same on all ranks."""
    generator = torch.Generator().manual_seed(crc32(f"{seed} {key}".encode()))
    return torch.randn(r, length, generator=generator, dtype=torch.float32)


def append_(products: Products, X: Factor, Y: Factor, even: bool) -> None:
    """Adds X^T Y to each product if even, else Y^T X."""
    terms = list(zip(X, Y, strict=True) if even else zip(Y, X, strict=True))
    if products:
        sides = []
        for before, new in zip(zip(*products, strict=True), zip(*terms, strict=True), strict=True):
            shapes = [(len(x), x.shape[1] + y.shape[1], x.shape[2]) for x, y in zip(before, new, strict=True)]
            # in one tensor, which kernels of a GPU need
            _, both = consecutive(shapes, before[0].device)
            for x, y, out in zip(before, new, both, strict=True):
                torch.cat([x, y], 1, out=out)
            sides.append(both)
        terms = list(zip(*sides, strict=True))
    products[:] = terms


@dataclass(eq=False)
class _Step:
    """sent: this rank's update. mean: U and W of the mean update, by batch. dense: the rest of it, [D]. flags: of
    all ranks' gradients. largest: largest magnitude in the reply to each half step, as far as the host
    knows it. largest_bits: bits of the largest magnitude in the factors and the rest of the mean, found by the
    device.
    """

    sent: SentUpdate = field(default_factory=SentUpdate)
    mean: Products = field(default_factory=list)
    dense: Tensor = NOTHING
    flags: Flags = field(default_factory=Flags)
    largest: list[float] = field(default_factory=list)
    largest_bits: Int32[Tensor, "1"] | None = None


def _result(layout: MatrixLayout, step: _Step) -> DenseResult:
    """The result of a step whose mean is in the bucket."""
    bucket, flags = layout.bucket, step.flags
    R = max((U.shape[1] for U, _ in step.mean), default=1)

    def in_range(largest: float) -> bool:
        """Whether no element can overflow: it is a sum of R products with one factor of at most 1."""
        return R * largest < torch.finfo(bucket.dtype).max  # False for NaN

    def message(nonfinite: Sequence[int]) -> str | None:
        return first_nonfinite_message(bucket, map(layout.number_of, nonfinite)) if any(nonfinite) else None

    if flags.values is not None:
        return DenseResult(message(flags.values), is_finite=all(map(in_range, step.largest)))

    bits = () if step.largest_bits is None else (step.largest_bits,)
    words = count_of(flags.numbers)

    def explain(numbers: list[int]) -> str | None:
        largest = [*step.largest, *(unpack("f", pack("i", number))[0] for number in numbers[words:])]
        reason = message(flags.check(numbers[:words]))
        return reason if reason is not None or all(map(in_range, largest)) else overflow_message(bucket)

    return DenseResult(is_finite=True, reports=(Report(flags.numbers + bits, explain),))


@checked
class PowerSGDCompressor(Compressor):
    """PowerSGD with error feedback (Vogels et al. 2019, arXiv 1905.13727; 2020, arXiv 2008.01425, Algorithm 2).

    Args:
        rank (int): rank r of the factors.
        min_compression_rate (float): send a tensor uncompressed unless compression saves more; 0: always compress.
        num_iters_per_step (int): half steps per step, K, in mode "residual". With 1 a step sends one of the two
            factors; with 2 both, as in the paper: errors wait less long, and momentum makes fewer runs unstable.
        mode (str): "residual", "paper" or "square", as in the module's description.
        warm_start (bool): begin with the factors of the last step. False: with random factors.
        error_feedback (bool): keep what a step does not send and add it to the next gradient.
        epsilon (float), orthogonalization (str): see `dgc.lowrank.matrices.orthonormalize`.
        start_compressing_after_num_steps (int): uncompressed steps at the start (100 in the reference code).
        wire (str): "fp32", or "fp16" to send all numbers in 2 bytes. The residual includes the rounding errors.
        seed (int): seed of the random factors.

    Raises:
        ValueError: if an argument is out of range or does not fit the mode.

    Example:
        >>> optimizer = DistributedOptimizer(optimizer, model.named_parameters(), PowerSGDCompressor(rank=4))
    """

    unsuited: Mapping[Use, str] = {
        Use.ADAM: "loses quality with Adam in short runs, see docs/language.md#methods-on-these-tasks",
        **dict.fromkeys(
            (Use.MUON, Use.OUTER_MUON),
            "loses much with Muon, which makes all singular values alike, see docs/methods.md#muon",
        ),
    }

    fallback: Compressor = DenseCompressor()

    def __init__(
        self,
        rank: int,
        min_compression_rate: float = 2,
        num_iters_per_step: int = 1,
        mode: str = "residual",
        warm_start: bool = True,
        error_feedback: bool = True,
        epsilon: float = 1e-8,
        orthogonalization: str = "auto",
        start_compressing_after_num_steps: int = 0,
        wire: str = "fp32",
        seed: int = 0,
    ):
        check_choice(("residual", "paper", "square"), mode=mode)
        check_choice(("fp32", "fp16"), wire=wire)
        check_choice(WAYS, orthogonalization=orthogonalization)
        for name, value in (("rank", rank), ("num_iters_per_step", num_iters_per_step)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if mode != "residual" and num_iters_per_step != 1:
            raise ValueError(f"num_iters_per_step requires mode='residual'; {mode!r} sends P and Q once")
        if not 0 < epsilon < 1:
            raise ValueError(f"epsilon must lie between 0 and 1, not {epsilon}")
        if not min_compression_rate >= 0 or start_compressing_after_num_steps < 0:
            raise ValueError("min_compression_rate and start_compressing_after_num_steps must be at least 0")
        self.rank, self.min_compression_rate, self.seed = rank, min_compression_rate, seed
        self.mode, self.num_iters_per_step, self.warm_start = mode, num_iters_per_step, warm_start
        self.error_feedback, self.epsilon, self.orthogonalization = error_feedback, epsilon, orthogonalization
        self.start_compressing_after_num_steps = start = start_compressing_after_num_steps
        K, square = num_iters_per_step if mode == "residual" else 2, mode == "square"
        self._rule = CompressionRule(rank, K, min_compression_rate, square, start)
        self._wire = CastValues(wire)

    def too_small(self, bucket: Bucket) -> list[Segment]:
        dense = [bucket.segments[i] for i in self._rule.layout(bucket, self._rule.start, {}).dense]
        return [s for s in dense if len(s.shape) > 1 and min(s.shape[0], prod(s.shape[1:])) <= self.rank]

    def init(self, bucket: Bucket, size: int, rank: int) -> PowerSGDState:
        wire = self._wire
        limits = wire.limit_of_summands(size), wire.limit_of_summands(size, bucket.dtype)
        empty = PowerSGDState(
            size,
            rank,
            layout=MatrixLayout(bucket, {}),
            rule=self._rule,
            seed=self.seed,
            settings=f"PowerSGD {self.mode} {self.num_iters_per_step} {self._wire.dtype}",
            envelope=envelope_of(bucket, bucket.bounds, 1.0, ""),
            cast=Cast(wire.torch_dtype, *limits),
            keeps=self.error_feedback,
        )
        return empty.with_factors({"P": {}, "Q": {}}, zeros(bucket))

    def ratio_of(self, states: Sequence[tuple[Bucket, PowerSGDState]]) -> float:
        numel = sum(bucket.numel for bucket, _ in states)
        return sum(self._rule.floats_sent(state.layout) for _, state in states) / numel if numel else 1.0

    def floats_per_step(self, bucket: Bucket) -> float:
        """Numbers sent by a rank per compressed step of a bucket, averaged over two steps."""
        return self._rule.floats_sent(self._rule.layout(bucket, self.start_compressing_after_num_steps, {}))

    # --- one step ---------------------------------------------------------------------------------

    def repeats(self, bucket: Bucket, state: PowerSGDState) -> Repeats | None:
        h, begins = state.half_steps, state.steps <= self.start_compressing_after_num_steps
        # random factors come from the host, and so do the first ones
        if not (kernels.of(state.v).lowrank.fused and self.warm_start) or begins or state.deferred is None:
            return None
        sides = ["P"]  # of the factors that become orthonormal
        if self.mode == "residual":
            sides = ["QP"[(h + k) % 2] for k in range(self.num_iters_per_step)]
        seeds = [state.random_key(side, k) for k, side in enumerate(sides if state.layout.batches else [])]
        return Repeats((state.layout, h % 2), tuple(seeds))

    def reduce(self, bucket: Bucket, state: PowerSGDState) -> Conversation[Reduced]:
        if state.steps == self.start_compressing_after_num_steps:
            state = state.updated()
        if not self.error_feedback:
            state.v.zero_()
            state = state.changed(deferred=None)
        step, residual = _Step(), self.mode == "residual"
        P, Q = yield from (self._residual if residual else self._paper)(state, step)
        h = state.half_steps + (self.num_iters_per_step if residual and state.layout.batches else 0)
        state.layout.write(step.mean, step.dense, step.largest_bits)
        new = state.next(P=P, Q=Q, half_steps=h, deferred=step.sent)
        return Reduced(_result(state.layout, step), new, dropped=state.changed(deferred=None))

    def _residual(self, state: PowerSGDState, step: _Step) -> Conversation[tuple[Factor, Factor]]:
        factors = {"P": state.P, "Q": state.Q}
        for k in range(self.num_iters_per_step if state.layout.batches else 1):
            even = (state.half_steps + k) % 2 == 0
            source, target = ("P", "Q") if even else ("Q", "P")
            X = factors[source]
            if k == 0 and not self.warm_start:
                X = tuple(state.random_factor(batch, source, -1) for batch in state.layout.batches)
                X = self._orthonormal(state, step, X, source)
            elif state.half_steps + k == 0 and self.orthogonalization == "authors":
                X = self._orthonormal(state, step, X, source)  # the first factors are of norm 1 each
            Y = yield from self._half_step(state, step, X, even, first=k == 0)
            factors[target] = self._orthonormal(state, step, Y, target, k)
        return factors["P"], factors["Q"]

    def _paper(self, state: PowerSGDState, step: _Step) -> Conversation[tuple[Factor, Factor]]:
        Q = state.Q
        if not self.warm_start:
            Q = tuple(state.random_factor(batch, "Q", -1) for batch in state.layout.batches)
        P = yield from self._half_step(state, step, Q, even=False, first=True, subtract=False)
        if state.layout.batches:
            P = self._orthonormal(state, step, P, "P")
            Q = yield from self._half_step(state, step, P, even=True, first=False)
        return P, Q

    def _half_step(
        self, state: PowerSGDState, step: _Step, X: Factor, even: bool, first: bool, subtract: bool = True
    ) -> Conversation[Factor]:
        """Returns the mean of Y = M^T X over the ranks if even, else of Y = M X. first: read the gradients; send
        the uncompressed tensors and a flag too. subtract: X and Y join the update.
        """
        layout, bucket = state.layout, state.layout.bucket
        lowrank, work = kernels.of(state.v).lowrank, (X, even, state.cast)
        if first:
            message = lowrank.begin_(state.v, layout.batches, state.deferred, layout.gradients(), *work)
            bucket.release()
            step.sent.rounding_errors, step.largest_bits = message.rounding_errors, message.largest
            assert message.first_nonfinite is not None
            mean, step.flags = yield from state.envelope.reduce(message.numbers, message.first_nonfinite)
        else:
            # M is v without what this step has sent so far
            message = lowrank.project(state.v, layout.batches, step.sent.products, *work)
            (mean,) = yield (AllReduce(message.numbers),)
        mean, side = mean.float(), "Q" if even else "P"
        numel = sum(layout.shapes[side][1])
        Y_mean = layout.factors(mean[:numel], side)
        if first:
            step.dense = mean[numel:]
        if step.largest_bits is None:
            step.largest.append(float(torch.linalg.vector_norm(mean, torch.inf)) if mean.numel() else 0.0)
        if subtract:
            append_(step.sent.products, X, tuple(message.Y), even)
            append_(step.mean, X, Y_mean, even)
        return Y_mean

    def _orthonormal(self, state: PowerSGDState, step: _Step, Y: Factor, side: str, k: int = 0) -> Factor:
        """Orthonormal rows with the span of Y. k: the half step, which determines the random rows."""
        if not all(map(isfinite, step.largest)):  # the result reports it; no rank may fail here
            Y = tuple(y.nan_to_num(0.0, 0.0, 0.0) for y in Y)

        def noise(b: int) -> Tensor:
            return state.random_factor(state.layout.batches[b], side, k)

        key = state.random_key(side, k) if kernels.of(state.v).lowrank.fused else 0
        return tuple(orthonormalize(Y, self.orthogonalization, self.epsilon, noise, key))
