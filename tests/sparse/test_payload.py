"""Round trips of payloads, their planned sizes, and what every format does with the values."""

import math
from itertools import combinations
from typing import Any
from zlib import crc32

import pytest
import torch
from cases import case
from refusals import refuse
from sparse.payloads import (
    FORMATS,
    SOME,
    VALUES,
    budget_of,
    clustered,
    decode,
    encode,
    formats_for,
    scattered,
    selection_of,
)

from dgc.kernels.payload import IndexKind, packed_bits, thin
from dgc.sparse import payloads as formats
from dgc.sparse.payloads import PackedIndices, RiceIndices, SignValues, SparseFormat
from dgc.sparse.payloads.indices import packed_longest, plan_packed, plan_rice

NUMEL = 5000
some_formats = pytest.mark.parametrize("form", SOME.values(), ids=SOME)


def check_round_trip(form: Any, selection: Any, budget: Any, numel: Any) -> Any:
    """Decoding gives what the sender was told that it would; returns what was sent."""
    done = encode(form, selection, budget, numel)
    assert done.payload.dtype == torch.uint8 and done.payload.shape == (form.nbytes(budget, numel),)
    (got,), (number,) = decode(form, [done.payload], budget, numel)
    assert number == 0 and torch.equal(got.count, done.sent.count)
    assert torch.equal(got.indices, done.sent.indices)
    assert torch.equal(got.values.view(torch.int32), done.sent.values.view(torch.int32))
    count = int(got.count)
    assert not got.indices[count:].any() and not got.values[count:].any() and not done.own[count:].any()
    where = torch.searchsorted(selection.indices[: int(selection.count)], got.indices[:count])
    assert torch.equal(done.own[:count], selection.values[where]), "own: the values as they were"
    if form.values == formats.CastValues():
        assert torch.equal(done.sent.values, done.own)
    return done.sent


@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 7, 64, 101, 1000])
@pytest.mark.parametrize(
    ("name", "nbytes"),
    [("fp32 int64", 12), ("fp32 int32", 8), ("fp16 int64", 10), ("fp16 int32", 6), ("bf16 int32", 6)],
)
def test_the_planned_size_of_plain_formats_is_exact(name: str, nbytes: int, capacity: int) -> None:
    exact = 24 + capacity * nbytes
    planned = FORMATS[name].nbytes(budget_of(capacity, 0, NUMEL), NUMEL)
    assert exact <= planned < exact + 8 and planned % 8 == 0


@pytest.mark.parametrize("density", [0.001, 0.01])
@pytest.mark.parametrize("numel", [1_500_000, 6_500_000, 50_000_000])
def test_the_planned_size_of_rice_is_within_a_fifth_of_a_bit_of_the_entropy(numel: int, density: float) -> None:
    """With all rounding up."""
    capacity = math.ceil(numel * density)
    bits = 8 * RiceIndices().plan(capacity, numel).nbytes / capacity
    assert entropy(density) < bits < entropy(density) + 0.2


@pytest.mark.parametrize("numel", [400_000, 1_000_000, 6_500_000])
def test_rice_with_signs_takes_less_than_14_bits(numel: int) -> None:
    capacity = numel // 1000
    planned = SparseFormat(SignValues(), RiceIndices()).nbytes(budget_of(capacity, 0, numel), numel)
    assert 8 * planned < 14 * capacity


COUNTS = [(0, 0), (0, 1), (1, 1), (0, 5), (3, 5), (127, 127), (128, 128), (129, 129), (63, 101), (1000, 1001)]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_round_trip(form: Any) -> None:
    for count, capacity in COUNTS:
        selection = selection_of(scattered(NUMEL, count), capacity=capacity)
        with case(count, "of", capacity):
            sent = check_round_trip(form, selection, budget_of(capacity, 0, 7, 7, 3000, NUMEL), NUMEL)
            assert int(sent.count) >= 0.95 * count


