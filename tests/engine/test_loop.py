"""The loop of a step: order of start, arrivals in any order, dropped steps and exceptions."""

import random
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cases import case
from on_ranks import on_ranks

from dgc import compression as methods
from dgc.comm import AllReduce, TrafficMeter
from dgc.comm.lockstep import LockstepTransport, LockstepWorld
from dgc.core.bucket import make_bucket
from dgc.engine.buckets import PlannedBucket, keep_states, plan_buckets
from dgc.engine.loop import COMMUNICATORS, Engine, StartOrder
from dgc.memory import DGCSGDMemory

SHAPES = [(8, 6), (5,), (4, 4, 3), (12, 2), (1, 7), (9, 3)]


def step(order: StartOrder, arrivals: list[int]) -> list[list[int]]:
    """The buckets that start after each gradient, and at the end of a step."""
    started = []
    for bucket in arrivals:
        order.add(bucket)
        started.append(list(order.start()))
    started.append(list(order.start(only_full=False)))
    return started


@pytest.mark.parametrize(
    ("numbers", "arrivals", "started"),
    [
        ([2, 1, 1], [1, 0, 0, 2], [[], [], [0, 1], [2], []]),
        ([1, 2, 1], [0, 1, 2], [[0], [], [], [1, 2]]),
    ],
)
def test_a_bucket_waits_for_those_before_it_or_for_the_end(numbers: Any, arrivals: Any, started: Any) -> None:
    assert step(StartOrder(numbers, LockstepWorld(1).transports[0], "test"), arrivals) == started


def test_a_step_begins_with_no_gradients() -> None:
    order = StartOrder([1, 2, 1], LockstepWorld(1).transports[0], "test")
    step(order, [0, 1, 2])
    order.reset()
    assert step(order, []) == [[0, 1, 2]]


def orders(transport: Any, steps: list[tuple[list[int], list[int]]]) -> list[list[int]]:
    """What starts in the last of these steps. steps: the arrivals of each, and the order after it."""
    order = StartOrder([1, 1, 1], transport, "test")
    for arrivals, expected in steps:
        order.reset()
        started = step(order, arrivals)
        if not order.is_learned:
            order.learn()
        assert order.groups == expected
    return started


@on_ranks(2)
def test_every_rank_takes_over_the_order_of_rank_0(transport: Any) -> None:
    first = transport.rank == 0
    started = orders(transport, [([2, 1, 0] if first else [1, 0, 2], [2, 1, 0])] * 2)
    assert started == ([[2], [1], [0], []] if first else [[], [], [2, 1, 0], []])


@on_ranks(2)
def test_the_order_is_learned_once_rank_0_fills_buckets(transport: Any) -> None:
    orders(transport, [([], [0, 1, 2]), ([2], [2, 0, 1]), ([1], [2, 0, 1])])


class Late(LockstepTransport):
    def __init__(self, transport: LockstepTransport, seed: int):
        super().__init__(transport._world, transport.rank)
        self.random = random.Random(seed + transport.rank)

    def poll(self, work: Any) -> bool:
        return self.random.random() < 0.5 and super().poll(work)


