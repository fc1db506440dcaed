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
data. In both cases, updates plus errors equal the sum of all gradients. Undetermined directions are random.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite, prod
from typing import Any
from zlib import crc32

import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.arguments import checked
from dgc.bucket import Bucket, Segment
from dgc.comm.requests import AllReduce, Conversation
from dgc.compression.dense import DenseCompressor
from dgc.compression.envelope import Envelope, envelope_of, first_nonfinite_message, overflow
from dgc.compression.matrices import (
    Accordion,
    Batch,
    CompressionRule,
    Factor,
    Layout,
    Products,
    append_,
    check_orthogonalization,
    factor_views,
    orthonormalize,
    orthonormalize_each,
    square_norms,
)
from dgc.compression.protocol import Compressor, DenseResult, Result
from dgc.memory import MomentumCorrection
from dgc.state import FlatState, check_mapping, check_tensor, largest_count, parts_of
from dgc.wire import CastValues

MODES = ("residual", "paper", "square")
SIDES, COUNTS = ("P", "Q"), ("half_steps", "steps")


@dataclass(frozen=True, eq=False)
class Factors:
    """State that is the same on every rank.

    P [B, r, n] and Q [B, r, m] by batch. sums [B, 2] by batch: the sum of the squared norms of the applied
    gradients since Accordion's last choice, and the number of steps. half_steps: h. steps: number of steps so far.
    """

    P: Factor
    Q: Factor
    sums: tuple[Float64[Tensor, "_ 2"], ...]
    half_steps: int
    steps: int


@dataclass(eq=False)
class SentProducts:
    """The sent update: U and W by batch, and the uncompressed tensors except for their `rounding_errors` [D].

    It stays in v until the next step subtracts it in its pass over memory. A dropped step has nothing to restore.
    """

    products: Products = field(default_factory=list)
    rounding_errors: Float32[Tensor, "D"] = field(default_factory=lambda: torch.empty(0, dtype=torch.float32))


