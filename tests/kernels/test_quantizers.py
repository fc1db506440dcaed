"""Quantizers, and blocks with a scale each: all backends give the reference's bits, which are right."""

from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from cases import case
from kernels.comparison import (
    CODES,
    CUTS,
    HALF_CODES,
    check_blocks,
    check_one_pass,
    encoded,
    numbers,
    random,
    same,
)
from kernels.quantizing import REFERENCE, assert_same_codes, check_sums, coded, means, operations

from dgc import kernels
from dgc.kernels.codes import Quantizers, layout_of, random_bits
from dgc.kernels.codes.blocks import GROUP, Blocks, rotated
from dgc.kernels.codes.halves import HalfCode, Halves
from dgc.kernels.codes.native import NativeBlocks, NativeHalves, NativeQuantizers

SIZES = (0, 1, 7, 8, 15, 16, 17, 31, 33, 100, 4097, 70_001)
LARGEST = torch.finfo(torch.float32).max
INF, NAN = float("inf"), float("nan")


@pytest.fixture
def quantizers(kernels: Any) -> Any:
    return REFERENCE if kernels.name == "reference" else NativeQuantizers()


def one_range(v: Any) -> Any:
    return torch.tensor([0, v.numel()])


def wild(n: Any) -> Any:
    """All magnitudes there are, and zeros of both signs."""
    exponents = torch.randint(-149, 128, (n,), generator=torch.Generator().manual_seed(n))
    v = torch.ldexp(random(n, 1), exponents.float()).clamp(-LARGEST, LARGEST)
    v[3::11], v[5::13], v[7::17] = 0.0, -0.0, LARGEST
    return v


@cache
def cases(n: Any) -> Any:
    """(v, bounds, a magnitude for each segment): one segment, and uneven ones, some of them empty."""
    cuts = torch.randint(n + 1, (7,), generator=torch.Generator().manual_seed(n)).msort()
    uneven = torch.tensor([0, 0, *cuts.tolist(), *cuts[3:4].tolist(), n, n]).msort()
    # with a unit for what their segments need
    buffers = (random(n, 2), 1.0), (random(n, 3) * 1e37, 1e37), (random(n, 4) * 1e-40, 1e-40), (wild(n), 1e-3)
    ways = product((torch.tensor([0, n]), uneven), buffers)
    made = [(v, bounds, random(len(bounds) - 1, n).abs() * unit) for bounds, (v, unit) in ways]
    return made if n < 10_000 else [made[0], made[-1]]


@cache
def results_of(n: Any) -> Any:
    return [coded(REFERENCE, *given) for given in cases(n)]


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("n", SIZES)
def test_tiers_agree_bit_for_bit(quantizers: Any, n: int) -> None:
    """Each decodes what it has encoded."""
    for number, (given, expected) in enumerate(zip(cases(n), results_of(n), strict=True)):
        before, state = given[0].clone(), torch.get_rng_state()
        with case("numbers", number):
            assert_same_codes(coded(quantizers, *given), expected, before)
            assert same(given[0], before) and torch.equal(torch.get_rng_state(), state)


def test_statistics(quantizers: Any) -> None:
    for n in SIZES:
        for number, (v, bounds, _) in enumerate(cases(n)):
            parts = v.split(bounds.diff().tolist())
            largest = [part.abs().max() if part.numel() else torch.tensor(0.0) for part in parts]
            with case(n, number):
                assert same(quantizers.largest(v, bounds), torch.stack(largest))
    assert not quantizers.largest(v[:0], torch.tensor([0])).numel()


