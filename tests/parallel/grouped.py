"""Replica groups as processes, what they tell, and what must hold of it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import warm
from environment import patient, python_path
from groups.sites import until
from parallel.processes import free_port, send

TESTS = Path(__file__).parents[1]
WORKER = str(Path(__file__).with_name("groups_worker.py"))


class Process:
    """A group, each of whose ranks is a process of its own."""

    def __init__(
        self,
        address: str,
        number: int,
        folder: Path,
        kind: str = "plain",
        ranks: int = 1,
        inside: Callable[[list[str]], list[str]] | None = None,
    ):
        """inside: of a command, the one that runs it on another machine. None: a fork here."""
        self.number, self.output = number, folder / f"group{number}.txt"
        self._seen = self.output.stat().st_size if self.output.exists() else 0
        words = [WORKER, address, str(number), str(folder / f"state{number}"), kind]
        words = [warm.python(), *words] if inside is None else inside([sys.executable, *words])
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

    @staticmethod
    def told_in(output: Path, start: int = 0) -> Callable[[], list[dict[str, Any]]]:
        """A function that returns what is told in a file, from a byte on."""

        def told() -> list[dict[str, Any]]:
            text = output.read_bytes()[start:].decode()
            return [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]

        return told

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What this start has told."""
        return self.told_in(self.output, self._seen)()

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "round" in line]

    @property
    def round(self) -> int:
        return int(self.rounds[-1]["round"]) if self.rounds else -1

    @property
    def is_alive(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def send(self, number: int) -> None:
        """Send a signal to all ranks."""
        pids = [line["pid"] for line in self.lines if "pid" in line]
        assert len(pids) == self._ranks
        for pid in pids:
            send(pid, number)

    def kill(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and with it what it stands for
        for process in self._processes:
            process.wait(patient(4))


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
        text = "".join(f"\n--- {p.output.name}\n{end_of(p.output.read_text())}" for p in processes)
        raise AssertionError(f"no round {first} with {members} members:{text}") from None


def end_of(text: str) -> str:
    """The first errors in an output, and its last lines."""
    errors = "\n".join(line for line in text.splitlines() if line and not line.startswith("{"))
    return f"{errors[:4000]}\n...\n{text[-1000:]}"


def check_equal_states(processes: Sequence[Process]) -> None:
    """Every committed state has one digest, in all groups and in all their starts."""
    found: dict[tuple[int, int], int] = {}
    for process in processes:
        for line in process.rounds:
            tag = line["round"], line["attempt"]
            assert found.setdefault(tag, line["digest"]) == line["digest"], f"another state of round {tag[0]}"
    assert len(found) > 3
