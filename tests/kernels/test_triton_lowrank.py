"""The Triton backend's low-rank products and bases: the reference's bits where sums have one term, else close."""

from functools import partial
from typing import Any

import pytest
import torch
from kernels import products
from kernels.comparison import REFERENCE, same
from kernels.interpreter import DEVICE, ORDERS, OTHER_ORDERS, run_programs
from kernels.interpreter import interpreter as interpreter
from kernels.products import Given, multiplied
from kernels.waits import watching

from dgc import kernels as backends
from dgc.compression import PowerSGDCompressor
from dgc.kernels.launch import zeros_on
from dgc.kernels.lowrank import Batch, Cast, LowRank, SentUpdate
from dgc.kernels.lowrank.triton import TritonLowRank, in_one, plan_bases, plan_sums, tiles_of
from dgc.kernels.selection import TOO_LARGE
from dgc.kernels.selection.triton import TritonSelection
from dgc.testing import Fleet

EXACT = Cast(torch.float32, None, None)
REST = 75
normal: Any = partial(products.normal, device=DEVICE)


@pytest.fixture
def ours() -> Any:
    return TritonLowRank(TritonSelection())


@pytest.fixture
def given() -> Given:
    """Edges in and at tiles. One term more was sent than the rank of a half step."""
    return Given(((2, 33, 70, 3, 2), (1, 32, 64, 2, 1), (3, 3, 5, 4, 3)), REST, DEVICE)


def assert_close(found: Any, expected: Any, terms: float = 10.0) -> None:
    assert float((found.double() - expected.double()).abs().max()) <= 2e-6 * terms


CASTS = [EXACT, Cast(torch.float16, 4.0, 0.5), Cast(torch.float32, None, 0.5)]


@pytest.mark.parametrize("even", [True, False])
def test_a_step_begins_with_one_pass(ours: Any, given: Given, even: Any) -> None:
    end = given.batches[-1].offset + 45
    sides = (None, *(SentUpdate(given.products, errors) for errors in (None, given.errors)))
    for sent, cast in zip(sides, CASTS, strict=True):
        for dtype in (torch.float32, torch.bfloat16)[: 1 + (sent is None)]:
            v, g = given.v.clone(), [part.to(dtype) for part in given.g]
            message = ours.begin_(v, given.batches, sent, g, given.X[even], even, cast)
            assert int(message.first_nonfinite) == len(v) and not message.largest
            taken = given.v.clone()
            if sent is not None:
                ours.remove_(taken, given.batches, sent)
                for batch, (U, W) in zip(given.batches, given.products, strict=True):
                    assert_close(batch.of(taken), batch.of(given.v).double() - U.double().mT @ W.double())
                assert same(taken[end:], torch.zeros_like(given.errors) if cast is CASTS[1] else given.errors)
            assert same(v, taken + torch.cat(g).float()), "the bits of remove_, and of one addition"
            Y = [multiplied(b.of(v), x, even) for b, x in zip(given.batches, given.X[even], strict=True)]
            flat = torch.cat([y.reshape(-1) for y in Y])
            sent_as = flat if cast.limit is None else flat.clamp(-cast.limit, cast.limit)
            assert message.numbers.dtype == cast.dtype
            places = message.numbers[: flat.numel()].float()
            assert_close(places, sent_as, 20 if cast.limit is None else 2000)
            assert same(torch.cat([y.reshape(-1) for y in message.Y]), places)
            rest = cast.of(v[end:], cast.rest_limit)
            assert same(message.numbers[flat.numel() :], rest.to(cast.dtype))
            errors = message.rounding_errors
            assert errors is None if cast is EXACT else same(errors, v[end:] - rest)


END = 2 * 33 * 70 + 32 * 64 + 3 * 3 * 5 + REST  # elements of what is given


@pytest.mark.parametrize(
    ("bad", "place"), [(torch.nan, 0), (-torch.inf, 33 * 70 + 64), (TOO_LARGE, END - REST), (3e38, END - 1)]
)
def test_what_is_not_finite_counts_as_zero(ours: Any, given: Any, bad: float, place: int) -> None:
    assert END == len(given.v)
    g = torch.cat(given.g)
    g[place], g[-1] = bad, torch.inf
    v, pieces = given.v.clone(), list(g.split([len(piece) for piece in given.g]))
    message = ours.begin_(v, given.batches, None, pieces, given.X[True], True, EXACT)
    assert int(message.first_nonfinite) == place
    assert same(v, given.v + torch.where(g.abs() < TOO_LARGE, g, 0.0))


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("sends", [True, False])
def test_later_half_steps_leave_out_what_was_sent(ours: Any, given: Any, even: bool, sends: bool) -> None:
    v, sent = given.v.clone(), given.products if sends else []
    message = ours.project(v, given.batches, sent, given.X[even], even, EXACT)
    assert same(v, given.v) and message.first_nonfinite is None
    plain = LowRank(REFERENCE).project(v.double().float(), given.batches, sent, given.X[even], even, EXACT)
    assert_close(message.numbers, plain.numbers, 100)


