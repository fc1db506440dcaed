"""Messages through host memory: the time of their launch, and that nothing else about them changes.

No GPU is needed: a stand-in for its event says when a copy is done.
"""

from typing import Any

import pytest
import torch
from optim.nets import same

from dgc import comm
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.staging import StagedTransport


class Copying:
    """An event that is over once `done` is called, or when a caller waits for it."""

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


@pytest.fixture(autouse=True)
def _forget() -> None:
    Copying.made.clear()


class OfADevice(StagedTransport):
    """Takes every tensor for one of a GPU."""

    _make_event = Copying

    @staticmethod
    def _needs_copy(tensor: Any) -> bool:
        return True


class Recording:
    """Passes launches on and keeps their names."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.launched: list[str] = []

    def __getattr__(self, name: Any) -> Any:
        return getattr(self._transport, name)

    def launch(self, name: Any, requests: Any, communicator: Any = "") -> Any:
        self.launched.append(name)
        return self._transport.launch(name, requests, communicator)


@pytest.fixture
def inner() -> Recording:
    return Recording(LockstepWorld(1).transports[0])


def launch(transport: Any, name: str = "a", communicator: str = "") -> Any:
    return transport.launch(name, (comm.AllReduce(torch.ones(3), "sum"),), communicator)


def test_a_message_is_launched_once_its_copy_is_complete(inner: Recording) -> None:
    transport = OfADevice(inner)
    work = launch(transport)
    assert inner.launched == [] and not transport.poll(work) and inner.launched == []
    Copying.made[0].over = True
    assert transport.poll(work) and inner.launched == ["a"]
    assert torch.equal(transport.wait(work)[0], torch.ones(3)) and inner.launched == ["a"]


def test_the_messages_of_a_lane_are_launched_in_order(inner: Recording) -> None:
    transport = OfADevice(inner)
    transport.open_communicator("other")
    works = [launch(transport, name, "other" if name == "c" else "") for name in "abc"]
    Copying.made[1].over = Copying.made[2].over = True
    assert not transport.poll(works[1]) and inner.launched == ["c"]
    Copying.made[0].over = True
    assert transport.poll(works[1]) and inner.launched == ["c", "a", "b"]


def test_waiting_waits_for_the_copy_first(inner: Recording) -> None:
    """Values are those at the launch: the copy is queued before any later operation on the sender's memory."""
    transport, own = OfADevice(inner), torch.ones(3)
    work = transport.launch("a", (comm.AllReduce(own),))
    own.zero_()
    (reply,) = transport.wait(work)
    assert Copying.made[0].over and torch.equal(reply, torch.ones(3))


def test_tensors_on_the_host_are_launched_at_once(inner: Recording) -> None:
    launch(StagedTransport(inner))
    assert inner.launched == ["a"] and not Copying.made


def test_ranks_that_wait_in_different_orders_do_not_deadlock() -> None:
    """A rank that waits first launches everything pending: the others may be waiting for it."""

    def body(transport: Any) -> Any:
        own = OfADevice(transport)
        works = {name: launch(own, name) for name in "ab"}
        return [own.wait(works[name])[0].tolist() for name in ("ab" if transport.rank else "ba")]

    assert LockstepWorld(2).run(body) == [[[2.0] * 3] * 2] * 2


REQUESTS = {
    "all-reduce": lambda rank: comm.AllReduce(torch.arange(4.0) + rank),
    "all-gather": lambda rank: comm.AllGather(torch.arange(4.0) + rank),
    "reduce-scatter": lambda rank: comm.ReduceScatter(torch.arange(4.0) + rank, "sum"),
    "broadcast": lambda rank: comm.Broadcast(torch.arange(4.0) + rank, 1),
    "all-to-all": lambda rank: comm.AllToAll(torch.arange(4.0) + rank, (1, 3), receives=(2 * rank + 1,) * 2),
    "exchange": lambda rank: comm.Exchange({1 - rank: torch.arange(4.0) + rank}, {1 - rank: torch.empty(4)}),
}


def leaves(reply: Any) -> Any:
    if isinstance(reply, torch.Tensor):
        return [reply]
    return list(reply.values()) if isinstance(reply, dict) else list(reply)


@pytest.mark.parametrize("make", REQUESTS.values(), ids=REQUESTS)
def test_replies_are_those_of_the_inner_transport(make: Any) -> None:
    def converse(transport: Any) -> Any:
        def body() -> Any:
            (reply,) = yield (make(transport.rank),)
            return leaves(reply)

        return comm.RunningConversation("t", body(), transport, comm.TrafficMeter()).finish()

    plain = LockstepWorld(2).run(converse)
    through = LockstepWorld(2).run(lambda transport: converse(OfADevice(transport)))
    assert all(map(same, plain, through))


def test_a_rank_that_only_receives_uses_host_memory() -> None:
    into = torch.zeros(3)
    work: Any = OfADevice(LockstepWorld(2).transports[0]).launch("a", (comm.Exchange({}, {1: into}),))
    assert len(Copying.made) == 1 and work.requests[0].receives[1] is not into


def test_ranks_are_those_of_the_inner_transport() -> None:
    transport = OfADevice(LockstepWorld(3).transports[2])
    assert (transport.rank, transport.size) == (2, 3)
    assert transport.group_size("world") == 3 and transport.group_rank("world") == 2
