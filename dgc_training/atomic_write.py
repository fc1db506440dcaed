"""Writes files atomically. After a crash, a file has either its old or its new content."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Calls `write` with a temporary file beside `path`, flushes it to the disk and renames it to `path`.

    Raises:
        OSError: the file cannot be written, with the reason and `path`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # torch.save gets a file of Python, which raises what the system reports. Its own reports only a position.
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise OSError(reason.errno, reason.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException | None) -> OSError | None:
    """The error of the system that `error` is, or was raised after."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error
        error = error.__cause__ or error.__context__
    return None


def write_json(path: Path, content: Any) -> None:
    """Atomically replaces the file `path` with `content` as JSON."""
    write_atomically(path, lambda file: file.write((json.dumps(content, indent=2) + "\n").encode()))