def test_the_pieces_of_a_square_may_have_any_length(ours: Any) -> None:
    """Zeros follow them."""
    batch, g = Batch((0, 1), 0, 1, 40, 40, 2, 1590), normal(1590, seed=1)
    X, sent = [normal(1, 2, 40, seed=2)], SentUpdate([(normal(1, 2, 40, seed=3), normal(1, 2, 40, seed=4))])
    g[700] = torch.nan
    v, plain = normal(1600), normal(1600)
    message = ours.begin_(v, [batch], sent, list(g.split([700, 890])), X, True, EXACT)
    expected = LowRank(REFERENCE).begin_(plain, [batch], sent, list(g.split([700, 890])), X, True, EXACT)
    firsts = [own.first_nonfinite for own in (message, expected)]
    assert all(first is not None and int(first) == 700 for first in firsts) and not v[1590:].any()
    assert_close(v, plain)
    assert_close(message.numbers, expected.numbers, 100)


@pytest.fixture
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of `gather` that add few tiles, and find few unusable elements."""
    monkeypatch.setattr("dgc.kernels.lowrank.triton.SUMMED", 2)
    for module in ("launch", "lowrank.triton"):
        monkeypatch.setattr(f"dgc.kernels.{module}.BLOCK", 16)
    monkeypatch.setattr("dgc.kernels.lowrank.triton.plan_sums", plan_sums.__wrapped__)


@pytest.mark.parametrize("even", [True, False])
def test_sums_of_many_tiles_are_added_in_one_order(
    ours: Any, even: bool, small_programs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On up to four levels, in any order of programs, which leave the zeros that they share."""
    tall, expected = Given(((2, 70, 200, 3, 1), (1, 33, 700, 2, 1), (1, 700, 9, 2, 1)), REST, DEVICE), []
    batches, X = tall.batches, tall.X[even]
    for order in ORDERS:
        run_programs(order, monkeypatch)
        v = tall.v.clone()
        message = ours.begin_(v, batches, None, tall.g, X, even, EXACT)
        found = message.numbers.clone()
        Y = torch.cat([multiplied(b.of(v), x, even).reshape(-1) for b, x in zip(batches, X, strict=True)])
        assert_close(found[: Y.numel()], Y, 100)
        assert same(found[Y.numel() :], v[-REST:]) and same(
            torch.cat([y.reshape(-1) for y in message.Y]), found[:-REST]
        )
        assert not zeros_on(torch.device(DEVICE), 1 << 10).any()
        expected.append(found)
    assert all(same(found, expected[0]) for found in expected)


