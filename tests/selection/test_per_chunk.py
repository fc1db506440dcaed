"""Top-k of chunks: against torch.topk of every chunk, and the numbers of elements per chunk."""

from typing import Any

import pytest
import torch
from selection.shapes import indices_of, laplace, plan_of

from dgc.selection import TopKPerChunk
from dgc.selection.selector import share


def by_topk(part: Any, chunk: int, ratio: float) -> list[int]:
    n, k = part.numel(), share(part.numel(), ratio)
    count = min(-(-n // chunk), k)
    chosen: list[int] = []
    for i in range(count):
        first, last = i * k // count, (i + 1) * k // count
        start, end = first * n // k, last * n // k
        largest = part[start:end].abs().topk(last - first).indices
        assert largest.numel() >= 1 and end - start <= max(chunk, n // k) + -(-n // k)
        chosen += (start + largest).sort().values.tolist()
    return chosen


CASES = [(4096, 64 / 4096), (64, 0.03), (7, 0.5), (2, 0.9), (10**6, 0.01), (1, 0.25)]


@pytest.mark.parametrize(("chunk", "ratio"), CASES)
def test_the_largest_of_each_chunk(chunk: int, ratio: float) -> None:
    numels = (8192, 20_000, 0, 3, 1)
    plan = plan_of(*numels, ratio=ratio)
    v = laplace(sum(numels))
    parts = zip(plan.segments, plan.split(v), strict=True)
    expected = [segment.offset + i for segment, part in parts for i in by_topk(part, chunk, ratio)]
    assert indices_of(TopKPerChunk(chunk), v, plan, 0).tolist() == expected
    assert len(expected) == plan.capacity


def test_64_of_each_4096_whatever_their_magnitudes_but_no_zeros() -> None:
    plan, v = plan_of(3 * 4096, ratio=64 / 4096), laplace(3 * 4096)
    v[4096:8192] *= 1e-3
    chosen = indices_of(TopKPerChunk(4096), v, plan, 0)
    assert torch.bincount(chosen // 4096).tolist() == plan.per_chunk(4096).ks.tolist() == [64] * 3
    v = torch.zeros(100).index_fill(0, torch.tensor([55]), -2.0)
    assert indices_of(TopKPerChunk(10), v, plan_of(100, ratio=0.1), 0).tolist() == [55]
