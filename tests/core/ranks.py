"""Some compressors and buckets, one for each simulated rank, with their states."""

from dataclasses import replace
from typing import Any

import torch

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import SparseResult
from dgc.core.bucket import make_bucket
from dgc.engine.state import BucketStates
from dgc.testing import checked_mean


class Ranks:
    """shapes: a list of them, or by name."""

    def __init__(self, size: Any, make: Any, shapes: Any, dtype: Any = torch.float32, seed: int = 0) -> None:
        if not isinstance(shapes, dict):
            shapes = {f"p{i}": shape for i, shape in enumerate(shapes)}
        named = [(name, torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()]
        self.world = LockstepWorld(size, seed=seed)
        self.states = [BucketStates(make()) for _ in range(size)]
        self.buckets = [make_bucket("b", named) for _ in range(size)]
        for rank, (states, bucket) in enumerate(zip(self.states, self.buckets, strict=True)):
            states.add(bucket, size, rank)

    @property
    def compressors(self) -> Any:
        return [states.compressor for states in self.states]

    def exchange(self, own: Any) -> Any:
        """own: each rank's gradient as a vector. Returns the results by rank, and the mean as a dense vector."""
        for bucket, gradient in zip(self.buckets, own, strict=True):
            bucket.flat.copy_(gradient)
        conversations = [checked_mean(s, b) for s, b in zip(self.states, self.buckets, strict=True)]
        results = [replace(r, nonfinite=message) for r, message in self.world.converse("b", conversations)]
        means = [dense(result, bucket) for result, bucket in zip(results, self.buckets, strict=True)]
        assert all(torch.equal(mean, means[0]) for mean in means)
        return results, means[0]

    def step(self, own: Any) -> Any:
        results, mean = self.exchange(own)
        assert all(result.nonfinite is None for result in results)
        return mean

    def errors(self) -> Any:
        return [next(iter(states.errors())) for states in self.states]


def dense(result: Any, bucket: Any) -> Any:
    if not isinstance(result, SparseResult):
        return bucket.flat.clone()
    mean = torch.zeros(bucket.numel)
    mean[result.indices] = result.values
    return mean


def normal(*shape: Any, seed: Any = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
