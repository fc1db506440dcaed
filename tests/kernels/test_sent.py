"""What the step before sent, taken out by the pass: the bits of the reference, which does one after the other."""

from collections.abc import Iterable
from functools import cache
from itertools import accumulate, product

import torch
from cases import case
from kernels.comparison import Pass, budget_of, random, same
from kernels.test_kernel_laws import FORMS

from dgc.kernels import Budget, PassInputs, SparseVector
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


def pass_of(
    n: int, form: str, masking: bool, sent: SparseVector, budget: Budget | None = None, nan: tuple[int, ...] = ()
) -> Pass:
    g, u = random(n, 1), None if form == "residual" else random(n, 2)
    g[list(nan)] = float("nan")
    return Pass(PassInputs((g,), u, random(n, 3), 0.9, form == "nesterov", sent, masking, decay=0.95), budget)


@cache
def passes(n: int, budget: Budget | None, *chosen: tuple[int, ...]) -> list[tuple[str, Pass]]:
    """Of every form, with and without masking, whatever was sent."""
    made = []
    for form, masking, indices in product(FORMS, (True, False), chosen):
        one = pass_of(n, form, masking, sent_of(n, indices), budget)
        made.append((f"{form}, masking {masking}, {len(indices)} of {n}", one))
    return made


def test_accumulate(kernels: SelectionKernels) -> None:
    for n in (1, 16, 17, 300, 70_001):
        edges = tuple(i for i in EDGES if i < n)
        for name, one in passes(n, None, (), (0, n - 1), edges, some(n, 0.01), tuple(range(n))):
            with case(name):
                assert int(one.check(kernels)) == n


PIECES = [1, 2, 0, 3, 30, 0, 0, 70_000, 7, 33_000, 1, 0]


def test_pieces_and_addresses_of_any_kind(kernels: SelectionKernels) -> None:
    n = sum(PIECES)
    edges = (0, *(i for start in accumulate(PIECES) for i in (start - 1, start) if i < n))
    for (name, one), offset in product(passes(n, None, edges + some(n, 0.01)), (0, 1, 7)):
        with case(name, offset):
            assert int(one.check(kernels, None, PIECES, offset)) == n


BUDGET = budget_of((40_003, 0, 97, 69_900, 10), (400, 0, 3, 200, 0))


def test_accumulate_and_select(kernels: SelectionKernels) -> None:
    """Lower bounds that fit, and such that a second pass over v is needed, which may take nothing out again."""
    n = int(BUDGET.bounds[-1])
    edges = tuple(i for b in BUDGET.bounds.tolist() for i in (b - 1, b) if 0 <= i < n)
    for name, one in passes(n, BUDGET, edges + some(n, 0.01), some(n, 0.2)):
        for lower_bound in (None, 0.0, 0.98, 1.001, 1e-30, float("inf")):
            with case(name, lower_bound):
                chosen = one.check(kernels, None if lower_bound is None else one.expected.thresholds * lower_bound)
                assert int(chosen.missed) > 0 or lower_bound != 1.001 or kernels.name == "reference"


def test_nonfinite_gradients_where_something_was_sent(kernels: SelectionKernels) -> None:
    one = pass_of(1000, "plain", True, sent_of(1000, [3, 500]), nan=(3, 500))
    assert int(one.check(kernels)) == 3
    assert one.left.u is not None and one.left.u[3] == 0 and one.left.v.isfinite().all()


def test_taking_alone(kernels: SelectionKernels) -> None:
    for n, indices in ((1, (0,)), (5000, some(5000, 0.01)), (100_000, some(100_000, 0.2)), (9, ())):
        for masking in (True, False):
            sent, u, v = sent_of(n, indices), random(n, 2), random(n, 3)
            kernels.remove_sent_(sent, u if masking else None, v)
            where, values = sent.indices[: len(indices)].long(), sent.values[: len(indices)]
            assert same(v, random(n, 3).index_put((where,), random(n, 3)[where] - values))
            assert same(u, random(n, 2).index_fill(0, where, 0.0) if masking else random(n, 2))
