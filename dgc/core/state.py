"""The state of a method: what it keeps of one bucket on one rank, and its form in a checkpoint.

A checkpoint holds tables by the name of a parameter. It can therefore be loaded with other buckets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from dgc.core.arguments import WHOLE, require
from dgc.core.bucket import Bucket

S = TypeVar("S", bound="State")
Tables = dict[str, dict[str, Any]]  # name of a table -> name of a parameter -> value
LARGEST = 2.0**96  # magnitude of an element of a state: 2**32 times the largest gradient (TOO_LARGE)


@dataclass(eq=False)
class State:
    """What a method keeps of one bucket. Methods that keep more have a subclass.

    A step returns a new state. Of the state that it was given it changes nothing, but it may add the gradient to a
    tensor in place, because that holds in a dropped step as well.

    Attributes:
        size: Number of ranks that average the bucket.
        rank: This one of them.
        steps: Number of steps so far.
        errors: What is not sent yet, fp32 [numel], by name of the table.
        local: Further tensors of this rank, such as momentum, fp32 [numel], by name of the table.
        constants: What the method has computed once from the layout of the bucket. It is not saved.
        scratch: Memory that the next step overwrites, by use. It avoids an allocation in each step and is not
            saved. It may contain tensors of the previous state: only a dropped step would have restored them.
        dense: Whether the last step sent all elements, if the method decides that in each step; else None.
        partial: Tables that need not have all parameters.
        common: The partial tables that have the same parameters on all ranks.
    """

    size: int
    rank: int
    steps: int = 0
    errors: dict[str, Tensor] = field(default_factory=dict)
    local: dict[str, Tensor] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    scratch: dict[str, Tensor] = field(default_factory=dict)
    dense: bool | None = None
    partial: tuple[str, ...] = ()
    common: tuple[str, ...] = ()
    counters: ClassVar[tuple[str, ...]] = ("steps",)  # numbers that steps increase

    def next(self: S, **changes: Any) -> S:
        """Return the state after one more step, with these attributes changed."""
        return self.changed(steps=self.steps + 1, **changes)

    def changed(self: S, **changes: Any) -> S:
        """Return the state with these attributes changed. `dataclasses.replace` takes ten times as long."""
        state = object.__new__(type(self))
        state.__dict__.update(self.__dict__, **changes)
        return state

    def moving(self) -> list[Tensor]:
        """Return the tensors that a step changes or replaces, in an order that depends on nothing else."""
        return [*self.errors.values(), *self.local.values(), *self.scratch.values()]

    def hidden(self) -> dict[str, Tensor]:
        """Return a mapping in which a step replaces tensors, though it changes nothing else of its state."""
        return {}

    def counted_from(self: S, given: "State", before: "State") -> S:
        """Return the state with its counters increased by the difference from `before` to `given`."""
        steps = {name: getattr(given, name) - getattr(before, name) for name in self.counters}
        return self.changed(**{name: getattr(self, name) + n for name, n in steps.items()})

    def unsent(self, bucket: Bucket) -> list[Tensor]:
        """Return tensors [numel], read-only. Their sum is what is not sent."""
        return list(self.errors.values())

    def saved(self, bucket: Bucket) -> Tables:
        """Return copies for a checkpoint."""
        vectors = {**self.local, **self.errors}
        return {
            **{table: parts_of(bucket, vector) for table, vector in vectors.items()},
            "steps": {s.name: self.steps for s in bucket.segments},
        }

    def loaded(self: S, bucket: Bucket, tables: Tables) -> S:
        """Return the state that a checkpoint has, or raise ValueError, which names the table and the parameter."""
        local, errors = (
            {table: flat_from(table, bucket, tables[table]) for table in vectors}
            for vectors in (self.local, self.errors)
        )
        return replace(self, steps=largest_count(tables["steps"], bucket), local=local, errors=errors)


def zeros(bucket: Bucket) -> Tensor:
    """A vector [numel] of a bucket's state."""
    return torch.zeros(bucket.numel, dtype=torch.float32, device=bucket.device)


def parts_of(bucket: Bucket, flat: Tensor) -> dict[str, Tensor]:
    """Return copies of the bucket's segments by parameter name."""
    return {s.name: s.of(flat).clone() for s in bucket.segments}


def flat_from(what: str, bucket: Bucket, parts: Mapping[str, Any]) -> Tensor:
    """Return the vector of which these are the `parts_of`. Raises ValueError as `check_tensor`."""
    flat = zeros(bucket)
    for s in bucket.segments:
        check_tensor(f"{what} of {s.name}", parts[s.name], s.shape)
        s.of(flat).copy_(parts[s.name].detach())
    return flat


def largest_count(counts: Mapping[str, int], bucket: Bucket) -> int:
    """The largest count of the bucket's parameters, 0 without any: other buckets may have had other steps."""
    own = {s.name: counts.get(s.name, 0) for s in bucket.segments}
    for name, count in own.items():
        check_count(f"steps of {name}", count)
    return max(own.values(), default=0)


def with_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a state, or any part of one, with each of its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: with_tensors(change, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(with_tensors(change, item) for item in value)
    return value


def check_mapping(what: str, saved: Any) -> None:
    """Raise ValueError, with `what`, if a part of a state is not a mapping."""
    require("a mapping", (Mapping,), **{what: saved})


def check_count(what: str, saved: Any) -> None:
    """Raise ValueError, with `what`, if a saved count is not a whole number from 0 to below 2**63."""
    require("a whole number of 0 or more", WHOLE, least=0, **{what: saved})
    if saved >= 2**63:
        raise ValueError(f"{what} must be below 2**63, not {saved}")


def check_tensor(
    what: str,
    saved: Any,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    least: float | None = None,
    most: float = LARGEST,
) -> None:
    """Raise ValueError, with `what`, unless `saved` is a finite tensor of this dtype, and of the shape if any.

    It must have values in memory of its own: not be on the device "meta", sparse, or a part of a sharded tensor.
    least, most: Bounds of its elements, and of their magnitudes.
    """
    if not isinstance(saved, Tensor):
        raise ValueError(f"{what} is of type {type(saved).__name__}, not a tensor")
    if saved.is_meta:
        raise ValueError(f"{what} is on the device meta and has no values")
    if saved.layout != torch.strided or saved.is_nested or hasattr(saved, "to_local"):
        raise ValueError(f"{what} is a sparse, nested or sharded tensor, not a plain one")
    if shape is not None and tuple(saved.shape) != tuple(shape):
        raise ValueError(f"{what} has shape {tuple(saved.shape)}, not {tuple(shape)}")
    if saved.dtype != dtype:
        raise ValueError(f"{what} has type {saved.dtype}, not {dtype}")
    if not bool(saved.isfinite().all()):
        raise ValueError(f"{what} has NaN or inf")
    if least is not None and bool((saved < least).any()):
        raise ValueError(f"{what} has elements below {least:g}")
    if saved.is_floating_point() and bool((saved.abs() > most).any()):
        raise ValueError(f"{what} has magnitudes above {most:g}, which no method keeps")
