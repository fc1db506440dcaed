"""Values that are computed from other values when they are read, so that they follow later files and overrides.

In addition to OmegaConf's `${train.optimizer.momentum}` there is one resolver, `${derive:"train.num_epochs - 5"}`.
A formula has numbers, config keys, + - * / // % **, min(...), max(...) and brackets. It is computed from its
syntax tree and never executed as code.
"""

import ast
import operator
from collections.abc import Callable
from contextvars import ContextVar
from threading import Lock
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dgc_training.config.errors import closest, short

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max}
# CPython before 3.12 has one recursion depth for all threads that build syntax trees (gh-106905).
_PARSING = Lock()
_LARGEST_POWER = 4096  # bits; 9**9**9 in a config is then an error and does not exhaust the memory


def derived(formula: str) -> str:
    """A config value that is computed by `formula`: derived("max(1, train.num_epochs - train.warmup_lr_epochs)").

    The value of a single key, derived("train.optimizer.nesterov"), may have any type. In a formula, the values of
    keys must be numbers. Raises ValueError if the formula is not valid.
    """
    expression = _parse(formula)
    if isinstance(expression, ast.Name | ast.Attribute):
        return f"${{{_key(expression)}}}"
    return f'${{derive:"{" ".join(formula.split())}"}}'


def keys_of(tree: DictConfig) -> list[str]:
    """The dotted names of all keys, for suggestions."""
    names: list[str] = []

    def walk(node: Any, prefix: str) -> None:
        for key, value in node.items():
            names.append(f"{prefix}{key}")
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")

    walk(OmegaConf.to_container(tree), "")
    return names


def _parse(formula: str) -> ast.expr:
    """The syntax tree. It contains only what `_value` supports."""
    wrong = ValueError(
        f"{short(repr(formula))} is not made of config keys, numbers, + - * / // % **, min(...) and max(...)"
    )
    try:
        with _PARSING:
            expression = ast.parse(formula.strip(), mode="eval").body
        _value(expression, lambda key: 1, dry=True)
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        raise wrong from None
    return expression


def _key(expression: ast.expr) -> str:
    if isinstance(expression, ast.Name):
        return expression.id
    if isinstance(expression, ast.Attribute):
        return f"{_key(expression.value)}.{expression.attr}"
    raise TypeError("no key")


def _value(expression: ast.expr, read: Callable[[str], Any], dry: bool = False) -> Any:
    """Computes the formula; `dry` only checks its form. Raises TypeError if the form is not supported."""
    match expression:
        case ast.Constant(value=bool()):
            raise TypeError("a truth value is no number")
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name() | ast.Attribute():
            return read(_key(expression))
        case ast.BinOp(left=left, op=symbol, right=right) if type(symbol) in _OPERATORS:
            return _apply(_OPERATORS[type(symbol)], [_value(left, read, dry), _value(right, read, dry)], dry)
        case ast.UnaryOp(op=symbol, operand=operand) if type(symbol) in _OPERATORS:
            return _apply(_OPERATORS[type(symbol)], [_value(operand, read, dry)], dry)
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as items, keywords=[]) if name in _FUNCTIONS:
            return _apply(_FUNCTIONS[name], [[_value(item, read, dry) for item in items]], dry)
    raise TypeError("not arithmetic")


def _apply(function: Callable[..., Any], arguments: list[Any], dry: bool) -> Any:
    if dry:
        return 1
    if function is operator.pow:
        base, exponent = arguments
        if abs(exponent) * max(1, int(abs(base)).bit_length()) > _LARGEST_POWER:
            raise ValueError(f"{short(base)} ** {short(exponent)} is too large")
    return function(*arguments)


def _derive(formula: str, *, _root_: DictConfig, _node_: Any) -> Any:
    """The resolver. OmegaConf reports any exception with the key of the formula."""
    above = _IN_PROGRESS.get()
    if id(_node_) in above:
        raise RecursionError("it refers back to itself")

    def read(key: str) -> Any:
        value = OmegaConf.select(_root_, key, default=_ABSENT)
        if value is _ABSENT:
            raise ValueError(f"there is no key {key!r}{closest(key, keys_of(_root_))}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{key} is {short(repr(value))}, not a number")
        return value

    token = _IN_PROGRESS.set(above | {id(_node_)})
    try:
        return _value(_parse(formula), read)
    finally:
        _IN_PROGRESS.reset(token)


_ABSENT = object()
_IN_PROGRESS: ContextVar[frozenset[int]] = ContextVar("formulas", default=frozenset())
OmegaConf.register_resolver("derive", _derive, replace=True, annotation_validation="off")
