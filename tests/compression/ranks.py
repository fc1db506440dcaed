"""Some compressors and buckets, one for each simulated rank."""

import torch

from dgc.bucket import make_bucket
from dgc.comm.lockstep import LockstepWorld


class Ranks:
    def __init__(self, size, make, shapes, seed=0):
        named = [(f"p{i}", torch.zeros(shape)) for i, shape in enumerate(shapes)]
        self.world = LockstepWorld(size, seed=seed)
        self.compressors = [make() for _ in range(size)]
        self.buckets = [make_bucket("b", named) for _ in range(size)]
        for rank, (compressor, bucket) in enumerate(zip(self.compressors, self.buckets, strict=True)):
            compressor.plan(bucket, size, rank)

    def step(self, own):
        """own: each rank's gradient as a vector. Returns the mean, the same on every rank."""
        for bucket, gradient in zip(self.buckets, own, strict=True):
            bucket.flat.copy_(gradient)
        talks = [c.reduce(b) for c, b in zip(self.compressors, self.buckets, strict=True)]
        results = self.world.converse("b", talks)
        means = []
        for result, bucket in zip(results, self.buckets, strict=True):
            assert result.nonfinite is None
            if hasattr(result, "indices"):
                bucket.flat.zero_()[result.indices] = result.values
            means.append(bucket.flat.clone())
        assert all(torch.equal(mean, means[0]) for mean in means)
        return means[0]

    def errors(self):
        return [next(iter(c.errors())) for c in self.compressors]


def normal(n, seed):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))
