"""Validation of arguments. An error names the wrong one."""

from numbers import Integral, Real
from typing import Any

NUMBER, WHOLE, FLAG = (Real,), (Integral,), (bool,)
NOTHING = (type(None),)


def require(expected: str, kinds: tuple[Any, ...], **arguments: Any) -> None:
    """Raises ValueError for the first argument that is not an instance of any of `kinds`.

    True and False do not count as numbers, and a class does not count as an instance. expected: the kinds in
    words.
    """
    for name, value in arguments.items():
        is_flag = isinstance(value, bool) and bool not in kinds
        if is_flag or isinstance(value, type) or not isinstance(value, kinds):
            raise ValueError(f"{name} must be {expected}, not {value!r}")