def rounded_halves(quantizers: Any, v: Any, dtype: Any) -> tuple[Any, Any]:
    """The halves, in two pieces and at any address, and whether all are finite."""
    halves, middle = torch.empty(v.numel() + 1, dtype=dtype)[1:], v.numel() // 3
    return halves, quantizers.round_((v[:middle], v[middle:]), halves).isfinite()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_halves_are_rounded_as_by_torch(quantizers: Any, dtype: Any, n: int) -> None:
    v = wild(n).clamp(-1e30, 1e30)
    halves, is_finite = rounded_halves(quantizers, v, dtype)
    assert is_finite and same(halves, v.to(dtype))


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", SIZES[1:])
def test_a_half_that_is_not_finite_is_reported(quantizers: Any, dtype: Any, n: int, bad: float) -> None:
    v = wild(n).clamp(-1e30, 1e30)
    v[n - 1] = bad
    halves, is_finite = rounded_halves(quantizers, v, dtype)
    assert not is_finite and same(halves[:-1], v[:-1].to(dtype)) and not halves[-1:].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_mean_of_halves_is_added_in_fp32_in_the_order_of_ranks(quantizers: Any, dtype: Any) -> None:
    for n, ranks in product((0, 1, 33, 70_001), (2, 3)):
        codes = [(random(n, r) * 50.0**r).to(dtype).view(torch.uint8) for r in range(ranks)]
        mean, right = torch.full((n,), NAN), torch.zeros(n)
        for code in codes:
            right += code.view(dtype).float()
        quantizers.halves_mean_(codes, dtype, ranks, mean)
        assert same(mean, right / ranks), (n, ranks)


@cache
def mean_cases() -> Any:
    """(n, bounds, values of the ranks, factors, size, codes and mean by operation), at the ends of groups."""
    made = []
    for n, ranks in ((0, 2), (1, 1), (33, 2), (100, 3), (4097, 4), (4100, 5), (40_000, 9)):
        for bounds in cases(n)[0][1], cases(n)[-1][1]:
            vs = [random(n, 10 + r) for r in range(ranks)]
            values = [(random(len(bounds) - 1, 20 + r).abs() * 1.7**r) for r in range(ranks)]
            values[-1][::2] = 0.0
            factors = random(len(bounds) - 1, 30).abs() if ranks % 2 else None
            size = ranks + n % 2
            expected, of_ranks = [], zip(*(operations(REFERENCE, bounds, each) for each in values), strict=True)
            for mean_, kind in zip(means(REFERENCE, bounds, values, factors, size), of_ranks, strict=True):
                codes = [encode(v)[0] for (encode, _), v in zip(kind, vs, strict=True)]
                expected.append((codes, torch.zeros(n)))
                mean_(*expected[-1])
            made.append((n, bounds, values, factors, size, expected))
    return made


@pytest.mark.usefixtures("no_type_checks")
def test_the_mean_of_all_ranks_adds_one_rank_after_the_other(quantizers: Any) -> None:
    for n, bounds, values, factors, size, expected in mean_cases():
        for operation, mean_ in enumerate(means(quantizers, bounds, values, factors, size)):
            codes, right = expected[operation]
            mean = torch.full((n,), NAN)
            mean_([torch.cat([own[:1], own])[1:] for own in codes], mean)  # at any address
            assert same(mean, right), (n, len(bounds), operation)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("n", "width", "bits"), [(1, 2, 3), (100, 2, 4), (100, 1, 2), (70_001, 1, 3), (70_001, 2, 5)]
)
def test_sums_are_sent_as_levels(quantizers: Any, n: int, width: int, bits: int) -> None:
    for bounds in cases(n)[0][1], cases(n)[-1][1]:
        with case(len(bounds)):
            check_sums(quantizers, bounds, width, bits, 3)


def test_a_large_mean_is_written_past_the_caches(quantizers: Any) -> None:
    n = 2**20 + 33
    bounds, one, factors = torch.tensor([0, 70, n]), torch.ones(2), torch.tensor([0.7, 0.3])
    codes = [torch.randint(256, (layout_of(bounds, 2, 4).nbytes,), dtype=torch.uint8) for _ in range(3)]
    mean, right = torch.full((n,), NAN), torch.zeros(n)
    quantizers.tern_mean_(codes, bounds, [one] * 3, factors, 3, mean)
    for own in codes:
        NativeQuantizers().tern_add_(own, bounds, one, right)
    right[:70] *= factors[0]
    right[70:] *= factors[1]
    assert same(mean, right / 3)


OF_MXNET = torch.tensor([0.75, 0.375, -0.875, 0.5, -0.5, 0.375])


def test_ternary_codes_are_mxnet_s(quantizers: Any) -> None:
    v, half, total = OF_MXNET, torch.tensor([0.5]), torch.zeros(6)
    codes, residual = quantizers.tern_encode(v, one_range(v), half)
    assert codes.tolist() == [0xCB, 0x80, 0, 0] and residual.tolist() == [0.25, 0.375, -0.375, 0, 0, 0.375]
    quantizers.tern_add_(codes, one_range(v), half, total)
    assert total.tolist() == [0.5, 0, -0.5, 0.5, -0.5, 0]