class BucketState:
    """State of this rank for one bucket.

    Args:
        layout (Layout): the positions of the tensors in v.
        seed (int): seed of random factors.
        saved (dict, optional): checkpoint to continue from. Factors and rows of factors that it does not have are
            random. Excess rows are dropped.
        error (Tensor, optional): [n], in the order of the bucket; default zero.

    Raises:
        ValueError: if a saved factor has another length.
    """

    def __init__(
        self,
        layout: Layout,
        seed: int,
        saved: Mapping[str, Any] | None = None,
        error: Float32[Tensor, "n"] | None = None,
    ):
        self.layout, self.seed, device = layout, seed, layout.bucket.device
        saved = saved or empty_checkpoint()
        self.v = torch.zeros(layout.numel, dtype=torch.float32, device=device)  # gradient + error of the last step
        if error is not None:
            for i, s in enumerate(layout.segments):
                layout.part_of(self.v, i).copy_(s.of(error))
        P, Q = (tuple(self._restored(saved[side], batch, side) for batch in layout.batches) for side in SIDES)
        zeros = torch.zeros(2, dtype=torch.float64)
        sums = [[saved["sums"].get(name, zeros).to(device) for name in layout.names(b)] for b in layout.batches]
        counts = (largest_count(saved[key], layout.bucket) for key in COUNTS)
        self.factors = Factors(P, Q, tuple(map(torch.stack, sums)), *counts)
        self.deferred: SentProducts | None = None  # not yet subtracted from v
        self.previous: Factors | None = None  # before the last step, if it can be undone

    def begin_step(self, error_feedback: bool) -> None:
        """Keeps the factors for `rollback`. Without error feedback, discards the error."""
        self.previous = self.factors
        if not error_feedback:
            self.v.zero_()
            self.deferred = None

    def accumulate_(self, X: Factor, even: bool, Y: Factor) -> Int64[Tensor, ""]:
        """Subtracts the deferred update, adds the gradients, and multiplies each batch by its X into its Y.

        Returns the position in v of the first NaN or TOO_LARGE, or the length of v if there is none.
        """
        deferred, self.deferred = self.deferred, None
        layout, v = self.layout, self.v
        tier, gradients, found = kernels.of(v), layout.gradients(), []
        for b, batch in enumerate(layout.batches):
            g = [gradients[i] for i in batch.members]
            product = None if deferred is None else deferred.products[b]
            found.append(tier.lowrank.refresh_(batch.of(v), product, g, X[b], even, Y[b]))
        if layout.dense:
            dense = v[layout.begin_dense :]
            if deferred is not None:
                dense.copy_(deferred.rounding_errors)
            g = [gradients[i] for i in layout.dense]
            found.append(tier.selection.accumulate_(kernels.PassInputs(tuple(g), None, dense)))
        layout.bucket.release()
        starts, counts = layout.extents
        places = torch.stack(found)
        return torch.where(places < counts, places + starts, layout.numel).min()

    def multiply(self, sent: Products, X: Factor, even: bool, Y: Factor) -> None:
        """Multiplies M - U^T W of each batch by its X into its Y. sent: U and W of this step so far, by batch."""
        for b, batch in enumerate(self.layout.batches):
            kernels.of(self.v).lowrank.multiply(batch.of(self.v), X[b], even, Y[b])
            if sent:
                along, across = sent[b] if even else sent[b][::-1]
                Y[b].baddbmm_(X[b].bmm(along.mT), across, alpha=-1)

    def rollback(self) -> None:
        """Undoes the last step."""
        if self.previous is not None:
            self.factors, self.deferred, self.previous = self.previous, None, None

    def error(self) -> Float32[Tensor, "n"]:
        """A copy of the error after the last step, in the order of the bucket.

        It is bit for bit the value that `accumulate_` adds the gradients to. v is not changed.
        """
        layout, v = self.layout, self.v.clone()
        if self.deferred is not None:
            for batch, (U, W) in zip(layout.batches, self.deferred.products, strict=True):
                kernels.of(v).lowrank.subtract_(batch.of(v), U, W)
            v[layout.begin_dense :].copy_(self.deferred.rounding_errors)
        flat = torch.empty(layout.bucket.numel, dtype=torch.float32, device=v.device)
        for i, s in enumerate(layout.segments):
            s.of(flat).copy_(layout.part_of(v, i))
        return flat

    def pop_sums(self) -> dict[str, tuple[float, float]]:
        """Returns the sums by name and sets them to zero. The last step can then no longer be undone."""
        sums: dict[str, tuple[float, float]] = {}
        for batch, rows in zip(self.layout.batches, self.factors.sums, strict=True):
            for name, (squares, steps) in zip(self.layout.names(batch), rows.tolist(), strict=True):
                sums[name] = squares, steps
        self.factors = replace(self.factors, sums=tuple(map(torch.zeros_like, self.factors.sums)))
        self.previous = None
        return sums

    def random(self, side: str) -> Factor:
        """Random factors to begin a step with."""
        return tuple(self.random_factor(batch, side, -1) for batch in self.layout.batches)

    def random_factor(self, batch: Batch, side: str, k: int) -> Float32[Tensor, "B r d"]:
        """Random factors of a batch for the k-th half step of this step, the same on all ranks."""
        _, r, length = batch.factor_shape(side)
        keys = [f"{name} {side} {self.factors.steps} {k}" for name in self.layout.names(batch)]
        return self._stack(batch, side, [draw(self.seed, key, r, length) for key in keys])

    def updated(self, rule: CompressionRule) -> "BucketState":
        """This state, or a new one if `rule` now compresses other tensors or chooses other ranks."""
        layout, saved = rule.layout(self.layout.bucket, self.factors.steps), empty_checkpoint()
        if layout.batches == self.layout.batches:
            return self
        self.save(saved, with_error=False)
        return BucketState(layout, self.seed, saved, self.error())

    def save(self, saved: dict[str, Any], with_error: bool) -> None:
        """Adds this bucket to a checkpoint."""
        layout, factors = self.layout, self.factors
        if with_error:
            saved["errors"] |= parts_of(layout.bucket, self.error())
        for batch, P, Q, sums in zip(layout.batches, factors.P, factors.Q, factors.sums, strict=True):
            rows = (P, layout.permute_columns(batch, list(Q), to_memory=False), sums)
            for name, p, q, pair in zip(layout.names(batch), *rows, strict=True):
                saved["P"][name], saved["Q"][name] = p.T.contiguous(), q.T.contiguous()
                saved["sums"][name] = pair.clone()
        for key in COUNTS:
            saved[key] |= dict.fromkeys((s.name for s in layout.segments), getattr(factors, key))

    def _restored(self, saved: Mapping[str, Tensor], batch: Batch, side: str) -> Float32[Tensor, "B r d"]:
        """The factors of a batch from those of a checkpoint."""
        _, r, length = batch.factor_shape(side)
        names = self.layout.names(batch)
        factors = [resize(saved.get(name), r, length, self.seed, f"{name} {side}") for name in names]
        return self._stack(batch, side, [factor.to(self.v.device) for factor in factors])

    def _stack(self, batch: Batch, side: str, factors: list[Tensor]) -> Float32[Tensor, "B r d"]:
        """Stacks the factors of a batch, each in the order of the shape."""
        if side == "Q":
            factors = self.layout.permute_columns(batch, factors, to_memory=True)
        return torch.stack(factors).to(self.v.device)


