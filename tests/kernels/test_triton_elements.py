"""Codes for every element and blocks with a scale each: Triton's kernels against plain torch, bit for bit."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import case
from kernels.comparison import CODES, CUTS, HALF_CODES, check_blocks, check_one_pass, numbers, random, same
from kernels.interpreter import DEVICE, OTHER_ORDERS, run_programs
from kernels.interpreter import interpreter as interpreter
from kernels.steps import METHODS, NUMEL, Steps, gradients_of
from kernels.waits import watching

from dgc import compression, kernels
from dgc.core.envelope import PayloadError
from dgc.kernels.codes.triton_blocks import TritonBlocks
from dgc.kernels.codes.triton_elements import TritonElementCoder, sums_on
from dgc.kernels.codes.triton_halves import TritonHalves
from dgc.kernels.payload import Codec, Terms
from dgc.kernels.payload.triton import TritonCodec


def backends(coder: Any) -> tuple[Any, Any]:
    triton, reference = (kernels._backend(name, torch.device(DEVICE)) for name in ("triton", "reference"))
    return replace(triton, coder=coder), reference


def compare(make: Any, ranks: int, dtype: Any, flat: bool, steps: Any) -> None:
    """Payloads, means, residuals and reports."""
    coder = TritonElementCoder(64)
    ours, theirs = (Steps(make, backend, ranks, dtype, flat, DEVICE) for backend in backends(coder))
    for step in steps:
        (mine, *found), (expected, *right) = (
            each.step(gradients_of(ranks, step, DEVICE)) for each in (ours, theirs)
        )
        assert all(map(same, ours.payloads, theirs.payloads)), (ranks, step)
        assert all(map(same, sum(found, []), sum(right, []))), (ranks, step)
        for own, other in zip(mine, expected, strict=True):
            assert own.nonfinite == other.nonfinite and (own.nonfinite is not None) == (step == 2)
            assert own.is_finite


@pytest.mark.parametrize("name", METHODS)
def test_steps(name: Any) -> None:
    """The second with NaN and inf on the last rank."""
    compare(METHODS[name], 2, torch.float32, False, (1, 2))


def test_types_of_gradients() -> None:
    for ranks, dtype, flat in ((1, torch.float64, True), (3, torch.bfloat16, False), (1, torch.float16, True)):
        compare(METHODS["scaled signs"], ranks, dtype, flat, (1,))


@pytest.mark.parametrize("order", OTHER_ORDERS)
@pytest.mark.parametrize("name", METHODS)
def test_the_order_of_programs_changes_nothing(name: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment has more than one group of tiles. The last rank has NaN and inf in several tiles."""
    monkeypatch.setattr("dgc.kernels.codes.triton_elements.SUMS", 2)
    backend, _ = backends(TritonElementCoder(32))

    def run() -> list[Any]:
        steps = Steps(METHODS[name], backend, 2, torch.float32, False, DEVICE)
        found = list[Any]()
        for step in (1, 2):
            results, means, errors = steps.step(gradients_of(2, step, DEVICE))
            found += [*steps.payloads, *means, *errors]
            assert [result.nonfinite is not None for result in results] == [step == 2] * 2
        return found

    expected = run()
    run_programs(order, monkeypatch)
    assert all(map(same, run(), expected))