@pytest.mark.usefixtures("no_type_checks")
def test_supports_of_every_shape() -> None:
    numel = 20_000
    everything = torch.arange(numel)
    first, last, every_13th = everything[:700], everything[-700:], everything[::13]
    shapes = [everything, first, last, every_13th, everything[-1:], everything[:1]]
    shapes += [everything[everything % 64 < 3], clustered(numel, 900), torch.cat([first[:300], last[-300:]])]
    shapes += [scattered(numel, count, seed) for seed in range(2) for count in (2, 200, 6000, 14_000)]
    for number, indices in enumerate(shapes):
        for capacity in (indices.numel(), min(numel, indices.numel() + 600)):
            budget = budget_of(capacity, 0, 9000, numel)
            for name, form in formats_for(number).items():
                with case(name, "shape", number, "of", capacity):
                    check_round_trip(form, selection_of(indices, capacity=capacity), budget, numel)


@some_formats
@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("capacity", [1, 3, 8, 13])
def test_payloads_that_lie_behind_one_another_at_odd_addresses_decode(
    form: Any, capacity: int, shift: int
) -> None:
    """As an all-gather returns them: slices of one buffer."""
    budget = budget_of(capacity, 0, NUMEL)
    sent = [encode(form, selection_of(scattered(NUMEL, capacity, s), seed=s), budget, NUMEL) for s in range(3)]
    gathered = torch.cat([torch.zeros(shift, dtype=torch.uint8), *(done.payload for done in sent)])
    selections, _ = decode(form, list(gathered[shift:].chunk(3)), budget, NUMEL)
    for got, done in zip(selections, sent, strict=True):
        assert torch.equal(got.indices, done.sent.indices)
        assert torch.equal(got.values, done.sent.values)


def test_bytes_of_plain_indices_by_hand() -> None:
    form, budget = FORMATS["fp32 int32"], budget_of(3, 0, NUMEL)
    payload = encode(form, selection_of([2, 258], [1.0, -2.0], 3), budget, NUMEL).payload
    assert payload[:8].tolist() == [2] + [0] * 7
    assert payload[12:20].tolist() == [0, 0, 0x80, 0x3F] * 2  # scale and ratio: 1
    form_number = crc32(b"(PlainIndices(dtype='int32'), CastValues(dtype='fp32'))")
    assert payload[20:24].tolist() == list(form_number.to_bytes(4, "little"))
    indices, values = [2, 0, 0, 0, 2, 1, 0, 0], [0, 0, 0x80, 0x3F, 0, 0, 0, 0xC0]
    assert payload[24:].tolist() == [*indices, *[0] * 4, *values, *[0] * 4]


def test_bytes_of_rice_codes_by_hand() -> None:
    """Gaps 1, 0, 2: all with b = 0, so in unary, 01 1 001 from the lowest bit on, behind the byte for b."""
    selection = selection_of([1, 2, 5], [1.0, -2.0, -4.0])
    payload = encode(FORMATS["sign rice"], selection, budget_of(3, 0, 5, 6), 6).payload
    means = [0, 0, 0xC0, 0x3F, 0, 0, 0x80, 0x40]
    assert payload[24:].tolist() == [0, 0b100110, 0, 0] + means + [0b110, 0, 0, 0]


def test_bytes_of_packed_codes_by_hand() -> None:
    """Gaps 1, 0, 5 take three bits each."""
    form = FORMATS["int8 packed"]
    payload = encode(form, selection_of([1, 2, 8], [127.0, -64.4, 1]), budget_of(3, 0, 100), 100).payload
    assert payload[24 : 24 + 4].tolist() == [3, 0b01000001, 0b1, 0]
    start = 24 + form.indices.plan(3, 100).nbytes
    assert payload[start : start + 7].tolist() == [0, 0, 0x80, 0x3F, 127, 256 - 64, 1]


