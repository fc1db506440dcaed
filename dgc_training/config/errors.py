"""The one error of the configs, and what its messages are made of."""

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """What a user wrote in a config file or on the command line cannot work; it says where and why."""


def together(problems: Sequence[str]) -> ConfigError:
    """One error with all problems, each once: a single one as it is, several one per line."""
    distinct = list(dict.fromkeys(problems))
    if len(distinct) == 1:
        return ConfigError(distinct[0])
    return ConfigError("\n  ".join([f"{len(distinct)} errors in the config:", *distinct]))


def short(value: object, most: int = 80) -> str:
    """A value as a message shows it: at most `most` characters, "..." for the rest."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def closest(name: str, names: Iterable[str], show: int = 12) -> str:
    """'; closest: a, b', or the names themselves where none is close and they are few, or ''."""
    known = list(dict.fromkeys(str(other) for other in names))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if near:
        return f"; closest: {', '.join(near)}"
    return f"; there are: {', '.join(known)}" if 0 < len(known) <= show else ""
