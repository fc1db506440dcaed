"""Types of arguments, checked where an object is built: a wrong one gets an error that names it."""

from numbers import Integral, Real
from typing import Any

NUMBER, WHOLE, FLAG = (Real,), (Integral,), (bool,)
NOTHING = (type(None),)


def require(expected: str, kinds: tuple[Any, ...], **arguments: Any) -> None:
    """ValueError for the first argument that is an instance of none of `kinds`.

    True and False are no numbers, and a class is not an instance. expected: the kinds in words.
    """
    for name, value in arguments.items():
        is_flag = isinstance(value, bool) and bool not in kinds
        if is_flag or isinstance(value, type) or not isinstance(value, kinds):
            raise ValueError(f"{name} must be {expected}, not {value!r}")
