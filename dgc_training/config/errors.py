"""The exception for errors in configs, and functions that collect and format its messages."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


class ConfigError(ValueError):
    """An error in a config file or on the command line. The message has its location and its cause."""


@contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Context manager that adds the message of a ConfigError to `problems`."""
    try:
        yield
    except ConfigError as error:
        problems.append(str(error))


def together(problems: Sequence[str]) -> ConfigError:
    """Combines problems into one error, without duplicates: a single one unchanged, several one per line."""
    distinct = list(dict.fromkeys(problems))
    if len(distinct) == 1:
        return ConfigError(distinct[0])
    return ConfigError("\n  ".join([f"{len(distinct)} errors in the config:", *distinct]))


def short(value: object, most: int = 80) -> str:
    """The text of a value, cut to at most `most` characters with "..." at the end."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def closest(name: str, names: Iterable[str], show: int = 12) -> str:
    """'; closest: a, b'. If no name is close: all names if there are at most `show`, otherwise ''."""
    known = list(dict.fromkeys(str(other) for other in names))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if near:
        return f"; closest: {', '.join(near)}"
    return f"; there are: {', '.join(known)}" if 0 < len(known) <= show else ""
