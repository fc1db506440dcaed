"""What the step before sent, taken out by the pass: the bits of the reference, which does one after the other."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch
from cases import case
from kernels.backends import NAMES, backend
from torch import Tensor

from dgc.kernels import Budget, PassInputs, SparseVector, TopKResult
from dgc.kernels.selection import SelectionKernels

REFERENCE = SelectionKernels()
FORMS = ("plain", "nesterov", "residual")
# where blocks, units of threads and the buffer begin and end
EDGES = (0, 1, 15, 16, 255, 256, 257, 511, 512, 8191, 8192, 32767, 32768, 32769, 65535, 65536)


@pytest.fixture(params=NAMES, scope="module")
def kernels(request: pytest.FixtureRequest) -> Iterator[SelectionKernels]:
    with backend(request.param) as chosen:
        yield chosen


def random(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def sent_of(n: int, indices: Iterable[int]) -> SparseVector:
    """As a payload of fp16 leaves it. What lies behind the last one has no meaning, and shows if it is used."""
    tail = torch.zeros(3, dtype=torch.int64)
    entries = torch.tensor(sorted(set(indices)), dtype=torch.int64)
    values = torch.cat([random(n, 5)[entries].half().float(), tail + 7.0])
    count = torch.tensor(entries.numel(), dtype=torch.int32)
    return SparseVector(torch.cat([entries, tail]).int(), values, count)


def some(n: int, share: float) -> set[int]:
    return set(torch.randperm(n, generator=torch.Generator().manual_seed(n))[: int(n * share)].tolist())


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def at(tensor: Tensor, offset: int) -> Tensor:
    """A copy that begins `offset` elements after where cache lines do."""
    return torch.cat([tensor.new_zeros(offset), tensor])[offset:]


@dataclass(frozen=True)
class Pass:
    """What a pass starts from, and what the reference makes of it: it takes out what was sent, then does a pass
    that knows of nothing sent. The same for every backend.
    """

    start: PassInputs
    left: PassInputs
    first: int
    chosen: TopKResult | None

    def inputs(self, pieces: list[int] | None = None, offset: int = 0) -> PassInputs:
        u, (g,) = self.start.u, self.start.g
        return replace(
            self.start,
            g=g.split(pieces) if pieces else (g,),
            u=None if u is None else at(u, offset),
            v=at(self.start.v, offset),
        )

    def check(self, inputs: PassInputs) -> None:
        """What is left in the state."""
        assert same(inputs.v, self.left.v)
        if self.left.u is not None:
            assert inputs.u is not None and same(inputs.u, self.left.u)


def reference_pass(
    n: int, form: str, masking: bool, sent: SparseVector, budget: Budget | None = None, nan: tuple[int, ...] = ()
) -> Pass:
    g, u = random(n, 1), None if form == "residual" else random(n, 2)
    g[list(nan)] = float("nan")
    start = PassInputs((g,), u, random(n, 3), 0.9, form == "nesterov", sent, masking)
    left = replace(start, u=None if u is None else u.clone(), v=start.v.clone())
    REFERENCE.remove_sent_(sent, left.u if masking else None, left.v)
    left = replace(left, sent=None)
    if budget is None:
        return Pass(start, left, int(REFERENCE.accumulate_(left)), None)
    chosen = REFERENCE.accumulate_and_select_(left, budget, None)
    return Pass(start, left, int(chosen.first_nonfinite), chosen)


@cache
def accumulations(n: int) -> list[tuple[str, Pass]]:
    """Of every form, with and without masking, whatever was sent."""
    edges = [i for i in EDGES if i < n]
    chosen = {"nothing": [], "ends": {0, n - 1}, "edges": edges, "few": some(n, 0.01), "all": range(n)}
    return [
        (f"{form}, masking {masking}, {what} of {n}", reference_pass(n, form, masking, sent_of(n, indices)))
        for form, masking, (what, indices) in product(FORMS, (True, False), chosen.items())
    ]


def test_accumulate(kernels: SelectionKernels) -> None:
    for n in (1, 16, 17, 300, 70_001):
        for name, expected in accumulations(n):
            with case(name):
                ours = expected.inputs()
                assert int(kernels.accumulate_(ours)) == expected.first == n
                expected.check(ours)


PIECES = [1, 2, 0, 3, 30, 0, 0, 70_000, 7, 33_000, 1, 0]


@cache
def in_pieces(form: str) -> Pass:
    n = sum(PIECES)
    starts = torch.tensor(PIECES).cumsum(0).tolist()
    indices = {i for start in starts for i in (start - 1, start) if i < n} | some(n, 0.01) | {0}
    return reference_pass(n, form, True, sent_of(n, indices))


def test_pieces_and_addresses_of_any_kind(kernels: SelectionKernels) -> None:
    for form, offset in product(FORMS, (0, 1, 7)):
        with case(form, offset):
            expected = in_pieces(form)
            ours = expected.inputs(PIECES, offset)
            assert int(kernels.accumulate_(ours)) == expected.first == sum(PIECES)
            expected.check(ours)


BOUNDS, KS = [0, 40_003, 40_003, 40_100, 110_000, 110_010], [400, 0, 3, 200, 0]
BUDGET = Budget(torch.tensor(BOUNDS), torch.tensor(KS), sum(KS))


@cache
def selections() -> list[tuple[str, Pass]]:
    n = BOUNDS[-1]
    edges = {i for b in BOUNDS for i in (b - 1, b) if 0 <= i < n}
    chosen = {"edges": edges | some(n, 0.01), "many": some(n, 0.2)}
    return [
        (f"{form}, masking {masking}, {what}", reference_pass(n, form, masking, sent_of(n, indices), BUDGET))
        for form, masking, (what, indices) in product(FORMS, (True, False), chosen.items())
    ]


@pytest.mark.parametrize("lower_bound", [None, 0.0, 0.98, 1.001, 1e-30, float("inf")])
def test_accumulate_and_select(kernels: SelectionKernels, lower_bound: float | None) -> None:
    """Lower bounds that fit, and such that a second pass over v is needed, which may take nothing out again."""
    for name, expected in selections():
        assert expected.chosen is not None
        with case(name):
            ours = expected.inputs()
            lower_bounds = None if lower_bound is None else expected.chosen.thresholds * lower_bound
            chosen = kernels.accumulate_and_select_(ours, BUDGET, lower_bounds)
            assert torch.equal(chosen.elements.indices, expected.chosen.elements.indices)
            assert same(chosen.elements.values, expected.chosen.elements.values)
            assert same(chosen.thresholds, expected.chosen.thresholds)
            expected.check(ours)
            if lower_bound == 1.001 and kernels.name != "reference":
                assert int(chosen.missed) > 0


def test_nonfinite_gradients_where_something_was_sent(kernels: SelectionKernels) -> None:
    expected = reference_pass(1000, "plain", True, sent_of(1000, [3, 500]), nan=(3, 500))
    ours = expected.inputs()
    assert int(kernels.accumulate_(ours)) == expected.first == 3
    expected.check(ours)
    assert ours.u is not None and ours.u[3] == 0 and ours.v.isfinite().all()


def test_taking_alone(kernels: SelectionKernels) -> None:
    for n, indices in ((1, {0}), (5000, some(5000, 0.01)), (100_000, some(100_000, 0.2)), (9, set[int]())):
        for masking in (True, False):
            sent = sent_of(n, indices)
            ours, theirs = (reference_pass(n, "plain", masking, sent).inputs() for _ in range(2))
            assert ours.u is not None and theirs.u is not None
            kernels.remove_sent_(sent, ours.u if masking else None, ours.v)
            REFERENCE.remove_sent_(sent, theirs.u if masking else None, theirs.v)
            assert same(ours.v, theirs.v) and same(ours.u, theirs.u)
            count = int(sent.count)
            where = sent.indices[:count].long()
            assert same(ours.v[where], random(n, 3)[where] - sent.values[:count])
            assert not masking or not ours.u[where].any()
