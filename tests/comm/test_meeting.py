"""A call that only some ranks make is an error that names the others, with simulated ranks."""

from typing import Any

import pytest

from dgc.comm import meeting
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.meeting import meet


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LIMIT", 0.02)
    monkeypatch.setattr(meeting, "LIMIT_OF_RANK_0", 0.1)


def errors(callers: set[int], size: int = 3, timeout: float | None = None) -> list[str]:
    """What each rank's call ends with, if only these ranks make it."""

    def body(transport: Any) -> str:
        transport.timeout = timeout
        if transport.rank in callers:
            try:
                meet(transport, "save()", "Call it everywhere")
            except RuntimeError as error:
                return str(error)
        return ""

    return LockstepWorld(size).run(body)


def test_ranks_that_all_call_go_on() -> None:
    assert errors({0, 1, 2}) == ["", "", ""]


@pytest.mark.parametrize(
    ("callers", "missing"), [({0}, ["ranks 1, 2"]), ({1, 2}, ["rank 0", "rank 0"]), ({0, 1}, ["rank", "rank 0"])]
)
def test_ranks_that_wait_name_those_that_have_not_called(callers: set[int], missing: list[str]) -> None:
    found = [error for error in errors(callers) if error]
    for rank, of, error in zip(sorted(callers), missing, found, strict=True):
        assert error.startswith(f"rank {rank} has called save() and waited for 0 seconds") and of in error
        assert "every rank must call it. Call it everywhere." in error and "connect(timeout=seconds)" in error


def test_the_time_limit_of_the_transport_comes_first() -> None:
    with pytest.warns(UserWarning, match="rank 0 has called save"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "WARN", 0.05)
        (error, *_) = errors({0}, timeout=0.1)
    assert "without an answer from ranks 1, 2" in error


def test_a_single_rank_meets_nobody() -> None:
    assert errors({0}, size=1) == [""]