@pytest.mark.parametrize("places", [[], [0], [63_999], [50_000, 12_500, 63_998]])
def test_the_first_unusable_element_of_many_tiles_is_found(
    ours: Any, places: list[int], small_programs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Given(((1, 320, 200, 1, 1),), 0, DEVICE)  # 40 tiles
    g = one.g[0].clone().reshape(-1)
    g[places] = torch.nan
    for order in ORDERS:
        run_programs(order, monkeypatch)
        message = ours.begin_(one.v.clone(), one.batches, None, [g], one.X[True], True, EXACT)
        assert int(message.first_nonfinite) == min(places, default=64_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_rest_is_written_with_the_products(ours: Any, given: Given, dtype: Any) -> None:
    out = [torch.full((b.count, b.n, b.m), 7.0, dtype=dtype, device=DEVICE) for b in given.batches]
    rest = [torch.empty(n, dtype=dtype, device=DEVICE) for n in (REST - 5, 0, 5)]
    largest = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    mean = 9 * given.errors
    ours.outer(given.products, list(map(list, out)), mean, rest, largest)
    for (U, W), M in zip(given.products, out, strict=True):
        total = torch.zeros_like(M, dtype=torch.float32)
        for k in range(U.shape[1]):
            total += U[:, k, :, None] * W[:, k, None, :]
        assert same(M, total.to(dtype))
    assert same(torch.cat(rest), mean.to(dtype))
    most = max(float(x.abs().max()) for x in (mean, *(x for pair in given.products for x in pair)))
    assert float(largest.view(torch.float32)) == most


def test_the_largest_magnitude_of_a_mean_with_inf_is_inf(ours: Any, given: Given) -> None:
    out = [torch.empty(b.count, b.n, b.m, device=DEVICE) for b in given.batches]
    mean, largest = 9 * given.errors, torch.zeros(1, dtype=torch.int32, device=DEVICE)
    mean[3] = torch.inf
    ours.outer(given.products, list(map(list, out)), mean, [torch.empty(REST, device=DEVICE)], largest)
    assert float(largest.view(torch.float32)) == torch.inf


def assert_orthonormal(x: Any) -> None:
    eye = torch.eye(x.shape[1], device=x.device, dtype=torch.float64)
    assert float((x.double() @ x.double().mT - eye).abs().max()) < 2e-6


def test_orthonormal_bases_span_the_rows_in_their_order(ours: Any) -> None:
    xs = [normal(2, 3, 2100), 1e-30 * normal(1, 1, 9), normal(3, 4, 4), 1e30 * normal(1, 2, 65)]
    for x, basis in zip(xs, ours.orthonormal(xs, False, 1e-8, 2**32 - 1), strict=True):
        assert_orthonormal(basis)
        wide = x.double()
        for k in range(1, x.shape[1] + 1):
            part, first = basis[:, :k].double(), wide[:, :k]
            assert bool(((first - first @ part.mT @ part).norm(dim=2) <= 1e-6 * first.norm(dim=2)).all())


def rows_without_a_direction() -> Any:
    """Zeros, NaN and inf, and rows that depend on others; the last matrix has none."""
    x = normal(4, 4, 30)
    x[0] = 0
    x[1, 0], x[1, 2] = torch.inf, torch.nan
    x[2, 1], x[2, 2] = 2 * x[2, 0], x[2, 0] + 1e-5 * x[2, 3]
    return x


def test_bases_of_rows_without_a_direction_span_the_others(ours: Any) -> None:
    x = rows_without_a_direction()
    for key in (1, 2):
        basis = ours.orthonormal([x], False, 1e-6, key)[0]
        assert_orthonormal(basis)
        for i, rows in ((1, [1, 3]), (2, [0, 2, 3]), (3, [0, 1, 2, 3])):
            kept, part = x[i, rows].double(), basis[i, : len(rows)].double()
            assert float((kept - kept @ part.mT @ part).norm(dim=1).max()) < 1e-4


def test_bases_of_rows_without_a_direction_depend_on_the_key(ours: Any) -> None:
    one, again, other = (ours.orthonormal([rows_without_a_direction()], False, 1e-6, key)[0] for key in (1, 1, 2))
    assert same(one, again) and not torch.equal(one, other)
    assert same(one[3], other[3])


def test_the_authors_divide_a_row_by_the_length_of_all_rows(ours: Any) -> None:
    y, zero = normal(5, 1, 20), torch.zeros(2, 1, 7, device=DEVICE)
    alone, nothing, several = ours.orthonormal([y, zero, normal(2, 2, 20)], True, 1e-8, 0)
    assert_close(alone, y.double() / y.double().norm(), 1)
    assert not nothing.any()
    assert_orthonormal(several)


def dependent(share: float, r: int, d: int, seed: int) -> Any:
    """Rows that the rows before them explain but for `share` of them."""
    x = normal(1, r, d, seed=seed)
    for i in range(1, r):
        x[0, i] = x[0, :i].sum(0) + share * x[0, i]
    return x


@pytest.mark.parametrize("share", [1.0, 1e-3, 1e-5, 3e-7, 1e-7, 1e-8, 0.0])
def test_bases_of_rows_that_almost_depend_on_others_are_orthonormal(ours: Any, share: float) -> None:
    """On both sides of the least share that determines a direction. The span is kept above it."""
    xs = [1e20 * dependent(share, r, d, r + d) for r, d in ((2, 2), (4, 4), (3, 5), (4, 300), (16, 40))]
    for x, basis in zip(xs, ours.orthonormal(xs, False, 1e-8, 7), strict=True):
        assert_orthonormal(basis)
        if share > 1e-6:
            wide, part = x.double(), basis.double()
            assert float((wide - wide @ part.mT @ part).norm(dim=2).max() / wide.norm(dim=2).max()) < 1e-6


def test_bases_of_many_parts_do_not_depend_on_the_order_of_programs(
    ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several levels, also where rows are random. Programs leave the zeros that they share."""
    monkeypatch.setattr("dgc.kernels.lowrank.triton.LANES", 64)
    monkeypatch.setattr("dgc.kernels.lowrank.triton.FAN", 2)
    monkeypatch.setattr("dgc.kernels.lowrank.triton.plan_bases", plan_bases.__wrapped__)
    xs, expected = [normal(1, 3, 300), normal(1, 8, 130), normal(1, 1, 64), rows_without_a_direction()], None
    for order in ORDERS:
        run_programs(order, monkeypatch)
        found = ours.orthonormal(xs, False, 1e-6, 3)
        for basis in found:
            assert_orthonormal(basis)
        assert not zeros_on(torch.device(DEVICE), 1 << 10).any()
        assert expected is None or all(map(same, found, expected))
        expected = found


@pytest.fixture
def run(ours: Any, given: Any) -> Any:
    """A function that does every operation of a step, and returns all results."""
    sent, largest = SentUpdate(given.products, given.errors), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out = [torch.empty(b.count, b.n, b.m, device=DEVICE) for b in given.batches]

    def run() -> Any:
        v, found = given.v.clone(), []
        message = ours.begin_(v, given.batches, sent, given.g, given.X[True], True, CASTS[1])
        found += [message.numbers, message.rounding_errors, message.first_nonfinite, message.largest]
        found += ours.orthonormal(message.Y, False, 1e-8, 5)
        found += [ours.project(v, given.batches, given.products, given.X[False], False, EXACT).numbers]
        ours.outer(given.products, list(map(list, out)), given.errors, [], largest)
        return [v, *found, *(M.clone() for M in out), largest.clone()]

    return run


def test_nothing_waits_once_tables_are_made(run: Any) -> None:
    expected = run()
    with watching() as watch:
        again = run()
    assert watch.seen == [] and all(map(same, again, expected))


def test_the_order_of_programs_changes_nothing(run: Any, monkeypatch: Any) -> None:
    expected = run()
    for order in OTHER_ORDERS:
        run_programs(order, monkeypatch)
        assert all(map(same, run(), expected))


def test_factors_in_several_tensors_are_copied_into_one() -> None:
    whole = normal(60)
    parts = [whole[:20].view(2, 2, 5), whole[20:].view(1, 4, 10)[:, 1:3]]
    for factors, copied in ((parts, False), ([parts[0], parts[1].clone()], True), ([parts[1].mT], True)):
        memory, places = in_one(factors)
        assert (memory.data_ptr() == whole.data_ptr()) != copied
        for (start, matrix, row), x in zip(places, factors, strict=True):
            assert same(memory.as_strided(x.shape, (matrix, row, 1), start), x.contiguous())


def test_a_bucket_too_large_for_32_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="2147483640 elements is too large"):
        tiles_of((), (2**31 - 8,), torch.device(DEVICE), 0)


@pytest.mark.parametrize(
    "settings", [{}, {"num_iters_per_step": 2}, {"mode": "paper", "wire": "fp16"}, {"mode": "square"}], ids=str
)
def test_steps_lose_nothing(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a dropped one, and where dimension 0 is not outermost in memory."""
    monkeypatch.setattr(backends, "_asked", "triton")
    for dtype in (torch.float32, torch.bfloat16)[: 1 + (settings == {})]:
        like = [torch.zeros(6, 9, dtype=dtype), torch.zeros(5, dtype=dtype), torch.zeros(9, 6, dtype=dtype).T]
        fleet = Fleet(lambda: PowerSGDCompressor(2, 0, **settings), 2, like)
        for step in range(4):
            own = [[normal(*x.shape, seed=9 * step + r).cpu().to(dtype) for x in like] for r in range(2)]
            flat = [torch.cat([a.reshape(-1), b, c.T.reshape(-1)]) for a, b, c in own]
            given = [e + g for e, g in zip(fleet.errors(), flat, strict=True)]
            if step == 2:
                own[1][1][4] = torch.nan
                given[1][6 * 9 + 4] -= flat[1][6 * 9 + 4]
            mean = fleet.step(own)[0].float()
            if step == 2:
                assert fleet.nonfinite == ["the gradient of p1 on rank 1 has NaN or inf, or is 2**64 or more"] * 2
                for kept, unsent in zip(fleet.errors(), given, strict=True):
                    torch.testing.assert_close(kept, unsent, rtol=0, atol=1e-5)
                continue
            lost = mean + (sum(fleet.errors()) - sum(given)) / 2
            assert fleet.nonfinite == [None] * 2
            assert float(lost.abs().max()) <= (1e-5 if "wire" not in settings and dtype.itemsize == 4 else 0.05)
