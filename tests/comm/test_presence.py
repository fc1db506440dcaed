"""Which ranks are gone, as the error of a rank that has waited for them says, in one process."""

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from unittest.mock import Mock

import pytest

from dgc.comm.presence import Address, Presence, absent, explain, own_ip, state_of, stopped

HOST = socket.gethostname()


@pytest.fixture
def ranks() -> Iterator[list[Presence]]:
    made = [Presence("127.0.0.1") for _ in range(4)]
    yield made
    for presence in made:
        presence.close()


def told(ranks: list[Presence], waited_for: list[int]) -> str:
    return explain(waited_for, [presence.address for presence in ranks], limit=0.0)


def test_a_rank_that_has_ended_is_named_with_its_machine(ranks: list[Presence]) -> None:
    ranks[2].close()
    assert told(ranks, [1, 2, 3]) == f"rank 2 ({HOST}) has ended: its output has the reason"
    ranks[1].close()
    both = f"ranks 1 ({HOST}), 2 ({HOST}) have ended: the first error in their output is the reason"
    assert told(ranks, [1, 2, 3]) == both


def test_a_rank_that_others_than_this_one_waited_for_is_not_named(ranks: list[Presence]) -> None:
    ranks[2].close()
    assert told(ranks, [1]).startswith(
        f"this rank has waited for rank 1 ({HOST}), whose process exists: it is stopped"
    )


def test_of_several_processes_that_exist_none_is_blamed(ranks: list[Presence]) -> None:
    assert told(ranks, [1, 2, 3]).startswith(
        f"this rank has waited for ranks 1 ({HOST}), 2 ({HOST}), 3 ({HOST}), whose processes exist. It cannot be "
    )


def test_a_rank_without_an_address_may_be_the_one_that_is_gone(ranks: list[Presence]) -> None:
    ranks[2].address = None
    assert told(ranks, [1, 2]).startswith(
        f"this rank has waited for ranks 1 ({HOST}), 2, and it cannot be known which of them is gone"
    )


def test_a_stopped_process_of_this_machine_is_named_also_if_others_have_ended(ranks: list[Presence]) -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        process.send_signal(signal.SIGSTOP)
        while state_of(process.pid) != "T":
            time.sleep(0.01)
        assert ranks[3].address is not None
        ranks[3].address = ranks[3].address._replace(pid=process.pid)
        ranks[2].close()
        assert told(ranks, [1, 2, 3]).startswith(
            f"rank 3 ({HOST}) is stopped, as by SIGSTOP or a debugger: let process {process.pid} go on"
        )
        assert told(ranks, [1, 2]) == f"rank 2 ({HOST}) has ended: its output has the reason"
        process.kill()


def test_a_process_of_another_machine_is_not_taken_for_the_one_with_its_number_here(ranks: list[Presence]) -> None:
    address = Address("node7", "192.0.2.1", 1, 1234)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dgc.comm.presence.state_of", lambda pid: "T")
        assert ranks[1].address is not None
        assert stopped({0: address, 1: ranks[1].address}) == [1]


def test_a_loopback_address_of_another_machine_says_nothing(ranks: list[Presence]) -> None:
    """As of a machine that knows its own name as 127.0.1.1."""
    ranks[2].close()
    assert ranks[2].address is not None
    ranks[2].address = ranks[2].address._replace(host="node7")
    assert told(ranks, [2]) == (
        "this rank has waited for rank 2, and it cannot be known whether it is gone: see its output"
    )


def test_a_machine_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    with closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as server:
        address = Address("node7", "127.0.0.1", server.getsockname()[1], pid=0)
        full = []
        for _ in range(4):  # the system drops further connections
            full.append(socket.socket())
            full[-1].setblocking(False)
            full[-1].connect_ex(server.getsockname())
        assert absent({5: address}, limit=0.0) == ([], [5])
        assert explain([5], [None] * 5 + [address], limit=0.0).startswith(
            "no answer from rank 5 (node7): a machine"
        )
        for connection in full:
            connection.close()


def test_a_long_list_of_ranks_is_cut(ranks: list[Presence]) -> None:
    text = explain(list(range(20)), [ranks[0].address] * 20, limit=0.0)
    assert f"7 ({HOST}) and 12 more, whose processes exist" in text


def test_the_address_is_that_towards_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_ip("127.0.0.1") == own_ip("") == "127.0.0.1"
    monkeypatch.setattr("dgc.comm.presence.own_ip", Mock(side_effect=OSError("Name or service not known")))
    assert Presence().address is None