def draw(seed: int, key: str, r: int, length: int) -> Float32[Tensor, "r length"]:
    """Random numbers that depend on seed and key alone, so that they are the same on all ranks."""
    generator = torch.Generator().manual_seed(crc32(f"{seed} {key}".encode()))
    return torch.randn(r, length, generator=generator, dtype=torch.float32)


def resize(saved: Tensor | None, r: int, length: int, seed: int, key: str) -> Float32[Tensor, "r length"]:
    """A factor of rank r from `saved` [length, old r] or None. Raises ValueError if it has another length."""
    if saved is None:
        return orthonormalize(draw(seed, key, r, length)[None])[0]
    if saved.shape[0] != length:
        raise ValueError(f"{key} has shape {tuple(saved.shape)}, not ({length}, rank)")
    if saved.shape[1] >= r:
        return saved[:, :r].T
    rows = torch.cat([saved.T.cpu(), draw(seed, key, r, length)[saved.shape[1] :]])
    return orthonormalize(rows[None])[0]


def empty_checkpoint() -> dict[str, Any]:
    """A checkpoint without tensors. Checkpoints hold the state by tensor name, for any division into buckets.

    They have these keys:

        errors                 by name, in the shape of the tensor
        P, Q                   by name, [n, r] and [m, r], with rows in the order of the shape
        sums                   by name, [2]
        half_steps, steps      by name, numbers; older ones have one number for all
        accordion              state of `Accordion`, or empty
    """
    return {"errors": {}, "P": {}, "Q": {}, "sums": {}, "half_steps": {}, "steps": {}, "accordion": {}}


def load_errors(saved: Mapping[str, Any], buckets: Sequence[Bucket], error_feedback: bool) -> FlatState:
    """Checks a checkpoint and returns the error of each bucket, zero without error_feedback.

    Raises:
        ValueError: if it is of another compressor or model, or if a tensor has a wrong shape, type or NaN.
    """
    if saved.keys() != empty_checkpoint().keys():
        raise ValueError(f"state of another compressor: {sorted(saved)}")
    for key in (*SIDES, "sums", "accordion"):
        check_mapping(key, saved[key])
    for side in SIDES:
        for name, factor in saved[side].items():
            check_tensor(f"{side} of {name}", factor)
            if factor.dim() != 2:
                raise ValueError(f"{side} of {name} has shape {tuple(factor.shape)}, not that of a matrix")
    for key in COUNTS:
        if not isinstance(saved[key], Mapping | int):
            raise ValueError(f"{key} must have a number for each parameter, not {saved[key]!r}")
    for name, pair in saved["sums"].items():
        check_tensor(f"sums of {name}", pair, (2,), torch.float64)
    errors = FlatState("error")
    for bucket in buckets:
        errors.add(bucket)
    if error_feedback:
        errors.load_state_dict(saved["errors"])
    return errors


