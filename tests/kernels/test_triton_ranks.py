"""Means of more ranks than one launch of Triton's kernels adds, against plain torch, bit for bit."""

from itertools import product
from typing import Any

import pytest
import torch
from kernels import comparison
from kernels.comparison import CODES, HALF_CODES, check_blocks, same
from kernels.interpreter import DEVICE, ORDERS, OTHER_ORDERS, run_programs
from kernels.interpreter import interpreter as interpreter
from kernels.quantizing import REFERENCE as QUANTIZERS
from kernels.test_triton_codec import dense_mean, dense_words, plan_of, selection_of
from kernels.test_triton_selection import reads as reads

from dgc.kernels.codes import layout_of
from dgc.kernels.codes.blocks import BlockCode
from dgc.kernels.codes.elements import WORDS, ElementCode, Form, Scale
from dgc.kernels.codes.halves import HalfCode
from dgc.kernels.codes.triton import TritonQuantizers
from dgc.kernels.codes.triton_blocks import TritonBlocks
from dgc.kernels.codes.triton_elements import TritonElementCoder, sums_on
from dgc.kernels.codes.triton_halves import TritonHalves
from dgc.kernels.launch import MOST_READ, Launcher, groups_of_ranks
from dgc.kernels.payload import Codec, Terms
from dgc.kernels.payload.triton import TritonMeanDecoder
from dgc.sparse import payloads as formats

RANKS = (1, 2, 5, 9, 17)


def ranks_in(order: str) -> tuple[int, ...]:
    return RANKS if order == next(iter(ORDERS)) else (9,)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched."""
    names, launch = list[str](), Launcher.__call__

    def noted(launcher: Any, kernel: Any, near: Any, programs: int, *arguments: Any) -> None:
        names.append(kernel.fn.__name__)
        launch(launcher, kernel, near, programs, *arguments)

    monkeypatch.setattr(Launcher, "__call__", noted)
    return names


@pytest.fixture
def loads(request: pytest.FixtureRequest) -> list[Any]:
    """Of each launch: kernel, the most bytes that a program has read, and what is stated."""
    found: list[Any] = request.getfixturevalue("reads")
    return found


def set_most_read(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a program that adds up payloads."""
    monkeypatch.setattr("dgc.kernels.launch.MOST_READ", nbytes)