class Run:
    def __init__(self, transport: LockstepTransport, bucket_mb: float = 1e-6):
        dgc, dense = methods.DGCCompressor(0.25, DGCSGDMemory(momentum=0.9)), methods.DenseCompressor()
        kinds: list[methods.Compressor] = [dgc, dense, methods.PowerSGDCompressor(rank=1)]
        self.parameters = [torch.zeros(shape) for shape in SHAPES]
        named = [(f"p{i}", p) for i, p in enumerate(self.parameters)]
        of_name = {name: kinds[i % 3] if p.dim() > 1 else dense for i, (name, p) in enumerate(named)}
        planned = plan_buckets(named, lambda segment: of_name[segment.name], bucket_mb, "test")
        self.methods = kinds[::2]
        self.kept = keep_states(planned, transport.size, transport.rank, self.methods)[:2]
        self.rank, self.steps, self.begin = transport.rank, 0, Mock()
        self.engine = Engine([[plan] for plan in planned], transport, TrafficMeter(), "test", self.begin)

    def fill(self, bad: int | None = None) -> None:
        generator = torch.Generator().manual_seed(100 * self.steps + self.rank)
        for b, (plan,) in enumerate(self.engine.groups):
            plan.bucket.flat.copy_(torch.randn(plan.bucket.numel, generator=generator))
            if b == bad:
                plan.bucket.flat[-1] = float("nan")
        self.steps += 1

    def step(self, arrivals: random.Random | None, bad: int | None = None) -> str | None:
        """One step. arrivals: fills the buckets in a random order, and advances at random times."""
        self.fill(bad)
        order = list(range(len(self.engine.groups)))
        if arrivals is not None:
            arrivals.shuffle(order)
        for b in order:
            full = [self.engine.order.add(b) for _ in self.engine.groups[b][0].parameters]
            assert full == [False] * (len(full) - 1) + [True]
            for started in self.engine.order.start():
                self.engine.start(started)
            for _ in range(arrivals.randrange(3) if arrivals else 0):
                self.engine.advance()
        outcome = self.engine.finish(learn=arrivals is not None)
        names = [plan.bucket.name for plan, _ in outcome.results]
        assert names == [group[0].bucket.name for group in self.engine.groups], "the order of the plan"
        if outcome.nonfinite is None:
            for plan, result in outcome.results:
                result.write_to(plan.bucket)
        return outcome.nonfinite

    def means_and_states(self) -> Any:
        means = [group[0].bucket.flat.clone() for group in self.engine.groups]
        return means, [{**states.state_dict(), "method": None} for states in self.kept]


class Rounds(methods.StatelessCompressor):
    """Adds a number in each of some rounds, and leaves the sum of all replies in the bucket."""

    def __init__(self, number: int, rank: int):
        self.number, self.rank = number, rank

    def reduce(self, bucket: Any, state: Any) -> Any:
        bucket.flat.zero_()
        for r in range(self.number):
            (reply,) = yield (AllReduce(torch.tensor([float(self.rank + r)]), "sum"),)
            bucket.flat.add_(reply)
        return methods.Reduced(methods.DenseResult(), state)


def engine_of(planned: list[PlannedBucket], transport: LockstepTransport) -> Engine:
    keep_states(planned, transport.size, transport.rank)
    return Engine([[plan] for plan in planned], transport, TrafficMeter(), "test")


def sums(transport: LockstepTransport, numbers: tuple[int, ...], seed: int) -> list[float]:
    """The sums of conversations of these numbers of rounds, which are advanced a random number of times."""
    late, planned = Late(transport, 7 * seed), []
    for i, number in enumerate(numbers):
        bucket = make_bucket(f"bucket{i}", [(f"p{i}", torch.zeros(1))])
        planned.append(PlannedBucket(bucket, Rounds(number, transport.rank), (torch.zeros(1),)))
    engine = engine_of(planned, late)
    for _ in range(3):
        for g in range(len(numbers)):
            engine.start(g)
            for _ in range(late.random.randrange(4)):
                engine.advance()
        outcome = engine.finish()
        assert not engine.in_flight
    return [float(plan.bucket.flat) for plan, _ in outcome.results]


DEEP = (COMMUNICATORS + 3, 2, COMMUNICATORS + 2, 1)


@pytest.mark.parametrize("numbers", [(1, 1, 1), (2, 2, 2), (1, 3, 2, 1), DEEP])
@pytest.mark.parametrize("size", [2, 3])
def test_rounds_are_launched_in_one_order_whatever_arrives_first(size: int, numbers: Any) -> None:
    expected = [sum(sum(range(size)) + size * r for r in range(n)) for n in numbers]
    for seed in range(8):
        with case("seed", seed):
            assert LockstepWorld(size).run(partial(sums, numbers=numbers, seed=seed)) == [expected] * size


class WhileWaiting(LockstepTransport):
    """Replies arrive while a call waits: the reply that it waits for, and all that are of later rounds than 0.

    events: Gets the names of the messages that calls have waited for.
    """

    def __init__(self, world: LockstepWorld, events: list[str]):
        super().__init__(world, 0)
        self.events, self.launched, self.arrived = events, list[tuple[str, Any]](), list[Any]()

    def launch(self, name: str, requests: Any, communicator: str = "") -> Any:
        work = super().launch(name, requests, communicator)
        self.launched.append((name, work))
        return work

    def poll(self, work: Any) -> bool:
        return any(work is other for other in self.arrived)

    def wait(self, work: Any) -> Any:
        if not self.poll(work):
            self.events += [f"wait for {name}" for name, other in self.launched if other is work]
            self.arrived += [other for name, other in self.launched if other is work or not name.endswith(".0")]
        return super().wait(work)


