"""The payloads of all ranks decoded and added in one call: the bits of the reference, and the same errors."""

import copy
from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
import torch
from cases import case
from kernels.comparison import REFERENCE, same
from sparse import payloads as inputs
from sparse.payloads import (
    ALL_OF_KERNELS,
    FORMATS,
    SOME_OF_KERNELS,
    budget_of,
    decode,
    encode,
    scattered,
    selection_of,
)

from dgc.kernels.payload.native import NativeMeanDecoder
from dgc.sparse.payloads import PayloadError, ValueFormat
from dgc.sparse.payloads.payload import PayloadPlan

BOUNDS = (0, 7, 7, 3000)
some_formats = pytest.mark.parametrize("form", SOME_OF_KERNELS.values(), ids=SOME_OF_KERNELS)


def mean_of(form: Any, payloads: Any, budget: Any, numel: Any, size: Any = None) -> Any:
    return PayloadPlan(form, budget, numel).mean(NativeMeanDecoder(), payloads, size or len(payloads))


def mean_into_(dense: Any, form: Any, payloads: Any, budget: Any, size: Any = None) -> Any:
    plan = PayloadPlan(form, budget, dense.numel())
    return plan.mean_into_(dense, NativeMeanDecoder(), payloads, size or len(payloads)).wait()


def payloads_of(form: Any, selections: Any, budget: Any, numel: Any) -> Any:
    return [encode(form, selection, budget, numel).payload for selection in selections]


def check(form: Any, selections: Any, budget: Any, numel: Any, size: Any = None) -> None:
    """The sparse and the dense mean have the bits of the reference."""
    payloads = payloads_of(form, selections, budget, numel)
    parts, flags = decode(form, payloads, budget, numel)
    indices, values = REFERENCE.merge_mean(parts, size or len(payloads), numel).valid()
    found, numbers = mean_of(form, payloads, budget, numel, size)
    assert int(found.count) == indices.numel() and same(found.indices, indices) and numbers == flags
    assert same(found.values, values)
    dense, expected = torch.full((numel,), torch.nan), torch.zeros(numel)
    expected[indices] = values
    assert mean_into_(dense, form, payloads, budget, size) == (True, flags) and same(dense, expected)


def test_means_have_the_bits_of_the_reference(native: Any) -> None:
    numel, budget = 5000, budget_of(200, *BOUNDS, 5000)
    counts = ((200,), (0,), (0, 0), (200, 0, 1), (130, 200), (200, 199, 129, 64, 200))
    for (key, form), ranks in product(ALL_OF_KERNELS.items(), counts):
        with case(key, ranks):
            made = [selection_of(scattered(numel, k, r), capacity=200, seed=r) for r, k in enumerate(ranks)]
            check(form, made, budget, numel)
    for numel in (0, 40):
        check(FORMATS["fp32 int32"], [selection_of(torch.arange(0))] * 2, budget_of(0, 0, numel), numel)


def test_a_large_bucket_at_any_address(native: Any) -> None:
    """Large buckets are stored past the caches, which needs aligned addresses."""
    numel, form = (1 << 20) + 5, FORMATS["sign rice"]
    budget = budget_of(900, 0, 1, numel // 2, numel)
    made = [selection_of(scattered(numel, 900, r), capacity=900, seed=r) for r in range(3)]
    payloads = payloads_of(form, made, budget, numel)
    for size, offset in product((3, 4), (0, 1, 16)):
        indices, values = mean_of(form, payloads, budget, numel, size)[0].valid()
        expected = torch.zeros(numel).index_put_((indices,), values)
        memory = torch.full((numel + 17,), torch.nan)
        dense = memory[offset : offset + numel]
        assert mean_into_(dense, form, payloads, budget, size)[0] and same(dense, expected), (size, offset)
        assert int(memory.isnan().sum()) == 17, "nothing beside it is written"


@pytest.mark.usefixtures("no_type_checks")
def test_means_of_buckets_of_many_regions(native: Any) -> None:
    """Sizes around the regions and the shares of the threads, with entries in few of them or in all."""
    for numel in (16384, 16385, 200_003):
        budget, near = budget_of(900, 0, 1, numel // 2, numel), torch.arange(numel - 600, numel)
        sizes = cycle((5, 8, 64, 3, 1, 7, 2))
        for number, (key, form) in enumerate(SOME_OF_KERNELS.items()):
            with case(key, numel):
                parts = [scattered(numel, 900, number), inputs.clustered(numel, 900), near, torch.arange(5), near]
                made = [selection_of(part, capacity=900, seed=r) for r, part in enumerate(parts)]
                check(form, made, budget, numel, size=next(sizes))


@pytest.mark.parametrize(("numbers", "expected"), [((1e8, 1.0, -1e8), 0.0), ((1e8, -1e8, 1.0), 1.0)])
def test_values_are_added_in_the_order_of_ranks(native: Any, numbers: Any, expected: float) -> None:
    form, budget = FORMATS["fp32 packed"], budget_of(1, 0, 100)
    sent = [selection_of([70], [number]) for number in numbers]
    dense, payloads = torch.ones(100), payloads_of(form, sent, budget, 100)
    mean_into_(dense, form, payloads, budget, 1)
    assert mean_of(form, payloads, budget, 100, 1)[0].values.tolist() == [expected] == [dense[70].item()]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 48, 64, 100, 256])
