"""Replica groups in processes of their own, which are killed, stopped and started again."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import warm
from environment import patient, python_path
from groups.sites import Post, post, until
from parallel.processes import free_port, send

TESTS = Path(__file__).parents[1]
WORKER = str(Path(__file__).with_name("groups_worker.py"))


class Process:
    """A group, each of whose ranks is a process of its own."""

    def __init__(self, led: Post, number: int, folder: Path, kind: str = "plain", ranks: int = 1):
        self.output = folder / f"group{number}.txt"
        self._seen = self.output.stat().st_size if self.output.exists() else 0
        words = [warm.python(), WORKER, led.address, str(number), str(folder / f"state{number}"), kind]
        own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(TESTS)}
        if ranks > 1:
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
            own |= {"LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "0"}
        self._ranks = ranks
        self._processes = []
        with open(self.output, "ab") as file:
            for rank in range(ranks):
                variables = own | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})
                options: Any = {"stdout": file, "stderr": subprocess.STDOUT, "env": variables}
                self._processes.append(subprocess.Popen(words, start_new_session=True, **options))

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What this start has told."""
        text = self.output.read_bytes()[self._seen :].decode()
        return [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "round" in line]

    @property
    def round(self) -> int:
        return int(self.rounds[-1]["round"]) if self.rounds else -1

    def send(self, number: int) -> None:
        """Send a signal to all ranks."""
        pids = [line["pid"] for line in self.lines if "pid" in line]
        assert len(pids) == self._ranks
        for pid in pids:
            send(pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        for process in self._processes:
            process.wait(patient(4))


@pytest.fixture
def led(tmp_path: Path) -> Iterator[Post]:
    with post(tmp_path, grace=patient(0.5), timeout=patient(15), lost=patient(0.75), beat=0.25) as own:
        yield own


@pytest.fixture
def start(led: Post, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts groups, which are killed at the end of the test."""
    started: list[Process] = []

    def begin(number: int, **options: Any) -> Process:
        started.append(Process(led, number, tmp_path, **options))
        return started[-1]

    yield begin
    for process in started:
        with suppress(AssertionError):
            process.send(signal.SIGCONT)
            process.kill()


def until_round(processes: Sequence[Process], more: int = 2, members: int | None = None) -> None:
    """Wait until all have taken part in more rounds, with so many members."""
    first = max(process.round for process in processes) + more

    def reached() -> bool:
        return all(
            process.round >= first and (members is None or process.rounds[-1]["members"] == members)
            for process in processes
        )

    try:
        until(reached)
    except AssertionError:
        text = "".join(f"\n--- {p.output.name}\n{p.output.read_text()[-2500:]}" for p in processes)
        raise AssertionError(f"no round {first} with {members} members:{text}") from None


def check_equal_states(processes: Sequence[Process]) -> None:
    """Every committed state has one digest, in all groups and in all their starts."""
    found: dict[tuple[int, int], int] = {}
    for process in processes:
        for line in process.rounds:
            tag = line["round"], line["attempt"]
            assert found.setdefault(tag, line["digest"]) == line["digest"], f"another state of round {tag[0]}"
    assert len(found) > 3


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
