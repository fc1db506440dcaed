"""One bit of a message that changes on its way, in every method: an error that names the rank and the bucket.

Sums that are formed on the way are not protected, nor dense values inside a machine: docs/design.md lists them.
"""

from collections.abc import Callable

import pytest
import torch
from laws.table import DEFINITIONS, TABLE, Row
from noise import Noisy, flip, places

from dgc.comm.collectives import MachineRank
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import Compressor
from dgc.engine.hierarchy import HierarchicalCompressor
from dgc.sparse.payloads import PayloadError
from dgc.testing import Fleet, gradients

pytestmark = pytest.mark.usefixtures("no_type_checks")
SHAPES = ((24, 25), (3, 3), (1,), (400,))
LIKE = [torch.zeros(shape, dtype=torch.float32) for shape in SHAPES]
SIZE = 3
# 2 ranks gather codes where 3 reduce them
CASES = [(row, SIZE) for row in TABLE if row not in DEFINITIONS]
CASES += [(row, 2) for row in TABLE if row.name in ("2bit", "1bit", "dense-values-fp16")]


def unnoticed(make: Callable[[], Compressor], match: str, size: int, local_size: int | None = None) -> list[str]:
    """The flipped bits of rank 1 that no rank reports."""

    def step(world: LockstepWorld) -> None:
        fleet = Fleet(make, size, LIKE)
        fleet.world = world
        fleet.step([gradients(rank, 0, SHAPES) for rank in range(size)])

    clean, found = Noisy(size, local_size), []
    step(clean)
    for number, nbytes in enumerate(clean.messages):
        for byte in places(nbytes):
            try:
                step(Noisy(size, local_size, flip(byte), number))
            except PayloadError as error:
                assert match in str(error), error
            else:
                found.append(f"message {number}, byte {byte} of {nbytes}")
    return found


@pytest.mark.parametrize(("row", "size"), CASES, ids=lambda value: getattr(value, "name", value))
def test_every_method_notices_a_flipped_bit(row: Row, size: int) -> None:
    assert unnoticed(row.make, "rank 1 sent bucket bucket with a wrong checksum", size) == []


@pytest.mark.parametrize("row", [row for row in TABLE if row.name in ("double-squeeze", "2bit", "random-k")])
def test_two_levels_notice_a_flipped_bit(row: Row) -> None:
    """Rank 1 is on machine 0. Errors between machines name the machine, those inside it the local rank."""
    places = iter([MachineRank(machine, 2, rank, 2) for _ in range(1000) for machine in (0, 1) for rank in (0, 1)])
    assert unnoticed(lambda: HierarchicalCompressor(row.make(), next(places)), " sent bucket bucket", 4, 2) == []
