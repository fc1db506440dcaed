"""Point-to-point messages over MPI, tested without MPI: the buffers that are posted."""

from itertools import product
from typing import Any

import pytest
import torch

from dgc.comm import Exchange
from dgc.comm import mpi as point_to_point
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.mpi import PointToPointTransport, mpi_buffer


class RecordingMPI:
    """MPI with two ranks that records posted messages and delivers none."""

    TAG_UB, BYTE, INT32_T = None, "byte", "int32"
    rank, size = 0, 2

    def __init__(self) -> None:
        self.COMM_WORLD = self
        self.posted: list[tuple[str, Any, Any]] = []

    def Dup(self) -> Any:
        return self

    def Get_attr(self, key: Any) -> Any:
        return 2**20

    def Irecv(self, buffer: Any, source: Any, tag: Any) -> None:
        self.posted.append(("from", source, buffer))

    def Isend(self, buffer: Any, to: Any, tag: Any) -> None:
        self.posted.append(("to", to, buffer))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Any:
    MPI = RecordingMPI()
    monkeypatch.setattr(point_to_point, "running_mpi", lambda: MPI)
    monkeypatch.setattr(point_to_point, "MAX_COUNT", 100)
    inner: Any = LockstepWorld(2).transports[0]
    inner.members = lambda group: [0, 1]
    return PointToPointTransport(inner), MPI.posted


def test_a_buffer_is_the_memory_of_the_tensor() -> None:
    """Both ends of a message choose the same unit, by its length and not by its address."""
    for length, first in product((0, 3, 4, 7, 4096), (0, 1)):
        tensor = torch.arange(length + 1, dtype=torch.int64).to(torch.uint8)[first:][:length]
        memory, count, kind = mpi_buffer(tensor, RecordingMPI)
        assert (count, kind) == ((length, "byte") if length % 4 else (length // 4, "int32"))
        assert memory.tolist() == tensor.tolist()
        memory.fill(0)
        assert not tensor.any()


def test_a_message_may_have_four_times_as_many_bytes_as_mpi_counts(recorded: Any) -> None:
    transport, posted = recorded
    transport.launch("a", (Exchange({1: torch.ones(100)}, {1: torch.empty(400, dtype=torch.uint8)}),))
    found = [(way, peer, *buffer[1:]) for way, peer, buffer in posted]
    assert found == [("from", 1, 100, "int32"), ("to", 1, 100, "int32")]


@pytest.mark.parametrize("nbytes", [101, 404])
def test_a_message_that_is_too_long_is_refused_before_anything_is_posted(nbytes: Any, recorded: Any) -> None:
    transport, posted = recorded
    long, short = torch.empty(nbytes, dtype=torch.uint8), torch.empty(8, dtype=torch.uint8)
    words = f"a message of {nbytes} bytes is too large: MPI carries at most 100, or 400 "
    for exchange in (Exchange({1: long}, {1: short}), Exchange({1: short}, {1: long})):
        with pytest.raises(ValueError, match=words):
            transport.launch("a", (exchange,))
    assert not posted
