"""The one error of the configs, and the suggestions in its messages."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """What a user wrote in a config file or on the command line cannot work; it says where and why."""


def closest(name: str, names: Iterable[str], show: int = 12) -> str:
    """'; closest: a, b', or the names themselves where none is close and they are few, or ''."""
    known = list(dict.fromkeys(str(other) for other in names))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if near:
        return f"; closest: {', '.join(near)}"
    return f"; there are: {', '.join(known)}" if 0 < len(known) <= show else ""
