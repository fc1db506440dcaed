"""Files that have either their old or their new content."""

import errno
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from dgc import atomic_write
from dgc.atomic_write import write_atomically


def test_a_written_file_has_the_new_content_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    write_atomically(path, lambda file: file.write(b"new"))
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write(file: Any) -> None:
        file.write(b"ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, write)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_named_and_keeps_the_old_file(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """torch.save alone reports an unexpected position."""
    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(atomic_write, "open", lambda at, mode: open("/dev/full", mode), raising=False)
    for content in ({"x": torch.zeros(100_000)}, {"x": 1}):
        with pytest.raises(OSError, match=f"No space left on device: '{path}'") as caught:
            write_atomically(path, partial(torch.save, content))
        assert caught.value.errno == errno.ENOSPC
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
