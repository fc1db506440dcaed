"""The Triton backend against the reference, bit for bit; in Triton's interpreter where there is no GPU."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import case
from kernels import comparison
from kernels.comparison import REFERENCE, Pass, assert_same_choice, check_moments, check_tail, same
from kernels.interpreter import DEVICE
from kernels.interpreter import interpreter as interpreter
from kernels.quantizing import REFERENCE as QUANTIZERS
from kernels.quantizing import assert_same_codes, check_sums, coded, means, operations
from kernels.test_triton_codec import selection_of
from kernels.waits import watching
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._gpu_steps import Launches
from dgc.kernels.codes.triton import TritonQuantizers
from dgc.kernels.launch import as_rows, cut
from dgc.kernels.selection import TOO_LARGE, PassInputs, SparseVector
from dgc.kernels.selection.triton import TritonSelection

TILE, SLOTS, PART = 64, 8, 64
random: Any = partial(comparison.random, device=DEVICE)
budget_of: Any = partial(comparison.budget_of, device=DEVICE)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture
def kernels() -> Any:
    return TritonSelection(TILE, SLOTS, PART)


def tensor(*values: Any) -> Any:
    return torch.tensor(values, device=DEVICE)


def split(g: Any, lengths: Any) -> Any:
    return tuple(part.clone() for part in g.split(lengths))


def pass_of(g: Any, u: Any, v: Any, nesterov: bool = False, budget: Any = None) -> Pass:
    return Pass(PassInputs((g,), u, v, 0.9, nesterov, decay=0.95), budget)


@pytest.mark.parametrize(
    ("n", "nesterov"), [(0, False), (1, True), (63, False), (64, True), (65, False), (65, True), (200, True)]
)
def test_a_pass_has_the_reference_s_bits(kernels: Any, n: int, nesterov: bool) -> None:
    pass_of(random(n, 1), random(n, 2), random(n, 3), nesterov).check(kernels)


PIECES = [3, 0, 130, 64, 1, 0]  # begin and end within tiles, are empty, or are shorter than a tile


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_may_be_pieces_of_any_type(kernels: Any, dtype: Any) -> None:
    pass_of(random(198, 1).to(dtype), random(198, 2), random(198, 3)).check(kernels, None, PIECES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_any_type_may_be_assigned(kernels: Any, dtype: Any) -> None:
    g, ours, theirs = random(198, 1).to(dtype), random(198, 2), random(198, 2)
    assert int(kernels.assign_(split(g, PIECES), ours)) == REFERENCE.assign_((g,), theirs) == 198
    assert same(ours, theirs)


def test_a_pass_may_have_no_momentum(kernels: Any) -> None:
    pass_of(random(198, 1), None, random(198, 3)).check(kernels)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), TOO_LARGE, -3e38])
def test_the_first_gradient_that_is_not_usable_is_found(kernels: Any, bad: float) -> None:
    g = random(300, 1)
    g[[299, 131, 190]] = bad
    assert int(pass_of(g, random(300, 2), random(300, 3)).check(kernels, None, [100, 200])) == 131


def test_denormals_are_kept(kernels: Any) -> None:
    g, u, v = random(100, 1) * 1e-42, random(100, 2) * 1e-41, random(100, 3) * 1e-42
    g[::3], u[::3], v[::3] = -0.0, -0.0, -0.0
    one = pass_of(g, u, v)
    one.check(kernels)
    assert (one.left.v != 0).any()


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_pass_that_selects_takes_halves(kernels: Any, dtype: Any) -> None:
    g, u, v = random(333, 1).to(dtype), random(333, 2), random(333, 3)
    g[200] = float("nan")
    pass_of(g, u, v, True, budget_of([133, 200], [10, 10])).check(kernels, tensor(1.5, 1.5))


def test_a_bucket_may_have_other_gradients_in_each_step(kernels: Any) -> None:
    """Tables that are kept from the step before must not point at its gradients."""
    budget = budget_of([100, 100], [5, 5])
    for step in range(3):
        g, u, v = (random(200, seed + step) for seed in (0, 10, 20))
        pass_of(g, u, v, False, budget).check(kernels, None, [150, 50] if step == 1 else [60, 140])


RANGES = {
    "straddling": ([70, 1, 80, 59], [7, 1, 12, 6]),
    "tiny": ([1, 2, 3] * 4, [1, 1, 2] * 4),
    "empty": ([0, 50, 0, 0, 80, 0], [0, 5, 0, 0, 9, 0]),
    "none wanted": ([100, 100], [0, 3]),
    "more than there are": ([10, 70], [12, 90]),
}
WHOLE = {f"{k} of {n}": ([n], [k]) for n, k in ((0, 0), (1, 0), (1, 1), (64, 64), (65, 30), (150, 149))}


SELECTIONS = {**RANGES, **WHOLE}


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_selection_has_the_reference_s_elements(kernels: Any, name: str) -> None:
    sizes, ks = SELECTIONS[name]
    budget, v = budget_of(sizes, ks), random(sum(sizes), 4)
    assert_same_choice(kernels.select(v, budget), REFERENCE.select(v, budget))


def awkward_segments() -> tuple[Any, Any]:
    """A segment of each kind of `awkward`, and their budget."""
    kinds = awkward(90).values()
    return torch.cat(list(kinds)), budget_of([90] * len(kinds), [11] * len(kinds))


def test_a_selection_of_awkward_values_has_the_reference_s_elements(kernels: Any) -> None:
    g, budget = awkward_segments()
    assert_same_choice(kernels.select(g, budget), REFERENCE.select(g, budget))


@pytest.mark.parametrize("scale", [0.0, 1.0, 1.1])
def test_lower_bounds_change_no_selection(scale: float) -> None:
    """They are too low, right, too high; 0 where a segment is mostly zeros."""
    g, budget = awkward_segments()
    one = pass_of(g, 0 * g, 0 * g, False, budget)
    assert all(torch.equal(x, g) for x in (one.left.u, one.left.v) if x is not None)
    lower_bounds = torch.nan_to_num(REFERENCE.select(g, budget).thresholds * scale, float("inf"), float("inf"))
    one.check(TritonSelection(TILE, 32), lower_bounds, [33, g.numel() - 33])


def awkward(n: Any) -> Any:
    """Kinds of n values: where ties, zeros, denormals or the low digits of the magnitude decide."""
    x = random(n, 5)
    most = torch.full_like(x, 0.7)
    most[-1] = 0.8
    return {
        "equal": torch.full_like(x, -0.7),
        "equal but for the last": most,
        "zeros of both signs": x.sign() * 0.0,
        "mostly zeros": torch.where(x > 1.5, x, 0.0),
        "few values": x.round(),
        "denormal": x * 1e-41,
        "of many magnitudes": x.sign() * torch.exp(x * 15),
        "neighbours": 1 + x.abs() * 2**-22,
    }


def test_missed() -> None:
    """A lower bound of 0 passes more than the slots hold; one of 9 passes nothing. Where one tile has no room for
    its candidates, there may be enough in all. If all elements that are not zero are candidates, none is missed.
    """
    normal, full, three = random(1000, 7), torch.full((640,), 0.01, device=DEVICE), torch.zeros(640, device=DEVICE)
    full[64:128] = random(64, 8).abs() + 2
    three[[5, 100, 639]] = tensor(1.0, -2.0, 3.0)
    for g, tile, slots, lower_bounds, missed in (
        (normal, 256, 64, (1.5, 1.5), 0),
        (normal, 256, 64, (9.0, 1.5), 1),
        (normal, 256, 64, (9.0, float("inf")), 2),
        (normal, 256, 64, (0.0, 1.5), 1),
        (normal, 256, 64, (0.0, 0.0), 2),
        (full, TILE, SLOTS, (1.0,), 1),
        (three, TILE, SLOTS, (0.0,), 0),
    ):
        segments, kernels = len(lower_bounds), TritonSelection(tile, slots)
        budget = budget_of([len(g) // segments] * segments, [20 // segments] * segments)
        with case(lower_bounds, missed):
            one = pass_of(g, None, 0 * g, False, budget)
            assert int(one.check(kernels, tensor(*lower_bounds)).missed) == missed


STATISTICS = {
    **{name: (sizes, 1.0) for name, (sizes, _) in RANGES.items()},
    "nothing": ([0], 1.0),
    "one tile": ([64], 1.0),
    "huge": ([65, 64, 70], 1e37),
    "denormal": ([65, 64, 70], 1e-40),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_moments_are_close_to_fp64(kernels: Any, name: Any) -> None:
    sizes, scale = STATISTICS[name]
    bounds, v = budget_of(sizes, [0] * len(sizes)).bounds, random(sum(sizes), 9) * scale
    found = check_moments(kernels, v, bounds)
    again = TritonSelection(TILE, SLOTS).moments(v, bounds)
    assert same(again.sums, found.sums) and same(again.squares, found.squares)


@pytest.mark.parametrize("name", STATISTICS)
def test_tails_are_close_to_fp64(kernels: Any, name: Any) -> None:
    """The lower bound of the first range is a magnitude in it, which is counted. The last one's is inf, of NaN."""
    sizes, scale = STATISTICS[name]
    bounds, v = budget_of(sizes, [0] * len(sizes)).bounds, random(sum(sizes), 9) * scale
    v[::5] = -0.0
    lower_bound = {"straddling": 0.0, "empty": 9.0}.get(name, 1.0)
    lower_bounds = torch.full((len(sizes),), lower_bound, device=DEVICE) * scale
    if sizes[0]:
        lower_bounds[0] = v[: sizes[0]].abs().max()
    lower_bounds[-1] = float("inf")
    v[v.numel() - sizes[-1] :] = float("nan")
    check_tail(kernels, v, bounds, lower_bounds)