def test_sign_codes_are_mxnet_s(quantizers: Any) -> None:
    v, one, total = OF_MXNET, torch.ones(1), torch.zeros(6)
    codes, _ = quantizers.sign_encode(v, one_range(v), 0 * one, one)
    assert codes.tolist() == [0xD4, 0, 0, 0]
    quantizers.sign_add_(codes, one_range(v), one, total)
    assert total.tolist() == [1, 1, -1, 1, -1, 1]


def test_the_field_01_of_a_ternary_code_is_zero(quantizers: Any) -> None:
    total = torch.ones(4)
    quantizers.tern_add_(torch.tensor([0b01111001, 0, 0, 0]).byte(), one_range(total), torch.tensor([2.0]), total)
    assert total.tolist() == [1, 3, -1, 1]


def test_uniform_codes_are_levels_with_a_sign(quantizers: Any) -> None:
    v, scale = torch.tensor([0.0, -7.0, 2.49, -2.5, 9.0, -0.4]), torch.tensor([7.0])
    codes, residual = quantizers.uniform_encode(v, one_range(v), scale, 7, 4, None)
    assert codes.tolist() == [0xF0, 0xB2, 0x07]
    assert same(v - residual, torch.tensor([0.0, -7, 2, -3, 7, 0]))
    codes, _ = quantizers.uniform_encode(v, torch.tensor([0, 3, 3, 6]), scale.expand(3).clone(), 1, 2, None)
    assert codes.tolist() == [0b001100, 0b000100]


def test_every_range_begins_at_a_unit_of_its_own(quantizers: Any) -> None:
    bounds, v, each = torch.tensor([0, 33, 33, 34, 41]), torch.ones(41), torch.ones(4)
    signs, _ = quantizers.sign_encode(v, bounds, 0 * each, each)
    assert signs.tolist() == [255, 255, 255, 255, 128, 0, 0, 0, 128, 0, 0, 0, 254, 0, 0, 0]
    assert layout_of(bounds, 1, 4).starts.tolist() == [0, 8, 8, 12]
    ternary, _ = quantizers.tern_encode(v, bounds, each)
    assert ternary.tolist() == [255] * 8 + [192, 0, 0, 0] + [192, 0, 0, 0] + [255, 252, 0, 0]
    uniform, _ = quantizers.uniform_encode(v, bounds, each, 1, 2, None)
    assert uniform.tolist() == [85] * 8 + [1] + [1] + [85, 21]


@pytest.mark.parametrize("scale", [0.0, INF, NAN, -1.0])
def test_a_range_without_a_usable_scale_sends_nothing(quantizers: Any, scale: float) -> None:
    """Whatever the codes that arrive for it."""
    v, each = torch.tensor([3.0, -1e38, 1e-40, 0.0, -0.0]), torch.tensor([scale])
    uniform = [quantizers.uniform_encode(v, one_range(v), each, 7, 4, seed) for seed in (None, 2**32 - 1)]
    for codes, residual in (quantizers.tern_encode(v, one_range(v), each), *uniform):
        assert not codes.any() and same(residual, v)
    noise, total = torch.arange(240, 248).byte(), v.clone()
    quantizers.tern_add_(noise, one_range(v), each, total)
    quantizers.uniform_add_(noise, one_range(v), each, 7, 4, total)
    assert torch.equal(total, v)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_largest_scale_of_fp32_leaves_a_finite_residual(quantizers: Any, bits: int) -> None:
    v = torch.tensor([LARGEST, -LARGEST, 1e-40])
    for levels in range(1, 2 ** (bits - 1)):
        _, residual = quantizers.uniform_encode(v, one_range(v), torch.tensor([LARGEST]), levels, bits, None)
        assert residual.isfinite().all() and (residual[:2].abs() <= 1e-6 * LARGEST).all()


def test_a_scale_whose_inverse_would_be_inf_sends_nothing(quantizers: Any) -> None:
    v = torch.tensor([LARGEST, -LARGEST, 1e-40])
    _, residual = quantizers.uniform_encode(v, one_range(v), torch.tensor([1e-40]), 127, 8, 1)
    assert same(residual, v)


