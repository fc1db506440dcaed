"""Replica groups in processes of their own, which are killed, stopped and started again."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from environment import patient
from groups.sites import Post, post
from parallel.grouped import Process, check_equal_states, until_round


@pytest.fixture
def led(tmp_path: Path) -> Iterator[Post]:
    with post(tmp_path, grace=patient(0.5), timeout=patient(15), lost=patient(0.75), beat=0.25) as own:
        yield own


@pytest.fixture
def start(led: Post, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts groups, which are killed at the end of the test."""
    started: list[Process] = []

    def begin(number: int, **options: Any) -> Process:
        started.append(Process(led.address, number, tmp_path, **options))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


KINDS = [("plain", 1), ("ddp", 2), ("fsdp", 2)]


@pytest.mark.parametrize(("kind", "ranks"), KINDS, ids=[kind for kind, _ in KINDS])
def test_groups_go_on_without_one_that_is_killed_and_it_returns(
    kind: str, ranks: int, led: Post, start: Callable[..., Process]
) -> None:
    groups = [start(number, kind=kind, ranks=ranks) for number in range(2)]
    until_round(groups, members=2)
    third = start(2, kind=kind, ranks=ranks)
    until_round([*groups, third], members=3)
    third.kill()
    until_round(groups, members=2)
    again = start(2, kind=kind, ranks=ranks)
    until_round([*groups, again], members=3)
    check_equal_states([*groups, third, again])
    limit = led.settings.grace + led.settings.timeout
    assert all(group.rounds[-1]["longest"] <= limit for group in groups)


def test_groups_go_on_without_one_that_is_stopped_and_it_returns(led: Post, start: Callable[..., Process]) -> None:
    groups = [start(number) for number in range(3)]
    until_round(groups, members=3)
    groups[1].send(signal.SIGSTOP)
    until_round([groups[0], groups[2]], members=2)
    groups[1].send(signal.SIGCONT)
    until_round(groups, members=3)
    check_equal_states(groups)