def test_quotients_are_rounded_once(native: Any, size: int) -> None:
    """Quotients of smallest numbers too, which an inverse that is not exact would change."""
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.randn(100, generator=generator) * 10.0**e for e in range(-44, 38, 3)])
    values = values[values != 0]
    selection, numel = selection_of(torch.arange(0, 4 * len(values), 4), values), 4 * len(values)
    check(FORMATS["fp32 int32"], [selection], budget_of(len(values), 0, numel), numel, size)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("at", [0, 15, 17_000, 69_999])
def test_a_sum_that_is_not_finite_is_reported(native: Any, at: int, count: int) -> None:
    form, numel = FORMATS["fp32 rice"], 70_000
    budget = budget_of(1, 0, numel)
    large, dense = selection_of(torch.tensor([at]), torch.tensor([3e38])), torch.empty(numel)
    finite, _ = mean_into_(dense, form, payloads_of(form, [large] * count, budget, numel), budget)
    assert finite == (count == 1) == bool(dense.isfinite().all())


def test_the_first_tensor_that_is_not_finite_is_told(native: Any) -> None:
    form, numel = FORMATS["sign rice"], 5000
    budget, selection = budget_of(4, *BOUNDS, numel), selection_of(scattered(numel, 4))
    payloads = [encode(form, selection, budget, numel, first).payload for first in (7, numel)]
    assert mean_of(form, payloads, budget, numel)[1] == [3, 0]


def at_odd_addresses(payloads: Any) -> Any:
    return torch.cat([torch.zeros(3, dtype=torch.uint8), payloads.view(-1)])[3:].chunk(3)


def with_gaps(payloads: Any) -> Any:
    return payloads.t().contiguous().t().unbind()


@some_formats
@pytest.mark.parametrize("lie", [at_odd_addresses, with_gaps])
def test_payloads_may_lie_anywhere(form: Any, lie: Any) -> None:
    numel = 5000
    budget = budget_of(13, *BOUNDS, numel)
    made = [selection_of(scattered(numel, 13, s), seed=s) for s in range(3)]
    payloads = torch.stack(payloads_of(form, made, budget, numel))
    expected, _ = mean_of(form, list(payloads), budget, numel)
    found, _ = mean_of(form, lie(payloads), budget, numel)
    assert torch.equal(found.indices, expected.indices) and torch.equal(found.values, expected.values)


@some_formats
@pytest.mark.usefixtures("no_type_checks")
def test_changed_payloads_raise_the_errors_of_one_at_a_time(form: Any) -> None:
    generator, numel, refused = torch.Generator().manual_seed(0), 5000, 0
    for trial in range(200):
        count = (0, 1, 6, 150, 700)[trial % 5]
        budget = budget_of(count, 0, 100, numel)
        good = encode(form, selection_of(scattered(numel, count)), budget, numel).payload
        bad = inputs.noise_in(good, generator, (1.0, 0.3, 0.01)[trial % 3])
        bad[17] ^= trial % 7 == 0
        if trial % 2:
            bad[:4].view(torch.int32)[0] = int(torch.randint(-1, count + 2, (), generator=generator))
            bad[4:8] = 0
        if trial % 10:
            inputs.seal_(bad)
        payloads, dense = [good, bad[:-8] if trial % 13 == 0 else bad, good], torch.empty(numel)
        given = form, payloads, budget
        try:
            _, flags = decode(form, payloads, budget, numel)
        except PayloadError as error:
            refused += 1
            for call in (partial(mean_of, *given, numel), partial(mean_into_, dense, *given)):
                with pytest.raises(PayloadError) as raised:
                    call()
                assert str(raised.value) == str(error)
        else:
            assert mean_of(*given, numel)[1] == flags
    assert 100 < refused < 200


@pytest.mark.usefixtures("no_type_checks")
def test_formats_of_users_have_no_sections() -> None:
    class Own(ValueFormat):
        def nbytes(self, capacity: Any, segments: Any) -> int:
            return 4 * capacity

        def encode_(self, *arguments: Any) -> Any: ...

        def decode(self, *arguments: Any) -> Any: ...

    form = copy.copy(FORMATS["fp32 rice"])
    object.__setattr__(form, "values", Own())
    assert not NativeMeanDecoder().takes(PayloadPlan(form, budget_of(3, 0, 100), 100).layout)
