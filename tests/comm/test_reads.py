"""Numbers that a conversation reads from its device."""

from typing import Any

import pytest
import torch

from dgc.comm import AllReduce, TrafficMeter
from dgc.comm.conversation import OrderedConversations
from dgc.comm.lockstep import LockstepTransport, LockstepWorld
from dgc.comm.requests import Read, next_requests, read
from dgc.comm.staging import HostCopy


class SlowCopy(HostCopy):
    """Complete only once it is waited for, as on a device that has other work."""

    made: list["SlowCopy"] = []

    def __init__(self, numbers: torch.Tensor):
        super().__init__(numbers)
        self.waited = 0
        self.made.append(self)

    def poll(self) -> bool:
        return self.waited > 0

    def wait(self) -> list[int]:
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


def test_finish_waits_for_what_is_read_and_advance_does_not() -> None:
    meter = TrafficMeter()

    def body(transport: LockstepTransport) -> Any:
        conversations: Any = OrderedConversations("test", transport, meter)
        for name in "ab":
            conversations.start(name, reading(transport.rank))
        for _ in range(3):
            conversations.advance()
        if transport.size == 1:
            assert [copy.waited for copy in SlowCopy.made] == [0]  # b launches its round 1 after a
        return conversations.finish()

    assert LockstepWorld(1).run(body) == [[[3, 3]] * 2]
    assert [copy.waited for copy in SlowCopy.made] == [1] * 4
    assert meter.rounds == 4  # a read is no round
    assert LockstepWorld(2).run(body) == [[[18, 18]] * 2] * 2


def test_numbers_in_host_memory_are_read_at_once() -> None:
    with pytest.raises(StopIteration) as ended:
        next(read([torch.tensor(7), torch.tensor(True)]))
    assert ended.value.value == [7, 1]


def test_a_copy_on_the_host_is_complete() -> None:
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
