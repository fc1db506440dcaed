"""Cases that one test goes through: the one that fails is named."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*values: object) -> Iterator[None]:
    """Names the case in the error of what fails within it."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"in the case {', '.join(map(str, values))}") from error
