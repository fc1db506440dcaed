"""The limits on a gradient, against plain formulas."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from refusals import refuse
from sparse.held import bucket_of

from dgc.comm.lockstep import LockstepWorld
from dgc.memory import ClipByGlobalNorm, ClipByNorm, ClipByValue, Clipping, ClipValueByGlobalNorm, DGCSGDMemory

SHAPES: dict[str, Any] = {"a": (4, 3), "none": (0, 2), "b": (5,), "c": (2, 3, 2, 2)}
CLIPPINGS: list[Clipping] = [ClipByNorm(0.5), ClipByNorm(0.5, math.inf), ClipByGlobalNorm(0.5)]
CLIPPINGS += [ClipByValue(0.3), ClipValueByGlobalNorm()]


def parts(bucket: Any, flat: Any) -> Any:
    return [flat[s.offset : s.offset + s.numel] for s in bucket.segments]


def clip_alone(clipping: Clipping, bucket: Any) -> Any:
    LockstepWorld(1).converse("clip", [clipping.clip(bucket)])
    return bucket.flat


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
@pytest.mark.parametrize("order", [1, 2.0, 3, math.inf])
def test_a_norm_of_any_order_limits_each_tensor(order: float, max_norm: float) -> None:
    bucket = bucket_of(**SHAPES)
    before = bucket.flat.double()
    assert list(ClipByNorm(max_norm, norm_type=order).clip(bucket)) == []
    for old, new in zip(parts(bucket, before), parts(bucket, bucket.flat), strict=True):
        norm = torch.linalg.vector_norm(old, order) if old.numel() else 0.0
        expected = old * min(1.0, max_norm / (float(norm) + 1e-6))
        torch.testing.assert_close(new.double(), expected, rtol=1e-6, atol=1e-7)


def test_the_norm_of_a_tensor_in_fp16_may_be_beyond_fp16() -> None:
    bucket = bucket_of(dtype=torch.float16, a=(100,))
    bucket.flat.fill_(400.0)  # whose square is beyond fp16
    clipped = clip_alone(ClipByNorm(10.0), bucket)
    assert clipped.dtype == torch.float16
    torch.testing.assert_close(clipped.float(), torch.ones(100), rtol=1e-3, atol=0)


def test_values_are_cut_at_the_limit() -> None:
    before, clipped = bucket_of(**SHAPES).flat, clip_alone(ClipByValue(0.5), bucket_of(**SHAPES))
    assert torch.equal(clipped, before.clamp(-0.5, 0.5)) and not torch.equal(clipped, before)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("clipping", [ClipByGlobalNorm(1.5), ClipValueByGlobalNorm()], ids=["norm", "value"])
def test_global_norms_limit_every_rank_alike(clipping: Any, size: int) -> None:
    """The norm of a tensor is the root of the mean over the ranks of its squared norm."""
    world, buckets = LockstepWorld(size), [bucket_of(seed=rank, **SHAPES) for rank in range(size)]
    buckets[0].flat[0] = 100.0  # nearly all of the tensor's norm, and so beyond the limit of several ranks
    before = [bucket.flat.double() for bucket in buckets]
    world.converse("clip", [clipping.clip(bucket) for bucket in buckets])
    changed = False
    for i in range(len(SHAPES)):
        norm = (sum(float(parts(buckets[0], b)[i].square().sum()) for b in before) / size) ** 0.5
        for bucket, flat in zip(buckets, before, strict=True):
            old, new = parts(bucket, flat)[i], parts(bucket, bucket.flat.double())[i]
            if isinstance(clipping, ClipByGlobalNorm):
                expected = old * min(1.0, 1.5 / (norm + 1e-6))
            else:
                expected = old.clamp(-norm, norm)
            torch.testing.assert_close(new, expected, rtol=1e-6, atol=0)
            changed |= not torch.equal(expected, old)
    assert changed == (size > 1 or isinstance(clipping, ClipByGlobalNorm))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("clipping", [ClipByGlobalNorm(1.5), ClipValueByGlobalNorm()], ids=["norm", "value"])
def test_global_norms_take_one_round_of_four_bytes_a_tensor(clipping: Any, size: int) -> None:
    world, buckets = LockstepWorld(size), [bucket_of(seed=rank, **SHAPES) for rank in range(size)]
    world.converse("clip", [clipping.clip(bucket) for bucket in buckets])
    assert [meter.rounds for meter in world.meters] == [1] * size
    assert [meter.payload_bytes for meter in world.meters] == [4 * len(SHAPES)] * size


every_clipping = pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda clipping: repr(clipping))


@every_clipping
def test_a_mean_is_clipped_as_the_gradient_of_a_single_rank(clipping: Clipping) -> None:
    mean = bucket_of(**SHAPES)
    clipping.clip_mean(mean)
    torch.testing.assert_close(clip_alone(clipping, bucket_of(**SHAPES)), mean.flat, rtol=1e-6, atol=0)


@every_clipping
def test_zeros_stay_zero(clipping: Clipping) -> None:
    zeros = bucket_of(**SHAPES)
    zeros.flat.zero_()
    assert not clip_alone(clipping, zeros).any()


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("limit", [0, -1.0, math.nan, "1", None, True])
@pytest.mark.parametrize(
    "kind",
    [ClipByValue, ClipByNorm, ClipByGlobalNorm, pytest.param(partial(ClipByNorm, 1.0), id="order of ClipByNorm")],
)
def test_a_limit_that_is_no_positive_number_is_refused(kind: Any, limit: Any) -> None:
    refuse("(clip_value|max_norm|norm_type) must be a positive number", kind, limit)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("clipping", [ClipByNorm, 1.0, True])
def test_a_memory_refuses_what_is_no_clipping(clipping: Any) -> None:
    refuse("^gradient_clipping must be None or one of", DGCSGDMemory, 0.9, gradient_clipping=clipping)