def assert_unbiased(encode: Any, v: Any, below: Any, above: Any) -> None:
    """The mean over many seeds, within 5 of its standard deviations; below <= |v| <= above are what is decoded."""
    decoded = torch.stack([v - encode(seed)[1] for seed in range(1500)]).double()
    error, size = decoded.mean(0) - v, v.abs().double()
    variance = ((size - below) * (above - size)).clamp(min=0)
    assert (error.abs() <= 5 * (variance / 1500).sqrt() + 1e-6 * size).all()
    assert decoded.std(0).count_nonzero() > 0.9 * v.numel()


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(("bits", "levels"), [(2, 1), (4, 7), (8, 100)])
def test_random_rounding_is_unbiased(bits: int, levels: int) -> None:
    v = random(300, 5)
    largest, quantizers = v.abs().max().view(1), NativeQuantizers()
    step = largest.double() / levels
    below = (v.abs() / step).floor() * step
    encode = partial(quantizers.uniform_encode, v, one_range(v), largest, levels, bits)
    assert_unbiased(encode, v, below, below + step)


DRAWN_NUMBERS = 1 << 16


@cache
def drawn() -> list[Any]:
    """The random numbers of some seeds."""
    seeds = (0, 1, 2, 3, 4, 2**16, 2**31, 2**32 - 1)
    return [random_bits(DRAWN_NUMBERS, seed, torch.device("cpu")) for seed in seeds]


def test_the_numbers_of_random_rounding_are_uniform() -> None:
    for column, shift in product(drawn(), (0, 8, 16, 24)):
        counts = torch.bincount(column >> shift & 255, minlength=256)
        chi_square = float((counts - DRAWN_NUMBERS / 256).square().sum() / (DRAWN_NUMBERS / 256))
        assert 150 < chi_square < 380  # 255 degrees of freedom: within some five standard deviations


def test_the_numbers_of_random_rounding_are_uncorrelated() -> None:
    rows = torch.stack(drawn()).double() / 2**32
    rows -= rows.mean(1, keepdim=True)
    rows /= rows.square().sum(1, keepdim=True).sqrt()
    for shift in (0, 1, 2, 3, 64, 1024):
        correlations = rows @ rows.roll(shift, 1).T
        if shift == 0:
            correlations.fill_diagonal_(0.0)
        assert correlations.abs().max() < 5 / DRAWN_NUMBERS**0.5


