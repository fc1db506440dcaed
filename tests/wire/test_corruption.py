"""Payloads that were changed on their way: an error that names the rank, never a wrong gradient."""

from itertools import product
from typing import Any

import pytest
import torch
from wire.payloads import FORMATS, SOME, budget_of, decode, encode, noise_in, scattered, seal_, selection_of

from dgc.kernels.codec import Terms
from dgc.wire import PayloadError
from dgc.wire.envelope import Envelope

NUMEL = 5000
every_format = pytest.mark.parametrize("form", SOME.values(), ids=SOME)


def payload_of(form: Any, count: int = 5, capacity: int = 6, numel: Any = NUMEL) -> Any:
    budget = budget_of(capacity, 0, 100, numel)
    return encode(form, selection_of(scattered(numel, count), capacity=capacity), budget, numel).payload, budget


def flipped(payload: Any) -> Any:
    """The payload with each of its bits flipped."""
    for byte, bit in product(range(payload.numel()), range(8)):
        other = payload.clone()
        other[byte] ^= 1 << bit
        yield other


def resized(payload: Any, change: int) -> Any:
    return payload[:change] if change < 0 else torch.cat([payload, payload[:change]])


def refuse(form: Any, payload: Any, budget: Any, match: Any) -> None:
    good = encode(form, selection_of(scattered(NUMEL, 5), capacity=budget.capacity), budget, NUMEL).payload
    with pytest.raises(PayloadError, match=f"rank 2 .*{match}"):
        decode(form, [good, good, payload], budget, NUMEL)


def refuse_changed(form: Any, start: int, value: Any, match: str, count: int = 5, capacity: int = 6) -> None:
    """With a number in the place of another, and a true checksum."""
    payload, budget = payload_of(form, count, capacity)
    payload[start : start + value.dtype.itemsize].view(value.dtype)[0] = value
    seal_(payload)
    refuse(form, payload, budget, match)


@every_format
@pytest.mark.usefixtures("no_type_checks")
def test_every_flipped_bit_is_noticed(form: Any) -> None:
    payload, budget = payload_of(form)
    for other in flipped(payload):
        with pytest.raises(PayloadError, match="rank 0 "):
            decode(form, [other], budget, NUMEL)


def test_every_flipped_bit_and_another_size_of_sealed_codes_is_noticed() -> None:
    envelope = Envelope("codes", torch.tensor([0, 40]), Terms(1 / 32, 7))
    payload = envelope.seal(torch.arange(5, dtype=torch.uint8), torch.tensor(40))
    for other in flipped(payload):
        with pytest.raises(PayloadError, match="rank 1 "):
            envelope.open([payload, other], 5).wait()
    for change in (-40, -24, -8, -1, 8):
        other = resized(payload, change)
        for rank, payloads in enumerate(([other, payload], [payload, other])):
            with pytest.raises(PayloadError, match=f"^rank {rank} sent {len(other)} bytes of codes instead of"):
                envelope.open(payloads, 5).wait()


@every_format
def test_wrong_sizes_swapped_words_and_lost_payloads(form: Any) -> None:
    payload, budget = payload_of(form)
    for change in (-16, -8, -1, 8):
        refuse(form, resized(payload, change), budget, "bytes")
    swapped = payload.view(torch.int64).flip(0).view(torch.uint8)
    refuse(form, swapped, budget, "checksum")
    refuse(form, torch.zeros_like(payload), budget, "checksum")


@every_format
def test_counts_and_tensors_that_no_sender_writes(form: Any) -> None:
    for count in (-1, 7, 2**31 - 1, -(2**31)):
        refuse_changed(form, 0, torch.tensor(count, dtype=torch.int32), "elements")
    for number in (-1, 3):
        refuse_changed(form, 4, torch.tensor(number, dtype=torch.int32), "tensor")


@pytest.mark.parametrize(("slot", "index"), [(0, -1), (0, NUMEL - 1), (4, NUMEL), (4, 0), (2, 2**31 - 1)])
def test_plain_indices_out_of_range_or_order(slot: Any, index: Any) -> None:
    for name, dtype in (("fp32 int32", torch.int32), ("sign int64", torch.int64)):
        refuse_changed(FORMATS[name], 24 + slot * dtype.itemsize, torch.tensor(index, dtype=dtype), "ascend")


@pytest.mark.parametrize("name", ["fp32 packed", "fp32 rice"])
def test_parameters_that_no_sender_writes(name: Any) -> None:
    for parameter in (13, 31, 32, 64, 255):
        refuse_changed(FORMATS[name], 24, torch.tensor(parameter, dtype=torch.uint8), "ascend", 200, 200)


def test_numbers_of_a_chunk_that_no_sender_writes() -> None:
    for number in (-1, 0, 4096, 4097, -(2**15), 2**15 - 1):
        refuse_changed(FORMATS["fp32 chunks"], 24, torch.tensor(number, dtype=torch.int16), "ascend", 200, 200)


@pytest.mark.parametrize("name", ["fp32 int32", "fp16 rice", "int8 packed", "sign rice"])
def test_values_that_are_not_finite(name: Any) -> None:
    form = FORMATS[name]
    payload, budget = payload_of(form)
    start = 24 + form.indices.plan(6, NUMEL).nbytes
    other = payload.clone()
    other[start : start + 8] = 0xFF
    other[12:16] = torch.tensor([0, 0, 0x80, 0x7F], dtype=torch.uint8)
    seal_(other)
    refuse(form, other, budget, "finite")


@every_format
@pytest.mark.usefixtures("no_type_checks")
def test_any_bytes_at_all_give_an_error_or_a_sound_selection(form: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    sound = 0
    for trial in range(150):
        count = (0, 1, 6, 150, 700)[trial % 5]
        payload, budget = payload_of(form, count, count)
        payload = noise_in(payload, generator, (1.0, 0.3, 0.01)[trial % 3])
        payload[:4].view(torch.int32)[0] = int(torch.randint(0, count + 2, (), generator=generator))
        payload[4:8] = 0
        seal_(payload)
        try:
            (got,), numbers = decode(form, [payload], budget, NUMEL)
        except PayloadError:
            continue
        sound += 1
        used = got.indices[: int(got.count)]
        assert used.numel() <= count and numbers == [0]
        assert (torch.diff(used) > 0).all() and (used >= 0).all() and (used < NUMEL).all()
        assert got.values.isfinite().all() and not got.values[int(got.count) :].any()
    assert sound, "or this test sees no payload that passes"
