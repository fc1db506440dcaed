"""Messages by way of host memory: when they leave, and that nothing else about them changes.

No GPU is needed: a stand-in for its event says when a copy is done.
"""

import pytest
import torch

from dgc.comm import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Meter, ReduceScatter, RunningConversation
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.staging import Staged


class Copying:
    """An event that is over once `done` is called, or when somebody waits for it."""

    made = []

    def __init__(self):
        self.recorded = self.over = False
        self.made.append(self)

    def record(self):
        self.recorded = True

    def query(self):
        assert self.recorded
        return self.over

    def synchronize(self):
        assert self.recorded
        self.over = True


@pytest.fixture(autouse=True)
def _forget():
    Copying.made.clear()


def staged(transport, remote=True):
    return Staged(transport, is_remote=lambda tensor: remote, make_event=Copying)


class Recording:
    """Passes launches on and keeps their names."""

    def __init__(self, transport):
        self._transport, self.launched = transport, []

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def launch(self, name, requests):
        self.launched.append(name)
        return self._transport.launch(name, requests)


def test_a_message_leaves_once_its_copy_is_done():
    carrier = Recording(LockstepWorld(1).transports[0])
    transport = staged(carrier)
    flight = transport.launch("a", (AllReduce(torch.ones(3)),))
    assert carrier.launched == [] and not transport.poll(flight) and carrier.launched == []
    Copying.made[0].over = True
    assert transport.poll(flight) and carrier.launched == ["a"]
    assert torch.equal(transport.wait(flight)[0], torch.ones(3)) and carrier.launched == ["a"]


def test_waiting_waits_for_the_copy_first():
    transport = staged(Recording(LockstepWorld(1).transports[0]))
    flight = transport.launch("a", (AllReduce(torch.ones(3)),))
    (reply,) = transport.wait(flight)
    assert Copying.made[0].over and torch.equal(reply, torch.ones(3))


def test_tensors_of_the_host_leave_at_once():
    carrier = Recording(LockstepWorld(1).transports[0])
    staged(carrier, remote=False).launch("a", (AllReduce(torch.ones(3)),))
    assert carrier.launched == ["a"] and not Copying.made


def test_what_is_sent_is_what_it_was_at_the_launch():
    """The sender may use its memory again at once: the copy is queued before whatever it does next."""
    transport = staged(LockstepWorld(1).transports[0])
    own = torch.ones(3)
    flight = transport.launch("a", (AllReduce(own),))
    own.zero_()
    assert torch.equal(transport.wait(flight)[0], torch.ones(3))


def test_ranks_that_wait_in_another_order_do_not_wait_for_ever():
    """Whoever waits hands over everything it holds: the others may be waiting for just that."""

    def body(transport):
        own = staged(transport)
        flights = {name: own.launch(name, (AllReduce(torch.ones(1), "sum"),)) for name in "ab"}
        return [own.wait(flights[name])[0].item() for name in ("ab" if transport.rank else "ba")]

    assert LockstepWorld(2).run(body) == [[2.0, 2.0]] * 2


REQUESTS = {
    "all-reduce": lambda rank: AllReduce(torch.arange(4.0) + rank),
    "all-gather": lambda rank: AllGather(torch.arange(4.0) + rank),
    "reduce-scatter": lambda rank: ReduceScatter(torch.arange(4.0) + rank, "sum"),
    "broadcast": lambda rank: Broadcast(torch.arange(4.0) + rank, 1),
    "all-to-all": lambda rank: AllToAll(torch.arange(4.0) + rank, (1, 3)),
    "exchange": lambda rank: Exchange({1 - rank: torch.arange(4.0) + rank}, {1 - rank: torch.empty(4)}),
}


def leaves(reply):
    if isinstance(reply, torch.Tensor):
        return [reply]
    return list(reply.values()) if isinstance(reply, dict) else list(reply)


@pytest.mark.parametrize("make", REQUESTS.values(), ids=REQUESTS)
def test_replies_are_those_of_the_carrier(make):
    def talk(transport):
        def body():
            (reply,) = yield (make(transport.rank),)
            return leaves(reply)

        return RunningConversation("t", body(), transport, Meter()).finish()

    plain = LockstepWorld(2).run(talk)
    through = LockstepWorld(2).run(lambda transport: talk(staged(transport)))
    for a, b in zip(plain, through, strict=True):
        assert len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_rank_that_only_receives_does_so_by_way_of_the_host():
    carrier = Recording(LockstepWorld(2).transports[0])
    into = torch.zeros(3)
    flight = staged(carrier).launch("a", (Exchange({}, {1: into}),))
    assert len(Copying.made) == 1 and flight.requests[0].receives[1] is not into


def test_it_has_the_carriers_place_in_the_world():
    carrier = LockstepWorld(3).transports[2]
    transport = staged(carrier)
    assert (transport.rank, transport.size) == (2, 3)
    assert transport.group_size("world") == 3 and transport.group_rank("world") == 2