@pytest.mark.usefixtures("no_type_checks")
def test_small_integers() -> None:
    for n in SIZES[:-1]:
        levels = torch.randint(256, (n,), generator=torch.Generator().manual_seed(n)).byte()
        for bits in range(1, 9):
            packed, kept = REFERENCE.pack(levels, bits), levels & 2**bits - 1
            assert torch.equal(REFERENCE.unpack(packed, bits, n), kept)
            if n <= 100:
                stream = sum(level << i * bits for i, level in enumerate(kept.tolist()))
                assert bytes(packed.tolist()) == stream.to_bytes(-(-n * bits // 8), "little")


def test_the_tier_follows_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in (("reference", Quantizers), ("native", NativeQuantizers)):
        monkeypatch.setattr(kernels, "_asked", name)
        assert type(kernels.of(torch.zeros(1)).quantize) is kind


BLOCKS = Blocks()


@pytest.fixture
def blocks(kernels: Any) -> Any:
    return BLOCKS if kernels.name == "reference" else NativeBlocks()


@pytest.mark.usefixtures("no_type_checks")
def test_tiers_of_blocks_agree(blocks: Any) -> None:
    for i, (cuts, code) in enumerate(product(CUTS, CODES)):
        rows = (1, 3)[(i + i // len(CODES)) % 2]  # of each code and of each cut
        for v in random(cuts[-1], 1), numbers(cuts[-1], 2):
            with case(cuts, code, rows):
                coded = check_blocks(blocks, v, torch.tensor(cuts), code, rows)
        check_one_pass(blocks, v, torch.tensor(cuts), code, coded)


@pytest.fixture
def halves(kernels: Any) -> Any:
    return Halves() if kernels.name == "reference" else NativeHalves()


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("code", HALF_CODES, ids=["nearest", "random"])
def test_tiers_of_halves_agree(halves: Any, code: Any, rows: int) -> None:
    for cuts in CUTS:
        for v in random(cuts[-1], 1), numbers(cuts[-1], 2):
            with case(cuts):
                coded = check_blocks(halves, v, torch.tensor(cuts), code, rows)
        check_one_pass(halves, v, torch.tensor(cuts), code, coded)


def test_halves_are_bfloat16_to_nearest() -> None:
    v = torch.cat([numbers(5000, 2), torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8])])  # three ties
    coded, rest = encoded(Halves(), v, torch.tensor([0, 5003]), HalfCode(), 1)
    assert same(coded[0].clone().view(torch.bfloat16), v.bfloat16()) and same(rest, v - v.bfloat16().float())


def test_random_halves_are_one_of_two_neighbours_and_right_on_average() -> None:
    v, n = torch.full((40_000,), 1 + 2.0**-7 * 0.3), 40_000
    coded, _ = encoded(Halves(), v, torch.tensor([0, n]), HalfCode(random=True, seed=3), 1)
    values = coded[0].clone().view(torch.bfloat16).float()
    assert set(values.tolist()) == {1.0, 1 + 2.0**-7}
    share = float((values > 1).float().mean())
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / n) ** 0.5


def test_random_halves_depend_on_their_seed() -> None:
    v, bounds = random(1000, 1), torch.tensor([0, 1000])
    one, same_again, other = (
        encoded(Halves(), v, bounds, HalfCode(random=True).seeded(seed), 1)[0] for seed in (7, 7, 8)
    )
    assert same(one, same_again) and not same(one, other)


def block_that_cannot_be_sent(blocks: Any, code: Any) -> tuple[Any, Any, Any, Any]:
    """Near the largest float the scale rounds up to inf. Returns the block, its bounds, the row, what is kept."""
    v, bounds = random(code.size, 1), torch.tensor([0, code.size])
    v[3] = 3.4e38
    return v, bounds, *encoded(blocks, v, bounds, code, 1)


@pytest.mark.parametrize("code", [code for code in CODES if not code.rotate], ids=str)
def test_a_block_whose_scale_would_be_inf_stays_unsent(blocks: Any, code: Any) -> None:
    v, _, coded, kept = block_that_cannot_be_sent(blocks, code)
    assert same(kept, v) and not coded[:, 2:].any()


@pytest.mark.parametrize("code", [code for code in CODES if not code.rotate], ids=str)
def test_a_scale_that_is_no_positive_number_decodes_to_zeros(blocks: Any, code: Any) -> None:
    _, bounds, coded, _ = block_that_cannot_be_sent(blocks, code)
    out = torch.empty(code.size)
    for high in (0x7F, 0xFF, 0x80, 0xBF):  # inf, NaN and negative numbers
        for low in (0x80, 0xC0):
            coded[0, 0], coded[0, 1], coded[0, 2:] = low, high, 0x7F
            blocks.decode(coded.unbind(), bounds, code, 1, (out,))
            assert not out.any(), (high, low)


def test_levels_are_the_nearest_of_the_block() -> None:
    """Within half a step of the block, whose scale is its largest magnitude, rounded up to bfloat16."""
    for code in CODES:
        v, bounds = random(5000, 4), torch.tensor([0, 2000, 5000])
        _, rest = encoded(BLOCKS, v, bounds, code, 1)
        for s, e in zip(v.split([2000, 3000]), rest.split([2000, 3000]), strict=True):
            whole = len(s) // code.size * code.size
            blocks = [y[:whole].view(-1, code.size) for y in (s, e)]
            x, error = map(rotated, blocks) if code.rotate else blocks
            limits = x.abs().amax(1) * (1 + 2.0**-7) / code.levels / 2
            assert whole and (error.abs().amax(1) <= 1.0001 * limits).all()
    x = random(4 * GROUP, 5)
    torch.testing.assert_close(rotated(rotated(x)), x)
    torch.testing.assert_close(rotated(x).norm(), x.norm())
    one = torch.zeros(GROUP)
    one[3] = 8.0
    assert same(rotated(one).abs(), torch.ones(GROUP))
