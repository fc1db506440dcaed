"""N ranks of one compressor over one bucket, in lockstep."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dgc.bucket import Bucket, make_bucket
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import Compressor, SparseResult


class Fleet:
    def __init__(self, make: Callable[[], Compressor], size: int, like: Sequence[Tensor], seed: int = 0):
        self.world = LockstepWorld(size, seed=seed)
        self.compressors = [make() for _ in range(size)]
        self.buckets: list[Bucket] = []
        self.nonfinite: list[str | None] = []
        for rank, compressor in enumerate(self.compressors):
            bucket = make_bucket("bucket", [(f"p{i}", tensor) for i, tensor in enumerate(like)])
            compressor.plan(bucket, size, rank)
            self.buckets.append(bucket)

    def step(self, gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Each rank's list of gradients -> each rank's mean, as a flat dense tensor.

        Where it is not finite, the step is dropped as the optimizer drops it: the mean is then of no use.
        """
        for bucket, own in zip(self.buckets, gradients, strict=True):
            for segment, gradient in zip(bucket.segments, own, strict=True):
                segment.of(bucket.flat).copy_(gradient)
        conversations = [c.reduce(b) for c, b in zip(self.compressors, self.buckets, strict=True)]
        means = []
        results = self.world.converse("bucket", conversations)
        self.nonfinite = [result.nonfinite for result in results]
        for compressor, bucket, result in zip(self.compressors, self.buckets, results, strict=True):
            if result.nonfinite is not None:
                compressor.rollback(bucket)
            if isinstance(result, SparseResult):
                bucket.flat.zero_()
                bucket.flat[result.indices] = result.values.to(bucket.flat.dtype)
            means.append(bucket.flat.clone())
        return means

    def errors(self) -> list[Tensor]:
        """Each rank's error state, float64; zero where there is none."""
        zero = torch.zeros(self.buckets[0].numel, dtype=torch.float64)
        return [sum((e.double() for e in c.errors()), zero) for c in self.compressors]