def test_bytes_of_two_bits_by_hand() -> None:
    """Bins meet at -8.9, 0 and 8.9, then all at 8. From the lowest bits on: 0, 1, 2, 3 and 1; then 3 for 8."""
    form, budget = FORMATS["2 bits int32"], budget_of(7, 0, 5, 7, 8)
    selection = selection_of([0, 1, 2, 3, 4, 7], [-9.0, -1.0, 3.0, 9.0, -2.0, 8.0], 7)
    payload = encode(form, selection, budget, 8).payload
    tables = payload[24 + 4 * 7 :][: 3 * 16].view(torch.float32).view(3, 4)
    assert tables.tolist() == [[-9.0, -1.5, 3.0, 9.0], [0.0] * 4, [0.0, 0.0, 0.0, 8.0]]
    assert payload[24 + 4 * 7 + 3 * 16 :].tolist() == [0b11_10_01_00, 0b11_01, 0, 0]


@some_formats
def test_the_first_tensor_that_is_not_finite_is_named(form: Any) -> None:
    budget, selection = budget_of(4, 0, 7, 7, 3000, NUMEL), selection_of(scattered(NUMEL, 4))
    good = encode(form, selection, budget, NUMEL).payload
    for first, number in ((0, 1), (6, 1), (7, 3), (2999, 3), (3000, 4), (4999, 4), (5000, 0)):
        bad = encode(form, selection, budget, NUMEL, first).payload
        assert decode(form, [good, bad], budget, NUMEL)[1] == [0, number], first


LARGEST = torch.finfo(torch.float32).max
ROUNDING = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8}


def sent_values(name: Any, values: Any, *bounds: Any, result: Any = torch.float32) -> Any:
    values = torch.tensor(values)
    numel = values.numel()
    budget = budget_of(numel, *(bounds or (0, numel)))
    form = formats.SparseFormat(VALUES[name], formats.PlainIndices("int32"))
    done = encode(form, selection_of(torch.arange(numel), values), budget, numel, result=result)
    (got,), _ = decode(form, [done.payload], budget, numel)
    assert torch.equal(got.values, done.sent.values) and got.values.isfinite().all()
    return got.values


@pytest.mark.parametrize("name", ROUNDING)
def test_casting_is_as_exact_at_every_magnitude(name: Any) -> None:
    for unit in (1.0, 1e30, 1e-30, 1e38, 1e-37, 2.0**-120):
        values = (torch.randn(300, generator=torch.Generator().manual_seed(1)).clamp(-3, 3) * unit).tolist()
        error = (sent_values(name, values) - torch.tensor(values)).abs()
        bound = torch.tensor(values).abs() * ROUNDING[name] + unit * 3e-8 * (name != "fp32")
        assert (error <= bound).all(), unit


every_value = pytest.mark.parametrize("name", VALUES)
LOSE_SMALL = ("fp16", "int8")  # send small values as zero


@every_value
@pytest.mark.parametrize(
    "values", [[LARGEST, -LARGEST], [LARGEST, 1.0], [1e-45, -1e-45], [1e-40, 3e-40], [65520.0, 1e-8]], ids=str
)
def test_values_at_the_ends_of_the_range_keep_their_magnitude(name: Any, values: list[float]) -> None:
    got = sent_values(name, values)
    # in 2 bits, what is below 2**-60 of the largest magnitude adds nothing to the mean of its bin
    loses = name in LOSE_SMALL or name == "2 bits" and min(values) < 2.0**-60 * max(values)
    assert got.sign().tolist() == torch.tensor(values).sign().tolist() or loses
    assert got.abs().max() >= 0.5 * torch.tensor(values).abs().max()


@every_value
def test_zeros_stay_zero(name: Any) -> None:
    assert sent_values(name, [0.0, 0.0]).tolist() == [0.0, 0.0]


