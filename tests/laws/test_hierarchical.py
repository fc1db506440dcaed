"""Two levels: every compressor between machines, with dense means inside them.

The reference takes the means of the machines' gradients, and runs the compressor in a world with the machines as
its ranks, once for each share of the tensors. Results and residuals must be equal to it bit for bit.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from cases import case
from laws import table
from laws.table import Row
from torch import Tensor

from dgc.comm.collectives import MachineRank
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.requests import AllReduce, Read
from dgc.compression import DenseCompressor, DenseResult, FP16Compressor, Reduced, StatelessCompressor
from dgc.core.bucket import Bucket, Segment, divide, make_bucket
from dgc.engine.hierarchy import HierarchicalCompressor
from dgc.lowrank.powersgd import PowerSGDCompressor
from dgc.testing import LIKE, Fleet, flat, gradients

POINT_TO_POINT = [row for row in table.TABLE if row.make().point_to_point]
TABLE = [row for row in table.TABLE if row not in POINT_TO_POINT]
# a row, machines, ranks of each: the smallest worlds for one row of each class
ONE_OF_A_CLASS = {type(row.make()): row for row in reversed(TABLE)}.values()
WORLDS = [(row, *world) for row in TABLE for world in ((3, 2), (2, 3))]
WORLDS += [(row, *world) for row in ONE_OF_A_CLASS for world in ((2, 2), (2, 1), (1, 2))]

every_row = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)


@pytest.fixture(autouse=True)
def types_are_checked_once(request: pytest.FixtureRequest) -> None:
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    if (parameters.get("machines"), parameters.get("local_size")) != (2, 2):
        request.getfixturevalue("no_type_checks")


class Machines(Fleet):
    def __init__(self, make: Any, machines: int, local_size: int, like: Any = LIKE, seed: int = 0) -> None:
        self.machines, self.local_size, size = machines, local_size, machines * local_size
        given = iter([MachineRank(m, machines, r, local_size) for m in range(machines) for r in range(local_size)])
        super().__init__(lambda: HierarchicalCompressor(make(), next(given)), size, like, seed)
        self.world = LockstepWorld(size, local_size, seed=seed)

    def shares(self) -> list[Bucket]:
        return [states[bucket].share for states, bucket in zip(self.states, self.buckets, strict=True)]

    def errors(self) -> list[Tensor]:
        """Each machine's residual [n] in float64, put together from its ranks'."""
        parts = [
            sum((e.double() for e in states.errors()), torch.zeros(share.numel, dtype=torch.float64))
            for states, share in zip(self.states, self.shares(), strict=True)
        ]
        return [torch.cat(parts[m * self.local_size :][: self.local_size]) for m in range(self.machines)]


class Reference:
    """The means of the machines, and the compressor between them for each share of the tensors."""

    def __init__(self, make: Callable[[], Any], fleet: Machines, like: Sequence[Tensor] = LIKE) -> None:
        self.fleet, self.groups = fleet, []
        for share in fleet.shares()[: fleet.local_size]:
            numbers = [int(segment.name[1:]) for segment in share.segments]
            if numbers:
                world = Fleet(make, fleet.machines, [like[i] for i in numbers], first=numbers[0])
                self.groups.append((numbers, world))

    def step(self, own: Sequence[Sequence[Tensor]]) -> Tensor:
        L = self.fleet.local_size
        machines = [own[m * L :][:L] for m in range(self.fleet.machines)]
        means = [[sum(tensors[1:], tensors[0]) / L for tensors in zip(*here, strict=True)] for here in machines]
        results = [world.step([[mean[i] for i in numbers] for mean in means])[0] for numbers, world in self.groups]
        return torch.cat(results)

    def errors(self) -> list[Tensor]:
        parts = [world.errors() for _, world in self.groups]
        return [torch.cat(of_machine) for of_machine in zip(*parts, strict=True)]


def four(step: int) -> list[list[Tensor]]:
    return [gradients(rank, step) for rank in range(4)]


@pytest.mark.parametrize(("row", "machines", "local_size"), WORLDS, ids=lambda one: getattr(one, "name", one))
def test_it_equals_the_method_between_the_means_of_machines(row: Row, machines: int, local_size: int) -> None:
    fleet = Machines(row.make, machines, local_size)
    reference = Reference(row.make, fleet)
    for step in range(4):
        own = [gradients(rank, step) for rank in range(machines * local_size)]
        expected = reference.step(own).view(torch.int32)
        assert all(torch.equal(result.view(torch.int32), expected) for result in fleet.step(own))
        assert fleet.nonfinite == [None] * len(own)
    assert all(map(torch.equal, fleet.errors(), reference.errors()))


def check_that_a_state_goes_on(row: Row, fleet: Machines, steps: range) -> None:
    other = Machines(row.make, 2, 2, seed=1)
    for old, new in zip(fleet.states, other.states, strict=True):
        new.load_state_dict(old.state_dict())
    for step in steps:
        here, there = ([f.step(four(step))[0], *f.errors()] for f in (fleet, other))
        assert bool(here[0].isfinite().all()) and all(map(torch.equal, here, there))


@every_row
def test_a_reloaded_state_goes_on_bit_for_bit(row: Row) -> None:
    fleet = Machines(row.make, 2, 2)
    for step in range(3):
        fleet.step(four(step))
    check_that_a_state_goes_on(row, fleet, range(3, 6))


@every_row
def test_a_dropped_step_returns_what_was_sent(row: Row) -> None:
    fleet = Machines(row.make, 2, 2)
    for step in range(3):
        fleet.step(four(step))
    for i, bad in ((4, "nan"), (0, "-inf")):
        before, own = fleet.errors(), four(9)
        own[2][i].view(-1)[0] = float(bad)
        fleet.step(own)
        assert fleet.nonfinite == [f"the gradient of p{i} on rank 2 has NaN or inf, or is 2**64 or more"] * 4
        for machine, (error, left) in enumerate(zip(before, fleet.errors(), strict=True)):
            assert bool(left.isfinite().all())
            if row.keeps:
                mean = (flat(own[2 * machine]).float() + flat(own[2 * machine + 1]).float()) / 2
                assert torch.equal(left.float(), error.float() + mean.nan_to_num(0.0, 0.0, 0.0))
    check_that_a_state_goes_on(row, fleet, range(10, 11))  # after a dropped step too
    assert fleet.nonfinite == [None] * 4


@every_row
def test_a_bucket_may_have_fewer_tensors_than_a_machine_has_ranks(row: Row) -> None:
    """And empty tensors."""
    for shapes in (((8, 6),), ((0, 4),), ((), (3,))):
        like = [torch.zeros(shape, dtype=torch.float32) for shape in shapes]
        fleet = Machines(row.make, 2, 3, like)
        reference = Reference(row.make, fleet, like)
        for step in range(2):
            own = [gradients(rank, step, shapes) for rank in range(6)]
            expected = reference.step(own)
            assert all(torch.equal(result, expected) for result in fleet.step(own))
        assert {meter.rounds for meter in fleet.world.meters} == {fleet.world.meters[0].rounds}


@every_row
def test_gradients_of_half_precision_have_means_of_their_type(row: Row) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        fleet = Machines(row.make, 2, 2, [tensor.to(dtype) for tensor in LIKE])
        for step in range(2):
            means = fleet.step([[g.to(dtype) for g in own] for own in four(step)])
            assert means[0].dtype == dtype and bool(torch.isfinite(means[0]).all())
            assert all(torch.equal(means[0], mean) for mean in means)


def test_a_step_takes_two_rounds_more_than_its_longest_share() -> None:
    """PowerSGD needs four rounds for a share with matrices and one for a share of vectors."""
    like = [torch.zeros(1500, dtype=torch.float32), torch.zeros((40, 40), dtype=torch.float32)]
    fleet, rounds = Machines(lambda: PowerSGDCompressor(1, num_iters_per_step=4), 2, 2, like), [0]
    for step in range(4):
        own = [gradients(rank, step, ((1500,), (40, 40))) for rank in range(4)]
        if step == 2:
            own[0][1][0, 0] = float("nan")
        fleet.step(own)
        rounds.append(fleet.world.meters[0].rounds - sum(rounds))
    assert rounds[1:] == [1 + 4 + 1, 1 + 4 + 1, 1 + 4 + 1 + 1, 1 + 4 + 1]  # a round more says which rank has NaN


def test_a_mean_of_machines_that_overflows_names_no_rank() -> None:
    fleet = Machines(FP16Compressor, 2, 2)
    own = [[g * 0 + 50000.0 for g in of_rank] for of_rank in four(0)]
    fleet.step(own)
    assert fleet.nonfinite == [None] * 4 or all("overflows the dtype" in str(text) for text in fleet.nonfinite)
    fleet.step([[g * 4 for g in of_rank] for of_rank in own])
    (text,) = set(fleet.nonfinite)
    assert text is not None and "of p0 overflows the dtype that carries it (no rank has NaN or inf)" in text


def test_a_complaint_of_a_compressor_without_a_cause_names_the_bucket() -> None:
    class Complains(StatelessCompressor):
        def reduce(self, bucket: Any, state: Any) -> Any:
            (mean,) = yield (AllReduce(bucket.flat),)
            bucket.flat.copy_(mean)
            return Reduced(DenseResult("no"), state)

    fleet = Machines(Complains, 2, 2)
    fleet.step(four(0))
    assert fleet.nonfinite == ["a gradient of bucket bucket is not finite"] * 4


@contextmanager
def on_a_device(reads: list[Read]) -> Iterator[None]:
    """Tensors count as tensors of a device, whose numbers only a `Read` can get."""

    class Counted(Read):
        def __init__(self, numbers: Tensor):
            super().__init__(numbers)
            reads.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dgc.comm.requests.HOST", "none")
        patch.setattr("dgc.comm.requests.Read", Counted)
        yield


def results(fleet: Fleet) -> tuple[list[list[float]], list[str | None]]:
    first, second = ([gradients(rank, step) for rank in range(len(fleet.buckets))] for step in range(2))
    means = [fleet.step(first)[0].tolist()]
    second[1][2].view(-1)[5] = float("nan")
    fleet.step(second)
    return [*means, *(errors.tolist() for errors in fleet.errors())], fleet.nonfinite


def test_numbers_that_are_read_from_a_device_change_no_result_of_a_method_or_one_between_machines() -> None:
    """A method reads while other conversations go on."""
    makes: dict[str, Callable[[], Fleet]] = {row.name: partial(Fleet, row.make, 3) for row in table.TABLE}
    makes |= {f"{row.name} between machines": partial(Machines, row.make, 2, 2) for row in TABLE}
    silent = 0
    for name, make in makes.items():
        reads, expected = list[Read](), results(make())
        with case(name), on_a_device(reads):
            assert results(make()) == expected
        silent += not reads
    assert silent < len(makes) / 2


DIVISIONS: list[Any] = [  # sizes, loads, and the first of each group
    ((10, 10, 10, 10), (0, 0), [0, 2, 4]),
    ((10, 10, 10, 100), (0, 0), [0, 3, 4]),
    ((7,), (7, 0, 0), [0, 0, 0, 1]),
    ((7,), (0, 7, 7), [0, 1, 1, 1]),
    ((7,), (7, 0, 7), [0, 0, 1, 1]),
    ((0, 0), (0, 0), [0, 0, 2]),
    ((), (3, 0), [0, 0, 0]),
]


@pytest.mark.parametrize(("sizes", "loads", "firsts"), DIVISIONS)
def test_tensors_are_divided_to_balance_the_loads_of_ranks(sizes: Any, loads: Any, firsts: list[int]) -> None:
    segments = [Segment(str(i), sum(sizes[:i]), n, (n,), (1,)) for i, n in enumerate(sizes)]
    assert divide(segments, loads) == firsts


def test_the_loads_of_ranks_are_balanced_over_buckets() -> None:
    compressor = HierarchicalCompressor(DenseCompressor(), MachineRank(0, 2, 0, 4))
    for i in range(8):
        compressor.init(make_bucket(str(i), [(f"p{i}", torch.zeros(100))]), 8, 0)
    assert compressor._loads == [200] * 4


def test_messages_between_single_ranks_are_refused() -> None:
    assert POINT_TO_POINT
    for row in POINT_TO_POINT:
        with pytest.raises(ValueError, match="sends messages from rank to rank"):
            HierarchicalCompressor(row.make(), MachineRank(0, 2, 0, 2))
