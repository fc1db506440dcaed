"""The last two committed states of a rank, on its disk. They are written while training goes on.

All ranks of a group save the same rounds: they save one only if each of them has written the one before. When a
group begins again, some ranks may have the last one and others not yet, but all have one of the two.
"""

import io
import json
import os
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import torch

from dgc.atomic_write import write_atomically
from dgc.core.state import check_mapping
from dgc.groups.messages import Tag

MAGIC = b"dgc.groups 3\n"
SEAL = 32  # bytes of a SHA-256


class Saved(NamedTuple):
    """Which state a file has."""

    run: str
    tag: Tag


class Disk:
    """Saves states in a thread.

    Args:
        folder: Of the files.
        place: Of this rank in its group.
        log: Called with what has failed, for people.

    Attributes:
        last: What was saved last by this process.
    """

    def __init__(self, folder: Path, place: int, log: Callable[[str], None]):
        self._file, self._before = folder / f"rank{place}.pt", folder / f"rank{place}.before.pt"
        self._log = log
        self._taken = Event()
        self._taken.set()
        self._thread: Thread | None = None
        self.last: Saved | None = None

    @property
    def is_idle(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def save(self, what: Saved, take: Callable[[], Mapping[str, Any]]) -> None:
        """Begin to save a state, after the one before is written. take: returns a copy, in another thread."""
        self.wait()
        self.last = what
        self._taken.clear()
        self._thread = Thread(target=self._save, args=(what, take), name="dgc-disk", daemon=True)
        self._thread.start()

    def before_a_change(self) -> None:
        """Wait until the state that is being saved was copied."""
        self._taken.wait()

    def wait(self) -> None:
        """Wait until all is written."""
        if self._thread is not None:
            self._thread.join()

    def _save(self, what: Saved, take: Callable[[], Mapping[str, Any]]) -> None:
        try:
            state = take()
        finally:
            self._taken.set()
        head, data = json.dumps(what).encode() + b"\n", pack(state)
        seal = _seal(head, data)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            if self._file.exists():
                os.replace(self._file, self._before)
            write_atomically(self._file, lambda file: file.writelines((MAGIC, head, seal, data)))
        except OSError as error:
            self._log(f"round {what.tag.round} is not saved: {error}")

    def saved(self) -> list[Saved]:
        """What the files have, as their first lines say: the newest first."""
        found = [saved for file in (self._file, self._before) if (saved := self._head_of(file)) is not None]
        return sorted(found, key=lambda saved: saved.tag, reverse=True)

    def _head_of(self, path: Path) -> Saved | None:
        if not path.exists():
            return None
        try:
            with open(path, "rb") as file:
                if file.readline(len(MAGIC)) != MAGIC:
                    raise ValueError("it has another version")
                run, tag = json.loads(file.readline())
                return Saved(str(run), Tag(*map(int, tag)))
        except (OSError, ValueError, TypeError) as error:
            self._log(f"{path} is not used: {error}")
            return None

    def load(self, what: Saved, device: torch.device) -> dict[str, Any] | None:
        """The state of a file. None: it is damaged."""
        for path in (self._file, self._before):
            if self._head_of(path) != what:
                continue
            _, head, rest = path.read_bytes().split(b"\n", 2)
            seal, data = rest[:SEAL], rest[SEAL:]
            if _seal(head + b"\n", data) == seal:
                return unpack(data, device)
            self._log(f"{path} is damaged, and not used")
        return None


def _seal(*parts: bytes) -> bytes:
    found = sha256()
    for part in parts:
        found.update(part)
    return found.digest()


def pack(content: Mapping[str, Any]) -> bytes:
    """A state as bytes, which `unpack` reads without running code of it."""
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    return buffer.getvalue()


def unpack(data: bytes | bytearray, device: torch.device) -> dict[str, Any]:
    """The content of `pack`. Raises ValueError if it is damaged."""
    try:
        content = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
    except Exception as error:
        raise ValueError(f"the state of a member is damaged: {error}") from error
    check_mapping("the state of a member", content)
    return dict(content)