@every_value
@pytest.mark.parametrize("result", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_values_stay_in_the_range_of_the_gradients(name: Any, result: Any) -> None:
    """A mean that is to be written into fp16 gradients must not be inf there, whatever the wire holds."""
    got = sent_values(name, [LARGEST, -1e6, 2.0, 65504.0], 0, 1, 2, 4, result=result)
    assert got.to(result).isfinite().all()


def test_int8_errs_by_half_a_step_of_each_tensor() -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.cat([torch.randn(200, generator=generator), 1e-6 * torch.randn(100, generator=generator)])
    got = sent_values("int8", values.tolist(), 0, 200, 200, 300)
    for part in (slice(0, 200), slice(200, 300)):
        step = values[part].abs().max() / 127
        assert ((got[part] - values[part]).abs() <= 0.5001 * step).all()


def test_signs_carry_the_mean_magnitude_of_each_tensor() -> None:
    got = sent_values("sign", [1.0, -2.0, 3.0, -4e-6, 2e-6], 0, 3, 3, 5)
    assert torch.equal(got, torch.tensor([2.0, -2.0, 2.0, -3e-6, 3e-6]))


def test_mean_magnitudes_are_added_up_in_double_precision() -> None:
    many = [1.0] + [1e-4] * 20_000
    exact = math.fsum(torch.tensor(many).tolist()) / len(many)
    assert sent_values("sign", many)[0].item() == torch.tensor(exact).item()


def test_the_mean_magnitude_of_a_tensor_that_sends_nothing_is_zero() -> None:
    selection, budget = selection_of(torch.tensor([3, 55])), budget_of(2, 0, 2, 50, 60)
    payload = encode(FORMATS["sign int32"], selection, budget, 60).payload
    means = payload[24 + 8 : 24 + 8 + 12].view(torch.float32)
    assert means[0] == 0 and (means[1:] > 0).all()


def bins_of(values: Any, range_in_sigmas: Any) -> Any:
    """The bins of one tensor's values, in exact sums."""
    mean = math.fsum(values) / len(values)
    sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / len(values))
    width = range_in_sigmas * sigma / 4
    return [min(3, max(0, math.floor((x - mean) / width) + 2)) for x in values]


def in_2_bits(values: Any, range_in_sigmas: Any, *bounds: Any) -> Any:
    values_in, k = formats.TwoBitValues(range_in_sigmas), values.numel()
    form = formats.SparseFormat(values_in, formats.PlainIndices("int32"))
    return encode(form, selection_of(torch.arange(k), values), budget_of(k, *bounds), k).sent.values


@pytest.mark.parametrize("range_in_sigmas", [0.5, 2, 4.0, 6.0, 100.0])
def test_2_bits_carry_the_mean_of_each_bin_of_each_tensor(range_in_sigmas: Any) -> None:
    generator, sizes = torch.Generator().manual_seed(4), (300, 77, 1, 2, 5)
    units, shifts = (1.0, 1e-6, 1e3, 1e-3, 1.0), (0.0, 0.4, 1.0, 0.0, -3.0)
    drawn = [torch.randn(size, generator=generator) for size in sizes]
    parts = [unit * (x + shift) for x, unit, shift in zip(drawn, units, shifts, strict=True)]
    got = in_2_bits(torch.cat(parts), range_in_sigmas, *torch.tensor([0, *sizes]).cumsum(0).tolist())
    for part, sent in zip(parts, got.split(sizes), strict=True):
        values = part.double().tolist()
        bins = bins_of(values, range_in_sigmas) if len(values) > 1 else [3]
        for x, bin_of_x in zip(sent.tolist(), bins, strict=True):
            members = [value for value, b in zip(values, bins, strict=True) if b == bin_of_x]
            assert x == torch.tensor(math.fsum(members) / len(members)).item()
        assert abs(float(sent.double().sum() - part.double().sum())) <= 1e-6 * float(part.abs().sum())


@pytest.fixture(scope="module")
def above_a_threshold() -> torch.Tensor:
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(5))
    return x[x.abs() > 2.5]


@pytest.mark.parametrize("range_in_sigmas", [4.0, 6.0])
def test_2_bits_keep_signs(range_in_sigmas: float, above_a_threshold: torch.Tensor) -> None:
    got = in_2_bits(above_a_threshold, range_in_sigmas, 0, above_a_threshold.numel())
    assert torch.equal(got.sign(), above_a_threshold.sign())


