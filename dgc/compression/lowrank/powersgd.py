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

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor

from dgc.arguments import checked
from dgc.bucket import Bucket, Segment
from dgc.comm.requests import AllReduce, Conversation
from dgc.compression.dense import DenseCompressor
from dgc.compression.envelope import Envelope, envelope_of
from dgc.compression.finite import first_nonfinite_message, overflow
from dgc.compression.lowrank.accordion import Accordion
from dgc.compression.lowrank.matrices import (
    CompressionRule,
    Factor,
    Layout,
    Products,
    append_,
    factor_views,
    square_norms,
)
from dgc.compression.lowrank.orthogonal import check_orthogonalization, orthonormalize_each
from dgc.compression.lowrank.state import BucketState, Factors, SentProducts, empty_checkpoint, load_errors
from dgc.compression.protocol import Compressor, DenseResult, Result
from dgc.memory.protocol import MomentumCorrection
from dgc.memory.state import largest_count
from dgc.wire import CastValues

MODES = ("residual", "paper", "square")


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
        mode (str): "residual", "paper" or "square", as above.
        warm_start (bool): begin with the factors of the last step. False: with random factors.
        error_feedback (bool): keep what a step does not send and add it to the next gradient.
        epsilon (float), orthogonalization (str): see `dgc.compression.lowrank.orthogonal`.
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
