"""fp32 state that lies flat beside each bucket and is saved under parameter names."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

import dgc.kernels as kernels
from dgc.bucket import Bucket
from dgc.kernels import Selection, Taken


class FlatState:
    """One fp32 tensor per bucket. Saved per parameter, so that other buckets can load it."""

    def __init__(self, what: str):
        self._what = what
        self._flat: dict[str, tuple[Bucket, Tensor]] = {}

    def add(self, bucket: Bucket) -> None:
        self._flat[bucket.name] = (bucket, torch.zeros(bucket.numel, device=bucket.device))

    def __getitem__(self, bucket: Bucket) -> Tensor:
        return self._flat[bucket.name][1]

    def replace(self, bucket: Bucket, tensor: Tensor) -> None:
        """Let `tensor` [n] fp32 be the bucket's state from now on."""
        self._flat[bucket.name] = (bucket, tensor)

    def __iter__(self) -> Iterator[Tensor]:
        return (flat for _, flat in self._flat.values())

    def state_dict(self) -> dict[str, Tensor]:
        return {s.name: s.of(flat).clone() for bucket, flat in self._flat.values() for s in bucket.segments}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        own = {s.name: s.of(flat) for bucket, flat in self._flat.values() for s in bucket.segments}
        if own.keys() != state.keys():
            missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
            raise ValueError(f"{self._what} of another model: missing {missing}, unknown {unknown}")
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise ValueError(
                    f"{self._what} of {name} has shape {tuple(state[name].shape)}, not {tuple(tensor.shape)}"
                )
        for name, tensor in own.items():
            tensor.copy_(state[name])


class Undo:
    """What a step took from some states, so that a dropped step can be taken back bit for bit.

    Holds the elements that were sent (as many as were sent), or for a whole bucket its old tensor.
    """

    def __init__(self) -> None:
        self._elements: dict[str, tuple[Selection, Taken, Tensor | None, Tensor]] = {}
        self._whole: dict[str, tuple[FlatState, Tensor]] = {}

    def forget(self, bucket: Bucket) -> None:
        """The bucket's last step is known to be good."""
        self._elements.pop(bucket.name, None)
        self._whole.pop(bucket.name, None)

    def take(self, bucket: Bucket, sent: Selection, momentum: Tensor | None, velocity: Tensor) -> None:
        """velocity[i] -= value and, unless it is None, momentum[i] = 0, for every element sent."""
        taken = kernels.of(velocity).take_(sent, sent.values, momentum, velocity)
        self._elements[bucket.name] = (sent, taken, momentum, velocity)

    def subtract(self, state: FlatState, bucket: Bucket, values: Tensor) -> None:
        """state -= values, in a new tensor: the old one stays as it is."""
        self.replace(state, bucket, state[bucket] - values)

    def replace(self, state: FlatState, bucket: Bucket, tensor: Tensor) -> None:
        """Let `tensor` be the state; the old one stays as it is."""
        self._whole[bucket.name] = (state, state[bucket])
        state.replace(bucket, tensor)

    def take_back(self, bucket: Bucket) -> None:
        if bucket.name in self._elements:
            selection, taken, momentum, velocity = self._elements.pop(bucket.name)
            kernels.of(velocity).put_back_(selection, taken, momentum, velocity)
        if bucket.name in self._whole:
            state, whole = self._whole.pop(bucket.name)
            state.replace(bucket, whole)


def load_parts(parts: Mapping[str, FlatState], state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Load the states that a memory consists of."""
    if parts.keys() != state.keys():
        raise ValueError(f"state of another memory: it has {sorted(state)}, not {sorted(parts)}")
    for name, part in parts.items():
        part.load_state_dict(state[name])
