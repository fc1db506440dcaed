"""An engine with several equal buckets, and its steps over random gradients."""

from typing import Any

import torch

from dgc.comm import TrafficMeter
from dgc.core.bucket import make_bucket
from dgc.engine.buckets import PlannedBucket, keep_states
from dgc.engine.loop import Engine

BUCKETS = 3


def engine_of(transport: Any, compressor: Any, dtype: Any = torch.float32, device: str = "cpu") -> Engine:
    """Bucket b has the parameters "b.a" and "b.b"."""
    planned = []
    for b in range(BUCKETS):
        parameters = {
            f"{b}.a": torch.zeros(6, 8, dtype=dtype, device=device),
            f"{b}.b": torch.zeros(5, dtype=dtype, device=device),
        }
        bucket = make_bucket(f"bucket{b}", [*parameters.items()])
        planned.append(PlannedBucket(bucket, compressor, tuple(parameters.values())))
    keep_states(planned, transport.size, transport.rank)
    return Engine([[plan] for plan in planned], transport, TrafficMeter(), "test")


def step(engine: Engine, seed: int, bad: int | None = None) -> str | None:
    """One step over new gradients. bad: the bucket in which this rank's gradient has a NaN."""
    generator = torch.Generator().manual_seed(seed)
    for g, (plan,) in enumerate(engine.groups):
        plan.bucket.flat.copy_(torch.randn(plan.bucket.numel, generator=generator))
        if g == bad:
            plan.bucket.flat[-1] = torch.nan
        engine.start(g)
        engine.advance()
    return engine.finish().nonfinite
