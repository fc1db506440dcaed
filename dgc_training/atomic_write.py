"""Writes files atomically. After a crash, a file has either its old or its new content."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` with a temporary file beside `path`, flushes it to the disk and renames it to `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """Atomically replaces the file `path` with `content` as JSON."""
    write_atomically(path, lambda temporary: temporary.write_text(json.dumps(content, indent=2) + "\n"))
