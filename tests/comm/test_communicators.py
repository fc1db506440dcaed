"""Communicators: requests that are launched in one order on every rank."""

import pytest
import torch

from dgc.comm import AllReduce
from dgc.comm.lockstep import LockstepError, LockstepTransport, LockstepWorld


def test_another_order_is_an_error_in_a_strict_world_only() -> None:
    def body(transport: LockstepTransport) -> None:
        names = ["a", "b"] if transport.rank == 0 else ["b", "a"]
        works = [transport.launch(name, (AllReduce(torch.ones(1)),)) for name in names]
        for work in works:
            transport.wait(work)

    LockstepWorld(2, strict=False).run(body)
    with pytest.raises(LockstepError, match="rank 1 launches b as number 0 of communicator '', where another rank has"):
        LockstepWorld(2).run(body)


def test_lanes_have_an_order_of_their_own() -> None:
    def body(transport: LockstepTransport) -> None:
        transport.open_communicator("other")
        communicators = ["", "other"] if transport.rank == 0 else ["other", ""]
        works = [transport.launch(f"x{communicator}", (AllReduce(torch.ones(1)),), communicator) for communicator in communicators]
        for work in works:
            transport.wait(work)

    LockstepWorld(2).run(body)


def test_a_lane_must_be_opened() -> None:
    with pytest.raises(LockstepError, match="a: rank 0 has not opened the communicator 'other'"):
        LockstepWorld(1).transports[0].launch("a", (AllReduce(torch.ones(1)),), "other")
