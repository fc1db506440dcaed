"""Channels and messages over MPI: order, tags, memory, the buffers that are posted, and the start of MPI."""

import subprocess
from itertools import product
from typing import Any

import pytest
import torch
from channels import ChannelWorld
from environment import patient
from warm import python

from dgc.comm import Exchange
from dgc.comm import mpi as point_to_point
from dgc.comm.channel import Channel
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.mpi import MPIChannel, PointToPointTransport, mpi_buffer


def received(world: Any, rank: int, tag: int = 0, tests: int = 200) -> Any:
    buffer = torch.zeros(3, dtype=torch.int64)
    handle = world.channels[rank].irecv(buffer, tag)
    return next((buffer.tolist() for _ in range(tests) if world.channels[rank].test(handle)), None)


def messages_of_two_ranks(world: Any) -> tuple[list[list[int]], list[bool]]:
    """What rank 2 receives, and which messages were copied when they were sent: later changes are not in them."""
    sent = []
    for number, source in product(range(30), (0, 1)):
        message = torch.tensor([source, number, 0])
        sent.append((message, world.channels[source].isend(2, message, 0)))
    gone = [world.channels[0].test(handle) for _, handle in sent]
    for message, _ in sent:
        message[2] = 1
    found = [received(world, 2) for _ in sent]
    assert all(world.channels[0].test(handle) for _, handle in sent)
    return found, gone


@pytest.mark.parametrize("seed", range(5))
def test_simulated_messages_of_one_rank_arrive_in_order(seed: int) -> None:
    world = ChannelWorld(3, seed)
    assert isinstance(world.channels[0], Channel)
    found, gone = messages_of_two_ranks(world)
    for source in (0, 1):
        expected = [[source, number, int(not gone[2 * number + source])] for number in range(30)]
        assert [message for message in found if message[0] == source] == expected
    assert world.in_flight == 0


@pytest.mark.parametrize("seed", range(5))
def test_about_half_of_the_simulated_messages_are_copied_at_once(seed: int) -> None:
    assert 15 < sum(messages_of_two_ranks(ChannelWorld(3, seed))[1]) < 45


def test_a_seed_gives_the_order_in_which_simulated_messages_arrive() -> None:
    orders = [messages_of_two_ranks(ChannelWorld(3, seed))[0] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_simulated_messages_are_received_by_tag() -> None:
    world = ChannelWorld(3)
    world.channels[1].isend(0, torch.tensor([7, 7, 7]), 5)
    assert received(world, 0) is received(world, 2) is None and received(world, 0, tag=5) == [7, 7, 7]
    assert world.in_flight == 0


def test_a_simulated_message_of_another_length_is_refused() -> None:
    world = ChannelWorld(2)
    world.channels[0].isend(1, torch.zeros(4, dtype=torch.int64), 0)
    with pytest.raises(ValueError, match="4 elements for a buffer of 3"):
        received(world, 1)


def test_without_mpi_the_cure_is_named() -> None:
    assert all(hasattr(MPIChannel, name) for name in ("isend", "irecv", "test"))
    pytest.importorskip("mpi4py")
    words = [python(), "-c", "from dgc.comm.mpi import MPIChannel; MPIChannel()"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=patient(60), check=False)
    assert "ValueError" in done.stderr and "need MPI" in done.stderr and "mpirun" in done.stderr


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


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("length", [0, 3, 4, 7, 4096])
def test_a_buffer_is_memory_of_the_tensor(length: int, first: int) -> None:
    """Both ends of a message choose the same unit, by its length and not by its address."""
    tensor = torch.arange(length + 1, dtype=torch.int64).to(torch.uint8)[first:][:length]
    memory, count, kind = mpi_buffer(tensor, RecordingMPI)
    assert (count, kind) == ((length, "byte") if length % 4 else (length // 4, "int32"))
    assert memory.tolist() == tensor.tolist()
    memory.fill(0)
    assert not tensor.any()


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> tuple[PointToPointTransport, RecordingMPI]:
    """A transport over an MPI that counts to 100."""
    MPI, inner = RecordingMPI(), LockstepWorld(2).transports[0]
    monkeypatch.setattr(point_to_point, "running_mpi", lambda: MPI)
    monkeypatch.setattr(point_to_point, "MAX_COUNT", 100)
    monkeypatch.setattr(inner, "members", lambda group: [0, 1])
    return PointToPointTransport(inner), MPI


@pytest.mark.parametrize("nbytes", [101, 404])
def test_a_message_longer_than_mpi_can_count_is_refused_before_anything_is_posted(
    nbytes: int, recording: tuple[PointToPointTransport, RecordingMPI]
) -> None:
    transport, MPI = recording
    short, long = torch.empty(8, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    words = f"a message of {nbytes} bytes is too large: MPI carries at most 100, or 400 "
    for exchange in (Exchange({1: long}, {1: short}), Exchange({1: short}, {1: long})):
        with pytest.raises(ValueError, match=words):
            transport.launch("a", (exchange,))
    assert not MPI.posted


def test_mpi_carries_four_times_the_bytes_that_it_counts(
    recording: tuple[PointToPointTransport, RecordingMPI],
) -> None:
    transport, MPI = recording
    transport.launch("a", (Exchange({1: torch.ones(100)}, {1: torch.empty(400, dtype=torch.uint8)}),))
    found = [(way, peer, *buffer[1:]) for way, peer, buffer in MPI.posted]
    assert found == [("from", 1, 100, "int32"), ("to", 1, 100, "int32")]
