"""Channels: order, tags, memory, and the start of the MPI channel."""

import subprocess
from typing import Any

import pytest
import torch
from channels import ChannelWorld
from environment import patient
from warm import python

from dgc.comm.channel import Channel


def send(world: Any, source: Any, to: Any, *content: int, tag: int = 0) -> Any:
    message = torch.tensor(content)
    return message, world.channels[source].isend(to, message, tag)


def received(world: Any, rank: Any, tag: Any = 0, tests: int = 200) -> Any:
    buffer = torch.zeros(3, dtype=torch.int64)
    handle = world.channels[rank].irecv(buffer, tag)
    return next((buffer.tolist() for _ in range(tests) if world.channels[rank].test(handle)), None)


def test_messages_of_one_rank_arrive_in_order_and_the_same_seed_gives_the_same_times() -> None:
    def arrived(seed: int) -> Any:
        world = ChannelWorld(3, seed)
        for number in range(30):
            for source in (0, 1):
                send(world, source, 2, source, number)
        assert world.in_flight == 60
        found = [received(world, 2)[:2] for _ in range(60)]
        assert [n for s, n in found if s == 0] == [n for s, n in found if s == 1] == list(range(30))
        assert [s for s, _ in found] != [0, 1] * 30
        assert world.in_flight == 0 and received(world, 2) is None
        return found

    orders = [arrived(seed) for seed in range(5)]
    assert orders[0] == arrived(0) != orders[1]


def test_a_receive_takes_only_its_tag() -> None:
    world = ChannelWorld(2)
    for tag in (1, 2):
        send(world, 0, 1, tag, tag=tag)
    assert received(world, 1, 3) is None
    assert received(world, 1, 2)[0] == 2 and received(world, 1, 1)[0] == 1


def test_a_message_is_sent_once_it_is_copied() -> None:
    """About half of the messages at once, the others when they are received."""
    world = ChannelWorld(2)
    messages, handles = zip(*(send(world, 0, 1, n) for n in range(40)), strict=True)
    gone = [world.channels[0].test(handle) for handle in handles]
    assert 5 < sum(gone) < 35
    for message in messages:
        message += 100
    arrived = [received(world, 1)[0] for _ in messages]
    assert arrived == [n if at_once else n + 100 for n, at_once in enumerate(gone)]
    assert all(map(world.channels[0].test, handles))


def test_a_message_that_is_too_long_is_an_error() -> None:
    world = ChannelWorld(2)
    send(world, 0, 1, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="4 elements for a buffer of 3"):
        received(world, 1)


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
