"""Numbers that a conversation reads from its device."""

from typing import Any

import pytest
import torch

from dgc.bucket import make_bucket
from dgc.comm import AllReduce, TrafficMeter
from dgc.comm.lockstep import LockstepTransport, LockstepWorld
from dgc.comm.requests import Read, next_requests, read
from dgc.comm.staging import HostCopy
from dgc.compression import DenseResult, Reduced, StatelessCompressor
from dgc.engine.buckets import PlannedBucket, keep_states
from dgc.engine.loop import Engine


class SlowCopy(HostCopy):
    """Complete only once it is waited for, as on a device that has other work."""

    made: list["SlowCopy"] = []

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
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    SlowCopy.made.clear()
    monkeypatch.setattr("dgc.comm.conversation.HostCopy", SlowCopy)


def reading(rank: int) -> Any:
    """Reads its sum between two rounds, and after them."""
    (total,) = yield (AllReduce(torch.full((2,), float(rank + 1)), "sum"),)
    numbers = yield Read(total.int())
    (total,) = yield (AllReduce(total + sum(numbers), "sum"),)
    return (yield Read(total.int()))


class Reading(StatelessCompressor):
    result: Any = None

    def reduce(self, bucket: Any, state: Any) -> Any:
        self.result = yield from reading(state.rank)
        return Reduced(DenseResult(is_finite=True), state)


def test_finish_waits_for_what_is_read_and_advance_does_not() -> None:
    meter = TrafficMeter()

    def body(transport: LockstepTransport) -> Any:
        methods = [Reading(), Reading()]
        groups = []
        for name, method in zip("ab", methods, strict=True):
            bucket = make_bucket(name, [(name, torch.zeros(1))])
            groups.append([PlannedBucket(bucket, method, (torch.zeros(1),))])
        keep_states([plan for group in groups for plan in group], transport.size, transport.rank)
        engine = Engine(groups, transport, meter, "test")
        for g in range(2):
            engine.start(g)
        for _ in range(3):
            engine.advance()
        if transport.size == 1:
            assert [copy.waited for copy in SlowCopy.made] == [0]  # b launches its round 1 after a
        engine.finish()
        return [method.result for method in methods]

    assert LockstepWorld(1).run(body) == [[[3, 3]] * 2]
    assert [copy.waited for copy in SlowCopy.made] == [1] * 4
    assert meter.rounds == 4  # a read is no round
    assert LockstepWorld(2).run(body) == [[[18, 18]] * 2] * 2


def test_numbers_in_host_memory_are_read_at_once() -> None:
    with pytest.raises(StopIteration) as ended:
        next(read([torch.tensor(7), torch.tensor(True)]))
    assert ended.value.value == [7, 1]
    copy = HostCopy(torch.tensor([1, 2], dtype=torch.int32))
    assert copy.poll() and copy.wait() == [1, 2]


def test_without_a_transport_the_numbers_come_with_the_requests() -> None:
    conversation = reading(0)
    (first,) = next_requests(conversation)
    (second,) = next_requests(conversation, (first.tensor,))  # type: ignore[union-attr]
    assert second.tensor.tolist() == [3.0, 3.0]  # type: ignore[union-attr]
    with pytest.raises(StopIteration) as ended:
        next_requests(conversation, (second.tensor,))  # type: ignore[union-attr]
    assert ended.value.value == [3, 3]
