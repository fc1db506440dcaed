"""The limits on a gradient, against plain formulas."""

import math
from typing import Any

import pytest
import torch

from dgc.bucket import make_bucket
from dgc.comm.lockstep import LockstepWorld
from dgc.memory import ClipByGlobalNorm, ClipByNorm, ClipByValue, Clipping, ClipValueByGlobalNorm, DGCSGDMemory

SHAPES = {"a": (4, 3), "none": (0, 2), "b": (5,)}


def bucket_of(seed: int = 0) -> Any:
    bucket = make_bucket("b", [(name, torch.zeros(shape)) for name, shape in SHAPES.items()])
    bucket.flat.copy_(torch.randn(bucket.numel, generator=torch.Generator().manual_seed(seed)))
    return bucket


def parts(bucket: Any, flat: Any) -> Any:
    return [flat[s.offset : s.offset + s.numel] for s in bucket.segments]


def test_norms_of_any_order() -> None:
    for order in (1, 2.0, 3, math.inf):
        for max_norm in (0.5, 100.0):
            bucket = bucket_of()
            before = bucket.flat.double()
            assert list(ClipByNorm(max_norm, norm_type=order).clip(bucket)) == []
            for old, new in zip(parts(bucket, before), parts(bucket, bucket.flat), strict=True):
                if old.numel():
                    norm = old.abs().max() if order == math.inf else (old.abs() ** order).sum() ** (1 / order)
                    old = old * min(1.0, max_norm / (float(norm) + 1e-6))
                torch.testing.assert_close(new.double(), old, rtol=1e-6, atol=1e-7)


def test_values_by_the_global_norm() -> None:
    """The limit of each tensor's elements is the root of the mean over the ranks of its squared norm."""
    for size in (1, 2, 3):
        world, buckets = LockstepWorld(size), [bucket_of(seed=rank) for rank in range(size)]
        buckets[0].flat[0] = 100.0  # nearly all of the tensor's norm, and so beyond the limit of several ranks
        before = [bucket.flat.double() for bucket in buckets]
        world.converse("clip", [ClipValueByGlobalNorm().clip(bucket) for bucket in buckets])
        changed = False
        for i in range(len(SHAPES)):
            limit = (sum(float(parts(buckets[0], b)[i].square().sum()) for b in before) / size) ** 0.5
            for bucket, old in zip(buckets, before, strict=True):
                expected = parts(bucket, old)[i].clamp(-limit, limit)
                torch.testing.assert_close(parts(bucket, bucket.flat.double())[i], expected, rtol=1e-6, atol=0)
                changed |= not torch.equal(expected, parts(bucket, old)[i])
        assert changed == (size > 1)
        assert [meter.payload_bytes for meter in world.meters] == [4 * len(SHAPES)] * size


def test_a_mean_is_its_own_global_norm() -> None:
    norms = [ClipByNorm(0.5), ClipByNorm(0.5, math.inf)]
    clippings: list[Clipping] = [ClipByValue(0.3), *norms, ClipByGlobalNorm(0.5), ClipValueByGlobalNorm()]
    for clipping in clippings:
        alone, mean = bucket_of(), bucket_of()
        LockstepWorld(1).converse("clip", [clipping.clip(alone)])
        clipping.clip_mean(mean)
        torch.testing.assert_close(alone.flat, mean.flat, rtol=1e-6, atol=0, msg=str(clipping))


@pytest.mark.usefixtures("no_type_checks")
def test_bad_limits() -> None:
    kinds: list[Any] = [ClipByValue, ClipByNorm, ClipByGlobalNorm, lambda order: ClipByNorm(1.0, order)]
    for kind in kinds:
        for limit in (0, -1.0, math.nan, "1", None, True):
            with pytest.raises(ValueError, match="(clip_value|max_norm|norm_type) must be a positive number"):
                kind(limit)
    for clipping in (ClipByNorm, 1.0):
        with pytest.raises(ValueError, match="gradient_clipping must be None or one of"):
            DGCSGDMemory(0.9, gradient_clipping=clipping)  # type: ignore[arg-type]
