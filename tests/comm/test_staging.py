"""Messages and numbers through host memory, with stand-ins for an event and for a copy: no GPU is needed."""

from typing import Any

import pytest
import torch
from comm.test_lockstep import noting
from optim.nets import alone, same
from torch.utils._pytree import tree_leaves

from dgc import comm
from dgc.comm.lockstep import LockstepTransport, LockstepWorld
from dgc.comm.requests import Read, next_requests, read
from dgc.comm.staging import HostCopy, StagedTransport
from dgc.compression import DenseResult, Reduced, StatelessCompressor
from dgc.core.bucket import make_bucket
from dgc.engine.buckets import PlannedBucket, keep_states
from dgc.engine.loop import Engine


class Copying:
    """An event that is over once `over` is set, or when a caller waits for it."""

    made: list[Any] = []

    def __init__(self) -> None:
        self.recorded = self.over = False
        self.made.append(self)

    def record(self) -> None:
        self.recorded = True

    def query(self) -> Any:
        assert self.recorded
        return self.over

    def synchronize(self) -> None:
        assert self.recorded
        self.over = True


class SlowCopy(HostCopy):
    """Complete only once it is waited for, as on a device that has other work."""

    made: list[Any] = []

    def __init__(self, numbers: torch.Tensor):
        super().__init__(numbers)
        self.waited = 0
        self.made.append(self)

    def poll(self, work: Any = None) -> bool:
        return self.waited > 0

    def wait(self, work: Any = None) -> list[int]:
        self.waited += 1
        return super().wait()


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Copying, "made", [])
    monkeypatch.setattr(SlowCopy, "made", [])
    monkeypatch.setattr("dgc.comm.conversation.HostCopy", SlowCopy)


class OfADevice(StagedTransport):
    """Takes every tensor for one of a GPU."""

    _make_event = Copying

    @staticmethod
    def _needs_copy(tensor: Any) -> bool:
        return True


def launch(transport: Any, name: str = "a", communicator: str = "") -> Any:
    return transport.launch(name, (comm.AllReduce(torch.ones(3), "sum"),), communicator)


def test_a_message_is_launched_once_its_copy_is_complete() -> None:
    transport = OfADevice(inner := noting())
    work = launch(transport)
    assert inner.launched == [] and not transport.poll(work) and inner.launched == []
    Copying.made[0].over = True
    assert transport.poll(work) and inner.launched == ["a"]
    assert torch.equal(transport.wait(work)[0], torch.ones(3)) and inner.launched == ["a"]


def test_a_message_of_the_host_is_launched_at_once() -> None:
    launch(StagedTransport(inner := noting()), "b")
    assert inner.launched == ["b"] and len(Copying.made) == 0


def test_a_rank_that_only_receives_uses_host_memory() -> None:
    into = torch.zeros(3)
    receiving: Any = OfADevice(LockstepWorld(2).transports[0]).launch("a", (comm.Exchange({}, {1: into}),))
    assert len(Copying.made) == 1 and receiving.requests[0].receives[1] is not into


def test_messages_are_launched_in_the_order_of_their_communicator() -> None:
    lanes = OfADevice(noted := noting())
    lanes.open_communicator("other")
    works = [launch(lanes, name, "other" if name == "c" else "") for name in "abc"]
    first, second, third = Copying.made
    second.over = third.over = True
    assert not lanes.poll(works[1]) and noted.launched == ["c"]
    first.over = True
    assert lanes.poll(works[1]) and noted.launched == ["c", "a", "b"]


def test_a_message_has_the_values_at_its_launch() -> None:
    waiting, sent = OfADevice(alone()), torch.ones(3)
    waited = waiting.launch("a", (comm.AllReduce(sent),))
    sent.zero_()
    (reply,) = waiting.wait(waited)
    assert Copying.made[-1].over and torch.equal(reply, torch.ones(3))


def test_ranks_may_wait_for_messages_in_different_orders() -> None:
    def in_any_order(transport: Any) -> Any:
        own = OfADevice(transport)
        launched = {name: launch(own, name) for name in "ab"}
        return [own.wait(launched[name])[0].tolist() for name in ("ab" if transport.rank else "ba")]

    assert LockstepWorld(2).run(in_any_order) == [[[2.0] * 3] * 2] * 2


