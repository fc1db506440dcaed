"""Round trips of payloads, their planned sizes, and what a corrupt one gives."""

import pytest
import torch

from dgc.wire import CastValues, PayloadError, PlainIndices, SparseFormat

FORMATS = {
    "fp32 int64": SparseFormat(),
    "fp32 int32": SparseFormat(indices=PlainIndices(torch.int32)),
    "fp16 int64": SparseFormat(CastValues(torch.float16)),
    "fp16 int32": SparseFormat(CastValues(torch.float16), PlainIndices(torch.int32)),
    "bf16 int32": SparseFormat(CastValues(torch.bfloat16), PlainIndices(torch.int32)),
}
PAIR_BYTES = {"fp32 int64": 12, "fp32 int32": 8, "fp16 int64": 10, "fp16 int32": 6, "bf16 int32": 6}
NUMEL = 5000

every_format = pytest.mark.parametrize("name", FORMATS)


def selection(count, form, seed=0):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(NUMEL, generator=generator)[:count].sort().values
    return indices, form.values.quantize(torch.randn(count, generator=generator))


@every_format
@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 7, 64, 101, 1000])
def test_planned_size(name, capacity):
    form = FORMATS[name]
    exact = 16 + capacity * PAIR_BYTES[name]
    assert exact <= form.nbytes(capacity) < exact + 8
    assert form.nbytes(capacity) % 8 == 0


@every_format
@pytest.mark.parametrize(
    ("count", "capacity"),
    [(0, 0), (0, 1), (1, 1), (0, 5), (3, 5), (5, 5), (64, 64), (63, 101), (1000, 1001)],
)
def test_round_trip(name, count, capacity):
    form = FORMATS[name]
    indices, values = selection(count, form)
    payload = form.encode(indices, values, capacity)
    assert payload.dtype == torch.uint8 and payload.shape == (form.nbytes(capacity),)
    got_indices, got_values = form.decode(payload, capacity, NUMEL, sender=0)
    assert got_indices.dtype == torch.int64 and torch.equal(got_indices, indices)
    assert got_values.dtype == torch.float32 and torch.equal(got_values, values.float())


@every_format
@pytest.mark.parametrize("capacity", [1, 3, 8, 13])
def test_payloads_that_lie_behind_one_another_decode(name, capacity):
    """As an all-gather returns them: slices of one buffer."""
    form = FORMATS[name]
    sent = [selection(capacity - 1, form, seed) for seed in range(3)]
    gathered = torch.cat([form.encode(*s, capacity) for s in sent]).chunk(3)
    for rank, (payload, (indices, values)) in enumerate(zip(gathered, sent, strict=True)):
        got = form.decode(payload, capacity, NUMEL, rank)
        assert torch.equal(got[0], indices) and torch.equal(got[1], values.float())


@every_format
def test_unused_bytes_are_zero(name):
    form = FORMATS[name]
    a = form.encode(*selection(3, form), 9)
    assert a[8:16].tolist() == [0] * 8
    start = 16 + 3 * form.indices.itemsize
    assert not a[start : 16 + 9 * form.indices.itemsize].any()
    assert not a[16 + 9 * form.indices.itemsize + 3 * form.values.itemsize :].any()


def test_bytes_by_hand():
    form = FORMATS["fp32 int32"]
    payload = form.encode(torch.tensor([2, 258]), torch.tensor([1.0, -2.0]), 3)
    header = [2] + [0] * 15
    indices = [2, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]
    values = [0, 0, 0x80, 0x3F, 0, 0, 0, 0xC0, 0, 0, 0, 0]
    assert payload.tolist() == header + indices + values


@pytest.mark.parametrize("number", [0, 1, 300])
@every_format
def test_the_nonfinite_flag_travels_beside_the_count(name, number):
    form = FORMATS[name]
    indices, values = selection(4, form)
    payload = form.encode(indices, values, 4, number)
    assert form.nonfinite(payload) == number
    assert torch.equal(form.decode(payload, 4, NUMEL, 0)[0], indices)


# --- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_beyond_the_range_are_cut_and_not_infinite(dtype):
    limit = torch.finfo(dtype).max
    largest = torch.finfo(torch.float32).max
    wide = torch.tensor([largest, -largest, 0.5, 0.0])
    assert CastValues(dtype).quantize(wide).float().tolist() == [limit, -limit, 0.5, 0.0]


def test_just_below_half_a_step_beyond_the_fp16_range():
    cut = CastValues(torch.float16).quantize(torch.tensor([65519.0, 65520.0, 1e30, -1e30]))
    assert cut.tolist() == [65504.0, 65504.0, 65504.0, -65504.0]


def test_fp32_values_keep_their_bits():
    values = torch.tensor([1e-42, -3.4e38, 0.1])
    assert torch.equal(CastValues().quantize(values), values)


@pytest.mark.parametrize("wire", [torch.float32, torch.float16, torch.bfloat16])
def test_values_fit_the_gradients_precision(wire):
    """A mean that is to be written into fp16 gradients must not be inf there, whatever the wire holds."""
    cut = CastValues(wire).quantize(torch.tensor([1e6, -1e6, 2.0]), result=torch.float16)
    assert cut.dtype == wire and cut.to(torch.float16).isfinite().all() and cut[2] == 2.0


def test_indices_that_do_not_fit_are_refused():
    PlainIndices(torch.int32).check(2**31)
    with pytest.raises(ValueError, match="int32_indices=False"):
        PlainIndices(torch.int32).check(2**31 + 1)
    PlainIndices().check(2**40)


# --- corruption ------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("count", [-1, 6, 2**31 - 1])
def test_corrupt_count(name, count):
    form = FORMATS[name]
    payload = form.encode(*selection(5, form), 5)
    payload[:4].view(torch.int32)[0] = count
    with pytest.raises(PayloadError, match="rank 3 "):
        form.decode(payload, 5, NUMEL, sender=3)


@every_format
@pytest.mark.parametrize("index", [-1, NUMEL, 2**31 - 1])
@pytest.mark.parametrize("slot", [0, 4])
def test_corrupt_index(name, index, slot):
    form = FORMATS[name]
    payload = form.encode(*selection(5, form), 5)
    payload[16 : 16 + 5 * form.indices.itemsize].view(form.indices.dtype)[slot] = index
    with pytest.raises(PayloadError, match="rank 2 "):
        form.decode(payload, 5, NUMEL, sender=2)


@every_format
@pytest.mark.parametrize("change", [-16, -8, -1, 8])
def test_wrong_length(name, change):
    form = FORMATS[name]
    payload = form.encode(*selection(5, form), 5)
    other = payload[:change] if change < 0 else torch.cat([payload, payload[:change]])
    with pytest.raises(PayloadError, match="rank 1 "):
        form.decode(other, 5, NUMEL, sender=1)
