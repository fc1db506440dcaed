"""One bit of a message that changes on its way, in every method: an error that names the rank and the bucket.

Sums that are formed on the way are not protected, nor dense values inside a machine: docs/design.md lists them.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from laws.exchanges import EXCHANGES
from laws.quantized import QUANTIZED
from laws.table import TABLE as OTHERS
from laws.table import Row
from torch import Tensor

from dgc.comm.collectives import MachineRank
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.requests import AllGather, AllToAll, Exchange, Request
from dgc.compression import Compressor
from dgc.compression.hierarchical import HierarchicalCompressor
from dgc.testing import Fleet, gradients
from dgc.wire import PayloadError

pytestmark = pytest.mark.usefixtures("no_type_checks")
SHAPES = ((24, 25), (3, 3), (1,), (400,))
LIKE = [torch.zeros(shape, dtype=torch.float32) for shape in SHAPES]
SIZE = 3
# 2 ranks gather codes where 3 reduce them
CASES = [(row, SIZE) for row in (*OTHERS, *EXCHANGES, *QUANTIZED)] + [
    (row, 2) for row in QUANTIZED if row.name in ("2bit", "1bit", "dense-values-fp16")
]


class Noisy(LockstepWorld):
    """Changes the `number`-th message of rank 1. `messages`: their sizes in bytes."""

    def __init__(
        self,
        size: int,
        local_size: int | None = None,
        change: Callable[[Tensor], Tensor] = Tensor.clone,
        number: int = -1,
    ):
        super().__init__(size, local_size)
        self.change, self.number, self.messages = change, number, list[int]()

    def launch(self, rank: int, name: str, requests: tuple[Request, ...], lane: str = "") -> Any:
        if rank == 1:
            requests = tuple(map(self._through_noise, requests))
        return super().launch(rank, name, requests, lane)

    def _through_noise(self, request: Request) -> Request:
        match request:
            case AllGather(tensor):
                return replace(request, tensor=self._one(tensor))
            case AllToAll(tensor, splits, group) if group != "local":
                return replace(request, tensor=torch.cat([self._one(part) for part in tensor.split(list(splits))]))
            case Exchange(sends):
                return replace(request, sends={to: self._one(message) for to, message in sends.items()})
        return request

    def _one(self, message: Tensor) -> Tensor:
        self.messages.append(message.numel() * message.element_size())
        return self.change(message) if len(self.messages) - 1 == self.number else message


def flip(byte: int) -> Callable[[Tensor], Tensor]:
    def change(message: Tensor) -> Tensor:
        changed = message.clone()
        changed.view(-1).view(torch.uint8)[byte] ^= 1 << byte % 8
        return changed

    return change


def places(nbytes: int) -> Iterator[int]:
    """In each word of the header (size, tensor, checksum, scale, ratio, format), the body, and the padding."""
    yield from (byte for byte in {0, 5, 8, 14, 19, 20, 24, 24 + (nbytes - 24) // 2, nbytes - 1} if byte < nbytes)


def step(make: Callable[[], Compressor], world: LockstepWorld) -> None:
    fleet = Fleet(make, world.size, LIKE)
    fleet.world = world
    fleet.step([gradients(rank, 0, SHAPES) for rank in range(world.size)])


def unnoticed(make: Callable[[], Compressor], match: str, size: int, local_size: int | None = None) -> list[str]:
    """The flipped bits of rank 1 that no rank reports."""
    clean, found = Noisy(size, local_size), []
    step(make, clean)
    for number, nbytes in enumerate(clean.messages):
        for byte in places(nbytes):
            try:
                step(make, Noisy(size, local_size, flip(byte), number))
            except PayloadError as error:
                assert match in str(error), error
            else:
                found.append(f"message {number}, byte {byte} of {nbytes}")
    return found


@pytest.mark.parametrize(("row", "size"), CASES, ids=lambda value: getattr(value, "name", value))
def test_every_method_notices_a_flipped_bit(row: Row, size: int) -> None:
    assert unnoticed(row.make, "rank 1 sent bucket bucket with a wrong checksum", size) == []


@pytest.mark.parametrize("row", [row for row in QUANTIZED if row.name in ("double-squeeze", "2bit", "random-k")])
def test_two_levels_notice_a_flipped_bit(row: Row) -> None:
    """Rank 1 is on machine 0. Errors between machines name the machine, those inside it the local rank."""
    places = iter([MachineRank(machine, 2, rank, 2) for _ in range(1000) for machine in (0, 1) for rank in (0, 1)])
    found = unnoticed(lambda: HierarchicalCompressor(row.make(), next(places)), " sent bucket bucket", 4, 2)
    assert found == []
