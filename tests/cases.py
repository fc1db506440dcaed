"""Cases that one test goes through: the one that fails is named."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def case(*values: object) -> Iterator[None]:
    """Names the case in the error of what fails within it."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"in the case {', '.join(map(str, values))}") from error


def at_every_size(rows: Iterable[Any], sizes: Iterable[int]) -> Callable[[Callable[[Any, int], None]], Any]:
    """A decorator of a test of a row and a size: one test for each row, of all sizes that it takes."""

    def decorated(test: Callable[[Any, int], None]) -> Any:
        def of_row(row: Any) -> None:
            for size in filter(row.takes, sizes):
                with case(size, "ranks"):
                    test(row, size)

        of_row.__name__, of_row.__doc__ = test.__name__, test.__doc__
        return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)(of_row)

    return decorated