def test_a_changed_byte_is_found() -> None:
    """In header, table and padding. The next step counts from zero."""
    backend, reference = backends(TritonElementCoder(64))
    ours, theirs = (
        Steps(METHODS["scaled signs"], each, 2, torch.float32, True, DEVICE) for each in (backend, reference)
    )
    nbytes = 24 + 8 * -(-compression.ScaledSignCompressor().nbytes(ours.buckets[0]) // 8)
    for place in (7, 9, 17, 24, nbytes - 1):

        def change(payloads: Any, place: int = place) -> None:
            payloads[1][place] ^= 64

        messages = []
        for steps in (ours, theirs):
            with warnings.catch_warnings(), pytest.raises(PayloadError, match="rank 1 ") as refused:
                warnings.simplefilter("ignore", RuntimeWarning)  # the interpreter's, of an inf in a table
                steps.step(gradients_of(2, 1, DEVICE), change)
            messages.append(str(refused.value))
        assert messages[0] == messages[1], place
    assert not sums_on(torch.device(DEVICE), 0, 2).any()


@pytest.fixture
def step_whose_mean_overflows(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The result, and where the host waited. The residual makes the mean too large for fp16."""
    monkeypatch.setattr("dgc.comm.requests.HOST", "no device of this machine")  # as on a GPU
    backend, _ = backends(TritonElementCoder(64))
    steps = Steps(METHODS["scaled signs"], backend, 1, torch.float16, True, DEVICE)
    steps.step([torch.full((NUMEL,), 3e4, device=DEVICE)])
    next(iter(steps.states[0].errors())).fill_(1e5)
    with warnings.catch_warnings(), watching() as watch:
        warnings.simplefilter("ignore", RuntimeWarning)  # the interpreter's, of the overflow
        (result,), _, _ = steps.step([torch.zeros(NUMEL, device=DEVICE)])
    return result, watch.seen


def test_a_mean_that_overflows_is_reported(step_whose_mean_overflows: Any) -> None:
    result, _ = step_whose_mean_overflows
    assert result.nonfinite is not None and "0" in result.nonfinite


def test_the_host_first_waits_at_the_end_of_the_step(step_whose_mean_overflows: Any) -> None:
    _, seen = step_whose_mean_overflows
    end = {
        "elsewhere",
        "core/results.py overflow_message",
        "kernels/selection/__init__.py first_tensor_nonfinite",
    }
    assert set(seen) <= end | {"kernels/launch.py _table"}


def test_blocks_agree_bit_for_bit_whatever_the_order_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, code in enumerate(CODES):
        cuts, rows, make = CUTS[number % 3], (1, 3)[number // 3 % 2], (random, numbers)[number % 2]
        blocks, bounds, v = TritonBlocks(512 << number % 2), torch.tensor(cuts, device=DEVICE), make(cuts[-1], 1)
        for order in OTHER_ORDERS if cuts == CUTS[2] else OTHER_ORDERS[:1]:
            run_programs(order, monkeypatch)
            with case(cuts, code, rows, order):
                coded = check_blocks(blocks, v.to(DEVICE), bounds, code, rows)
        check_one_pass(blocks, v.to(DEVICE), bounds, code, coded)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("code", HALF_CODES, ids=["nearest", "random"])
def test_halves_agree_bit_for_bit(code: Any, rows: int) -> None:
    for cuts in CUTS:
        halves, bounds = TritonHalves(), torch.tensor(cuts, device=DEVICE)
        for v in random(cuts[-1], 1), numbers(cuts[-1], 2):
            with case(cuts):
                coded = check_blocks(halves, v.to(DEVICE), bounds, code, rows)
        check_one_pass(halves, v.to(DEVICE), bounds, code, coded)


def test_rows_are_sealed_alike_whatever_the_order_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no codes, and of more words than a program takes."""
    first, bounds = torch.tensor(7, device=DEVICE), torch.tensor([0, 5, 9], device=DEVICE)
    none, one = torch.tensor(0, dtype=torch.int32, device=DEVICE), torch.tensor(1.0, device=DEVICE)
    for nbytes in (24, 32, 20_000):
        given = torch.randint(256, (3, nbytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        expected, header = given.to(DEVICE), (none, first, bounds, one, Terms(0.5, 9))
        Codec().seal_rows_(expected, *header)
        for order in OTHER_ORDERS:
            run_programs(order, monkeypatch)
            ours = given.to(DEVICE, copy=True)
            TritonCodec().seal_rows_(ours, *header)
            assert same(ours, expected), nbytes
