"""Payloads that were changed on their way, or encoded with other settings: an error that names the rank."""

from itertools import permutations, product
from typing import Any

import pytest
import torch
from kernels.backends import CODECS
from sparse.payloads import (
    CODEC,
    FORMATS,
    SOME,
    budget_of,
    decode,
    encode,
    noise_in,
    scattered,
    seal_,
    selection_of,
)

from dgc.comm.lockstep import LockstepError, LockstepWorld
from dgc.compression import DGCCompressor
from dgc.core.envelope import Envelope
from dgc.kernels.payload import Terms
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD, DistributedOptimizer
from dgc.sparse.payloads import PayloadError
from dgc.sparse.payloads.payload import PayloadPlan

NUMEL = 5000
every_format = pytest.mark.parametrize("form", SOME.values(), ids=SOME)


def payload_of(form: Any, count: int = 5, capacity: int = 6, **options: Any) -> Any:
    budget = budget_of(capacity, 0, 100, NUMEL)
    selection = selection_of(scattered(NUMEL, count), capacity=capacity)
    return encode(form, selection, budget, NUMEL, **options).payload, budget


def flipped(payload: Any) -> Any:
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


def sealed_codes() -> tuple[Envelope, Any]:
    envelope = Envelope("codes", torch.tensor([0, 40]), Terms(1 / 32, 7))
    return envelope, envelope.seal(torch.arange(5, dtype=torch.uint8), torch.tensor(40))


def test_every_flipped_bit_of_sealed_codes_is_noticed() -> None:
    envelope, payload = sealed_codes()
    for other in flipped(payload):
        with pytest.raises(PayloadError, match="rank 1 "):
            envelope.open([payload, other], 5).wait()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("change", [-40, -24, -8, -1, 8])
def test_another_size_of_sealed_codes_is_noticed(change: int, rank: int) -> None:
    envelope, payload = sealed_codes()
    other = resized(payload, change)
    payloads = [other, payload] if rank == 0 else [payload, other]
    with pytest.raises(PayloadError, match=f"^rank {rank} sent {len(other)} bytes of codes instead of"):
        envelope.open(payloads, 5).wait()


def sealed_on(terms: Terms) -> Envelope:
    return Envelope("bucket b", torch.tensor([0, 10]), terms)


def sealed(nbytes: int, terms: Terms) -> Any:
    return sealed_on(terms).seal(torch.ones(nbytes, dtype=torch.uint8), torch.tensor(10))


@pytest.mark.parametrize("nbytes", [16, 48], ids=["of one size", "of another size"])
def test_codes_that_are_sealed_at_another_ratio_are_noticed(nbytes: int) -> None:
    one, two = Terms(2 / 32, 7), Terms(1 / 32, 7)
    gathered = as_horovod_gathers([sealed(16, one), sealed(nbytes, two)])
    with pytest.raises(PayloadError, match="rank 1 encoded bucket b at compress_ratio 0.03125"):
        sealed_on(one).open(gathered, 16).wait()


def test_codes_that_are_sealed_in_another_format_are_noticed() -> None:
    with pytest.raises(PayloadError, match="rank 0 encoded bucket b in another format"):
        sealed_on(Terms(2 / 32, 8)).open([sealed(16, Terms(2 / 32, 7))], 16).wait()


@every_format
@pytest.mark.parametrize("change", [-16, -8, -1, 8])
def test_a_payload_of_another_size_is_refused(form: Any, change: int) -> None:
    payload, budget = payload_of(form)
    refuse(form, resized(payload, change), budget, "bytes")


@every_format
def test_words_in_another_order_are_refused(form: Any) -> None:
    payload, budget = payload_of(form)
    refuse(form, payload.view(torch.int64).flip(0).view(torch.uint8), budget, "checksum")


@every_format
def test_zeros_are_refused(form: Any) -> None:
    payload, budget = payload_of(form)
    refuse(form, torch.zeros_like(payload), budget, "checksum")


@every_format
@pytest.mark.parametrize("count", [-1, 7, 2**31 - 1, -(2**31)])
def test_a_count_of_elements_that_no_sender_writes_is_refused(form: Any, count: int) -> None:
    refuse_changed(form, 0, torch.tensor(count, dtype=torch.int32), "elements")


@every_format
@pytest.mark.parametrize("tensor", [-1, 3])
def test_a_number_of_a_tensor_that_no_sender_writes_is_refused(form: Any, tensor: int) -> None:
    refuse_changed(form, 4, torch.tensor(tensor, dtype=torch.int32), "tensor")


@pytest.mark.parametrize(("name", "dtype"), [("fp32 int32", torch.int32), ("sign int64", torch.int64)])
@pytest.mark.parametrize(("slot", "index"), [(0, -1), (0, NUMEL - 1), (4, NUMEL), (4, 0), (2, 2**31 - 1)])
def test_an_index_out_of_range_or_order_is_refused(name: str, dtype: Any, slot: int, index: int) -> None:
    refuse_changed(FORMATS[name], 24 + slot * dtype.itemsize, torch.tensor(index, dtype=dtype), "ascend")


