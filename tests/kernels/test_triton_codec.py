"""Payloads of the Triton backend against plain torch, bit for bit; in Triton's interpreter without a GPU."""

import warnings
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from kernels import comparison
from kernels.comparison import REFERENCE, same
from kernels.waits import watching

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
with pytest.MonkeyPatch.context() as patch:
    if DEVICE == "cpu":
        patch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton", reason="Triton is not installed")
    from dgc import wire
    from dgc.kernels.codec import WORDS, Codec
    from dgc.kernels.selection import SparseVector
    from dgc.kernels.triton_codec import TritonCodec, TritonMeanDecoder, counters_on
    from dgc.kernels.triton_selection import INTERPRETED
    from dgc.wire.payload import PayloadPlan

CASTS = ("fp32", "fp16", "bf16")
VALUES = (*map(wire.CastValues, CASTS), wire.SignValues(), wire.Int8Values(), wire.TwoBitValues())
# elements of the bucket, of a selection, of the payload: none, one, an odd number, more than one program
SIZES = ((5000, 0, 50), (10, 1, 1), (5000, 37, 51), (9000, 2100, 2100))


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these tests alone."""
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def plan_of(values: Any, indices: Any, numel: Any, capacity: Any) -> Any:
    budget = comparison.budget_of(
        [0, numel // 3, numel - numel // 3], [0, capacity // 2, -(-capacity // 2)], DEVICE
    )
    return PayloadPlan(wire.SparseFormat(values, wire.PlainIndices(indices)), budget, numel, 0.01)


def selection_of(numel: Any, count: Any, capacity: Any, seed: Any, scale: float = 1.0) -> Any:
    chosen = torch.randperm(numel, generator=torch.Generator().manual_seed(seed))[:count].sort().values
    indices, values = torch.zeros(capacity, dtype=torch.int32), torch.zeros(capacity)
    indices[:count], values[:count] = chosen, comparison.random(count, seed) * scale
    return SparseVector(
        indices.to(DEVICE), values.to(DEVICE), torch.tensor(count, dtype=torch.int32, device=DEVICE)
    )


def test_payloads() -> None:
    """With denormals, values near fp32's largest and of no size, NaN and inf, and each kind of first element."""
    ours, theirs = TritonCodec(), Codec()
    for (numel, count, capacity), values, indices in product(SIZES, CASTS, ("int32", "int64")):
        plan = plan_of(wire.CastValues(values), indices, numel, capacity)
        for scale, first in ((1.0, numel), (1e-40, 0), (1e37, numel - 1), (0.0, numel // 3)):
            selection = selection_of(numel, count, capacity, 3, scale)
            # PyTorch's own bits of a NaN in bf16 depend on the device; the receiver refuses all of them
            if scale == 1.0 and count > 1 and values != "bf16":
                selection.values[:2] = torch.tensor([float("nan"), float("inf")])
            before = ours.launches
            at = torch.tensor(first, device=DEVICE)
            mine, expected = plan.encode(ours, selection, at), plan.encode(theirs, selection, at)
            assert same(mine.payload, expected.payload), (numel, count, values, indices, scale)
            assert mine.sent.values.equal(expected.sent.values) or scale == 1.0
            assert ours.launches - before == 1 + (values != "fp32")
    assert not counters_on(torch.device(DEVICE), 0).any()


def test_headers_of_other_payloads() -> None:
    ours, theirs = TritonCodec(), Codec()
    for words in (3, 4, 1027, 1028, 5000):
        payload = torch.randint(
            0, 256, (8 * words,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
        )
        mine, expected = (payload.to(DEVICE).clone() for _ in range(2))
        for codec, given in ((ours, mine), (theirs, expected)):
            given[:24] = 0
            plan = plan_of(wire.CastValues(), "int32", 100, 7)
            scale = torch.tensor(0.5, device=DEVICE)
            count, first = torch.tensor(7, dtype=torch.int32, device=DEVICE), torch.tensor(40, device=DEVICE)
            codec.seal_(given, count, first, plan.budget.bounds, scale, plan.terms)
        assert torch.equal(mine, expected), words
    assert ours.launches == 5


def dense_mean(plan: Any, payloads: Any, size: Any) -> Any:
    """The numbers of all payloads, and the mean, in plain torch."""
    decoded = plan.decode(Codec(), payloads)
    merged = REFERENCE.merge_mean(decoded.contents, size, plan.numel)
    indices, values = merged.valid()
    mean = torch.zeros(plan.numel, device=DEVICE)
    mean[indices] = values
    return torch.stack([scalar.int() for scalar in decoded.scalars]), mean


def test_means() -> None:
    """Of one rank, and of several whose sum depends on the order. Two launches, whatever their number."""
    for i, ((numel, count, capacity), values) in enumerate(product(SIZES, VALUES)):
        plan, decoder = plan_of(values, ("int32", "int64")[i % 5 % 2], numel, capacity), TritonMeanDecoder()
        selections = [selection_of(numel, count, capacity, seed, 10.0 ** (3 * seed)) for seed in range(4)]
        end = torch.tensor(numel, device=DEVICE)
        payloads = [plan.encode(Codec(), selection, end).payload for selection in selections]
        for ranks in (1, 4):
            mean = torch.full((numel,), float("nan"), device=DEVICE)
            # as after an all-gather, and each on its own
            given = torch.stack(payloads[:ranks]).unbind() if i % 2 else payloads[:ranks]
            numbers = decoder.mean_into_(mean, given, plan.layout, plan.budget.bounds, ranks)
            words, expected = dense_mean(plan, payloads[:ranks], ranks)
            assert same(mean, expected), (numel, count, values, ranks)
            assert torch.equal(numbers[:-1], words) and numbers[-1] == 1
        assert decoder.launches == 4


def test_broken_payloads_are_found_and_not_read() -> None:
    generator = torch.Generator().manual_seed(0)
    for values in (wire.CastValues("fp16"), wire.TwoBitValues()):
        plan = plan_of(values, "int32", 3000, 600)
        end = torch.tensor(3000, device=DEVICE)
        whole = [plan.encode(Codec(), selection_of(3000, 600, 600, seed), end).payload for seed in range(2)]
        for trial in range(12):
            payloads = [payload.clone() for payload in whole]
            place = int(torch.randint(plan.layout.nbytes, (), generator=generator)) if trial else 0
            payloads[trial % 2][place] ^= 1 << trial % 8
            mean = torch.zeros(3000, device=DEVICE)
            numbers = TritonMeanDecoder().mean_into_(mean, payloads, plan.layout, plan.budget.bounds, 2)
            ours, theirs = (n.view(2, WORDS) for n in (numbers[:-1], dense_words(plan, payloads)))
            assert torch.equal(ours, theirs), (values, trial)
            assert not ours[trial % 2, 4]
    plan = plan_of(wire.CastValues("fp32"), "int32", 3000, 600)
    selections = [selection_of(3000, 600, 600, 0, 3e38) for _ in range(2)]
    payloads = [plan.encode(Codec(), selection, end).payload for selection in selections]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the interpreter's, of the overflow
        numbers = TritonMeanDecoder().mean_into_(mean, payloads, plan.layout, plan.budget.bounds, 2)
    assert numbers[-1] == 0, "the sum is not finite"


def dense_words(plan: Any, payloads: Any) -> Any:
    return torch.stack([scalar.int() for scalar in plan.decode(Codec(), payloads).scalars])


def test_the_order_of_programs_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs them one after the other. In another order, a race would give other bits."""
    if not INTERPRETED:
        return
    plan, end = plan_of(wire.CastValues("fp16"), "int32", 9000, 2100), torch.tensor(9000)
    selections = [selection_of(9000, 2100, 2100, seed) for seed in range(3)]

    def run() -> Any:
        payloads = [plan.encode(TritonCodec(), selection, end).payload for selection in selections]
        mean = torch.empty(9000)
        numbers = TritonMeanDecoder().mean_into_(mean, payloads, plan.layout, plan.budget.bounds, 3)
        return [*payloads, mean, numbers]

    expected = run()
    for order in (lambda *n: [*range(*n)][::-1], lambda *n: Random(0).sample(range(*n), len(range(*n)))):
        monkeypatch.setattr("triton.runtime.interpreter.range", order, raising=False)
        assert all(map(same, run(), expected))


def test_nothing_waits_for_the_device() -> None:
    plan, codec, decoder = plan_of(wire.CastValues("fp16"), "int32", 5000, 51), TritonCodec(), TritonMeanDecoder()
    selection, end = selection_of(5000, 37, 51, 0), torch.tensor(5000, device=DEVICE)
    mean = torch.empty(5000, device=DEVICE)
    with watching() as watch:
        payloads = torch.stack([plan.encode(codec, selection, end).payload] * 2).unbind()
        decoder.mean_into_(mean, payloads, plan.layout, plan.budget.bounds, 2)
    assert watch.seen == []
