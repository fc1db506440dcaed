"""What is planned for packed and Rice codes, and what stays behind where they are longer."""

import math
from itertools import combinations, product
from typing import Any

import pytest
import torch
from wire.payloads import budget_of, clustered, encode, scattered, selection_of

from dgc.kernels.codec import IndexKind, packed_bits, thin
from dgc.wire import PackedIndices, RiceIndices, SignValues, SparseFormat
from dgc.wire.indices import packed_longest, plan_packed, plan_rice

CODES = {"packed": PackedIndices(), "rice": RiceIndices()}
every_code = pytest.mark.parametrize("indices", CODES.values(), ids=CODES)


def entropy(density: Any) -> Any:
    """Bits per element of an iid support of this density."""
    return -sum(share * math.log2(share) for share in (density, 1 - density)) / density


def send(indices: Any, support: Any, numel: Any) -> Any:
    """(elements sent, indices of these)"""
    form, budget = SparseFormat(SignValues(), indices), budget_of(support.numel(), 0, numel)
    sent = encode(form, selection_of(support), budget, numel).sent
    return int(sent.count), sent.indices[: int(sent.count)].long()


def test_rice_plans_within_a_fifth_of_a_bit_of_the_entropy() -> None:
    """With all rounding up. With signs it takes less than 14 bits."""
    for numel, density in product((1_500_000, 6_500_000, 50_000_000), (0.001, 0.01)):
        capacity = math.ceil(numel * density)
        bits = 8 * RiceIndices().plan(capacity, numel).nbytes / capacity
        assert entropy(density) < bits < entropy(density) + 0.2, (numel, density)
    for numel in (400_000, 1_000_000, 6_500_000):
        capacity = numel // 1000
        planned = SparseFormat(SignValues(), RiceIndices()).nbytes(budget_of(capacity, 0, numel), numel)
        assert 8 * planned < 14 * capacity


def test_the_expected_length_is_that_of_random_supports() -> None:
    """The mean of ten; the planned deviation is about that of one."""
    numel, capacity = 200_000, 2000
    room = 8 * plan_packed(capacity, numel).nbytes
    supports = [selection_of(scattered(numel, capacity, seed)) for seed in range(10)]
    lengths = [float(packed_bits(support.indices, support.count)) for support in supports]
    mean = sum(lengths) / 10
    deviation = (sum((x - mean) ** 2 for x in lengths) / 9) ** 0.5
    assert 0.2 * deviation < room - mean < 2.5 * deviation


@every_code
@pytest.mark.usefixtures("no_type_checks")
def test_nearly_all_of_a_random_support_is_sent(indices: Any) -> None:
    numel = 100_000
    for density in (0.001, 0.01, 0.1, 0.5):
        capacity = math.ceil(numel * density)
        sent = [send(indices, scattered(numel, capacity, seed), numel)[0] for seed in range(10)]
        assert sum(sent) > 0.99 * 10 * capacity and max(sent) == capacity, density


@every_code
def test_no_plan_exceeds_int32_and_all_of_them_admit_an_element(indices: Any) -> None:
    for numel in (1, 2, 3, 17, 100, 128, 1000, 10**6, 2**31 - 1):
        for capacity in {1, 2, 3, 100, 128, 129, 513, numel // 1000, numel // 3}:
            if 0 < capacity <= min(numel, 10**6):
                section = indices.plan(capacity, numel)
                assert section.nbytes <= 4 * capacity and section.nbytes % 4 == 0
                if section.kind == IndexKind.PACKED:
                    assert 0 < section.parameter <= capacity
    # tiny supports in large buckets are int32
    assert RiceIndices().plan(1, 2**31 - 1).kind == IndexKind.INT32
    assert RiceIndices().plan(100, 10**5).kind == IndexKind.RICE


@every_code
@pytest.mark.usefixtures("no_type_checks")
def test_small_buckets_send_every_support_there_is(indices: Any) -> None:
    """Where a support of few elements is coded, the longest code there is has room."""
    for numel, capacity in ((9, 2), (9, 5), (8, 7), (8, 8)):
        for support in combinations(range(numel), capacity):
            assert send(indices, torch.tensor(support), numel)[0] == capacity


@pytest.mark.usefixtures("no_type_checks")
def test_the_longest_packed_code_is() -> None:
    for numel, count, seed in product((200, 2000), (1, 5, 128, 129, 150), range(20)):
        support = selection_of(scattered(numel, count, seed))
        bits = int(packed_bits(support.indices, support.count))
        assert bits <= 8 * -(-count // 128) + packed_longest(count, numel)


def worst_for(name: str, capacity: Any, numel: Any) -> Any:
    """All low bits zero, so that the high parts, in unary, are as long as can be; or a wide gap in each block."""
    if name == "rice":
        step = 2 ** plan_rice(capacity, numel).parameter
        multiples = torch.arange(capacity + 1) * ((numel - capacity) // step) // capacity
        return (step * torch.diff(multiples) + 1).cumsum(0) - 1
    gaps = torch.zeros(capacity, dtype=torch.int64)
    gaps[::128] = (numel - capacity) // -(-capacity // 128)
    return (gaps + 1).cumsum(0) - 1


@pytest.mark.parametrize("name", CODES)
def test_of_a_support_that_does_not_fit_evenly_spaced_elements_are_sent(name: Any) -> None:
    for numel, capacity in ((10**5, 1000), (10**6, 1000), (10**5, 10**4), (50_000, 20_000)):
        support = worst_for(name, capacity, numel)
        kept, sent = send(CODES[name], support, numel)
        assert 0.3 * capacity < kept <= capacity and (kept < capacity or numel != 10**6)
        assert torch.equal(sent, support[torch.arange(kept) * capacity // max(kept, 1)])
        if kept < capacity:
            steps = torch.diff(torch.searchsorted(support, sent), prepend=torch.tensor([-1]))
            assert steps.max() <= capacity // kept + 1, "no run of elements stays behind"
    clusters = clustered(10**6, 5000)
    assert send(CODES[name], clusters, 10**6)[0] == clusters.numel()


def test_thinning() -> None:
    selection = selection_of(torch.arange(0, 100, 10), torch.arange(1.0, 11.0), capacity=12)
    some = thin(selection, torch.tensor(4))
    assert some.indices.tolist() == [0, 20, 50, 70] + [0] * 8 and some.values[:4].tolist() == [1, 3, 6, 8]
    assert int(some.count) == 4
    for kept in (0, 10):
        assert torch.equal(thin(selection, torch.tensor(kept)).values[:kept], selection.values[:kept])