@dataclass(eq=False)
class _Step:
    """Intermediate values of one step of a bucket.

    sent: this rank's update. mean: U and W of the mean update, by batch. nonfinite: message for NaN or inf in a
    gradient. largest: largest magnitude in the reply to each half step.
    """

    sent: SentProducts = field(default_factory=SentProducts)
    mean: Products = field(default_factory=list)
    nonfinite: str | None = None
    largest: list[float] = field(default_factory=list)


@checked
class PowerSGDCompressor:
    """PowerSGD with error feedback (Vogels et al. 2019, arXiv 1905.13727; 2020, arXiv 2008.01425, Algorithm 2).

    Args:
        rank (int): rank r of the factors.
        min_compression_rate (float): send a tensor uncompressed unless compression saves more; 0: always compress.
        num_iters_per_step (int): half steps per step, K, in mode "residual". With 1 a step sends one of the two
            factors; with 2 both, as in the paper: errors wait less long, and momentum makes fewer runs unstable.
        mode (str): "residual", "paper" or "square", as in the module's description.
        warm_start (bool): begin with the factors of the last step. False: with random factors.
        error_feedback (bool): keep what a step does not send and add it to the next gradient.
        epsilon (float), orthogonalization (str): see `dgc.compression.matrices.orthonormalize`.
        start_compressing_after_num_steps (int): uncompressed steps at the start (100 in the reference code).
        wire (str): "fp32", or "fp16" to send all numbers in 2 bytes. The residual includes the rounding errors.
        high_rank (int, optional): adapt the rank from `rank` to this; see `Accordion`. Needs begin_epoch.
        rank_change (float), rank_every (int): for high_rank, relative change of the norm, and interval in epochs.
        seed (int): seed of the random factors.

    Raises:
        ValueError: if an argument is out of range or does not fit the mode.

    Example:
        >>> optimizer = DistributedOptimizer(optimizer, model.named_parameters(), PowerSGDCompressor(rank=4))
    """

    correction: MomentumCorrection | None = None
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
        high_rank: int | None = None,
        rank_change: float = 0.5,
        rank_every: int = 1,
        seed: int = 0,
    ):
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        if num_iters_per_step < 1:
            raise ValueError(f"num_iters_per_step must be at least 1, not {num_iters_per_step}")
        if mode != "residual" and num_iters_per_step != 1:
            raise ValueError(f"num_iters_per_step requires mode='residual'; {mode!r} sends P and Q once")
        if wire not in ("fp32", "fp16"):
            raise ValueError(f"wire must be 'fp32' or 'fp16', not {wire!r}")
        if high_rank is not None and mode == "square":
            raise ValueError("high_rank is chosen for each tensor, and mode='square' has one matrix for all")
        check_orthogonalization(orthogonalization, epsilon)
        if rank < 1:
            raise ValueError(f"rank must be at least 1, not {rank}")
        if not min_compression_rate >= 0 or start_compressing_after_num_steps < 0:
            raise ValueError("min_compression_rate and start_compressing_after_num_steps must be at least 0")
        self.rank, self.min_compression_rate, self.seed = rank, min_compression_rate, seed
        self.mode, self.num_iters_per_step, self.warm_start = mode, num_iters_per_step, warm_start
        self.error_feedback, self.epsilon, self.orthogonalization = error_feedback, epsilon, orthogonalization
        self.start_compressing_after_num_steps = start = start_compressing_after_num_steps
        self._accordion = None if high_rank is None else Accordion(rank, high_rank, rank_change, rank_every)
        K, square = num_iters_per_step if mode == "residual" else 2, mode == "square"
        self._rule = CompressionRule(rank, K, min_compression_rate, square, start, self._accordion)
        self._wire = CastValues(wire)
        self._states: dict[str, BucketState] = {}
        self._size = 1

    def reduce(self, bucket: Bucket) -> Conversation[Result]:
        state = self._states[bucket.name]
        if state.factors.steps == self.start_compressing_after_num_steps:
            state = self._states[bucket.name] = state.updated(self._rule)
        step, old, residual = _Step(), state.factors, self.mode == "residual"
        state.begin_step(self.error_feedback)
        P, Q = yield from (self._residual if residual else self._paper)(state, step)
        sums = old.sums
        if self._accordion is not None:
            sums = tuple(s + square_norms(U, W) for s, (U, W) in zip(sums, step.mean, strict=True))
        h = old.half_steps + (self.num_iters_per_step if residual and state.layout.batches else 0)
        state.factors, state.deferred = Factors(P, Q, sums, h, old.steps + 1), step.sent
        for b, (U, W) in enumerate(step.mean):
            state.layout.write_product(b, U, W)
        # An element is a sum of R products with one factor of at most 1. This bound usually avoids the search.
        R = max((U.shape[1] for U, _ in step.mean), default=1)
        in_range = all(R * largest < torch.finfo(bucket.dtype).max for largest in step.largest)
        message = None if in_range else (yield from overflow(bucket))
        return DenseResult(step.nonfinite or message)

    def _residual(self, state: BucketState, step: _Step) -> Conversation[tuple[Factor, Factor]]:
        factors = {"P": state.factors.P, "Q": state.factors.Q}
        for k in range(self.num_iters_per_step if state.layout.batches else 1):
            even = (state.factors.half_steps + k) % 2 == 0
            source, target = ("P", "Q") if even else ("Q", "P")
            X = factors[source]
            if k == 0 and not self.warm_start:
                X = self._orthonormal(state, step, state.random(source), source)
            elif state.factors.half_steps + k == 0 and self.orthogonalization == "authors":
                X = self._orthonormal(state, step, X, source)  # the first factors are of norm 1 each
            Y = yield from self._half_step(state, step, X, even, first=k == 0)
            factors[target] = self._orthonormal(state, step, Y, target, k)
        return factors["P"], factors["Q"]

    def _paper(self, state: BucketState, step: _Step) -> Conversation[tuple[Factor, Factor]]:
        Q = state.factors.Q if self.warm_start else state.random("Q")
        P = yield from self._half_step(state, step, Q, even=False, first=True, subtract=False)
        if state.layout.batches:
            P = self._orthonormal(state, step, P, "P")
            Q = yield from self._half_step(state, step, P, even=True, first=False)
        return P, Q

    def _half_step(
        self, state: BucketState, step: _Step, X: Factor, even: bool, first: bool, subtract: bool = True
    ) -> Conversation[Factor]:
        """Returns the mean of Y = M^T X over the ranks if even, else of Y = M X.

        first: read the gradients; send the uncompressed tensors and a flag too. subtract: X and Y join the update.
        """
        layout, bucket = state.layout, state.layout.bucket
        shapes = [batch.factor_shape("Q" if even else "P") for batch in layout.batches]
        flat = torch.empty(sum(map(prod, shapes)), dtype=torch.float32, device=bucket.device)
        Y = factor_views(flat, shapes)
        dense = []
        if first:
            position = state.accumulate_(X, even, Y)
            own = state.v[layout.begin_dense :]
            dense = [self._wire.quantize(own, self._size, bucket.dtype)]
            step.sent.rounding_errors = own - dense[0]
        else:
            state.multiply(step.sent.products, X, even, Y)
        wire = self._wire.quantize(flat, self._size)
        message = torch.cat([wire, *dense])  # a copy, because the transport owns the message
        if first:
            mean, nonfinite = yield from self._envelope(layout).reduce(message, position)
            step.nonfinite = first_nonfinite_message(bucket, map(layout.number_of, nonfinite))
        else:
            (mean,) = yield (AllReduce(message),)
        mean = mean.float()
        Y_mean = factor_views(mean[: flat.numel()], shapes)
        if first:
            layout.write_dense(mean[flat.numel() :])
        if mean.numel():
            step.largest.append(float(mean.abs().max()))
        if subtract:
            append_(step.sent.products, X, Y if wire is flat else factor_views(wire.float(), shapes), even)
            append_(step.mean, X, Y_mean, even)
        return Y_mean

    def _envelope(self, layout: Layout) -> Envelope:
        settings = f"PowerSGD {self.mode} {self.num_iters_per_step} {self._wire.dtype}"
        ratio = self._rule.floats_sent(layout) / max(1, layout.bucket.numel)
        return envelope_of(layout.bucket, layout.bounds, ratio, settings)

    def _orthonormal(self, state: BucketState, step: _Step, Y: Factor, side: str, k: int = 0) -> Factor:
        """Orthonormal rows with the span of Y. k: the half step, which determines the random rows."""
        if not all(map(isfinite, step.largest)):  # the result reports it; no rank may fail here
            Y = tuple(y.nan_to_num(0.0, 0.0, 0.0) for y in Y)
        noises = [partial(state.random_factor, batch, side, k) for batch in state.layout.batches]
        return tuple(orthonormalize_each(Y, self.orthogonalization, self.epsilon, noises))

    def rollback(self, bucket: Bucket) -> None:
        self._states[bucket.name].rollback()

    def accepts(self, segment: Segment) -> bool:
        return True

    def plan(self, bucket: Bucket, size: int, rank: int) -> None:
        self._size = size
        self._states[bucket.name] = BucketState(self._rule.layout(bucket, 0), self.seed)

    def begin_epoch(self, epoch: int) -> None:
        if self._accordion is not None and self._accordion.ends_interval(epoch):
            for name, state in self._states.items():
                self._accordion.choose(state.pop_sums())
                self._states[name] = state.updated(self._rule)

    @property
    def compress_ratio(self) -> float:
        layouts = [state.layout for state in self._states.values()]
        numel = sum(layout.bucket.numel for layout in layouts)
        return sum(map(self._rule.floats_sent, layouts)) / numel if numel else 1.0

    def floats_per_step(self, bucket: Bucket) -> float:
        """Numbers sent by a rank per compressed step of a bucket, averaged over two steps."""
        return self._rule.floats_sent(self._rule.layout(bucket, self.start_compressing_after_num_steps))

    def errors(self) -> Iterator[Tensor]:
        """Copies of the errors, in the order of the buckets."""
        return (state.error() for state in self._states.values() if self.error_feedback)

    def state_dict(self) -> dict[str, Any]:
        saved = empty_checkpoint()
        for state in self._states.values():
            state.save(saved, self.error_feedback)
        if self._accordion is not None:
            saved["accordion"] = self._accordion.state_dict()
        return saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        buckets = [own.layout.bucket for own in self._states.values()]
        errors = load_errors(state, buckets, self.error_feedback)
        if bool(state["accordion"]) != (self._accordion is not None):
            raise ValueError("state of a compressor with another high_rank: one of the two has none")
        if self._accordion is not None:
            self._accordion.load_state_dict(state["accordion"])
        for bucket in buckets:
            layout = self._rule.layout(bucket, largest_count(state["steps"], bucket))
            self._states[bucket.name] = BucketState(layout, self.seed, state, errors[bucket])
