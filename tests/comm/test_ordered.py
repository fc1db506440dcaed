"""Conversations whose rounds are launched in one order on every rank."""

import random
from typing import Any

import pytest
import torch
from cases import case

from dgc.comm import AllReduce, TrafficMeter
from dgc.comm.conversation import LANES, OrderedConversations
from dgc.comm.lockstep import LockstepError, LockstepTransport, LockstepWorld


def rounds(rank: int, number: int) -> Any:
    total = 0.0
    for r in range(number):
        (reply,) = yield (AllReduce(torch.tensor([float(rank + r)]), "sum"),)
        total += reply.item()
    return total


class Late(LockstepTransport):
    """Replies arrive at random, at other times on each rank."""

    def __init__(self, world: LockstepWorld, rank: int):
        super().__init__(world, rank)
        self.random = random.Random(rank)

    def poll(self, flight: Any) -> bool:
        return self.random.random() < 0.6 and super().poll(flight)


def exchange(transport: LockstepTransport, numbers: tuple[int, ...], seed: int) -> Any:
    """Starts one conversation for each number of rounds, and advances them a random number of times."""
    late = Late(transport._world, transport.rank)
    late.random.seed(7 * seed + transport.rank)
    conversations: Any = OrderedConversations("test", late, TrafficMeter())
    for step in range(3):
        for i, number in enumerate(numbers):
            conversations.start(f"bucket{i}", rounds(transport.rank, number))
            for _ in range(late.random.randrange(4)):
                conversations.advance()
        results = conversations.finish()
        assert len(conversations) == 0, step
    return results


def test_rounds_are_launched_in_one_order_whatever_arrives_first() -> None:
    for size in (2, 3):
        for numbers in ((1, 1, 1), (2, 2, 2), (1, 3, 2, 1), (LANES + 3, 2, LANES + 2, 1)):
            for seed in range(8):
                with case(size, numbers, seed):
                    expected = [sum(sum(range(size)) + size * r for r in range(n)) for n in numbers]
                    body = lambda transport, numbers=numbers, seed=seed: exchange(transport, numbers, seed)  # noqa: E731
                    assert LockstepWorld(size).run(body) == [expected] * size


def test_another_order_is_an_error_in_a_strict_world_only() -> None:
    def body(transport: LockstepTransport) -> None:
        names = ["a", "b"] if transport.rank == 0 else ["b", "a"]
        flights = [transport.launch(name, (AllReduce(torch.ones(1)),)) for name in names]
        for flight in flights:
            transport.wait(flight)

    LockstepWorld(2, strict=False).run(body)
    with pytest.raises(LockstepError, match="rank 1 launches b as number 0 of lane '', where another rank has"):
        LockstepWorld(2).run(body)


def test_lanes_have_an_order_of_their_own() -> None:
    def body(transport: LockstepTransport) -> None:
        transport.open_lane("other")
        lanes = ["", "other"] if transport.rank == 0 else ["other", ""]
        flights = [transport.launch(f"x{lane}", (AllReduce(torch.ones(1)),), lane) for lane in lanes]
        for flight in flights:
            transport.wait(flight)

    LockstepWorld(2).run(body)


def test_a_lane_must_be_opened() -> None:
    with pytest.raises(LockstepError, match="a: rank 0 has not opened the lane 'other'"):
        LockstepWorld(1).transports[0].launch("a", (AllReduce(torch.ones(1)),), "other")