def test_ranks_that_fit_are_one_group_without_sums_to_continue() -> None:
    assert groups_of_ranks(4, MOST_READ // 4, continued=MOST_READ // 2) == [(0, 4)]
    assert groups_of_ranks(1, 2 * MOST_READ) == [(0, 1)]


def test_groups_have_all_ranks_in_their_order() -> None:
    assert groups_of_ranks(5, MOST_READ // 4, continued=MOST_READ // 2) == [(0, 2), (2, 4), (4, 5)]
    assert groups_of_ranks(3, MOST_READ) == [(0, 1), (1, 2), (2, 3)]
    assert groups_of_ranks(5, 1, at_most=2) == [(0, 2), (2, 4), (4, 5)]


# --- indices and values ---------------------------------------------------------------------------

FORMS: dict[str, Any] = {
    "fp16, int32": (formats.CastValues("fp16"), "int32"),
    "bf16, int64": (formats.CastValues("bf16"), "int64"),
    "2 bits, packed": (formats.TwoBitValues(), "packed"),
}


def sent_by(plan: Any, numel: int, count: int, capacity: int, ranks: int) -> list[Any]:
    """Payloads whose sum depends on the order."""
    end = torch.tensor(numel, device=DEVICE)
    chosen = [selection_of(numel, count - r, capacity, r, 10.0 ** (r % 5)) for r in range(ranks)]
    return [plan.encode(Codec(), selection, end).payload for selection in chosen]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", FORMS)
def test_a_mean_of_entries_in_any_number_of_launches(
    form: str, order: str, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch adds some ranks of a dense tile, and more of the others."""
    values, indices = FORMS[form]
    plan = plan_of(values, indices, 5000, 900)
    sent = sent_by(plan, 5000, 900, 900, max(RANKS))
    set_most_read(1, monkeypatch)
    run_programs(order, monkeypatch)
    for ranks in ranks_in(order):
        launches.clear()
        mean, bounds = torch.full((5000,), float("nan"), device=DEVICE), plan.budget.bounds
        numbers = TritonMeanDecoder().mean_into_(mean, sent[:ranks], plan.layout, bounds, ranks)
        assert launches.count("merge") == ranks
        assert same(mean, dense_mean(plan, sent[:ranks], ranks))
        assert torch.equal(numbers[:-1], dense_words(plan, sent[:ranks])) and numbers[-1] == 1


@pytest.mark.parametrize("ranks", [2, 5])
def test_a_mean_of_full_tiles_takes_as_many_launches_as_64_kilobytes_allow(
    ranks: int, launches: list[str]
) -> None:
    """Two ranks of a tile of 2048 entries in fp16 and int32 are read by one program."""
    plan = plan_of(formats.CastValues("fp16"), "int32", 2048, 2048)
    sent = sent_by(plan, 2048, 2048, 2048, ranks)
    mean = torch.full((2048,), float("nan"), device=DEVICE)
    TritonMeanDecoder().mean_into_(mean, sent, plan.layout, plan.budget.bounds, ranks)
    assert launches.count("merge") == -(-ranks // 2) and same(mean, dense_mean(plan, sent, ranks))


@pytest.mark.parametrize("rank", [0, 8])
def test_a_damaged_payload_of_any_launch_is_named_and_not_added(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(formats.CastValues("fp16"), "int32", 3000, 600)
    sent = sent_by(plan, 3000, 600, 600, 9)
    whole, size = [payload for r, payload in enumerate(sent) if r != rank], 9
    sent[rank] = sent[rank].clone()
    sent[rank][40] ^= 1
    set_most_read(1, monkeypatch)
    mean = torch.full((3000,), float("nan"), device=DEVICE)
    numbers = TritonMeanDecoder().mean_into_(mean, sent, plan.layout, plan.budget.bounds, size)
    assert torch.equal(numbers[:-1], dense_words(plan, sent)) and same(mean, dense_mean(plan, whole, size))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of values that overflow
def test_a_sum_that_overflows_is_reported_by_the_last_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, end = plan_of(formats.CastValues("fp32"), "int32", 3000, 600), torch.tensor(3000, device=DEVICE)
    sent = [plan.encode(Codec(), selection_of(3000, 600, 600, 0, 3e38), end).payload] * 4
    set_most_read(1, monkeypatch)
    mean = torch.zeros(3000, device=DEVICE)
    assert TritonMeanDecoder().mean_into_(mean, sent, plan.layout, plan.budget.bounds, 4)[-1] == 0


# --- codes for every element ----------------------------------------------------------------------

BOUNDS = torch.tensor([0, 140, 173, 173, 238])
ELEMENTS: dict[str, Any] = {
    "signs": ElementCode(Form.SIGNS, Scale.MEAN, BOUNDS, 1),
    "majority": ElementCode(Form.SIGNS, Scale.NONZERO, BOUNDS, 1, majority=True),
    "2 bits": ElementCode(Form.TERNARY, Scale.NONE, BOUNDS, 2),
    "8 bits": ElementCode(Form.LEVELS, Scale.LARGEST, BOUNDS, 8, 127),
}


def coded_by(code: ElementCode, ranks: int) -> tuple[list[Any], Any]:
    """Payloads of all ranks, and the thresholds that they have in common."""
    coder, n = TritonElementCoder(64), int(BOUNDS[-1])
    given = torch.tensor([0.5, 0.25, 1.0, 2.0], device=DEVICE) if code.form == Form.TERNARY else None
    payloads = []
    for r in range(ranks):
        v = torch.empty(n, device=DEVICE)
        measured = coder.measure_(code, (comparison.random(n, r, DEVICE) * 10.0 ** (r % 5),), v, False)
        payloads.append(coder.encode(code, v, measured, given, None, False, code.bounds, Terms(1.0, 0))[0])
    return payloads, given


def mean_of(code: ElementCode, payloads: list[Any], given: Any) -> Any:
    """In plain torch."""
    ranks, segments, mean = len(payloads), len(BOUNDS) - 1, torch.zeros(int(BOUNDS[-1]), device=DEVICE)
    nbytes = layout_of(code.bounds, code.bits, code.unit).nbytes
    codes = [payload[code.begin : code.begin + nbytes] for payload in payloads]
    tables = [payload[24 : 24 + 4 * segments].view(torch.float32) for payload in payloads]
    if code.form == Form.SIGNS:
        QUANTIZERS.sign_mean_(codes, code.bounds, tables, None, ranks, mean)
    elif code.form == Form.TERNARY:
        QUANTIZERS.tern_mean_(codes, code.bounds, [torch.ones_like(given)] * ranks, given, ranks, mean)
    else:
        QUANTIZERS.uniform_mean_(codes, code.bounds, tables, code.levels, code.bits, ranks, mean)
    return mean.sign() if code.majority else mean


@pytest.mark.parametrize(
    ("dtype", "order"),
    [*product([torch.float32], ORDERS), *product([torch.bfloat16, torch.float64], OTHER_ORDERS[:1])],
    ids=str,
)
@pytest.mark.parametrize("name", ELEMENTS)
def test_a_mean_of_every_element_in_any_number_of_launches(
    name: str, dtype: Any, order: str, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = ElementCode(**{**vars(ELEMENTS[name]), "bounds": BOUNDS.to(DEVICE)})
    payloads, given = coded_by(code, max(RANKS))
    set_most_read(420, monkeypatch)
    run_programs(order, monkeypatch)
    for ranks in ranks_in(order):
        launches.clear()
        mean = torch.full((int(BOUNDS[-1]),), float("nan"), dtype=dtype, device=DEVICE)
        numbers = TritonElementCoder(64).mean_into_(mean, code, payloads[:ranks], given)
        assert same(mean, mean_of(code, payloads[:ranks], given).to(dtype)), ranks
        words = [int(word) for word in Codec().words_of(payloads[:ranks])]
        assert numbers[-1] == 1 and numbers[:-1].tolist() == words, ranks
    assert 2 < len(launches) <= ranks
    assert not sums_on(torch.device(DEVICE), 0, 17).any()


@pytest.mark.parametrize("rank", [0, 7, 16])
def test_a_changed_byte_in_a_payload_of_any_launch_is_found(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    code = ElementCode(**{**vars(ELEMENTS["signs"]), "bounds": BOUNDS.to(DEVICE)})
    payloads, _ = coded_by(code, 17)
    payloads[rank][-1] ^= 64
    set_most_read(420, monkeypatch)
    mean = torch.empty(int(BOUNDS[-1]), device=DEVICE)
    numbers = TritonElementCoder(64).mean_into_(mean, code, payloads, None)
    assert numbers[:-1].view(17, WORDS)[:, 1].tolist() == [int(r != rank) for r in range(17)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_mean_that_overflows_is_reported_by_the_last_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    code = ElementCode(**{**vars(ELEMENTS["signs"]), "bounds": BOUNDS.to(DEVICE)})
    coder, v = TritonElementCoder(64), torch.full((238,), 1e5, device=DEVICE)
    measured = coder.measure_(code, (v.clone(),), v, False)
    payload, _ = coder.encode(code, v, measured, None, None, False, code.bounds, Terms(1.0, 0))
    set_most_read(1, monkeypatch)
    mean = torch.empty(238, dtype=torch.float16, device=DEVICE)
    numbers = coder.mean_into_(mean, code, [payload] * 3, None)
    assert numbers[-1] == 0 and not mean.isfinite().any()


# --- codes alone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("width", [1, 2])
def test_a_mean_of_codes_in_any_number_of_launches(
    width: int, order: str, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds, kernels = BOUNDS.to(DEVICE), TritonQuantizers(64)
    scales = [comparison.random(4, r, DEVICE).abs() * 10.0 ** (r % 5) for r in range(max(RANKS))]
    vs = [comparison.random(238, r, DEVICE) for r in range(max(RANKS))]
    if width == 1:
        codes = [QUANTIZERS.sign_encode(v, bounds, s, s)[0] for v, s in zip(vs, scales, strict=True)]
    else:
        codes = [QUANTIZERS.tern_encode(v, bounds, s)[0] for v, s in zip(vs, scales, strict=True)]
    set_most_read(256 + 3 * 64 * width // 8, monkeypatch)
    run_programs(order, monkeypatch)
    for ranks, factors in product(ranks_in(order), (None, scales[3])):
        launches.clear()
        mine, theirs = (torch.full((238,), 7.0, device=DEVICE) for _ in range(2))
        for q, mean in ((kernels, mine), (QUANTIZERS, theirs)):
            mean_ = q.sign_mean_ if width == 1 else q.tern_mean_
            mean_(codes[:ranks], bounds, scales[:ranks], factors, ranks, mean)
        together = 256 // (8 * width) + 3  # without sums to continue
        assert same(mine, theirs) and len(launches) == (1 if ranks <= together else -(-ranks // 3)), ranks


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off on a GPU")
def test_no_program_that_adds_entries_reads_more_than_its_kernel_states(loads: list[Any]) -> None:
    """Of full tiles."""
    plan = plan_of(formats.CastValues("fp16"), "int32", 2048, 2048)
    sent, mean = sent_by(plan, 2048, 2048, 2048, 5), torch.zeros(2048, device=DEVICE)
    loads.clear()
    TritonMeanDecoder().mean_into_(mean, sent, plan.layout, plan.budget.bounds, 5)
    merged = [own for own in loads if own[0] == "merge"]
    assert len(merged) == 3 and merged[0][1] >= 0.6 * merged[0][2]
    assert all(most <= stated <= MOST_READ for _, most, stated in merged), merged


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off on a GPU")
@pytest.mark.parametrize("name", ELEMENTS)
def test_no_program_that_adds_codes_reads_more_than_its_kernel_states(
    name: str, loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = ElementCode(**{**vars(ELEMENTS[name]), "bounds": BOUNDS.to(DEVICE)})
    payloads, given = coded_by(code, 9)
    set_most_read(420, monkeypatch)
    loads.clear()
    TritonElementCoder(64).mean_into_(torch.empty(238, device=DEVICE), code, payloads, given)
    assert len(loads) > 1
    for _, most, stated in loads:
        assert 0.4 * stated <= most <= stated <= 420, (most, stated)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off on a GPU")
@pytest.mark.parametrize("width", [1, 2])
def test_no_program_that_adds_fields_reads_more_than_its_kernel_states(
    width: int, loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = torch.zeros(40, layout_of(BOUNDS, width, 4).nbytes, dtype=torch.uint8, device=DEVICE).unbind()
    each, q = torch.ones(4, device=DEVICE), TritonQuantizers(64)
    set_most_read(256 + 5 * 64 * width // 8, monkeypatch)
    mean = torch.zeros(238, device=DEVICE)
    (q.sign_mean_ if width == 1 else q.tern_mean_)(codes, BOUNDS.to(DEVICE), [each] * 40, each, 40, mean)
    assert len(loads) == 8
    for name, most, stated in loads[1:]:
        assert name == "mean_of_fields" and most == stated, (most, stated)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off on a GPU")
@pytest.mark.parametrize("ranks", [3, 40])
def test_no_program_that_adds_rows_reads_more_than_its_kernel_states(ranks: int, loads: list[Any]) -> None:
    for code in (*CODES, *HALF_CODES):
        kernels: Any = TritonHalves() if code in HALF_CODES else TritonBlocks()
        rows = torch.zeros(ranks, code.row_bytes(4096 // code.size), dtype=torch.uint8, device=DEVICE)
        kernels.add_sum_(rows.unbind(), code, torch.zeros(4096, device=DEVICE))
    assert len(loads) >= len(CODES) + len(HALF_CODES)
    for name, most, stated in loads:
        assert 0.9 * stated <= most <= stated <= MOST_READ, (name, most, stated)


BLOCK_CODES = {
    "8 bits": (BlockCode(8, 64, False), TritonBlocks(512)),
    "4 bits, rotated": (BlockCode(4, 64, True), TritonBlocks(512)),
    "halves": (HalfCode(), TritonHalves()),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", BLOCK_CODES)
def test_sums_of_rows_in_any_number_of_launches(
    name: str, order: str, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch adds two ranks."""
    code, kernels = BLOCK_CODES[name]
    set_most_read({"8 bits": 3200, "4 bits, rotated": 2700, "halves": 8300}[name], monkeypatch)
    run_programs(order, monkeypatch)
    for rows in ranks_in(order):
        launches.clear()
        v, bounds = comparison.random(3000, 1, DEVICE), torch.tensor([0, 3000], device=DEVICE)
        check_blocks(kernels, v, bounds, code, rows)
        assert sum(kernel.startswith("add_") for kernel in launches) == -(-rows // 2), rows
