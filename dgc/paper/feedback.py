"""What the compressors of this folder share and no paper describes. State is fp32 and saved under parameter names.
NaN, inf and 2**64 or more in a gradient count as zero and are told to every rank; the caller drops the step."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float32, Int64, Shaped
from torch import Tensor

from dgc.bucket import Bucket
from dgc.compression.envelope import first_nonfinite_message, overflow_message
from dgc.compression.protocol import DenseResult, StatelessCompressor


class ErrorFeedback(StatelessCompressor):
    """letters: names of the state's vectors [n]; the last waits to be sent. unsent: that of a dropped step."""

    letters: tuple[str, ...] = ("e",)

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}
        self.state: dict[str, tuple[Tensor, ...]] = {}
        self.unsent: dict[str, tuple[Tensor, ...]] = {}

    def plan(self, bucket: Bucket, size: int, rank: int) -> None:
        zeros = torch.zeros(bucket.numel, dtype=torch.float32, device=bucket.device)
        self._buckets[bucket.name], self.state[bucket.name] = bucket, (zeros,) * len(self.letters)

    def rollback(self, bucket: Bucket) -> None:
        self.state[bucket.name] = self.unsent[bucket.name]

    def errors(self) -> Iterable[Tensor]:
        return [vectors[-1] for vectors in self.state.values()]

    def state_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = {letter: {} for letter in self.letters}
        for name, bucket in self._buckets.items():
            for letter, vector in zip(self.letters, self.state[name], strict=True):
                saved[letter] |= {s.name: s.of(vector).clone() for s in bucket.segments}
        return saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if {a: set(state[a]) for a in state} != {a: set(own) for a, own in self.state_dict().items()}:
            raise ValueError(f"state of another compressor or model: {sorted(state)}")
        loaded = {name: tuple(torch.zeros_like(x) for x in vectors) for name, vectors in self.state.items()}
        for name, bucket in self._buckets.items():
            for letter, vector in zip(self.letters, loaded[name], strict=True):
                for s, saved in ((s, state[letter][s.name]) for s in bucket.segments):
                    if tuple(saved.shape) != s.shape or not bool(saved.isfinite().all()):
                        raise ValueError(f"{letter} of {s.name} has NaN, inf or another shape than {s.shape}")
                    s.of(vector).copy_(saved)
        self.state = loaded


def parts_of(bucket: Bucket, vector: Shaped[Tensor, "n"]) -> Sequence[Tensor]:
    """Each tensor's elements, in the order of memory."""
    return vector.split([s.numel for s in bucket.segments])


def gradient_of(bucket: Bucket) -> tuple[Float32[Tensor, "n"], Int64[Tensor, "1"]]:
    """(gradient, number of the first tensor, from 1, that has NaN, inf or 2**64 or more; 0 for none)"""
    g = bucket.flat.to(torch.float32)
    bad = ~(g.abs() < 2.0**64)
    numbers = [number for number, part in enumerate(parts_of(bucket, bad), 1) if bool(part.any())]
    return g.masked_fill(bad, 0.0), torch.tensor(numbers[:1] or [0], dtype=torch.int64, device=bucket.device)


def sparse_sum(indices: Sequence[Tensor], values: Sequence[Tensor], like: Tensor) -> Float32[Tensor, "n"]:
    """Sum over ranks, in their order, of vectors [n] that are zero but for values [k] at indices [k]."""
    total = torch.zeros_like(like)
    for i, x in zip(indices, values, strict=True):
        total = total.index_add(0, i, x)
    return total


def result_of(bucket: Bucket, mean: Float32[Tensor, "n"], bad: Iterable[Tensor]) -> DenseResult:
    """bad: by rank, the second of `gradient_of`."""
    bucket.flat.copy_(mean)
    nonfinite = first_nonfinite_message(bucket, [int(number) for number in bad])
    return DenseResult(nonfinite or overflow_message(bucket))
