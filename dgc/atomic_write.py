"""Writes files atomically: after a crash, a file has either its old or its new content."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Call `write` with a temporary file beside `path`, flush it to the disk and rename it to `path`.

    Raises:
        OSError: The file cannot be written, with the reason and `path`.
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
