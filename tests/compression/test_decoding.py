"""Which kind of mean a compressor returns, and that its bits do not depend on the kernels."""

from typing import Any

import pytest
import torch
from compression.ranks import Ranks, dense, normal

from dgc.bucket import make_bucket
from dgc.comm.requests import AllGather, next_requests
from dgc.compression import DenseResult, DGCCompressor, SparseCompressor, SparseResult
from dgc.compression.sparse_sum import AllGatherExchange
from dgc.kernels import SparseVector
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.selection import plan_selection
from dgc.wire import RiceIndices, SignValues, SparseFormat
from dgc.wire.payload import PayloadPlan

SHAPES = [(40, 30), (700, 10)]
NUMEL = 8200


def residual() -> Any:
    return SparseCompressor(0.01, ResidualMemory(), values=SignValues(), indices=RiceIndices())


def dgc() -> Any:
    return DGCCompressor(0.01, DGCSGDMemory(0.9), values=SignValues(), indices=RiceIndices())


@pytest.mark.parametrize(
    ("make", "dtype", "kind"),
    [
        (residual, torch.float32, DenseResult),
        (residual, torch.float16, SparseResult),
        (dgc, torch.float32, SparseResult),
    ],
)
def test_a_mean_is_sparse_only_where_it_can_be_used_so(make: Any, dtype: Any, kind: Any) -> None:
    ranks = Ranks(2, make, SHAPES, dtype)
    results, mean = ranks.exchange([normal(NUMEL, r).to(dtype) for r in range(2)])
    assert [type(result) for result in results] == [kind, kind]
    assert 0 < int((mean != 0).sum()) <= 2 * 82
    for bucket, result in zip(ranks.buckets, results, strict=True):
        result.write_to(bucket)
        assert torch.equal(dense(DenseResult(), bucket).float(), mean.to(dtype).float())


def test_a_sum_that_overflows_is_named() -> None:
    """No gradients reach this through a memory, so the payloads are made by hand."""
    bucket, form = make_bucket("b", [("p", torch.zeros(10, 10))]), SparseFormat()
    plan, size = plan_selection(bucket.segments, 0.01), 2
    one, none = torch.ones((), dtype=torch.int32), torch.tensor(bucket.numel)
    elements = SparseVector(torch.full((1,), 7, dtype=torch.int32), torch.full((1,), 3e38), one)
    payload = PayloadPlan(form, plan.per_tensor, bucket.numel, 0.01, "bucket b")
    exchange = AllGatherExchange(payload, size, 0, wants_sparse=True)
    conversation = exchange.mean(bucket, exchange.encode(elements, none))
    (message,) = next_requests(conversation)
    assert isinstance(message, AllGather)
    with pytest.raises(StopIteration) as ended:
        next_requests(conversation, ((message.tensor,) * size,))
    assert ended.value.value[0].nonfinite == (
        "the mean gradient of p overflows the dtype that carries it (no rank has NaN or inf)"
    )
