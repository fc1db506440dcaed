"""The order in which buckets start."""

from typing import Any

from dgc.comm.lockstep import LockstepWorld
from dgc.optim.exchange.start_order import StartOrder


def step(order: StartOrder, arrivals: list[int]) -> list[list[int]]:
    """The buckets that start after each gradient, and at the end of a step."""
    started = []
    for bucket in arrivals:
        order.add(bucket)
        started.append(list(order.start()))
    started.append(list(order.start(only_full=False)))
    return started


def test_a_bucket_starts_when_it_and_all_before_it_are_full() -> None:
    order = StartOrder([2, 1, 1], LockstepWorld(1).transports[0], "test")
    assert step(order, [1, 0, 0, 2]) == [[], [], [0, 1], [2], []]


def test_buckets_that_are_not_full_start_at_the_end() -> None:
    order = StartOrder([1, 2, 1], LockstepWorld(1).transports[0], "test")
    assert step(order, [0, 1, 2]) == [[0], [], [], [1, 2]]
    order.reset()
    assert step(order, []) == [[0, 1, 2]], "a step begins with no gradients"


def test_every_rank_takes_over_the_order_of_rank_0() -> None:
    def body(transport: Any) -> list[list[int]]:
        order = StartOrder([1, 1, 1], transport, "test")
        for arrivals in [[2, 1, 0] if transport.rank == 0 else [1, 0, 2]] * 2:
            order.reset()
            started = step(order, arrivals)
            order.learn()
        return [order.buckets, *started]

    first, second = LockstepWorld(2).run(body)
    assert first == [[2, 1, 0], [2], [1], [0], []]
    assert second == [[2, 1, 0], [], [], [2, 1, 0], []]


def test_the_order_is_learned_in_a_step_in_which_rank_0_fills_buckets() -> None:
    def body(transport: Any) -> list[list[int]]:
        order = StartOrder([1, 1, 1], transport, "test")
        seen = []
        for arrivals in ([], [2], [1]):
            order.reset()
            step(order, arrivals)
            order.learn()
            seen.append(order.buckets)
        return seen

    expected = [[0, 1, 2], [2, 0, 1], [2, 0, 1]]
    assert LockstepWorld(2).run(body) == [expected, expected]
