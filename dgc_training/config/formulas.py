"""Values that are computed from other values when they are read, so that they follow later files and overrides.

In addition to OmegaConf's `${train.optimizer.momentum}` there is one resolver, `${derive:"train.num_epochs - 5"}`.
A formula has numbers, config keys, + - * / // % **, min(...), max(...) and brackets. It is computed from its
syntax tree and never executed as code.
"""

import ast
import math
import operator
import re
from collections.abc import Callable
from threading import Lock
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dgc_training.config.errors import short


def _power(base: Any, exponent: Any) -> Any:
    """base ** exponent. 9**9**9 is an error, so that it does not exhaust the memory."""
    if exponent * math.log2(abs(base) + 1) > 4096:  # bits
        raise ValueError(f"{short(base)} ** {short(exponent)} is too large")
    return base**exponent


_OPERATORS: dict[type[ast.AST], Callable[..., Any]]
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_OPERATORS |= {ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: _power}
_OPERATORS |= {ast.USub: operator.neg, ast.UAdd: operator.pos}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max}
# CPython before 3.12 has one recursion depth for all threads that build syntax trees (gh-106905).
_PARSING = Lock()
_ABSENT = object()


def derived(formula: str) -> str:
    """A config value that is computed by `formula`: derived("max(1, train.num_epochs - train.warmup_lr_epochs)").

    The value of a single key, derived("train.optimizer.nesterov"), may have any type. In a formula, the values of
    keys must be numbers. Raises ValueError if the formula is not valid.
    """
    try:
        expression = _parse(formula)
    except RecursionError:
        raise ValueError(f"{short(repr(formula))} is too long") from None
    if isinstance(expression, ast.Name | ast.Attribute):
        return f"${{{ast.unparse(expression)}}}"
    return f'${{derive:"{" ".join(formula.split())}"}}'


def is_formula(value: Any) -> bool:
    """Whether a value is computed when it is read. `???` is a value that is not set yet."""
    return isinstance(value, str) and ("${" in value or value == "???")


def _parse(formula: str) -> ast.expr:
    """The syntax tree of a formula. Its form is checked by computing it with NaN as the value of every key."""
    try:
        with _PARSING:
            expression = ast.parse(formula.strip(), mode="eval").body
        _value(expression, lambda key: math.nan)
    except (SyntaxError, TypeError, MemoryError):
        raise ValueError(
            f"{short(repr(formula))} is not made of config keys, numbers, + - * / // % **, min(...) and max(...)"
        ) from None
    return expression


def _value(expression: ast.expr, read: Callable[[str], Any]) -> Any:
    """Computes a formula. Raises TypeError if it is not arithmetic."""
    match expression:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.Name() | ast.Attribute() if re.fullmatch(r"[\w.]+", key := ast.unparse(expression)):
            return read(key)
        case ast.BinOp(left=left, op=symbol, right=right) if type(symbol) in _OPERATORS:
            return _OPERATORS[type(symbol)](_value(left, read), _value(right, read))
        case ast.UnaryOp(op=symbol, operand=operand) if type(symbol) in _OPERATORS:
            return _OPERATORS[type(symbol)](_value(operand, read))
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as items, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name]([_value(item, read) for item in items])
    raise TypeError("not arithmetic")


def _derive(formula: str, *, _root_: DictConfig) -> Any:
    """The resolver. OmegaConf reports any exception with the key of the formula."""

    def read(key: str) -> Any:
        value = OmegaConf.select(_root_, key, default=_ABSENT)
        if value is _ABSENT:
            raise ValueError(f"Interpolation key '{key}' not found")  # OmegaConf's message for ${key}
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{key} is {short(repr(value))}, not a number")
        return value

    return _value(_parse(formula), read)


OmegaConf.register_resolver("derive", _derive, replace=True, annotation_validation="off")
