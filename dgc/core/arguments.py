"""Validation of arguments. An error names the wrong one."""

import inspect
from collections.abc import Callable
from functools import wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

NUMBER, WHOLE, FLAG = (Real,), (Integral,), (bool,)
NOTHING = (NoneType,)
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    NoneType: "None",
    Callable: "a function",
}


def require(expected: str, kinds: tuple[Any, ...], /, least: float | None = None, **arguments: Any) -> None:
    """Raises ValueError for the first argument that is not an instance of any of `kinds`, or less than `least`.

    True and False are no numbers, and a class is no instance. expected: the kinds, and `least`, in words.
    """
    for name, value in arguments.items():
        is_flag = isinstance(value, bool) and bool not in kinds
        is_kind = isinstance(value, kinds) and not isinstance(value, type) and not is_flag
        if not is_kind or (least is not None and not value >= least):
            raise ValueError(f"{name} must be {expected}, not {value!r}")


T = TypeVar("T", bound=Callable[..., Any])


def checked(target: T) -> T:
    """Decorator of a class or function whose arguments must be of the annotated types.

    True and False do not count as numbers, nor does NaN. Elements of containers are not checked.

    Raises:
        ValueError: By a call, for the first argument that is of another type. The message names it.
    """
    function = vars(target).get("__init__", target) if isinstance(target, type) else target
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        hints = get_type_hints(function)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if name in hints and not _fits(value, hints[name]):
                raise ValueError(f"{name} must be {_in_words(hints[name])}, not {value!r}")
        return function(*args, **kwargs)

    if not isinstance(target, type):
        return cast(T, call)
    target.__init__ = call  # type: ignore[misc]
    return target


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if hint is Any:
        return True
    if hint in (int, float):
        kind = Integral if hint is int else Real
        return isinstance(value, kind) and not isinstance(value, bool) and value == value
    kind = get_origin(hint) or hint
    if kind is Callable:
        return callable(value)
    return not isinstance(kind, type) or (isinstance(value, kind) and not isinstance(value, type))


def _in_words(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_in_words, get_args(hint)))
    kind = get_origin(hint) or hint
    return _WORDS.get(kind) or f"a {getattr(kind, '__name__', kind)}"
