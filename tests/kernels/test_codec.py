"""The codecs of payloads: the same bits from each, sums and streams checked against plain Python, no waiting."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from cases import case
from kernels.backends import CODECS
from kernels.comparison import HALVES, same
from sparse import payloads as inputs
from sparse.payloads import INDICES, budget_of, decode, encode, formats_for, scattered, seal_, selection_of

from dgc.kernels.payload import BLOCKS, PLAIN, TABLES, IndexCode, IndexKind, Terms, ValueKind
from dgc.kernels.selection import SparseVector
from dgc.sparse.payloads.indices import plan_packed, plan_rice

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, *HALVES])


def section_of(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def count_of(number: int) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.int32)


def supports() -> Any:
    """(ascending indices, size of the bucket): random, clustered, at the ends, everything, far too long."""
    for numel, density in ((1, 1.0), (7, 0.3), (1000, 0.13), (20_000, 0.01), (200_000, 0.001), (3000, 0.6)):
        count = math.ceil(numel * density)
        yield scattered(numel, count), numel
        yield torch.arange(count), numel
        yield torch.arange(numel - count, numel), numel
    yield inputs.clustered(30_000, 1500), 30_000
    yield torch.arange(0, 10**6, 10**3) + torch.arange(1000) % 2 * 490, 10**6
    yield torch.where(torch.arange(1000) % 128 == 7, 124_000, 1).cumsum(0), 10**6
    yield torch.tensor([0, 2**20, 2**31 - 3, 2**31 - 2]), 2**31 - 1


def test_codecs_agree_bit_for_bit() -> None:
    for seed, (support, numel) in enumerate(supports()):
        capacity = min(numel, support.numel() + 131 * (seed % 2))
        budget = budget_of(capacity, 0, numel // 3, numel // 3, numel)
        selection = selection_of(support, capacity=capacity, seed=seed)
        for name, form in formats_for(seed).items():
            with case(name, "support", seed):
                one, other = (encode(form, selection, budget, numel, 0, codec) for codec in CODECS.values())
                assert torch.equal(one.payload, other.payload) and same(one.own, other.own)
                (a,), (b,) = (decode(form, [one.payload], budget, numel, codec)[0] for codec in CODECS.values())
                for ours, theirs in ((one.sent, other.sent), (a, b)):
                    assert torch.equal(ours.indices, theirs.indices) and ours.count == theirs.count
                    assert same(ours.values, theirs.values)


def table_of(codec: Any, kind: ValueKind, values: torch.Tensor) -> torch.Tensor:
    """The fp32 numbers of one tensor that sends these values."""
    n, (length, width) = values.numel(), TABLES[kind]
    section = section_of(4 * length + (n * width + 7) // 8)
    selection = SparseVector(torch.arange(n, dtype=torch.int32), values, count_of(n))
    codec.table_encode_(kind, selection, torch.tensor([0, n]), section, 4.0)
    return section[: 4 * length].view(torch.float32).clone()


WIDE_VALUES = torch.randn(999, generator=torch.Generator().manual_seed(0)) * 2.0 ** (torch.arange(999) % 40)


@every_codec
@pytest.mark.parametrize("kind", [ValueKind.SIGN, ValueKind.TWO_BITS])
def test_scales_do_not_depend_on_the_order_of_values(codec: Any, kind: ValueKind) -> None:
    """Sums of these values in fp64 do."""
    orders = (torch.arange(999), torch.arange(999).flip(0), WIDE_VALUES.abs().argsort())
    sums = {float(WIDE_VALUES[order].double().cumsum(0)[-1]) for order in orders}
    first, *others = (table_of(codec, kind, WIDE_VALUES[order]) for order in orders)
    assert len(sums) > 1 and all(same(first, other) for other in others)


@every_codec
@pytest.mark.parametrize("unit", [2.0**-120, 1.0, 2.0**80])
def test_the_mean_magnitude_is_exact(codec: Any, unit: float) -> None:
    """What integers of 62 bits lose of these values is less than its last bit."""
    exact = sum(map(Fraction, WIDE_VALUES.abs().tolist())) / 999
    (mean,) = table_of(codec, ValueKind.SIGN, WIDE_VALUES * unit).tolist()
    assert mean == float(torch.tensor(float(exact), dtype=torch.float64).float()) * unit


@every_codec
def test_noise_in_place_of_indices_is_safe_to_decode(codec: Any) -> None:
    """Section by section, so that no checksum stands before the decoders."""
    generator = torch.Generator().manual_seed(4)
    for name, kind in (("packed", IndexKind.PACKED), ("rice", IndexKind.RICE), ("chunks", IndexKind.CHUNKS)):
        section = INDICES[name].plan(700, 5000)
        assert section.kind == kind, "coded, and not int32 for want of room"
        for _ in range(100):
            noise = torch.randint(0, 256, (section.nbytes,), dtype=torch.uint8, generator=generator)
            count = count_of(int(torch.randint(-3, 705, (), generator=generator)))
            noise[:8] = torch.randint(0, 34, (8,), generator=generator).to(torch.uint8)
            indices, valid = codec.indices_decode(noise, count, section)
            used = indices[: max(0, int(count))].long()
            assert not valid or ((torch.diff(used) > 0).all() and (used >= 0).all() and (used < 5000).all())
            for extreme in (-(2**31), 2**31 - 1):
                assert not codec.indices_decode(noise, count_of(extreme), section)[1]


@every_codec
def test_the_checksum_is_the_weighted_sum_of_the_words(codec: Any) -> None:
    payload = torch.randint(0, 256, (808,), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    bounds, zero = torch.tensor([0, 10]), torch.tensor(0)
    codec.seal_(payload, zero.int(), zero, bounds, zero.float(), Terms(0.1, 2**32 - 2))
    expected = payload.clone()
    seal_(expected)
    assert torch.equal(payload, expected) and codec.unseal(payload).sealed
    assert payload[16:20].view(torch.float32).item() == torch.tensor(0.1).item()
    assert payload[20:24].tolist() == [254, 255, 255, 255]
    assert [int(word) for word in codec.unseal(payload).terms] == [0x3DCCCCCD, -2]
    payload[700] += 1
    assert not codec.unseal(payload).sealed


@every_codec
@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_there_is_decodes_as_pytorch_reads_it(codec: Any, dtype: Any) -> None:
    words = torch.arange(2**16).to(torch.int16)
    expected = words.view(dtype).float()
    got, valid = codec.cast_decode(words.view(torch.uint8), count_of(2**16), dtype, torch.tensor(1.0))
    finite = expected.isfinite()
    assert same(got[finite], expected[finite]) and not got[~finite].isfinite().any() and not valid
    in_reach = expected[finite].clamp(-32767, 32767)
    values, scale = codec.cast_encode_(in_reach, dtype, section_of(2 * len(in_reach)))
    assert scale == 1.0 and same(values, in_reach.to(dtype).float())


@every_codec
@every_dtype
def test_magnitudes_are_cut_to_the_limit(codec: Any, dtype: Any) -> None:
    values = torch.tensor([1.0, -3e38, 5.0, 3.4e38, -0.25, 0.0])
    room, other = section_of(6 * dtype.itemsize), section_of(6 * dtype.itemsize)
    decoded, scale = codec.cast_encode_(values, dtype, room, 4.0)
    expected = codec.cast_encode_(values.clamp(-4, 4), dtype, other)
    assert same(decoded, expected[0]) and torch.equal(scale, expected[1]) and torch.equal(room, other)
    assert decoded.tolist() == [1.0, -4.0, 4.0, 4.0, -0.25, 0.0]


@every_codec
@every_dtype
@pytest.mark.parametrize("limit", [math.inf, 3.0])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1, 0x7F800000, -0x800000], ids=hex)
def test_what_is_not_finite_becomes_nan_alone(codec: Any, dtype: Any, limit: float, bits: int) -> None:
    section, good = section_of(4 * dtype.itemsize), torch.tensor([0, 1, 3])
    bad = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    values = torch.cat([torch.tensor([0.0, 3.7]), bad, torch.tensor([-5e-3])])
    others, right = codec.cast_encode_(values[good], dtype, section[: 3 * dtype.itemsize], limit)
    cast, scale = codec.cast_encode_(values, dtype, section, limit)
    again, valid = codec.cast_decode(section, count_of(4), dtype, scale)
    assert scale == right and not valid
    for got in (cast, again):
        assert got[2].isnan() and same(got[good], others)


@every_codec
def test_fp32_is_kept_bit_for_bit(codec: Any) -> None:
    values, section = torch.tensor([0.0, -0.0, 1e-45, -3.4e38, 0.1]), section_of(20)
    decoded, scale = codec.cast_encode_(values, torch.float32, section)
    assert same(decoded, values) and same(section.view(torch.float32), values) and scale == 1.0


@every_codec
@pytest.mark.parametrize(("kind", "dtype"), PLAIN.items(), ids=str)
def test_plain_indices_are_read_as_they_were_written(codec: Any, kind: Any, dtype: Any) -> None:
    support = scattered(5000, 50)
    code = IndexCode(kind, 60, 5000, 60 * dtype.itemsize)
    section = section_of(code.nbytes)
    codec.indices_encode_(selection_of(support, capacity=60), code, section)
    assert torch.equal(section.view(dtype)[:50], support.to(dtype)) and not section.view(dtype)[50:].any()
    indices, valid = codec.indices_decode(section, count_of(50), code)
    assert valid and torch.equal(indices[:50], support.int())


@every_codec
@pytest.mark.parametrize(("kind", "dtype"), PLAIN.items(), ids=str)
@pytest.mark.parametrize(("count", "valid"), [(60, True), (61, False), (-1, False)])
def test_a_count_beyond_the_section_is_not_valid(
    codec: Any, kind: Any, dtype: Any, count: int, valid: bool
) -> None:
    code = IndexCode(kind, 60, 5000, 60 * dtype.itemsize)
    section = section_of(code.nbytes)
    section.view(dtype).copy_(torch.arange(60))
    assert bool(codec.indices_decode(section, count_of(count), code)[1]) == valid


@every_codec
def test_every_block_has_its_best_rice_parameter(codec: Any) -> None:
    parts = (scattered(400_000, 900, 1), 400_000 + scattered(5000, 800, 2), 999_000 + scattered(500, 30, 3))
    support = torch.cat(parts)
    code = plan_rice(support.numel(), 10**6)
    section = section_of(code.nbytes)
    codec.indices_encode_(selection_of(support), code, section)
    size = BLOCKS[IndexKind.RICE]
    for k, block in enumerate(support.split(size)):
        gaps = torch.diff(block, prepend=support[k * size - 1 :][:1] if k else torch.tensor([-1])) - 1
        lengths = [len(gaps) * (b + 1) + int((gaps >> b).sum()) for b in range(31)]
        assert section[k] == lengths.index(min(lengths))


@every_codec
@pytest.mark.parametrize(("numel", "capacity"), [(10**5, 100), (10**5, 300), (10**6, 1000), (30_000, 6000)])
def test_most_indices_are_sent_where_rice_cannot_hold_all(codec: Any, numel: int, capacity: int) -> None:
    """The hardest supports there are: every gap one more than a multiple of 2**b*, and mixed ones."""
    code = plan_rice(capacity, numel)
    step = 2**code.parameter
    for extra in (0, 1, step // 2, step - 1):
        multiples = torch.arange(capacity + 1) * ((numel - capacity * (1 + extra)) // step) // capacity
        support = (step * torch.diff(multiples).clamp(min=0) + extra + 1).cumsum(0) - 1
        support, section = support[support < numel], section_of(code.nbytes)
        sent = codec.indices_encode_(selection_of(support, capacity=capacity), code, section)
        indices, valid = codec.indices_decode(section, sent.count, code)
        assert valid and torch.equal(indices, sent.indices) and int(sent.count) > 0.8 * support.numel()


@every_codec
@pytest.mark.parametrize("plan", [plan_rice, plan_packed])
def test_a_selection_that_fits_is_handed_on_as_it_is(codec: Any, plan: Any) -> None:
    selection, code = selection_of(scattered(5000, 50)), plan(50, 5000)
    sent = codec.indices_encode_(selection, code, section_of(code.nbytes))
    assert torch.equal(sent.indices, selection.indices) and torch.equal(sent.values, selection.values)
