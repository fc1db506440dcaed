"""Numbers that a method reads from a device, while other conversations go on, change no result."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cases import case
from laws.test_hierarchical import TABLE as BETWEEN_MACHINES
from laws.test_hierarchical import Machines
from laws.test_laws import TABLE
from torch import Tensor

from dgc.comm.requests import Read
from dgc.testing import Fleet, gradients

pytestmark = pytest.mark.usefixtures("no_type_checks")


@contextmanager
def on_a_device(reads: list[Read]) -> Iterator[None]:
    """Tensors count as those of a device, whose numbers only a `Read` can get."""

    class Counted(Read):
        def __init__(self, numbers: Tensor):
            super().__init__(numbers)
            reads.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dgc.comm.requests.HOST", "none")
        patch.setattr("dgc.comm.requests.Read", Counted)
        yield


def results(fleet: Fleet) -> tuple[list[list[float]], list[str | None]]:
    """Of a step, and of one with NaN, which is dropped."""
    size = len(fleet.buckets)
    means = [fleet.step([gradients(rank, 0) for rank in range(size)])[0].tolist()]
    own = [gradients(rank, 1) for rank in range(size)]
    own[1][2].view(-1)[5] = float("nan")
    fleet.step(own)
    return [*means, *(errors.tolist() for errors in fleet.errors())], fleet.nonfinite


def test_every_method_and_every_method_between_machines() -> None:
    makes = [(row.name, lambda row=row: Fleet(row.make, 3)) for row in TABLE]
    for row in BETWEEN_MACHINES:
        makes.append((f"{row.name} between machines", lambda row=row: Machines(row.make, 2, 2)))
    silent = 0
    for name, make in makes:
        with case(name):
            reads: list[Read] = []
            expected = results(make())
            with on_a_device(reads):
                assert results(make()) == expected
            silent += not reads
    assert silent < len(makes) / 2
