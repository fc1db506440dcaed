"""The states of a rank on its disk."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import patient

from dgc import atomic_write
from dgc.groups.disk import Disk, Saved
from dgc.groups.messages import Tag

CPU = torch.device("cpu")


def state(round: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"z0": torch.full((3,), float(round))}


def of(round: int) -> Saved:
    return Saved("run", Tag(round, 100 + round))


def disk(folder: Path, told: list[str] | None = None) -> Disk:
    return Disk(folder, 0, (told if told is not None else list[str]()).append)


def test_the_last_two_states_are_kept(tmp_path: Path) -> None:
    own = disk(tmp_path)
    for round in (1, 2, 3):
        own.save(of(round), state(round))
    own.wait()
    again = disk(tmp_path)
    assert again.saved() == [of(3), of(2)]
    for round in (2, 3):
        found = again.load(of(round), CPU)
        assert found is not None and found["z0"].tolist() == 3 * [round]
    assert again.load(of(1), CPU) is None


def test_a_state_that_is_not_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill, or on a full disk. It is said."""
    told: list[str] = []
    own = disk(tmp_path, told)
    own.save(of(1), state(1))
    own.wait()
    monkeypatch.setattr(atomic_write, "open", lambda at, mode: open("/dev/full", mode), raising=False)
    own.save(of(2), state(2))
    own.wait()
    assert disk(tmp_path).saved() == [of(1)] and "round 2 is not saved: " in told[0]
    monkeypatch.undo()
    own.save(of(3), state(3))
    own.wait()
    assert disk(tmp_path).saved() == [of(3), of(1)]


@pytest.mark.parametrize("place", [0, 20, -9])
def test_a_damaged_file_is_not_used_and_said(place: int, tmp_path: Path) -> None:
    told: list[str] = []
    own = disk(tmp_path, told)
    own.save(of(1), state(1))
    own.wait()
    content = bytearray((tmp_path / "rank0.pt").read_bytes())
    content[place] ^= 1
    (tmp_path / "rank0.pt").write_bytes(content)
    assert all(own.load(saved, CPU) is None for saved in own.saved()) and told


def test_training_waits_for_the_copy_and_not_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, writes = threading.Event(), threading.Event()

    def take() -> dict[str, Any]:
        copies.wait(patient(10))
        return state(1)()

    monkeypatch.setattr("dgc.groups.disk.write_atomically", lambda path, write: writes.wait(patient(10)))
    own, done = disk(tmp_path), threading.Event()
    own.save(of(1), take)

    def change() -> None:
        own.before_a_change()
        done.set()

    waits = threading.Thread(target=change)
    waits.start()
    assert not done.wait(0.1)
    copies.set()
    assert done.wait(patient(5)) and not own.is_idle
    writes.set()
    own.wait()
    waits.join()
    assert own.is_idle