@pytest.mark.parametrize(
    ("name", "number", "dtype"),
    [
        *((name, n, torch.uint8) for name in ("packed", "rice") for n in (13, 31, 32, 64, 255)),
        *(("chunks", n, torch.int16) for n in (-1, 0, 4096, 4097, -(2**15), 2**15 - 1)),
    ],
)
def test_a_parameter_of_codes_that_no_sender_writes_is_refused(name: str, number: int, dtype: Any) -> None:
    refuse_changed(FORMATS[f"fp32 {name}"], 24, torch.tensor(number, dtype=dtype), "ascend", 200, 200)


@pytest.mark.parametrize("name", ["fp32 int32", "fp16 rice", "int8 packed", "sign rice"])
def test_values_that_are_not_finite_are_refused(name: str) -> None:
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


def sent(form: Any, ratio: Any) -> Any:
    """(payload, budget) of a rank."""
    count = round(ratio * NUMEL)
    return payload_of(form, count, count, ratio=ratio)


def as_horovod_gathers(payloads: Any) -> Any:
    """It tells the whole alone: each rank cuts it into equal parts."""
    return torch.cat(payloads).chunk(len(payloads))


def told(form: Any, ratio: Any, budget: Any, payloads: Any) -> Any:
    with pytest.raises(PayloadError) as caught:
        PayloadPlan(form, budget, NUMEL, ratio, "bucket b").decode(CODEC, as_horovod_gathers(payloads)).wait()
    return str(caught.value)


@every_format
@pytest.mark.parametrize(
    "ratios", [[0.1, 0.2], [0.2, 0.1], [0.1, 0.1, 0.2], [0.1, 0.2, 0.1], [0.2, 0.1, 0.1, 0.1]], ids=str
)
def test_a_rank_at_another_ratio_is_named_whatever_the_sizes(form: Any, ratios: list[float]) -> None:
    made = [sent(form, ratio) for ratio in ratios]
    for own, (_, budget) in zip(ratios, made, strict=True):
        other = next(rank for rank, ratio in enumerate(ratios) if ratio != own)
        theirs = f"rank {other} encoded bucket b at compress_ratio {ratios[other]}"
        words = told(form, own, budget, [payload for payload, _ in made])
        assert words.startswith(f"{theirs}, this rank at {own}: call begin_epoch")


def test_two_ratios_that_send_the_same_number_of_elements_are_told_apart() -> None:
    form, (payload, budget) = SOME["fp32 int64"], sent(SOME["fp32 int64"], 0.1)
    words = told(form, 0.1001, budget, [payload, payload])
    assert words.startswith("rank 0 encoded bucket b at compress_ratio 0.1, this rank at 0.1001: call")
    PayloadPlan(form, budget, NUMEL, 0.1).decode(CODEC, [payload, payload]).wait()


def test_a_payload_without_a_ratio_is_of_ratio_1() -> None:
    form, (payload, budget) = SOME["sign rice"], sent(SOME["sign rice"], 0.1)
    plain = encode(form, selection_of(scattered(NUMEL, budget.capacity)), budget, NUMEL).payload
    PayloadPlan(form, budget, NUMEL).decode(CODEC, [plain]).wait()
    with pytest.raises(PayloadError, match="this rank at 1: call begin_epoch"):
        PayloadPlan(form, budget, NUMEL).decode(CODEC, [payload]).wait()


@pytest.mark.parametrize(("one", "two"), permutations(("fp16 int32", "bf16 int32", "fp32 int64"), 2))
def test_a_rank_in_another_format_is_named_whatever_the_sizes(one: str, two: str) -> None:
    """fp16 and bf16 are of one size."""
    (mine, budget), (payload, _) = sent(FORMATS[one], 0.1), sent(FORMATS[two], 0.1)
    words = told(FORMATS[one], 0.1, budget, [mine, payload])
    assert words.startswith("rank 1 encoded bucket b in another format than this rank")


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        pytest.param((0.25, 0.125), "AllGather", id="two sizes"),
        pytest.param(
            *((1.0, 0.125), "'world' rank 1 sent {0: [^}]*}, rank 0 sent {0: .*, 1: "), id="dense beside sparse"
        ),
    ],
)
def test_a_simulated_rank_at_another_ratio_is_refused_whatever_is_sent(ratios: Any, words: str) -> None:
    """The lockstep transport refuses payloads of two sizes, or a dense step beside a sparse one."""

    def body(transport: Any) -> None:
        model = torch.nn.Linear(1000, 1, bias=False)
        dgc = DGCCompressor(ratios[1], DGCSGDMemory(0.9), warmup_epochs=2, warmup_coeff=ratios)
        inner = DGCSGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), dgc, transport=transport)
        optimizer.begin_epoch(transport.rank)
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()

    with pytest.raises(LockstepError, match=rf"{words}.*; give every rank .* call begin_epoch\(epoch\)"):
        LockstepWorld(2).run(body)
