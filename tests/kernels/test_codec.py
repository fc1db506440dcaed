"""The codecs of payloads: the same bits from each, sums and streams checked against plain Python, no waiting."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from cases import case
from kernels.codecs import CODECS
from torch.utils._python_dispatch import TorchDispatchMode
from wire.payloads import (
    FORMATS,
    INDICES,
    SOME,
    budget_of,
    clustered,
    decode,
    encode,
    formats_for,
    scattered,
    seal_,
    selection_of,
)

from dgc.kernels.codec import BLOCKS, HEADER_BYTES, PLAIN, IndexCode, IndexKind, Terms
from dgc.wire import PayloadError
from dgc.wire.indices import plan_packed, plan_rice
from dgc.wire.payload import PayloadPlan

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def same(a: Any, b: Any) -> Any:
    """Bit for bit, so that -0.0 is not 0.0."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def supports() -> Any:
    """(ascending indices, size of the bucket): random, clustered, at the ends, everything, far too long."""
    for numel, density in ((1, 1.0), (7, 0.3), (1000, 0.13), (20_000, 0.01), (200_000, 0.001), (3000, 0.6)):
        count = math.ceil(numel * density)
        yield scattered(numel, count), numel
        yield torch.arange(count), numel
        yield torch.arange(numel - count, numel), numel
    yield clustered(30_000, 1500), 30_000
    yield torch.arange(0, 10**6, 10**3) + torch.arange(1000) % 2 * 490, 10**6
    gaps = torch.where(torch.arange(1000) % 128 == 7, 124_000, 1)
    yield gaps.cumsum(0), 10**6
    yield torch.tensor([0, 2**20, 2**31 - 3, 2**31 - 2]), 2**31 - 1


