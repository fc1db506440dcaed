"""Warnings that point at the line of the user, and not at the line of the library that has found the reason."""

import sys
import warnings
from types import FrameType

NOT_THE_USER = {"dgc", "torch", "contextlib", "functools", "threading"}


def warn(message: str) -> None:
    """Warn, at the innermost line of the stack that is the user's.

    A line in dgc or torch says little, and Python shows a warning once for each line. A thread of torch has no
    line of the user: then it is the caller's. Python 3.12 does this with skip_file_prefixes.
    """
    here = sys._getframe(1)
    frame: FrameType | None = here
    while frame is not None and _package(frame) in NOT_THE_USER:
        frame = frame.f_back
    at = here if frame is None else frame
    registry = at.f_globals.setdefault("__warningregistry__", {})
    name = at.f_globals.get("__name__", "sys")
    warnings.warn_explicit(message, UserWarning, at.f_code.co_filename, at.f_lineno, name, registry)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
