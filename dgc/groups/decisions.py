"""The file of a coordinator: a line with its state, and a line for each decision since then, with a checksum each.

A decision is added and flushed to the disk while all groups wait for it. It is one short write in place of a new
file. A line without its end was being written when the machine failed: nobody was told of it.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

from dgc.atomic_write import write_atomically
from dgc.groups.messages import Tag

_flush = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


class Decisions:
    """Keeps what a coordinator has decided in a file."""

    def __init__(self, file: Path):
        self._file = file
        self._open: int | None = None

    def load(self) -> dict[str, Any] | None:
        """What was stored last. None: there is no file.

        Raises:
            ValueError: The file is damaged.
        """
        if not self._file.exists():
            return None
        first, *lines = self._file.read_bytes().split(b"\n")
        try:
            state = dict(_opened(first))
            added = [_opened(line) for line in lines[:-1]]  # the last one has no end, or nothing
        except ValueError as error:
            raise ValueError(
                f"{self._file} has the decisions of the run, and is damaged or of another version: {error}"
            ) from error
        return {**state, "line": [*state["line"], *added]}

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace all that is stored."""
        self.close()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        line = _sealed(state)
        write_atomically(self._file, lambda file: file.write(line))
        self._open = os.open(self._file, os.O_WRONLY | os.O_APPEND)

    def add(self, tag: Tag) -> None:
        """Add a decision to the state that was saved. It is on the disk when this returns."""
        assert self._open is not None, "no state was saved"
        line = _sealed(tag)
        while line:
            line = line[os.write(self._open, line) :]
        _flush(self._open)

    def close(self) -> None:
        if self._open is not None:
            os.close(self._open)
            self._open = None


def _sealed(content: Any) -> bytes:
    text = json.dumps(content).encode()
    return b"%s %08x\n" % (text, crc32(text))


def _opened(line: bytes) -> Any:
    text, _, seal = line.rpartition(b" ")
    if b"%08x" % crc32(text) != seal:
        raise ValueError(f"the checksum of {line[:80]!r} does not fit")
    return json.loads(text)
