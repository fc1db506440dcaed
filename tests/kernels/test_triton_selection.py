"""Triton's selection where candidates fit, overflow or are too few, and what its programs read at most."""

from dataclasses import replace
from inspect import signature
from itertools import accumulate
from typing import Any

import pytest
import torch
from kernels import comparison
from kernels.comparison import (
    CODES,
    HALF_CODES,
    REFERENCE,
    Pass,
    assert_same_choice,
    check_moments,
    check_tail,
    same,
)
from kernels.interpreter import DEVICE, ORDERS, run_programs
from kernels.interpreter import interpreter as interpreter
from kernels.products import Given, normal
from kernels.test_triton import DTYPES, KERNELS
from kernels.test_triton_codec import divided as divided
from kernels.test_triton_codec import plan_of, selection_of
from kernels.test_triton_codec import small_groups as small_groups
from sparse import payloads

from dgc.kernels.codes import layout_of
from dgc.kernels.codes.blocks import BlockCode
from dgc.kernels.codes.elements import ElementCode, Form, Scale
from dgc.kernels.codes.halves import HalfCode
from dgc.kernels.codes.triton import TritonQuantizers
from dgc.kernels.codes.triton_blocks import TritonBlocks
from dgc.kernels.codes.triton_elements import TritonElementCoder
from dgc.kernels.codes.triton_halves import TritonHalves
from dgc.kernels.launch import MOST_READ, Launcher, most_read, zeros_on
from dgc.kernels.lowrank import Batch, Cast, SentUpdate, consecutive
from dgc.kernels.lowrank.triton import HEIGHT, WIDTH, Tiles, TritonLowRank
from dgc.kernels.payload import Codec, Terms
from dgc.kernels.payload.triton import TritonCodec, TritonMeanDecoder
from dgc.kernels.selection import Budget, PassInputs, SelectionKernels, SparseVector
from dgc.kernels.selection.triton import TritonSelection
from dgc.sparse import payloads as formats

SIZES: dict[str, Any] = {
    "one segment of one part": ([60], [7]),
    "one segment of many parts": ([600], [50]),
    "segments of every kind": ([300, 30, 0, 200, 20, 0], [25, 4, 0, 20, 0, 0]),
    "more to send than there is": ([250, 70], [30, 9]),
}


def gradient(kind: str, n: int) -> Any:
    g = comparison.random(n, 4, DEVICE)
    return {
        "random": g,
        "zeros": torch.zeros_like(g),
        "mostly zeros": torch.where(g > 2, g, 0.0),
        "ties": torch.full_like(g, -0.7),
        "some ties": g.round(),
    }[kind]


# The lower bound over the exact threshold. None: it is unknown, as in the first step of a ratio.
FACTORS = {
    "the first step of a ratio": None,
    "a prediction that holds": 0.9,
    "a jump of the gradient by 30": 1 / 30,
    "a fall of the gradient to a thirtieth": 30.0,
    "nothing passes": float("inf"),
}


def run(sizes: Any, ks: Any, g: Any, factor: float | None, kernels: SelectionKernels) -> Any:
    budget = comparison.budget_of(sizes, ks, DEVICE)
    one = Pass(PassInputs((g,), None, torch.zeros_like(g), decay=0.9), budget)
    lower_bounds = None if factor is None else (one.expected.thresholds * factor).nan_to_num(0.0, 3e38)
    return one.check(kernels, lower_bounds)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> TritonSelection:
    """Of small parts, and of groups of which there are many."""
    monkeypatch.setattr("dgc.kernels.selection.triton.GROUP", 4)
    monkeypatch.setattr("dgc.kernels.selection.triton.ROOM", 80)
    return TritonSelection(64, 16, 64)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("size", SIZES)
