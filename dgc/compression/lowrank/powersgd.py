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
elements of the other tensors) and 8 for a flag, w = 4, or 2 with wire="fp16".

Differences from the paper: The error refers to this rank's own gradient. The paper has M - P Q^T with the mean Q;
there only the mean of e over the ranks is bounded, and each e grows with the differences between the ranks' data.
In both cases, applied updates plus errors equal the sum of all gradients. Undetermined directions are random.
"""

from collections.abc import Sequence
from functools import partial
from math import isfinite, prod
from typing import Literal, get_args

import torch
from jaxtyping import Float32
from torch import Tensor

import dgc.kernels as kernels
from dgc.bucket import Bucket
from dgc.comm.requests import AllGather, AllReduce, Conversation
from dgc.compression.finite import first_blame, overflow
from dgc.compression.lowrank.accordion import Accordion
from dgc.compression.lowrank.lowrank import Batch, Taken, accumulate_
from dgc.compression.lowrank.lowrank_compressor import LowRankCompressor
from dgc.compression.lowrank.lowrank_state import Factors, Own
from dgc.compression.lowrank.orthogonal import check_orthogonalization, orthonormalize_each
from dgc.compression.protocol import DenseResult, Result
from dgc.wire import CastValues

Mode = Literal["residual", "paper", "square"]
Side = Literal["P", "Q"]
Factor = tuple[Tensor, ...]  # P or Q, by batch


def correct_(
    Y: Float32[Tensor, "B r y"],
    X: Float32[Tensor, "B r x"],
    U: Float32[Tensor, "B R n"],
    W: Float32[Tensor, "B R m"],
    even: bool,
) -> None:
    """Corrects Y for U W^T, which is not yet subtracted from M: Y -= W (U^T X), or U (W^T X)."""
    along, across = (U, W) if even else (W, U)
    Y.baddbmm_(X.bmm(along.mT), across, alpha=-1)


class _Step:
    """Products (U, W) of one step by batch: `own` is subtracted from this rank's M, `mean` is over the ranks."""

    def __init__(self) -> None:
        self.own: list[tuple[Tensor, Tensor]] = []
        self.mean: list[tuple[Tensor, Tensor]] = []
        # rounding errors of the uncompressed tensors
        self.kept = torch.empty(0, dtype=torch.float32)
        self.numbers: list[int] = []
        self.largest: list[float] = []

    def add(self, X: Factor, Y: Factor, Y_mean: Factor, even: bool) -> None:
        for products, other in ((self.own, Y), (self.mean, Y_mean)):
            new = list(zip(X, other, strict=True) if even else zip(other, X, strict=True))
            if products:
                new = [
                    (torch.cat([a, U], 1), torch.cat([b, W], 1))
                    for (a, b), (U, W) in zip(products, new, strict=True)
                ]
            products[:] = new

    @property
    def finite(self) -> bool:
        return all(map(isfinite, self.largest))

    def square_norms(self, b: int) -> Tensor:
        """[B, 2]: the squared norm of the mean of each matrix in a batch, and 1 for the step."""
        U, W = self.mean[b]
        squares = (U.bmm(U.mT) * W.bmm(W.mT)).sum(dim=(1, 2), dtype=torch.float64)
        return torch.stack([squares, torch.ones_like(squares)], dim=1)