REQUESTS: list[Any] = [
    lambda rank: comm.AllReduce(torch.arange(4.0) + rank),
    lambda rank: comm.AllGather(torch.arange(4.0) + rank),
    lambda rank: comm.ReduceScatter(torch.arange(4.0) + rank, "sum"),
    lambda rank: comm.Broadcast(torch.arange(4.0) + rank, 1),
    lambda rank: comm.AllToAll(torch.arange(4.0) + rank, (1, 3), receives=(2 * rank + 1,) * 2),
    lambda rank: comm.Exchange({1 - rank: torch.arange(4.0) + rank}, {1 - rank: torch.empty(4)}),
]


def test_it_has_the_ranks_of_the_inner_transport() -> None:
    transport = OfADevice(LockstepWorld(3).transports[2])
    assert (transport.rank, transport.size) == (2, 3)
    assert transport.group_size("world") == 3 and transport.group_rank("world") == 2


@pytest.mark.parametrize("make", REQUESTS, ids=lambda make: type(make(0)).__name__)
def test_it_has_the_replies_of_the_inner_transport(make: Any) -> None:
    def reply(transport: Any) -> Any:
        def body() -> Any:
            (reply,) = yield (make(transport.rank),)
            return tree_leaves(reply)

        return comm.RunningConversation("t", body(), transport, comm.TrafficMeter()).finish()

    plain = LockstepWorld(2).run(reply)
    through = LockstepWorld(2).run(lambda transport: reply(OfADevice(transport)))
    assert all(map(same, plain, through)) and any(len(replies) for replies in plain)


def reading(rank: int) -> Any:
    """Reads its sum between two rounds, and after them."""
    (total,) = yield (comm.AllReduce(torch.full((2,), float(rank + 1)), "sum"),)
    numbers = yield Read(total.int())
    (total,) = yield (comm.AllReduce(total + sum(numbers), "sum"),)
    return (yield Read(total.int()))


class Reading(StatelessCompressor):
    result: Any = None

    def reduce(self, bucket: Any, state: Any) -> Any:
        self.result = yield from reading(state.rank)
        return Reduced(DenseResult(is_finite=True), state)


@pytest.fixture
def read_in_two_buckets() -> Any:
    """A function of the ranks: what the compressors of two buckets have read, and the meter of all ranks."""
    meter = comm.TrafficMeter()

    def body(transport: LockstepTransport) -> Any:
        methods, buckets = [Reading(), Reading()], [make_bucket(name, [(name, torch.zeros(1))]) for name in "ab"]
        plans = [PlannedBucket(b, method, (torch.zeros(1),)) for b, method in zip(buckets, methods, strict=True)]
        keep_states(plans, transport.size, transport.rank)
        engine = Engine([[plan] for plan in plans], transport, meter, "test")
        for g in range(2):
            engine.start(g)
        for _ in range(3):
            engine.advance()
        waited = [copy.waited for copy in SlowCopy.made]
        engine.finish()
        return [method.result for method in methods], waited

    return lambda size: (LockstepWorld(size).run(body), meter)


def test_advance_does_not_wait_for_what_is_read(read_in_two_buckets: Any) -> None:
    (((_, waited),), _) = read_in_two_buckets(1)
    assert waited == [0]  # b launches its round 1 after a


def test_finish_waits_for_what_is_read(read_in_two_buckets: Any) -> None:
    (((found, _),), _) = read_in_two_buckets(1)
    assert found == [[3, 3]] * 2
    assert [copy.waited for copy in SlowCopy.made] == [1] * 4


def test_a_read_is_no_round(read_in_two_buckets: Any) -> None:
    assert read_in_two_buckets(1)[1].rounds == 4


def test_all_ranks_read_the_same_sums(read_in_two_buckets: Any) -> None:
    ranks, _ = read_in_two_buckets(2)
    assert [found for found, _ in ranks] == [[[18, 18]] * 2] * 2


def test_numbers_in_host_memory_are_read_without_a_request() -> None:
    with pytest.raises(StopIteration) as ended:
        next(read([torch.tensor(7), torch.tensor(True)]))
    assert ended.value.value == [7, 1]


def test_a_copy_of_host_memory_is_complete_at_once() -> None:
    copy = HostCopy(torch.tensor([1, 2], dtype=torch.int32))
    assert copy.poll() and copy.wait() == [1, 2]


def test_without_a_transport_numbers_are_read_between_the_requests() -> None:
    conversation = reading(0)
    first: Any = next_requests(conversation)[0]
    second: Any = next_requests(conversation, (first.tensor,))[0]
    assert second.tensor.tolist() == [3.0, 3.0]
    with pytest.raises(StopIteration) as ended:
        next_requests(conversation, (second.tensor,))
    assert ended.value.value == [3, 3]
