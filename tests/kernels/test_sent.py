"""What the step before sent, taken out by the pass: the bits of the reference, which does one after the other."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch
from cases import case
from kernels.comparison import REFERENCE, assert_same_choice, budget_of, random, same
from kernels.test_kernel_laws import FORMS
from torch import Tensor

from dgc.kernels import Budget, PassInputs, SparseVector, TopKResult
from dgc.kernels.selection import SelectionKernels

# where blocks, units of threads and the buffer begin and end
EDGES = (0, 1, 15, 16, 255, 256, 257, 511, 512, 8191, 8192, 32767, 32768, 32769, 65535, 65536)


def sent_of(n: int, indices: Iterable[int]) -> SparseVector:
    """As a payload of fp16 leaves it. What lies behind the last one has no meaning, and shows if it is used."""
    tail = torch.zeros(3, dtype=torch.int64)
    entries = torch.tensor(sorted(set(indices)), dtype=torch.int64)
    values = torch.cat([random(n, 5)[entries].half().float(), tail + 7.0])
    count = torch.tensor(entries.numel(), dtype=torch.int32)
    return SparseVector(torch.cat([entries, tail]).int(), values, count)


def some(n: int, share: float) -> tuple[int, ...]:
    return tuple(torch.randperm(n, generator=torch.Generator().manual_seed(n))[: int(n * share)].tolist())


def at(tensor: Tensor, offset: int) -> Tensor:
    """A copy that begins `offset` elements after where cache lines do."""
    return torch.cat([tensor.new_zeros(offset), tensor])[offset:]


@dataclass(frozen=True)
class Pass:
    """What a pass starts from, and what the reference makes of it: it takes out what was sent, then does a pass
    that knows of nothing sent. The same for every backend.
    """

    name: str
    start: PassInputs
    left: PassInputs
    first: int
    chosen: TopKResult | None

    def inputs(self, pieces: list[int] | None = None, offset: int = 0) -> PassInputs:
        u, (g,) = self.start.u, self.start.g
        own_u = None if u is None else at(u, offset)
        return replace(self.start, g=g.split(pieces) if pieces else (g,), u=own_u, v=at(self.start.v, offset))

    def check(self, inputs: PassInputs) -> None:
        """What is left in the state."""
        assert same(inputs.v, self.left.v) and same(inputs.u, self.left.u)


def reference_pass(
    n: int, form: str, masking: bool, sent: SparseVector, budget: Budget | None = None, nan: tuple[int, ...] = ()
) -> Pass:
    name = f"{form}, masking {masking}, {int(sent.count)} of {n}"
    g, u = random(n, 1), None if form == "residual" else random(n, 2)
    g[list(nan)] = float("nan")
    start = PassInputs((g,), u, random(n, 3), 0.9, form == "nesterov", sent, masking, decay=0.95)
    left = replace(start, u=None if u is None else u.clone(), v=start.v.clone())
    REFERENCE.remove_sent_(sent, left.u if masking else None, left.v)
    left = replace(left, sent=None)
    if budget is None:
        return Pass(name, start, left, int(REFERENCE.accumulate_(left)), None)
    chosen = REFERENCE.accumulate_and_select_(left, budget, None)
    return Pass(name, start, left, int(chosen.first_nonfinite), chosen)


@cache
def passes(n: int, budget: Budget | None, *chosen: tuple[int, ...]) -> list[Pass]:
    """Of every form, with and without masking, whatever was sent."""
    cases = product(FORMS, (True, False), chosen)
    return [reference_pass(n, form, masking, sent_of(n, indices), budget) for form, masking, indices in cases]


def test_accumulate(kernels: SelectionKernels) -> None:
    for n in (1, 16, 17, 300, 70_001):
        edges = tuple(i for i in EDGES if i < n)
        for expected in passes(n, None, (), (0, n - 1), edges, some(n, 0.01), tuple(range(n))):
            with case(expected.name):
                ours = expected.inputs()
                assert int(kernels.accumulate_(ours)) == expected.first == n
                expected.check(ours)


PIECES = [1, 2, 0, 3, 30, 0, 0, 70_000, 7, 33_000, 1, 0]


def test_pieces_and_addresses_of_any_kind(kernels: SelectionKernels) -> None:
    n = sum(PIECES)
    starts = torch.tensor(PIECES).cumsum(0).tolist()
    edges = (0, *(i for start in starts for i in (start - 1, start) if i < n))
    for expected, offset in product(passes(n, None, edges + some(n, 0.01)), (0, 1, 7)):
        with case(expected.name, offset):
            ours = expected.inputs(PIECES, offset)
            assert int(kernels.accumulate_(ours)) == expected.first == n
            expected.check(ours)


BUDGET = budget_of((40_003, 0, 97, 69_900, 10), (400, 0, 3, 200, 0))


@pytest.mark.parametrize("lower_bound", [None, 0.0, 0.98, 1.001, 1e-30, float("inf")])
def test_accumulate_and_select(kernels: SelectionKernels, lower_bound: float | None) -> None:
    """Lower bounds that fit, and such that a second pass over v is needed, which may take nothing out again."""
    n = int(BUDGET.bounds[-1])
    edges = tuple(i for b in BUDGET.bounds.tolist() for i in (b - 1, b) if 0 <= i < n)
    for expected in passes(n, BUDGET, edges + some(n, 0.01), some(n, 0.2)):
        assert expected.chosen is not None
        with case(expected.name):
            ours = expected.inputs()
            lower_bounds = None if lower_bound is None else expected.chosen.thresholds * lower_bound
            chosen = kernels.accumulate_and_select_(ours, BUDGET, lower_bounds)
            assert_same_choice(chosen, expected.chosen)
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
    for n, indices in ((1, (0,)), (5000, some(5000, 0.01)), (100_000, some(100_000, 0.2)), (9, ())):
        for masking in (True, False):
            sent, u, v = sent_of(n, indices), random(n, 2), random(n, 3)
            kernels.remove_sent_(sent, u if masking else None, v)
            where, values = sent.indices[: len(indices)].long(), sent.values[: len(indices)]
            assert same(v, random(n, 3).index_put((where,), random(n, 3)[where] - values))
            assert same(u, random(n, 2).index_fill(0, where, 0.0) if masking else random(n, 2))
