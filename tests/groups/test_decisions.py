"""The file of a coordinator, and what is left of it after a failure."""

import os
from pathlib import Path

import pytest

from dgc.groups.decisions import Decisions
from dgc.groups.messages import Tag

STATE = {"run": "a", "line": [[0, 0]]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "decisions.json"


def stored(file: Path, *tags: Tag) -> Decisions:
    own = Decisions(file)
    own.save(STATE)
    for tag in tags:
        own.add(tag)
    return own


def test_decisions_are_loaded_after_those_of_the_state(file: Path) -> None:
    stored(file, Tag(1, 5), Tag(2, 7))
    assert Decisions(file).load() == {"run": "a", "line": [[0, 0], [1, 5], [2, 7]]}


def test_without_a_file_nothing_was_stored(file: Path) -> None:
    assert Decisions(file).load() is None


def test_a_state_replaces_what_was_added(file: Path) -> None:
    own = stored(file, Tag(1, 5))
    own.save({"run": "b", "line": []})
    own.add(Tag(9, 9))
    assert Decisions(file).load() == {"run": "b", "line": [[9, 9]]}


@pytest.mark.parametrize("cut", range(1, 17))
def test_a_line_without_its_end_was_told_to_nobody(cut: int, file: Path) -> None:
    own = stored(file, Tag(1, 5))
    whole = file.read_bytes()
    own.add(Tag(2, 7))
    assert len(file.read_bytes()) - len(whole) == 16
    file.write_bytes(file.read_bytes()[:-cut])
    assert Decisions(file).load() == {"run": "a", "line": [[0, 0], [1, 5]]}


@pytest.mark.parametrize("place", [2, -3, -12, -20])
def test_a_damaged_file_is_refused(place: int, file: Path) -> None:
    stored(file, Tag(1, 5), Tag(2, 7))
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="has the decisions of the run, and is damaged"):
        Decisions(file).load()


def test_a_decision_that_is_not_written_raises(file: Path) -> None:
    """The coordinator ends before it tells anybody."""
    own = stored(file)
    own._open = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError):
        own.add(Tag(1, 5))
    own.close()
