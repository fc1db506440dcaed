"""State of a low-rank method for one bucket. It is saved by tensor name, for any division into buckets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from dgc.bucket import Bucket
from dgc.compression.lowrank.lowrank import (
    Batch,
    Layout,
    Taken,
    columns_to_logical,
    columns_to_memory,
    settle_,
)
from dgc.compression.lowrank.orthogonal import orthonormalize
from dgc.memory.state import check_tensor

Draw = Callable[[str, int, int], Tensor]  # (what for, r, length) -> [r, length], the same on all ranks


@dataclass(frozen=True, eq=False)
class Factors:
    """State that is the same on every rank.

    P [B, r, n] and Q [B, r, m] by batch. sums [B, 2] by batch: the sum of the squared norms of the applied
    gradients since Accordion's last choice, and the number of steps. half_steps: h. steps: number of steps so far.
    """

    P: tuple[Float32[Tensor, "_ _ _"], ...]
    Q: tuple[Float32[Tensor, "_ _ _"], ...]
    sums: tuple[Float64[Tensor, "_ 2"], ...]
    half_steps: int = 0
    steps: int = 0


@dataclass(eq=False)
class Named:
    """The state by name, for checkpoints: errors in the tensors' shapes, P [n, r], Q [m, r] in logical order."""

    errors: dict[str, Tensor] = field(default_factory=dict)
    P: dict[str, Tensor] = field(default_factory=dict)
    Q: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    half_steps: int = 0
    steps: int = 0

    def add(self, other: "Named") -> None:
        for mine, theirs in (
            (self.errors, other.errors),
            (self.P, other.P),
            (self.Q, other.Q),
            (self.sums, other.sums),
        ):
            mine.update(theirs)
        self.half_steps, self.steps = other.half_steps, other.steps


@dataclass(eq=False)
class Own:
    """State of this rank for one bucket.

    v: gradient + error of the last step. taken: the part that the step sent. before: factors before the step.
    """

    layout: Layout
    v: Float32[Tensor, "V"]
    factors: Factors
    taken: Taken | None = None
    before: Factors | None = None

    def rollback(self) -> None:
        """Undoes the last step."""
        if self.before is not None:
            self.factors, self.taken, self.before = self.before, None, None

    def error(self) -> Float32[Tensor, "V"]:
        """The error after the last step. v is not changed, so the step can still be undone."""
        return self.v.clone() if self.taken is None else settle_(self.layout, self.taken, self.v.clone())

    def keys(self, batch: Batch) -> list[str]:
        """A name for each matrix of the batch. A square is named after the bucket's first and last tensors."""
        names = [self.layout.segments[i].name for i in batch.members]
        return [f"{names[0]}..{names[-1]}"] if self.layout.square else names

    def in_memory_order(self, batch: Batch, Q: Sequence[Float32[Tensor, "r m"]]) -> list[Tensor]:
        """Permutes the columns of factors from the shapes' order to the memory order, for products with v."""
        if self.layout.square:
            return list(Q)
        segments = [self.layout.segments[i] for i in batch.members]
        return [columns_to_memory(segment, q) for segment, q in zip(segments, Q, strict=True)]

    def named(self, with_errors: bool) -> Named:
        layout, factors = self.layout, self.factors
        named = Named(half_steps=factors.half_steps, steps=factors.steps)
        if with_errors:
            error = self.error()
            named.errors = {s.name: layout.part_of(error, i).clone() for i, s in enumerate(layout.segments)}
        for b, batch in enumerate(layout.batches):
            for j, key in enumerate(self.keys(batch)):
                Q = factors.Q[b][j]
                if not layout.square:
                    Q = columns_to_logical(layout.segments[batch.members[j]], Q)
                named.P[key], named.Q[key] = factors.P[b][j].T.contiguous(), Q.T.contiguous()
                named.sums[key] = factors.sums[b][j].clone()
        return named


def make(layout: Layout, draw: Draw, saved: Named | None = None) -> Own:
    """Creates the state of a layout.

    saved: state to continue from. Missing factors and factors of a lower rank are drawn; factors of a higher rank
    are cut.
    """
    saved = saved or Named()
    device = layout.bucket.device
    own = Own(layout, torch.zeros(layout.numel, dtype=torch.float32, device=device), Factors((), (), ()))
    if saved.errors:
        for i, s in enumerate(layout.segments):
            layout.part_of(own.v, i).copy_(saved.errors[s.name])
    P, Q, sums = [], [], []
    for batch in layout.batches:
        keys = own.keys(batch)
        P.append(
            torch.stack([_grown(saved.P.get(k), batch.rank, batch.n, draw, f"{k} P") for k in keys]).to(device)
        )
        columns = [_grown(saved.Q.get(k), batch.rank, batch.m, draw, f"{k} Q") for k in keys]
        Q.append(torch.stack(own.in_memory_order(batch, columns)).to(device))
        none = torch.zeros(2, dtype=torch.float64)
        sums.append(torch.stack([saved.sums.get(k, none).to(device) for k in keys]))
    own.factors = Factors(tuple(P), tuple(Q), tuple(sums), saved.half_steps, saved.steps)
    return own


def _grown(saved: Tensor | None, r: int, length: int, draw: Draw, what: str) -> Float32[Tensor, "r length"]:
    """A factor of rank r from `saved` [length, old r] or None. Raises ValueError if it has another length."""
    if saved is None:
        return orthonormalize(draw(what, r, length)[None])[0]
    if saved.shape[0] != length:
        raise ValueError(f"{what} has shape {tuple(saved.shape)}, not ({length}, rank)")
    if saved.shape[1] >= r:
        return saved[:, :r].T
    rows = torch.cat([saved.T.cpu(), draw(what, r, length)[saved.shape[1] :]])
    return orthonormalize(rows[None])[0]


def check_errors(named: Named, buckets: Sequence[Bucket]) -> None:
    """Raises ValueError unless there is an error for each of these tensors and for no other."""
    shapes = {s.name: s.shape for bucket in buckets for s in bucket.segments}
    if shapes.keys() != named.errors.keys():
        missing, unknown = sorted(shapes.keys() - named.errors.keys()), sorted(named.errors.keys() - shapes.keys())
        raise ValueError(f"error of another model: missing {missing}, unknown {unknown}")
    for name, shape in shapes.items():
        check_tensor(f"error of {name}", named.errors[name], shape)


def as_dict(named: Named) -> dict[str, Any]:
    return {
        "errors": named.errors,
        "P": named.P,
        "Q": named.Q,
        "sums": named.sums,
        "half_steps": named.half_steps,
        "steps": named.steps,
    }


def from_dict(state: Mapping[str, Any]) -> Named:
    """Raises ValueError for another compressor's state, and for factors that are not finite matrices."""
    names = {"errors", "P", "Q", "sums", "half_steps", "steps"}
    if state.keys() != names:
        raise ValueError(f"state of another compressor: {sorted(state)}")
    errors, P, Q, sums = (dict(state[key]) for key in ("errors", "P", "Q", "sums"))
    for side, factors in (("P", P), ("Q", Q)):
        for name, factor in factors.items():
            check_tensor(f"{side} of {name}", factor)
            if factor.dim() != 2:
                raise ValueError(f"{side} of {name} has shape {tuple(factor.shape)}, not that of a matrix")
    for name, pair in sums.items():
        check_tensor(f"sums of {name}", pair, (2,), torch.float64)
    return Named(errors, P, Q, sums, state["half_steps"], state["steps"])