def test_a_selection_is_exact_in_any_order_of_programs(
    kernels: TritonSelection, size: str, factor: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, ks = SIZES[size]
    run_programs(order, monkeypatch)
    run(sizes, ks, gradient("random", sum(sizes)), FACTORS[factor], kernels)


@pytest.mark.parametrize("kind", ["zeros", "mostly zeros", "ties", "some ties"])
@pytest.mark.parametrize("factor", ["the first step of a ratio", "a prediction that holds", "nothing passes"])
def test_a_selection_of_zeros_and_ties_is_exact(kernels: TritonSelection, factor: str, kind: str) -> None:
    sizes, ks = SIZES["segments of every kind"]
    run(sizes, ks, gradient(kind, sum(sizes)), FACTORS[factor], kernels)


@pytest.mark.proof  # a minute in the interpreter
def test_a_selection_of_more_than_a_thousand_segments_is_exact() -> None:
    sizes, ks = [1, 9, 2, 8] * 260, [0, 1, 1, 0] * 260
    run(sizes, ks, gradient("random", sum(sizes)), None, TritonSelection(16, 8, 8))


@pytest.mark.parametrize("factor", FACTORS)
def test_the_largest_selected_magnitude_is_known(kernels: TritonSelection, factor: str) -> None:
    """Also where a segment that sends nothing has a larger one."""
    sizes, ks = [200, 100], [20, 0]
    g = gradient("random", 300)
    g[250] = 50.0
    largest = run(sizes, ks, g, FACTORS[factor], kernels).elements.largest
    assert float(largest.view(torch.float32)) == float(g[:200].abs().max())


@pytest.mark.parametrize("factor", FACTORS)
def test_launches_leave_the_zeros_that_they_share(kernels: TritonSelection, factor: str) -> None:
    sizes, ks = SIZES["segments of every kind"]
    run(sizes, ks, gradient("random", sum(sizes)), FACTORS[factor], kernels)
    assert not zeros_on(torch.device(DEVICE), 1 << 10).any()


def test_a_budget_that_is_made_anew_in_each_step_has_its_own_parts(kernels: TritonSelection) -> None:
    v = gradient("random", 300)
    for ks in ([20, 30], [50, 0]):
        budget = comparison.budget_of([100, 200], ks, DEVICE)
        assert_same_choice(kernels.select(v, budget), REFERENCE.select(v, budget))


@pytest.mark.parametrize("order", ORDERS)
def test_statistics_are_right_in_any_order_of_programs(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one group of tiles, of many, and of none, with spare tiles at the end. The same bits in each order."""
    sizes = [1200, 0, 1, 70, 2000, 0]
    bounds, v = comparison.budget_of(sizes, [0] * len(sizes), DEVICE).bounds, gradient("random", sum(sizes))
    each = torch.full((len(sizes),), 0.5, device=DEVICE)
    monkeypatch.setattr("dgc.kernels.selection.triton.SUMS", 4)
    first = TritonSelection(64, 16, 64)
    expected = first.moments(v, bounds), first.tail(v, bounds, each)
    run_programs(order, monkeypatch)
    kernels = TritonSelection(64, 16, 64)
    found = check_moments(kernels, v, bounds), check_tail(kernels, v, bounds, each)
    for own, wanted in zip(found, expected, strict=True):
        assert all(same(a, b) for a, b in zip(vars(own).values(), vars(wanted).values(), strict=True))
    assert not zeros_on(torch.device(DEVICE), 1 << 10).any()


# --- what a program reads --------------------------------------------------------------------------

LARGE = {
    "GPT-2's embedding": [38_597_376],
    "the largest bucket": [2**31 - 1],
    "large ones and thousands of small ones": [2**30, 1, *[700] * 5000, 0, 38_597_376],
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be launched: kernel, programs, arguments."""
    calls: list[Any] = []

    def note(launcher: Any, kernel: Any, near: Any, programs: int, *arguments: Any) -> None:
        calls.append((kernel, programs, arguments))

    monkeypatch.setattr(Launcher, "__call__", note)
    return calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("ratio", [0.001, 0.1])
@pytest.mark.parametrize("name", LARGE)
def test_no_program_of_a_selection_reads_more_than_64_kilobytes(
    launched: list[Any], name: str, ratio: float, known: bool, dtype: Any
) -> None:
    """Whatever the data: with candidates, and where they are missing or not known."""
    sizes = LARGE[name]
    ks = [-int(-n * ratio // 1) for n in sizes]
    bounds, each = (torch.empty(len(sizes) + one, dtype=torch.int64, device="meta") for one in (1, 0))
    budget = Budget(bounds, each, sum(ks))
    g, v = torch.empty(sum(sizes), dtype=dtype, device="meta"), torch.empty(sum(sizes), device="meta")
    inputs = PassInputs((g,), torch.empty_like(v), v, 0.9)
    lower_bounds = torch.empty(len(sizes), device="meta") if known else None
    kernels = TritonSelection()
    found = kernels.accumulate_and_select_(inputs, budget, lower_bounds)
    kernels.accumulate_and_select_(replace(inputs, sent=found.elements, masking=True), budget, lower_bounds)
    kernels.select(v, budget)
    most = most_of(launched)
    assert set(most) == {"take", "accumulate", "choose", "tally", "write"}
    assert max(most.values()) <= MOST_READ, most


def most_of(launched: list[Any]) -> dict[str, int]:
    most = dict[str, int]()
    for kernel, programs, arguments in launched:
        name = kernel.fn.__name__
        most[name] = max(most.get(name, 0), most_read(kernel, programs, arguments))
        # a grid of more programs than this is refused
        assert programs < 2**31
    return most


@pytest.mark.parametrize("name", LARGE)
def test_no_program_of_statistics_reads_more_than_64_kilobytes(launched: list[Any], name: str) -> None:
    sizes, kernels = LARGE[name], TritonSelection()
    bounds, v = (
        torch.empty(len(sizes) + 1, dtype=torch.int64, device="meta"),
        torch.empty(sum(sizes), device="meta"),
    )
    kernels.moments(v, bounds)
    kernels.tail(v, bounds, torch.empty(len(sizes), device="meta"))
    most = most_of(launched)
    assert set(most) == {f"{what}_of_{where}" for what in ("moments", "tail") for where in ("tiles", "ranges")}
    assert max(most.values()) <= MOST_READ, most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", Scale)
@pytest.mark.parametrize("name", LARGE)
def test_no_program_that_encodes_every_element_reads_more_than_64_kilobytes(
    launched: list[Any], name: str, scale: Scale, dtype: Any
) -> None:
    """The gradient comes in one piece, and in several that are cut elsewhere than the segments."""
    sizes, coder = LARGE[name], TritonElementCoder()
    bounds, n = torch.tensor([0, *accumulate(sizes)]), sum(sizes)
    code = ElementCode(Form.LEVELS, scale, bounds, 8, 127)
    v = torch.empty(n, device="meta")
    for cuts in ([n], [1, n // 3, n - n // 3 - 1]):
        pieces = torch.empty(n, dtype=dtype, device="meta").split(cuts)
        measured = coder.measure_(code, pieces, v, True)
        coder.encode(code, v, measured, None, None, True, bounds, Terms(0.5, 9))
    most = most_of(launched)
    assert set(most) == {"measure", "encode"} and max(most.values()) <= MOST_READ, most


UNPACKING = {
    "int64": set(),
    "int32": set(),
    "packed": {"sum_fields", "sum_gaps", "place_indices"},
    "rice": {"sum_fields", "place_ones", "sum_gaps", "place_indices"},
    "chunks": {"sum_chunks", "place_in_chunks"},
}


@pytest.mark.parametrize("ratio", [0.001, 0.1])
@pytest.mark.parametrize("indices", UNPACKING)
@pytest.mark.parametrize("values", [formats.CastValues("fp32"), formats.TwoBitValues()], ids=["fp32", "2bit"])
@pytest.mark.parametrize("name", LARGE)
def test_no_check_of_a_payload_reads_more_than_64_kilobytes(
    launched: list[Any], name: str, values: Any, indices: str, ratio: float
) -> None:
    """Nor any program that decodes its indices, or adds all payloads."""
    mean_on_meta(LARGE[name], values, indices, ratio)
    most = most_of(launched)
    assert set(most) == {"merge", "check", "open_headers"} | UNPACKING[indices]
    assert max(most.values()) <= MOST_READ, most


def mean_on_meta(sizes: Any, values: Any, indices: str, ratio: float, ranks: int = 8) -> None:
    ks = [-int(-n * ratio // 1) for n in sizes]
    bounds, each = (torch.empty(len(sizes) + one, dtype=torch.int64, device="meta") for one in (1, 0))
    form = formats.SparseFormat(values, payloads.INDICES[indices])
    layout = form.layout(Budget(bounds, each, sum(ks)), sum(sizes))
    gathered = torch.empty(ranks, layout.nbytes, dtype=torch.uint8, device="meta").unbind()
    TritonMeanDecoder().mean_into_(torch.empty(sum(sizes), device="meta"), gathered, layout, bounds, ranks)
    TritonCodec().words_of(gathered)


@pytest.mark.parametrize("indices", ["packed", "rice", "chunks"])
def test_indices_of_a_payload_are_decoded_in_one_launch_where_that_reads_64_kilobytes_at_most(
    launched: list[Any], indices: str
) -> None:
    capacities = {"packed": 3000, "rice": 1000, "chunks": 800}
    for times in (1, 3):
        launched.clear()
        mean_on_meta([1_000_000], formats.CastValues("fp16"), indices, times * capacities[indices] / 1e6)
        most = most_of(launched)
        expected = UNPACKING[indices] if times > 1 else {"unpack_chunks" if indices == "chunks" else "unpack"}
        assert set(most) == {"merge", "check", "open_headers"} | expected
        assert max(most.values()) <= MOST_READ, most


RANKS = (2, 8, 64, 1000)
VALUES: dict[str, Any] = {
    **{kind: formats.CastValues(kind) for kind in ("fp32", "fp16", "bf16")},
    "sign": formats.SignValues(),
    "int8": formats.Int8Values(),
    "2bit": formats.TwoBitValues(),
}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("indices", UNPACKING)
@pytest.mark.parametrize("values", VALUES)
def test_no_program_reads_more_than_64_kilobytes_of_payloads_of_any_number(
    launched: list[Any], values: str, indices: str, ranks: int
) -> None:
    """Two full tiles of any payload at most, and four entries of many."""
    for sizes, ratio in (([38_597_376], 0.1), ([4000], 0.001)):
        mean_on_meta(sizes, VALUES[values], indices, ratio, ranks)
    most = most_of(launched)
    assert {"merge", "check"} < set(most) and max(most.values()) <= MOST_READ, most


# launches that add up payloads, by ranks
MERGES: Any = {
    "256 entries": (256, "fp32", "int32", {2: 1, 8: 1, 64: 4}),
    "200 entries of int64": (200, "fp32", "int64", {2: 1, 8: 1, 64: 4}),
    "2048 entries": (2048, "fp16", "int32", {2: 1, 8: 4, 64: 32}),
    "a million entries with codes": (1_000_000, "2bit", "packed", {2: 1, 8: 4, 64: 32}),
    "2048 entries of int64": (2048, "bf16", "int64", {2: 2, 8: 8, 64: 64}),
}


@pytest.mark.parametrize("name", MERGES)
def test_launches_that_merge_entries(launched: list[Any], name: str) -> None:
    entries, values, indices, expected = MERGES[name]
    for ranks, launches in expected.items():
        launched.clear()
        mean_on_meta([1000 * entries], VALUES[values], indices, 0.001, ranks)
        assert [call[0].fn.__name__ for call in launched].count("merge") == launches, ranks


@pytest.mark.parametrize(("bits", "launches"), [(1, 1), (2, 2), (4, 3), (8, 5)])
def test_launches_that_add_codes_of_64_ranks(launched: list[Any], bits: int, launches: int) -> None:
    form = {1: Form.SIGNS, 2: Form.TERNARY}.get(bits, Form.LEVELS)
    code = ElementCode(form, Scale.NONE, torch.tensor([0, 1_000_000]), bits)
    flat = torch.empty(1_000_000, device="meta")
    for ranks in (8, 64):
        launched.clear()
        whole = torch.empty(ranks, code.nbytes, dtype=torch.uint8, device="meta")
        TritonElementCoder().mean_into_(flat, code, whole.unbind(), None)
        assert len(launched) == (1 if ranks == 8 else launches)


@pytest.mark.parametrize(
    ("code", "launches"),
    [(BlockCode(8, 256), 3), (BlockCode(4, 128), 2), (HalfCode(), 3)],
    ids=["8", "4", "halves"],
)
def test_launches_that_add_rows_of_64_ranks(launched: list[Any], code: Any, launches: int) -> None:
    kernels: Any = TritonHalves() if isinstance(code, HalfCode) else TritonBlocks()
    total = torch.empty(1_000 * code.size, device="meta")
    for ranks in (8, 64):
        launched.clear()
        rows = torch.empty(ranks, code.row_bytes(1000), dtype=torch.uint8, device="meta")
        kernels.add_sum_(rows.unbind(), code, total)
        assert len(launched) == (1 if ranks == 8 else launches)


def each_rank_once(spans: list[tuple[int, int]], ranks: int) -> bool:
    return [r for first, end in spans for r in range(first, end)] == list(range(ranks))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", LARGE)
def test_no_program_reads_more_than_64_kilobytes_of_codes_of_every_element(
    launched: list[Any], name: str, ranks: int, dtype: Any
) -> None:
    sizes, coder = LARGE[name], TritonElementCoder()
    bounds, flat = torch.tensor([0, *accumulate(sizes)]), torch.empty(sum(sizes), dtype=dtype, device="meta")
    for form, bits in ((Form.SIGNS, 1), (Form.CUTS, 1), (Form.TERNARY, 2), (Form.LEVELS, 4), (Form.LEVELS, 8)):
        launched.clear()
        code = ElementCode(form, Scale.NONE, bounds, bits, 2 ** (bits - 1) - 1)
        whole = torch.empty(ranks, code.nbytes, dtype=torch.uint8, device="meta")
        coder.mean_into_(flat, code, whole.unbind(), None)
        most = most_of(launched)
        assert set(most) == {"mean_of_payloads"} and max(most.values()) <= MOST_READ, most
        names = [*signature(launched[0][0].fn).parameters]
        first, end = names.index("first"), names.index("end")
        assert each_rank_once([(call[2][first], call[2][end]) for call in launched], ranks)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", LARGE)
def test_no_program_reads_more_than_64_kilobytes_of_codes_or_rows(
    launched: list[Any], name: str, ranks: int
) -> None:
    sizes, quantizers = LARGE[name], TritonQuantizers()
    bounds, n = torch.tensor([0, *accumulate(sizes)]), sum(sizes)
    each, mean = torch.empty(ranks, len(sizes), device="meta"), torch.empty(n, device="meta")
    for width, mean_ in ((1, quantizers.sign_mean_), (2, quantizers.tern_mean_)):
        codes = torch.empty(ranks, layout_of(bounds, width, 4).nbytes, dtype=torch.uint8, device="meta")
        mean_(codes.unbind(), bounds, each.unbind(), each[0], ranks, mean)
    for code in (*CODES, *HALF_CODES):
        blocks: Any = TritonHalves() if code in HALF_CODES else TritonBlocks()
        rows = torch.empty(ranks, code.row_bytes(1000), dtype=torch.uint8, device="meta")
        blocks.add_sum_(rows.unbind(), code, torch.empty(1000 * code.size, device="meta"))
    most = most_of(launched)
    assert set(most) == {"mean_of_fields", "add_blocks", "add_halves"} and max(most.values()) <= MOST_READ, most


@pytest.mark.parametrize("ranks", RANKS)
def test_no_program_reads_more_than_64_kilobytes_of_parts_that_are_merged(launched: list[Any], ranks: int) -> None:
    part = SparseVector(*(torch.empty(of, dtype=torch.int32, device="meta") for of in ([100], [100], [])))
    part = replace(part, values=part.values.float())
    TritonSelection().merge_mean([part] * ranks, ranks, 10_000)
    most = most_of(launched)
    assert set(most) == {"hide_tails", "mark_heads", "sum_runs"} and max(most.values()) <= MOST_READ, most


def test_no_program_of_any_kernel_reads_more_than_64_kilobytes(launched: list[Any]) -> None:
    """With the arguments with which every kernel is compiled for GPUs."""
    from kernels import compile_triton  # after `kernels.interpreter`

    compile_triton.everything(DTYPES)
    most = most_of(launched)
    assert set(most) == set(KERNELS.split()) and max(most.values()) <= MOST_READ, most


MEASURING: dict[str, set[str]] = {
    "int32": set(),
    "packed": {"measure_packed"},
    "rice": {"measure_rice", "place_rice"},
}


@pytest.mark.parametrize("ratio", [0.001, 0.1])
@pytest.mark.parametrize("indices", ["packed", "rice"])
@pytest.mark.parametrize("name", LARGE)
def test_no_program_that_writes_coded_indices_reads_more_than_64_kilobytes(
    launched: list[Any], name: str, indices: str, ratio: float
) -> None:
    encode_on_meta(name, formats.CastValues("fp16"), indices, ratio)
    most = most_of(launched)
    assert set(most) == {*MEASURING[indices], "write_coded"} and max(most.values()) <= MOST_READ, most


SCALED = [formats.SignValues(), formats.Int8Values(), formats.TwoBitValues()]


@pytest.mark.parametrize("values", SCALED, ids=["sign", "int8", "2bit"])
@pytest.mark.parametrize("indices", MEASURING)
@pytest.mark.parametrize("name", LARGE)
def test_no_program_that_finds_scales_of_tensors_reads_more_than_64_kilobytes(
    launched: list[Any], name: str, indices: str, values: Any
) -> None:
    encode_on_meta(name, values, indices, 0.1)
    most = most_of(launched)
    assert set(most) == {*MEASURING[indices], "add_up", "write_coded"} and max(most.values()) <= MOST_READ, most


def encode_on_meta(name: str, values: Any, indices: str, ratio: float) -> None:
    sizes = LARGE[name]
    n, capacity = sum(sizes), sum(-int(-n * ratio // 1) for n in sizes)
    bounds, each = (torch.empty(len(sizes) + one, dtype=torch.int64, device="meta") for one in (1, 0))
    layout = formats.SparseFormat(values, payloads.INDICES[indices]).layout(Budget(bounds, each, capacity), n)
    chosen, x = (torch.empty(capacity, dtype=dtype, device="meta") for dtype in (torch.int32, torch.float32))
    selection = SparseVector(chosen, x, torch.empty((), dtype=torch.int32, device="meta"))
    first = torch.empty((), dtype=torch.int64, device="meta")
    TritonCodec().encode(selection, layout, 1e4, 4.0, first, bounds, bounds, Terms(0.5, 9))


# n, m, rank, and elements of other tensors
MATRICES = {
    "GPT-2's embedding": (50_257, 768, 4, 768),
    "tall ones": (2**28 - 8, 4, 2, 0),
    "the widest": (32, 2**26 - 8, 16, 0),
    "many other tensors": (64, 64, 2, 2**30),
}


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("name", MATRICES)
def test_no_program_that_adds_sums_of_products_reads_more_than_64_kilobytes(
    launched: list[Any], name: str, even: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose tiles are not listed here, because there are millions."""
    n, m, r, rest = MATRICES[name]
    tiles = -(-n // HEIGHT) * -(-m // WIDTH) + -(-rest // (HEIGHT * WIDTH))
    table, pieces = (torch.empty(of, dtype=torch.int32, device="meta") for of in ((3, tiles), (6, 2)))
    monkeypatch.setattr("dgc.kernels.lowrank.triton.tiles_of", lambda *_: Tiles(table, pieces, n * m))
    batch, v = Batch((0,), 0, 1, n, m, r, n * m), torch.empty(n * m + rest, device="meta")
    X = [torch.empty(1, r, n if even else m, device="meta")]
    TritonLowRank(TritonSelection()).begin_(
        v, [batch], None, v.split([n * m, rest]), X, even, Cast(torch.float16, 1e4, 1e4)
    )
    most = most_of([call for call in launched if call[0].fn.__name__ == "gather"])
    assert set(most) == {"gather"} and max(most.values()) <= MOST_READ, most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("even", [True, False])
def test_no_program_of_products_of_rank_32_reads_more_than_64_kilobytes(
    launched: list[Any], even: bool, dtype: Any
) -> None:
    given, kernels = Given(((1, 70, 90, 32, 32),), 1500, DEVICE), TritonLowRank(TritonSelection())
    g, sent = [own.to(dtype) for own in given.g], SentUpdate(given.products, given.errors)
    kernels.begin_(given.v, given.batches, sent, g, given.X[even], even, Cast(torch.float32, None, 0.5))
    largest = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    kernels.outer(given.products, [g[:1]], given.errors, g[1:], largest)
    most = most_of(launched)
    assert set(most) == {"refresh", "gather", "expand"} and max(most.values()) <= MOST_READ, most


BASES: Any = {
    "GPT-2's embedding": [(1, 4, 50_257), (1, 4, 768)],
    "rank 1": [(1, 1, 2**30)],
    "rank 4": [(1, 4, 2**29 - 1), (500, 4, 900)],
    "rank 32": [(1, 32, 2**26 - 1)],
}


@pytest.mark.parametrize("name", BASES)
def test_no_program_that_finds_a_basis_reads_more_than_64_kilobytes(launched: list[Any], name: str) -> None:
    _, xs = consecutive(BASES[name], torch.device("meta"))
    TritonLowRank(TritonSelection()).orthonormal(xs, False, 1e-8, 5)
    most = most_of(launched)
    assert set(most) == {"inner_products", "write_bases"} and max(most.values()) <= MOST_READ, most


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of each launch: kernel, the most bytes that a program has read, and what is stated."""
    from triton.runtime.interpreter import InterpreterBuilder

    found: list[Any] = []
    by_program: dict[Any, int] = {}
    launch, load = Launcher.__call__, InterpreterBuilder.create_masked_load

    def count(builder: Any, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        if pointers.data.size > 1:  # scalars are a few numbers
            nbytes = int(mask.data.sum()) * size
            by_program[builder.grid_idx] = by_program.get(builder.grid_idx, 0) + nbytes

    def loaded(builder: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        count(builder, pointers, mask)
        return load(builder, pointers, mask, *more)

    def launched(launcher: Any, kernel: Any, near: Any, programs: int, *arguments: Any) -> None:
        by_program.clear()
        launch(launcher, kernel, near, programs, *arguments)
        if kernel.fn.__name__ != "take":
            most = max(by_program.values(), default=0)
            found.append((kernel.fn.__name__, most, most_read(kernel, programs, arguments)))

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", loaded)
    monkeypatch.setattr(Launcher, "__call__", launched)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off on a GPU")
@pytest.mark.parametrize("factor", FACTORS)
def test_no_program_reads_more_than_its_kernel_states(
    kernels: TritonSelection, factor: str, reads: list[Any]
) -> None:
    sizes, ks = SIZES["segments of every kind"]
    run(sizes, ks, gradient("random", sum(sizes)), FACTORS[factor], kernels)
    assert reads
    for name, most, stated in reads:
        assert most <= stated, (name, most, stated)
    if FACTORS[factor] is None:  # the statement is not much too large either
        assert any(name == "choose" and most >= 0.9 * stated for name, most, stated in reads)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off on a GPU")
def test_no_program_of_statistics_reads_more_than_its_kernel_states(
    kernels: TritonSelection, reads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgc.kernels.selection.triton.SUMS", 8)
    bounds, v = comparison.budget_of([4000, 90], [0, 0], DEVICE).bounds, gradient("random", 4090)
    check_moments(kernels, v, bounds)
    check_tail(kernels, v, bounds, torch.zeros(2, device=DEVICE))
    assert len(reads) == 4
    for name, most, stated in reads:
        assert 0.5 * stated <= most <= stated, (name, most, stated)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off on a GPU")
@pytest.mark.parametrize(("n", "m"), [(8192, 9), (30, 5)])
def test_no_program_that_makes_sums_of_products_reads_more_than_its_kernel_states(
    n: int, m: int, reads: list[Any]
) -> None:
    """Of a sum of many tiles, and where the rest is most."""
    given = Given(((1, n, m, 1, 1),), 1500, DEVICE)
    TritonLowRank(TritonSelection()).begin_(
        given.v, given.batches, None, given.g, given.X[True], True, Cast(torch.float32, None, 0.5)
    )
    assert [name for name, _, _ in reads] == ["refresh", "gather"]
    for name, most, stated in reads:
        assert 0.2 * stated <= most <= stated, (name, most, stated)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off on a GPU")
@pytest.mark.parametrize(("r", "d"), [(1, 70_000), (4, 20_000), (16, 600)])
def test_no_program_that_finds_a_basis_reads_more_than_its_kernel_states(r: int, d: int, reads: list[Any]) -> None:
    TritonLowRank(TritonSelection()).orthonormal([normal(1, r, d, device=DEVICE)], False, 1e-8, 5)
    assert [name for name, _, _ in reads] == ["inner_products", "inner_products", "write_bases"]
    for name, most, stated in reads:
        assert 0.4 * stated <= most <= stated, (name, most, stated)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off on a GPU")
@pytest.mark.parametrize("values", [formats.CastValues("fp16"), formats.TwoBitValues()], ids=["fp16", "2bit"])
def test_no_check_of_a_payload_reads_more_than_its_kernel_states(values: Any, reads: list[Any]) -> None:
    """Of a payload that three programs check."""
    plan = plan_of(values, "int32", 9000, 2100)
    end = torch.tensor(9000, device=DEVICE)
    payload = plan.encode(TritonCodec(), selection_of(9000, 2100, 2100, 1), end).payload
    reads.clear()
    plan.mean_into_(torch.zeros(9000, device=DEVICE), TritonMeanDecoder(), [payload] * 2, 2).wait()
    TritonCodec().words_of([payload])
    assert [name for name, _, _ in reads] == ["check", "merge", "open_headers"]
    for name, most, stated in reads:
        assert 0 < most <= stated, (name, most, stated)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off on a GPU")
@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("indices", ["packed", "rice"])
def test_no_program_that_writes_coded_indices_reads_more_than_its_kernel_states(
    indices: str, reads: list[Any]
) -> None:
    plan = plan_of(formats.CastValues("fp16"), indices, 300_000, 5000)
    plan.encode(TritonCodec(), selection_of(300_000, 5000, 5000, 1), torch.tensor(300_000, device=DEVICE))
    assert len(reads) == {"packed": 2, "rice": 3}[indices]
    for name, most, stated in reads:
        assert 0.9 * stated <= most <= stated, (name, most, stated)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off on a GPU")
@pytest.mark.parametrize("values", SCALED, ids=["sign", "int8", "2bit"])
def test_no_program_that_finds_scales_of_tensors_reads_more_than_its_kernel_states(
    values: Any, reads: list[Any]
) -> None:
    """Of two tensors."""
    plan = plan_of(values, "rice", 30_000, 5000)
    plan.encode(TritonCodec(), selection_of(30_000, 5000, 5000, 1), torch.tensor(30_000, device=DEVICE))
    found = [own for own in reads if own[0] in ("add_up", "write_coded")]
    assert len(found) == {formats.SignValues: 3, formats.Int8Values: 2}.get(type(values), 5)
    for name, most, stated in found:
        assert 0.5 * stated <= most <= stated, (name, most, stated)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off on a GPU")
@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("indices", ["packed", "rice", "chunks"])
def test_no_program_that_decodes_indices_reads_more_than_its_kernel_states(indices: str, reads: list[Any]) -> None:
    plan, mean = plan_of(formats.CastValues("fp16"), indices, 16_000, 3000), torch.zeros(16_000, device=DEVICE)
    payload = plan.encode(Codec(), selection_of(16_000, 3000, 3000, 1), torch.tensor(16_000)).payload
    plan.mean_into_(mean, TritonMeanDecoder(), [payload.to(DEVICE)] * 2, 2).wait()
    decoding = [own for own in reads if own[0] not in ("check", "merge")]
    assert {name for name, _, _ in decoding} in (UNPACKING[indices], {"unpack"}, {"unpack_chunks"})
    for name, most, stated in decoding:
        assert 0 < most <= stated, (name, most, stated)
