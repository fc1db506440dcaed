"""Channels: order, tags, memory, and the start of the MPI channel."""

import random
import subprocess
from typing import Any

import pytest
import torch
from channels import ChannelWorld
from environment import patient
from warm import python

from dgc.comm.channel import Channel


def received(world: Any, rank: Any, tag: Any, tests: int = 200, room: int = 3) -> Any:
    buffer = torch.zeros(room, dtype=torch.int64)
    handle = world.channels[rank].irecv(buffer, tag)
    return next((buffer for _ in range(tests) if world.channels[rank].test(handle)), None)


@pytest.mark.parametrize("seed", range(5))
def test_messages_of_one_rank_arrive_in_order(seed: Any) -> None:
    world = ChannelWorld(3, seed)
    for number in range(30):
        for source in (0, 1):
            message = torch.tensor([source, number])
            world.channels[source].isend(2, message, 7)
    assert world.in_flight == 60
    arrived = [received(world, 2, 7).tolist()[:2] for _ in range(60)]
    assert [n for s, n in arrived if s == 0] == [n for s, n in arrived if s == 1] == list(range(30))
    assert [s for s, _ in arrived] != [0, 1] * 30
    assert world.in_flight == 0 and received(world, 2, 7) is None


def test_a_receive_takes_only_its_tag() -> None:
    world = ChannelWorld(2)
    world.channels[0].isend(1, torch.tensor([1]), 1)
    world.channels[0].isend(1, torch.tensor([2]), 2)
    assert received(world, 1, 3) is None
    assert received(world, 1, 2)[0] == 2
    assert received(world, 1, 1)[0] == 1


def test_a_message_is_sent_once_it_is_copied() -> None:
    """About half of the messages at once, the others when they are received."""
    world = ChannelWorld(2)
    messages = [torch.tensor([n]) for n in range(40)]
    handles = [world.channels[0].isend(1, message, 0) for message in messages]
    gone = [world.channels[0].test(handle) for handle in handles]
    assert 5 < sum(gone) < 35
    for message in messages:
        message += 100
    arrived = [int(received(world, 1, 0)[0]) for _ in messages]
    assert arrived == [n if at_once else n + 100 for n, at_once in enumerate(gone)]
    assert all(map(world.channels[0].test, handles))


def test_the_same_seed_gives_the_same_times() -> None:
    def run(seed: Any) -> Any:
        world, order = ChannelWorld(4, seed), random.Random(1)
        for number in range(50):
            world.channels[order.randrange(1, 4)].isend(0, torch.tensor([number]), 0)
        return [int(received(world, 0, 0)[0]) for _ in range(50)]

    assert run(3) == run(3) != run(4)


def test_a_message_that_is_too_long_is_an_error() -> None:
    world = ChannelWorld(2)
    world.channels[0].isend(1, torch.zeros(4, dtype=torch.int64), 0)
    with pytest.raises(ValueError, match="4 elements for a buffer of 3"):
        received(world, 1, 0)


def test_both_are_channels() -> None:
    from dgc.comm.mpi import MPIChannel

    assert isinstance(ChannelWorld(1).channels[0], Channel)
    assert all(hasattr(MPIChannel, name) for name in ("isend", "irecv", "test"))


def test_without_mpi_the_cure_is_named() -> None:
    pytest.importorskip("mpi4py")
    program = """
from dgc.comm.mpi import MPIChannel
try:
    MPIChannel()
except ValueError as error:
    print(error)
"""
    words = [python(), "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=patient(60), check=False)
    assert "need MPI" in done.stdout and "mpirun" in done.stdout, done.stderr
