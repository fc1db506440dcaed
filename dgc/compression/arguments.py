"""Validation of arguments. An error names the wrong one."""

from numbers import Integral, Real
from typing import Any

NUMBER, WHOLE, FLAG = (Real,), (Integral,), (bool,)
NOTHING = (type(None),)


def require(expected: str, kinds: tuple[Any, ...], /, least: float | None = None, **arguments: Any) -> None:
    """Raises ValueError for the first argument that is not an instance of any of `kinds`, or less than `least`.

    True and False do not count as numbers, and a class does not count as an instance. expected: the kinds, and
    `least`, in words.
    """
    for name, value in arguments.items():
        is_flag = isinstance(value, bool) and bool not in kinds
        is_kind = isinstance(value, kinds) and not isinstance(value, type) and not is_flag
        if not is_kind or (least is not None and not value >= least):
            raise ValueError(f"{name} must be {expected}, not {value!r}")
