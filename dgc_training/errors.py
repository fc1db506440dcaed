"""The exception for mistakes in configs, and functions that collect and word its messages."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """A mistake in a config file or on the command line. The message has its location and its cause."""


@contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Context manager that adds the message of a ConfigError to `problems`."""
    try:
        yield
    except ConfigError as error:
        problems.append(str(error))


def raise_together(problems: Iterable[str]) -> None:
    """Raises one ConfigError for all problems, each named once. Does nothing if there are none."""
    if lines := list(dict.fromkeys(problems)):
        heading = [f"{len(lines)} errors in the config:"] if len(lines) > 1 else []
        raise ConfigError("\n  ".join(heading + lines))


def short(value: object, most: int = 80) -> str:
    """The text of a value, cut to at most `most` characters with "..." at the end."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def closest(name: str, names: Iterable[str], show: int = 12) -> str:
    """'; closest: a, b'. If no name is close: all names if there are at most `show`, otherwise ''."""
    known = list(dict.fromkeys(map(str, names)))
    if near := difflib.get_close_matches(name, known, n=3):
        return f"; closest: {', '.join(near)}"
    return f"; there are: {', '.join(known)}" if 0 < len(known) <= show else ""
