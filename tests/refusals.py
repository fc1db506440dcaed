"""What must be an error."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from cases import case


def check_refusals(*rows: tuple[Callable[[], object], str], kind: type[Exception] = ValueError) -> None:
    """Every function raises an error of this kind, in which the words are found."""
    for act, words in rows:
        with case(words), pytest.raises(kind, match=words):
            act()
            pytest.fail(f"not refused: {words}")


def refuse(words: str, act: Callable[..., object], *given: Any, **options: Any) -> None:
    """act(*given, **options) raises a ValueError in which the words are found."""
    check_refusals((partial(act, *given, **options), words))