@pytest.mark.parametrize(("range_in_sigmas", "share"), [(4.0, 0.85), (6.0, 1.0)])
def test_2_bits_are_closer_to_values_than_signs_are(
    range_in_sigmas: float, share: float, above_a_threshold: torch.Tensor
) -> None:
    values = above_a_threshold
    signs, got = sent_values("sign", values.tolist()), in_2_bits(values, range_in_sigmas, 0, values.numel())
    assert (got - values).norm() < share * (signs - values).norm()


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("wrong", [0, -1.0, math.inf, math.nan, True, "6", None])
def test_a_range_of_2_bits_that_is_no_positive_number_is_refused(wrong: Any) -> None:
    refuse("range_in_sigmas must be a positive number of standard dev", formats.TwoBitValues, wrong)


@pytest.mark.usefixtures("no_type_checks")
def test_an_unknown_dtype_of_values_is_refused() -> None:
    refuse("fp32, fp16, bf16", formats.CastValues, "float16")


@pytest.mark.usefixtures("no_type_checks")
def test_an_unknown_dtype_of_indices_is_refused() -> None:
    refuse("int64 or int32", formats.PlainIndices, "int16")


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    "indices",
    [formats.PlainIndices(), formats.PlainIndices("int32"), formats.PackedIndices(), formats.RiceIndices()],
    ids=str,
)
def test_a_bucket_of_two_to_the_31_elements_is_too_large(indices: Any) -> None:
    indices.plan(1, 2**31 - 1)
    refuse("too large", indices.plan, 1, 2**31)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_values_beyond_the_range_are_cut(dtype: str) -> None:
    values = formats.CastValues(dtype)
    limit = torch.finfo(values.torch_dtype).max
    found = values.quantize(torch.tensor([LARGEST, -LARGEST, 0.5, 0.0]))
    assert found.float().tolist() == [limit, -limit, 0.5, 0.0]


def test_values_are_cut_from_just_below_half_a_step_beyond_the_range() -> None:
    cut = formats.CastValues("fp16").quantize(torch.tensor([65519.0, 65520.0, 1e30, -1e30]))
    assert cut.tolist() == [65504.0, 65504.0, 65504.0, -65504.0]


def test_sums_on_a_wire_that_adds_are_not_infinite() -> None:
    assert (4 * formats.CastValues("fp16").quantize(torch.full((3,), 1e5), summands=4)).isfinite().all()


def test_only_fp16_values_have_a_dense_step_in_fp16() -> None:
    dense = {name: values.dense.dtype for name, values in VALUES.items()}
    assert dense == {**dict.fromkeys(VALUES, "fp32"), "fp16": "fp16"}


CODES = {"packed": PackedIndices(), "rice": RiceIndices()}
every_code = pytest.mark.parametrize("indices", CODES.values(), ids=CODES)


def entropy(density: Any) -> Any:
    """Bits per element of an iid support of this density."""
    return -sum(share * math.log2(share) for share in (density, 1 - density)) / density


def send(indices: Any, support: Any, numel: Any) -> Any:
    """(elements sent, indices of these)"""
    form, budget = SparseFormat(SignValues(), indices), budget_of(support.numel(), 0, numel)
    sent = encode(form, selection_of(support), budget, numel).sent
    return int(sent.count), sent.indices[: int(sent.count)].long()


def test_the_planned_length_of_packed_codes_is_about_a_deviation_above_the_mean() -> None:
    """The mean of ten; the planned deviation is about the deviation of one."""
    numel, capacity = 200_000, 2000
    room = 8 * plan_packed(capacity, numel).nbytes
    supports = [selection_of(scattered(numel, capacity, seed)) for seed in range(10)]
    lengths = [float(packed_bits(support.indices, support.count)) for support in supports]
    mean = sum(lengths) / 10
    deviation = (sum((x - mean) ** 2 for x in lengths) / 9) ** 0.5
    assert 0.2 * deviation < room - mean < 2.5 * deviation


