"""fp32 state that lies flat beside each bucket and is saved under parameter names."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from dgc.bucket import Bucket


class FlatState:
    """One fp32 tensor per bucket. Saved per parameter, so that other buckets can load it."""

    def __init__(self, what: str):
        self._what = what
        self._flat: dict[str, tuple[Bucket, Tensor]] = {}

    def add(self, bucket: Bucket) -> None:
        self._flat[bucket.name] = (bucket, torch.zeros_like(bucket.flat, dtype=torch.float32))

    def __getitem__(self, bucket: Bucket) -> Tensor:
        return self._flat[bucket.name][1]

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


def load_parts(parts: Mapping[str, FlatState], state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Load the states that a memory consists of."""
    if parts.keys() != state.keys():
        raise ValueError(f"state of another memory: it has {sorted(state)}, not {sorted(parts)}")
    for name, part in parts.items():
        part.load_state_dict(state[name])