class PowerSGDCompressor(LowRankCompressor):
    """PowerSGD with error feedback (Vogels et al. 2019, arXiv 1905.13727; 2020, arXiv 2008.01425, Algorithm 2).

    Args:
        rank (int), seed (int): rank r of the factors; seed of the first ones.
        min_compression_rate (float): send a tensor uncompressed unless compression saves more; 0: always compress.
        mode (str): "residual", "paper" or "square". num_iters_per_step (int): half steps per step in "residual".
        warm_start (bool): begin with the factors of the last step. False: with random factors.
        error_feedback (bool): keep what a step does not send and add it to the next gradient.
        epsilon (float), orthogonalization (str): see `dgc.compression.lowrank.orthogonal`.
        start_compressing_after_num_steps (int): uncompressed steps at the start (100 in the reference code).
        wire (str): "fp32", or "fp16" to send all numbers in 2 bytes. The residual includes the rounding errors.
        high_rank (int, optional): adapt the rank from `rank` to this; see `Accordion`. Needs begin_epoch.
        rank_change (float), rank_every (int): for high_rank, relative change of the norm, and interval in epochs.

    Raises:
        ValueError: if an argument is out of range or does not fit the mode.

    Example:
        >>> optimizer = DistributedOptimizer(optimizer, model.named_parameters(), PowerSGDCompressor(rank=4))
    """

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
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, not {mode!r}")
        if num_iters_per_step < 1:
            raise ValueError(f"num_iters_per_step must be at least 1, not {num_iters_per_step}")
        if mode != "residual" and num_iters_per_step != 1:
            raise ValueError(f"num_iters_per_step belongs to mode='residual'; {mode!r} sends P and Q once")
        if wire not in ("fp32", "fp16"):
            raise ValueError(f"wire must be 'fp32' or 'fp16', not {wire!r}")
        if high_rank is not None and mode == "square":
            raise ValueError("high_rank is chosen for each tensor, and mode='square' has one matrix for all")
        check_orthogonalization(orthogonalization, epsilon)
        super().__init__(
            rank,
            num_iters_per_step if mode == "residual" else 2,
            min_compression_rate,
            mode == "square",
            start_compressing_after_num_steps,
            error_feedback,
            None if high_rank is None else Accordion(rank, high_rank, rank_change, rank_every),
            seed,
        )
        self.mode, self.warm_start, self.num_iters_per_step = mode, warm_start, num_iters_per_step
        self.epsilon, self.orthogonalization = epsilon, orthogonalization
        self._wire = CastValues(wire)

    def reduce(self, bucket: Bucket) -> Conversation[Result]:
        own = self._due(bucket)
        layout, old = own.layout, own.factors
        own.before, taken, own.taken = old, own.taken, None
        if not self.error_feedback:
            own.v.zero_()
            taken = None
        step = _Step()
        P, Q = yield from (self._residual if self.mode == "residual" else self._paper)(own, taken, step)
        sums = old.sums
        if self._accordion is not None:
            sums = tuple(s + step.square_norms(b) for b, s in enumerate(sums))
        h = old.half_steps + (self.num_iters_per_step if self.mode == "residual" and layout.batches else 0)
        own.factors = Factors(P, Q, sums, h, old.steps + 1)
        own.taken = Taken(step.own, step.kept)
        for b, (U, W) in enumerate(step.mean):
            layout.write_product(b, U, W)
        # An element is a sum of R products with one factor of at most 1. This bound usually avoids the search.
        R = max((U.shape[1] for U, _ in step.mean), default=1)
        in_range = all(R * largest < torch.finfo(bucket.dtype).max for largest in step.largest)
        return DenseResult(first_blame(bucket, step.numbers) or (None if in_range else overflow(bucket)))

    def _residual(self, own: Own, taken: Taken | None, step: _Step) -> Conversation[tuple[Factor, Factor]]:
        P, Q, h = own.factors.P, own.factors.Q, own.factors.half_steps
        for k in range(self.num_iters_per_step if own.layout.batches else 1):
            even = (h + k) % 2 == 0
            X = P if even else Q
            if k == 0 and not self.warm_start:
                X = self._orthonormal(own, self._random(own, "P" if even else "Q"), "P" if even else "Q")
            Y, Y_mean = yield from self._half_step(own, taken, step, X, even, first=k == 0)
            step.add(X, Y, Y_mean, even)
            if even:
                Q = self._orthonormal(own, Y_mean, "Q", k, step.finite)
            else:
                P = self._orthonormal(own, Y_mean, "P", k, step.finite)
        return P, Q

    def _paper(self, own: Own, taken: Taken | None, step: _Step) -> Conversation[tuple[Factor, Factor]]:
        Q = own.factors.Q if self.warm_start else self._random(own, "Q")
        _, P = yield from self._half_step(own, taken, step, Q, even=False, first=True)
        if not own.layout.batches:
            return P, Q
        P = self._orthonormal(own, P, "P", 0, step.finite)
        Q_own, Q = yield from self._half_step(own, taken, step, P, even=True, first=False)
        step.add(P, Q_own, Q, even=True)
        return P, Q

    def _half_step(
        self, own: Own, taken: Taken | None, step: _Step, X: Factor, even: bool, first: bool
    ) -> Conversation[tuple[Factor, Factor]]:
        """Returns (Y as sent by this rank, its mean over the ranks). The first half step reads the gradients."""
        layout, v = own.layout, own.v
        shapes = [(batch.count, batch.rank, batch.m if even else batch.n) for batch in layout.batches]
        flat = torch.empty(sum(map(prod, shapes)), dtype=torch.float32, device=v.device)
        Y = _views(flat, shapes)

        message, requests = [], []
        if first:
            nonfinite = accumulate_(layout, v, taken, X, even, Y)
            whole = v[layout.begin_dense :]
            message = [self._wire.quantize(whole, self._size, layout.bucket.dtype)]
            step.kept = whole - message[0]
            requests = [AllGather(nonfinite.view(1))]
        else:
            for b, batch in enumerate(layout.batches):
                kernels.of(v).lowrank.multiply(batch.of(v), X[b], even, Y[b])
                if step.own:
                    correct_(Y[b], X[b], *step.own[b], even)
        wire = self._wire.quantize(flat, self._size)
        # cat copies, because the transport owns the message
        replies = yield (AllReduce(torch.cat([wire, *message])), *requests)
        mean = replies[0].float()
        if first:
            step.numbers = [layout.number_of(int(position)) for position in torch.cat(replies[1]).tolist()]
            layout.write_dense(mean[flat.numel() :])
        if mean.numel():
            step.largest.append(float(mean.abs().max()))
        sent = Y if wire is flat else _views(wire.float(), shapes)
        return sent, _views(mean[: flat.numel()], shapes)

    def _orthonormal(self, own: Own, Y: Factor, side: Side, k: int = 0, finite: bool = True) -> Factor:
        noises = [partial(self._noise, own, batch, side, k) for batch in own.layout.batches]
        if not finite:  # the result reports it; no rank may fail here
            Y = tuple(y.nan_to_num(0.0, 0.0, 0.0) for y in Y)
        return tuple(orthonormalize_each(Y, self.orthogonalization, self.epsilon, noises))

    def _random(self, own: Own, side: Side) -> Factor:
        return tuple(self._noise(own, batch, side, -1) for batch in own.layout.batches)

    def _noise(self, own: Own, batch: Batch, side: Side, k: int) -> Float32[Tensor, "B r d"]:
        """Random factors of a batch for the k-th half step of this step, the same on all ranks."""
        length = batch.m if side == "Q" else batch.n
        keys = [f"{key} {side} {own.factors.steps} {k}" for key in own.keys(batch)]
        factors = [self._draw(key, batch.rank, length) for key in keys]
        if side == "Q":
            factors = own.in_memory_order(batch, factors)
        return torch.stack(factors).to(own.v.device)


def _views(flat: Float32[Tensor, "F"], shapes: Sequence[tuple[int, int, int]]) -> Factor:
    parts = flat.split([prod(shape) for shape in shapes])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))
