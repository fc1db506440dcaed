"""What the step before sent, taken out by the pass: the bits of the reference, which does one after the other."""

from dataclasses import replace

import pytest
import torch
from kernels.tiers import NAMES, tier

from dgc.kernels import Budget, PassInputs, SparseVector
from dgc.kernels.library import supported_isas
from dgc.kernels.selection.reference import Reference

REFERENCE = Reference()
FORMS = ("plain", "nesterov", "residual")
# where blocks, units of threads and the buffer begin and end
EDGES = (0, 1, 15, 16, 255, 256, 257, 511, 512, 8191, 8192, 32767, 32768, 32769, 65535, 65536)


@pytest.fixture(params=[*NAMES, *(f"native-{isa}-3" for isa in supported_isas())])
def kernels(request):
    with tier(request.param) as chosen:
        yield chosen


def random(n, seed):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def sent_of(n, indices):
    """As a payload of fp16 leaves it. What lies behind the last one has no meaning, and shows if it is used."""
    tail = torch.zeros(3, dtype=torch.int64)
    entries = torch.tensor(sorted(set(indices)), dtype=torch.int64)
    values = torch.cat([random(n, 5)[entries].half().float(), tail + 7.0])
    count = torch.tensor(entries.numel(), dtype=torch.int32)
    return SparseVector(torch.cat([entries, tail]).int(), values, count)


def some(n, share):
    return torch.randperm(n, generator=torch.Generator().manual_seed(n))[: int(n * share)].tolist()


def passes(n, form, masking, sent, pieces=None, offset=0):
    """The same pass over equal states; `offset`: v does not begin where cache lines do."""
    g = random(n, 1)
    states = [
        (
            None if form == "residual" else random(n + offset, 2)[offset:],
            random(n + offset, 3)[offset:],
        )
        for _ in range(2)
    ]
    return [
        PassInputs(g.split(pieces) if pieces else (g,), u, v, 0.9, form == "nesterov", sent, masking)
        for u, v in states
    ]


def same(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def eagerly(inputs):
    """Take out what was sent, then do a pass that knows of nothing sent."""
    REFERENCE.take_(inputs.sent, inputs.u if inputs.masking else None, inputs.v)
    return replace(inputs, sent=None)


def assert_same_state(ours, theirs):
    assert same(ours.v, theirs.v)
    assert ours.u is None or same(ours.u, theirs.u)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("n", [1, 16, 17, 300, 1000, 70_001])
def test_accumulate(kernels, form, masking, n):
    edges = [i for i in EDGES if i < n]
    for indices in ([], [0], [n - 1], [0, n - 1], edges, some(n, 0.01), some(n, 0.3), range(n)):
        ours, theirs = passes(n, form, masking, sent_of(n, indices))
        assert int(kernels.accumulate_(ours)) == int(REFERENCE.accumulate_(eagerly(theirs))) == n
        assert_same_state(ours, theirs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("offset", [0, 1, 7])
def test_pieces_and_addresses_of_any_kind(kernels, form, offset):
    sizes = [1, 2, 0, 3, 30, 0, 0, 200_000, 7, 33_000, 1, 0]
    n = sum(sizes)
    starts = torch.tensor(sizes).cumsum(0).tolist()
    indices = {i for start in starts for i in (start - 1, start) if i < n} | set(some(n, 0.01)) | {0}
    ours, theirs = passes(n, form, True, sent_of(n, indices), sizes, offset)
    assert int(kernels.accumulate_(ours)) == int(REFERENCE.accumulate_(eagerly(theirs))) == n
    assert_same_state(ours, theirs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("lower_bound", [None, 0.0, 0.98, 1.001, 1e-30, float("inf")])
def test_accumulate_and_select(kernels, form, masking, lower_bound):
    """Lower bounds that fit, and such that a second pass over v is needed, which may take nothing out again."""
    bounds, ks = [0, 40_003, 40_003, 40_100, 190_000, 190_010], [400, 0, 3, 200, 0]
    n, budget = bounds[-1], Budget(torch.tensor(bounds), torch.tensor(ks), sum(ks))
    edges = {i for b in bounds for i in (b - 1, b) if 0 <= i < n}
    for indices in (edges, edges | set(some(n, 0.01)), set(some(n, 0.2))):
        ours, theirs = passes(n, form, masking, sent_of(n, indices))
        expected = REFERENCE.accumulate_and_select_(eagerly(theirs), budget, None)
        lower_bounds = None if lower_bound is None else expected.thresholds * lower_bound
        chosen = kernels.accumulate_and_select_(ours, budget, lower_bounds)
        assert torch.equal(chosen.elements.indices, expected.elements.indices)
        assert same(chosen.elements.values, expected.elements.values)
        assert same(chosen.thresholds, expected.thresholds)
        assert_same_state(ours, theirs)
        if lower_bound == 1.001 and kernels.name != "reference":
            assert int(chosen.missed) > 0


def test_nonfinite_gradients_where_something_was_sent(kernels):
    ours, theirs = passes(1000, "plain", True, sent_of(1000, [3, 500]))
    ours.g[0][[3, 500]] = float("nan")
    assert int(kernels.accumulate_(ours)) == int(REFERENCE.accumulate_(eagerly(theirs))) == 3
    assert_same_state(ours, theirs)
    assert ours.u[3] == 0 and ours.v.isfinite().all()


def test_taking_alone(kernels):
    for n, indices in ((1, [0]), (5000, some(5000, 0.01)), (300_000, some(300_000, 0.2)), (9, [])):
        for masking in (True, False):
            sent = sent_of(n, indices)
            (ours, theirs), count = passes(n, "plain", masking, sent), int(sent.count)
            kernels.take_(sent, ours.u if masking else None, ours.v)
            eagerly(theirs)
            assert_same_state(ours, theirs)
            where = sent.indices[:count].long()
            assert same(ours.v[where], random(n, 3)[where] - sent.values[:count])
            assert not masking or not ours.u[where].any()
