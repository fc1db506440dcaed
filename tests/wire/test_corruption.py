"""Payloads that were changed on their way: an error that names the rank, never a wrong gradient."""

from itertools import product
from typing import Any

import pytest
import torch
from kernels.backends import CODECS
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
def test_sizes_words_counts_and_tensors_that_no_sender_writes(form: Any) -> None:
    payload, budget = payload_of(form)
    for change in (-16, -8, -1, 8):
        refuse(form, resized(payload, change), budget, "bytes")
    for other in (payload.view(torch.int64).flip(0).view(torch.uint8), torch.zeros_like(payload)):
        refuse(form, other, budget, "checksum")
    for start, number, match in (
        *((0, count, "elements") for count in (-1, 7, 2**31 - 1, -(2**31))),
        *((4, tensor, "tensor") for tensor in (-1, 3)),
    ):
        refuse_changed(form, start, torch.tensor(number, dtype=torch.int32), match)


def test_indices_and_parameters_that_no_sender_writes() -> None:
    for slot, index in ((0, -1), (0, NUMEL - 1), (4, NUMEL), (4, 0), (2, 2**31 - 1)):  # out of range or order
        for name, dtype in (("fp32 int32", torch.int32), ("sign int64", torch.int64)):
            refuse_changed(FORMATS[name], 24 + slot * dtype.itemsize, torch.tensor(index, dtype=dtype), "ascend")
    parameters = [(name, n, torch.uint8) for name in ("packed", "rice") for n in (13, 31, 32, 64, 255)]
    chunks = [("chunks", n, torch.int16) for n in (-1, 0, 4096, 4097, -(2**15), 2**15 - 1)]
    for name, number, dtype in [*parameters, *chunks]:
        refuse_changed(FORMATS[f"fp32 {name}"], 24, torch.tensor(number, dtype=dtype), "ascend", 200, 200)


def test_values_that_are_not_finite() -> None:
    for name in ("fp32 int32", "fp16 rice", "int8 packed", "sign rice"):
        form = FORMATS[name]
        (payload, budget), start = payload_of(form), 24 + form.indices.plan(6, NUMEL).nbytes
        payload[start : start + 8] = 0xFF
        payload[12:16] = torch.tensor([0, 0, 0x80, 0x7F], dtype=torch.uint8)
        seal_(payload)
        refuse(form, payload, budget, "finite")


@every_format
@pytest.mark.usefixtures("no_type_checks")
def test_any_bytes_at_all_give_an_error_or_a_sound_selection(form: Any) -> None:
    """The same from every codec."""
    generator, sound = torch.Generator().manual_seed(0), 0
    for trial in range(150):
        count = (0, 1, 6, 150, 700)[trial % 5]
        payload, budget = payload_of(form, count, count)
        payload = noise_in(payload, generator, (1.0, 0.05, 0.003)[trial % 3], first=12 * (trial % 2))
        if trial % 2 == 0:
            payload[:4].view(torch.int32)[0] = int(torch.randint(0, count + 2, (), generator=generator))
            payload[4:8] = 0
        seal_(payload)
        outcomes = []
        for codec in CODECS.values():
            try:
                (got,), numbers = decode(form, [payload], budget, NUMEL, codec)
            except PayloadError as error:
                outcomes.append((str(error), None))
                continue
            outcomes.append((got.indices.tolist(), got.values.view(torch.int32).tolist()))
            used = got.indices[: int(got.count)]
            assert used.numel() <= count and numbers == [0]
            assert (torch.diff(used) > 0).all() and (used >= 0).all() and (used < NUMEL).all()
            assert got.values.isfinite().all() and not got.values[int(got.count) :].any()
            sound += 1
        assert outcomes[0] == outcomes[1]
    assert sound, "or this test sees no payload that passes"
