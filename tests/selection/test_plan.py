"""How many elements each tensor and each chunk sends, and who gets the slots that others leave free."""

from typing import Any

import torch
from selection.shapes import indices_of, laplace, plan_of

from dgc.selection import TopKPerChunk
from dgc.selection.selector import share


def test_plan_rounds_up_and_sends_at_least_one() -> None:
    plan = plan_of(1, 10, 999, 1000, 1001, 0, ratio=0.001)
    assert plan.ks == (1, 1, 1, 1, 2, 0) and plan.capacity == 6
    assert plan.per_tensor.bounds.tolist() == [0, 1, 11, 1010, 2010, 3011, 3011]
    assert plan_of(3, 70, ratio=1.0).ks == (3, 70)
    # the noise of floats sends nothing more: 0.07 * 100 is 7.000000000000001
    for ratio, numel, k in ((0.07, 100, 7), (0.29, 100, 29), (1e-3, 1000, 1), (1e-9, 5, 1)):
        assert plan_of(numel, ratio=ratio).ks == (k,)


def test_free_slots_are_given_in_proportion_to_the_surplus_and_never_more_than_the_capacity() -> None:
    for sizes, ratio, counts, ks in (
        ([40] * 3, 0.1, [0, 4, 3], [0, 4, 3]),  # what fits is kept
        # 4 slots each; the first leaves 4 free, the others have 6 and 3 too many
        ([40] * 3, 0.1, [0, 10, 7], [0, 4 + 4 * 6 // 9, 4 + 4 * 3 // 9]),
        ([40] * 3, 0.1, [0, 6, 6], [0, 6, 6]),
        # free slots times surplus exceed 32 bits
        ([3_000_000] * 2, 0.5, [0, 3_000_000], [0, 3_000_000]),
        ([3_000_000] * 2, 0.5, [10, 2_999_999], [10, 2_999_990]),
    ):
        assert plan_of(*sizes, ratio=ratio).shared(torch.tensor(counts)).ks.tolist() == ks, counts
    generator = torch.Generator().manual_seed(0)
    plan = plan_of(*[1000] * 9, ratio=0.01)
    for _ in range(200):
        counts = torch.randint(40, (9,), generator=generator)
        shared = plan.shared(counts)
        assert shared.capacity == plan.capacity >= int(shared.ks.sum()) and bool((shared.ks <= counts).all())


def test_history_moves_to_other_buckets() -> None:
    """That of some tensors alone is not used."""
    one, two, larger = plan_of(5, 6, 7, ratio=0.5), plan_of(9, 9, ratio=0.5), plan_of(5, 6, 7, 8, ratio=0.5)
    one.history["threshold"] = torch.tensor([1.0, 2.0, 3.0])
    two.take_history(one.rows_of_history())
    larger.take_history(one.rows_of_history())
    assert two.history["threshold"].tolist() == [1.0, 2.0] and larger.history == {}


def by_topk(part: Any, chunk: int, ratio: float) -> list[int]:
    n, k, chosen = part.numel(), share(part.numel(), ratio), list[int]()
    count = min(-(-n // chunk), k)
    for i in range(count):
        first, last = i * k // count, (i + 1) * k // count
        start, end = first * n // k, last * n // k
        largest = part[start:end].abs().topk(last - first).indices
        assert largest.numel() >= 1 and end - start <= max(chunk, n // k) + -(-n // k)
        chosen += (start + largest).sort().values.tolist()
    return chosen


def test_the_largest_of_each_chunk_whatever_their_magnitudes_but_no_zeros() -> None:
    numels = (8192, 20_000, 0, 3, 1)
    v = laplace(sum(numels))
    for chunk, ratio in ((4096, 64 / 4096), (64, 0.03), (7, 0.5), (2, 0.9), (10**6, 0.01), (1, 0.25)):
        plan = plan_of(*numels, ratio=ratio)
        parts = zip(plan.segments, plan.split(v), strict=True)
        expected = [segment.offset + i for segment, part in parts for i in by_topk(part, chunk, ratio)]
        assert indices_of(TopKPerChunk(chunk), v, plan, 0).tolist() == expected, chunk
        assert len(expected) == plan.capacity
    plan, v = plan_of(3 * 4096, ratio=64 / 4096), laplace(3 * 4096)
    v[4096:8192] *= 1e-3
    chosen = indices_of(TopKPerChunk(4096), v, plan, 0)
    assert torch.bincount(chosen // 4096).tolist() == plan.per_chunk(4096).ks.tolist() == [64] * 3
    v = torch.zeros(100).index_fill(0, torch.tensor([55]), -2.0)
    assert indices_of(TopKPerChunk(10), v, plan_of(100, ratio=0.1), 0).tolist() == [55]
