"""The state of PowerSGD for one bucket. Checkpoints hold it by tensor name, for any division into buckets.

A checkpoint is a dict with these keys:

    errors                 by name, in the shape of the tensor
    P, Q                   by name, [n, r] and [m, r], with rows in the order of the shape
    sums                   by name, [2]
    half_steps, steps      by name, numbers; older ones have one number for all
    accordion              state of `Accordion`, or empty
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.bucket import Bucket
from dgc.compression.lowrank.matrices import Batch, CompressionRule, Factor, Layout, Products
from dgc.compression.lowrank.orthogonal import orthonormalize
from dgc.memory.state import FlatState, check_tensor, largest_count, parts_of

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
    return {"errors": {}, "P": {}, "Q": {}, "sums": {}, "half_steps": {}, "steps": {}, "accordion": {}}


def load_errors(saved: Mapping[str, Any], buckets: Sequence[Bucket], error_feedback: bool) -> FlatState:
    """Checks a checkpoint and returns the error of each bucket, zero without error_feedback.

    Raises:
        ValueError: if it is of another compressor or model, or if a tensor has a wrong shape, type or NaN.
    """
    if saved.keys() != empty_checkpoint().keys():
        raise ValueError(f"state of another compressor: {sorted(saved)}")
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
