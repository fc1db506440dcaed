"""Payloads of the Triton backend against plain torch, bit for bit; in Triton's interpreter without a GPU."""

from itertools import product
from typing import Any

import pytest
import torch
from kernels import comparison
from kernels.comparison import REFERENCE, same
from kernels.interpreter import DEVICE, ORDERS, OTHER_ORDERS, run_programs
from kernels.interpreter import interpreter as interpreter
from kernels.waits import watching
from sparse import payloads

from dgc.core.envelope import PayloadError
from dgc.kernels.launch import zeros_on
from dgc.kernels.payload import WORDS, Codec, triton_coded
from dgc.kernels.payload.triton import TritonCodec, TritonMeanDecoder, counters_on, plan_code
from dgc.kernels.selection import PassInputs, SparseVector
from dgc.kernels.selection.triton import TritonSelection
from dgc.sparse import payloads as formats
from dgc.sparse.payloads.payload import PayloadPlan

CASTS = ("fp32", "fp16", "bf16")
VALUES = (*map(formats.CastValues, CASTS), formats.SignValues(), formats.Int8Values(), formats.TwoBitValues())
# elements of the bucket, of a selection, of the payload: none, one, an odd number, more than one program
SIZES = ((5000, 0, 50), (10, 1, 1), (5000, 37, 51), (9000, 2100, 2100))


