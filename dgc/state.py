"""fp32 state, one flat tensor per bucket, saved under parameter names."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import dgc.kernels as kernels
from dgc.arguments import WHOLE, require
from dgc.bucket import Bucket
from dgc.kernels import SparseVector


class FlatState:
    """One fp32 tensor per bucket. It is saved per parameter, so it can be loaded into different buckets."""

    def __init__(self, what: str):
        self._what = what
        self._flat: dict[str, tuple[Bucket, Tensor]] = {}

    def add(self, bucket: Bucket) -> None:
        self._flat[bucket.name] = (bucket, torch.zeros(bucket.numel, dtype=torch.float32, device=bucket.device))

    def __getitem__(self, bucket: Bucket) -> Tensor:
        return self._flat[bucket.name][1]

    def replace(self, bucket: Bucket, tensor: Tensor) -> None:
        """Use `tensor` [n] fp32 as the bucket's state."""
        self._flat[bucket.name] = (bucket, tensor)

    def __iter__(self) -> Iterator[Tensor]:
        return (flat for _, flat in self._flat.values())

    def items(self) -> Iterator[tuple[Bucket, Tensor]]:
        return iter(self._flat.values())

    def state_dict(self) -> dict[str, Tensor]:
        return {name: part for bucket, flat in self.items() for name, part in parts_of(bucket, flat).items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        own = {s.name: s.of(flat) for bucket, flat in self._flat.values() for s in bucket.segments}
        check_mapping(self._what, state)
        if own.keys() != state.keys():
            missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
            raise ValueError(f"{self._what} of another model: missing {missing}, unknown {unknown}")
        for name, tensor in own.items():
            check_tensor(f"{self._what} of {name}", state[name], tensor.shape)
        for name, tensor in own.items():
            tensor.copy_(state[name])


class StepCounts:
    """Number of steps of each bucket, saved per parameter: fragments of a model step at different times."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[Bucket, int]] = {}

    def __getitem__(self, bucket: Bucket) -> int:
        return self._counts[bucket.name][1]

    def __setitem__(self, bucket: Bucket, count: int) -> None:
        self._counts[bucket.name] = bucket, count

    def state_dict(self) -> dict[str, int]:
        return {s.name: count for bucket, count in self._counts.values() for s in bucket.segments}

    def load_state_dict(self, state: Any) -> None:
        names = {s.name for bucket, _ in self._counts.values() for s in bucket.segments}
        if isinstance(state, int):  # older checkpoints have one number for all parameters
            state = dict.fromkeys(names, state)
        if not isinstance(state, Mapping) or names != state.keys():
            raise ValueError(f"steps must have a number for each of {sorted(names)}, not {state!r}")
        for bucket, _ in list(self._counts.values()):
            self[bucket] = largest_count(state, bucket)


def check_mapping(what: str, saved: Any) -> None:
    """Raise ValueError if a part of a state is not a mapping. The message begins with `what`."""
    require("a mapping", (Mapping,), **{what: saved})


def check_count(what: str, saved: Any) -> None:
    """Raise ValueError if a saved count is not a whole number of 0 or more. The message begins with `what`."""
    require("a whole number of 0 or more", WHOLE, least=0, **{what: saved})


def largest_count(counts: Mapping[str, int] | int, bucket: Bucket) -> int:
    """The largest count of the bucket's parameters, 0 without any. A number counts for all parameters."""
    if isinstance(counts, int):
        return counts
    own = {s.name: counts.get(s.name, 0) for s in bucket.segments}
    for name, count in own.items():
        check_count(f"steps of {name}", count)
    return max(own.values(), default=0)


class DeferredUpdate:
    """What each bucket's last step sends, and what of other ranks' elements it keeps, until the next pass.

    v and u change only then. A dropped step therefore has nothing to restore.

    Args:
        masking: Remove the sent elements from u as well.
    """

    def __init__(self, masking: bool = False):
        self.masking = masking
        self._sent: dict[str, SparseVector] = {}
        self._returned: dict[str, SparseVector] = {}

    def keep(self, bucket: Bucket, sent: SparseVector) -> None:
        """Record the elements that the bucket has sent."""
        self._sent[bucket.name] = sent

    def keep_returned(self, bucket: Bucket, returned: SparseVector) -> None:
        """Record elements to add to v, after the sent ones are removed. Momentum is not masked for them."""
        self._returned[bucket.name] = returned

    def begin_pass_(self, bucket: Bucket, u: Tensor | None, v: Tensor) -> SparseVector | None:
        """Apply and forget the bucket's elements. Returns those that the pass itself must remove, or None."""
        if bucket.name not in self._returned:
            return self._sent.pop(bucket.name, None)  # the pass reads u and v anyway
        self.apply_(bucket, u, v)
        self.forget(bucket)
        return None

    def forget(self, bucket: Bucket) -> None:
        """Forget the bucket's elements, because they are applied or the step is dropped."""
        self._sent.pop(bucket.name, None)
        self._returned.pop(bucket.name, None)

    def clear(self) -> None:
        self._sent.clear()
        self._returned.clear()

    def apply_(self, bucket: Bucket, u: Tensor | None, v: Tensor) -> None:
        """Remove the sent elements from u and v, and add the returned ones to v. The record of them remains."""
        kernel = kernels.of(v).selection
        if bucket.name in self._sent:
            kernel.remove_sent_(self._sent[bucket.name], u if self.masking else None, v)
        if bucket.name in self._returned:
            returned = self._returned[bucket.name]
            kernel.remove_sent_(SparseVector(returned.indices, -returned.values, returned.count), None, v)

    def errors(self, velocities: FlatState) -> Iterator[Tensor]:
        """Copies of v as the next pass will find it. The state itself keeps v: the step may still be dropped."""
        for bucket, v in velocities.items():
            v = v.clone()
            self.apply_(bucket, None, v)
            yield v


class Snapshots:
    """The tensors that a step replaced, so that a dropped step can be undone bit for bit."""

    def __init__(self) -> None:
        self._whole: dict[str, tuple[FlatState, Tensor]] = {}

    def forget(self, bucket: Bucket) -> None:
        """Drop the bucket's old tensor: its last step is known to be valid."""
        self._whole.pop(bucket.name, None)

    def subtract(self, state: FlatState, bucket: Bucket, values: Tensor) -> None:
        """Compute state - values in a new tensor. The old tensor stays unchanged."""
        self.replace(state, bucket, state[bucket] - values)

    def replace(self, state: FlatState, bucket: Bucket, tensor: Tensor) -> None:
        """Use `tensor` as the state. The old tensor stays unchanged."""
        self._whole[bucket.name] = (state, state[bucket])
        state.replace(bucket, tensor)

    def rollback(self, bucket: Bucket) -> None:
        if bucket.name in self._whole:
            state, whole = self._whole.pop(bucket.name)
            state.replace(bucket, whole)


def check_tensor(
    what: str, saved: Any, shape: Sequence[int] | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Check that `saved` is a finite tensor of this dtype and shape. A `shape` of None accepts any.

    Raises:
        ValueError: It is not. The message begins with `what`.
    """
    if not isinstance(saved, Tensor):
        raise ValueError(f"{what} is of type {type(saved).__name__}, not a tensor")
    if shape is not None and tuple(saved.shape) != tuple(shape):
        raise ValueError(f"{what} has shape {tuple(saved.shape)}, not {tuple(shape)}")
    if saved.dtype != dtype:
        raise ValueError(f"{what} has type {saved.dtype}, not {dtype}")
    if not bool(saved.isfinite().all()):
        raise ValueError(f"{what} has NaN or inf")


def parts_of(bucket: Bucket, flat: Tensor) -> dict[str, Tensor]:
    """Return copies of the bucket's segments by parameter name."""
    return {s.name: s.of(flat).clone() for s in bucket.segments}


def load_parts(parts: Mapping[str, FlatState], state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Load all states of a memory, by the names of its parts."""
    check_mapping("state of a memory", state)
    if parts.keys() != state.keys():
        raise ValueError(f"state of another memory: it has {sorted(state)}, not {sorted(parts)}")
    for name, part in parts.items():
        part.load_state_dict(state[name])