def test_statistics_of_more_tiles_than_a_block(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgc.kernels.selection.triton.SUMS", 4)
    for sizes in ([1200], [1, 0, 0, 1000, 130, 0]):
        bounds, v = budget_of(sizes, [0] * len(sizes)).bounds, random(sum(sizes), 3)
        check_moments(kernels, v, bounds)
        check_tail(kernels, v, bounds, torch.ones(len(sizes), device=DEVICE))


def test_what_was_sent_is_taken_out(kernels: Any) -> None:
    """Alone, and by a pass, to which it adds one launch; also where fewer were sent than planned."""
    for ks, form, masked in (
        ([0, 0], "nesterov", True),
        ([5, 9], "plain", True),
        ([5, 9], "plain", False),
        ([5, 9], "nesterov", True),
        ([5, 9], "residual", False),
        ([100, 150], "residual", True),
        ([100, 150], "nesterov", False),
    ):
        budget, v = budget_of([100, 150], ks), awkward(250)["mostly zeros"]
        chosen = REFERENCE.select(v, budget).elements
        sent, u = SparseVector(chosen.indices, chosen.values.half().float(), chosen.count), random(250, 1)
        inputs = PassInputs((random(250, 4),), u, v, 0.9, form == "nesterov", sent, masked, 0.95)
        ours, theirs = ((u.clone(), v.clone()) for _ in range(2))
        if form == "residual":
            inputs = replace(inputs, u=None)
        for backend, (own_u, own_v) in ((kernels, ours), (REFERENCE, theirs)):
            backend.remove_sent_(sent, own_u if inputs.u is not None and masked else None, own_v)
        with case(ks, form, masked):
            assert all(map(same, ours, theirs))
            assert int(Pass(inputs).check(kernels)) == 250
            Pass(inputs, budget).check(kernels, tensor(1.0, 1.0))


class NoDivisionByNumbers(TorchDispatchMode):
    """A GPU would multiply with the inverse, which is rounded twice."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("div", "div_") or isinstance(args[1], torch.Tensor), f"{name} by a number"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("counts", [[5], [0], [7, 7], [40, 0, 33], [60, 60, 1, 60, 0], [0, 0]])
def test_merge_mean_has_the_reference_s_bits(kernels: Any, counts: list[int]) -> None:
    parts = [selection_of(90, k, max(k, 9), seed) for seed, k in enumerate(counts)]
    merged = kernels.merge_mean(parts, len(parts), 90)
    with NoDivisionByNumbers():
        theirs = REFERENCE.merge_mean(parts, len(parts), 90).valid()
    assert all(map(same, merged.valid(), theirs)) and theirs[0].dtype == torch.int64
    assert not merged.values[len(theirs[1]) :].any()


def test_merge_mean_adds_in_the_order_of_the_parts(kernels: Any) -> None:
    parts = [selection_of(1, 1, 1, 0) for _ in range(4)]
    for part, value in zip(parts, [1e8, 1.0, -1e8, 1.0], strict=True):
        part.values.fill_(value)
    assert float(kernels.merge_mean(parts, 3, 1).valid()[1]) == float(torch.tensor(1.0) / 3)


def test_merge_mean_of_no_capacity_is_empty(kernels: Any) -> None:
    indices, means = kernels.merge_mean([selection_of(4, 0, 0, 0)] * 2, 2, 4).valid()
    assert indices.shape == means.shape == (0,) and indices.dtype == torch.int64


LENGTHS = [3, 0, 130, 64, 1, 0, 70]


@pytest.mark.parametrize("k", [0, 1, 200])
@pytest.mark.parametrize("dtypes", [[torch.float32, torch.float16], *([dtype] for dtype in DTYPES)])
def test_subtract_at_has_the_reference_s_bits(kernels: Any, dtypes: list[Any], k: int) -> None:
    bounds, factors = budget_of(LENGTHS, [0] * 7).bounds, [0.1 * s for s in range(7)]
    indices, values = selection_of(268, k, k, 1).indices.long(), random(k, 2)
    made = []
    for backend in (kernels, REFERENCE):
        made.append([random(n, s).to(dtypes[s % len(dtypes)]) for s, n in enumerate(LENGTHS)])
        backend.subtract_at_(made[-1], bounds, indices, values, factors)
    assert all(map(same, *made))


@pytest.mark.parametrize("n", [0, 1, 1025])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decay_has_the_reference_s_bits(kernels: Any, dtype: Any, nesterov: bool, n: int) -> None:
    mine, theirs = ((random(n, 1).to(dtype), random(n, 2).to(dtype)) for _ in range(2))
    kernels.decay_(*mine, 0.1, 5e-4, 0.9, nesterov)
    REFERENCE.decay_(*theirs, 0.1, 5e-4, 0.9, nesterov)
    assert all(map(same, mine, theirs))


@pytest.mark.parametrize(
    ("sizes", "scale"),
    [([0], 1.0), ([1], 1.0), *(([33, 0, 70, 64, 1, 0, 66, 0], scale) for scale in (1e37, 1e-40))],
)
def test_quantizers_have_the_reference_s_bits(sizes: list[int], scale: float) -> None:
    ours, bounds, each = (
        TritonQuantizers(TILE),
        budget_of(sizes, [0] * len(sizes)).bounds,
        random(len(sizes), 4).abs(),
    )
    each[1:3] = tensor(0.0, float("inf"))[: len(sizes) - 1]
    v = random(sum(sizes), 9) * scale
    v[::7] = -0.0
    assert same(ours.largest(v, bounds), QUANTIZERS.largest(v, bounds))
    found, expected = (coded(q, v, bounds, scale * each) for q in (ours, QUANTIZERS))
    assert_same_codes(found, expected, v)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("with_factors", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_means_of_several_ranks_have_the_reference_s_bits(together: bool, with_factors: bool, kind: int) -> None:
    """Of codes in one tensor, as after an all-gather, or each in its own."""
    bounds, n, ranks = budget_of([33, 0, 70, 64, 1, 0, 66], [0] * 7).bounds, 234, 3
    ours, each = TritonQuantizers(TILE), random(7, 4).abs()
    factors = each if with_factors else None
    vs = [random(n, seed) * 10.0**seed for seed in range(ranks)]
    values = [each * (seed + 1) for seed in range(ranks)]
    values[1][2] = float("inf")
    of_ranks = list(zip(*(operations(QUANTIZERS, bounds, each) for each in values), strict=True))
    codes = [encode(v)[0] for (encode, _), v in zip(of_ranks[kind], vs, strict=True)]
    rows = [torch.stack(tensors).unbind() if together else tensors for tensors in (codes, values)]
    mine, theirs = (torch.full((n,), 7.0, device=DEVICE) for _ in range(2))
    for q, (own, given), mean in ((ours, rows, mine), (QUANTIZERS, (codes, values), theirs)):
        [*means(q, bounds, given, factors, ranks)][kind](own, mean)
    assert same(mine, theirs)


@pytest.mark.parametrize(("width", "bits"), [(1, 2), (2, 3)])
def test_sums_are_sent_as_levels(width: int, bits: int) -> None:
    check_sums(TritonQuantizers(TILE), budget_of([33, 0, 70, 64, 1, 66], [0] * 6).bounds, width, bits, 2)


def test_rows_of_other_tensors_are_copied() -> None:
    """Also where they lie at the distances of rows, each in a tensor of its own."""
    whole = torch.arange(32, device=DEVICE)
    apart = [(whole + 100 * r)[8 * r : 8 * r + 8] for r in range(3)]
    for rows, copied in ((whole.view(4, 8).unbind(), False), (apart, True), ([whole[::1]], False)):
        found = as_rows(rows)
        assert torch.equal(found, torch.stack(list(rows))) and (found.data_ptr() != rows[0].data_ptr()) == copied


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("n", [0, 1, 8, 1003])
def test_small_integers_are_packed_as_by_the_reference(n: int, bits: int) -> None:
    levels = torch.arange(n, device=DEVICE).mul(37).byte()
    assert torch.equal(TritonQuantizers().pack(levels, bits), QUANTIZERS.pack(levels, bits))


# --- what it promises beside the results -----------------------------------------------------------


def test_quantizers_wait_for_nothing_once_tables_are_made() -> None:
    bounds, v = budget_of([100, 28], [0, 0]).bounds, random(128, 1)
    quantizers, each = TritonQuantizers(TILE), torch.ones(2, device=DEVICE)
    coded(quantizers, v, bounds, each)
    with watching() as watch:
        quantizers.largest(v, bounds)
        coded(quantizers, v, bounds, each)
    assert watch.seen == []


WAITS: dict[str, Any] = {
    "int": lambda x: int(x[0]),
    "nonzero": torch.nonzero,
    "a mask": lambda x: x[x > 0],
    "tolist": lambda x: x.tolist(),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_noticed(name: str) -> None:
    with watching() as watch:
        WAITS[name](torch.ones(3, device=DEVICE))
    assert watch.seen


@pytest.mark.parametrize("lower_bounds", [None, [0.5, 99.0]])
def test_nothing_waits_for_the_device(kernels: Any, lower_bounds: Any) -> None:
    """In every operation, as a training step calls them."""
    lengths, budget = [100, 150], budget_of([100, 150], [5, 9])
    g, u, v, ones = random(250, 1), random(250, 2), random(250, 3), tensor(1.0, 1.0)
    lower_bounds = None if lower_bounds is None else tensor(*lower_bounds)
    with watching() as watch:
        kernels.accumulate_(PassInputs(split(g, lengths), None, v))
        kernels.assign_(split(g, lengths), v)
        chosen = kernels.accumulate_and_select_(PassInputs((g,), u, v, 0.9), budget, lower_bounds)
        kernels.select(v, budget, lower_bounds)
        kernels.moments(v, budget.bounds)
        kernels.tail(v, budget.bounds, ones)
        kernels.remove_sent_(chosen.elements, u, v)
        kernels.accumulate_(PassInputs((g,), u, v, 0.9, sent=chosen.elements, masking=True))
        kernels.decay_(g, u, 0.1, 1e-4, 0.9, False)
        merged = kernels.merge_mean([chosen.elements] * 2, 2, 250)
    indices, means = merged.valid()
    with watching() as other:
        kernels.subtract_at_(split(g, lengths), budget.bounds, indices, means, [0.1, 0.2])
    # tables are copied once and kept
    assert {*watch.seen, *other.seen} <= {"kernels/launch.py _table"}


def launches_of(kernels: Any, tensors: int) -> int:
    g, budget = random(30 * tensors, 1), budget_of([30] * tensors, [1] * tensors)
    inputs = PassInputs(split(g, [30] * tensors), torch.zeros_like(g), torch.zeros_like(g), 0.9)
    with Launches() as launches:
        kernels.accumulate_and_select_(inputs, budget, torch.ones(tensors, device=DEVICE))
    return launches.kernels


def test_launches_do_not_grow_with_the_number_of_tensors(kernels: Any) -> None:
    assert 0 < launches_of(kernels, 1) == launches_of(kernels, 7)


def test_a_bucket_too_large_for_32_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="2147483648 elements is too large"):
        cut(tensor(0, 2**31), (2**31,), TILE)


def test_importing_dgc_does_not_import_triton() -> None:
    rooms = "dgc, dgc.compression, dgc.kernels, dgc.memory, dgc.optim, dgc.sparse.selectors, dgc.sparse.payloads"
    code = f"import sys, {rooms}; assert 'dgc.kernels.selection.triton' not in sys.modules, 'imports Triton'"
    subprocess.run([sys.executable, "-c", code], check=True)


KERNELS = """
accumulate choose tally write take hide_tails mark_heads sum_runs subtract_at decay
moments_of_tiles moments_of_ranges tail_of_tiles tail_of_ranges sign_encode sign_add tern_encode tern_add
uniform_encode uniform_add largest mean_of_fields pack largest_of write_plain seal open_headers check merge
measure encode mean_of_payloads measure_packed measure_rice place_rice add_up write_coded unpack unpack_chunks
sum_chunks place_in_chunks sum_fields place_ones sum_gaps place_indices refresh gather expand inner_products
write_bases encode_blocks add_blocks decode_blocks encode_halves add_halves decode_halves
"""


@pytest.mark.proof
@pytest.mark.parametrize("gpu", ["cuda:75", "cuda:80", "cuda:90", "cuda:100", "hip:gfx942"])
def test_every_kernel_compiles_for_gpus(gpu: str, tmp_path: Path) -> None:
    """The interpreter accepts programs that the compiler refuses. No GPU is needed to compile."""
    script, root = Path(__file__).with_name("compile_triton.py"), Path(__file__).parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(root), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", str(script), gpu, "float16", "bfloat16", "float32", "float64"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {name: tuple(map(int, numbers)) for name, *numbers in map(str.split, done.stdout.splitlines())}
    for name, (registers, shared, spilled) in found.items():
        # two programs of 256 threads per multiprocessor at least, also with 64 KiB of shared memory
        limit = 256 if gpu.startswith("hip") else 128  # AMD has twice as many
        # these keep a few scalars of their loops in local memory
        looping = (
            "add_up check choose encode inner_products mean_of_payloads merge place_rice refresh tally write_coded"
        )
        loops = 128 if name in looping.split() else 0
        assert registers <= limit and shared <= 2**15 and spilled <= loops, (name, registers, shared, spilled)
    assert set(found) == set(KERNELS.split())