def test_codecs_agree_bit_for_bit() -> None:
    reference, native = CODECS["reference"], CODECS["native"]
    for seed, (support, numel) in enumerate(supports()):
        capacity = min(numel, support.numel() + 131 * (seed % 2))
        budget = budget_of(capacity, 0, numel // 3, numel // 3, numel)
        selection = selection_of(support, capacity=capacity, seed=seed)
        for name, form in formats_for(seed).items():
            with case(name, "support", seed):
                one, other = (encode(form, selection, budget, numel, 0, c) for c in (reference, native))
                assert torch.equal(one.payload, other.payload)
                assert same(one.sent.values, other.sent.values) and same(one.own, other.own)
                assert torch.equal(one.sent.indices, other.sent.indices) and one.sent.count == other.sent.count
                (got, _), (also, _) = (decode(form, [one.payload], budget, numel, c) for c in (reference, native))
                assert torch.equal(got[0].indices, also[0].indices) and same(got[0].values, also[0].values)


@pytest.mark.parametrize("form", SOME.values(), ids=SOME)
@pytest.mark.usefixtures("no_type_checks")
def test_codecs_agree_on_what_is_broken(form: Any) -> None:
    """On noise behind the header with a true checksum."""
    generator = torch.Generator().manual_seed(3)
    for trial in range(60):
        count = (1, 5, 130, 600)[trial % 4]
        budget = budget_of(count, 0, 20, 3000)
        payload = encode(form, selection_of(scattered(3000, count, trial)), budget, 3000).payload
        noise = torch.randint(0, 256, payload.shape, dtype=torch.uint8, generator=generator)
        some = torch.rand(payload.shape, generator=generator) < (1.0, 0.05, 0.003)[trial % 3]
        some[16:HEADER_BYTES] = False  # the terms: other ones are refused before anything is decoded
        payload[12:] = torch.where(some, noise, payload)[12:]
        seal_(payload)
        outcomes = []
        for codec in CODECS.values():
            try:
                (got,), _ = decode(form, [payload], budget, 3000, codec)
                outcomes.append((got.indices.tolist(), got.values.view(torch.int32).tolist()))
            except PayloadError as error:
                outcomes.append((str(error), None))
        assert outcomes[0] == outcomes[1]


@every_codec
@pytest.mark.parametrize("form", [FORMATS["sign rice"], FORMATS["int8 packed"]], ids=["rice", "packed"])
def test_any_parameter_and_count_is_safe(codec: Any, form: Any) -> None:
    """Section by section, so that no checksum stands before the decoders."""
    generator = torch.Generator().manual_seed(4)
    section = form.indices.plan(700, 5000)
    for _ in range(100):
        noise = torch.randint(0, 256, (section.nbytes,), dtype=torch.uint8, generator=generator)
        count = torch.randint(-3, 705, (), generator=generator).to(torch.int32)
        noise[:8] = torch.randint(0, 34, (8,), generator=generator).to(torch.uint8)
        indices, valid = codec.indices_decode(noise, count, section)
        used = indices[: max(0, int(count))].long()
        assert not valid or ((torch.diff(used) > 0).all() and (used >= 0).all() and (used < 5000).all())
        for extreme in (-(2**31), 2**31 - 1):
            assert not codec.indices_decode(noise, torch.tensor(extreme, dtype=torch.int32), section)[1]


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
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_there_is_decodes_as_pytorch_reads_it(codec: Any, dtype: Any) -> None:
    words = torch.arange(2**16).to(torch.int16)
    expected = words.view(dtype).float()
    one, count = torch.tensor(1.0), torch.tensor(2**16, dtype=torch.int32)
    got, valid = codec.cast_decode(words.view(torch.uint8), count, dtype, one)
    finite = expected.isfinite()
    assert same(got[finite], expected[finite]) and not got[~finite].isfinite().any() and not valid
    back = torch.zeros(2 * int(finite.sum()), dtype=torch.uint8)
    in_reach = expected[finite].clamp(-32767, 32767)
    values, scale = codec.cast_encode_(in_reach, dtype, back)
    assert scale == 1.0 and same(values, in_reach.to(dtype).float())


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_magnitudes_are_cut_to_the_limit_before_the_scale_is_chosen(codec: Any, dtype: Any) -> None:
    values = torch.tensor([1.0, -3e38, 5.0, 3.4e38, -0.25, 0.0])
    room, other = (torch.zeros(6 * dtype.itemsize, dtype=torch.uint8) for _ in range(2))
    decoded, scale = codec.cast_encode_(values, dtype, room, 4.0)
    expected = codec.cast_encode_(values.clamp(-4, 4), dtype, other)
    assert same(decoded, expected[0]) and torch.equal(scale, expected[1]) and torch.equal(room, other)
    assert decoded.tolist() == [1.0, -4.0, 4.0, 4.0, -0.25, 0.0]


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_not_finite_becomes_nan_and_spoils_nothing_else(codec: Any, dtype: Any) -> None:
    count, section = torch.tensor(4, dtype=torch.int32), torch.zeros(4 * dtype.itemsize, dtype=torch.uint8)
    good = torch.tensor([0, 1, 3])
    nonfinite = (0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1, 0x7F800000, -0x800000)
    for bits, limit in product(nonfinite, (math.inf, 3.0)):
        bad = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        values = torch.cat([torch.tensor([0.0, 3.7]), bad, torch.tensor([-5e-3])])
        expected, right = codec.cast_encode_(values[good], dtype, section[: 3 * dtype.itemsize], limit)
        decoded, scale = codec.cast_encode_(values, dtype, section, limit)
        again, valid = codec.cast_decode(section, count, dtype, scale)
        with case(hex(bits), limit):
            assert scale == right and not valid
            for got in (decoded, again):
                assert got[2].isnan() and same(got[good], expected)


@every_codec
def test_fp32_is_kept_bit_for_bit(codec: Any) -> None:
    values = torch.tensor([0.0, -0.0, 1e-45, -3.4e38, 0.1])
    section = torch.zeros(20, dtype=torch.uint8)
    decoded, scale = codec.cast_encode_(values, torch.float32, section)
    assert same(decoded, values) and same(section.view(torch.float32), values) and scale == 1.0


@every_codec
@pytest.mark.parametrize("kind", PLAIN)
def test_plain_indices_are_read_as_they_were_written(codec: Any, kind: Any) -> None:
    support, dtype = scattered(5000, 50), PLAIN[kind]
    code = IndexCode(kind, 60, 5000, 60 * dtype.itemsize)
    section = torch.zeros(code.nbytes, dtype=torch.uint8)
    codec.indices_encode_(selection_of(support, capacity=60), code, section)
    assert torch.equal(section.view(dtype)[:50], support.to(dtype)) and not section.view(dtype)[50:].any()
    indices, valid = codec.indices_decode(section, torch.tensor(50, dtype=torch.int32), code)
    assert valid and torch.equal(indices[:50], support.int())


@every_codec
def test_a_count_beyond_the_section_is_not_sound(codec: Any) -> None:
    section = torch.arange(4, dtype=torch.int32).view(torch.uint8)
    for count, expected in ((4, True), (5, False), (-1, False)):
        code = IndexCode(IndexKind.INT32, 4, 100, 16)
        _, valid = codec.indices_decode(section, torch.tensor(count, dtype=torch.int32), code)
        assert bool(valid) is expected


def rice_bits(support: Any, b: Any) -> Any:
    gaps = torch.diff(support, prepend=torch.tensor([-1])) - 1
    return support.numel() * (b + 1) + int((gaps >> b).sum())


@every_codec
def test_every_block_has_its_best_rice_parameter(codec: Any) -> None:
    numel = 10**6
    parts = (scattered(400_000, 900, 1), 400_000 + scattered(5000, 800, 2), 999_000 + scattered(500, 30, 3))
    support = torch.cat(parts)
    code = plan_rice(support.numel(), numel)
    section = torch.zeros(code.nbytes, dtype=torch.uint8)
    codec.indices_encode_(selection_of(support), code, section)
    size = BLOCKS[IndexKind.RICE]
    for k, block in enumerate(support.split(size)):
        before = support[k * size - 1] + 1 if k else 0
        lengths = [rice_bits(block - before, b) for b in range(31)]
        assert section[k] == lengths.index(min(lengths))


@every_codec
def test_leaving_out_what_rice_cannot_hold_is_enough(codec: Any) -> None:
    """The hardest supports there are: every gap one more than a multiple of 2**b*, and mixed ones."""
    for numel, capacity in ((10**5, 100), (10**5, 300), (10**6, 1000), (30_000, 6000)):
        code = plan_rice(capacity, numel)
        step = 2**code.parameter
        for extra in (0, 1, step // 2, step - 1):
            multiples = torch.arange(capacity + 1) * ((numel - capacity * (1 + extra)) // step) // capacity
            support = (step * torch.diff(multiples).clamp(min=0) + extra + 1).cumsum(0) - 1
            support = support[support < numel]
            section = torch.zeros(code.nbytes, dtype=torch.uint8)
            sent = codec.indices_encode_(selection_of(support, capacity=capacity), code, section)
            indices, valid = codec.indices_decode(section, sent.count, code)
            assert valid and torch.equal(indices, sent.indices) and int(sent.count) > 0.8 * support.numel()


@every_codec
def test_a_selection_that_fits_is_handed_on_as_it_is(codec: Any) -> None:
    selection = selection_of(scattered(5000, 50))
    for code in (plan_rice(50, 5000), plan_packed(50, 5000)):
        sent = codec.indices_encode_(selection, code, torch.zeros(code.nbytes, dtype=torch.uint8))
        assert torch.equal(sent.indices, selection.indices) and torch.equal(sent.values, selection.values)


class Waits(TorchDispatchMode):
    """Notes the operations that read from the device, or whose result's size depends on what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(function.name())
        return function(*args, **(kwargs or {}))

    @property
    def waiting(self) -> Any:
        words = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item", "is_nonzero", "equal")
        return {name for name in self.seen if name.split("::")[1].split(".")[0] in words}


@pytest.mark.parametrize("name", SOME)
def test_encoding_never_waits_and_decoding_does_once(name: Any) -> None:
    form, budget = FORMATS[name], budget_of(40, 0, 500, 5000)
    selection, first = selection_of(scattered(5000, 30), capacity=40), torch.tensor(5000)
    with Waits() as waits:
        done = PayloadPlan(form, budget, 5000).encode(CODECS["reference"], selection, first)
    assert len(waits.seen) > 5 and not waits.waiting
    with Waits() as waits:
        plan = form.indices.plan(40, 5000)
        header = CODECS["reference"].unseal(done.payload)
        section = done.payload[HEADER_BYTES : HEADER_BYTES + plan.nbytes]
        indices, _ = CODECS["reference"].indices_decode(section, header.count, plan)
        assert indices.numel() == 40
    assert not waits.waiting


def test_the_waiting_test_would_notice() -> None:
    with Waits() as waits:
        torch.ones(3).nonzero()
        torch.ones(()).item()
    assert len(waits.waiting) == 2


def test_sections_are_in_use() -> None:
    """The formats above really are coded, and not int32 for want of room."""
    kinds = [INDICES[name].plan(700, 5000).kind for name in ("packed", "rice", "chunks")]
    assert kinds == [IndexKind.PACKED, IndexKind.RICE, IndexKind.CHUNKS]