class Told(Rounds):
    def __init__(self, events: list[str]):
        super().__init__(2, 0)
        self.events = events

    def reduce(self, bucket: Any, state: Any) -> Any:
        reduced = yield from super().reduce(bucket, state)
        self.events.append(f"end of {bucket.name}")
        return reduced


def test_a_bucket_ends_while_the_step_waits_for_a_later_one() -> None:
    events: list[str] = []
    transport, planned = WhileWaiting(LockstepWorld(1), events), []
    for name in "abc":
        planned.append(PlannedBucket(make_bucket(name, [(name, torch.zeros(1))]), Told(events), (torch.zeros(1),)))
    engine = engine_of(planned, transport)
    for g in range(3):
        engine.start(g)
    engine.finish()
    assert events[:4] == ["wait for a.0", "wait for b.0", "end of a", "wait for c.0"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_neither_means_nor_states_depend_on_what_arrives_first(size: int, seed: int) -> None:
    def body(transport: LockstepTransport) -> None:
        arrivals = random.Random(seed)  # the same on every rank, as the order of backward
        early, at_end = Run(Late(transport, 10 * seed)), Run(transport)
        for _ in range(3):
            assert early.step(arrivals) is None and at_end.step(None) is None
            torch.testing.assert_close(early.means_and_states(), at_end.means_and_states(), rtol=0, atol=0)
        assert early.begin.call_count == 3 and not early.engine.in_flight

    LockstepWorld(size, strict=False).run(body)


BUCKETS = len(Run(LockstepWorld(1).transports[0]).engine.groups)


def test_there_are_more_buckets_than_methods() -> None:
    assert BUCKETS > 3


@pytest.mark.parametrize("bad", range(BUCKETS))
@on_ranks(2)
def test_a_step_is_dropped_for_all_methods_if_one_bucket_of_one_rank_is_not_finite(
    transport: Any, bad: int
) -> None:
    run = Run(transport)
    run.step(None)
    reason = run.step(None, bad=bad if transport.rank == 1 else None)
    assert reason is not None and "rank 1" in reason
    for name, error in run.kept[1].state_dict()["errors"].items():  # of PowerSGD: gradients wait to be sent
        assert error.isfinite().all(), name
    assert run.step(None) is None, "the next step is an ordinary one"


def test_after_an_exception_of_a_method_nothing_continues() -> None:
    run = Run(LockstepWorld(1).transports[0])
    run.fill()
    engine = run.engine
    dense = next(group[0].compressor for group in engine.groups if group[0].compressor not in run.methods)

    dense.reduce = Mock(side_effect=KeyError("of the method"))  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        for g in range(len(engine.groups)):
            engine.start(g)
    uses: list[Any] = [partial(engine.start, 0), engine.advance, partial(engine.check_ended, "backward()")]
    for use in (*uses, engine.finish):
        with pytest.raises(RuntimeError, match="ended with an exception, KeyError: 'of the method'"):
            use()


def test_a_step_that_began_to_send_does_not_begin_again() -> None:
    run = Run(LockstepWorld(1).transports[0])
    run.fill()
    run.engine.check_ended("backward()")
    run.engine.start(0)
    with pytest.raises(RuntimeError, match=r"in backward\(\), while gradients were exchanged"):
        run.engine.check_ended("backward()")


def test_the_loop_asks_only_for_replies_that_let_it_continue() -> None:
    transport = LockstepTransport(LockstepWorld(1), 0)
    transport.poll = polls = Mock(return_value=False)  # type: ignore[method-assign]
    named = [(f"p{i}", torch.zeros(4)) for i in range(320)]
    planned = plan_buckets(named, lambda segment: methods.DenseCompressor(), 1e-6, "test")
    engine = engine_of(planned, transport)
    for g in range(len(planned)):
        engine.start(g)
        engine.advance()
    assert len(planned) == 320 and polls.call_count == 320
