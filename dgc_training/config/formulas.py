"""Values that are computed from other values when they are read, so that they follow later files and overrides.

In addition to OmegaConf's `${train.optimizer.momentum}` there is one resolver, `${derive:"train.num_epochs - 5"}`.
A formula has numbers, config keys, + - * / // % **, min(...), max(...) and brackets.
"""

import math
import re
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dgc_training.errors import short

NUMBER = r"(?:(?:0|[1-9]\d*(?:_\d+)*)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_KEY = re.compile(r"\b(?!(?:True|False|None)\b)[^\W\d]\w*(?:\.\w+)*")
_TOKEN = re.compile(rf"(?P<key>{_KEY.pattern})|(?P<number>{NUMBER})|[-+*/%(),\s]")
_GLOBALS = {"__builtins__": {}, "min": min, "max": max}


def derived(formula: str) -> str:
    """A config value that is computed by `formula`: derived("max(1, train.num_epochs - train.warmup_lr_epochs)").

    The value of a single key, derived("train.optimizer.nesterov"), may have any type. In a formula, the values of
    keys must be numbers. Raises ValueError if the formula is not valid.
    """
    text = " ".join(formula.split())
    _compute(text, lambda key: math.nan)
    return f"${{{text}}}" if _KEY.fullmatch(text) else f'${{derive:"{text}"}}'


def is_formula(value: Any) -> bool:
    """Whether a value is computed when it is read. `???` is a value that is not set yet."""
    return isinstance(value, str) and ("${" in value or value == "???")


def number(text: str) -> int | float:
    """The value of a text that matches `NUMBER`, perhaps with a sign."""
    return float(text) if set(text) & set(".eEfF") else int(text)


def _compute(formula: str, read: Callable[[str], Any]) -> Any:
    """The value of a formula. `read` returns the value of a key. Raises ValueError if it is not arithmetic."""
    if len(formula) > 1000:
        raise ValueError(f"{short(repr(formula))} is too long")
    values: dict[str, Any] = {}

    def name(token: re.Match[str]) -> str:
        """The name in `values` that stands for a number or a key."""
        if token.lastgroup is None or token[0] in _GLOBALS:
            return token[0]
        values[f"_{len(values)}"] = read(token[0]) if token["key"] else number(token[0])
        return f" _{len(values) - 1} "

    try:
        if _TOKEN.sub("", formula):
            raise TypeError("not arithmetic")
        # `eval` gets operators, brackets, min, max and the names in `values`, and nothing else.
        code = compile(_TOKEN.sub(name, formula).strip(), "<formula>", "eval")
        # With floats 9**9**9 is an error. With integers it would exhaust the memory.
        eval(code, _GLOBALS, {key: float(value) for key, value in values.items()})
        result = eval(code, _GLOBALS, values) + 0
        if isinstance(result, complex):
            raise ValueError(f"{short(repr(formula))} is not a real number")
        return result
    except ZeroDivisionError:
        raise ValueError(f"{short(repr(formula))} divides by zero") from None
    except OverflowError:
        raise ValueError(f"{short(repr(formula))} is too large") from None
    except (SyntaxError, TypeError):
        known = "config keys, numbers, + - * / // % **, min(...) and max(...)"
        raise ValueError(f"{short(repr(formula))} is not made of {known}") from None


def _derive(formula: str, *, _root_: DictConfig) -> Any:
    """The resolver. OmegaConf reports any exception with the key of the formula."""

    def read(key: str) -> Any:
        value = OmegaConf.select(_root_, key, default=_root_)
        if value is _root_:
            raise ValueError(f"Interpolation key '{key}' not found")  # OmegaConf's message for ${key}
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{key} is {short(repr(value))}, not a number")
        return value

    derived(formula)
    return _compute(formula, read)


OmegaConf.register_resolver("derive", _derive, replace=True, annotation_validation="off")