def plan_of(values: Any, indices: Any, numel: Any, capacity: Any) -> Any:
    sizes, ks = [0, numel // 3, numel - numel // 3], [0, capacity // 2, -(-capacity // 2)]
    budget = comparison.budget_of(sizes, ks, DEVICE)
    return PayloadPlan(formats.SparseFormat(values, payloads.INDICES[indices]), budget, numel, 0.01)


def on_device(given: Any) -> Any:
    return SparseVector(*(x.to(DEVICE) for x in (given.indices, given.values, given.count)))


def selection_of(numel: Any, count: Any, capacity: Any, seed: Any, scale: float = 1.0) -> Any:
    values = comparison.random(count, seed) * scale
    return on_device(payloads.selection_of(payloads.scattered(numel, count, seed), values, capacity))


def test_payloads() -> None:
    """With denormals, values near fp32's largest and of no size, and each kind of first element."""
    ours, theirs = TritonCodec(), Codec()
    for (numel, count, capacity), values, indices in product(SIZES, CASTS, ("int32", "int64")):
        plan = plan_of(formats.CastValues(values), indices, numel, capacity)
        for scale, first in ((1.0, numel), (1e-40, 0), (1e37, numel - 1), (0.0, numel // 3)):
            selection = selection_of(numel, count, capacity, 3, scale)
            at = torch.tensor(first, device=DEVICE)
            mine, expected = plan.encode(ours, selection, at), plan.encode(theirs, selection, at)
            assert same(mine.payload, expected.payload), (numel, count, values, indices, scale)
            assert same(mine.sent.values, expected.sent.values), (numel, count, values, indices, scale)
    assert not counters_on(torch.device(DEVICE), 0).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("values", [*VALUES[:4], VALUES[5]])
def test_a_value_that_is_not_finite_is_refused_by_the_receiver(values: Any, bad: float) -> None:
    """Whatever the bits of its NaN, which depend on the device in half precision. int8 limits values first."""
    plan, selection = plan_of(values, "int32", 5000, 51), selection_of(5000, 37, 51, 3)
    selection.values[1] = bad
    payload = plan.encode(TritonCodec(), selection, torch.tensor(5000, device=DEVICE)).payload
    with pytest.raises(PayloadError, match="rank 0 sent values that are not finite"):
        plan.decode(Codec(), [payload]).wait()
    mean = torch.zeros(5000, device=DEVICE)
    with pytest.raises(PayloadError, match="rank 0 sent values that are not finite"):
        plan.mean_into_(mean, TritonMeanDecoder(), [payload], 1).wait()


def hard_selections() -> Any:
    """(size of the bucket, selection): of codes that do not fit, and of sums whose bits depend on the order."""
    n = 600
    signs = torch.where(torch.arange(n) % 2 > 0, 1.5, -1.5)
    sparse = torch.where(torch.arange(n) % 128 == 7, 3000, 1).cumsum(0)
    multiples = (torch.arange(n) * 17 + 16).int()
    wide = comparison.random(n, 1).cpu()
    kinds = (
        (40_000, sparse, wide.sign() * torch.exp(wide * 15)),
        (40_000, sparse * 2, wide),
        (10_400, multiples, signs),  # every value is a bin's edge if r is 4
        (10_400, multiples, wide * 1e-41),
        (10_400, multiples, wide * 1e37),
    )
    for numel, indices, values in kinds:
        yield numel, on_device(payloads.selection_of(indices, values))


def test_coded_payloads() -> None:
    ours, theirs, thinned = TritonCodec(), Codec(), 0
    forms = [*product(VALUES, ("packed", "rice", "chunks")), *product(VALUES[3:], ("int32", "int64"))]
    sizes = (SIZES * 6)[: len(forms)]
    given = [(numel, selection_of(numel, count, capacity, 3)) for numel, count, capacity in sizes]
    tables = (formats.SignValues(), formats.TwoBitValues(4.0), formats.Int8Values())
    forms += [(tables[i % 3], ("packed", "rice", "int32", "rice")[i % 4]) for i in range(12)]
    given += ([*hard_selections()] * 3)[:12]
    # values so small that half precision scales them
    forms += product(VALUES[1:3], ("packed", "rice"))
    given += [(5000, selection_of(5000, 37, 51, 3, 1e-9))] * 4
    for (values, indices), (numel, selection) in zip(forms, given, strict=True):
        plan = plan_of(values, indices, numel, selection.values.numel())
        first = torch.tensor(numel // 2, device=DEVICE)
        mine, expected = plan.encode(ours, selection, first), plan.encode(theirs, selection, first)
        found, right = (
            (e.payload, e.own, e.sent.indices, e.sent.values, e.sent.count.view(1)) for e in (mine, expected)
        )
        assert all(map(same, found, right)), (values, indices, numel)
        thinned += int(expected.sent.count < selection.count)
    assert thinned > 2 and not counters_on(torch.device(DEVICE), 0).any()


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of parts whose sums a program adds, so that these are added on several levels."""
    monkeypatch.setattr(triton_coded, "FAN", triton_coded.tl.constexpr(2))
    monkeypatch.setattr("dgc.kernels.payload.triton.FAN", triton_coded.FAN)
    monkeypatch.setattr("dgc.kernels.payload.triton.plan_code", plan_code.__wrapped__)


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("indices", ["packed", "rice"])
def test_codes_of_many_parts(indices: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed, also if not all elements fit. The launches leave the zeros that they share."""
    n, capacity = 300_000, 5000
    bunches = torch.where(torch.arange(capacity) % 128 == 7, 3000, 1).cumsum(0)
    run_programs(order, monkeypatch)
    plan, kept = plan_of(formats.CastValues("fp16"), indices, n, capacity), []
    for chosen in (payloads.scattered(n, 4500), bunches):
        selection = on_device(payloads.selection_of(chosen, None, capacity))
        at = torch.tensor(n, device=DEVICE)
        mine, expected = plan.encode(TritonCodec(), selection, at), plan.encode(Codec(), selection, at)
        assert same(mine.payload, expected.payload) and same(mine.sent.indices, expected.sent.indices)
        kept.append(int(mine.sent.count) == len(chosen))
    assert kept == [True, indices == "rice"]
    assert not zeros_on(torch.device(DEVICE), 1 << 10).any() and not counters_on(torch.device(DEVICE), 0).any()


def test_headers_of_other_payloads() -> None:
    ours, theirs = TritonCodec(), Codec()
    for words in (3, 4, 1027, 1028, 5000):
        payload = torch.randint(256, (8 * words,), generator=torch.Generator().manual_seed(1)).byte()
        mine, expected = (payload.to(DEVICE).clone() for _ in range(2))
        for codec, given in ((ours, mine), (theirs, expected)):
            given[:24] = 0
            plan = plan_of(formats.CastValues(), "int32", 100, 7)
            scale = torch.tensor(0.5, device=DEVICE)
            count, first = torch.tensor(7, dtype=torch.int32, device=DEVICE), torch.tensor(40, device=DEVICE)
            codec.seal_(given, count, first, plan.budget.bounds, scale, plan.terms)
        assert torch.equal(mine, expected), words
        broken = mine.clone()
        broken[-1] ^= 1
        both = (mine, broken, mine)
        assert ours.words_of(both).tolist() == [int(word) for word in theirs.words_of(both)]


def dense_words(plan: Any, sent: Any) -> Any:
    return torch.stack([scalar.int() for scalar in plan.decode(Codec(), sent).scalars])


def dense_mean(plan: Any, sent: Any, size: Any) -> Any:
    """In plain torch."""
    indices, values = REFERENCE.merge_mean(plan.decode(Codec(), sent).contents, size, plan.numel).valid()
    return torch.zeros(plan.numel, device=DEVICE).index_put_((indices,), values)


def test_means() -> None:
    """Of one rank, and of several whose sum depends on the order."""
    for i, ((numel, count, capacity), values) in enumerate(product(SIZES, VALUES)):
        plan, decoder = plan_of(values, [*payloads.INDICES][i % 7 % 5], numel, capacity), TritonMeanDecoder()
        selections = [selection_of(numel, count, capacity, seed, 10.0 ** (3 * seed)) for seed in range(4)]
        end = torch.tensor(numel, device=DEVICE)
        sent = [plan.encode(Codec(), selection, end).payload for selection in selections]
        for ranks in (1, 4):
            mean = torch.full((numel,), float("nan"), device=DEVICE)
            # as after an all-gather, and each on its own
            given = torch.stack(sent[:ranks]).unbind() if i % 2 else sent[:ranks]
            numbers = decoder.mean_into_(mean, given, plan.layout, plan.budget.bounds, ranks)
            assert same(mean, dense_mean(plan, sent[:ranks], ranks)), (numel, count, values, ranks)
            assert torch.equal(numbers[:-1], dense_words(plan, sent[:ranks])) and numbers[-1] == 1


@pytest.fixture(params=["alone", "in parts"])
def divided(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether coded indices are read in parts, small ones on several levels, whatever their number."""
    if request.param == "in parts":
        request.getfixturevalue("small_groups")
        monkeypatch.setattr("dgc.kernels.payload.triton.MOST_READ", 0)
        monkeypatch.setattr("dgc.kernels.payload.triton.LISTED", 2)
    return bool(request.param == "in parts")


@pytest.mark.parametrize("indices", ["packed", "rice", "chunks"])
def test_coded_indices_of_many_parts(indices: str, divided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order of programs. The launches leave the zeros that they share."""
    n, capacity, orders = 16_000, 3000, [*ORDERS][: 3 if divided else 1]
    plan, end = plan_of(formats.CastValues("fp32"), indices, n, capacity), torch.tensor(n, device=DEVICE)
    sent = [plan.encode(Codec(), selection_of(n, 3000 - 1400 * i, capacity, i), end).payload for i in range(2)]
    expected, words = dense_mean(plan, sent, 2), dense_words(plan, sent)
    for order in orders:
        run_programs(order, monkeypatch)
        mean = torch.full((n,), float("nan"), device=DEVICE)
        numbers = TritonMeanDecoder().mean_into_(mean, sent, plan.layout, plan.budget.bounds, 2)
        assert same(mean, expected) and torch.equal(numbers[:-1], words), order
    assert not zeros_on(torch.device(DEVICE), 1 << 10).any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of values that overflow
@pytest.mark.usefixtures("divided")
def test_broken_payloads_are_found_before_they_are_read() -> None:
    generator, end = torch.Generator().manual_seed(0), torch.tensor(3000, device=DEVICE)
    mean = torch.zeros(3000, device=DEVICE)

    def numbers_of(plan: Any, sent: Any) -> Any:
        return TritonMeanDecoder().mean_into_(mean, sent, plan.layout, plan.budget.bounds, 2)

    kinds = [
        (formats.CastValues("fp16"), "int32"),
        (formats.TwoBitValues(), "packed"),
        (formats.SignValues(), "rice"),
        (formats.Int8Values(), "chunks"),
    ]
    for values, indices in kinds:
        plan = plan_of(values, indices, 3000, 600)
        whole = [plan.encode(Codec(), selection_of(3000, 600, 600, seed), end).payload for seed in range(2)]
        for trial in range(6):
            sent = [payload.clone() for payload in whole]
            place = int(torch.randint(plan.layout.nbytes, (), generator=generator)) if trial else 0
            sent[trial % 2][place] ^= 1 << trial % 8
            numbers = numbers_of(plan, sent)[:-1]
            assert torch.equal(numbers, dense_words(plan, sent)), (values, trial)
            assert not numbers.view(2, WORDS)[trial % 2, 4]
            noisy = payloads.noise_in(sent[trial % 2], generator, (1.0, 0.05, 0.003)[trial % 3], first=12)
            payloads.seal_(noisy)
            sent[trial % 2] = noisy
            assert torch.equal(numbers_of(plan, sent)[:-1], dense_words(plan, sent)), (values, trial)
    assert not zeros_on(torch.device(DEVICE), 1 << 10).any()
    plan = plan_of(formats.CastValues("fp32"), "int32", 3000, 600)
    sent = [plan.encode(Codec(), selection_of(3000, 600, 600, 0, 3e38), end).payload] * 2
    assert numbers_of(plan, sent)[-1] == 0, "the sum is not finite"


def test_the_order_of_programs_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, kernels = plan_of(formats.CastValues("fp16"), "int32", 9000, 900), TritonSelection(256, 64)
    plans = [plan, *(plan_of(formats.TwoBitValues(), indices, 9000, 900) for indices in ("packed", "rice"))]
    gradients = [comparison.random(9000, seed, DEVICE) for seed in range(2)]
    for gradient in gradients:
        gradient[5000:5040] = 2.0  # ties, of which some are sent

    def run() -> Any:
        sent, found, mean = [], [], torch.empty(9000, device=DEVICE)
        for gradient in gradients:
            inputs = PassInputs((gradient,), None, torch.zeros_like(gradient))
            lower_bounds = torch.tensor([0.0, 1.5, 9.0], device=DEVICE)
            chosen = kernels.accumulate_and_select_(inputs, plan.budget, lower_bounds)
            encoded = [p.encode(TritonCodec(), chosen.elements, chosen.first_nonfinite) for p in plans]
            sent.append([done.payload for done in encoded])
            found += [inputs.v, chosen.thresholds, chosen.missed, *sent[-1]]
        for form, given in zip(plans, zip(*sent, strict=True), strict=True):
            found.append(TritonMeanDecoder().mean_into_(mean, given, form.layout, form.budget.bounds, 2))
            found.append(mean.clone())
        return found

    expected = run()
    for order in OTHER_ORDERS:
        run_programs(order, monkeypatch)
        assert all(map(same, run(), expected))


def test_nothing_waits_for_the_device() -> None:
    codec, decoder = TritonCodec(), TritonMeanDecoder()
    selection, end = selection_of(5000, 37, 51, 0), torch.tensor(5000, device=DEVICE)
    mean = torch.empty(5000, device=DEVICE)
    for values, indices in ((formats.CastValues("fp16"), "int32"), (formats.TwoBitValues(), "packed")):
        plan = plan_of(values, indices, 5000, 51)
        plan.encode(codec, selection, end)  # makes tables that are kept
        with watching() as watch:
            sent = torch.stack([plan.encode(codec, selection, end).payload] * 2).unbind()
            decoder.mean_into_(mean, sent, plan.layout, plan.budget.bounds, 2)
        assert watch.seen == []