@pytest.mark.parametrize("count", [1, 5, 128, 129, 150])
@pytest.mark.parametrize("numel", [200, 2000])
def test_no_packed_code_is_longer_than_the_longest(numel: int, count: int) -> None:
    for seed in range(20):
        support = selection_of(scattered(numel, count, seed))
        length = int(packed_bits(support.indices, support.count))
        with case("seed", seed):
            assert length <= 8 * -(-count // 128) + packed_longest(count, numel)


TEN = selection_of(torch.arange(0, 100, 10), torch.arange(1.0, 11.0), capacity=12)


def test_thinning_takes_elements_at_even_distances() -> None:
    some = thin(TEN, torch.tensor(4))
    assert some.indices.tolist() == [0, 20, 50, 70] + [0] * 8 and some.values[:4].tolist() == [1, 3, 6, 8]
    assert int(some.count) == 4


@pytest.mark.parametrize("kept", [0, 10])
def test_thinning_takes_none_or_all(kept: int) -> None:
    assert torch.equal(thin(TEN, torch.tensor(kept)).values[:kept], TEN.values[:kept])


@every_code
@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
def test_nearly_all_of_a_random_support_is_sent(indices: Any, density: float) -> None:
    numel = 100_000
    capacity = math.ceil(numel * density)
    sent = [send(indices, scattered(numel, capacity, seed), numel)[0] for seed in range(10)]
    assert sum(sent) > 0.99 * 10 * capacity and max(sent) == capacity


@every_code
@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(("numel", "capacity"), [(9, 2), (9, 5), (8, 7), (8, 8)])
def test_all_of_a_small_bucket_is_sent(indices: Any, numel: int, capacity: int) -> None:
    """Where a support of few elements is coded, the longest code there is has room."""
    for support in combinations(range(numel), capacity):
        with case(support):
            assert send(indices, torch.tensor(support), numel)[0] == capacity


@every_code
@pytest.mark.parametrize("numel", [1, 2, 3, 17, 100, 128, 1000, 10**6, 2**31 - 1])
def test_no_plan_exceeds_int32(indices: Any, numel: int) -> None:
    for capacity in {1, 2, 3, 100, 128, 129, 513, numel // 1000, numel // 3}:
        if 0 < capacity <= min(numel, 10**6):
            section = indices.plan(capacity, numel)
            with case("capacity", capacity):
                assert section.nbytes <= 4 * capacity and section.nbytes % 4 == 0
                assert section.kind != IndexKind.PACKED or 0 < section.parameter <= capacity, "admits an element"


def test_tiny_supports_in_large_buckets_are_int32() -> None:
    assert RiceIndices().plan(1, 2**31 - 1).kind == IndexKind.INT32
    assert RiceIndices().plan(100, 10**5).kind == IndexKind.RICE


def worst_for(name: str, capacity: Any, numel: Any) -> Any:
    """All low bits zero, so that the high parts, in unary, are as long as can be; or a wide gap in each block."""
    if name == "rice":
        step = 2 ** plan_rice(capacity, numel).parameter
        multiples = torch.arange(capacity + 1) * ((numel - capacity) // step) // capacity
        return (step * torch.diff(multiples) + 1).cumsum(0) - 1
    gaps = torch.zeros(capacity, dtype=torch.int64)
    gaps[::128] = (numel - capacity) // -(-capacity // 128)
    return (gaps + 1).cumsum(0) - 1


@pytest.mark.parametrize("name", CODES)
def test_of_a_support_that_does_not_fit_evenly_spaced_elements_are_sent(name: Any) -> None:
    for numel, capacity in ((10**5, 1000), (10**6, 1000), (10**5, 10**4), (50_000, 20_000)):
        support = worst_for(name, capacity, numel)
        kept, sent = send(CODES[name], support, numel)
        assert 0.3 * capacity < kept <= capacity and (kept < capacity or numel != 10**6)
        assert torch.equal(sent, support[torch.arange(kept) * capacity // max(kept, 1)])
        if kept < capacity:
            steps = torch.diff(torch.searchsorted(support, sent), prepend=torch.tensor([-1]))
            assert steps.max() <= capacity // kept + 1, "no run of elements stays behind"
    clusters = clustered(10**6, 5000)
    assert send(CODES[name], clusters, 10**6)[0] == clusters.numel()
